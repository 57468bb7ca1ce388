// The way back through layers and losses on the GPU, beside the CPU's.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "core/rng.h"
#include "decoder_cuda/layer_gradient.h"
#include "device/copy.h"
#include "device/properties.h"
#include "gpu.h"
#include "kernels/gradient/gradient_cuda.h"
#include "model/architecture.h"
#include "model/layer_gradient.h"
#include "model/loss_gradient.h"
#include "small_settings.h"
#include "support.h"

namespace w4q::decoder_cuda {
namespace {

constexpr int64_t length = 70;

/// ‖a − b‖ / ‖b‖.
double apart(std::span<const float> found, std::span<const float> expected) {
  EXPECT_EQ(found.size(), expected.size());
  double difference = 0, power = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += std::pow(double{found[i]} - double{expected[i]}, 2);
    power += std::pow(double{expected[i]}, 2);
  }
  return std::sqrt(difference / power);
}

/// Products round operands to eleven bits, 2^-11 at most of each, and layers have some ten of them in a row; attention's
/// and norms' slopes take differences of sums. Measured 1e-3 at most.
constexpr double tolerance = 1e-2;

class GradientCuda : public testing::TestWithParam<test::SmallSetting> {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
    test::write_small_model(*GetParam().row, folder_.path() / "m", GetParam().changes);
    model_.emplace(model::Model::open(folder_.path() / "m"));
    if (!CudaLayerGradient::takes(model_->config())) GTEST_SKIP() << "the CPU's";
    stream_.emplace(test::gpu());
  }

  std::vector<float> random(int64_t count, uint64_t seed) const {
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(random_normal(seed, uint64_t(i))));
    return values;
  }
  device::DeviceBuffer put(const std::vector<float>& values) const {
    return device::DeviceBuffer::copy_of(bytes_of(values), *stream_);
  }
  std::vector<float> fetch(const float* from, int64_t count) const {
    std::vector<float> values(static_cast<size_t>(count));
    device::copy(device::Way::from_gpu, values.data(), from, values.size() * sizeof(float), *stream_, "copying");
    stream_->synchronize();
    return values;
  }

  test::TemporaryFolder folder_;
  std::optional<model::Model> model_;
  std::optional<device::Stream> stream_;
};

TEST_P(GradientCuda, LayersGoBackAsOnTheCpu) {
  const auto& config = model_->config();
  const int64_t hidden = config.hidden_size;
  CudaLayerGradient walk(config, length, *stream_);
  UploadRing ring(*stream_);
  model::LayerGradient back(config);
  for (const auto type : {Decoded::f32, Decoded::f16}) {
    for (const auto& weights : model_->layers()) {
      const auto x = random(length * hidden, 1);
      auto gradient = random(length * hidden, 2);
      const auto layer = decode_layer(weights, type, length, ring);
      const auto on_gpu = put(x);
      auto gradient_on_gpu = put(gradient);
      std::map<std::string, std::vector<float>> inputs, outputs, norms;
      walk.enter(layer);
      walk.run(
          layer, on_gpu.as<float>(), gradient_on_gpu.as<float>(),
          [&](const model::PlannedLinear& linear, const float* input, const float* by, int64_t rows) {
            inputs[linear.name] = fetch(input, rows * linear.k);
            outputs[linear.name] = fetch(by, rows * linear.n);
          },
          [&](const model::PlannedNorm& norm, const float*, const float* by, int64_t rows) {
            norms[norm.name] = fetch(by, rows * norm.size);
          });
      size_t seen = 0;
      const auto values = [](MatrixView<const float> rows) {
        std::vector<float> result;
        for (int64_t r = 0; r < rows.rows; ++r) result.insert(result.end(), rows.row(r), rows.row(r) + rows.cols);
        return result;
      };
      back.run(
          weights, {x.data(), length, hidden}, {gradient.data(), length, hidden},
          [&](const model::PlannedLinear& linear, MatrixView<const float> input, MatrixView<const float> by) {
            ++seen;
            EXPECT_LT(apart(inputs.at(linear.name), values(input)), tolerance) << linear.name;
            EXPECT_LT(apart(outputs.at(linear.name), values(by)), tolerance) << linear.name;
          },
          [&](const model::PlannedNorm& norm, MatrixView<const float>, MatrixView<const float> by) {
            EXPECT_LT(apart(norms.at(norm.name), values(by)), tolerance) << norm.name;
          });
      EXPECT_EQ(seen, outputs.size());
      EXPECT_LT(apart(fetch(gradient_on_gpu.as<float>(), length * hidden), gradient), tolerance);
    }
  }
}

TEST_P(GradientCuda, LossesAreTheCpus) {
  const auto& config = model_->config();
  const int64_t hidden = config.hidden_size;
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < length; ++i) ids.push_back(static_cast<int32_t>((i * 37 + 5) % config.vocab_size));
  const auto x = random(length * hidden, 3), expected = random(length * hidden, 4);
  const model::LossGradient on_cpu{config, model_->final_norm(), model_->head()};
  UploadRing ring(*stream_);
  CudaLossGradient on_gpu(config, model_->final_norm(), model_->head(), length, ring);
  CudaLossGradient teacher(config, model_->final_norm(), model_->head(), length, ring);

  auto rows = x;
  const double loss = on_cpu.run(ids, {rows.data(), length, hidden});
  auto found = put(x);
  EXPECT_NEAR(on_gpu.run(ids, found.as<float>()), loss, 1e-3 * loss);
  EXPECT_LT(apart(fetch(found.as<float>(), length * hidden), rows), tolerance);

  rows = x;
  const double divergence = on_cpu.run(on_cpu, {expected.data(), length, hidden}, {rows.data(), length, hidden});
  found = put(x);
  const auto taught = put(expected);
  std::vector<float> by_norm;
  const auto see = [&](const model::PlannedNorm& norm, const float*, const float* by, int64_t count) {
    by_norm = fetch(by, count * norm.size);
  };
  EXPECT_NEAR(on_gpu.run(teacher, taught.as<float>(), found.as<float>(), false, {}), divergence, 1e-2 * divergence);
  EXPECT_EQ(fetch(found.as<float>(), length * hidden), x);
  EXPECT_NEAR(on_gpu.run(teacher, taught.as<float>(), found.as<float>(), true, see), divergence, 1e-2 * divergence);
  EXPECT_LT(apart(fetch(found.as<float>(), length * hidden), rows), tolerance);
  EXPECT_EQ(std::ssize(by_norm), length * hidden);
}

INSTANTIATE_TEST_SUITE_P(Families, GradientCuda, testing::ValuesIn(test::small_settings()),
                         [](const auto& param) { return test::setting_name(param.param); });

}  // namespace
}  // namespace w4q::decoder_cuda
