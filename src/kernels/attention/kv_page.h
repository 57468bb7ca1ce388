// The KV cache on the GPU: pages of 16 tokens. A page of one layer holds, for each key head, a head page: 16 rows of
// codes, then the parameters of each row.
//
//   type  code of a row of d values                     parameters of a row            bytes a row, d = 128
//   f16   d × f16                                       –                              256
//   fp8   d × E4M3 of value / scale                     scale fp32 = absmax / 448      132
//   q4    groups of 32: round((value − least) / step)   step, least f16 per group      80
//   q4h   keys as q4 after a Walsh–Hadamard transform over d (which keeps products with queries that have had one)
//   fp4r  keys: groups of 16: E2M1 of value / scale     scale E4M3 = absmax / 6        72 + 128
//         and d × E4M3 of what is left / scale; values as with fp8                     132
//
// d is head_dim padded with zeros to 64, 128 or 256 (f16: or 512). A page of q4 has no rows: codes and parameters stand as the lanes
// of a warp read them (q4_key_word and what follows it). fp4r scatters the bits of a code (fp4_halfword) so that most
// of them stand where an f16 has them; what is left follows behind the parameters of all rows, so that it is not
// touched where a page is skipped.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/host_device.h"

namespace w4q::kernels {

enum class KvType { f16, fp8, q4, q4h, fp4r };
inline constexpr KvType kv_types[] = {KvType::f16, KvType::fp8, KvType::q4, KvType::q4h, KvType::fp4r};

/// "f16", "fp8", "q4", "q4h", "fp4r".
std::string_view to_string(KvType type) noexcept;
/// The inverse. Throws bad_argument and lists what exists.
KvType parse_kv_type(std::string_view word);

/// How a cache stores, and which of its pages a token skips.
struct KvChoice {
  KvType type = KvType::f16;
  /// fp4r: single tokens do not attend to pages of which every score stays this much (nats) below the largest one of
  /// the first page and the newest. Infinite: none.
  float delta = INFINITY;

  constexpr KvChoice() = default;
  constexpr KvChoice(KvType type_, float delta_ = INFINITY) : type(type_), delta(delta_) {}
  constexpr bool prunes() const { return type == KvType::fp4r && delta < INFINITY; }
};

inline constexpr int kv_page_tokens = 16;
inline constexpr int kv_group = 32;      ///< values of q4 that share step and least
inline constexpr int kv_fp4_group = 16;  ///< values of fp4r that share a scale
inline constexpr float kv_fp8_max = 448.0f;

/// The widest heads that every type holds; the fast kernels of attention take none beyond.
inline constexpr int kv_most_dim = 256;
/// Values of a row in the cache: head_dim padded to what the kernels are made for; 0 where it is too large (over 512).
/// Heads beyond kv_most_dim are held as f16 alone.
W4Q_HOST_DEVICE constexpr int kv_padded_dim(int64_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : head_dim <= 256 ? 256 : head_dim <= 512 ? 512 : 0;
}

/// How values are stored beside keys of a type.
W4Q_HOST_DEVICE constexpr KvType kv_value_type(KvType type) {
  return type == KvType::fp4r ? KvType::fp8 : type == KvType::q4h ? KvType::q4 : type;
}
/// The type whose bytes a page of keys has.
W4Q_HOST_DEVICE constexpr KvType kv_key_type(KvType type) { return type == KvType::q4h ? KvType::q4 : type; }
/// Whether keys, and the queries that meet them, are transformed (hadamard.cuh, over √d).
W4Q_HOST_DEVICE constexpr bool kv_transforms_keys(KvType type) { return type == KvType::q4h; }

/// Bytes of the codes of one row.
W4Q_HOST_DEVICE constexpr int kv_row_bytes(KvType type, int dim) {
  return type == KvType::f16 ? 2 * dim : type == KvType::fp8 ? dim : dim / 2;
}
/// Bytes of the parameters of one row.
W4Q_HOST_DEVICE constexpr int kv_parameter_bytes(KvType type, int dim) {
  switch (type) {
    case KvType::f16:
      return 0;
    case KvType::fp8:
      return 4;
    case KvType::q4:
    case KvType::q4h:
      return dim / kv_group * 4;
    default:
      return dim / kv_fp4_group;
  }
}
/// Bytes of what one row's codes leave, fp4r.
W4Q_HOST_DEVICE constexpr int kv_residual_bytes(KvType type, int dim) { return type == KvType::fp4r ? dim : 0; }

/// Bytes of a head page: keys or values of one key head, 16 tokens. A multiple of 16.
W4Q_HOST_DEVICE constexpr int kv_head_page_bytes(KvType type, int dim) {
  return kv_page_tokens * (kv_row_bytes(type, dim) + kv_parameter_bytes(type, dim) + kv_residual_bytes(type, dim));
}
/// The same of the values beside keys of this type.
W4Q_HOST_DEVICE constexpr int kv_value_page_bytes(KvType type, int dim) {
  return kv_head_page_bytes(kv_value_type(type), dim);
}

/// Byte `x` of the codes of a lane on a page of q4: lanes take 16 bytes in turn.
W4Q_HOST_DEVICE constexpr int q4_lane_byte(int lane, int x) { return (x / 16 * 32 + lane) * 16 + x % 16; }
/// Keys: lane 4g + t has tokens 2g and 2g + 1, and of every group s dims 32s + 8t … 32s + 8t + 7 in one word, dims 2j
/// and 2j + 1 of them as nibbles j and j + 4. This is the word of dims 8·word … of token `slot`.
W4Q_HOST_DEVICE constexpr int q4_key_word(int dim, int slot, int word) {
  return q4_lane_byte(slot / 2 * 4 + word % 4, slot % 2 * (dim / 8) + word / 4 * 4);
}
/// Values: lane 4g + t has tokens 4t … 4t + 3, and of every group s dims 32s + 4g … 32s + 4g + 3 in one halfword, a
/// nibble each. This is the halfword of dims 4·quad … of token `slot`.
W4Q_HOST_DEVICE constexpr int q4_value_halfword(int dim, int slot, int quad) {
  return q4_lane_byte(quad % 8 * 4 + slot / 4, slot % 4 * (dim / 16) + quad / 8 * 2);
}
/// Where a page of q4 keeps the steps of all rows, and behind them what is least.
W4Q_HOST_DEVICE constexpr int q4_steps_at(int dim) { return kv_page_tokens * dim / 2; }
W4Q_HOST_DEVICE constexpr int q4_least_at(int dim) { return q4_steps_at(dim) + kv_page_tokens * dim / kv_group * 2; }
W4Q_HOST_DEVICE constexpr int q4_key_step(int dim, int slot, int group) {
  return q4_steps_at(dim) + (slot * (dim / kv_group) + group) * 2;
}
W4Q_HOST_DEVICE constexpr int q4_key_least(int dim, int slot, int group) {
  return q4_least_at(dim) + ((slot / 2 * (dim / kv_group / 2) + group / 2) * 2 + slot % 2) * 4 + group % 2 * 2;
}
/// Tokens of values are multiplied in the order 4t, 4t + 2, 4t + 1, 4t + 3.
W4Q_HOST_DEVICE constexpr int q4_value_place(int slot) { return slot % 2 * 2 + slot % 4 / 2; }
W4Q_HOST_DEVICE constexpr int q4_value_step(int dim, int slot, int group) {
  return q4_steps_at(dim) + (slot / 4 * (dim / kv_group) + group) * 8 + q4_value_place(slot) * 2;
}
W4Q_HOST_DEVICE constexpr int q4_value_least(int dim, int slot, int group) {
  return q4_least_at(dim) + (group * 4 + slot / 4) * 8 + q4_value_place(slot) * 2;
}

/// Where the sign and the three magnitude bits of an E2M1 code stand in the halfword of codes j = 0 … 3.
W4Q_HOST_DEVICE constexpr uint32_t fp4_halfword(uint32_t code, int j) {
  constexpr int sign[4] = {15, 12, 14, 13};
  constexpr int magnitude[4] = {9, 6, 0, 3};
  return (code >> 3) << sign[j] | (code & 7u) << magnitude[j];
}
W4Q_HOST_DEVICE constexpr uint32_t fp4_code(uint32_t halfword, int j) {
  constexpr int sign[4] = {15, 12, 14, 13};
  constexpr int magnitude[4] = {9, 6, 0, 3};
  return (halfword >> sign[j] & 1u) << 3 | (halfword >> magnitude[j] & 7u);
}

/// The keys and values of one layer of one sequence, in GPU memory.
struct PagedLayer {
  std::byte* keys = nullptr;  ///< [pages of the pool][kv_heads] head pages, aligned to 16
  std::byte* values = nullptr;
  const int32_t* table = nullptr;  ///< pool page of each page of the sequence
  KvType type = KvType::f16;
  int kv_heads = 0;
  int head_dim = 0;
  int table_pages = 0;  ///< entries of the table that may be asked for before they are needed
};

}  // namespace w4q::kernels
