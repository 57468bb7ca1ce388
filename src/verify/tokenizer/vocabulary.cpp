// What tokenizer.json says of itself: tokens that no merge makes, merges that come before what they join, ids that a template
// has otherwise, and a normalizer that leaves no text for a part of the vocabulary.
#include <algorithm>
#include <unordered_map>

#include "core/text.h"
#include "tokenizer/byte_level.h"
#include "verify/tokenizer/files.h"

namespace w4q::verify {
namespace {

using io::Json;

/// Both parts of a merge, in either way of writing them; empty: neither.
std::pair<std::string, std::string> parts_of(const Json& merge) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  if (!merge.is_string()) return {};
  const auto text = merge.get<std::string>();
  const size_t space = text.find(' ', 1);
  return space == std::string::npos ? std::pair<std::string, std::string>()
                                    : std::pair(text.substr(0, space), text.substr(space + 1));
}

/// Of UTF-8.
int64_t characters_in(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

/// Texts become what merges make of their characters, also where whole words are looked up first.
void tokens_without_merges(const TokenTable& table, std::vector<std::string>& faults) {
  constexpr size_t fewest = 256;
  const Json& model = member(table.json, "model");
  const Json& merges = member(model, "merges");
  if (!merges.is_array()) return;
  std::unordered_map<std::string, size_t> made;  // → the first merge that makes it
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto [left, right] = parts_of(merges[rank]);
    if (left.empty()) return;
    made.emplace(left + right, rank);
  }
  size_t joined = 0, lost = 0;
  std::string first;
  for (const auto& [id, text] : table.texts) {
    const bool byte = text.starts_with("<0x") && text.ends_with(">");
    if (table.added.contains(id) || byte || characters_in(text) < 2) continue;
    ++joined;
    if (made.contains(text)) continue;
    ++lost;
    if (first.empty()) first = text;
  }
  if (joined >= fewest && 4 * lost > joined) {
    faults.push_back(concat("tokenizer.json: no merge makes ", lost, " of ", joined, " tokens, the first is \"",
                            printable(first), "\": merges are missing"));
    return;
  }
  size_t early = 0;
  std::string example;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto [left, right] = parts_of(merges[rank]);
    const auto is_later = [&](const std::string& part) {
      const auto found = made.find(part);
      return found != made.end() && found->second > rank;
    };
    if (!is_later(left) && !is_later(right)) continue;
    ++early;
    if (example.empty()) example = concat("merge ", rank, " joins \"", printable(left), "\" and \"", printable(right));
  }
  if (merges.size() >= fewest && 4 * early > merges.size())
    faults.push_back(concat("tokenizer.json: ", early, " of ", merges.size(), " merges join what later ones make (",
                            example, "\"): they are in another order"));
}

/// Ids are ranks of merges, scores or counts, never places in an alphabet.
void ids_by_alphabet(const TokenTable& table, std::vector<std::string>& faults) {
  constexpr size_t fewest = 1000;
  size_t pairs = 0, ascending = 0;
  const std::string* before = nullptr;
  for (const auto& [id, text] : table.texts) {
    if (table.added.contains(id)) continue;
    if (before != nullptr) ++pairs, ascending += *before < text;
    before = &text;
  }
  if (pairs < fewest || 100 * ascending < 98 * pairs) return;
  faults.push_back(concat("tokenizer.json: the ids of ", pairs + 1, " tokens follow the alphabet: they were numbered ",
                          "anew, the embeddings were not"));
}

/// The 256 letters that stand for bytes, by their code points.
std::vector<std::string> letters_for_bytes() {
  std::vector<std::string> letters(256);
  for (size_t byte = 0; byte < letters.size(); ++byte) {
    tokenizer::append_byte_level(std::string(1, static_cast<char>(byte)), letters[byte]);
  }
  std::ranges::sort(letters);
  return letters;
}

/// Where letters for bytes have ids in a row, these follow their code points; and what merges make stands behind them.
void letters_of_bytes(const TokenTable& table, const Json& merges, std::vector<std::string>& faults) {
  const auto sorted = letters_for_bytes();
  std::vector<std::string> letters;
  std::vector<int64_t> ids;
  for (const auto& [id, text] : table.texts) {
    if (!table.added.contains(id) && std::ranges::binary_search(sorted, text))
      letters.push_back(text), ids.push_back(id);
  }
  if (letters.size() != sorted.size() || ids.back() - ids.front() + 1 != std::ssize(ids)) return;
  std::vector<size_t> moved;
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (letters[i] != sorted[i]) moved.push_back(i);
  }
  if (moved.size() == 2) {
    faults.push_back(concat("tokenizer.json: \"", printable(letters[moved[0]]), "\" and \"",
                            printable(letters[moved[1]]),
                            "\" have each other's ids: all other letters for bytes follow ", "their code points"));
  }
  const auto before = table.texts.find(ids.front() - 1);
  if (before == table.texts.end() || table.added.contains(before->first) || !merges.is_array()) return;
  const auto makes = [&](const Json& merge) {
    const auto [left, right] = parts_of(merge);
    return left + right == before->second;
  };
  if (std::ranges::none_of(merges, makes)) return;
  faults.push_back(concat("tokenizer.json: id ", before->first, " is \"", printable(before->second),
                          "\", which a merge makes, before all letters for bytes: ids are off by one"));
}

void expect_id(const TokenTable& table, const Json& text, const Json& id, std::vector<std::string>& faults) {
  if (!text.is_string() || !id.is_number_integer()) return;
  const auto found = table.ids.find(text.get<std::string>());
  if (found != table.ids.end() && found->second == id.get<int64_t>()) return;
  faults.push_back(concat("tokenizer.json: its post_processor adds ", id.dump(), " as \"",
                          printable(text.get<std::string>()), "\", which ",
                          found == table.ids.end() ? "is no token" : concat("has the id ", found->second)));
}

/// What is put around texts has the ids that the vocabulary says.
void ids_of_template(const TokenTable& table, const Json& processor, std::vector<std::string>& faults) {
  const Json& parts = member(processor, "processors");
  for (size_t i = 0; parts.is_array() && i < parts.size(); ++i) ids_of_template(table, parts[i], faults);
  const Json& special = member(processor, "special_tokens");
  if (special.is_object()) {
    for (const auto& [name, token] : special.items()) {
      const Json &ids = member(token, "ids"), &texts = member(token, "tokens");
      for (size_t i = 0; ids.is_array() && texts.is_array() && i < std::min(ids.size(), texts.size()); ++i)
        expect_id(table, texts[i], ids[i], faults);
    }
  }
  for (const char* key : {"cls", "sep"}) {
    const Json& pair = member(processor, key);
    if (pair.is_array() && pair.size() == 2) expect_id(table, pair[0], pair[1], faults);
  }
}

bool lowers(const Json& normalizer) {
  const Json& parts = member(normalizer, "normalizers");
  if (parts.is_array() && std::ranges::any_of(parts, lowers)) return true;
  return member(normalizer, "type") == "Lowercase" ||
         (member(normalizer, "type") == "BertNormalizer" && member(normalizer, "lowercase") == true);
}

/// A vocabulary that was learnt behind a normalizer has no capitals left.
void capitals_behind_lowercase(const TokenTable& table, std::vector<std::string>& faults) {
  constexpr size_t fewest = 32, one_in = 20;
  if (!lowers(member(table.json, "normalizer"))) return;
  size_t capitals = 0, all = 0;
  std::string first;
  for (const auto& [id, text] : table.texts) {
    if (table.added.contains(id)) continue;
    ++all;
    if (std::ranges::none_of(text, [](char c) { return c >= 'A' && c <= 'Z'; })) continue;
    ++capitals;
    if (first.empty() && text.size() > 2) first = text;
  }
  if (capitals < fewest || one_in * capitals < all) return;
  faults.push_back(concat("tokenizer.json: its normalizer writes all letters small, and ", capitals, " of ", all,
                          " tokens have capitals, as \"", printable(first), "\": no text becomes them"));
}

}  // namespace

void add_contradictions_of_vocabulary(const TokenTable& table, std::vector<std::string>& faults) {
  const Json& model = member(table.json, "model");
  const Json& merges = member(model, "merges");
  if (const Json& type = member(model, "type"); type == "BPE") {
    tokens_without_merges(table, faults);
    ids_by_alphabet(table, faults);
    letters_of_bytes(table, merges, faults);
  } else if (type.is_string() && merges.is_array() && !merges.empty()) {
    faults.push_back(concat("tokenizer.json: its model is ", printable(type.dump()), " and has ", merges.size(),
                            " merges, as BPE alone has them"));
  }
  ids_of_template(table, member(table.json, "post_processor"), faults);
  capitals_behind_lowercase(table, faults);
}

}  // namespace w4q::verify
