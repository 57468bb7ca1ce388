// Codes to values by tables in shared memory: a look-up gives the 16-bit values of a pair of codes, ready as a register
// of mma's A operand. Lanes have their own copies in their own banks, so that look-ups of 32 random indices take one
// pass (two or four where fewer copies fit).
#pragma once

#include <cstdint>

#include "device/fragment.cuh"

namespace w4q::kernels::kbit {

/// Where the copies stand, in a table of 64 KB or 32 KB. At 2 to 4 bits the index of an entry is a byte of a code word
/// as it stands; with entries 256 bytes apart one byte permutation makes the address, and at 128 bytes a shift follows.
/// At 3 bits the byte's two upper bits do not matter, at 2 bits an entry is two pairs. At 5 bits an index has 10 bits.
template <int bits, int kilobytes>
struct PairTable {
  static constexpr int total_bytes = kilobytes * 1024;
  static constexpr int entries = bits == 5 ? 1024 : 256;
  static constexpr int stride = total_bytes / entries;
  static constexpr int pairs_per_entry = bits == 2 ? 2 : 1;
  static constexpr int copies = stride / (4 * pairs_per_entry) < 32 ? stride / (4 * pairs_per_entry) : 32;
  static constexpr int entry_bytes = copies * 4 * pairs_per_entry;
  static_assert(kilobytes == 32 || kilobytes == 64);

  /// This lane's place in an entry, in bytes.
  __device__ static uint32_t lane_offset() { return threadIdx.x % copies * (4 * pairs_per_entry); }

  /// Fills the table from the codebook [2^bits], times `factor`; all warps of the block. Each lane holds one level
  /// and gives it to the others by shuffles, so that only one load waits for memory.
  template <class Type>
  __device__ static void fill(char* table, const float* codebook, float factor) {
    constexpr int levels = 1 << bits;
    constexpr int lanes_per_entry = entry_bytes / 16;
    constexpr int entries_per_step = 32 / lanes_per_entry;
    const int lane = threadIdx.x % 32;
    const float level = codebook[lane % levels] * factor;
    const auto value = [&](int code) { return __shfl_sync(0xFFFFFFFFu, level, code % levels); };
#pragma unroll 1
    for (int first = threadIdx.x / 32 * entries_per_step; first < entries;
         first += blockDim.x / 32 * entries_per_step) {
      const int entry = first + lane / lanes_per_entry;
      const uint32_t even = Type::pack(value(entry), value(entry >> bits));
      uint32_t odd = even;
      if constexpr (pairs_per_entry == 2) odd = Type::pack(value(entry >> (2 * bits)), value(entry >> (3 * bits)));
      *reinterpret_cast<uint4*>(table + entry * stride + lane % lanes_per_entry * 16) =
          make_uint4(even, odd, even, odd);
    }
  }
};

/// One lane's view of the table: the four A registers of an mma step from the words of a row tile (`bits` of them).
template <int bits, int kilobytes>
class LanePairs {
 public:
  __device__ explicit LanePairs(const char* shared) : table_(shared) {}

  /// The view of a table `bytes` further on, between the entries of this one (2 to 4 bits).
  __device__ LanePairs moved(uint32_t bytes) const {
    LanePairs result = *this;
    result.lane_ += bytes << shift;
    return result;
  }

  /// `words(i)` is word i of the row tile.
  template <class Words>
  __device__ void step(const Words& words, int step, uint32_t (&a)[4]) const {
    if constexpr (bits == 2) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const auto pairs = entry<uint2>(words(step / 2), 2 * (step % 2) + upper);
        a[2 * upper] = pairs.x;
        a[2 * upper + 1] = pairs.y;
      }
    } else if constexpr (bits == 5) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        constexpr uint32_t mask = (Table::entries - 1) * Table::stride;
        const uint32_t offset = device::and_or(wide_index(words, 4 * step + reg), mask, lane_);
        a[reg] = *reinterpret_cast<const uint32_t*>(table_ + offset);
      }
    } else {
      look_up(indices(words, step), a);
    }
  }

  /// 3 and 4 bits: a word whose bytes are the indices of a step's pairs, and what stands there.
  template <class Words>
  __device__ static uint32_t indices(const Words& words, int step) {
    return bits == 3 && step == 3 ? top_pairs(words) : words(step);
  }
  __device__ void look_up(uint32_t indices, uint32_t (&a)[4]) const {
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) a[reg] = entry<uint32_t>(indices, reg);
  }

 private:
  using Table = PairTable<bits, kilobytes>;
  static constexpr int shift = kilobytes == 64 ? 0 : 1;

  const char* table_;
  uint32_t lane_ = Table::lane_offset() << (bits == 5 ? 0 : shift);

  /// The entry whose index is byte `byte` of `word`.
  template <class Value>
  __device__ Value entry(uint32_t word, int byte) const {
    return *reinterpret_cast<const Value*>(table_ + (__byte_perm(word, lane_, 0x5504u | byte << 4) >> shift));
  }

  /// 3 bits: the four pairs whose bits stand two by two at the top of the bytes of three words, a byte each.
  template <class Words>
  __device__ static uint32_t top_pairs(const Words& words) {
    const uint32_t low = device::select_bits(words(0) >> 6, words(1) >> 4, 0x03030303u);
    return device::select_bits(low, words(2) >> 2, 0x0F0F0F0Fu);
  }

  /// 5 bits: a word that has the index of a pair where it is to be multiplied with the stride.
  template <class Words>
  __device__ static uint32_t wide_index(const Words& words, int pair) {
    constexpr int at = kilobytes == 64 ? 6 : 5;
    if (pair < 15) {
      const uint32_t word = words(pair / 3);
      return pair % 3 == 0 ? word << at : word >> (10 * (pair % 3) - at);
    }
    uint32_t index = words(0) >> (30 - at);
#pragma unroll
    for (int j = 1; j < 5; ++j) {
      index = device::select_bits(index, words(j) >> (30 - at - 2 * j), (1u << (at + 2 * j)) - 1);
    }
    return index;
  }
};

}  // namespace w4q::kernels::kbit
