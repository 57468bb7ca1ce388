// What `--for` recommends is what it predicts to load: a law over schemes, dialects and servers.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>

#include "checkpoint/dialect/dialect.h"
#include "core/error.h"
#include "core/text.h"
#include "pipeline/convert_model.h"
#include "pipeline/quantize_model.h"
#include "quantize/rounding.h"
#include "serving/prediction.h"
#include "support.h"

namespace w4q::pipeline {
namespace {

using serving::Prediction;
using serving::Program;

class ServedDialects : public ::testing::TestWithParam<const char*> {
 protected:
  std::filesystem::path model() const { return test::testdata() / GetParam(); }

  Plan plan_of(const std::string& scheme) const {
    QuantizeRequest request;
    request.model = model();
    request.scheme = formats::parse_scheme(scheme);
    request.method = quantize::rounding_quantizer(request.scheme).name;
    return plan_quantize(request);
  }

  /// Nothing where the dialect does not hold it.
  std::optional<Prediction> predicted(const Plan& plan, const std::string& to, Program program, bool inputs) const {
    try {
      ActivationRequest activations;
      activations.inputs = inputs;
      return serving::predict(planned_headers(plan, model(), to, activations), program);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported && error.code() != ErrorCode::bad_argument) throw;
      return std::nullopt;
    }
  }

  bool loads(const Plan& plan, const std::string& to, Program program, bool inputs) const {
    const auto prediction = predicted(plan, to, program, inputs);
    return prediction && prediction->loads() && prediction->right();
  }
};

/// Dialects that a remedy names.
std::set<std::string> named(const std::string& remedy) {
  std::set<std::string> names;
  for (const auto& row : checkpoint::dialect_registry()) {
    for (const std::string_view before : {"--to ", " or "}) {
      const size_t at = remedy.find(concat(before, row.name, " "));
      if (at != std::string::npos) names.emplace(row.name);
    }
  }
  return names;
}

TEST_P(ServedDialects, WhatARemedyNamesLoads) {
  constexpr const char* schemes[] = {
      "int4-g128-bf16", "int4-g32-f16-asym", "int8-row-bf16", "int3-g64-bf16", "int2-g32-f16-asym", "nvfp4", "mxfp4",
      "mxfp8",          "fp8-tensor",        "fp8-channel",   "fp8-block128"};
  int remedies = 0;
  for (const char* scheme : schemes) {
    const Plan plan = plan_of(scheme);
    for (const auto& row : checkpoint::dialect_registry()) {
      for (const Program program : {Program::vllm, Program::sglang}) {
        const auto prediction = predicted(plan, std::string(row.name), program, false);
        if (!prediction || (prediction->loads() && prediction->right())) continue;
        for (const auto& finding : prediction->findings) {
          const bool inputs = finding.remedy.find("--activation-scales") != std::string::npos;
          const bool same = finding.remedy.find("holds the same codes") != std::string::npos ||
                            finding.rule == std::string_view("ct-kernels");
          if (finding.severity == serving::Severity::note || !same) continue;
          const auto names = named(finding.remedy);
          const auto loading =
              std::ranges::any_of(names, [&](const std::string& name) { return loads(plan, name, program, inputs); });
          EXPECT_TRUE(loading) << scheme << " as " << row.name << ": " << serving::to_text(finding);
          ++remedies;
        }
      }
    }
  }
  EXPECT_GT(remedies, 8);
}

/// Servers have experts of FP8 with quantized inputs alone: where no scale is to be measured, config.json says so.
TEST_P(ServedDialects, ExpertsOfFp8SayDynamicInputs) {
  const bool mixture = std::string_view(GetParam()).find("mixture") != std::string_view::npos;
  for (const char* scheme : {"fp8-channel", "fp8-block128"}) {
    const Plan plan = plan_of(scheme);
    const auto planned = planned_headers(plan, model(), "compressed-tensors-float");
    const io::Json& group = planned.quantization()["config_groups"]["group_0"];
    EXPECT_EQ(group["input_activations"].is_object(), mixture) << scheme;
    EXPECT_TRUE(loads(plan, "compressed-tensors-float", Program::vllm, false)) << scheme;
  }
  const Plan tensor = plan_of("fp8-tensor");
  EXPECT_EQ(loads(tensor, "compressed-tensors-float", Program::vllm, false), !mixture);
  EXPECT_TRUE(loads(tensor, "compressed-tensors-float", Program::vllm, true));
}

/// Latents are kept by other means than scales of keys and values.
TEST(CacheScales, AreRefusedOfLatents) {
  W4Q_NEEDS_SHARED_DATA();
  const auto model = test::shared_data() / "families/deepseek-v3";
  ActivationRequest wanted;
  wanted.cache = true;
  test::expect_error(ErrorCode::unsupported, {"--cache-scales", "latents"}, [&] { require_cache(model, wanted); });
  EXPECT_NO_THROW(require_cache(test::testdata() / "w4q-llama-tiny", wanted));
}

INSTANTIATE_TEST_SUITE_P(Bundled, ServedDialects, ::testing::Values("w4q-llama-tiny", "w4q-mixture-tiny"),
                         [](const auto& row) {
                           return std::string(row.param).find("mixture") == std::string::npos ? "dense" : "mixture";
                         });

}  // namespace
}  // namespace w4q::pipeline
