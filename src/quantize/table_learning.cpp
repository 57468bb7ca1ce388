#include "quantize/table_learning.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/codebook.h"
#include "formats/kbit.h"

namespace w4q::quantize {
namespace {

constexpr int learning_rounds = 16;
constexpr double least_gain = 1e-4;
/// Neighbouring entries of a learned table stay apart by this share of the largest, above what readers refuse.
constexpr float least_gap = 0x1p-18f;

/// Every entry moves to the mean of what it stands for; one that stands for nothing stays.
std::vector<float> moved(std::span<const float> table, const EntrySums& sums, int exponent) {
  std::vector<float> result(table.begin(), table.end());
  for (size_t i = 0; i < result.size(); ++i) {
    if (sums.weights[i] > 0) result[i] = static_cast<float>(std::ldexp(sums.weighted[i] / sums.weights[i], -exponent));
  }
  std::ranges::sort(result);
  const float largest = formats::table_max(result);
  for (float& entry : result) entry /= largest;
  for (size_t i = 1; i < result.size(); ++i) result[i] = std::max(result[i], result[i - 1] + least_gap);
  const float again = formats::table_max(result);
  for (float& entry : result) entry /= again;
  return result;
}

}  // namespace

void EntrySums::add(const EntrySums& other, double share) {
  for (size_t i = 0; i < weights.size(); ++i) {
    weighted[i] += share * other.weighted[i];
    weights[i] += share * other.weights[i];
  }
  error += share * other.error;
  power += share * other.power;
}

void EntrySums::add_weight(std::span<const EntrySums> panels, int64_t count) {
  EntrySums own;
  for (const EntrySums& panel : panels) own.add(panel);
  add(own, count > 1 && own.power > 0 ? 1 / own.power : 1);
}

std::vector<float> learned_table(std::span<const float> start, int exponent, double worthwhile,
                                 const SumEntries& sums) {
  std::vector<float> table(start.begin(), start.end());
  std::vector<float> best = table;
  double least = std::numeric_limits<double>::infinity(), first = 0;
  for (int round = 0; round < learning_rounds; ++round) {
    const EntrySums now = sums(formats::kbit_scaled_codebook(table, exponent));
    if (round == 0) first = now.error;
    const bool stalls = !(now.error < least * (1 - least_gain));
    if (now.error < least) {
      least = now.error;
      best = table;
    }
    if (stalls) break;
    table = moved(table, now, exponent);
  }
  const double left = least < first ? least / first : 1;
  return left < 1 - worthwhile ? best : std::vector<float>(start.begin(), start.end());
}

}  // namespace w4q::quantize
