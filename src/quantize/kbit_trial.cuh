// Trying scales on a block of kbit on the GPU: the candidates, the errors and the choice of kbit_panel.h, bit for bit
// (class E0). A warp has a block of one row; each lane tries other candidates.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "formats/e4m4.h"
#include "formats/kbit.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize::cuda {

inline constexpr int warp_lanes = 32;
inline constexpr unsigned all_lanes = 0xFFFFFFFFu;

/// What all blocks of a weight share, in the kernel's arguments.
struct KbitRule {
  float levels[32];
  float midpoints[32];
  int count;  ///< levels
  int bits;
  float largest;
  bool e4m4;
  bool search;  ///< Scales::search; otherwise the rule of absmax
};

inline KbitRule kbit_rule(const formats::Scheme& scheme, std::span<const float> codebook, Scales scales) {
  KbitRule rule{};
  std::copy(codebook.begin(), codebook.end(), rule.levels);
  formats::kbit_midpoints(codebook, std::span(rule.midpoints).first(codebook.size() - 1));
  rule.count = static_cast<int>(codebook.size());
  rule.bits = scheme.bits;
  rule.largest = formats::table_max(codebook);
  rule.e4m4 = scheme.scale == formats::ScaleType::e4m4;
  rule.search = scales == Scales::search;
  return rule;
}

/// A block in shared memory, as PanelBlock.
struct KbitBlock {
  const float* target;
  const float* weights;
  const float* importance;
  const float* coupling;  ///< [columns][32]
  int columns;
};

__device__ inline float decode_scale(const KbitRule& rule, uint16_t bits) {
  return rule.e4m4 ? formats::e4m4_decode(static_cast<uint8_t>(bits)) : __half2float(__ushort_as_half(bits));
}

/// formats::store_scale.
__device__ inline uint16_t encode_scale(const KbitRule& rule, float absmax) {
  const float scale = absmax / rule.largest;
  if (rule.e4m4) return formats::e4m4_encode(scale);
  return min(__half_as_ushort(__float2half_rn(scale)), static_cast<unsigned short>(0x7BFF));
}

__device__ inline uint16_t candidate(const KbitRule& rule, uint16_t centre, int step) {
  if (rule.e4m4) return static_cast<uint16_t>(min(max(static_cast<int>(centre) + step, 1), 0xFF));
  const int octave = (step + 16 * 32) / 16 - 32;
  const float factor = ldexpf(1.0f + static_cast<float>(step - 16 * octave) / 16.0f, octave);
  const float value = __half2float(__ushort_as_half(centre)) * factor;
  const int bits = __half_as_ushort(__float2half_rn(value));
  return static_cast<uint16_t>(min(max(bits, 1), 0x7BFF));
}

/// The error of a trial with `scale`; keep(c, code, value, residual) sees every column.
template <bool coupled, class Keep>
__device__ __forceinline__ float trial(const KbitRule& rule, const float* levels, const float* midpoints,
                                       const KbitBlock& block, float scale, float unit, const Keep& keep) {
  float residuals[formats::kbit_block];
  float error = 0;
#pragma unroll
  for (int c = 0; c < formats::kbit_block; ++c) {
    if (c >= block.columns) continue;
    float target = block.target[c];
    if constexpr (coupled) {
#pragma unroll
      for (int j = 0; j < c; ++j) target = target + block.coupling[c * formats::kbit_block + j] * residuals[j];
    }
    const float x = scale == 0 ? 0.0f : target / scale;
    int code = 0;
    for (int i = 0; i + 1 < rule.count; ++i) code += x > midpoints[i] ? 1 : 0;
    const float value = levels[code] * scale;
    const float miss = (target - value) * unit;
    error = error + miss * miss * block.importance[c];
    residuals[c] = block.weights[c] - value;
    keep(c, code, target, residuals[c]);
  }
  return error;
}

/// The choice of scale of one warp.
template <bool coupled>
class ScaleChoice {
 public:
  __device__ ScaleChoice(const KbitRule& rule, const float* levels, const float* midpoints, const KbitBlock& block)
      : rule_(rule), levels_(levels), midpoints_(midpoints), block_(block) {
    const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
    absmax_ = lane < block.columns ? fabsf(block.target[lane]) : 0.0f;
    for (int step = 16; step > 0; step /= 2) absmax_ = fmaxf(absmax_, __shfl_xor_sync(all_lanes, absmax_, step));
    const int exponent = absmax_ > 0 ? min(max(ilogbf(absmax_), -126), 126) : 0;
    unit_ = ldexpf(1.0f, -exponent);
  }

  /// The scale's bits, in every lane.
  __device__ uint16_t choose() {
    const uint16_t centre = encode_scale(rule_, absmax_);
    if (!rule_.search) return centre;
    const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
#pragma unroll 1
    for (int first = lowest; first <= highest; first += warp_lanes) {
      const int step = first + lane;
      const auto bits = absmax_ == 0 ? uint16_t{0} : candidate(rule_, centre, step);
      float error = attempt(bits);
      if (step > highest || !(error < INFINITY)) error = INFINITY;
      take_best(error, step, bits);
    }
    if (!rule_.e4m4) {
#pragma unroll 1
      for (int round = 0; round < 3; ++round) refine();
    }
    return best_;
  }

 private:
  static constexpr int lowest = -32;
  static constexpr int highest = 8;

  __device__ float attempt(uint16_t bits) const {
    return trial<coupled>(rule_, levels_, midpoints_, block_, decode_scale(rule_, bits), unit_,
                          [](int, int, float, float) {});
  }

  /// The least error of all lanes, ties to the lower step, if it is below the best so far.
  __device__ void take_best(float error, int step, uint16_t bits) {
    int chosen = bits;
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other_error = __shfl_xor_sync(all_lanes, error, distance);
      const int other_step = __shfl_xor_sync(all_lanes, step, distance);
      const int other_bits = __shfl_xor_sync(all_lanes, chosen, distance);
      if (other_error < error || (other_error == error && other_step < step)) {
        error = other_error;
        step = other_step;
        chosen = other_bits;
      }
    }
    if (!(error < least_)) return;
    least_ = error;
    best_ = static_cast<uint16_t>(chosen);
  }

  /// f16: the scale that fits the codes of the best one best, were it not for coupling. All lanes do the same.
  __device__ void refine() {
    double product = 0, square = 0;
    trial<coupled>(rule_, levels_, midpoints_, block_, decode_scale(rule_, best_), 1.0f,
                   [&](int c, int code, float, float) {
                     const double level = levels_[code];
                     const double weight = block_.importance[c];
                     product += weight * level * static_cast<double>(block_.target[c]);
                     square += weight * level * level;
                   });
    uint16_t bits = best_;
    if (square > 0 && product > 0 && absmax_ != 0) {
      const int half = __half_as_ushort(__float2half_rn(static_cast<float>(product / square)));
      bits = static_cast<uint16_t>(min(max(half, 1), 0x7BFF));
    }
    const float error = attempt(bits);
    if (!(error < least_)) return;
    least_ = error;
    best_ = bits;
  }

  const KbitRule& rule_;
  const float* levels_;
  const float* midpoints_;
  const KbitBlock& block_;
  float absmax_, unit_;
  float least_ = INFINITY;
  uint16_t best_ = 0;
};

}  // namespace w4q::quantize::cuda
