// The inner loops of integer quantizers over one group of finite fp32 weights, chosen at run time for the machine's
// instruction set. Every set gives the same bits as the plain definition in formats/integer.h (class E0).
#pragma once

#include <cstdint>
#include <span>

namespace w4q::quantize {

struct Range {
  float low = 0;   ///< not above zero
  float high = 0;  ///< not below zero
  bool finite = true;
};

/// The smallest range that holds all values and zero; `finite` is false when a value is not.
Range group_range(std::span<const float> values);

/// formats::integer_code of every value. `scale` is not zero.
void group_codes(std::span<const float> values, float scale, int zero, int bits, uint8_t* codes);

/// Replaces every value by the one that its code stands for.
void group_round(std::span<float> values, float scale, int zero, int bits);

/// Σ (value − rounded value)², summed in sixteen fp32 lanes, value i in lane i mod 16.
double group_error(std::span<const float> values, float scale, int zero, int bits);

}  // namespace w4q::quantize
