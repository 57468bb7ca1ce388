#include "formats/table/table_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "core/error.h"
#include "core/text.h"
#include "formats/bit_stream.h"
#include "formats/codebook.h"
#include "formats/scale_codec.h"
#include "formats/small_float.h"
#include "formats/table/group_norm.h"
#include "formats/table/nested_scales.h"

namespace w4q::formats {
namespace {

constexpr int64_t unit = 32;  ///< codes that take `bits` words

bool flat(const TableFormat& format) noexcept { return format.order == CodeOrder::dense; }

int64_t ceil_div(int64_t a, int64_t b) noexcept { return (a + b - 1) / b; }

/// Which code is the first of a row, counted with the padding behind rows of bit planes.
int64_t row_begin(const TableFormat& format, int64_t k, int64_t row) noexcept {
  return flat(format) ? row * k : row * ceil_div(k, unit) * unit;
}

/// Word and bit of bit `bit` of code `code`, counted so.
BitPlace code_place(const TableFormat& format, int64_t code, int bit) noexcept {
  if (!flat(format)) return {code / unit * format.bits + bit, static_cast<int>(code % unit), 0};
  const int64_t stream_bit = code * format.bits + bit;
  return {stream_bit / 32, static_cast<int>(stream_bit % 32), 0};
}

/// The blocks of a weight as ranges of the flat matrix: body(index, begin, end); one that spans rows comes again.
template <class Body>
void for_each_block(const TableFormat& format, int64_t n, int64_t k, const Body& body) {
  const int64_t size = block_of(format, k);
  const int64_t run = flat(format) ? n * k : k;  // what blocks are cut from
  const int64_t blocks = ceil_div(run, size);    // of a run
  for (int64_t start = 0; start < n * k; start += run) {
    int64_t index = flat(format) ? 0 : scale_row(format, start / k) * blocks;
    for (int64_t at = 0; at < run; at += size) body(index++, start + at, start + std::min(at + size, run));
  }
}

/// Bit i of `bits` as the lowest bit of byte i.
uint64_t spread(uint64_t bits) noexcept {
  constexpr uint64_t ones = 0x0101010101010101, low = 0x7F7F7F7F7F7F7F7F;
  const uint64_t apart = bits * ones & 0x8040201008040201;
  return (((apart & low) + low) | apart) >> 7 & ones;
}

/// The reverse: the lowest bit of every byte.
uint64_t gather(uint64_t bytes) noexcept { return (bytes & 0x0101010101010101) * 0x0102040810204080 >> 56; }

/// The 32 codes of a unit, of which a dense stream's last may have fewer words.
std::array<uint8_t, unit> read_unit(const TableFormat& format, std::span<const uint32_t> words, int64_t index) {
  std::array<uint8_t, unit> codes{};
  const auto bits = static_cast<size_t>(format.bits);
  const size_t first = static_cast<size_t>(index) * bits;
  words = words.subspan(first, std::min(bits, words.size() - first));
  if (flat(format)) {
    const size_t count = words.size() * 32 / bits;
    dense_unpack(words, format.bits, std::span(codes).first(count));
    return codes;
  }
  for (size_t bit = 0; bit < bits; ++bit) {
    for (size_t lane = 0; lane < unit; lane += 8) {
      uint64_t bytes = 0;
      std::memcpy(&bytes, codes.data() + lane, sizeof bytes);
      bytes |= spread(words[bit] >> lane & 0xFFu) << bit;
      std::memcpy(codes.data() + lane, &bytes, sizeof bytes);
    }
  }
  return codes;
}

void put_code(const TableFormat& format, std::span<uint32_t> words, int64_t index, uint32_t code) noexcept {
  for (int bit = 0; bit < format.bits; ++bit) {
    const BitPlace place = code_place(format, index, bit);
    words[static_cast<size_t>(place.word)] |= (code >> bit & 1u) << place.bit;
  }
}

float tensor_scale_of(const TableFormat& format, const PackedWeight& weight) {
  return format.tensor_scale ? weight.plane(PlaneRole::tensor_scale).bytes.as<float>()[0] : 1.0f;
}

void check_table(const TableFormat& format, std::span<const float> codebook) {
  if (!format.fixed.empty() && !std::ranges::equal(codebook, format.fixed)) {
    throw Error(ErrorCode::bad_argument, concat("encode: floats of ", format.bits, " bits have a table of their own"));
  }
  if (format.ascending) return check_codebook(codebook, format.bits, "encode");
  const auto finite = [](float x) { return std::isfinite(x); };
  if (codebook.size() == size_t{1} << format.bits && std::ranges::all_of(codebook, finite)) return;
  throw Error(ErrorCode::bad_argument,
              concat("encode: codes of ", format.bits, " bits need a table of ", 1 << format.bits, " finite values"));
}

/// The scale of a block by the format's rule; `largest` is the table's largest magnitude times the tensor's factor.
StoredScale block_scale(const TableFormat& format, std::span<const float> values, float largest, double gain,
                        int64_t block) noexcept {
  switch (format.rule) {
    case ScaleRule::absmax_over_table:
      return store_scale(table_max(values) / largest, format.scale);
    case ScaleRule::absmax:
      return store_scale(table_max(values), format.scale);
    case ScaleRule::small_float:  // of blocks that may span rows
      break;
    case ScaleRule::group_norm:
      return store_scale(rotated_norm(values, block) / gain, format.scale, scale_codec(format.scale).largest);
  }
  return {};
}

/// The factor that brings the largest block scale to the largest that its type has.
float fitting_tensor_scale(const TableFormat& format, std::span<const float> values, float largest) noexcept {
  const float absmax = table_max(values);
  const float factor = absmax / (largest * scale_codec(format.scale).largest);
  return absmax == 0 ? 1.0f : std::max(factor, std::numeric_limits<float>::min());
}

/// Scales of small floats, and the tensor's factor.
void store_float_scales(const TableFormat& format, std::span<const float> values, PackedWeight& weight) {
  Plane& scales = weight.plane(PlaneRole::scales);
  std::vector<float> maxima(static_cast<size_t>(element_count(scales.spec.shape)));
  for_each_block(format, weight.n, weight.k, [&](int64_t index, int64_t begin, int64_t end) {
    float& largest = maxima[static_cast<size_t>(index)];
    largest =
        std::max(largest, table_max(values.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin))));
  });
  float factor = 1;
  if (format.tensor_scale) {
    factor = small_float_factor(table_max(maxima));
    weight.plane(PlaneRole::tensor_scale).bytes.as<float>()[0] = format.tensor_divides ? 1 / factor : factor;
  }
  for (size_t i = 0; i < maxima.size(); ++i) {
    put_scale(scales, i, small_float_scale(weight.scheme, maxima[i], factor).bits);
  }
}

}  // namespace

std::vector<PlaneSpec> table_planes(const TableFormat& format, int64_t n, int64_t k, std::string_view name) {
  check_dimensions(n, k, name);
  const int64_t block = block_of(format, k);
  const Shape codes =
      flat(format) ? Shape{dense_words(n * k, format.bits)} : Shape{n, ceil_div(k, unit), int64_t{format.bits}};
  const int64_t rows = scale_row(format, n - 1) + 1;
  const Shape scales = flat(format) ? Shape{ceil_div(n * k, block)} : Shape{rows, ceil_div(k, block)};
  std::vector<PlaneSpec> specs = {{PlaneRole::codes, DType::i32, codes},
                                  {PlaneRole::scales, scale_codec(format.scale).dtype, scales},
                                  {PlaneRole::codebook, DType::f32, {int64_t{1} << format.bits}}};
  if (format.scale == ScaleType::nested) add_nested_planes(element_count(scales), specs);
  if (format.tensor_scale) specs.push_back({PlaneRole::tensor_scale, DType::f32, {1}});
  return specs;
}

BitPlace table_place(const TableFormat& format, int64_t k, int64_t row, int64_t col, int bit) noexcept {
  const int64_t block = block_of(format, k);
  BitPlace place = code_place(format, row_begin(format, k, row) + col, bit);
  place.scale = flat(format) ? (row * k + col) / block : scale_row(format, row) * ceil_div(k, block) + col / block;
  return place;
}

float scale_at(const PackedWeight& canonical, int64_t index) noexcept {
  if (canonical.scheme.scale == ScaleType::nested) return nested_scale(canonical, index);
  return load_scale(canonical.plane(PlaneRole::scales), static_cast<size_t>(index));
}

float full_scale_at(const TableFormat& format, const PackedWeight& canonical, int64_t index) noexcept {
  const float scale = scale_at(canonical, index);
  if (!format.tensor_scale) return scale;
  return scale_with_factor(scale, tensor_scale_of(format, canonical), format.tensor_divides);
}

std::vector<float> table_levels(const TableFormat& format, const PackedWeight& canonical) {
  const auto codebook = canonical.plane(PlaneRole::codebook).bytes.as<float>();
  std::vector<float> levels(codebook.begin(), codebook.end());
  if (format.rule == ScaleRule::group_norm) rotated_levels(codebook, block_of(format, canonical.k), levels);
  return levels;
}

void table_decode_row(const TableFormat& format, const PackedWeight& canonical, int64_t row, std::span<float> out) {
  ensure(canonical.layout == canonical_layout, "decode_row: not the canonical layout");
  ensure(row >= 0 && row < canonical.n && static_cast<int64_t>(out.size()) == canonical.k, "decode_row: wrong row");
  const std::span<const uint32_t> words = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const std::vector<float> levels = table_levels(format, canonical);
  const int64_t k = canonical.k, begin = row_begin(format, k, row), size = block_of(format, k);
  const int64_t before = flat(format) ? row * k : 0;  // of the weights that blocks are counted over
  int64_t block_end = 0;
  float scale = 0;
  for (int64_t col = 0; col < k;) {
    const auto codes = read_unit(format, words, (begin + col) / unit);
    for (int64_t lane = (begin + col) % unit; lane < unit && col < k; ++lane, ++col) {
      if (col == block_end) {
        scale = full_scale_at(format, canonical, table_place(format, k, row, col, 0).scale);
        block_end = ((before + col) / size + 1) * size - before;
      }
      out[static_cast<size_t>(col)] = levels[codes[static_cast<size_t>(lane)]] * scale;
    }
  }
}

void table_read_codes(const TableFormat& format, const PackedWeight& canonical, int64_t row, std::span<uint8_t> codes) {
  ensure(canonical.layout == canonical_layout, "table_read_codes: not the canonical layout");
  ensure(row >= 0 && row < canonical.n && static_cast<int64_t>(codes.size()) == canonical.k, "table_read_codes: row");
  const std::span<const uint32_t> words = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const int64_t begin = row_begin(format, canonical.k, row);
  for (int64_t col = 0; col < canonical.k;) {
    const auto read = read_unit(format, words, (begin + col) / unit);
    for (int64_t lane = (begin + col) % unit; lane < unit && col < canonical.k; ++lane, ++col) {
      codes[static_cast<size_t>(col)] = read[static_cast<size_t>(lane)];
    }
  }
}

namespace {

/// Writes the bit planes of all whole units; returns the number of codes in them, 0 where no instruction gathers the bits
/// of many bytes.
size_t write_units([[maybe_unused]] std::span<const uint8_t> codes, [[maybe_unused]] size_t bits,
                   [[maybe_unused]] std::span<uint32_t> words) {
#ifdef __SSE2__
  const size_t whole = codes.size() / unit * unit;
  uint32_t* to = words.data();
  for (size_t first = 0; first < whole; first += unit, to += bits) {
    // The highest bit of every byte is gathered, so the highest plane comes first.
    __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.data() + first));
    __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.data() + first + unit / 2));
    low = _mm_slli_epi16(low, static_cast<int>(8 - bits)), high = _mm_slli_epi16(high, static_cast<int>(8 - bits));
    for (size_t bit = bits; bit-- > 0;) {
      to[bit] = static_cast<uint32_t>(_mm_movemask_epi8(low)) | static_cast<uint32_t>(_mm_movemask_epi8(high)) << 16;
      low = _mm_add_epi8(low, low), high = _mm_add_epi8(high, high);
    }
  }
  return whole;
#else
  return 0;
#endif
}

}  // namespace

void table_write_codes(const TableFormat& format, PackedWeight& weight, int64_t row, std::span<const uint8_t> codes) {
  const auto bits = static_cast<size_t>(format.bits);
  if (flat(format)) {
    ensure(weight.k * format.bits % 32 == 0, "table_write_codes: rows share words");
    const auto size = static_cast<size_t>(dense_words(weight.k, format.bits));
    const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
    return dense_pack(codes, format.bits, words.subspan(static_cast<size_t>(row) * size, size));
  }
  const auto units = static_cast<size_t>(ceil_div(weight.k, unit));
  const auto words = weight.plane(PlaneRole::codes)
                         .bytes.as<uint32_t>()
                         .subspan(static_cast<size_t>(row) * units * bits, units * bits);
  const size_t whole = write_units(codes, bits, words);
  std::ranges::fill(words.subspan(whole / unit * bits), 0u);
  for (size_t first = whole; first < codes.size(); first += 8) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, codes.data() + first, std::min<size_t>(8, codes.size() - first));
    for (size_t bit = 0; bit < bits; ++bit) {
      words[first / unit * bits + bit] |= static_cast<uint32_t>(gather(bytes >> bit)) << (first % unit);
    }
  }
}

void table_recode(const TableFormat& format, PackedWeight& weight, std::span<const float> values) {
  check_values(values, weight.n, weight.k);
  const NearestEntry nearest(table_levels(format, weight), format.ties);
  const std::span<uint32_t> words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  std::ranges::fill(words, 0u);
  for_each_block(format, weight.n, weight.k, [&](int64_t block, int64_t begin, int64_t end) {
    const float scale = full_scale_at(format, weight, block);
    const float reciprocal = 1.0f / scale;
    const bool multiplies = format.reciprocal && std::isfinite(reciprocal);
    const int64_t row = begin / weight.k;
    const int64_t padding = row_begin(format, weight.k, row) - row * weight.k;
    for (int64_t i = begin; i < end; ++i) {
      const float value = values[static_cast<size_t>(i)];
      // A block whose scale rounds to zero decodes to zeros whatever its codes are.
      const float x = scale == 0 ? 0.0f : multiplies ? value * reciprocal : value / scale;
      put_code(format, words, i + padding, nearest(x));
    }
  });
}

void table_encode(const TableFormat& format, std::span<const float> values, std::span<const float> codebook,
                  PackedWeight& weight) {
  check_table(format, codebook);
  std::ranges::copy(codebook, weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  if (format.rule == ScaleRule::small_float) {
    store_float_scales(format, values, weight);
    return table_recode(format, weight, values);
  }
  float largest = table_max(codebook);
  if (format.tensor_scale) {
    const float factor = fitting_tensor_scale(format, values, largest);
    weight.plane(PlaneRole::tensor_scale).bytes.as<float>()[0] = factor;
    largest *= factor;
  }
  const double gain = format.rule == ScaleRule::group_norm ? rotated_gain(codebook, format.bits) : 1;
  std::vector<float> maxima;  // of nested scales
  Plane& scales = weight.plane(PlaneRole::scales);
  for_each_block(format, weight.n, weight.k, [&](int64_t index, int64_t begin, int64_t end) {
    const auto part = values.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    if (format.scale == ScaleType::nested) return maxima.push_back(table_max(part));
    put_scale(scales, static_cast<size_t>(index),
              block_scale(format, part, largest, gain, block_of(format, weight.k)).bits);
  });
  if (format.scale == ScaleType::nested) store_nested(maxima, weight);
  table_recode(format, weight, values);
}

}  // namespace w4q::formats
