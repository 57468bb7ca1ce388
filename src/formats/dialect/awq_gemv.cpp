#include "formats/dialect/awq_gemv.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/float_formats.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/integer.h"

namespace w4q::formats {
namespace {

constexpr int64_t block_inputs = 32;  // whose four words turn into eight half words
constexpr int64_t block_words = 4;
constexpr int64_t grain = 64;  // rows of a task

[[noreturn]] void refuse_padding(std::string_view name, std::string_view what, int64_t row, int64_t group) {
  throw Error(ErrorCode::bad_file, concat(printable(name), ": padding of its ", what, " is not zero"))
      .detail(concat("output ", row, ", behind the last group at ", group));
}

/// Where the eight half words of the block that begins at input `col` of output `row` stand.
int64_t fast_block(int64_t row, int64_t col, int64_t k) noexcept {
  return row / awq_gemv_fast_outputs * k + col / awq_gemv_fast_inputs * awq_gemv_fast_inputs +
         row % awq_gemv_fast_outputs * 16 + col % awq_gemv_fast_inputs / block_inputs * 8;
}

/// Calls body(index of the block's first word, index of its first half word) for every block of 32 inputs.
template <class Body>
void for_each_block(int64_t n, int64_t k, const Body& body) {
  parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < k; col += block_inputs) body(row * (k / 8) + col / 8, fast_block(row, col, k));
    }
  });
}

}  // namespace

int64_t awq_gemv_words(int64_t group_size, int64_t k) noexcept {
  const int64_t multiple = group_size >= 128 ? 1 : group_size == 64 ? 2 : group_size == 32 ? 4 : 0;
  if (multiple == 0) return 0;
  const int64_t words = (k / group_size + 7) / 8;
  return (words + multiple - 1) / multiple * multiple;
}

void awq_fast_pack_codes(std::span<const uint32_t> canonical, int64_t n, int64_t k, std::span<uint16_t> packed) {
  ensure(n % awq_gemv_fast_outputs == 0 && k % awq_gemv_fast_inputs == 0, "awq_fast_pack_codes: uneven sizes");
  ensure(std::cmp_equal(canonical.size(), n * k / 8) && std::cmp_equal(packed.size(), n * k / 4),
         "awq_fast_pack_codes: wrong sizes");
  for_each_block(n, k, [&](int64_t from, int64_t to) {
    const uint32_t* const words = canonical.data() + from;
    uint16_t* const halves = packed.data() + to;
    for (int i = 0; i < 8; ++i) {
      uint32_t half = 0;
      for (int a = 0; a < block_words; ++a) half |= (words[a] >> (4 * i) & 15u) << (4 * a);
      halves[i] = static_cast<uint16_t>(half);
    }
  });
}

void awq_fast_unpack_codes(std::span<const uint16_t> packed, int64_t n, int64_t k, std::span<uint32_t> canonical) {
  ensure(n % awq_gemv_fast_outputs == 0 && k % awq_gemv_fast_inputs == 0, "awq_fast_unpack_codes: uneven sizes");
  ensure(std::cmp_equal(canonical.size(), n * k / 8) && std::cmp_equal(packed.size(), n * k / 4),
         "awq_fast_unpack_codes: wrong sizes");
  for_each_block(n, k, [&](int64_t to, int64_t from) {
    const uint16_t* const halves = packed.data() + from;
    uint32_t* const words = canonical.data() + to;
    for (int a = 0; a < block_words; ++a) {
      uint32_t word = 0;
      for (int i = 0; i < 8; ++i) word |= (uint32_t{halves[i]} >> (4 * a) & 15u) << (4 * i);
      words[a] = word;
    }
  });
}

uint16_t awq_fast_offset(uint16_t scale, int zero) noexcept {
  return f16_from_f32(-(f32_from_f16(scale) * static_cast<float>(zero)));
}

int awq_fast_zero(uint16_t scale, uint16_t offset) noexcept {
  const float zero = std::nearbyint(-f32_from_f16(offset) / f32_from_f16(scale));
  return zero >= 0 && zero <= 15 ? static_cast<int>(zero) : -1;
}

void awq_gemv_pack_groups(const PackedWeight& canonical, int64_t words, std::span<uint32_t> zeros,
                          std::span<uint16_t> scales) {
  const int64_t groups = integer_groups(canonical.scheme, canonical.k);
  const auto from_zeros = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto from_scales = canonical.plane(PlaneRole::scales).bytes.as<uint16_t>();
  std::ranges::fill(zeros, 0u);
  std::ranges::fill(scales, uint16_t{0});
  for (int64_t row = 0; row < canonical.n; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const auto from = static_cast<size_t>(row * groups + group);
      zeros[static_cast<size_t>(row * words + group / 8)] |= uint32_t{from_zeros[from]} << (4 * (group % 8));
      scales[static_cast<size_t>(row * 8 * words + group)] = from_scales[from];
    }
  }
}

void awq_gemv_unpack_groups(std::span<const uint32_t> zeros, std::span<const uint16_t> scales, int64_t words,
                            PackedWeight& canonical, std::string_view name) {
  const int64_t groups = integer_groups(canonical.scheme, canonical.k);
  const auto to_zeros = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto to_scales = canonical.plane(PlaneRole::scales).bytes.as<uint16_t>();
  for (int64_t row = 0; row < canonical.n; ++row) {
    for (int64_t group = 0; group < 8 * words; ++group) {
      const auto zero = zeros[static_cast<size_t>(row * words + group / 8)] >> (4 * (group % 8)) & 15u;
      const uint16_t scale = scales[static_cast<size_t>(row * 8 * words + group)];
      if (group < groups) {
        to_zeros[static_cast<size_t>(row * groups + group)] = static_cast<uint8_t>(zero);
        to_scales[static_cast<size_t>(row * groups + group)] = scale;
      } else if (zero != 0 || scale != 0) {
        refuse_padding(name, zero != 0 ? "zero points" : "scales", row, groups);
      }
    }
  }
}

void awq_fast_pack_groups(const PackedWeight& canonical, int64_t words, std::span<uint16_t> scales,
                          std::span<uint16_t> offsets) {
  const int64_t n = canonical.n, groups = integer_groups(canonical.scheme, canonical.k);
  ensure(std::cmp_equal(scales.size(), 8 * words * n) && scales.size() == offsets.size(), "awq_fast: wrong sizes");
  const auto zeros = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto from = canonical.plane(PlaneRole::scales).bytes.as<uint16_t>();
  std::ranges::fill(scales, uint16_t{0});
  std::ranges::fill(offsets, uint16_t{0});
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const auto at = static_cast<size_t>(row * groups + group), to = static_cast<size_t>(group * n + row);
      scales[to] = from[at];
      offsets[to] = awq_fast_offset(from[at], zeros[at]);
    }
  }
}

void awq_fast_unpack_groups(std::span<const uint16_t> scales, std::span<const uint16_t> offsets, int64_t words,
                            PackedWeight& canonical, std::string_view name) {
  const int64_t n = canonical.n, groups = integer_groups(canonical.scheme, canonical.k);
  const auto zeros = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto to = canonical.plane(PlaneRole::scales).bytes.as<uint16_t>();
  for (int64_t group = 0; group < 8 * words; ++group) {
    for (int64_t row = 0; row < n; ++row) {
      const auto from = static_cast<size_t>(group * n + row), at = static_cast<size_t>(row * groups + group);
      if (group >= groups) {
        if (scales[from] != 0 || offsets[from] != 0) refuse_padding(name, "scales", row, groups);
        continue;
      }
      const int zero = awq_fast_zero(scales[from], offsets[from]);
      if (zero < 0 || awq_fast_offset(scales[from], zero) != offsets[from]) {
        throw Error(ErrorCode::bad_file, concat(printable(name), ": an offset is no zero point times its scale"))
            .detail(concat("output ", row, ", group ", group, ": scale ", f32_from_f16(scales[from]), ", offset ",
                           f32_from_f16(offsets[from])));
      }
      to[at] = scales[from];
      zeros[at] = static_cast<uint8_t>(zero);
    }
  }
}

std::string awq_fast_refuse_zero(const PackedWeight& canonical) {
  const int64_t groups = integer_groups(canonical.scheme, canonical.k);
  const auto zeros = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto scales = canonical.plane(PlaneRole::scales).bytes.as<uint16_t>();
  for (size_t i = 0; i < zeros.size(); ++i) {
    if (awq_fast_zero(scales[i], awq_fast_offset(scales[i], zeros[i])) == zeros[i]) continue;
    const auto index = static_cast<int64_t>(i);
    return concat("row ", index / groups, ", group ", index % groups, ": the zero point ", +zeros[i],
                  " does not come back from its product with the scale ", f32_from_f16(scales[i]), " in f16");
  }
  return {};
}

}  // namespace w4q::formats
