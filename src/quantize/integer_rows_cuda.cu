#include <algorithm>

#include "device/element_grid.h"
#include "device/warp.cuh"
#include "quantize/feedback.h"
#include "quantize/feedback_steps.cuh"
#include "quantize/integer_rows.cuh"
#include "quantize/integer_rows_cuda.h"
#include "quantize/sweep_steps.cuh"
#include "quantize/two_sided_steps.cuh"

namespace w4q::quantize {
namespace {

using cuda::group_lanes;
using cuda::IntegerOut;
using cuda::Rule;
using cuda::Scale;
using device::all_lanes;
using device::element_blocks;
using device::element_threads;
using formats::PlaneRole;

constexpr int lanes = 32;
/// Groups of more columns choose their range without feedback, as on the CPU.
constexpr int64_t widest_trial = 256;
/// Columns that are rounded before the rest is moved.
constexpr int64_t widest_unit = 128;

__device__ inline float stored_scale(formats::ScaleType type, const void* scales, int64_t index) {
  if (type == formats::ScaleType::f32) return static_cast<const float*>(scales)[index];
  const uint16_t bits = static_cast<const uint16_t*>(scales)[index];
  return type == formats::ScaleType::f16 ? __half2float(__ushort_as_half(bits))
                                         : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

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

__global__ void __launch_bounds__(element_threads)
    effects_kernel(const float* coupling, int64_t k, int64_t position, int64_t cols, float* effects) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at >= cols * cols) return;
  const int64_t from = at / cols, to = at % cols;
  effects[at] = from < to ? coupling[(position + to) * k + position + from] : 0.0f;
}

/// The scale of each row's group by the rule of rtn, half a warp each.
__global__ void __launch_bounds__(element_threads) choose_kernel(Rule rule, Columns part, IntegerOut out) {
  const int64_t row = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / group_lanes;
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
__global__ void __launch_bounds__(element_threads) trial_kernel(Rule rule, Columns part, IntegerOut out) {
  constexpr int values = widest_trial / lanes;
  const int64_t row = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / lanes;
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

/// Rounds up to `widest` columns of every row with the scale that was chosen, a warp a row.
template <int64_t widest>
__global__ void __launch_bounds__(element_threads) round_kernel(int bits, Columns part, uint8_t* codes) {
  constexpr int values = widest / lanes;
  const int64_t row = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / lanes;
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
__global__ void __launch_bounds__(element_threads)
    nearest_kernel(Rule rule, int64_t n, int64_t k, int64_t groups, int64_t group_size, const float* weight,
                   IntegerOut out) {
  const int64_t index = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / group_lanes;
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
        round_kernel<widest_unit>
            <<<element_blocks(n_ * lanes), element_threads, 0, work_.stream.get()>>>(rule_.bits, unit, out_.codes);
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
    effects_kernel<<<element_blocks(part.cols * part.cols), element_threads, 0, work_.stream.get()>>>(
        factor_.coupling(), part.k, part.position, part.cols, effects_.as<float>());
  }

  void choose(const Columns& group) {
    if (rule_.search && group.cols <= widest_trial) {
      fill_effects(group);
      trial_kernel<<<element_blocks(n_ * lanes), element_threads, 0, work_.stream.get()>>>(rule_, group, out_);
    } else {
      choose_kernel<<<element_blocks(n_ * group_lanes), element_threads, 0, work_.stream.get()>>>(rule_, group, out_);
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

/// A cell of feedback on both sides: its warps try clips in turn, and the first one rounds.
struct IntegerCells {
  Rule rule;
  IntegerOut out;
  int64_t groups, group_size;
  const float* effects;  ///< [group of a row][group_size][group_size]: of each block what its errors move

  static constexpr int values = widest_trial / lanes;

  struct Shared {
    double error[cuda::cell_warps];
    int step[cuda::cell_warps];
    float low, high;
    Scale scale;
  };
  using Cell = cuda::Cell<widest_trial>;

  __device__ void prepare(Shared&, const cuda::Wave&, int64_t, int) const {}

  __device__ void round(Shared& shared, const cuda::Wave& wave, Cell& cell, int64_t row, int64_t block, int64_t from,
                        int cols) const {
    const int warp = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
    Columns part{};
    part.k = part.cols = cols;
    part.targets = cell.target;
    part.weights = cell.weight;
    part.pivots = wave.pivots + from;
    part.effects = effects + block * group_size * group_size;
    const RowUnit<values> unit(part, 0);
    if (warp == 0) find_range(shared, unit);
    __syncthreads();
    const float low = shared.low, high = shared.high;
    if (rule.search && low != high) {
      try_clips(shared, unit, part, low, high, warp);
      __syncthreads();
    }
    if (warp != 0) return;
    const Scale scale = rule.search && low != high ? best_of(shared, low, high) : cuda::scale_of(rule, low, high);
    const int64_t group = wave.columns[from] / group_size;
    unit.round(part, scale, rule.bits, [&](int c, float, float steps, float value, float) {
      if (c % lanes != lane) return;
      cell.value[c] = value;
      out.codes[row * wave.k + wave.columns[from + c]] = static_cast<uint8_t>(static_cast<int>(steps) + scale.zero);
    });
    if (lane == 0) out.store(rule, row * groups + group, scale, low, high);
  }

 private:
  __device__ static void find_range(Shared& shared, const RowUnit<values>& unit) {
    float low = 0, high = 0;
    for (int v = 0; v < values; ++v) low = fminf(low, unit.target[v]), high = fmaxf(high, unit.target[v]);
    for (int step = lanes / 2; step > 0; step /= 2) {
      low = fminf(low, __shfl_xor_sync(all_lanes, low, step));
      high = fmaxf(high, __shfl_xor_sync(all_lanes, high, step));
    }
    if (threadIdx.x == 0) shared.low = low, shared.high = high;
  }

  __device__ void try_clips(Shared& shared, const RowUnit<values>& unit, const Columns& part, float low, float high,
                            int warp) const {
    double least = INFINITY;
    int best = 0;
#pragma unroll 1
    for (int step = warp; step < clip_steps; step += cuda::cell_warps) {
      const float share = clip_share(step);
      double error = 0;
      unit.round(part, cuda::scale_of(rule, low * share, high * share), rule.bits,
                 [&](int c, float x, float, float value, float) {
                   const double miss = static_cast<double>(x) - static_cast<double>(value);
                   error += miss * miss * static_cast<double>(part.pivots[c]);
                 });
      if (!(error < least)) continue;
      least = error;
      best = step;
    }
    if (threadIdx.x % lanes == 0) shared.error[warp] = least, shared.step[warp] = best;
  }

  /// The least error of all warps, ties to the lower step, as if one had tried all.
  __device__ Scale best_of(const Shared& shared, float low, float high) const {
    double least = INFINITY;
    int best = 0;
    for (int warp = 0; warp < cuda::cell_warps; ++warp) {
      const bool first = shared.error[warp] == least && shared.step[warp] < best;
      if (!(shared.error[warp] < least) && !first) continue;
      least = shared.error[warp];
      best = shared.step[warp];
    }
    const float share = clip_share(best);
    return cuda::scale_of(rule, low * share, high * share);
  }
};

/// Of all blocks.
__global__ void __launch_bounds__(element_threads)
    all_effects_kernel(const float* coupling, int64_t k, const int64_t* starts, int64_t group_size, float* effects) {
  const int64_t begin = starts[blockIdx.x], cols = starts[blockIdx.x + 1] - begin;
  float* const own = effects + blockIdx.x * group_size * group_size;
  for (int64_t at = threadIdx.x; at < cols * cols; at += element_threads) {
    const int64_t from = at / cols, to = at % cols;
    own[at] = from < to ? coupling[(begin + to) * k + begin + from] : 0.0f;
  }
}

/// How sweeps see scales and codes.
struct IntegerPlanes {
  Rule rule;
  IntegerOut out;
  int64_t groups, group_size;

  __device__ float value(uint8_t code, const Scale& scale) const {
    return static_cast<float>(static_cast<int>(code) - scale.zero) * scale.value;
  }
  __device__ uint8_t nearest(float x, const Scale& scale) const {
    return static_cast<uint8_t>(static_cast<int>(cuda::steps_of(x, scale, rule.bits)) + scale.zero);
  }
  __device__ Scale load(int64_t row, int64_t column) const {
    const int64_t index = row * groups + column / group_size;
    return {stored_scale(rule.scale, out.scales, index), 0,
            out.zeros == nullptr ? 1 << (rule.bits - 1) : static_cast<int>(out.zeros[index]), false};
  }
  __device__ void store(int64_t row, int64_t column, const Scale& scale) const {
    const int64_t index = row * groups + column / group_size;
    if (rule.scale == formats::ScaleType::f32) {
      static_cast<uint32_t*>(out.scales)[index] = scale.bits;
    } else {
      static_cast<uint16_t*>(out.scales)[index] = static_cast<uint16_t>(scale.bits);
    }
    if (out.zeros != nullptr) out.zeros[index] = static_cast<uint8_t>(scale.zero);
  }
};

/// Groups rounded as a whole: scales and codes as error feedback chooses them.
class IntegerProposals {
 public:
  IntegerProposals(CudaWork& work, const Rule& rule, int64_t n)
      : work_(work),
        rule_(rule),
        scales_(work.context, static_cast<size_t>(n) * sizeof(uint32_t)),
        counters_(work.context, sizeof(cuda::IntegerCounters)),
        effects_(work.context, static_cast<size_t>(widest_trial * widest_trial) * sizeof(float)) {}

  void operator()(const SweepUnitCuda& unit, int64_t rows, const float* targets, uint8_t* codes, Scale* scales,
                  float* errors) const {
    effects_kernel<<<element_blocks(int64_t{unit.count} * unit.count), element_threads, 0, work_.stream.get()>>>(
        unit.coupling, unit.count, 0, unit.count, effects_.as<float>());
    const Columns part{.n = rows,
                       .k = unit.count,
                       .position = 0,
                       .cols = unit.count,
                       .groups = 1,
                       .group = 0,
                       .targets = targets,
                       .weights = targets,
                       .pivots = unit.pivots,
                       .effects = effects_.as<float>(),
                       .columns = unit.order,
                       .chosen = scales,
                       .errors = errors};
    // Where a choice would be stored as the weight's own.
    const IntegerOut aside{scales_.data(), nullptr, nullptr, counters_.as<cuda::IntegerCounters>()};
    if (rule_.search) {
      trial_kernel<<<element_blocks(rows * lanes), element_threads, 0, work_.stream.get()>>>(rule_, part, aside);
    } else {
      choose_kernel<<<element_blocks(rows * group_lanes), element_threads, 0, work_.stream.get()>>>(rule_, part, aside);
    }
    round_kernel<widest_trial>
        <<<element_blocks(rows * lanes), element_threads, 0, work_.stream.get()>>>(rule_.bits, part, codes);
  }

 private:
  CudaWork& work_;
  Rule rule_;
  mutable device::DeviceBuffer scales_, counters_, effects_;
};

__global__ void __launch_bounds__(element_threads)
    difference_kernel(Rule rule, int64_t n, int64_t k, int64_t groups, int64_t group_size, const uint8_t* codes,
                      const void* scales, const uint8_t* zeros, const float* original, const float* rows,
                      float* difference) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at >= n * k) return;
  const int64_t row = at / k, index = row * groups + at % k / group_size;
  const float scale = stored_scale(rule.scale, scales, index);
  const int zero = zeros == nullptr ? 1 << (rule.bits - 1) : zeros[index];
  const float value = static_cast<float>(static_cast<int>(codes[at]) - zero) * scale;
  difference[at] = original[at] - value * (rows == nullptr ? 1.0f : rows[row]);
}

void feed_back_both(CudaWork& work, const Rule& rule, const float* weight, const FeedbackCuda& feedback,
                    const formats::PackedWeight& packed, const IntegerOut& out) {
  const int64_t groups = formats::integer_groups(packed.scheme, packed.k);
  const int64_t group_size = std::min(formats::integer_group_size(packed.scheme, packed.k), packed.k);
  const auto starts = device::DeviceBuffer::copy_of(bytes_of(feedback.factor->order().starts), work.stream);
  device::DeviceBuffer effects(work.stream, static_cast<size_t>(groups * group_size * group_size) * sizeof(float));
  all_effects_kernel<<<static_cast<unsigned>(groups), element_threads, 0, work.stream.get()>>>(
      feedback.factor->coupling(), packed.k, starts.as<int64_t>(), group_size, effects.as<float>());
  const IntegerCells cells{rule, out, groups, group_size, effects.as<float>()};
  cuda::FeedbackOnBothSides<widest_trial, IntegerCells>(work, weight, *feedback.factor, *feedback.across, cells).run();
}

}  // namespace

QuantizeStats integer_rows_cuda(CudaWork& work, const float* weight, const FeedbackCuda& feedback, Clip clip,
                                const float* original, const float* rows, float* difference,
                                formats::PackedWeight& packed) {
  const int64_t groups = formats::integer_groups(packed.scheme, packed.k);
  const int64_t group_size = formats::integer_group_size(packed.scheme, packed.k);
  const Rule rule = cuda::rule_of(packed.scheme, clip);
  cuda::IntegerRows encoded(packed, packed.n, work.stream);
  const IntegerOut out = encoded.out();
  if (feedback.factor != nullptr) {
    if (feedback.across != nullptr) {
      feed_back_both(work, rule, weight, feedback, packed, out);
    } else {
      IntegerFeedback(work, weight, *feedback.factor, clip, packed, out).run();
    }
    if (feedback.sweeps != nullptr) {
      const IntegerProposals propose(work, rule, packed.n);
      const cuda::SweptWeight swept{packed.n, packed.k, out.codes, nullptr, nullptr};
      cuda::Sweeps(work, *feedback.sweeps, feedback.outputs, IntegerPlanes{rule, out, groups, group_size}, swept,
                   weight, propose)
          .run();
    }
  } else {
    nearest_kernel<<<element_blocks(packed.n * groups * group_lanes), element_threads, 0, work.stream.get()>>>(
        rule, packed.n, packed.k, groups, group_size, weight, out);
    device::check_launch("rtn", concat(packed.n, " × ", packed.k));
  }
  difference_kernel<<<element_blocks(packed.n * packed.k), element_threads, 0, work.stream.get()>>>(
      rule, packed.n, packed.k, groups, group_size, out.codes, out.scales, out.zeros, original, rows, difference);
  device::check_launch("integer errors", concat(packed.n, " × ", packed.k));
  encoded.take(0, packed.n, packed);
  QuantizeStats stats = cuda::IntegerRows::stats(encoded.counted(), packed.n * groups);
  if (feedback.sweeps != nullptr) count_scales(packed, stats);
  return stats;
}

}  // namespace w4q::quantize
