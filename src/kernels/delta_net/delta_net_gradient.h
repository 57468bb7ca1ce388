// The way back through a gated delta net (delta_net.h), for sequences from position 0 on.
#pragma once

#include <span>

#include "kernels/delta_net/delta_net.h"

namespace w4q::kernels {

/// `x` [m × channels] as causal_convolution took it in; `gradient` of a loss by what it made of it becomes that by x.
void causal_convolution_gradient(const DeltaShape& shape, std::span<const float> weight, MatrixView<const float> x,
                                 MatrixView<float> gradient, Activation activation = Activation::silu);

struct DeltaGradients {
  MatrixView<float> mixed, beta, log_decay;
};

/// What delta_rule took in, and the gradient by its out: `by` gets those by all three. The state is computed once more, and
/// once more in stretches; it is there for the positions of a stretch. Throws internal when the shapes do not fit; does not
/// depend on the number of threads.
void delta_rule_gradient(const DeltaShape& shape, MatrixView<const float> mixed, MatrixView<const float> beta,
                         MatrixView<const float> log_decay, MatrixView<const float> gradient, const DeltaGradients& by);

}  // namespace w4q::kernels
