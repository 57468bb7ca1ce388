// Which kernels multiply a product of a decoder, at which numbers of rows, and how far their results may be off.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "decoder_cuda/linear.h"
#include "verify/products/product_reference.h"

namespace w4q::verify {

/// In the order of launches.
std::vector<std::string> kernel_names(const decoder_cuda::CudaProduct& product, int64_t rows, bool int8);

/// What the relative error of a product may be at most: its kernels' own bound.
double error_bound(const decoder_cuda::CudaProduct& product, Use use, bool int8);

/// The first and the last number of rows of every range that the kernels share out among themselves, ascending, from 1,
/// with int8 activations from 17 on, to 2048, a prompt's chunk.
std::vector<int64_t> row_counts(const decoder_cuda::CudaLinear& linear, bool int8);

}  // namespace w4q::verify
