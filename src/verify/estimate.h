// Means over tokens with their standard errors, taken over windows: tokens of one window are not independent.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

namespace w4q::verify {

/// Half the width of a 95 % confidence interval in standard errors.
inline constexpr double confidence = 1.96;

struct Estimate {
  double mean = 0;
  double error = 0;  ///< standard error; NaN for a single window
};

/// value(window) summed over windows for each of their scored tokens, and the standard error from the spread of the
/// windows around it (ratio estimator).
template <class Window, class Value>
Estimate estimate(const std::vector<Window>& windows, Value value) {
  double sum = 0;
  double tokens = 0;
  for (const auto& window : windows) {
    sum += value(window);
    tokens += static_cast<double>(window.scored);
  }
  Estimate result{sum / tokens, 0};
  const auto count = static_cast<double>(windows.size());
  if (count < 2) {
    result.error = std::numeric_limits<double>::quiet_NaN();
    return result;
  }
  double spread = 0;
  for (const auto& window : windows) {
    const double residual = value(window) - result.mean * static_cast<double>(window.scored);
    spread += residual * residual;
  }
  result.error = std::sqrt(spread * count / (count - 1)) / tokens;
  return result;
}

}  // namespace w4q::verify
