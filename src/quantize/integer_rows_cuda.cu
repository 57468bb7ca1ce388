#include <algorithm>

#include "quantize/feedback_steps.cuh"
#include "quantize/integer_rows.cuh"
#include "quantize/integer_rows_cuda.h"

namespace w4q::quantize {
namespace {

using cuda::group_lanes;
using cuda::IntegerOut;
using cuda::Rule;
using cuda::Scale;
using formats::PlaneRole;

constexpr int threads = 256;
constexpr int lanes = 32;
constexpr unsigned all_lanes = 0xFFFFFFFFu;
/// Groups of more columns choose their range without feedback, as on the CPU.
constexpr int64_t widest_trial = 256;
/// Columns that are rounded before the rest is moved.
constexpr int64_t widest_unit = 128;

unsigned blocks_for(int64_t count) { return static_cast<unsigned>((count + threads - 1) / threads); }

/// Some columns of all rows: of a group of `cols`, by positions.
struct Columns {
  int64_t n, k, position, cols;
  int64_t groups, group;   ///< of a row; this one
  const float* targets;    ///< [n, k]
  const float* weights;    ///< [n, k]
  const float* pivots;     ///< of these columns
  const float* effects;    ///< [cols, cols]: what an error at a column moves the later ones by
  const int32_t* columns;  ///< of these positions
  Scale* chosen;           ///< [n]
  float* errors;           ///< [n, cols]
};

__global__ void __launch_bounds__(threads)
    effects_kernel(const float* coupling, int64_t k, int64_t position, int64_t cols, float* effects) {
  const int64_t at = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (at >= cols * cols) return;
  const int64_t from = at / cols, to = at % cols;
  effects[at] = from < to ? coupling[(position + to) * k + position + from] : 0.0f;
}

/// The scale of each row's group by the rule of rtn, half a warp each.
__global__ void __launch_bounds__(threads) choose_kernel(Rule rule, Columns part, IntegerOut out) {
  const int64_t row = (int64_t{blockIdx.x} * threads + threadIdx.x) / group_lanes;
  if (row >= part.n) return;
  const cuda::Group group(cuda::Stored<float>{part.targets + row * part.k + part.position}, part.cols);
  float low, high;
  group.range(low, high);
  const Scale scale = group.choose(rule, low, high);
  if (group.lane != 0) return;
  part.chosen[row] = scale;
  out.store(rule, row * part.groups + part.group, scale, low, high);
}

/// One row's columns in the registers of a warp: column c is value c / 32 of lane c mod 32.
template <int values>
struct RowUnit {
  float target[values], weight[values];

  __device__ RowUnit(const Columns& part, int64_t row) {
    const int lane = static_cast<int>(threadIdx.x) % lanes;
#pragma unroll
    for (int v = 0; v < values; ++v) {
      const int64_t c = v * lanes + lane;
      const int64_t at = row * part.k + part.position + c;
      target[v] = c < part.cols ? part.targets[at] : 0.0f;
      weight[v] = c < part.cols ? part.weights[at] : 0.0f;
    }
  }

  /// Rounds the columns in order with feedback; keep(c, target, steps, value) sees each, in every lane.
  template <class Keep>
  __device__ void round(const Columns& part, const Scale& scale, int bits, const Keep& keep) const {
    const int lane = static_cast<int>(threadIdx.x) % lanes;
    float moved[values];
#pragma unroll
    for (int v = 0; v < values; ++v) moved[v] = target[v];
#pragma unroll
    for (int v = 0; v < values; ++v) {
      const int count = static_cast<int>(min(int64_t{lanes}, part.cols - v * lanes));
      for (int from = 0; from < count; ++from) {
        const int c = v * lanes + from;
        const float x = __shfl_sync(all_lanes, moved[v], from);
        const float steps = cuda::steps_of(x, scale, bits);
        const float value = steps * scale.value;
        const float residual = __shfl_sync(all_lanes, weight[v], from) - value;
        keep(c, x, steps, value, residual);
        const float* const effects = part.effects + c * part.cols;
#pragma unroll
        for (int later = v; later < values; ++later) {
          const int to = later * lanes + lane;
          if (to > c && to < part.cols) moved[later] += effects[to] * residual;
        }
      }
    }
  }
};

/// Clip::mse with feedback inside the group (GroupTrial of feedback.cpp), a warp a row.
__global__ void __launch_bounds__(threads) trial_kernel(Rule rule, Columns part, IntegerOut out) {
  constexpr int values = widest_trial / lanes;
  const int64_t row = (int64_t{blockIdx.x} * threads + threadIdx.x) / lanes;
  if (row >= part.n) return;
  const RowUnit<values> unit(part, row);
  float low = 0, high = 0;
#pragma unroll
  for (int v = 0; v < values; ++v) low = fminf(low, unit.target[v]), high = fmaxf(high, unit.target[v]);
  for (int step = lanes / 2; step > 0; step /= 2) {
    low = fminf(low, __shfl_xor_sync(all_lanes, low, step));
    high = fmaxf(high, __shfl_xor_sync(all_lanes, high, step));
  }
  Scale best = cuda::scale_of(rule, low, high);
  double least = INFINITY;
#pragma unroll 1
  for (int step = 0; step < clip_steps && low != high; ++step) {
    const float share = clip_share(step);
    const Scale scale = cuda::scale_of(rule, low * share, high * share);
    double error = 0;
    unit.round(part, scale, rule.bits, [&](int c, float x, float, float value, float) {
      const double miss = static_cast<double>(x) - static_cast<double>(value);
      error += miss * miss * static_cast<double>(part.pivots[c]);
    });
    if (!(error < least)) continue;
    least = error;
    best = scale;
  }
  if (threadIdx.x % lanes != 0) return;
  part.chosen[row] = best;
  out.store(rule, row * part.groups + part.group, best, low, high);
}

/// Rounds a unit of every row with the scale that was chosen, a warp a row.
__global__ void __launch_bounds__(threads) round_kernel(int bits, Columns part, uint8_t* codes) {
  constexpr int values = widest_unit / lanes;
  const int64_t row = (int64_t{blockIdx.x} * threads + threadIdx.x) / lanes;
  if (row >= part.n) return;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const Scale scale = part.chosen[row];
  const RowUnit<values> unit(part, row);
  unit.round(part, scale, bits, [&](int c, float, float steps, float, float residual) {
    if (c % lanes != lane) return;
    part.errors[row * part.cols + c] = residual;
    codes[row * part.k + part.columns[c]] = static_cast<uint8_t>(static_cast<int>(steps) + scale.zero);
  });
}

/// Rounded to nearest: half a warp a group.
__global__ void __launch_bounds__(threads) nearest_kernel(Rule rule, int64_t n, int64_t k, int64_t groups,
                                                          int64_t group_size, const float* weight, IntegerOut out) {
  const int64_t index = (int64_t{blockIdx.x} * threads + threadIdx.x) / group_lanes;
  if (index >= n * groups) return;
  const int64_t first = index % groups * group_size;
  const int64_t at = index / groups * k + first;
  const cuda::Group group(cuda::Stored<float>{weight + at}, min(group_size, k - first));
  float low, high;
  group.range(low, high);
  const Scale scale = group.choose(rule, low, high);
  for (int64_t i = group.lane; i < group.count; i += group_lanes) {
    const float steps = cuda::steps_of(group.values(i), scale, rule.bits);
    out.codes[at + i] = static_cast<uint8_t>(static_cast<int>(steps) + scale.zero);
  }
  if (group.lane == 0) out.store(rule, index, scale, low, high);
}

class IntegerFeedback {
 public:
  IntegerFeedback(CudaWork& work, const float* weight, const ErrorFactorCuda& factor, Clip clip,
                  const formats::PackedWeight& packed, const IntegerOut& out)
      : work_(work),
        factor_(factor),
        rule_(cuda::rule_of(packed.scheme, clip)),
        n_(packed.n),
        groups_(formats::integer_groups(packed.scheme, packed.k)),
        out_(out),
        steps_(work, weight, packed.n, factor, widest_unit),
        chosen_(work.context, static_cast<size_t>(packed.n) * sizeof(Scale)),
        effects_(work.context, static_cast<size_t>(widest_trial * widest_trial) * sizeof(float)) {}

  void run() {
    const auto& starts = factor_.order().starts;
    for (size_t b = 0; b + 1 < starts.size(); ++b) {
      choose(part(starts[b], starts[b + 1], starts[b]));
      for (int64_t begin = starts[b]; begin < starts[b + 1]; begin += widest_unit) {
        const int64_t end = std::min(begin + widest_unit, starts[b + 1]);
        const Columns unit = part(begin, end, starts[b]);
        fill_effects(unit);
        round_kernel<<<blocks_for(n_ * lanes), threads, 0, work_.stream.get()>>>(rule_.bits, unit, out_.codes);
        device::check_launch("integer feedback", concat(n_, " × ", unit.cols));
        steps_.move_rest(begin, end);
      }
    }
    work_.stream.synchronize();
  }

 private:
  Columns part(int64_t begin, int64_t end, int64_t group_start) {
    const int64_t group = factor_.order().columns[static_cast<size_t>(group_start)] / factor_.block();
    return {.n = n_,
            .k = factor_.width(),
            .position = begin,
            .cols = end - begin,
            .groups = groups_,
            .group = group,
            .targets = steps_.targets(),
            .weights = steps_.weights(),
            .pivots = factor_.pivots() + begin,
            .effects = effects_.as<float>(),
            .columns = factor_.columns() + begin,
            .chosen = chosen_.as<Scale>(),
            .errors = steps_.errors()};
  }

  void fill_effects(const Columns& part) {
    effects_kernel<<<blocks_for(part.cols * part.cols), threads, 0, work_.stream.get()>>>(
        factor_.coupling(), part.k, part.position, part.cols, effects_.as<float>());
  }

  void choose(const Columns& group) {
    if (rule_.search && group.cols <= widest_trial) {
      fill_effects(group);
      trial_kernel<<<blocks_for(n_ * lanes), threads, 0, work_.stream.get()>>>(rule_, group, out_);
    } else {
      choose_kernel<<<blocks_for(n_ * group_lanes), threads, 0, work_.stream.get()>>>(rule_, group, out_);
    }
    device::check_launch("integer ranges", concat(n_, " × ", group.cols));
  }

  CudaWork& work_;
  const ErrorFactorCuda& factor_;
  Rule rule_;
  int64_t n_, groups_;
  IntegerOut out_;
  cuda::FeedbackSteps steps_;
  device::DeviceBuffer chosen_, effects_;
};

__global__ void __launch_bounds__(threads)
    difference_kernel(Rule rule, int64_t n, int64_t k, int64_t groups, int64_t group_size, const uint8_t* codes,
                      const void* scales, const uint8_t* zeros, const float* original, const float* rows,
                      float* difference) {
  const int64_t at = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (at >= n * k) return;
  const int64_t row = at / k, index = row * groups + at % k / group_size;
  float scale;
  if (rule.scale == formats::ScaleType::f32) {
    scale = static_cast<const float*>(scales)[index];
  } else {
    const uint16_t bits = static_cast<const uint16_t*>(scales)[index];
    scale = rule.scale == formats::ScaleType::f16 ? __half2float(__ushort_as_half(bits))
                                                  : __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
  const int zero = zeros == nullptr ? 1 << (rule.bits - 1) : zeros[index];
  const float value = static_cast<float>(static_cast<int>(codes[at]) - zero) * scale;
  difference[at] = original[at] - value * (rows == nullptr ? 1.0f : rows[row]);
}

}  // namespace

QuantizeStats integer_rows_cuda(CudaWork& work, const float* weight, const ErrorFactorCuda* factor, Clip clip,
                                const float* original, const float* rows, float* difference,
                                formats::PackedWeight& packed) {
  const int64_t groups = formats::integer_groups(packed.scheme, packed.k);
  const int64_t group_size = formats::integer_group_size(packed.scheme, packed.k);
  const Rule rule = cuda::rule_of(packed.scheme, clip);
  cuda::IntegerRows encoded(packed, packed.n, work.stream);
  const IntegerOut out = encoded.out();
  if (factor != nullptr) {
    IntegerFeedback(work, weight, *factor, clip, packed, out).run();
  } else {
    nearest_kernel<<<blocks_for(packed.n * groups * group_lanes), threads, 0, work.stream.get()>>>(
        rule, packed.n, packed.k, groups, group_size, weight, out);
    device::check_launch("rtn", concat(packed.n, " × ", packed.k));
  }
  difference_kernel<<<blocks_for(packed.n * packed.k), threads, 0, work.stream.get()>>>(
      rule, packed.n, packed.k, groups, group_size, out.codes, out.scales, out.zeros, original, rows, difference);
  device::check_launch("integer errors", concat(packed.n, " × ", packed.k));
  encoded.take(0, packed.n, packed);
  return cuda::IntegerRows::stats(encoded.counted(), packed.n * groups);
}

}  // namespace w4q::quantize
