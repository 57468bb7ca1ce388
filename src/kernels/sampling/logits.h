// Rows of logits: log-softmax, the largest entries, and how two models differ on one token. Sums run in fp32 over short
// stretches and in fp64 across them, so that vocabularies of any size come out right to 1e-6.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace w4q::kernels {

/// ln Σ e^row[i]. The row is not empty and has no NaN.
double log_sum_exp(std::span<const float> row) noexcept;

/// The log-probability of entry `id`. Throws bad_argument when there is no such entry.
double log_softmax_at(std::span<const float> row, int64_t id);

/// Index of the largest entry, the lowest one on ties.
int64_t argmax(std::span<const float> row) noexcept;

/// Indices of the five largest entries, descending, lower index first on ties; −1 where the row is shorter.
std::array<int64_t, 5> top_five(std::span<const float> row) noexcept;

/// Two models' opinions on the same next token.
struct LogitComparison {
  double nll_a = 0;  ///< −log p of the token under the base model, nats
  double nll_b = 0;  ///< … under the other
  double kl = 0;     ///< KL(a ‖ b), nats
  bool same_top1 = false;
  int top5_overlap = 0;  ///< entries that both top fives hold, 0 … 5
};

/// Compares the rows of the base model (a) and of another (b), equally long, for the true token `id`. Throws
/// bad_argument for an `id` outside.
LogitComparison compare_logits(std::span<const float> a, std::span<const float> b, int64_t id);

}  // namespace w4q::kernels
