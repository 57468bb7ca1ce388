#include "verify/tokenizer/files.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "core/text.h"

namespace w4q::verify {
namespace {

namespace fs = std::filesystem;
using io::Json;

/// A table of fewer merges says too little of its order.
constexpr size_t least_merges = 256;

class TokenizerFiles {
 public:
  TokenizerFiles(const fs::path& folder, const Json& config)
      : folder_(folder),
        config_(config),
        names_(read_object(folder / "tokenizer_config.json")),
        table_(fs::exists(folder / "tokenizer.json") ? io::read_json(folder / "tokenizer.json", io::max_tokenizer_bytes)
                                                     : Json()) {}

  /// `encodes`: whether the tokenizer is of a kind that is read.
  std::vector<std::string> contradictions(bool encodes) {
    if (json_.is_null()) {
      look_for_files();
      return std::move(faults_);
    }
    if (encodes) {
      look_at_merges();
      look_at_bytes();
      look_at_template();
      for (const char* file : {"config.json", "generation_config.json"}) look_at_end(file);
    }
    add_contradictions_of_vocabulary(table_, faults_);
    add_contradictions_of_names(folder_, config_, table_, faults_);
    return std::move(faults_);
  }

 private:
  /// A class that reads tokenizer.json or makes it of other files, of which there is none.
  void look_for_files() {
    const Json& name = member(names_, "tokenizer_class");
    if (!name.is_string() || !name.get<std::string>().ends_with("Fast")) return;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      const std::string file = entry.path().filename().string();
      const bool table = file.ends_with(".model") || file.ends_with(".tiktoken") || file.starts_with("vocab") ||
                         file.starts_with("merges") || file.ends_with(".vocab") || file.ends_with(".txt");
      if (table) return;
    }
    faults_.push_back(concat("tokenizer.json is missing: tokenizer_config.json says ",
                             printable(name.get<std::string>()), ", and there is no other file with a vocabulary"));
  }

  /// The ids that merges make, in their order; empty where the table is not of one merge for each.
  std::vector<int64_t> made_ids() const {
    std::vector<int64_t> made;
    for (const Json& merge : member(member(json_, "model"), "merges")) {
      std::string text;
      if (merge.is_string()) {
        text = merge.get<std::string>();
        const size_t space = text.find(' ', 1);
        if (space == std::string::npos) return {};
        text.erase(space, 1);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        text = merge[0].get<std::string>() + merge[1].get<std::string>();
      } else {
        return {};
      }
      const auto id = ids_.find(text);
      if (id == ids_.end()) return {};
      made.push_back(id->second);
    }
    return made;
  }

  /// Whoever learns merges numbers what they make in their order.
  void look_at_merges() {
    const auto made = made_ids();
    if (made.size() < least_merges) return;
    if (std::ranges::is_sorted(made)) return look_at_gaps(made);
    std::vector<int64_t> first(made.size());
    for (size_t i = 0; i < made.size(); ++i) first[i] = made[i] - static_cast<int64_t>(i);
    std::vector<int64_t> ordered = first;
    std::ranges::nth_element(ordered, ordered.begin() + static_cast<std::ptrdiff_t>(ordered.size() / 2));
    const int64_t usual = ordered[ordered.size() / 2];
    std::vector<size_t> moved;
    for (size_t i = 0; i < made.size(); ++i) {
      if (first[i] != usual) moved.push_back(i);
    }
    if (moved.size() > 2 || first.front() != usual || first.back() != usual) return;
    faults_.push_back(concat("tokenizer.json: merge ", moved[0], " makes id ", made[moved[0]],
                             ", those around it make ", made[moved[0] - 1], " and ", made[moved[0] + 1],
                             ": its token is exchanged with another"));
  }

  /// … one after the other: a token in a gap has lost its merge, or stands where none of its kind does.
  void look_at_gaps(const std::vector<int64_t>& made) {
    std::vector<int64_t> missing;
    for (size_t i = 1; i < made.size(); ++i) {
      for (int64_t id = made[i - 1] + 1; id < made[i] && missing.size() < 4; ++id) missing.push_back(id);
    }
    if (missing.empty() || missing.size() > 2) return;
    for (const int64_t id : missing) {
      const auto text = texts_.find(id);
      if (text == texts_.end() || added_.contains(id)) continue;
      faults_.push_back(concat("tokenizer.json: no merge makes id ", id, ", \"", printable(text->second),
                               "\", though one makes each of those around it"));
    }
  }

  static bool has_byte_level(const Json& component) {
    if (component.is_object()) {
      if (member(component, "type") == "ByteLevel") return true;
      return std::ranges::any_of(component, has_byte_level);
    }
    return component.is_array() && std::ranges::any_of(component, has_byte_level);
  }

  /// What is written as letters for bytes is read so, and the other way round.
  void look_at_bytes() {
    if (member(member(json_, "model"), "type") != "BPE") return;
    const bool writes = has_byte_level(member(json_, "pre_tokenizer")) || has_byte_level(member(json_, "normalizer"));
    const bool reads = has_byte_level(member(json_, "decoder"));
    if (writes == reads) return;
    faults_.push_back(concat("tokenizer.json: the decoder ", reads ? "reads" : "does not read",
                             " letters that stand for bytes (ByteLevel), the pre-tokenizer ",
                             reads ? "does not write" : "writes", " them"));
  }

  /// Two of three against one: what stands first in each text is what config.json begins with.
  void look_at_template() {
    const auto bos = config_.find("bos_token_id");
    const auto named = token_text(member(names_, "bos_token"));
    if (bos == config_.end() || !bos->is_number_integer() || !named) return;
    const auto first = first_of_template(member(json_, "post_processor"));
    if (!first || *first == *named || !ids_.contains(*named)) return;
    const auto id = ids_.find(*first);
    if (id == ids_.end() || id->second != bos->get<int64_t>()) return;
    faults_.push_back(concat("tokenizer_config.json: bos_token is \"", printable(*named),
                             "\", tokenizer.json begins with \"", printable(*first), "\", and so does config.json (",
                             id->second, ")"));
  }

  static std::optional<std::string> first_of_template(const Json& processor) {
    if (!processor.is_object()) return std::nullopt;
    for (const Json& part : member(processor, "processors")) {
      if (auto found = first_of_template(part)) return found;
    }
    const Json& single = member(processor, "single");
    if (!single.is_array() || single.empty()) return std::nullopt;
    const Json& id = member(member(single[0], "SpecialToken"), "id");
    return id.is_string() ? std::optional(id.get<std::string>()) : std::nullopt;
  }

  /// Nobody ends with a piece of a word where the tokenizer has a token for it.
  void look_at_end(const char* file) {
    const Json read = read_object(folder_ / file);
    const Json& stated = member(read, "eos_token_id");
    std::vector<int64_t> ends;
    for (const Json& id : stated.is_array() ? stated : Json::array({stated})) {
      if (id.is_number_integer()) ends.push_back(id.get<int64_t>());
    }
    const auto named = token_text(member(names_, "eos_token"));
    if (ends.empty() || !named) return;
    const auto eos = ids_.find(*named);
    if (eos == ids_.end() || !added_.contains(eos->second)) return;
    const bool words =
        std::ranges::all_of(ends, [&](int64_t id) { return texts_.contains(id) && !added_.contains(id); });
    if (!words) return;
    faults_.push_back(concat(file, ": eos_token_id is ", ends.front(), ", the text \"",
                             printable(texts_.at(ends.front())), "\"; by tokenizer_config.json texts end with \"",
                             printable(*named), "\", ", eos->second));
  }

  const fs::path& folder_;
  const Json& config_;
  Json names_;
  TokenTable table_;
  const Json& json_ = table_.json;
  const std::unordered_map<std::string, int64_t>& ids_ = table_.ids;
  const std::map<int64_t, std::string>& texts_ = table_.texts;
  const std::set<int64_t>& added_ = table_.added;
  std::vector<std::string> faults_;
};

}  // namespace

Json read_object(const fs::path& file) {
  if (!fs::exists(file)) return Json::object();
  Json json = io::read_json(file, file.filename() == "tokenizer.json" ? io::max_tokenizer_bytes : io::max_config_bytes);
  return json.is_object() ? json : Json::object();
}

const Json& member(const Json& json, const char* key) {
  static const Json nothing;
  const auto found = json.is_object() ? json.find(key) : json.end();
  return json.is_object() && found != json.end() ? *found : nothing;
}

std::optional<std::string> token_text(const Json& token) {
  const Json& text = token.is_object() ? member(token, "content") : token;
  return text.is_string() ? std::optional(text.get<std::string>()) : std::nullopt;
}

TokenTable::TokenTable(Json tokenizer) : json(std::move(tokenizer)) {
  const auto add = [&](const std::string& text, const Json& id, bool special) {
    if (!id.is_number_integer()) return;
    ids.emplace(text, id.get<int64_t>());
    texts.emplace(id.get<int64_t>(), text);
    if (special) added.insert(id.get<int64_t>());
  };
  for (const Json& token : member(json, "added_tokens")) {
    if (const auto text = token_text(token)) add(*text, member(token, "id"), true);
  }
  const Json& vocabulary = member(member(json, "model"), "vocab");
  if (vocabulary.is_object()) {
    for (const auto& [text, id] : vocabulary.items()) add(text, id, false);
  }
  // Of a unigram model pairs of text and score, whose places are the ids.
  for (size_t id = 0; vocabulary.is_array() && id < vocabulary.size(); ++id) {
    const Json& pair = vocabulary[id];
    if (pair.is_array() && !pair.empty() && pair[0].is_string()) add(pair[0].get<std::string>(), id, false);
  }
}

std::vector<std::string> contradictions_of_tokenizer(const fs::path& folder, const Json& config, bool encodes) {
  return TokenizerFiles(folder, config).contradictions(encodes);
}

}  // namespace w4q::verify
