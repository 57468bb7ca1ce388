// The KV cache on the GPU: pages of 16 tokens. A page of one layer holds, for each key head, a head page: 16 rows of
// codes, then the parameters of each row.
//
//   type  code of a row of d values                     parameters of a row            bytes a row, d = 128
//   f16   d × f16                                       –                              256
//   fp8   d × E4M3 of value / scale                     scale fp32 = absmax / 448      132
//   q4    groups of 32: round((value − least) / step)   step, least f16 per group      80
//
// d is head_dim padded with zeros to 64, 128 or 256. In a 32-bit word of q4 the codes of dims 8w + 2j and 8w + 2j + 1
// are nibbles j and j + 4, so that one shift and one mask give a pair of them as halves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/host_device.h"

namespace w4q::kernels {

enum class KvType { f16, fp8, q4 };

/// "f16", "fp8", "q4".
std::string_view to_string(KvType type) noexcept;
/// The inverse. Throws bad_argument and lists what exists.
KvType parse_kv_type(std::string_view word);

inline constexpr int kv_page_tokens = 16;
inline constexpr int kv_group = 32;  ///< values of q4 that share step and least
inline constexpr float kv_fp8_max = 448.0f;

/// Values of a row in the cache: head_dim padded to what the kernels are made for; 0 where it is too large (over 256).
W4Q_HOST_DEVICE constexpr int kv_padded_dim(int64_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : head_dim <= 256 ? 256 : 0;
}

/// Bytes of the codes of one row.
W4Q_HOST_DEVICE constexpr int kv_row_bytes(KvType type, int dim) {
  return type == KvType::f16 ? 2 * dim : type == KvType::fp8 ? dim : dim / 2;
}
/// Bytes of the parameters of one row.
W4Q_HOST_DEVICE constexpr int kv_parameter_bytes(KvType type, int dim) {
  return type == KvType::f16 ? 0 : type == KvType::fp8 ? 4 : dim / kv_group * 4;
}
/// Bytes of a head page: keys or values of one key head, 16 tokens. A multiple of 16.
W4Q_HOST_DEVICE constexpr int kv_head_page_bytes(KvType type, int dim) {
  return kv_page_tokens * (kv_row_bytes(type, dim) + kv_parameter_bytes(type, dim));
}

/// The keys and values of one layer of one sequence, in GPU memory.
struct PagedLayer {
  std::byte* keys = nullptr;  ///< [pages of the pool][kv_heads] head pages, aligned to 16
  std::byte* values = nullptr;
  const int32_t* table = nullptr;  ///< pool page of each page of the sequence
  KvType type = KvType::f16;
  int kv_heads = 0;
  int head_dim = 0;
};

}  // namespace w4q::kernels
