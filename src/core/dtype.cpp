#include "core/dtype.h"

#include <array>

namespace w4q {
namespace {

struct Row {
  std::string_view name;
  int bits;
};

constexpr std::array<Row, dtype_count> rows{{
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
}};

}  // namespace

std::string_view dtype_name(DType dtype) noexcept { return rows[static_cast<size_t>(dtype)].name; }

int dtype_bits(DType dtype) noexcept { return rows[static_cast<size_t>(dtype)].bits; }

std::optional<DType> parse_dtype(std::string_view name) noexcept {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

bool is_weight_dtype(DType dtype) noexcept {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

}  // namespace w4q
