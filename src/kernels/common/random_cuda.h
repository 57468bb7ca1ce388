// Random weights made where they are needed, for measurements: the same for the same seed.
#pragma once

#include <cuda_fp16.h>
#include <cstdint>

#include "device/stream.h"

namespace w4q::kernels {

/// Random bits.
void random_words_cuda(uint32_t* words, int64_t count, uint64_t seed, const device::Stream& stream);
/// Uniform in [−magnitude, magnitude).
void random_halves_cuda(__half* values, int64_t count, float magnitude, uint64_t seed, const device::Stream& stream);
void random_floats_cuda(float* values, int64_t count, float magnitude, uint64_t seed, const device::Stream& stream);
/// E4M4 block scales of 2^-7 to 2^-3, as weights of models have them.
void random_e4m4_scales_cuda(uint8_t* scales, int64_t count, uint64_t seed, const device::Stream& stream);
/// The same value everywhere.
void constant_cuda(float* values, int64_t count, float value, const device::Stream& stream);

}  // namespace w4q::kernels
