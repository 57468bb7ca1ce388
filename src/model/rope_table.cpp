#include "model/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"

namespace w4q::model {
namespace {

/// θ^(2i/d) for each pair i. The power is taken in fp64 and rounded once.
std::vector<float> wavelengths_over_tau(float theta, int64_t dim) {
  std::vector<float> result(static_cast<size_t>(dim / 2));
  for (size_t i = 0; i < result.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(dim);
    result[i] = static_cast<float>(std::pow(static_cast<double>(theta), static_cast<double>(exponent)));
  }
  return result;
}

/// θ raised so that the slowest pair turns as far over `length` positions as it did over those of training.
float dynamic_theta(const RopeConfig& rope, int64_t length, int64_t dim) {
  const auto theta = static_cast<float>(rope.theta), factor = static_cast<float>(rope.factor);
  if (length <= rope.original_max_positions) return theta;
  const float stretch = factor * static_cast<float>(length) / static_cast<float>(rope.original_max_positions);
  const auto exponent = static_cast<float>(static_cast<double>(dim) / static_cast<double>(dim - 2));
  return theta * std::pow(stretch - static_cast<float>(rope.factor - 1), exponent);
}

/// Slow pairs are interpolated, fast ones kept, those between blended by their wavelength.
void scale_llama3(const RopeConfig& rope, std::vector<float>& inverse) {
  const auto factor = static_cast<float>(rope.factor), low = static_cast<float>(rope.low_freq_factor);
  const auto context = static_cast<double>(rope.original_max_positions);
  const auto longest = static_cast<float>(context / rope.low_freq_factor);
  const auto shortest = static_cast<float>(context / rope.high_freq_factor);
  const auto range = static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  for (float& value : inverse) {
    const float wavelength = static_cast<float>(2 * std::numbers::pi) / value;
    if (wavelength < shortest) continue;
    if (wavelength > longest) {
      value = value / factor;
      continue;
    }
    const float smooth = (static_cast<float>(context) / wavelength - low) / range;
    value = (1.0f - smooth) * value / factor + smooth * value;
  }
}

/// Each pair has a divisor of its own, another one beyond the positions of training.
void scale_longrope(const RopeConfig& rope, int64_t length, std::vector<float>& inverse) {
  const auto& factors = length > rope.original_max_positions ? rope.long_factors : rope.short_factors;
  const auto dim = static_cast<int64_t>(2 * inverse.size());
  const auto theta = wavelengths_over_tau(static_cast<float>(rope.theta), dim);
  for (size_t i = 0; i < inverse.size(); ++i) inverse[i] = 1.0f / (static_cast<float>(factors[i]) * theta[i]);
}

/// The first pairs turn, the rest stand.
void stop_slow_pairs(const RopeConfig& rope, std::vector<float>& inverse) {
  const auto turning = static_cast<size_t>(rope.partial_rotary_factor * static_cast<double>(inverse.size()));
  for (size_t i = 0; i < inverse.size(); ++i) {
    inverse[i] = i < turning ? inverse[i] / static_cast<float>(rope.factor) : 0.0f;
  }
}

/// The (fractional) pair that turns `rotations` times over the positions of training.
double yarn_pair(const RopeConfig& rope, double rotations, int64_t dim) {
  const double context = static_cast<double>(rope.original_max_positions);
  return static_cast<double>(dim) * std::log(context / (rotations * 2 * std::numbers::pi)) / (2 * std::log(rope.theta));
}

/// 1/(θ^(2i/d)) kept for fast pairs, divided by the factor for slow ones, with a ramp between.
std::vector<float> yarn_frequencies(const RopeConfig& rope, int64_t dim) {
  double low = yarn_pair(rope, rope.beta_fast, dim), high = yarn_pair(rope, rope.beta_slow, dim);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(dim - 1));
  if (low == high) high += 0.001;
  const auto start = static_cast<float>(low), width = static_cast<float>(high - low);
  std::vector<float> result = wavelengths_over_tau(static_cast<float>(rope.theta), dim);
  for (size_t i = 0; i < result.size(); ++i) {
    const float ramp = std::clamp((static_cast<float>(i) - start) / width, 0.0f, 1.0f);
    const float kept = 1.0f - ramp;
    const float extrapolated = 1.0f / result[i];
    const float interpolated = 1.0f / (static_cast<float>(rope.factor) * result[i]);
    result[i] = interpolated * (1.0f - kept) + extrapolated * kept;
  }
  return result;
}

}  // namespace

RopeTable::RopeTable(const RopeConfig& rope, int64_t head_dim, DType frequency_dtype)
    : rope_(rope),
      rotary_dim_(rope.type == RopeType::proportional
                      ? head_dim
                      : static_cast<int64_t>(static_cast<double>(head_dim) * rope.partial_rotary_factor)),
      frequency_dtype_(frequency_dtype) {
  ensure(rotary_dim_ >= 0 && rotary_dim_ % 2 == 0 && rotary_dim_ <= head_dim, "rope: odd number of channels");
}

std::vector<float> RopeTable::inverse_frequencies(int64_t length) const {
  std::vector<float> inverse = exact_frequencies(length);
  const bool follows = rope_.type == RopeType::dynamic || rope_.type == RopeType::longrope;
  const bool recomputed = follows && length > rope_.original_max_positions;
  if (frequency_dtype_ == DType::f32 || recomputed) return inverse;
  Buffer rounded(inverse.size() * static_cast<size_t>(dtype_bits(frequency_dtype_)) / 8);
  narrow(inverse, frequency_dtype_, rounded.bytes());
  widen(rounded.bytes(), frequency_dtype_, inverse);
  return inverse;
}

std::vector<float> RopeTable::exact_frequencies(int64_t length) const {
  if (rope_.type == RopeType::yarn) return yarn_frequencies(rope_, rotary_dim_);
  const float theta =
      rope_.type == RopeType::dynamic ? dynamic_theta(rope_, length, rotary_dim_) : static_cast<float>(rope_.theta);
  std::vector<float> inverse = wavelengths_over_tau(theta, rotary_dim_);
  for (float& value : inverse) value = 1.0f / value;
  if (rope_.type == RopeType::linear) {
    for (float& value : inverse) value /= static_cast<float>(rope_.factor);
  }
  if (rope_.type == RopeType::llama3) scale_llama3(rope_, inverse);
  if (rope_.type == RopeType::longrope) scale_longrope(rope_, length, inverse);
  if (rope_.type == RopeType::proportional) stop_slow_pairs(rope_, inverse);
  return inverse;
}

void RopeTable::fill(int64_t first, MatrixView<float> cosine, MatrixView<float> sine) const {
  ensure(cosine.cols == pairs() && sine.cols == pairs() && cosine.rows == sine.rows, "rope: shapes differ");
  const std::vector<float> inverse = inverse_frequencies(first + cosine.rows);
  const auto factor = static_cast<float>(rope_.attention_factor);
  parallel_for(cosine.rows, 32, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const auto position = static_cast<float>(first + r);
      for (size_t i = 0; i < inverse.size(); ++i) {
        const float angle = position * inverse[i];
        cosine.row(r)[i] = std::cos(angle) * factor;
        sine.row(r)[i] = std::sin(angle) * factor;
      }
    }
  });
}

}  // namespace w4q::model
