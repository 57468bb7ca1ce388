// Tensor types of GGUF files: numbers, names and block sizes. What the bits of a block mean stands in
// formats/gguf_blocks.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace w4q {

/// The numbers that stand in files. Gaps belong to types that ggml has removed, or computes with and never stores.
enum class GgmlType : uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq2_xxs = 16,
  iq2_xs = 17,
  iq3_xxs = 18,
  iq1_s = 19,
  iq4_nl = 20,
  iq3_s = 21,
  iq2_s = 22,
  iq4_xs = 23,
  i8 = 24,
  i16 = 25,
  i32 = 26,
  i64 = 27,
  f64 = 28,
  iq1_m = 29,
  bf16 = 30,
  tq1_0 = 34,
  tq2_0 = 35,
  mxfp4 = 39,
  nvfp4 = 40,
};

/// The row of the one table of types.
struct GgmlTypeRow {
  GgmlType type;
  std::string_view name;  ///< as tools print it: "Q4_K"
  int64_t block;          ///< elements of a block; rows are whole blocks
  int64_t block_bytes;
};

/// Null for a number that no stored type has, or has any more.
const GgmlTypeRow* find_ggml_type(uint32_t number) noexcept;
const GgmlTypeRow& describe(GgmlType type) noexcept;
inline std::string_view ggml_type_name(GgmlType type) noexcept { return describe(type).name; }

}  // namespace w4q
