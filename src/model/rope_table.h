// Cosines and sines of the rotary embedding, in the arithmetic of the published models: everything in fp32 after the
// parameters, so that large positions agree too (docs/model.md).
#pragma once

#include <cstdint>
#include <vector>

#include "core/views.h"
#include "model/config.h"

namespace w4q::model {

class RopeTable {
 public:
  /// `frequency_dtype`: what frequencies are rounded to, f32 in the published models. A 16-bit type is what a module
  /// computes with after it was cast as a whole, buffers included; frequencies that dynamic scaling recomputes stay
  /// fp32 there, and here.
  RopeTable(const RopeConfig& rope, int64_t head_dim, DType frequency_dtype = DType::f32);

  /// Pairs of channels that rotate in each head.
  int64_t pairs() const noexcept { return rotary_dim_ / 2; }

  /// Radians per position of each pair in a sequence of `length` positions. The length matters for dynamic scaling
  /// only.
  std::vector<float> inverse_frequencies(int64_t length) const;

  /// cos and sin of positions first, first + 1, … [rows × pairs()], times the attention factor, in a sequence that is
  /// first + rows positions long.
  void fill(int64_t first, MatrixView<float> cosine, MatrixView<float> sine) const;

 private:
  std::vector<float> exact_frequencies(int64_t length) const;

  RopeConfig rope_;
  int64_t rotary_dim_;
  DType frequency_dtype_;
};

}  // namespace w4q::model
