#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cfloat>

#include "core/text.h"
#include "device/buffer.h"
#include "device/check.h"
#include "device/stream.h"
#include "formats/integer.h"
#include "quantize/rtn.h"
#include "quantize/rtn_cuda.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {
namespace {

using formats::PlaneRole;
using formats::ScaleType;

constexpr int threads = 256;
/// Lanes of a group: as many as the sums of the definition have (integer_simd.h), value i in lane i mod 16.
constexpr int group_lanes = 16;
constexpr int64_t strip_bytes = int64_t{32} << 20;  ///< of weights in GPU memory at a time

/// What the definition takes from the scheme.
struct Rule {
  int bits;
  bool asymmetric;
  ScaleType scale;
  float largest_scale;
  float least_normal;
  bool search;  ///< Clip::mse
};

struct Scale {
  float value;
  uint32_t bits;
  int zero;
  bool saturated;
};

struct Counters {
  unsigned long long zero_blocks, saturated_scales, subnormal_scales;
  unsigned long long bad_row;  ///< the first row with a value that is not finite; all ones when there is none
};

/// formats::integer_store_scale.
__device__ Scale store_scale(const Rule& rule, double scale) {
  const bool saturated = scale > static_cast<double>(rule.largest_scale);
  const float value = saturated ? rule.largest_scale : static_cast<float>(scale);
  if (rule.scale == ScaleType::f16) {
    const auto bits = max(static_cast<int>(__half_as_ushort(__float2half_rn(value))), 1);
    return {__half2float(__ushort_as_half(static_cast<unsigned short>(bits))), static_cast<uint32_t>(bits), 0,
            saturated};
  }
  if (rule.scale == ScaleType::bf16) {
    const auto bits = max(static_cast<int>(__bfloat16_as_ushort(__float2bfloat16_rn(value))), 1);
    return {__uint_as_float(static_cast<uint32_t>(bits) << 16), static_cast<uint32_t>(bits), 0, saturated};
  }
  const float single = value > 0 ? value : __uint_as_float(1);
  return {single, __float_as_uint(single), 0, saturated};
}

/// formats::integer_scale.
__device__ Scale scale_of(const Rule& rule, float low, float high) {
  low = fminf(low, 0.0f);
  high = fmaxf(high, 0.0f);
  const int steps = (1 << rule.bits) - 1;
  const double range = rule.asymmetric ? static_cast<double>(high) - static_cast<double>(low)
                                       : 2.0 * static_cast<double>(fmaxf(-low, high));
  Scale result = store_scale(rule, range == 0 ? 1.0 : range / steps);
  result.zero = 1 << (rule.bits - 1);
  if (!rule.asymmetric || range == 0) return result;
  const float zero = fminf(-low / result.value, static_cast<float>(steps));
  result.zero = static_cast<int>((zero + 0x1.8p23f) - 0x1.8p23f);
  return result;
}

/// formats::integer_code but for the zero.
__device__ float steps_of(float x, const Scale& scale, int bits) {
  const auto lowest = static_cast<float>(-scale.zero);
  const auto highest = static_cast<float>((1 << bits) - 1 - scale.zero);
  const float steps = fminf(fmaxf(x / scale.value, lowest), highest);
  return (steps + 0x1.8p23f) - 0x1.8p23f;
}

__device__ float widen(float value) { return value; }
__device__ float widen(__half value) { return __half2float(value); }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

/// One group, by the sixteen lanes of half a warp.
template <class T>
struct Group {
  const T* values;
  int64_t count;
  int lane;
  unsigned mask;  ///< the half warp's lanes

  __device__ float reduce(float value, bool largest) const {
    for (int step = group_lanes / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(mask, value, step);
      value = largest ? fmaxf(value, other) : fminf(value, other);
    }
    return value;
  }

  /// Σ (value − rounded value)² in the order of the definition.
  __device__ double error(const Scale& scale, int bits) const {
    float part = 0;
    for (int64_t i = lane; i < count; i += group_lanes) {
      const float x = widen(values[i]);
      const float difference = x - steps_of(x, scale, bits) * scale.value;
      part += difference * difference;
    }
    double sum = 0;
    for (int from = 0; from < group_lanes; ++from) {
      sum += static_cast<double>(__shfl_sync(mask, part, from, group_lanes));
    }
    return sum;
  }

  __device__ Scale choose(const Rule& rule, float low, float high) const {
    Scale best = scale_of(rule, low, high);
    if (!rule.search || low == high) return best;
    double least = error(best, rule.bits);
    for (int step = 1; step < clip_steps; ++step) {
      const float share = clip_share(step);
      const Scale scale = scale_of(rule, low * share, high * share);
      const double wrong = error(scale, rule.bits);
      if (!(wrong < least)) continue;
      least = wrong;
      best = scale;
    }
    return best;
  }
};

/// Rows of a strip and where their results go: scales [rows][groups], codes a byte each.
struct Strip {
  int64_t rows, k, groups, group, first_row;
  void* scales;
  uint8_t* zeros;
  uint8_t* codes;
  Counters* counters;
};

template <class T>
__global__ void __launch_bounds__(threads) encode_kernel(Rule rule, Strip strip, const T* weights) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) / group_lanes;
  if (index >= strip.rows * strip.groups) return;
  const int64_t row = index / strip.groups;
  const int64_t first = index % strip.groups * strip.group;
  const Group<T> group{weights + row * strip.k + first, min(strip.group, strip.k - first),
                       static_cast<int>(threadIdx.x % group_lanes), 0xFFFFu << (threadIdx.x % 32 / group_lanes * 16)};
  float low = 0;
  float high = 0;
  float finite = 1;
  for (int64_t i = group.lane; i < group.count; i += group_lanes) {
    const float x = widen(group.values[i]);
    low = fminf(low, x);
    high = fmaxf(high, x);
    if (!(fabsf(x) <= FLT_MAX)) finite = 0;
  }
  low = group.reduce(low, false);
  high = group.reduce(high, true);
  if (group.reduce(finite, false) == 0) {
    if (group.lane == 0) atomicMin(&strip.counters->bad_row, static_cast<unsigned long long>(strip.first_row + row));
    return;
  }
  const Scale scale = group.choose(rule, low, high);
  for (int64_t i = group.lane; i < group.count; i += group_lanes) {
    const float steps = steps_of(widen(group.values[i]), scale, rule.bits);
    strip.codes[row * strip.k + first + i] = static_cast<uint8_t>(static_cast<int>(steps) + scale.zero);
  }
  if (group.lane != 0) return;
  if (rule.scale == ScaleType::f32) {
    static_cast<uint32_t*>(strip.scales)[index] = scale.bits;
  } else {
    static_cast<uint16_t*>(strip.scales)[index] = static_cast<uint16_t>(scale.bits);
  }
  if (strip.zeros != nullptr) strip.zeros[index] = static_cast<uint8_t>(scale.zero);
  if (low == high) atomicAdd(&strip.counters->zero_blocks, 1ull);
  if (scale.saturated) atomicAdd(&strip.counters->saturated_scales, 1ull);
  if (scale.value < rule.least_normal) atomicAdd(&strip.counters->subnormal_scales, 1ull);
}

/// Bytes of codes to the dense stream of each row, a thread per word.
__global__ void __launch_bounds__(threads)
    join_codes_kernel(int bits, int64_t rows, int64_t k, int64_t row_words, const uint8_t* codes, uint32_t* words) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (index >= rows * row_words) return;
  const int64_t row = index / row_words;
  const int64_t first_bit = index % row_words * 32;
  uint32_t word = 0;
  for (int64_t i = first_bit / bits; i < k && i * bits < first_bit + 32; ++i) {
    const auto code = static_cast<uint32_t>(codes[row * k + i]);
    const int64_t at = i * bits - first_bit;
    word |= at >= 0 ? code << at : code >> -at;
  }
  words[index] = word;
}

unsigned blocks_for(int64_t things) { return static_cast<unsigned>((things + threads - 1) / threads); }

/// Buffers of one strip and the way of strip after strip through them.
class Encoder {
 public:
  Encoder(const TensorView& weight, Clip clip, formats::PackedWeight& packed)
      : weight_(weight),
        packed_(packed),
        rule_{packed.scheme.bits,
              packed.scheme.asymmetric,
              packed.scheme.scale,
              formats::integer_scale_max(packed.scheme),
              least_normal(packed.scheme.scale),
              clip == Clip::mse},
        k_(packed.k),
        groups_(formats::integer_groups(packed.scheme, packed.k)),
        row_words_(formats::dense_words(packed.k, packed.scheme.bits)),
        scale_bytes_(packed.scheme.scale == ScaleType::f32 ? 4 : 2),
        row_bytes_(k_ * dtype_bits(weight.dtype) / 8),
        rows_(std::clamp<int64_t>(strip_bytes / row_bytes_, 1, packed.n)),
        values_(static_cast<size_t>(rows_ * row_bytes_)),
        codes_(static_cast<size_t>(rows_ * k_)),
        words_(static_cast<size_t>(rows_ * row_words_ * 4)),
        scales_(static_cast<size_t>(rows_ * groups_ * scale_bytes_)),
        zeros_(static_cast<size_t>(rows_ * groups_)),
        counters_(sizeof(Counters)) {}

  QuantizeStats run() {
    const Counters none{0, 0, 0, ~0ull};
    counters_.upload(std::as_bytes(std::span(&none, 1)), stream_);
    for (int64_t row = 0; row < packed_.n; row += rows_) encode(row, std::min(rows_, packed_.n - row));
    Counters seen{};
    counters_.download(std::as_writable_bytes(std::span(&seen, 1)), stream_);
    stream_.synchronize();
    if (seen.bad_row != none.bad_row) {
      const auto row = static_cast<int64_t>(seen.bad_row);
      refuse_non_finite(weight_.name, weight_.dtype, row_bytes(weight_, row), row);
    }
    QuantizeStats stats;
    stats.blocks = packed_.n * groups_;
    stats.zero_blocks = static_cast<int64_t>(seen.zero_blocks);
    stats.saturated_scales = static_cast<int64_t>(seen.saturated_scales);
    stats.subnormal_scales = static_cast<int64_t>(seen.subnormal_scales);
    return stats;
  }

 private:
  void encode(int64_t first, int64_t rows) {
    values_.upload(
        weight_.bytes.subspan(static_cast<size_t>(first * row_bytes_), static_cast<size_t>(rows * row_bytes_)),
        stream_);
    const Strip strip{rows,
                      k_,
                      groups_,
                      formats::integer_group_size(packed_.scheme, k_),
                      first,
                      scales_.data(),
                      packed_.scheme.asymmetric ? zeros_.as<uint8_t>() : nullptr,
                      codes_.as<uint8_t>(),
                      counters_.as<Counters>()};
    const unsigned grid = blocks_for(rows * groups_ * group_lanes);
    if (weight_.dtype == DType::f32) {
      encode_kernel<<<grid, threads, 0, stream_.get()>>>(rule_, strip, values_.as<float>());
    } else if (weight_.dtype == DType::f16) {
      encode_kernel<<<grid, threads, 0, stream_.get()>>>(rule_, strip, values_.as<__half>());
    } else {
      encode_kernel<<<grid, threads, 0, stream_.get()>>>(rule_, strip, values_.as<__nv_bfloat16>());
    }
    join_codes_kernel<<<blocks_for(rows * row_words_), threads, 0, stream_.get()>>>(
        rule_.bits, rows, k_, row_words_, codes_.as<uint8_t>(), words_.as<uint32_t>());
    device::check_launch("rtn", concat(rows, " × ", k_, " to ", to_string(packed_.scheme)));
    take(PlaneRole::codes, words_, first, rows, row_words_ * 4);
    take(PlaneRole::scales, scales_, first, rows, groups_ * scale_bytes_);
    if (packed_.scheme.asymmetric) take(PlaneRole::zeros, zeros_, first, rows, groups_);
    stream_.synchronize();
  }

  void take(PlaneRole role, const device::DeviceBuffer& from, int64_t first, int64_t rows, int64_t bytes) {
    const auto plane = packed_.plane(role).bytes.bytes();
    from.download(plane.subspan(static_cast<size_t>(first * bytes), static_cast<size_t>(rows * bytes)), stream_);
  }

  const TensorView& weight_;
  formats::PackedWeight& packed_;
  Rule rule_;
  int64_t k_, groups_, row_words_, scale_bytes_, row_bytes_, rows_;
  device::Stream stream_;
  device::DeviceBuffer values_, codes_, words_, scales_, zeros_, counters_;
};

}  // namespace

QuantizeStats rtn_encode_cuda(const TensorView& weight, Clip clip, formats::PackedWeight& packed) {
  return Encoder(weight, clip, packed).run();
}

}  // namespace w4q::quantize
