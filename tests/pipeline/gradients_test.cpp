// The walk forward and back: what it sums, spills and refuses.
#include "pipeline/gradients.h"

#include <gtest/gtest.h>

#include <map>

#include "core/parallel.h"
#include "core/progress.h"
#include "model/decoder.h"
#include "model/layer_gradient.h"
#include "model/model.h"
#include "support.h"
#include "tokenizer/token_file.h"

namespace w4q::pipeline {
namespace {

using test::expect_error;

class Gradients : public ::testing::Test {
 protected:
  void SetUp() override { set_progress_enabled(false); }

  static CalibrationWindows windows(int64_t samples) {
    const auto ids = tokenizer::read_ids(folder() / "own/selfgen.ids.u16", opened().config.vocab_size);
    return cut_windows(ids, samples, 48, "ids");
  }
  static std::filesystem::path folder() { return test::testdata() / "w4q-llama-tiny"; }
  static const model::OpenedModel& opened() {
    static const auto model = model::open_model(folder());
    return model;
  }
  /// The sums of all layers, by linear, and the loss.
  static std::pair<std::map<std::string, LinearGradients>, double> walk(int64_t samples,
                                                                        const GradientOptions& options) {
    GradientWalk walk(opened(), windows(samples), options);
    std::map<std::string, LinearGradients> result;
    for (int64_t layer = opened().config.layers; layer-- > 0;) {
      for (auto& sums : walk.next()) result.emplace(sums.name, std::move(sums));
    }
    EXPECT_EQ(walk.spilled() > 0, options.max_memory > 0);
    expect_error(ErrorCode::internal, {"no further layer"}, [&] { walk.next(); });
    return {std::move(result), walk.loss()};
  }

  test::TemporaryFolder temporary_;
};

/// What the whole model says window by window, with the same products in the same order.
TEST_F(Gradients, SumWhatTheWholeModelSees) {
  const auto [sums, loss] = walk(3, {.weighted_inputs = true});
  const auto model = model::Model::open(folder());
  const auto& config = model.config();
  std::map<std::string, quantize::InputStatistics> expected;
  double nats = 0;
  for (int64_t window = 0; window < 3; ++window) {
    const auto ids = windows(3);
    std::vector<std::vector<float>> inputs;
    model::Observer observer;
    observer.hidden = [&](int64_t, MatrixView<const float> hidden) {
      inputs.emplace_back(hidden.data, hidden.data + hidden.rows * hidden.cols);
    };
    model::Decoder decoder(model, 48);
    decoder.forward(ids.window(window), &observer);
    const auto view = [&](std::vector<float>& values) {
      return MatrixView<float>(values.data(), 48, config.hidden_size);
    };
    // The last hidden states are normed already: those before come from the last layer once more.
    std::vector<float> x = inputs[inputs.size() - 2];
    model::LayerDecoder last(config);
    auto memories = model::LayerMemories::one_at_a_time(config, 48);
    last.set_positions(0, 48);
    last.run(model.layers().back(), memories.layer(config.layers - 1), view(x));
    nats += model::LossGradient{config, model.final_norm(), model.head()}.run(ids.window(window), view(x));
    model::LayerGradient back(config);
    for (int64_t layer = config.layers; layer-- > 0;) {
      const auto at = static_cast<size_t>(layer);
      back.run(model.layers()[at], view(inputs[at]), view(x),
               [&](const model::PlannedLinear& linear, MatrixView<const float>, MatrixView<const float> gradient) {
                 auto& own = expected.try_emplace(linear.name, quantize::make_statistics(linear.n, true)).first->second;
                 quantize::add_rows(own, gradient, linear.name);
               });
    }
  }
  EXPECT_EQ(loss, nats);
  EXPECT_GT(loss, 0);
  EXPECT_EQ(sums.size(), expected.size());
  for (const auto& [name, own] : expected) {
    const auto& found = sums.at(name);
    EXPECT_EQ(found.outputs.count, 3 * 48);
    EXPECT_EQ(found.outputs.gram, own.gram) << name;
    // Σ |g|²·x_c², over channels: of rows whose lengths are |g|·|x|.
    EXPECT_GT(found.weighted_inputs.sum_squares.front(), 0) << name;
    EXPECT_EQ(std::ssize(found.weighted_inputs.gram), quantize::triangle_size(found.weighted_inputs.width));
  }
}

TEST_F(Gradients, DoNotDependOnThreadsOrSpilling) {
  set_threads(1);
  const auto one = walk(2, {});
  set_threads(3);
  const int64_t memory = gradient_memory(opened(), 48, false) + 1;
  const auto three = walk(2, {.max_memory = memory, .spill_at = temporary_.path() / "out"});
  set_threads(0);
  EXPECT_EQ(one.second, three.second);
  for (const auto& [name, sums] : one.first) EXPECT_EQ(sums.outputs.gram, three.first.at(name).outputs.gram) << name;
}

TEST_F(Gradients, RefuseWhatHasNoWayBackAndTooLittleMemory) {
  const auto mixture = model::open_model(test::testdata() / "w4q-mixture-tiny");
  expect_error(ErrorCode::unsupported, {"mixture of experts", "layer 0"},
               [&] { GradientWalk(mixture, windows(1), {}); });
  expect_error(ErrorCode::bad_argument, {"--max-memory", "layer"},
               [&] { GradientWalk(opened(), windows(1), {.max_memory = 1'000'000}); });
}

}  // namespace
}  // namespace w4q::pipeline
