#include "kernels/common/random_cuda.h"

#include <algorithm>

#include "core/rng.h"
#include "core/text.h"
#include "device/check.h"

namespace w4q::kernels {
namespace {

/// to[i] = make(64 random bits).
template <class T, class Make>
__global__ void fill_kernel(T* to, int64_t count, uint64_t seed, Make make) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = make(random_bits(seed, static_cast<uint64_t>(i)));
  }
}

struct Bits {
  __device__ uint32_t operator()(uint64_t bits) const { return static_cast<uint32_t>(bits >> 32); }
};
template <class T>
struct Uniform {
  float magnitude;
  __device__ T operator()(uint64_t bits) const {
    return magnitude * (static_cast<float>(bits >> 40) * 0x1p-23f - 1.0f);
  }
};
struct Scales {
  __device__ uint8_t operator()(uint64_t bits) const { return static_cast<uint8_t>(0x40 + (bits >> 58)); }
};
struct Constant {
  float value;
  __device__ float operator()(uint64_t) const { return value; }
};

template <class T, class Make>
void fill(T* to, int64_t count, uint64_t seed, Make make, const device::Stream& stream) {
  constexpr int threads = 256;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>((count + threads - 1) / threads, 1, 8192));
  fill_kernel<<<blocks, threads, 0, stream.get()>>>(to, count, seed, make);
  device::check_launch("fill", concat(count, " values"));
}

}  // namespace

void random_words_cuda(uint32_t* words, int64_t count, uint64_t seed, const device::Stream& stream) {
  fill(words, count, seed, Bits{}, stream);
}
void random_halves_cuda(__half* values, int64_t count, float magnitude, uint64_t seed, const device::Stream& stream) {
  fill(values, count, seed, Uniform<__half>{magnitude}, stream);
}
void random_floats_cuda(float* values, int64_t count, float magnitude, uint64_t seed, const device::Stream& stream) {
  fill(values, count, seed, Uniform<float>{magnitude}, stream);
}
void random_e4m4_scales_cuda(uint8_t* scales, int64_t count, uint64_t seed, const device::Stream& stream) {
  fill(scales, count, seed, Scales{}, stream);
}
void constant_cuda(float* values, int64_t count, float value, const device::Stream& stream) {
  fill(values, count, 0, Constant{value}, stream);
}

}  // namespace w4q::kernels
