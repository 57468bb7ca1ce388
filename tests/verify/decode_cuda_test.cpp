// The rungs that decode on a GPU: perplexity as on the CPU, types of the cache, speed.
#include <gtest/gtest.h>

#include <cmath>

#include "device/choice.h"
#include "device/properties.h"
#include "packed_model.h"
#include "tokenizer/token_file.h"
#include "verify/kv_compare.h"
#include "verify/ladder.h"
#include "verify/speed.h"

namespace w4q::verify {
namespace {

const std::filesystem::path ids_file = test::bundled_model() / "own" / "selfgen.ids.u16";

class DecodeGpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
    gpu_ = device::open_gpu();
    set_progress_enabled(false);
    model_.emplace(model::Model::open(test::bundled_model()));
    ids_ = tokenizer::read_ids(ids_file, model_->config().vocab_size);
  }

  std::shared_ptr<device::Context> gpu_;
  std::optional<model::Model> model_;
  std::vector<int32_t> ids_;
};

/// Within 0.1 % of the perplexity (docs/verify.md), with scores of a window's end alone, too.
TEST_F(DecodeGpu, ScoresWindowsAsTheCpuDoes) {
  const test::TemporaryFolder folder;
  const auto packed = model::Model::open(test::quantized_model(folder, 4));
  for (PerplexityOptions how : {PerplexityOptions{.context = 128, .max_windows = 3},
                                PerplexityOptions{.context = 96, .stride = 32, .max_windows = 3}}) {
    const auto cpu = measure_perplexity(packed, &*model_, ids_, how);
    how.gpu = gpu_;
    const auto gpu = measure_perplexity(packed, &*model_, ids_, how);
    EXPECT_EQ(gpu.scored, cpu.scored);
    EXPECT_NEAR(gpu.perplexity() / cpu.perplexity(), 1, 1e-3);
    EXPECT_NEAR(gpu.base_perplexity() / cpu.base_perplexity(), 1, 1e-3);
    EXPECT_NEAR(gpu.base->kl.mean / cpu.base->kl.mean, 1, 0.05);
  }
}

TEST_F(DecodeGpu, EveryTypeOfTheCacheIsCompared) {
  PerplexityOptions how{.context = 128, .max_windows = 2};
  how.gpu = gpu_;
  const auto rows = compare_caches(*model_, ids_, how);
  ASSERT_EQ(rows.size(), 4u);
  for (const auto& row : rows) {
    EXPECT_GT(row.bytes_per_token, 0);
    EXPECT_TRUE(std::isfinite(row.quality.perplexity()));
    EXPECT_GT(row.quality.base->kl.mean, 0) << "compared with itself";
    EXPECT_LT(row.quality.base->kl.mean, 0.2) << kernels::to_string(row.kv.type);
  }
  EXPECT_LT(rows[0].quality.base->kl.mean, rows[1].quality.base->kl.mean) << "fp8 and q4";
  EXPECT_EQ(compare_caches(*model_, ids_, how, 8.0f).size(), 5u);
}

TEST_F(DecodeGpu, SpeedIsMeasuredInEveryPart) {
  const auto report = measure_speed(*gpu_, *model_, {.prompt = 64, .generate = 8});
  EXPECT_GT(report.read_bandwidth, 1e9);
  EXPECT_GT(report.prompt_seconds, 0);
  ASSERT_EQ(report.steps.size(), 3u);
  for (const auto& step : report.steps) EXPECT_GT(step.seconds, 0) << step.name;
  EXPECT_GT(report.launches, 0);
  EXPECT_GE(report.step_bytes, report.weight_bytes);
  for (const auto& part : report.parts) EXPECT_GE(part.launches, 1) << part.name;
  EXPECT_EQ(to_json(report)["steps"].size(), 3u);
}

/// All that measures a GPU, in one climb.
TEST_F(DecodeGpu, TheLadderIsClimbedToItsEnd) {
  const test::TemporaryFolder folder;
  CheckOptions options = test::check_options(test::quantized_model(folder, 4), test::bundled_model(), ids_file);
  options.windows.context = 64;
  options.windows.max_windows = 2;
  options.speed.prompt = 32;
  options.speed.generate = 4;
  options.asked = {{"--kernels", ""}, {"--kv-compare", ""}, {"--speed", ""}};
  EXPECT_NO_THROW(open_gpu(options));
  CheckContext context(options);
  const Findings findings = climb(context);
  EXPECT_TRUE(findings.checks.passed()) << findings.text;
  for (const char* key : {"weights", "perplexity", "kernels", "kv", "speed"}) {
    EXPECT_TRUE(findings.json.contains(key)) << key;
  }
}

}  // namespace
}  // namespace w4q::verify
