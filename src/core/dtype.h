// Element types of tensors, in the order that fixes how safetensors files are written.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace w4q {

/// The safetensors element types in ascending rank: files list tensors by descending rank (docs/safetensors.md).
enum class DType : uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
};

inline constexpr int dtype_count = 22;

/// The name that safetensors uses, e.g. "BF16". Case matters.
std::string_view dtype_name(DType dtype) noexcept;
/// Bits of one element; 4 and 6 occur.
int dtype_bits(DType dtype) noexcept;
/// The inverse of dtype_name; nothing for an unknown name.
std::optional<DType> parse_dtype(std::string_view name) noexcept;
/// True for f32, f16 and bf16: what a weight may be stored in before quantizing.
bool is_weight_dtype(DType dtype) noexcept;

}  // namespace w4q
