#include "pipeline/calibrated_cost.h"

#include <algorithm>

#include "core/parallel.h"
#include "core/stopwatch.h"
#include "kernels/linear/gemm.h"
#include "pipeline/calibrate.h"
#include "pipeline/distill.h"
#include "pipeline/gradients.h"
#include "quantize/awq.h"

namespace w4q::pipeline {
namespace {

using quantize::StepKind;

/// How much longer a multiplication of the factorization takes than one of a product: an estimate.
constexpr double factor_slowness = 20;

/// Of the tokens that a group sees: experts see those that are sent to them.
double share_of(const model::ModelConfig& config, const model::InputGroup& group) {
  return group.expert ? static_cast<double>(config.mixture.chosen) / static_cast<double>(config.mixture.experts) : 1.0;
}

/// Tokens that go through every layer while norms are distilled: forth, forth again and back in the packed model, and
/// once in the 16-bit one.
double distilled_tokens(const CalibratedRequest& request) {
  const DistillOptions options;
  const double all = static_cast<double>(request.text.samples * request.text.length);
  const double trained = static_cast<double>(options.steps * options.samples * options.length);
  return 3 * std::min(trained, static_cast<double>(options.steps) * all) + std::min(trained, all);
}

/// Of the tokens, those that gradients are found for.
double back_share(const CalibratedRequest& request) {
  const double all = static_cast<double>(request.text.samples * request.text.length);
  const auto [samples, length] = gradient_shape(request.text.samples, request.text.length);
  return static_cast<double>(samples * length) / all;
}

/// Multiplications that the layers of a model ask for.
double multiplications(const CalibratedRequest& request, const model::OpenedModel& model, const SchemeOf& scheme_of,
                       const quantize::Steps& steps) {
  const double tokens = request.text.empty() ? 0 : static_cast<double>(request.text.samples * request.text.length);
  // Beside the points of the search and the clips: the outputs themselves, plain and packed. Feedback takes half of one
  // product for the targets, and about as much inside the blocks; each of three sweeps takes one, and two of them as
  // much again inside the blocks. Targets take two products, and two to solve for them.
  const bool feedback = steps.has(StepKind::feedback), both = steps.has(StepKind::feedback_outputs);
  const double products = 3 + (feedback ? 1 : 0) + (steps.has(StepKind::sweeps) ? 4 : 0) +
                          (steps.has(StepKind::asymmetric) ? 4 : 0) + (steps.has(StepKind::fit_norms) ? 1 : 0);
  // Behind scales that are judged by pivots stand two products: what the search found, and no scales.
  const auto search_products = [&](const formats::Scheme& scheme) {
    if (!steps.has(StepKind::awq)) return 0;
    const bool by_pivots = feedback && !steps.has(StepKind::rotate) && scheme.family == formats::SchemeFamily::integer;
    return by_pivots ? 2 : 2 * quantize::awq_alphas;
  };
  const double distilled = steps.has(StepKind::distill_norms) ? distilled_tokens(request) : 0;
  double sum = distilled * static_cast<double>(model.config.vocab_size * model.config.hidden_size);
  for (int64_t layer = 0; layer < model.config.layers; ++layer) {
    for (const auto& group : model::input_groups(model.config, layer)) {
      const auto k = static_cast<double>(group.width);
      const double rows = tokens * share_of(model.config, group);
      // The Gram matrix; of pairs that and the products of two inputs, decoded in two models to each block's end and, in
      // one of them, over its first half once more.
      sum += rows * k * k / 2 * (steps.has(StepKind::asymmetric) ? 3 : 1);
      // Its factor, at the speed of a plain fp64 loop rather than of a product.
      if (feedback) sum += k * k * k / 6 * factor_slowness;
      for (const auto& linear : group.linears) {
        const auto n = static_cast<double>(linear.n);
        const auto scheme = scheme_of(linear.name);
        sum += rows * n * k * (steps.has(StepKind::asymmetric) ? 2.5 : 1) +
               (scheme ? (products + search_products(*scheme)) * n * k * k : 0);
        sum += distilled * share_of(model.config, group) * n * k;
        // Forth, forth again and back, sums over tokens, their factor, and what rows are worth to each other.
        const double back = rows * back_share(request);
        if (both) sum += back * n * (3 * k + n / 2) + n * n * (n / 6 * factor_slowness + k / 2);
      }
    }
  }
  return sum;
}

}  // namespace

int64_t calibrated_memory(const model::OpenedModel& model, const SchemeOf& scheme_of, const quantize::Steps& steps) {
  // The matrix in fp64 while it is factored, and the factor.
  const int64_t factor = steps.has(StepKind::feedback) ? sizeof(double) + sizeof(float) : 0;
  const bool both = steps.has(StepKind::feedback_outputs);
  int64_t largest = 0, most_packed = 0, costs = 0;
  for (int64_t layer = 0; layer < model.config.layers; ++layer) {
    int64_t packed = 0, outputs = 0;
    for (const auto& group : model::input_groups(model.config, layer)) {
      int64_t weights = 0;
      for (const auto& linear : group.linears) weights += scheme_of(linear.name) ? linear.n * linear.k : 0;
      largest = std::max(largest, static_cast<int64_t>(sizeof(float)) * (2 * weights + group.width * group.width) +
                                      factor * group.width * group.width);
      packed += weights;
      if (!both) continue;
      // Of the layer's costs one is being factored, its errors kept in fp32.
      for (const auto& linear : group.linears) {
        outputs += linear.n * linear.n * int64_t{sizeof(float)};
        largest = std::max(
            largest, linear.n * (linear.n * (factor + int64_t{sizeof(float)}) + 3 * linear.k * int64_t{sizeof(float)}));
      }
    }
    costs = std::max(costs, outputs);
    most_packed = std::max(most_packed, packed);
  }
  // A byte for every packed weight is more than any scheme but the widest needs; targets want them in fp32 too.
  const int64_t copies = 1 + (steps.has(StepKind::asymmetric) ? int64_t{sizeof(float)} : 0);
  return largest + copies * most_packed + costs;
}

double measured_product_rate() {
  constexpr int64_t rows = 64, cols = 512, tasks = 32;
  const std::vector<float> a(rows * cols, 0.5f), b(cols * cols, 0.25f);
  double best = 1e9;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Stopwatch watch;
    parallel_for(tasks, 1, [&](int64_t, int64_t) {
      std::vector<float> c(rows * cols);
      kernels::gemm_nn({a.data(), rows, cols}, {b.data(), cols, cols}, {c.data(), rows, cols});
    });
    best = std::min(best, watch.seconds());
  }
  return static_cast<double>(tasks * rows * cols * cols) / best;
}

CalibratedCost calibrated_cost(const CalibratedRequest& request, const model::OpenedModel& model,
                               const SchemeOf& scheme_of, const quantize::Steps& steps, double rate) {
  CalibratedCost cost;
  cost.memory = calibration_memory(model, request.text.length, true) + calibrated_memory(model, scheme_of, steps);
  if (!request.text.empty()) {
    if (steps.has(StepKind::asymmetric)) cost.memory += pairs_memory(model, request.text.length);
    const int64_t states =
        request.text.samples * request.text.length * model.config.hidden_size * static_cast<int64_t>(sizeof(float));
    cost.memory += (steps.has(StepKind::asymmetric) ? 2 : 1) * states;
    if (steps.has(StepKind::feedback_outputs)) {
      const auto [samples, length] = gradient_shape(request.text.samples, request.text.length);
      const int64_t window = length * model.config.hidden_size * int64_t{sizeof(float)};
      const int64_t back = gradient_memory(model, length, false) + (model.config.layers + 1) * samples * window;
      cost.memory = std::max(cost.memory, back) + output_costs_bytes(model.config);
    }
    if (steps.has(StepKind::distill_norms)) {
      // Packed, a model takes at most as much as it did.
      const int64_t packed = model.folder.tensors.total_bytes();
      cost.memory = std::max(cost.memory, distill_memory(model, packed, request.text.samples, request.text.length,
                                                         {.max_memory = request.max_memory}));
    }
    if (request.max_memory > 0) cost.memory = std::min(cost.memory, request.max_memory);
  }
  cost.seconds = multiplications(request, model, scheme_of, steps) / rate;
  return cost;
}

}  // namespace w4q::pipeline
