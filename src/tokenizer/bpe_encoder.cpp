#include <algorithm>
#include <bit>
#include <functional>

#include "core/error.h"
#include "core/text.h"
#include "text/utf8.h"
#include "tokenizer/bpe.h"

namespace w4q::tokenizer {
namespace {

constexpr size_t max_cached_words = 1 << 15;
/// Longer words hardly repeat.
constexpr size_t max_cached_bytes = 128;

}  // namespace

BpeEncoder::BpeEncoder(const Bpe& bpe, size_t text_bytes)
    : bpe_(bpe), cache_(std::bit_ceil(std::clamp<size_t>(text_bytes / 8, 1, max_cached_words))) {}

void BpeEncoder::encode(std::string_view word, std::vector<int32_t>& ids) {
  if (word.size() > INT32_MAX) {
    throw Error(ErrorCode::bad_argument, concat("a text of ", word.size(), " bytes is too long for one word"))
        .detail("this tokenizer does not cut text into words")
        .hint("encode it in parts");
  }
  CachedWord* cached = nullptr;
  if (word.size() <= max_cached_bytes) {
    cached = &cache_[std::hash<std::string_view>{}(word) & (cache_.size() - 1)];
    if (cached->word == word) {
      ids.insert(ids.end(), cached->ids.begin(), cached->ids.end());
      return;
    }
  }
  const size_t before = ids.size();
  const auto whole = bpe_.ignore_merges_ ? bpe_.vocabulary_.id(word) : std::nullopt;
  if (whole) {
    ids.push_back(*whole);
  } else {
    split_into_symbols(word);
    merge_symbols();
    for (int32_t at = symbols_.empty() ? -1 : 0; at >= 0; at = symbols_[static_cast<size_t>(at)].next) {
      ids.push_back(symbols_[static_cast<size_t>(at)].id);
    }
  }
  if (cached) {
    cached->word = word;
    cached->ids.assign(ids.begin() + static_cast<std::ptrdiff_t>(before), ids.end());
  }
}

void BpeEncoder::add_symbol(int32_t id) {
  const auto position = static_cast<int32_t>(symbols_.size());
  symbols_.push_back({id, position - 1, position + 1, {}});
}

/// The reference's order is kept even where it is surprising: an unknown character waits for a known one, and bytes
/// that stand for other characters overtake it.
void BpeEncoder::split_into_symbols(std::string_view word) {
  symbols_.clear();
  int32_t waiting_unknown = -1;
  while (!word.empty()) {
    const std::string_view character = word.substr(0, text::utf8_size(word[0]));
    word.remove_prefix(character.size());
    const int32_t id = bpe_.id_of_character(character);
    if (id >= 0) {
      if (waiting_unknown >= 0) add_symbol(waiting_unknown);
      waiting_unknown = -1;
      add_symbol(id);
    } else if (!(bpe_.byte_fallback_ && fall_back_to_bytes(character)) && bpe_.unknown_token_) {
      if (waiting_unknown >= 0 && !bpe_.fuse_unknown_) add_symbol(waiting_unknown);
      waiting_unknown = unknown_id();
    }
  }
  if (waiting_unknown >= 0) add_symbol(waiting_unknown);
  if (!symbols_.empty()) symbols_.back().next = -1;
}

bool BpeEncoder::fall_back_to_bytes(std::string_view character) {
  const auto id_of = [&](char c) { return bpe_.id_of_byte_[static_cast<unsigned char>(c)]; };
  if (!std::all_of(character.begin(), character.end(), [&](char c) { return id_of(c) >= 0; })) return false;
  for (const char c : character) add_symbol(id_of(c));
  return true;
}

int32_t BpeEncoder::unknown_id() const {
  if (bpe_.unknown_id_ < 0) {
    throw Error(ErrorCode::bad_file, concat("tokenizer.json: the unknown token \"", printable(*bpe_.unknown_token_),
                                            "\" is not in the vocabulary, and the text has an unknown character"));
  }
  return bpe_.unknown_id_;
}

/// Merges the pair of the lowest rank, the leftmost of several, until none is left. Entries of the heap go stale when
/// a neighbour is merged away; the symbol itself knows the rank that holds.
void BpeEncoder::merge_symbols() {
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  };
  heap_.clear();
  for (size_t i = 0; i < symbols_.size(); ++i) consider(static_cast<int32_t>(i));
  std::make_heap(heap_.begin(), heap_.end(), later);
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const Candidate best = heap_.back();
    heap_.pop_back();
    if (symbols_[static_cast<size_t>(best.position)].merge.rank != best.rank) continue;
    const size_t settled = heap_.size();
    apply_merge(best.position);
    for (size_t size = settled + 1; size <= heap_.size(); ++size) {
      std::push_heap(heap_.begin(), heap_.begin() + static_cast<std::ptrdiff_t>(size), later);
    }
  }
}

void BpeEncoder::apply_merge(int32_t position) {
  Symbol& symbol = symbols_[static_cast<size_t>(position)];
  Symbol& right = symbols_[static_cast<size_t>(symbol.next)];
  symbol.id = symbol.merge.id;
  symbol.next = right.next;
  right.merge = {};
  if (symbol.next >= 0) symbols_[static_cast<size_t>(symbol.next)].previous = position;
  consider(position);
  if (symbol.previous >= 0) consider(symbol.previous);
}

/// Looks up the merge of a symbol with its neighbour anew; appends it to the heap's array if there is one.
void BpeEncoder::consider(int32_t position) {
  Symbol& symbol = symbols_[static_cast<size_t>(position)];
  symbol.merge = symbol.next < 0 ? Merge{} : bpe_.merges_.get(symbol.id, symbols_[static_cast<size_t>(symbol.next)].id);
  if (symbol.merge.rank != Merge::no_rank) heap_.push_back({symbol.merge.rank, position});
}

}  // namespace w4q::tokenizer
