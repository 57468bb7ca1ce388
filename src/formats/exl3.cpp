#include "formats/exl3.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/error.h"
#include "core/float_formats.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "core/text.h"
#include "formats/scale_codec.h"
#include "formats/scale_range.h"
#include "formats/table/group_norm.h"

namespace w4q::formats {
namespace {

constexpr std::string_view form = "exl3-<1 to 8>[-mcg|-3inst]; code mul1 otherwise";
constexpr std::pair<TrellisCode, std::string_view> codes[] = {
    {TrellisCode::mul1, ""}, {TrellisCode::mcg, "-mcg"}, {TrellisCode::three_inst, "-3inst"}};
constexpr size_t states_of_code = size_t{1} << exl3_window;
constexpr int64_t block_tiles = exl3_block / exl3_tile;
constexpr auto block_width = static_cast<size_t>(exl3_block);
constexpr size_t block_values = block_width * block_width;
/// No plane of so many weights, counted in bits, overflows 64 bits.
constexpr int64_t max_weights = int64_t{1} << 48;
constexpr uint64_t sign_seed = 42;
/// Above the largest magnitude of a level of any code: 3.973.
constexpr double largest_level = 4;

Scheme make(int bits, TrellisCode code) {
  return {.family = SchemeFamily::exl3,
          .bits = bits,
          .block = whole_row,
          .scale = ScaleType::f16,
          .window = exl3_window,
          .code = code};
}

std::vector<Scheme> representative_schemes() { return {make(2, TrellisCode::mul1), make(5, TrellisCode::mcg)}; }

std::string print(const Scheme& scheme) {
  const auto* const found = std::ranges::find(codes, scheme.code, [](const auto& row) { return row.first; });
  return concat("exl3-", scheme.bits, found == std::end(codes) ? "-?" : found->second);
}

std::optional<Scheme> parse(std::string_view text) {
  for (int bits = exl3_min_bits; bits <= exl3_max_bits; ++bits) {
    for (const auto& [code, name] : codes) {
      if (const Scheme scheme = make(bits, code); print(scheme) == text) return scheme;
    }
  }
  return std::nullopt;
}

std::vector<PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  check_dimensions(n, k, to_string(scheme));
  const int64_t outputs = exl3_padded(n), inputs = exl3_padded(k);
  if (outputs > max_weights / inputs) {
    throw Error(ErrorCode::unsupported, concat(to_string(scheme), ": cannot pack ", n, " outputs × ", k, " inputs"))
        .detail("a weight has at most 2^48 values");
  }
  return {{PlaneRole::codes, DType::i16, {inputs / exl3_tile, outputs / exl3_tile, 16 * int64_t{scheme.bits}}},
          {PlaneRole::scales, DType::f16, {outputs}},
          {PlaneRole::input_scales, DType::f16, {inputs}}};
}

void check_scales(const PackedWeight& weight, PlaneRole role, std::string_view name) {
  const Plane& plane = weight.plane(role);
  if (std::isfinite(scale_range(plane, ScaleType::f16).largest)) return;
  const std::string_view side = role == PlaneRole::scales ? "output " : "input ";
  for (int64_t i = 0; i < plane.spec.shape[0]; ++i) {
    const float scale = load_scale(plane, static_cast<size_t>(i));
    if (std::isfinite(scale)) continue;
    throw Error(ErrorCode::bad_file, concat(printable(name), ": plane ", to_string(role), " holds ", scale))
        .detail(concat(side, i, "; expected a finite number"))
        .hint("the checkpoint is damaged: fetch it again");
  }
}

void validate(const PackedWeight& canonical, std::string_view name) {
  check_canonical(scheme_row(SchemeFamily::exl3), canonical, name);
  check_dimensions(canonical.n, canonical.k, name);
  check_planes(canonical, planes(canonical.scheme, canonical.n, canonical.k), name);
  for (const PlaneRole role : {PlaneRole::scales, PlaneRole::input_scales}) check_scales(canonical, role, name);
}

std::optional<float> largest_scale(const PackedWeight& packed, std::string_view) {
  const float outputs = scale_range(packed.plane(PlaneRole::scales), ScaleType::f16).largest;
  const float inputs = scale_range(packed.plane(PlaneRole::input_scales), ScaleType::f16).largest;
  if (!std::isfinite(outputs) || !std::isfinite(inputs)) return std::nullopt;
  return outputs;
}

void decode_row(const PackedWeight& canonical, int64_t row, std::span<float> out) {
  exl3_decode_rows(canonical, row, {out.data(), 1, static_cast<int64_t>(out.size())});
}

/// Some outputs of a block, from its inner values: turns both sides and puts the scales on.
void turn_block(std::span<float> inner, std::span<const float> inputs, const float* outputs, int64_t first,
                MatrixView<float> out) {
  for (size_t input = 0; input < block_width; ++input) hadamard(inner.subspan(input * block_width, block_width));
  std::array<float, block_width> row{};
  for (int64_t r = 0; r < out.rows; ++r) {
    for (size_t input = 0; input < block_width; ++input) {
      row[input] = inner[input * block_width + static_cast<size_t>(first + r)];
    }
    hadamard(row);
    for (size_t c = 0; c < static_cast<size_t>(out.cols); ++c) {
      out.row(r)[c] = row[c] * exl3_turned * inputs[c] * outputs[r];
    }
  }
}

void recode(PackedWeight& weight, std::span<const float> values) {
  check_values(values, weight.n, weight.k);
  const auto targets = exl3_inner_targets(weight, {values.data(), weight.n, weight.k});
  auto search = exl3_search(weight.scheme, trellis_plain_step, exl3_levels(weight.scheme.code));
  const int64_t tiles = exl3_padded(weight.n) / exl3_tile;
  for (int64_t tile = 0; tile < tiles; ++tile) exl3_search_tiles(search, targets, tile, weight);
}

PackedWeight encode(const Scheme& scheme, std::span<const float> values, int64_t n, int64_t k,
                    std::span<const float> codebook) {
  check_values(values, n, k);
  if (!codebook.empty()) {
    throw Error(ErrorCode::bad_argument, concat("encode: ", print(scheme), " has no table: its levels are computed"));
  }
  PackedWeight weight = exl3_allocate(scheme, {values.data(), n, k});
  recode(weight, values);
  return weight;
}

/// A weight may pay for those that share its bits: no more is sure than that it is a mean of 128 · 128 levels times the
/// scales, of which the output's is at most its largest weight.
double error_bound(const Scheme& scheme, double absmax, std::span<const float>) {
  const double step = 1 / exl3_factor(scheme) * (1 + 0x1p-10);
  return absmax + exl3_block * largest_level * step * (absmax * (1 + 0x1p-10) + 0x1p-24);
}

double bits_per_weight(const Scheme& scheme, int64_t n, int64_t k) {
  return bits_per_weight_of_planes(planes(scheme, n, k), n, k);
}

BitPlace place(const Scheme& scheme, int64_t n, int64_t, int64_t row, int64_t col, int bit) {
  const int weight = exl3_weight(static_cast<int>(col % exl3_tile), static_cast<int>(row % exl3_tile));
  const int at = (weight + 1) * scheme.bits - 1 - bit;
  const int64_t tile = col / exl3_tile * (exl3_padded(n) / exl3_tile) + row / exl3_tile;
  return {tile * 8 * scheme.bits + at / 32, 31 - at % 32, row};
}

std::vector<float> make_levels(TrellisCode code) {
  std::vector<float> levels(states_of_code);
  for (size_t state = 0; state < states_of_code; ++state) {
    levels[state] = exl3_level(code, static_cast<uint32_t>(state));
  }
  return levels;
}

uint16_t scale_bits(float value, int64_t sign_index) {
  const StoredScale stored = store_scale(value, ScaleType::f16);
  return static_cast<uint16_t>(stored.bits | (exl3_sign(sign_index) < 0 ? 0x8000u : 0u));
}

/// Both halves, masked and mixed into exponents near one, added in f16.
float sum_of_halves(uint32_t x) noexcept {
  x = (x & 0x8FFF8FFFu) ^ 0x3B603B60u;
  const float sum = f32_from_f16(static_cast<uint16_t>(x & 0xFFFF)) + f32_from_f16(static_cast<uint16_t>(x >> 16));
  return f32_from_f16(f16_from_f32(sum));
}

float inverse(float scale) noexcept { return scale == 0 ? 0 : 1 / scale; }

std::vector<float> inverses(const Plane& scales) {
  std::vector<float> result(static_cast<size_t>(scales.spec.shape[0]));
  for (size_t i = 0; i < result.size(); ++i) result[i] = inverse(load_scale(scales, i));
  return result;
}

}  // namespace

float exl3_level(TrellisCode code, uint32_t state) noexcept {
  if (code == TrellisCode::three_inst) return sum_of_halves(state * 89226354u + 64248484u);
  if (code == TrellisCode::mcg) return sum_of_halves(state * exl3_mcg);
  // A fused multiply-add of f16, whose terms and sum fp32 holds exactly.
  const float total = static_cast<float>(trellis_level(state) + trellis_largest_level + 1024);
  return f32_from_f16(f16_from_f32(total * f32_from_f16(0x1EEE) + f32_from_f16(0xC931)));
}

std::span<const float> exl3_levels(TrellisCode code) {
  static const std::vector<float> mul1 = make_levels(TrellisCode::mul1), mcg = make_levels(TrellisCode::mcg),
                                  three_inst = make_levels(TrellisCode::three_inst);
  return code == TrellisCode::mul1 ? mul1 : code == TrellisCode::mcg ? mcg : three_inst;
}

std::span<const uint32_t> exl3_words(const PackedWeight& canonical, int64_t input_tile, int64_t output_tile) {
  const auto words = 8 * static_cast<size_t>(canonical.scheme.bits);
  const int64_t tile = input_tile * (exl3_padded(canonical.n) / exl3_tile) + output_tile;
  return canonical.plane(PlaneRole::codes).bytes.as<uint32_t>().subspan(static_cast<size_t>(tile) * words, words);
}

std::span<uint32_t> exl3_words(PackedWeight& canonical, int64_t input_tile, int64_t output_tile) {
  const auto words = exl3_words(std::as_const(canonical), input_tile, output_tile);
  const auto all = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto known = std::as_const(canonical).plane(PlaneRole::codes).bytes.as<uint32_t>();
  return all.subspan(static_cast<size_t>(words.data() - known.data()), words.size());
}

void exl3_get(std::span<const uint32_t> words, int bits, Exl3States& states) noexcept {
  const size_t count = words.size();
  for (int t = 0; t < exl3_tile_weights; ++t) {
    const auto last = static_cast<size_t>((t + 1) * bits - 1);  // bit of the stream
    const size_t word = last / 32;
    const uint64_t pair = uint64_t{words[(word + count - 1) % count]} << 32 | words[word];
    states[static_cast<size_t>(t)] = static_cast<uint32_t>(pair >> (31 - last % 32) & 0xFFFF);
  }
}

void exl3_put(const Exl3States& states, int bits, std::span<uint32_t> words) noexcept {
  std::ranges::fill(words, 0u);
  const uint32_t mask = (1u << bits) - 1;
  for (int t = 0; t < exl3_tile_weights; ++t) {
    const auto last = static_cast<size_t>((t + 1) * bits - 1);
    const size_t word = last / 32;
    const uint64_t pair = uint64_t{states[static_cast<size_t>(t)] & mask} << (31 - last % 32);
    words[word] |= static_cast<uint32_t>(pair);
    if (word > 0) words[word - 1] |= static_cast<uint32_t>(pair >> 32);
  }
}

void exl3_inner_block(const PackedWeight& canonical, int64_t input_block, int64_t output_block,
                      std::span<float> values) {
  const auto levels = exl3_levels(canonical.scheme.code);
  Exl3States states;
  for (int64_t tile = 0; tile < block_tiles * block_tiles; ++tile) {
    const int64_t in = tile / block_tiles, out = tile % block_tiles;
    exl3_get(exl3_words(canonical, input_block * block_tiles + in, output_block * block_tiles + out),
             canonical.scheme.bits, states);
    float* const corner = values.data() + in * exl3_tile * exl3_block + out * exl3_tile;
    for (int t = 0; t < exl3_tile_weights; ++t) {
      corner[exl3_input(t) * exl3_block + exl3_output(t)] = levels[states[static_cast<size_t>(t)]];
    }
  }
}

float exl3_sign(int64_t index) noexcept {
  return (random_bits(sign_seed, static_cast<uint64_t>(index)) & 1) != 0 ? 1.0f : -1.0f;
}

void exl3_put_scales(PackedWeight& canonical, std::span<const float> inputs, std::span<const float> outputs) {
  const auto put = [](Plane& plane, std::span<const float> scales, bool of_outputs) {
    const auto bits = plane.bytes.as<uint16_t>();
    for (size_t i = 0; i < bits.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      bits[i] = scale_bits(i < scales.size() ? scales[i] : 1.0f, of_outputs ? -1 - index : index);
    }
  };
  put(canonical.plane(PlaneRole::input_scales), inputs, false);
  put(canonical.plane(PlaneRole::scales), outputs, true);
}

double exl3_factor(const Scheme& scheme) noexcept {
  // Measured on normal weights; the levels of mul1 have a root mean square of 1, those of the other codes 1.244.
  constexpr std::array<double, exl3_max_bits> of_mul1{1.06, 1.01, .94, .90, .86, .83, .81, .80};
  constexpr double of_others = 1.19;
  return of_mul1[static_cast<size_t>(scheme.bits - 1)] * (scheme.code == TrellisCode::mul1 ? 1 : of_others);
}

std::vector<float> exl3_inner_targets(const PackedWeight& canonical, MatrixView<const float> weight) {
  const int64_t outputs = exl3_padded(weight.rows), inputs = exl3_padded(weight.cols);
  const auto of_inputs = inverses(canonical.plane(PlaneRole::input_scales));
  const auto of_outputs = inverses(canonical.plane(PlaneRole::scales));
  std::vector<float> targets(static_cast<size_t>(outputs * inputs));
  parallel_for(outputs / exl3_block, 1, [&](int64_t block, int64_t) {
    const std::span<float> band(targets.data() + block * exl3_block * inputs, static_cast<size_t>(exl3_block * inputs));
    const int64_t first = block * exl3_block;
    for (int64_t r = 0; r < std::min(exl3_block, weight.rows - first); ++r) {
      float* const row = band.data() + r * inputs;
      for (int64_t c = 0; c < weight.cols; ++c) {
        row[c] =
            weight.row(first + r)[c] * of_outputs[static_cast<size_t>(first + r)] * of_inputs[static_cast<size_t>(c)];
      }
      for (int64_t c = 0; c < inputs; c += exl3_block) hadamard({row + c, block_width});
    }
    std::array<float, block_width> column{};
    for (int64_t c = 0; c < inputs; ++c) {
      for (int64_t r = 0; r < exl3_block; ++r)
        column[static_cast<size_t>(r)] = band[static_cast<size_t>(r * inputs + c)];
      hadamard(column);
      for (int64_t r = 0; r < exl3_block; ++r) {
        band[static_cast<size_t>(r * inputs + c)] = column[static_cast<size_t>(r)] * exl3_turned;
      }
    }
  });
  return targets;
}

TrellisSearch exl3_search(const Scheme& scheme, TrellisStep step, std::span<const float> step_levels) {
  return {{scheme.bits, exl3_window, exl3_levels(scheme.code), exl3_tile_weights}, step, step_levels};
}

void exl3_search_tiles(TrellisSearch& search, std::span<const float> targets, int64_t output_tile,
                       PackedWeight& canonical) {
  const int64_t inputs = exl3_padded(canonical.k);
  std::array<float, exl3_tile_weights> wanted{};
  Exl3States states{};
  for (int64_t input_tile = 0; input_tile < inputs / exl3_tile; ++input_tile) {
    check_interrupt();  // a search takes tens of milliseconds
    const float* const corner = targets.data() + output_tile * exl3_tile * inputs + input_tile * exl3_tile;
    for (int t = 0; t < exl3_tile_weights; ++t) {
      wanted[static_cast<size_t>(t)] = corner[exl3_output(t) * inputs + exl3_input(t)];
    }
    search.ring(wanted, states);
    exl3_put(states, canonical.scheme.bits, exl3_words(canonical, input_tile, output_tile));
  }
}

PackedWeight exl3_allocate(const Scheme& scheme, MatrixView<const float> weight) {
  PackedWeight packed = allocate_canonical(scheme, weight.rows, weight.cols);
  std::vector<float> outputs(static_cast<size_t>(weight.rows));
  for (int64_t row = 0; row < weight.rows; ++row) {
    outputs[static_cast<size_t>(row)] =
        static_cast<float>(rotated_norm({weight.row(row), static_cast<size_t>(weight.cols)}, 1));
  }
  const std::vector<float> inputs(static_cast<size_t>(weight.cols), static_cast<float>(1 / exl3_factor(scheme)));
  exl3_put_scales(packed, inputs, outputs);
  return packed;
}

void exl3_decode_rows(const PackedWeight& canonical, int64_t begin, MatrixView<float> out) {
  ensure(canonical.layout == canonical_layout, "decode_rows: not the canonical layout");
  ensure(begin >= 0 && begin + out.rows <= canonical.n && out.cols == canonical.k, "decode_rows: wrong rows");
  const auto scales_of = [&](PlaneRole role) {
    const Plane& plane = canonical.plane(role);
    std::vector<float> scales(static_cast<size_t>(plane.spec.shape[0]));
    load_scales(plane, 0, scales);
    return scales;
  };
  const auto inputs = scales_of(PlaneRole::input_scales), outputs = scales_of(PlaneRole::scales);
  std::vector<float> inner(block_values);
  for (int64_t row = begin, count = 0; row < begin + out.rows; row += count) {
    count = std::min(begin + out.rows - row, exl3_block - row % exl3_block);
    for (int64_t col = 0; col < canonical.k; col += exl3_block) {
      const int64_t width = std::min(exl3_block, canonical.k - col);
      exl3_inner_block(canonical, col / exl3_block, row / exl3_block, inner);
      turn_block(inner, std::span(inputs).subspan(static_cast<size_t>(col)), outputs.data() + row, row % exl3_block,
                 {out.row(row - begin) + col, count, width, out.stride});
    }
  }
}

SchemeRow exl3_row() {
  return {.family = SchemeFamily::exl3,
          .name = "exl3",
          .description = "1 to 8 bits of closed streams of 16 × 16 tiles, a computed code, rotated on both sides",
          .form = form,
          .schemes = representative_schemes,
          .print = print,
          .parse = parse,
          .table = nullptr,
          .planes = planes,
          .validate = validate,
          .largest_scale = largest_scale,
          .decode_row = decode_row,
          .encode = encode,
          .recode = recode,
          .error_bound = error_bound,
          .bits_per_weight = bits_per_weight,
          .place = place,
          .decode_rows = exl3_decode_rows};
}

}  // namespace w4q::formats
