// Products as a decoder multiplies them on the GPU, against what they should give: q, k and v in one, gate and up in
// turns with silu, sums with the residual stream, and in a step the norms between them.
#pragma once

#include <span>
#include <vector>

#include "decoder_cuda/linear.h"
#include "verify/products/kernel_check.h"
#include "verify/products/product_reference.h"

namespace w4q::verify {

/// Layers on both sides.
struct CheckedProduct {
  const decoder_cuda::CudaLinear& linear;
  std::vector<const kernels::LinearWeight*> weights;  ///< as linear.names
  Use use = Use::plain;
};

/// One line for each weight, or one for gate and up: the worst of the first and the last row count of every kernel
/// that its rows may choose, up to those of a chunk of a prompt. With `int8_activations` those of int8 products, which
/// all the weights must take.
std::vector<KernelError> check_product(device::Context& gpu, const CheckedProduct& product, bool int8_activations);

/// A step: `from` adds to the residual stream, and `to` reads it behind the norm `norm`, in two launches. Lines as
/// check_product, of both; none where the two do not fuse.
std::vector<KernelError> check_step(device::Context& gpu, const CheckedProduct& from, const CheckedProduct& to,
                                    std::span<const float> norm, float eps);

}  // namespace w4q::verify
