// The walk forward and back: what it sums, spills and refuses.
#include "pipeline/gradients.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "formats/scheme.h"
#include "kernels/dequantize/dequantize.h"
#include "kernels/linear/gemm.h"
#include "model/architecture.h"
#include "model/decoder.h"
#include "model/layer_gradient.h"
#include "model/loss_gradient.h"
#include "model/model.h"
#include "quantize/feedback.h"
#include "small_model.h"
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

/// First layer first, wherever they were kept; and what two-sided feedback makes of real weights: the error that counts
/// falls.
TEST_F(Gradients, AreCostsThatFeedbackLessens) {
  const auto sums = walk(2, {}).first;
  const auto text = windows(2);
  OutputCosts in_memory(opened(), text, {}, std::numeric_limits<int64_t>::max());
  OutputCosts on_disk(opened(), text, {.spill_at = temporary_.path() / "out"}, 0);
  Calibration calibration(opened(), text, {});
  const auto scheme = formats::parse_scheme("kbit3-b32-e4m4");
  double one = 0, both = 0;
  for (int64_t layer = 0; layer < opened().config.layers; ++layer) {
    const auto costs = in_memory.layer(layer);
    for (const auto& [name, values] : on_disk.layer(layer)) EXPECT_TRUE(std::ranges::equal(values, costs.at(name)));
    const auto statistics = calibration.next();
    const auto groups = model::input_groups(opened().config, layer);
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto gram = quantize::mean_gram(statistics[g]);
      const int64_t k = groups[g].width;
      const quantize::ErrorFactor inputs({gram.data(), k, k}, 32, 0.01, "x");
      const std::vector<float> alike(static_cast<size_t>(k), 1.0f);
      for (const auto& linear : groups[g].linears) {
        const int64_t n = linear.n;
        const auto& own = sums.at(linear.name).outputs;
        const auto kept = quantize::expand_triangle(costs.at(linear.name), n);
        const auto cost = quantize::mean_gram(own);
        EXPECT_FLOAT_EQ(kept[0], cost[0]);
        // Of so few tokens hardly anything is believed; what feedback makes of all of it is looked at here.
        EXPECT_NEAR(kept[1], cost[1] * quantize::supported_share(own.count, n), 1e-6 * std::abs(cost[1]));
        EXPECT_EQ(kept[1], kept[static_cast<size_t>(n)]);
        const quantize::ErrorFactor outputs({cost.data(), n, n}, 1, 0.01, "g");
        const auto loaded = opened().folder.tensors.load(linear.name + ".weight");
        for (const bool two_sided : {false, true}) {
          const quantize::CalibratedInput input{
              .mean_squares = alike, .feedback = &inputs, .outputs = two_sided ? &outputs : nullptr};
          quantize::QuantizeOptions options;
          options.steps = quantize::parse_steps("search → feedback");
          options.input = &input;
          const auto packed = quantize::quantize_with_feedback(loaded.view(), scheme, options).weight;
          std::vector<float> values(static_cast<size_t>(n * k)), error(values.size()), product(values.size());
          widen(loaded.view().bytes, loaded.view().dtype, values);
          kernels::dequantize_rows(packed, 0, {error.data(), n, k});
          for (size_t i = 0; i < error.size(); ++i) error[i] -= values[i];
          kernels::gemm_nn({error.data(), n, k}, {gram.data(), k, k}, {values.data(), n, k});
          kernels::gemm_nn({cost.data(), n, n}, {values.data(), n, k}, {product.data(), n, k});
          double sum = 0;
          for (size_t i = 0; i < error.size(); ++i) sum += double{error[i]} * double{product[i]};
          (two_sided ? both : one) += sum;
        }
      }
    }
  }
  EXPECT_LT(both, 0.2 * one);  // measured: .065, on the few tokens that the costs are of
}

TEST_F(Gradients, RefuseWhatHasNoWayBackAndTooLittleMemory) {
  const auto rows = model::architectures();
  const auto row = std::ranges::find(rows, "gemma4_text", [](const auto* listed) { return listed->model_type; });
  test::write_small_model(**row, temporary_ / "m");
  const auto own = model::open_model(temporary_ / "m");
  expect_error(ErrorCode::unsupported, {"embeddings of its own", "layer 0"},
               [&] { GradientWalk(own, windows(1), {}); });
  expect_error(ErrorCode::bad_argument, {"--max-memory", "layer"},
               [&] { GradientWalk(opened(), windows(1), {.max_memory = 1'000'000}); });
}

}  // namespace
}  // namespace w4q::pipeline
