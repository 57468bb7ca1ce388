// The merges of a BPE model: which neighbouring tokens become one, and in which order.
#pragma once

#include <cstdint>
#include <vector>

namespace w4q::tokenizer {

struct Merge {
  static constexpr uint32_t no_rank = UINT32_MAX;
  uint32_t rank = no_rank;  ///< position in the file: the lowest merges first
  int32_t id = -1;          ///< the token that the pair becomes
};

/// A hash table with open addressing: two cache lines for a lookup, where std::unordered_map needs a walk.
class MergeTable {
 public:
  /// Room for `count` merges.
  explicit MergeTable(size_t count = 0) : slots_(room_for(count)) {}

  /// Sets the merge of a pair; a later one replaces it. At most `count` different pairs.
  void set(int32_t left, int32_t right, Merge merge) noexcept {
    Slot& slot = slots_[find(key_of(left, right))];
    slot = {key_of(left, right), merge};
  }
  /// The merge of a pair; its rank is no_rank when there is none.
  Merge get(int32_t left, int32_t right) const noexcept { return slots_[find(key_of(left, right))].merge; }

 private:
  struct Slot {
    uint64_t key = UINT64_MAX;  ///< of no pair: ids are not negative
    Merge merge;
  };

  static size_t room_for(size_t count) noexcept {
    size_t room = 2;
    while (room < 2 * count) room *= 2;
    return room;
  }
  static uint64_t key_of(int32_t left, int32_t right) noexcept {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  size_t find(uint64_t key) const noexcept {
    uint64_t hash = (key ^ key >> 29) * 0xBF58476D1CE4E5B9U;
    hash ^= hash >> 32;
    size_t at = hash & (slots_.size() - 1);
    while (slots_[at].key != key && slots_[at].key != UINT64_MAX) at = (at + 1) & (slots_.size() - 1);
    return at;
  }

  std::vector<Slot> slots_;
};

}  // namespace w4q::tokenizer
