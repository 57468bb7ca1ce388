// Folders of small floats against the base that they were made of, with scales folded into them or not.
#include "verify/weights/requantized.h"

#include <gmock/gmock.h>

#include "core/convert.h"
#include "core/float_formats.h"
#include "made_checkpoint.h"
#include "packed_model.h"
#include "verify/structure.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

const std::string first_layer = "model.layers.0.";
const std::string folded_norm_name = first_layer + "input_layernorm.weight";

/// The bundled model with changed values, its linears rounded to E4M3 with a scale each.
class Requantized : public ::testing::Test {
 protected:
  using Change = std::function<void(const std::string& name, std::span<float> values, int64_t width)>;

  /// `lost`: a tensor that is not written.
  std::vector<std::string> faults(const Change& change, const std::string& lost = {}) {
    auto made = MadeCheckpoint::of(test::bundled_model());
    made.config["quantization_config"] = {{"quant_method", "modelopt"}, {"quant_algo", "FP8"}};
    const auto names = made.names_with("");
    for (const std::string& name : names) {
      auto& tensor = made.tensors.at(name);
      const auto width = tensor.shape.back();
      std::vector<float> values(static_cast<size_t>(element_count(tensor.shape)));
      widen(tensor.bytes, tensor.dtype, values);
      change(name, values, width);
      if (name.find("_proj.weight") == std::string::npos) {
        narrow(values, tensor.dtype, tensor.bytes);
      } else {
        round_to_e4m3(made, name, tensor.shape, values);
      }
    }
    made.tensors.erase(lost);
    made.write(folder_ / "made");
    const auto base = model::open_model(test::bundled_model());
    return check_structure(model::open_model(folder_ / "made"), &base).faults;
  }

  static void multiply(std::span<float> values, int64_t width, const std::function<float(int64_t col)>& factor) {
    for (size_t i = 0; i < values.size(); ++i) values[i] *= factor(static_cast<int64_t>(i) % width);
  }
  /// Of the channels of a norm: some are brought down, some up.
  static float factor(int64_t channel) { return 0.5f + static_cast<float>(channel * 7 % 16) / 8; }
  static bool reads(const std::string& name) {
    return name == first_layer + "self_attn.q_proj.weight" || name == first_layer + "self_attn.k_proj.weight" ||
           name == first_layer + "self_attn.v_proj.weight";
  }

 private:
  static void round_to_e4m3(MadeCheckpoint& made, const std::string& name, const Shape& shape,
                            const std::vector<float>& values) {
    constexpr float top = 448;
    float largest = 0;
    for (const float value : values) largest = std::max(largest, std::abs(value));
    const float scale = largest / top;
    std::vector<uint8_t> codes;
    for (const float value : values) codes.push_back(e4m3_from_f32(value / scale));
    made.put(name, DType::f8_e4m3, shape, codes);
    made.put(name + "_scale", DType::f32, {}, std::vector<float>{scale});
  }

  test::TemporaryFolder folder_;
};

TEST_F(Requantized, ASoundFolderIsTheBase) {
  EXPECT_THAT(faults([](const std::string&, std::span<float>, int64_t) {}), IsEmpty());
}

TEST_F(Requantized, ScalesThatReadersCarryAreUndone) {
  EXPECT_THAT(faults([](const std::string& name, std::span<float> values, int64_t width) {
                if (name == folded_norm_name) multiply(values, width, [](int64_t col) { return 1 / factor(col); });
                if (reads(name)) multiply(values, width, factor);
              }),
              IsEmpty());
}

TEST_F(Requantized, ANormWhoseFactorsNobodyCarriesIsNamed) {
  EXPECT_THAT(faults([](const std::string& name, std::span<float> values, int64_t width) {
                if (name == folded_norm_name) multiply(values, width, [](int64_t col) { return 1 / factor(col); });
              }),
              Contains(StartsWith(folded_norm_name)));
}

TEST_F(Requantized, ANormThatNobodyFoldsIsNamed) {
  EXPECT_THAT(faults([](const std::string& name, std::span<float> values, int64_t) {
                if (name == folded_norm_name) values[5] = -values[5];
              }),
              Contains(HasSubstr("no positive factor in channel 5")));
}

/// Where something is missing nothing is undone: what is there is held against the base as it stands.
TEST_F(Requantized, WhatIsMissingIsNamedAndNothingElse) {
  const auto nothing = [](const std::string&, std::span<float>, int64_t) {};
  EXPECT_THAT(faults(nothing, folded_norm_name), ElementsAre(folded_norm_name + " is missing"));
  const std::string reader = first_layer + "mlp.down_proj.weight", up = first_layer + "mlp.up_proj.weight";
  const auto other_rows = [&](const std::string& name, std::span<float> values, int64_t width) {
    if (name == up) std::ranges::rotate(values, values.begin() + width);
  };
  EXPECT_THAT(faults(other_rows, reader),
              UnorderedElementsAre(HasSubstr(reader + " is missing"), StartsWith(reader + "_scale"), StartsWith(up)));
}

TEST_F(Requantized, OneReaderOfOthersScalesIsNamed) {
  const std::string other = first_layer + "self_attn.k_proj.weight";
  EXPECT_THAT(faults([&](const std::string& name, std::span<float> values, int64_t width) {
                if (name == folded_norm_name) multiply(values, width, [](int64_t col) { return 1 / factor(col); });
                if (reads(name)) {
                  multiply(values, width, [&](int64_t col) { return factor(name == other ? col + 5 : col); });
                }
              }),
              Contains(StartsWith(other + " is not the base's")));
}

TEST_F(Requantized, RowsAndWhatReadsThemMayShareFactors) {
  const std::string up = first_layer + "mlp.up_proj.weight", down = first_layer + "mlp.down_proj.weight";
  const auto fold = [&](bool both) {
    return faults([&, both](const std::string& name, std::span<float> values, int64_t width) {
      if (name == up) {
        for (size_t i = 0; i < values.size(); ++i) values[i] /= 3 * factor(static_cast<int64_t>(i) / width);
      }
      if (name == down && both) multiply(values, width, [](int64_t col) { return 3 * factor(col); });
    });
  };
  EXPECT_THAT(fold(true), IsEmpty());
  EXPECT_THAT(fold(false), Contains(StartsWith(up)));
}

}  // namespace
}  // namespace w4q::verify
