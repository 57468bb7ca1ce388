// Stateless random numbers, the same on every machine: draw i of stream `seed` is splitmix64((seed << 32) ^ i).
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace w4q {

constexpr uint64_t splitmix64(uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr uint64_t random_bits(uint64_t seed, uint64_t index) noexcept { return splitmix64((seed << 32) ^ index); }

/// Uniform in [0, 1), 53 bits.
constexpr double random_uniform(uint64_t seed, uint64_t index) noexcept {
  return static_cast<double>(random_bits(seed, index) >> 11) * 0x1p-53;
}

/// N(0, 1) by Box–Muller from draws 2·index and 2·index + 1.
inline double random_normal(uint64_t seed, uint64_t index) noexcept {
  const double u = 1.0 - random_uniform(seed, 2 * index);  // in (0, 1], so the logarithm is finite
  const double v = random_uniform(seed, 2 * index + 1);
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

}  // namespace w4q
