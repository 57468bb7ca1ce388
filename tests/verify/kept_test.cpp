// What other programs kept, against the base.
#include "verify/weights/kept.h"

#include <gmock/gmock.h>

#include <fstream>

#include "core/convert.h"
#include "packed_model.h"
#include "pipeline/convert_model.h"

namespace w4q::verify {
namespace {

using ::testing::Contains;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

class Kept : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    set_progress_enabled(false);
    pipeline::QuantizeRequest request;
    request.model = test::bundled_model();
    request.output = folder() / "planes";
    request.scheme = formats::parse_scheme("int4-g128-f16-asym");
    request.method = "rtn";
    pipeline::quantize_model(request);
    pipeline::convert_model({.input = folder() / "planes", .output = folder() / "q", .to = "gptq-v2"});
  }
  static const test::TemporaryFolder& folder() {
    static const test::TemporaryFolder folder;
    return folder;
  }

  /// With the values of one tensor changed.
  static std::vector<std::string> faults(const std::string& name, const std::function<void(std::span<float>)>& change) {
    const auto copy = folder() / "damaged";
    std::filesystem::remove_all(copy);
    std::filesystem::copy(folder() / "q", copy, std::filesystem::copy_options::recursive);
    test::rewrite(copy, [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
      if (tensor.name != name) return true;
      std::vector<float> values(static_cast<size_t>(element_count(tensor.shape)));
      widen(bytes, tensor.dtype, values);
      change(values);
      narrow(values, tensor.dtype, bytes);
      return true;
    });
    return check_kept(model::open_model(copy), model::open_model(test::bundled_model())).faults;
  }
};

TEST_F(Kept, ASoundFolderHoldsTheBasesValues) {
  EXPECT_THAT(faults("none", [](std::span<float>) {}), IsEmpty());
}

TEST_F(Kept, WhatNobodyFoldsIsNamed) {
  const std::string norm = "model.layers.1.input_layernorm.weight", table = "model.embed_tokens.weight";
  EXPECT_THAT(faults(norm,
                     [](std::span<float> values) {
                       for (float& value : values) value *= 2;
                     }),
              Contains(StartsWith(norm)));
  EXPECT_THAT(faults(norm, [](std::span<float> values) { values[7] = -values[7]; }), Contains(StartsWith(norm)));
  EXPECT_THAT(faults("model.norm.weight", [](std::span<float> values) { values[7] *= 1.5f; }),
              Contains(StartsWith("model.norm.weight")));
  EXPECT_THAT(faults(table, [](std::span<float> values) { values[1000] += 1; }), Contains(StartsWith(table)));
}

TEST_F(Kept, AnotherConfigIsNamed) {
  auto candidate = model::open_model(folder() / "q");
  const auto base = model::open_model(test::bundled_model());
  candidate.config.rope.theta = 10000;
  EXPECT_THAT(check_kept(candidate, base).faults, Contains(StartsWith("config.json: rope_theta is 10000")));
}

TEST_F(Kept, AnotherComputationOfTheSameTensorsIsNamed) {
  auto candidate = model::open_model(folder() / "q");
  const auto base = model::open_model(test::bundled_model());
  candidate.config.activation = model::Activation::gelu_tanh;
  candidate.config.rope.partial_rotary_factor = 0.5;
  candidate.config.mixture.chosen = 4;
  candidate.config.logit_scale = 2;
  EXPECT_THAT(check_kept(candidate, base).faults,
              UnorderedElementsAre("config.json: hidden_act is not the base's",
                                   "config.json: partial_rotary_factor is 0.5, in the base 1",
                                   "config.json: num_experts_per_tok is 4, in the base 0",
                                   "config.json: the factor of logits is 2, in the base 1"));
}

/// The hybrid in integers, as another program leaves what it kept.
class KeptOnItsWay : public ::testing::Test {
 protected:
  static std::vector<std::string> faults(
      const std::function<void(const io::PlannedTensor&, std::span<float>)>& change) {
    set_progress_enabled(false);
    const test::TemporaryFolder folder;
    const auto base = test::testdata() / "w4q-hybrid-tiny";
    pipeline::QuantizeRequest request;
    request.model = base;
    request.output = folder / "planes";
    request.scheme = formats::parse_scheme("int4-g128-bf16");
    request.method = "rtn";
    pipeline::quantize_model(request);
    pipeline::convert_model({.input = folder / "planes", .output = folder / "q", .to = "compressed-tensors"});
    test::rewrite(folder / "q", [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
      if (!is_weight_dtype(tensor.dtype)) return true;
      std::vector<float> values(static_cast<size_t>(element_count(tensor.shape)));
      widen(bytes, tensor.dtype, values);
      change(tensor, values);
      narrow(values, tensor.dtype, bytes);
      return true;
    });
    return check_kept(model::open_model(folder / "q"), model::open_model(base)).faults;
  }
  static float rounded(float value) { return f32_from_bf16(bf16_from_f32(value)); }
};

/// A program that computes with 1 + w stores what is left of w, and one in 16 bit what it holds of 32.
TEST_F(KeptOnItsWay, RoundedValuesAreTheBases) {
  size_t changed = 0;
  const auto pass = [&](const io::PlannedTensor& tensor, std::span<float> values) {
    const bool added = tensor.name.ends_with("layernorm.weight"), narrowed = tensor.dtype == DType::f32;
    for (float& value : values) {
      const float was = value;
      if (added) value = rounded(rounded(1 + value) - 1);
      if (narrowed) value = rounded(value);
      changed += value != was;
    }
  };
  EXPECT_THAT(faults(pass), IsEmpty());
  EXPECT_GT(changed, 100u);
}

TEST_F(KeptOnItsWay, OneValueMoreIsNamed) {
  const std::string norm = "model.layers.0.linear_attn.norm.weight";
  const auto change = [&](const io::PlannedTensor& tensor, std::span<float> values) {
    if (tensor.name != norm) return;
    for (float& value : values) value = rounded(value);
    values[3] += 0.01f;
  };
  EXPECT_THAT(faults(change), Contains(StartsWith(norm)));
}

/// AWQ divides rows of v_proj, and their bias with them; another program's folder does not say which.
TEST(KeptBias, CarriesTheScalesOfItsRows) {
  set_progress_enabled(false);
  const test::TemporaryFolder folder;
  const auto base = test::testdata() / "arch/qwen2-window";
  std::vector<uint16_t> ids(1024);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(3 + i * i % 89);
  std::ofstream(folder / "ids.u16", std::ios::binary)
      .write(reinterpret_cast<const char*>(ids.data()), static_cast<std::streamsize>(2 * ids.size()));
  pipeline::QuantizeRequest request;
  request.model = base;
  request.output = folder / "planes";
  request.method = "awq";
  request.scheme = formats::parse_scheme("int4-g32-bf16");
  request.options.steps = {{.kind = quantize::StepKind::awq, .input_scales = false}};
  request.keep = {"*.mlp.*"};  // whose 88 inputs are no groups of 32
  request.calibrated.emplace();
  request.calibrated->text.ids = folder / "ids.u16";
  request.calibrated->text.samples = 4;
  request.calibrated->text.length = 128;
  pipeline::quantize_model(request);
  const auto opened = model::open_model(base);
  const auto faults = [&](float factor) {
    std::filesystem::remove_all(folder / "q");
    pipeline::convert_model({.input = folder / "planes", .output = folder / "q", .to = "compressed-tensors"});
    int64_t changed = 0;
    test::rewrite(folder / "q", [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
      if (!tensor.name.ends_with("layers.1.self_attn.v_proj.bias")) return true;
      std::vector<float> values(static_cast<size_t>(element_count(tensor.shape))), stored(values.size());
      widen(bytes, tensor.dtype, values);
      const auto original = opened.folder.tensors.load(tensor.name);
      widen(original->bytes, original->dtype, stored);
      for (size_t i = 0; i < values.size(); ++i) changed += values[i] != stored[i];
      values[3] *= factor;
      narrow(values, tensor.dtype, bytes);
      return true;
    });
    EXPECT_GT(changed, 0);
    return check_kept(model::open_model(folder / "q"), opened).faults;
  };
  EXPECT_THAT(faults(1), IsEmpty());
  EXPECT_THAT(faults(2), ::testing::ElementsAre(StartsWith("model.layers.1.self_attn.v_proj.bias")));
}

}  // namespace
}  // namespace w4q::verify
