#include "kernels/dequantize/dequantize.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <vector>

#include "core/error.h"
#include "core/with_bits.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "formats/table/table_format.h"
#include "formats/trellis.h"

#ifndef W4Q_TRELLIS_PART
#define W4Q_TRELLIS_PART
namespace w4q::kernels {

/// Columns that are decoded at a time: their rings, word by word, stay in the first cache level. A multiple of every
/// vector's lanes.
inline constexpr size_t trellis_columns = 64;

/// Some rows of a strip in some columns.
struct TrellisPart {
  int bits = 0, window = 0;
  int64_t first = 0, rows = 0;  ///< of the strip
  size_t columns = 0;
};

}  // namespace w4q::kernels
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dequantize/dequantize_cpu.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t block = 32;
using Tag = hn::CappedTag<float, 16>;

/// log2 of how many table entries one register holds: one lookup resolves so many low bits of a code.
constexpr int lookup_bits() {
  int bits = 0;
  while ((2u << bits) <= hn::MaxLanes(Tag())) ++bits;
  return bits;
}

/// Lanes whose code has a bit set: `word` is the block's plane of that bit, lane i of the vector weight `first` + i.
HWY_INLINE hn::Mask<hn::RebindToUnsigned<Tag>> plane_mask(uint32_t word, hn::Vec<hn::RebindToUnsigned<Tag>> lane_bit) {
  return hn::TestBit(hn::Set(hn::RebindToUnsigned<Tag>(), word), lane_bit);
}

/// table[code] where `indices` resolve the low bits and the planes of bits [low, top) choose between registers.
template <int Top, int Low, class Indices>
HWY_INLINE hn::Vec<Tag> choose(const uint32_t* words, hn::Vec<hn::RebindToUnsigned<Tag>> lane_bit, Indices indices,
                               const float* table) {
  const Tag d;
  if constexpr (Top == Low) {
    return hn::TableLookupLanes(hn::Load(d, table), indices);
  } else {
    const auto upper = choose<Top - 1, Low>(words, lane_bit, indices, table + (1 << (Top - 1)));
    const auto lower = choose<Top - 1, Low>(words, lane_bit, indices, table);
    return hn::IfThenElse(hn::RebindMask(d, plane_mask(words[Top - 1], lane_bit)), upper, lower);
  }
}

/// table[code] for the codes of one vector of weights.
template <int Bits>
HWY_INLINE hn::Vec<Tag> look_up(const uint32_t* words, hn::Vec<hn::RebindToUnsigned<Tag>> lane_bit,
                                const float* table) {
  const hn::RebindToUnsigned<Tag> du;
  constexpr int low = Bits < lookup_bits() ? Bits : lookup_bits();
  auto index = hn::Zero(du);
  for (int bit = 0; bit < low; ++bit) {
    index = hn::Or(index, hn::IfThenElseZero(plane_mask(words[bit], lane_bit), hn::Set(du, 1u << bit)));
  }
  return choose<Bits, low>(words, lane_bit, hn::IndicesFromVec(Tag(), index), table);
}

/// `blocks` whole blocks of 32 weights into `out`. `table` is 64-byte aligned and as long as the largest register.
template <int Bits>
void decode_blocks(const uint32_t* codes, const float* scales, size_t blocks, const float* table, float* out) {
  const Tag d;
  const hn::RebindToUnsigned<Tag> du;
  const size_t lanes = hn::Lanes(d);
  const auto first_bits = hn::Shl(hn::Set(du, 1u), hn::Iota(du, 0));
  for (size_t b = 0; b < blocks; ++b) {
    uint32_t words[Bits];
    std::memcpy(words, codes + b * Bits, sizeof words);
    const auto scale = hn::Set(d, scales[b]);
    auto lane_bit = first_bits;
    for (size_t i = 0; i < block; i += lanes) {
      hn::StoreU(hn::Mul(look_up<Bits>(words, lane_bit, table), scale), d, out + b * block + i);
      lane_bit = hn::ShiftLeftSame(lane_bit, static_cast<int>(lanes));
    }
  }
}

void decode_kbit(int bits, const uint32_t* codes, const float* scales, size_t blocks, const float* table, float* out) {
  with_table_bits(bits, [&]<int width>() HWY_ATTR { decode_blocks<width>(codes, scales, blocks, table, out); });
}

/// The weights of `rows` rows of a strip, from `first` on, in columns [0, count), count ≤ trellis_columns: `words` has
/// word w of column c at [w · trellis_columns + c]; `steps` are what the levels of rows are multiplied by.
void decode_trellis(const TrellisPart& part, const uint32_t* words, const float* steps, float* out, size_t stride) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::RebindToSigned<decltype(d)> di;
  const auto window = hn::Set(du, (1u << part.window) - 1), factor = hn::Set(du, formats::trellis_multiplier);
  const auto even = hn::Set(du, 0x00ff00ffu), low = hn::Set(du, 0xffffu);
  const auto middle = hn::Set(di, formats::trellis_largest_level);
  for (int64_t r = 0; r < part.rows; ++r) {
    const int64_t last = (part.first + r + 1) * part.bits - 1, ring = formats::trellis_ring_words(part.bits);
    const int up = static_cast<int>(last % 32 + 1), down = 32 - up;  // of bits that stand in the word before, and not
    const uint32_t* const newest = words + last / 32 * trellis_columns;
    const uint32_t* const before = words + (last / 32 + ring - 1) % ring * trellis_columns;
    const auto step = hn::Set(d, steps[r]);
    for (size_t c = 0; c < part.columns; c += hn::Lanes(d)) {
      auto bits = hn::ShiftRightSame(hn::LoadU(du, newest + c), down);
      if (down != 0) bits = hn::Or(bits, hn::ShiftLeftSame(hn::LoadU(du, before + c), up));
      const auto product = hn::Mul(hn::And(bits, window), factor);
      const auto pairs = hn::Add(hn::And(product, even), hn::And(hn::ShiftRight<8>(product), even));
      const auto sum = hn::Add(hn::And(pairs, low), hn::ShiftRight<16>(pairs));
      const auto level = hn::Sub(hn::BitCast(di, sum), middle);
      hn::StoreU(hn::Mul(hn::ConvertTo(d, level), step), d, out + static_cast<size_t>(r) * stride + c);
    }
  }
}

void add_into(const float* values, size_t count, float* sum) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, sum + i), hn::LoadU(d, values + i)), d, sum + i);
  }
  for (; i < count; ++i) sum[i] += values[i];
}

}  // namespace w4q::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q::kernels {
namespace {

HWY_EXPORT(decode_kbit);
HWY_EXPORT(decode_trellis);
HWY_EXPORT(add_into);

using formats::PackedWeight;
using formats::PlaneRole;
using formats::TableFormat;

/// The scale of each block of 32 in row `row`. `groups` is room for those that are stored.
void decode_scales(const PackedWeight& weight, int64_t group, int64_t row, std::vector<float>& groups,
                   std::vector<float>& scales) {
  const bool equal = groups.size() == scales.size();
  formats::load_scales(weight.plane(PlaneRole::scales), static_cast<size_t>(row) * groups.size(),
                       equal ? scales : groups);
  if (equal) return;
  for (size_t b = 0; b < scales.size(); ++b) scales[b] = groups[b * formats::kbit_block / static_cast<size_t>(group)];
}

/// The table as it is multiplied by scales, padded to the longest register.
struct alignas(64) LookUpTable {
  std::array<float, 32> values{};

  LookUpTable(const TableFormat& format, const PackedWeight& weight) {
    std::ranges::copy(formats::table_levels(format, weight), values.begin());
  }
};

/// Formats whose codes are bit planes, and whose scales belong to whole units of 32.
bool has_unit_scales(const TableFormat& format) {
  return format.order == formats::CodeOrder::bit_planes && format.bits <= 5 &&
         format.block % formats::kbit_block == 0 && format.block_rows == 1 && !format.tensor_scale;
}

void dequantize_planes(const TableFormat& format, const PackedWeight& weight, int64_t begin, MatrixView<float> out) {
  const auto bits = static_cast<size_t>(weight.scheme.bits);
  const auto k = static_cast<size_t>(weight.k);
  const size_t blocks = (k + formats::kbit_block - 1) / formats::kbit_block;
  const auto codes = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const LookUpTable look_up(format, weight);
  const std::array<float, 32>& table = look_up.values;

  const int64_t group = formats::block_of(format, weight.k);
  std::vector<float> groups(static_cast<size_t>((weight.k + group - 1) / group)), scales(blocks);
  std::array<float, formats::kbit_block> tail;
  const size_t whole = k / formats::kbit_block;
  for (int64_t r = 0; r < out.rows; ++r) {
    const size_t first = static_cast<size_t>(begin + r) * blocks;
    decode_scales(weight, group, begin + r, groups, scales);
    const uint32_t* row = codes.data() + first * bits;
    const auto decode = HWY_DYNAMIC_DISPATCH(decode_kbit);
    decode(weight.scheme.bits, row, scales.data(), whole, table.data(), out.row(r));
    if (whole == blocks) continue;
    decode(weight.scheme.bits, row + whole * bits, scales.data() + whole, 1, table.data(), tail.data());
    std::memcpy(out.row(r) + whole * formats::kbit_block, tail.data(), sizeof(float) * (k % formats::kbit_block));
  }
}

/// Rows of one strip of a trellis, 64 columns at a time.
void dequantize_strip(const PackedWeight& weight, int64_t begin, MatrixView<float> out) {
  const int64_t strip = begin / formats::trellis_rows;
  const auto ring = static_cast<size_t>(formats::trellis_ring_words(weight.scheme.bits));
  TrellisPart part{weight.scheme.bits, weight.scheme.window, begin % formats::trellis_rows, out.rows, 0};
  std::array<float, formats::trellis_rows> steps;
  for (int64_t r = 0; r < out.rows; ++r) {
    steps[static_cast<size_t>(r)] = formats::trellis_load_scale(weight, begin + r).step;
  }
  std::array<uint32_t, formats::trellis_ring_words(formats::trellis_max_bits) * trellis_columns> words;
  std::vector<float> tail;
  const auto decode = HWY_DYNAMIC_DISPATCH(decode_trellis);
  for (int64_t col = 0; col < out.cols; col += trellis_columns) {
    part.columns = static_cast<size_t>(std::min<int64_t>(trellis_columns, out.cols - col));
    const uint32_t* const codes = formats::trellis_ring(weight, strip, col).data();
    for (size_t c = 0; c < part.columns; ++c) {
      for (size_t w = 0; w < ring; ++w) words[w * trellis_columns + c] = codes[c * ring + w];
    }
    if (part.columns == trellis_columns) {
      decode(part, words.data(), steps.data(), out.data + col, static_cast<size_t>(out.stride));
      continue;
    }
    tail.resize(static_cast<size_t>(out.rows) * trellis_columns);
    decode(part, words.data(), steps.data(), tail.data(), trellis_columns);
    for (int64_t r = 0; r < out.rows; ++r) {
      std::copy_n(tail.data() + static_cast<size_t>(r) * trellis_columns, part.columns, out.row(r) + col);
    }
  }
}

void dequantize_trellis(const PackedWeight& weight, int64_t begin, MatrixView<float> out) {
  for (int64_t r = 0, rows = 0; r < out.rows; r += rows) {
    rows = std::min(out.rows - r, formats::trellis_rows - (begin + r) % formats::trellis_rows);
    dequantize_strip(weight, begin + r, {out.row(r), rows, out.cols, out.stride});
  }
}

}  // namespace

void dequantize_rows(const PackedWeight& weight, int64_t begin, MatrixView<float> out) {
  ensure(weight.layout == formats::canonical_layout, "dequantize: the layout is not canonical");
  ensure(begin >= 0 && begin + out.rows <= weight.n && out.cols == weight.k, "dequantize: no such rows");
  const auto& scheme = formats::scheme_row(weight.scheme.family);
  if (weight.scheme.family == formats::SchemeFamily::trellis) return dequantize_trellis(weight, begin, out);
  if (scheme.decode_rows != nullptr) return scheme.decode_rows(weight, begin, out);
  if (scheme.table != nullptr) {
    const TableFormat format = scheme.table(weight.scheme);
    if (has_unit_scales(format)) return dequantize_planes(format, weight, begin, out);
  }
  for (int64_t r = 0; r < out.rows; ++r) {
    scheme.decode_row(weight, begin + r, {out.row(r), static_cast<size_t>(out.cols)});
  }
}

void dequantize_rows(std::span<const PackedWeight> passes, int64_t begin, MatrixView<float> out) {
  ensure(!passes.empty(), "dequantize: a linear without passes");
  dequantize_rows(passes.front(), begin, out);
  std::vector<float> row(static_cast<size_t>(out.cols));
  for (const PackedWeight& pass : passes.subspan(1)) {
    for (int64_t r = 0; r < out.rows; ++r) {
      dequantize_rows(pass, begin + r, MatrixView<float>(row.data(), 1, out.cols));
      HWY_DYNAMIC_DISPATCH(add_into)(row.data(), row.size(), out.row(r));
    }
  }
}

void dequantize_rows(const formats::PackedLinear& linear, int64_t begin, MatrixView<float> out) {
  const std::span<const PackedWeight> passes = linear.passes;
  if (linear.rotations.empty()) return dequantize_rows(passes, begin, out);
  ensure(linear.rotations.size() == passes.size(), "dequantize: not one rotation for each pass");
  std::vector<float> row(static_cast<size_t>(out.cols));
  for (int64_t r = 0; r < out.rows; ++r) {
    for (size_t first = 0, end = 0; first < passes.size(); first = end) {
      end = shared_input_end(linear, first);
      float* target = first == 0 ? out.row(r) : row.data();
      dequantize_rows(passes.subspan(first, end - first), begin + r, MatrixView<float>(target, 1, out.cols));
      linear.rotations[first].restore({target, row.size()});
      if (first != 0) HWY_DYNAMIC_DISPATCH(add_into)(row.data(), row.size(), out.row(r));
    }
  }
}

}  // namespace w4q::kernels
#endif  // HWY_ONCE
