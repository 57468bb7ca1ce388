// Round to nearest for the integer family: every group gets the scale, and the zero, that its smallest and largest
// weight ask for, or the clipped range with the least squared error; codes are chosen against the stored scale
// (docs/int.md).
#pragma once

#include <span>

#include "core/views.h"
#include "formats/integer.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// The ranges that the search of Clip::mse tries: shares 1, 31/32 … 16/32 of the group's own.
inline constexpr int clip_steps = 17;
constexpr float clip_share(int step) noexcept { return 1.0f - static_cast<float>(step) / 32.0f; }

/// The scale and zero of one group of finite weights that lie in [low, high].
formats::IntegerScale rtn_scale(const formats::Scheme& scheme, std::span<const float> values, float low, float high,
                                Clip clip);

/// Adds the counts of blocks of `part`.
void add(const QuantizeStats& part, QuantizeStats& sum) noexcept;

/// Replaces finite weights by what `scheme` would store for them and decode again, group by group from the first
/// column on: bit for bit what quantizing and decoding give. For integer schemes without act order; rows in parallel,
/// or on the caller inside another parallel loop. Throws bad_argument for another scheme.
void fake_quantize(const formats::Scheme& scheme, MatrixView<float> weights, Clip clip = Clip::min_max);

/// The registry row.
QuantizerRow rtn_quantizer();

}  // namespace w4q::quantize
