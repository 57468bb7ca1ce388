// The EXL3 family: what exllamav3 itself decodes, places, padding, what is refused.
#include "formats/exl3.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/convert.h"
#include "core/float_formats.h"
#include "core/rng.h"
#include "core/text.h"
#include "io/checkpoint.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::formats {
namespace {

const SchemeRow& exl3_row() { return scheme_row(SchemeFamily::exl3); }

constexpr std::pair<TrellisCode, std::string_view> code_names[] = {
    {TrellisCode::mul1, "mul1"}, {TrellisCode::mcg, "mcg"}, {TrellisCode::three_inst, "3inst"}};

Scheme exl3(int bits, TrellisCode code = TrellisCode::mul1) {
  constexpr std::string_view suffixes[] = {"", "-mcg", "-3inst"};
  return parse_scheme(concat("exl3-", bits, suffixes[static_cast<size_t>(code)]));
}

/// Random codes and scales.
PackedWeight random_weight(const Scheme& scheme, int64_t n, int64_t k, uint64_t seed = 7) {
  PackedWeight weight = allocate_canonical(scheme, n, k);
  uint64_t draw = 0;
  for (uint32_t& word : weight.plane(PlaneRole::codes).bytes.as<uint32_t>()) {
    word = static_cast<uint32_t>(random_bits(seed, draw++));
  }
  for (const PlaneRole role : {PlaneRole::scales, PlaneRole::input_scales}) {
    for (uint16_t& bits : weight.plane(role).bytes.as<uint16_t>()) {
      bits = f16_from_f32(static_cast<float>(random_normal(seed, draw++)));
    }
  }
  return weight;
}

class Golden {
 public:
  Golden() : file_(io::Checkpoint::open(test::testdata() / "golden/exl3.safetensors")) {}

  bool has(const std::string& name) const { return file_.contains(name); }
  Buffer bytes(const std::string& name) const { return Buffer::copy_of(file_.load(name)->bytes); }
  std::vector<float> values(const std::string& name) const {
    std::vector<float> result(static_cast<size_t>(element_count(file_.at(name).shape)));
    widen(file_.load(name)->bytes, DType::f16, result);
    return result;
  }

 private:
  io::Checkpoint file_;
};

TEST(Exl3, InnerValuesAreTheProgramsBitForBit) {
  const Golden golden;
  int checked = 0;
  for (const auto& [code, name] : code_names) {
    for (int bits = exl3_min_bits; bits <= exl3_max_bits; ++bits) {
      const std::string tag = concat(name, ".", bits);
      if (!golden.has(tag + ".trellis")) continue;
      const Buffer words = golden.bytes(tag + ".trellis");
      const auto inner = golden.values(tag + ".inner");  // [32 inputs, 16 outputs]
      for (size_t tile = 0; tile < 2; ++tile) {
        Exl3States states{};
        const auto count = 8 * static_cast<size_t>(bits);
        exl3_get(words.as<uint32_t>().subspan(tile * count, count), bits, states);
        for (int t = 0; t < exl3_tile_weights; ++t) {
          const size_t input = tile * 16 + static_cast<size_t>(exl3_input(t));
          EXPECT_EQ(exl3_level(code, states[static_cast<size_t>(t)]),
                    inner[input * 16 + static_cast<size_t>(exl3_output(t))])
              << tag << " tile " << tile << " weight " << t;
        }
        std::vector<uint32_t> again(count);
        exl3_put(states, bits, again);
        EXPECT_TRUE(std::ranges::equal(again, words.as<uint32_t>().subspan(tile * count, count))) << tag;
      }
      ++checked;
    }
  }
  EXPECT_EQ(checked, 10);  // 1 to 8 bits of mul1, 3 of the others
}

/// The program rounds to f16 between its steps: 7e-4 of the largest was measured for it.
TEST(Exl3, AWholeBlockIsTheProgramsUpToItsRounding) {
  const Golden golden;
  PackedWeight weight = allocate_canonical(exl3(3), 128, 128);
  weight.plane(PlaneRole::codes).bytes = golden.bytes("block.trellis");
  weight.plane(PlaneRole::scales).bytes = golden.bytes("block.svh");
  weight.plane(PlaneRole::input_scales).bytes = golden.bytes("block.suh");
  exl3_row().validate(weight, "w");
  const auto expected = golden.values("block.weight");  // [inputs, outputs]
  const auto decoded = test::decode(weight);
  double largest = 0, off = 0;
  for (size_t o = 0; o < 128; ++o) {
    for (size_t i = 0; i < 128; ++i) {
      largest = std::max<double>(largest, std::abs(expected[i * 128 + o]));
      off = std::max<double>(off, std::abs(double{expected[i * 128 + o]} - double{decoded[o * 128 + i]}));
    }
  }
  EXPECT_LT(off, 1e-3 * largest);
}

/// All that the program decoded: two linears, one with several blocks on both sides.
TEST(Exl3, WholeLinearsAreTheProgramsUpToItsRounding) {
  W4Q_NEEDS_SHARED_DATA();
  const auto path = test::shared_data() / "exl3/golden.safetensors";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "needs exllamav3's golden vectors beside the repository";
  const auto file = io::Checkpoint::open(path);
  const auto values = [&](const std::string& name) {
    std::vector<float> result(static_cast<size_t>(element_count(file.at(name).shape)));
    widen(file.load(name)->bytes, DType::f16, result);
    return result;
  };
  int checked = 0;
  for (const auto& [name, info] : file.tensors()) {
    if (!name.ends_with(".trellis")) continue;
    const std::string tag = name.substr(0, name.size() - std::string_view(".trellis").size());
    const auto* const code =
        std::ranges::find_if(code_names, [&](const auto& row) { return tag.starts_with(row.second); });
    const int64_t k = info.shape[0] * 16, n = info.shape[1] * 16;
    PackedWeight weight = allocate_canonical(exl3(static_cast<int>(info.shape[2] / 16), code->first), n, k);
    weight.plane(PlaneRole::codes).bytes = Buffer::copy_of(file.load(name)->bytes);
    weight.plane(PlaneRole::scales).bytes = Buffer::copy_of(file.load(tag + ".svh")->bytes);
    weight.plane(PlaneRole::input_scales).bytes = Buffer::copy_of(file.load(tag + ".suh")->bytes);
    const auto inner = values(tag + ".inner"), expected = values(tag + ".weight");  // [inputs, outputs]
    std::vector<float> block(128 * 128);
    for (int64_t b = 0; b < k / 128 * (n / 128); ++b) {
      const int64_t in = b % (k / 128), out = b / (k / 128);
      exl3_inner_block(weight, in, out, block);
      for (int64_t i = 0; i < 128 * 128; ++i) {
        ASSERT_EQ(block[static_cast<size_t>(i)],
                  inner[static_cast<size_t>((in * 128 + i / 128) * n + out * 128 + i % 128)])
            << tag;
      }
    }
    const auto decoded = test::decode(weight);
    double largest = 0, off = 0;
    for (int64_t o = 0; o < n; ++o) {
      for (int64_t i = 0; i < k; ++i) {
        const double wanted = expected[static_cast<size_t>(i * n + o)];
        largest = std::max(largest, std::abs(wanted));
        off = std::max(off, std::abs(wanted - double{decoded[static_cast<size_t>(o * k + i)]}));
      }
    }
    EXPECT_LT(off, 1e-3 * largest) << tag;
    ++checked;
  }
  EXPECT_EQ(checked, 11);
}

/// Bit by bit and by the matrices themselves, in double: another account of the same bytes.
TEST(Exl3, DecodesByItsDefinition) {
  for (const auto& [code, name] : code_names) {
    for (const int bits : {1, 3, 8}) {
      const PackedWeight weight = random_weight(exl3(bits, code), 256, 128);
      const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
      const auto scale = [&](PlaneRole role, int64_t i) {
        return double{f32_from_f16(weight.plane(role).bytes.as<uint16_t>()[static_cast<size_t>(i)])};
      };
      const auto inner = [&](int64_t input, int64_t output) {
        const int64_t tile = input / 16 * (256 / 16) + output / 16, stream = 256 * bits;
        const int64_t t = exl3_weight(static_cast<int>(input % 16), static_cast<int>(output % 16));
        uint32_t state = 0;
        for (int64_t b = (t + 1) * bits - 16; b < (t + 1) * bits; ++b) {
          const int64_t at = (b + stream) % stream;
          state = state << 1 | (words[static_cast<size_t>(tile * 8 * bits + at / 32)] >> (31 - at % 32) & 1);
        }
        return double{exl3_level(code, state)};
      };
      const auto sign = [](int64_t a, int64_t b) { return std::popcount(static_cast<uint64_t>(a & b)) % 2 ? -1 : 1; };
      const auto decoded = test::decode(weight);
      for (const auto& [output, input] : {std::pair<int64_t, int64_t>{0, 0}, {1, 127}, {130, 64}, {255, 3}}) {
        double sum = 0;
        for (int64_t i = 0; i < 128; ++i) {
          for (int64_t o = 0; o < 128; ++o) {
            sum += sign(i, input) * sign(o, output % 128) * inner(i, output / 128 * 128 + o);
          }
        }
        const double expected = sum / 128 * scale(PlaneRole::input_scales, input) * scale(PlaneRole::scales, output);
        // 14 sums of fp32 on the way, of at most 16384 levels below 4.
        EXPECT_NEAR(decoded[static_cast<size_t>(output * 128 + input)], expected, 1e-4 * (1 + std::abs(expected)))
            << name << " " << bits;
      }
    }
  }
}

TEST(Exl3, PaddingBelongsToNoWeight) {
  const PackedWeight whole = random_weight(exl3(4), 256, 384);
  PackedWeight cut = whole.clone();
  cut.n = 200, cut.k = 300;
  exl3_row().validate(cut, "w");
  const auto all = test::decode(whole), some = test::decode(cut);
  for (size_t o = 0; o < 200; ++o) {
    for (size_t i = 0; i < 300; ++i) ASSERT_EQ(some[o * 300 + i], all[o * 384 + i]);
  }
}

TEST(Exl3, RowsTogetherAreThoseOneByOne) {
  const PackedWeight weight = random_weight(exl3(2, TrellisCode::mcg), 300, 200);
  const auto each = test::decode(weight);
  std::vector<float> rows(static_cast<size_t>(150 * 200));
  exl3_decode_rows(weight, 100, {rows.data(), 150, 200});
  EXPECT_TRUE(std::ranges::equal(rows, std::span(each).subspan(100 * 200, rows.size())));
}

TEST(Exl3, NamesOfSchemes) {
  for (const char* name : {"exl3-1", "exl3-8", "exl3-3-mcg", "exl3-6-3inst"}) {
    EXPECT_EQ(to_string(parse_scheme(name)), name);
  }
  for (const char* name : {"exl3-0", "exl3-9", "exl3-", "exl3-3-mul1", "exl3-3-w16", "exl33"}) {
    test::expect_error(ErrorCode::unsupported, {"unknown scheme", "exl3-<1 to 8>"}, [&] { parse_scheme(name); });
  }
}

TEST(Exl3, ScalesThatAreNoNumbersAreRefused) {
  for (const auto& [role, text] : {std::pair{PlaneRole::scales, "output 5"}, {PlaneRole::input_scales, "input 5"}}) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      PackedWeight weight = random_weight(exl3(3), 128, 128);
      weight.plane(role).bytes.as<uint16_t>()[5] = f16_from_f32(bad);
      test::expect_error(ErrorCode::bad_file, {"w: plane", to_string(role), text},
                         [&] { exl3_row().validate(weight, "w"); });
    }
  }
}

TEST(Exl3, LargerThanPlanesCanBe) {
  test::expect_error(ErrorCode::unsupported, {"2^48"}, [] { exl3_row().planes(exl3(3), 1 << 30, 1 << 30); });
}

}  // namespace
}  // namespace w4q::formats
