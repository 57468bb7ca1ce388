// What a packed weight holds of the base's, row by row, column by column and by blocks; and norms that nothing carries.
#include "verify/weights/gains.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <map>

#include "core/convert.h"
#include "core/rng.h"
#include "packed_model.h"
#include "pipeline/convert_model.h"
#include "quantize/asymmetric.h"
#include "verify/weights/carried.h"
#include "verify/weights/norm_factors.h"
#include "verify/weights/weights.h"

namespace w4q::verify {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr size_t gain_rows = 64, gain_width = 128;

/// Normal values and the same rounded to steps of 1/3, as 4 bits do.
struct MadeRows {
  std::vector<float> base, found, rounded;

  MadeRows() {
    for (size_t i = 0; i < gain_rows * gain_width; ++i) {
      base.push_back(static_cast<float>(random_normal(7, i)));
      rounded.push_back(std::nearbyint(3 * base.back()) / 3);
    }
    found = rounded;
  }
  Gains gains(double least = least_gain) const {
    HeldRows held{base, found, rounded, gain_width, 4, {}, {}, least};
    for (size_t row = 0; row < gain_rows; ++row) held.numbers.push_back(static_cast<int64_t>(10 * row));
    return gains_of(held);
  }
};

TEST(Gains, RoundedRowsHoldTheBases) {
  const Gains gains = MadeRows().gains();
  EXPECT_EQ(gains.row, -1);
  EXPECT_EQ(gains.column, -1);
}

TEST(Gains, OtherColumnsAndRowsAreFound) {
  MadeRows columns;
  for (size_t row = 0; row < gain_rows; ++row)
    std::swap(columns.found[row * gain_width + 5], columns.found[row * gain_width + 9]);
  EXPECT_EQ(columns.gains().column, 5);
  MadeRows rows;
  std::swap_ranges(rows.found.begin() + 3 * gain_width, rows.found.begin() + 4 * gain_width,
                   rows.found.begin() + 4 * gain_width);
  EXPECT_EQ(rows.gains().row, 30);
  MadeRows doubled;
  for (size_t c = 0; c < gain_width; ++c) doubled.found[7 * gain_width + c] *= 2;
  EXPECT_EQ(doubled.gains().row, 70);
}

/// Errors that have nothing to do with a weight, as feeding them back leaves, are no other's codes: ten times those of rounding.
TEST(Gains, FedBackErrorsAreNoOthers) {
  MadeRows rows;
  const float size = std::sqrt(10.0f / 108);
  for (size_t i = 0; i < rows.found.size(); ++i) rows.found[i] += size * static_cast<float>(random_normal(8, i));
  const Gains gains = rows.gains();
  EXPECT_EQ(gains.row, -1);
  EXPECT_EQ(gains.column, -1);
}

/// A column that hardly anything multiplies may be given up, but nobody turns its sign or makes it four times as large.
TEST(Gains, ColumnsThatNobodyMakesAreToldFromThoseGivenUp) {
  for (const float factor : {0.0f, -1.0f, 4.0f}) {
    MadeRows made;
    for (size_t row = 0; row < gain_rows; ++row) made.found[row * gain_width + 5] *= factor;
    EXPECT_EQ(made.gains().column, 5);
    EXPECT_EQ(made.gains().column_is_wild, factor != 0) << factor;
  }
}

/// What was moved before it was rounded holds less, but codes of other rows and columns leave nothing.
TEST(Gains, MovedRowsAndColumnsHoldLess) {
  const double least = moves_of(3).least_of_line;
  for (const float part : {0.35f, 0.0f}) {
    MadeRows row, column;
    for (size_t c = 0; c < gain_width; ++c) row.found[7 * gain_width + c] *= part;
    for (size_t r = 0; r < gain_rows; ++r) column.found[r * gain_width + 5] *= part;
    EXPECT_EQ(row.gains().row, 70);
    EXPECT_EQ(column.gains().column, 5);
    EXPECT_EQ(row.gains(least).row, part > 0 ? -1 : 70);
    EXPECT_EQ(column.gains(least).column, part > 0 ? -1 : 5);
  }
  MadeRows rows;
  std::swap_ranges(rows.found.begin() + 3 * gain_width, rows.found.begin() + 4 * gain_width,
                   rows.found.begin() + 4 * gain_width);
  EXPECT_EQ(rows.gains(least).row, 30);
}

/// What verify allows is what the quantizer may do.
TEST(Gains, MovesAreThoseOfTargets) {
  for (int bits = 2; bits <= 8; ++bits) {
    const auto limit = quantize::move_limit(bits);
    EXPECT_DOUBLE_EQ(moves_of(bits).energy, limit.size) << bits;
    EXPECT_LE(moves_of(bits).least_of_line, least_gain * (1 - limit.loss)) << bits;
  }
}

/// Rows that are multiples of one another are rounded alike, and what is left of a column is no chance.
TEST(Gains, WeightsOfLowRankSayNothing) {
  MadeRows made;
  for (size_t i = 0; i < made.base.size(); ++i) {
    const size_t row = i / gain_width, col = i % gain_width;
    made.base[i] = static_cast<float>(random_normal(7, row) * random_normal(9, col));
    made.found[i] = made.base[i] * (col % 5 == 0 ? 0.3f : 1.0f);
    made.rounded[i] = made.base[i];
  }
  EXPECT_EQ(made.gains().column, -1);
}

/// What is missed may be largest where the values are: then a factor is known no better than by these.
TEST(Factors, ErrorsFollowWhatIsMissed) {
  Factor even, loud;
  for (size_t i = 0; i < 1000; ++i) {
    const double value = random_normal(3, i) * (i % 100 == 0 ? 30 : 1), error = random_normal(4, i);
    even.add(value, value + error), loud.add(value, value + 0.3 * error * std::abs(value));
  }
  EXPECT_NEAR(even.value(), 1, 5 * even.error());
  EXPECT_NEAR(loud.value(), 1, 5 * loud.error());
  const double rest = loud.found - loud.products * loud.value();
  EXPECT_GT(loud.error(), 3 * std::sqrt(rest / loud.squares / 1000));
}

// ---- norms ----

std::vector<NormFactor> factors_of(const std::vector<uint16_t>& ours, const std::vector<uint16_t>& theirs,
                                   float offset) {
  const Shape shape{static_cast<int64_t>(ours.size())};
  return norm_factors({"ours", DType::bf16, shape, bytes_of(ours)}, {"theirs", DType::bf16, shape, bytes_of(theirs)},
                      offset);
}

TEST(NormFactors, BoundsFollowFromTheStoredType) {
  const auto b = [](float value) { return bf16_from_f32(value); };
  const auto plain = factors_of({b(0.5f), b(-1), b(0)}, {b(2), b(1), b(1)}, 0);
  EXPECT_EQ(plain[0].factor, 4);
  EXPECT_TRUE(plain[0].known && plain[0].possible);
  EXPECT_FALSE(plain[1].possible);
  EXPECT_FALSE(plain[2].possible);
  // 1 + w: of 0.0039 half a unit of the stored number, −0.996, is a half. Two roundings leave anything down to 1/0.0078.
  const auto close = factors_of({b(-0.99609375f), b(-1), b(-1.25f), b(1)}, {b(0), b(0), b(0), b(3)}, 1);
  EXPECT_FALSE(close[0].known);
  EXPECT_TRUE(close[0].possible);
  EXPECT_FLOAT_EQ(close[0].factor, 256);
  EXPECT_FLOAT_EQ(close[0].least, 128);
  EXPECT_EQ(close[0].nearest(200), 200);
  EXPECT_EQ(close[0].nearest(100), 128);
  EXPECT_TRUE(close[1].possible);
  EXPECT_FALSE(close[1].known);
  EXPECT_FALSE(close[2].possible);
  EXPECT_TRUE(close[3].known);
  EXPECT_EQ(close[3].factor, 2);
}

class SeededGains : public ::testing::Test {
 protected:
  /// A sound folder, made when it is first asked for.
  static std::filesystem::path made(const std::string& form) {
    static const std::map<std::string, std::pair<const char*, const char*>> forms = {
        {"gptq", {"int4-g128-f16-asym", "gptq-v2"}},
        {"kbit", {"kbit3-b32-e4m4", ""}},
        {"trellis", {"trellis3-w14", ""}},
        {"nvfp4", {"nvfp4", "compressed-tensors-float"}}};
    const auto to = folder() / form;
    if (std::filesystem::exists(to)) return to;
    const auto& [scheme, dialect] = forms.at(form);
    const test::TemporaryFolder planes;
    const auto model = test::quantized_model(planes, formats::parse_scheme(scheme));
    if (*dialect == '\0') {
      std::filesystem::copy(model, to, std::filesystem::copy_options::recursive);
    } else {
      pipeline::convert_model({.input = model, .output = to, .to = dialect});
    }
    return to;
  }
  static const test::TemporaryFolder& folder() {
    static const test::TemporaryFolder folder;
    return folder;
  }
  /// What is said where one tensor was changed.
  static std::vector<std::string> faults(const std::string& form, const std::string& name,
                                         const std::function<void(std::vector<std::byte>&, const Shape&)>& change) {
    const auto copy = folder() / "damaged";
    std::filesystem::remove_all(copy);
    std::filesystem::copy(made(form), copy, std::filesystem::copy_options::recursive);
    test::rewrite(copy, [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
      if (tensor.name == name) change(bytes, tensor.shape);
      return true;
    });
    return faults_of(compare_with_base(model::open_model(copy), model::open_model(test::bundled_model())));
  }
  /// Exchanges columns a and b of a matrix whose elements have so many bytes.
  static void exchange_columns(std::vector<std::byte>& bytes, const Shape& shape, size_t size, size_t a, size_t b) {
    const auto width = static_cast<size_t>(shape[1]) * size;
    for (size_t row = 0; row < static_cast<size_t>(shape[0]); ++row) {
      std::byte* const line = bytes.data() + row * width;
      std::swap_ranges(line + a * size, line + (a + 1) * size, line + b * size);
    }
  }
};

TEST_F(SeededGains, SoundFoldersHoldTheBase) {
  for (const char* form : {"gptq", "kbit", "trellis", "nvfp4"})
    EXPECT_THAT(faults(form, "none", {}), IsEmpty()) << form;
}

/// Each of these passed unnoticed until 2026-11-29.
TEST_F(SeededGains, ScalesAndCodesOfOtherPlacesAreNamed) {
  const std::string query = "model.layers.1.self_attn.q_proj";
  EXPECT_THAT(faults("gptq", query + ".qweight",
                     [](auto& bytes, const Shape& shape) {
                       const auto row = static_cast<std::ptrdiff_t>(4 * shape[1]);
                       std::copy_n(bytes.begin(), row, bytes.begin() + row);
                     }),
              ElementsAre(AllOf(StartsWith(query), HasSubstr("column 8 holds"))));
  EXPECT_THAT(faults("trellis", query + ".0.scales",
                     [](auto& bytes, const Shape&) { std::rotate(bytes.begin(), bytes.begin() + 2, bytes.end()); }),
              ElementsAre(AllOf(StartsWith(query), HasSubstr("row "))));
  EXPECT_THAT(faults("gptq", query + ".scales",
                     [](auto& bytes, const Shape&) {
                       std::vector<float> values(bytes.size() / 2);
                       widen(bytes, DType::f16, values);
                       for (float& value : values) value *= 1.1f;
                       narrow(values, DType::f16, bytes);
                     }),
              ElementsAre(AllOf(StartsWith(query), HasSubstr("of another size"))));
}

/// Any positive factors passed as folded until 2026-11-29.
TEST_F(SeededGains, NormsOfOtherValuesAreNamed) {
  const std::string norm = "model.layers.2.input_layernorm.weight";
  const auto change = [&](const std::function<void(std::vector<float>&)>& how) {
    return faults("gptq", norm, [&](auto& bytes, const Shape&) {
      std::vector<float> values(bytes.size() / 2);
      widen(bytes, DType::bf16, values);
      how(values);
      narrow(values, DType::bf16, bytes);
    });
  };
  EXPECT_THAT(change([](auto& values) { std::ranges::rotate(values, values.begin() + 1); }),
              Contains(StartsWith(norm)));
  EXPECT_THAT(change([](auto& values) { std::ranges::fill(values, 1.0f); }), Contains(StartsWith(norm)));
  EXPECT_THAT(change([](auto& values) { values[9] *= 1.1f; }), Contains(StartsWith(norm)));
  EXPECT_THAT(change([](auto& values) {
                for (size_t i = 0; i < values.size(); ++i)
                  values[i] *= std::exp(0.1f * static_cast<float>(random_normal(3, i)));
              }),
              Contains(StartsWith(norm)));
}

}  // namespace
}  // namespace w4q::verify
