#include "gguf/pre_tokenizers.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "core/text.h"

namespace w4q::gguf {
namespace {

using io::Json;

// The patterns in the order in which tokenizer.json files of these models have them.
constexpr std::string_view contractions = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|)";
constexpr std::string_view words = R"([^\r\n\p{L}\p{N}]?\p{L}+|)";
constexpr std::string_view rest = R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view cased_words =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)";
constexpr std::string_view marked_words = R"([^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|)";
constexpr std::string_view rest_with_marks = R"(| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view contracted_words =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)";
constexpr std::string_view rest_with_slash = R"(| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

Json byte_level(bool use_regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}

Json sequence(Json first, Json second) {
  return {{"type", "Sequence"}, {"pretokenizers", Json::array({std::move(first), std::move(second)})}};
}

Json split(const std::string& pattern) {
  const Json step = {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  return sequence(step, byte_level(false));
}

const std::vector<GgufPreTokenizer>& rows() {
  static const std::vector<GgufPreTokenizer> table = {
      {"llama-bpe", true, true, nullptr, split(concat(contractions, words, R"(\p{N}{1,3})", rest))},
      {"qwen2", false, false, {{"type", "NFC"}}, split(concat(contractions, words, R"(\p{N})", rest))},
      {"qwen35",
       false,
       false,
       {{"type", "NFC"}},
       split(concat(contractions, marked_words, R"(\p{N})", rest_with_marks))},
      {"gpt-4o", false, false, nullptr, split(concat(contracted_words, R"(\p{N}{1,3})", rest_with_slash))},
      {"tekken", true, true, nullptr, split(concat(cased_words, R"(\p{N})", rest_with_slash))},
      {"gpt-2", false, false, nullptr, byte_level(true)},
      {"smollm", false, false, nullptr, sequence({{"type", "Digits"}, {"individual_digits", true}}, byte_level(true))},
  };
  return table;
}

constexpr std::array<std::pair<std::string_view, std::string_view>, 3> other_names{{
    {"llama3", "llama-bpe"},
    {"llama-v3", "llama-bpe"},
    {"deepseek-r1-qwen", "qwen2"},
}};

/// Two spellings of one component become one: keys in order, a sequence of one step is that step, defaults are written
/// out, and what only concerns offsets into the text is left out.
nlohmann::json canonical(const Json& component) {
  if (component.is_array()) {
    nlohmann::json list = nlohmann::json::array();
    for (const auto& each : component) list.push_back(canonical(each));
    return list;
  }
  if (!component.is_object()) return nlohmann::json::parse(component.dump());
  for (const char* steps : {"pretokenizers", "normalizers"}) {
    const auto list = component.find(steps);
    if (list != component.end() && list->is_array() && list->size() == 1) return canonical(list->front());
  }
  nlohmann::json result = nlohmann::json::object();
  for (const auto& [key, value] : component.items()) {
    if (key != "trim_offsets") result[key] = canonical(value);
  }
  if (result.value("type", nlohmann::json()) == "ByteLevel" && !result.contains("use_regex"))
    result["use_regex"] = true;
  return result;
}

}  // namespace

const GgufPreTokenizer* find_gguf_pre_tokenizer(std::string_view name) {
  for (const auto& [other, usual] : other_names) {
    if (name == other) name = usual;
  }
  const auto row = std::ranges::find(rows(), name, &GgufPreTokenizer::name);
  return row == rows().end() ? nullptr : &*row;
}

const GgufPreTokenizer* match_gguf_pre_tokenizer(const Json& normalizer, const Json& pre_tokenizer) {
  for (const auto& row : rows()) {
    if (same_component(row.normalizer, normalizer) && same_component(row.pre_tokenizer, pre_tokenizer)) return &row;
  }
  return nullptr;
}

bool same_component(const Json& a, const Json& b) { return canonical(a) == canonical(b); }

std::string gguf_pre_tokenizer_names() {
  std::vector<std::string> names;
  for (const auto& row : rows()) names.emplace_back(row.name);
  return join(names);
}

}  // namespace w4q::gguf
