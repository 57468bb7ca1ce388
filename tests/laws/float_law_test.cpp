// The laws of small floats and of blocks: what a dialect holds of NVFP4, MXFP4, MXFP8 and FP8 it reads again, every way from
// one to another and back gives the same tensors, byte by byte; and blocks of GGUF that were decoded are written with the
// same values.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>

#include "checkpoint/dialect/dialect.h"
#include "core/rng.h"
#include "dialect_samples.h"
#include "formats/gguf_blocks.h"
#include "formats/gguf_forms.h"
#include "quantize/gguf.h"
#include "registries.h"

namespace w4q::test {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::StoredTensor;

/// Every code but NaN, and zeros of both signs.
void draw_codes(PackedWeight& weight, uint64_t seed) {
  auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto bits = static_cast<size_t>(weight.scheme.bits), units = static_cast<size_t>((weight.k + 31) / 32);
  const auto past = static_cast<uint32_t>(weight.k % 32);
  for (size_t unit = 0; unit * bits < words.size(); ++unit) {
    const auto planes = words.subspan(unit * bits, bits);
    uint32_t ones = 0xFFFFFFFFu;
    for (size_t p = 0; p < bits; ++p) {
      planes[p] = static_cast<uint32_t>(random_bits(seed, unit * 8 + p));
      if (p + 1 < bits) ones &= planes[p];
    }
    if (bits == 8) planes[0] &= ~ones;  // 0x7F and 0xFF
    const bool last = unit % units == units - 1;
    for (uint32_t& plane : planes) plane &= last && past != 0 ? (1u << past) - 1 : 0xFFFFFFFFu;
  }
}

/// Scales that their type has, and a factor; none is zero.
void draw_scales(PackedWeight& weight, uint64_t seed) {
  using formats::ScaleType;
  auto& plane = weight.plane(PlaneRole::scales);
  const auto count = static_cast<size_t>(element_count(plane.spec.shape));
  for (size_t i = 0; i < count; ++i) {
    const uint64_t draw = random_bits(seed + 1, i);
    const float value = std::ldexp(1.0f + static_cast<float>(draw % 128) / 128, static_cast<int>(draw >> 8 & 7) - 10);
    switch (weight.scheme.scale) {
      case ScaleType::e4m3:
        plane.bytes.as<uint8_t>()[i] = static_cast<uint8_t>(1 + draw % 126);
        break;
      case ScaleType::e8m0:
        plane.bytes.as<uint8_t>()[i] = static_cast<uint8_t>(100 + draw % 40);
        break;
      case ScaleType::f16:
        plane.bytes.as<uint16_t>()[i] = f16_from_f32(value);
        break;
      case ScaleType::bf16:
        plane.bytes.as<uint16_t>()[i] = bf16_from_f32(value);
        break;
      default:
        plane.bytes.as<float>()[i] = value;
    }
  }
  if (weight.scheme.scale != ScaleType::e4m3) return;
  const auto exponent = static_cast<int>(random_bits(seed + 2, 0) % 24) - 16;
  weight.plane(PlaneRole::tensor_scale).bytes.as<float>()[0] = std::ldexp(1.0f, exponent);
}

PackedWeight sample_float(const Scheme& scheme, int64_t n, int64_t k, uint64_t seed) {
  const std::vector<float> ones(static_cast<size_t>(n * k), 1.0f);
  PackedWeight weight = encoded(scheme, ones, n, k);
  draw_codes(weight, seed);
  draw_scales(weight, seed);
  formats::scheme_row(scheme.family).validate(weight, "w");
  return weight;
}

struct HeldFloat {
  const checkpoint::DialectRow* row;
  checkpoint::PackedLinearInfo info;
  std::vector<StoredTensor> tensors;

  PackedWeight read() const { return row->decode(info, clone(tensors)); }
};

/// Nothing where the dialect does not hold the weight as it is.
std::optional<HeldFloat> hold_float(const checkpoint::DialectRow& row, const PackedWeight& weight) {
  const checkpoint::PackedLinearInfo info{
      "w", weight.n, weight.k, DType::bf16, {{weight.scheme, std::string(formats::canonical_layout)}}};
  const checkpoint::DialectFit fit = row.fit(info);
  if (!fit.scheme || !fit.loses.empty() || *fit.scheme != weight.scheme) return std::nullopt;
  if (row.refuses != nullptr && !row.refuses(weight).empty()) return std::nullopt;
  return HeldFloat{&row, dialect_info(row, weight.scheme, weight.n, weight.k), row.encode(weight)};
}

bool same_tensors(const std::vector<StoredTensor>& a, const std::vector<StoredTensor>& b) {
  return std::ranges::equal(a, b, [](const StoredTensor& x, const StoredTensor& y) {
    return x.spec == y.spec && std::ranges::equal(x.bytes.bytes(), y.bytes.bytes());
  });
}

/// Blocks of GGUF hold MXFP4 too (formats/gguf_decoders.h): an exponent one lower, since their levels are twice those of
/// E2M1, and nibbles of weights 0–15 and 16–31.
void expect_blocks_of_mxfp4(const PackedWeight& weight) {
  std::vector<float> expected(static_cast<size_t>(weight.k)), found(expected.size());
  std::vector<std::byte> blocks(static_cast<size_t>(weight.k / 32 * 17));
  const auto& row = formats::scheme_row(weight.scheme.family);
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto scales = weight.plane(PlaneRole::scales).bytes.as<uint8_t>();
  const auto units = static_cast<size_t>(weight.k / 32);
  for (int64_t r = 0; r < weight.n; ++r) {
    for (size_t unit = 0; unit < units; ++unit) {
      const size_t at = static_cast<size_t>(r) * units + unit;
      std::byte* const block = blocks.data() + unit * 17;
      block[0] = std::byte{scales[at]};
      for (size_t i = 0; i < 16; ++i) {
        unsigned both = 0;
        for (size_t p = 0; p < 4; ++p) {
          both |= (words[at * 4 + p] >> i & 1u) << p | (words[at * 4 + p] >> (i + 16) & 1u) << (p + 4);
        }
        block[1 + i] = static_cast<std::byte>(both);
      }
    }
    row.decode_row(weight, r, expected);
    formats::gguf_decode(GgmlType::mxfp4, blocks, found);
    ASSERT_TRUE(std::ranges::equal(expected, found)) << "row " << r;
  }
}

/// All edges between the dialects that hold a weight; the number of weights that went over them, there and back.
int64_t walk_float_edges(const PackedWeight& weight) {
  std::vector<HeldFloat> all;
  for (const auto& row : checkpoint::dialect_registry()) {
    if (auto held = hold_float(row, weight)) all.push_back(std::move(*held));
  }
  int64_t weights = 0;
  for (const HeldFloat& from : all) {
    const PackedWeight read = from.read();
    EXPECT_TRUE(formats::bytes_equal(read, weight)) << from.row->name;
    for (const HeldFloat& to : all) {
      SCOPED_TRACE(std::string(from.row->name) + " → " + std::string(to.row->name));
      const auto there = hold_float(*to.row, read);
      if (!there) {
        ADD_FAILURE() << "it is held no more";
        continue;
      }
      const auto back = hold_float(*from.row, there->read());
      EXPECT_TRUE(back && same_tensors(back->tensors, from.tensors));
      weights += weight.n * weight.k;
    }
  }
  return weights;
}

/// 10⁸, or as many as W4Q_LAW_WEIGHTS says.
int64_t wanted_float_weights() {
  const char* text = std::getenv("W4Q_LAW_WEIGHTS");
  return text == nullptr ? 100'000'000 : std::max<int64_t>(1, std::atoll(text));
}

TEST(FloatLaw, EveryEdgeGivesTheSameTensors) {
  constexpr const char* schemes[] = {
      "nvfp4",       "mxfp4",        "mxfp8",           "nvfp4-div",        "fp8-tensor",
      "fp8-channel", "fp8-block128", "fp8-channel-f16", "fp8-channel-bf16", "fp8-block128-bf16"};
  const int64_t wanted = wanted_float_weights();
  std::map<std::string, int64_t> weights;
  int64_t sum = 0;
  for (uint64_t seed = 1; sum < wanted && !::testing::Test::HasFailure(); ++seed) {
    const std::string name = schemes[seed % std::size(schemes)];
    const auto draw = [&](uint64_t index, uint64_t bound) {
      return static_cast<int64_t>(random_bits(seed, index) % bound);
    };
    const bool whole = draw(0, 3) != 0;  // sizes that every dialect takes
    const int64_t n = whole ? 32 * (1 + draw(1, 12)) : 1 + draw(1, 300), k = 32 * (1 + draw(2, 24));
    SCOPED_TRACE(name + " " + std::to_string(n) + " × " + std::to_string(k));
    const PackedWeight weight = sample_float(formats::parse_scheme(name), n, k, seed);
    if (name == "mxfp4") expect_blocks_of_mxfp4(weight);
    const int64_t walked = walk_float_edges(weight);
    weights[name] += walked;
    sum += walked;
  }
  EXPECT_GE(sum, wanted);
  for (const char* name : schemes) EXPECT_GT(weights[name], wanted / 100) << name;
  RecordProperty("weights", std::to_string(sum));
}

constexpr int64_t block_columns = 1024;

/// As many as meet every type and kind, or as W4Q_BLOCK_WEIGHTS says.
int64_t wanted_block_weights() {
  const char* text = std::getenv("W4Q_BLOCK_WEIGHTS");
  return text == nullptr ? 1'200'000 : std::max<int64_t>(1, std::atoll(text));
}

/// Weights as models have them, and what they seldom are: of heavy tails, all of one sign, mostly zeros, of few values,
/// and rows of any size that f16 has.
float weight_of_kind(uint64_t kind, uint64_t seed, uint64_t index) {
  const double x = random_normal(seed, index);
  switch (kind) {
    case 0:
      return static_cast<float>(0.02 * x);
    case 1:
      return static_cast<float>(0.01 * x * x * x);
    case 2:
      return static_cast<float>(0.02 + 0.004 * x);
    case 3:
      return random_bits(seed + 1, index) % 16 == 0 ? static_cast<float>(0.05 * x) : 0.0f;
    case 4:
      return static_cast<float>(std::round(2 * x)) * 0.0078125f;
    default:
      return static_cast<float>(
          std::ldexp(x, static_cast<int>(random_bits(seed + 1, index / block_columns) % 20) - 14));
  }
}

constexpr uint64_t weight_kinds = 6;

/// Of blocks with offsets some sums of a step and an offset are rounded where all weights have one sign, and parts of two
/// values or three say themselves in too many ways where most are zeros. Measured over 2·10⁷ weights: .6 % of such blocks.
bool is_seldom(uint64_t kind) { return kind == 2 || kind == 3; }
constexpr double seldom_part = 0.02;

int64_t count_other_blocks(std::span<const float> a, std::span<const float> b, int64_t block) {
  int64_t count = 0;
  const auto width = static_cast<size_t>(block);
  for (size_t i = 0; i < a.size(); i += width) {
    count += std::ranges::equal(a.subspan(i, width), b.subspan(i, width)) ? 0 : 1;
  }
  return count;
}

/// Blocks as they are, f32, blocks again: no value changes, and what is written then comes back byte for byte.
void expect_values_kept(GgmlType type, int64_t rows, uint64_t kind, uint64_t seed) {
  const auto& form = *formats::find_gguf_form(type);
  std::vector<float> values(static_cast<size_t>(rows * block_columns));
  for (size_t i = 0; i < values.size(); ++i) values[i] = weight_of_kind(kind, seed, i);
  const auto blocks_of = [&] {
    const TensorView view{"w", DType::f32, {rows, block_columns}, std::as_bytes(std::span(values))};
    return quantize::gguf_blocks(view, form, nullptr);
  };
  const Buffer first = blocks_of();
  formats::gguf_decode(type, first.bytes(), values);
  const std::vector<float> decoded = values;
  const Buffer second = blocks_of();
  formats::gguf_decode(type, second.bytes(), values);
  const double others = static_cast<double>(count_other_blocks(decoded, values, form.block));
  if (is_seldom(kind)) {
    EXPECT_LE(others, seldom_part * static_cast<double>(rows * block_columns / form.block));
    return;
  }
  EXPECT_EQ(others, 0);
  EXPECT_TRUE(std::ranges::equal(blocks_of().bytes(), second.bytes()));
}

TEST(FloatLaw, BlocksThatWereDecodedKeepTheirValues) {
  constexpr GgmlType types[] = {GgmlType::q2_k, GgmlType::q3_k, GgmlType::q4_k,
                                GgmlType::q5_k, GgmlType::q6_k, GgmlType::iq4_xs};
  const int64_t wanted = wanted_block_weights();
  const int64_t rows =
      wanted < 10'000'000 ? 32 : 256;  // few, so that every type meets every kind; or many, for threads
  uint64_t seed = 0;
  for (int64_t sum = 0; sum < wanted && !::testing::Test::HasFailure(); sum += rows * block_columns, ++seed) {
    const GgmlType type = types[seed % std::size(types)];
    const uint64_t kind = seed / std::size(types) % weight_kinds;
    SCOPED_TRACE(std::string(ggml_type_name(type)) + ", kind " + std::to_string(kind) + ", seed " +
                 std::to_string(seed));
    expect_values_kept(type, rows, kind, seed);
  }
}

}  // namespace
}  // namespace w4q::test
