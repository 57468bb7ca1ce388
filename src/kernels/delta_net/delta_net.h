// The gated delta rule: attention whose memory of a sequence is one matrix a head, of one size however long it is.
// S ← e^g S;  S ← S + k ⊗ β (v − Sᵀ k);  out = Sᵀ q, with l2-normed q and k, and q over √key_dim. (Yang et al., "Gated
// Delta Networks".) All in fp32; results do not depend on the number of threads, nor on how a sequence is cut.
#pragma once

#include <cstdint>
#include <span>

#include "core/host_device.h"
#include "core/views.h"
#include "kernels/elementwise/gates.h"

namespace w4q::kernels {

struct DeltaShape {
  int64_t key_heads = 0, value_heads = 0;  ///< several value heads in turn share a key head
  int64_t key_dim = 0, value_dim = 0;      ///< of a head
  int64_t taps = 0;                        ///< positions that the convolution sees

  W4Q_HOST_DEVICE int64_t keys() const noexcept { return key_heads * key_dim; }
  W4Q_HOST_DEVICE int64_t values() const noexcept { return value_heads * value_dim; }
  /// Channels that are convolved: queries, keys, values.
  W4Q_HOST_DEVICE int64_t channels() const noexcept { return 2 * keys() + values(); }
  W4Q_HOST_DEVICE int64_t history_size() const noexcept { return (taps - 1) * channels(); }
  W4Q_HOST_DEVICE int64_t state_size() const noexcept { return value_heads * key_dim * value_dim; }

  bool operator==(const DeltaShape&) const = default;
};

/// What a layer remembers of a sequence, in the owner's memory; zeros before its first position.
struct DeltaMemory {
  float* history = nullptr;  ///< inputs of the last positions, [taps − 1][channels]
  float* state = nullptr;    ///< [value_heads][key_dim][value_dim]
};

/// x = `activation`(the causal convolution of each channel with its `weight` [channels][taps], the last tap at the position
/// itself). `history` moves on to the last positions of x.
void causal_convolution(const DeltaShape& shape, std::span<const float> weight, float* history, MatrixView<float> x,
                        Activation activation = Activation::silu);

/// `mixed` [m × channels]: queries, keys and values of all heads. `beta` and `log_decay` [m × value_heads]. out
/// [m × value_heads · value_dim]. Throws internal when the shapes do not fit.
void delta_rule(const DeltaShape& shape, MatrixView<const float> mixed, MatrixView<const float> beta,
                MatrixView<const float> log_decay, float* state, MatrixView<float> out);

}  // namespace w4q::kernels
