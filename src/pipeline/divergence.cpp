#include "pipeline/divergence.h"

#include <algorithm>

#include "core/interrupt.h"
#include "core/parallel.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/sampling/logits.h"
#include "model/decoder.h"
#include "model/model.h"

namespace w4q::pipeline {
namespace {

constexpr int64_t logit_values = int64_t{1} << 22;

}  // namespace

DivergenceMeter::DivergenceMeter(const model::OpenedModel& model)
    : model_(model), head_(model::load_head(model)), norm_(model::load_final_norm(model)) {}

std::vector<double> DivergenceMeter::measure(const std::vector<float>& expected,
                                             std::span<const std::vector<float>* const> found) const {
  const int64_t vocabulary = model_.config.vocab_size;
  const int64_t tokens = static_cast<int64_t>(expected.size()) / model_.config.hidden_size;
  const int64_t chunk = std::clamp<int64_t>(logit_values / vocabulary, 1, tokens);
  std::vector<double> result(found.size());
  std::vector<float> base(static_cast<size_t>(chunk * vocabulary)), other(base.size());
  for (int64_t row = 0; row < tokens; row += chunk) {
    const int64_t rows = std::min(chunk, tokens - row);
    logits(expected, row, {base.data(), rows, vocabulary});
    for (size_t i = 0; i < found.size(); ++i) {
      logits(*found[i], row, {other.data(), rows, vocabulary});
      result[i] += kl(base, other, rows);
      check_interrupt();
    }
  }
  return result;
}

void DivergenceMeter::logits(const std::vector<float>& hidden, int64_t row, MatrixView<float> out) const {
  const auto& config = model_.config;
  std::vector<float> normed(static_cast<size_t>(out.rows * config.hidden_size));
  const MatrixView<const float> states(hidden.data() + row * config.hidden_size, out.rows, config.hidden_size);
  const MatrixView<float> input(normed.data(), out.rows, config.hidden_size);
  kernels::rms_norm(states, norm_, static_cast<float>(config.rms_norm_eps), input);
  kernels::linear(head_, input, out);
  model::finish_logits(config, out);
}

double DivergenceMeter::kl(std::span<const float> expected, std::span<const float> found, int64_t rows) const {
  std::vector<double> parts(static_cast<size_t>(rows));
  const auto width = static_cast<size_t>(model_.config.vocab_size);
  parallel_for(rows, 4, [&](int64_t begin, int64_t end) {
    for (auto r = static_cast<size_t>(begin); r < static_cast<size_t>(end); ++r) {
      parts[r] = kernels::compare_logits(expected.subspan(r * width, width), found.subspan(r * width, width), 0).kl;
    }
  });
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

}  // namespace w4q::pipeline
