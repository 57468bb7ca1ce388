// Sweeps (sweeps.h) over weights in GPU memory: what integers and kbit have in common. `Planes` is how a family stores
// scales and decodes codes: value(code, scale), nearest(x, scale), load(row, column), store(row, column, scale).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/text.h"
#include "device/check.h"
#include "kernels/common/block_reduce.cuh"
#include "quantize/integer_round.cuh"
#include "quantize/sweep_blocks_cuda.h"

namespace w4q::quantize::cuda {

inline constexpr int sweep_lanes = 32;
inline constexpr int sweep_warps = 4;
inline constexpr int sweep_threads = sweep_lanes * sweep_warps;
/// Columns whose pulls come from one product.
inline constexpr int64_t pulled_columns = 128;
/// Of rows that are coupled one in so many moves at once. All at once would overshoot what they have in common.
inline constexpr int64_t coupled_rows = 8;

/// A weight that is swept. Its pull is (W − Ŵ)·H.
struct SweptWeight {
  int64_t n, k;
  uint8_t* codes;    ///< [n, k]
  float* values;     ///< [n, k], what they decode to
  float* residuals;  ///< [n, k], what they miss
};

/// A unit of its columns, in some of its rows: row i of what follows is row first_row + i · row_step.
struct SweepPart {
  int64_t first;
  int count;
  const int32_t* order;
  float ridge;
  int64_t first_row, row_step, rows;
  const float* pulls;  ///< [rows, count], `stride` apart
  int64_t stride;
  float* moved;    ///< [rows, count]: what residuals gain by the changes
  uint8_t* codes;  ///< [rows, count]: what is proposed as columns stand …
  Scale* scales;   ///< [rows]: … under these scales, …
  uint8_t* taken;  ///< [rows]: … which are the blocks' own from now on

  int64_t first_position = 0;  ///< of its rows, where rows stand by parts

  __device__ int64_t row(int64_t i) const { return first_row + i * row_step; }
  __device__ int64_t position(int64_t i) const { return first_position + i; }
};

/// The row at a position where rows stand by parts: first those of part 0, which are `parts` apart.
__device__ inline int64_t row_at(int64_t position, int64_t n, int64_t parts) {
  const int64_t longer = n % parts, rows = n / parts, in_longer = longer * (rows + 1);
  if (position < in_longer) return position / (rows + 1) + position % (rows + 1) * parts;
  return longer + (position - in_longer) / rows + (position - in_longer) % rows * parts;
}

__device__ inline int64_t sweep_task() {
  return int64_t{blockIdx.x} * sweep_warps + static_cast<int>(threadIdx.x) / sweep_lanes;
}
__device__ inline int sweep_lane() { return static_cast<int>(threadIdx.x) % sweep_lanes; }
__device__ inline double sum_of_lanes(double value) {
  for (int step = sweep_lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}
__device__ inline int64_t sweep_at() { return int64_t{blockIdx.x} * 256 + threadIdx.x; }

template <class Planes>
__global__ void __launch_bounds__(256) load_kernel(Planes planes, SweptWeight swept, const float* weight) {
  const int64_t at = sweep_at();
  if (at >= swept.n * swept.k) return;
  const float value = planes.value(swept.codes[at], planes.load(at / swept.k, at % swept.k));
  swept.values[at] = value;
  swept.residuals[at] = weight[at] - value;
}

/// rows [count, k]: these of the Gram matrix [k, k]; among [count, count]: of them these columns.
static __global__ void __launch_bounds__(256)
    gather_kernel(const float* gram, int64_t k, const int64_t* columns, int64_t count, float* rows, float* among) {
  const int64_t at = sweep_at();
  if (at < count * k) rows[at] = gram[columns[at / k] * k + at % k];
  if (at < count * count) among[at] = gram[columns[at / count] * k + columns[at % count]];
}

/// pulls [n, count], `stride` apart, += ridge · residuals.
static __global__ void __launch_bounds__(256)
    ridge_kernel(SweptWeight swept, int64_t first, int count, float ridge, float* pulls, int64_t stride) {
  const int64_t at = sweep_at();
  if (at >= swept.n * count) return;
  const int64_t row = at / count, c = at % count;
  pulls[row * stride + c] += ridge * swept.residuals[row * swept.k + first + c];
}

/// targets [rows, count] by positions = values + pulls · H⁻¹, `inverse` [count, count] as columns stand.
static __global__ void __launch_bounds__(256)
    target_kernel(SweptWeight swept, SweepPart part, const float* inverse, float* targets) {
  const int64_t at = sweep_at();
  if (at >= part.rows * part.count) return;
  const int64_t i = at / part.count, column = part.order[at % part.count];
  const float* const pulls = part.pulls + i * part.stride;
  float solved = 0;
  for (int c = 0; c < part.count; ++c) solved += pulls[c] * inverse[int64_t{c} * part.count + column];
  targets[at] = swept.values[part.row(i) * swept.k + part.first + column] + solved;
}

/// H among the columns of a unit, whose rows are `ld` apart; `ridge` is to be added.
struct UnitProducts {
  const float* data;
  int64_t ld;
  float ridge;
};

/// Column c of moved · H, of a row of `count` that moved.
__device__ inline float curved_at(const UnitProducts& products, const float* moved, int count, int c) {
  float sum = 0;
  for (int other = 0; other < count; ++other) sum += moved[other] * products.data[other * products.ld + c];
  return sum + products.ridge * moved[c];
}

/// moved = the values before less those that are proposed, and curved = moved · H, where the error of the row falls by
/// it, and zeros where not; a warp a row.
template <class Planes>
__global__ void __launch_bounds__(sweep_threads)
    accept_kernel(Planes planes, SweptWeight swept, SweepPart part, UnitProducts products, float* curved) {
  const int64_t i = sweep_task();
  if (i >= part.rows) return;
  float* const moved = part.moved + i * part.count;
  for (int c = sweep_lane(); c < part.count; c += sweep_lanes) {
    const float before = swept.values[part.row(i) * swept.k + part.first + c];
    moved[c] = before - planes.value(part.codes[i * part.count + c], part.scales[i]);
  }
  __syncwarp();
  double gain = 0, curvature = 0;
  for (int c = sweep_lane(); c < part.count; c += sweep_lanes) {
    const double own = moved[c];
    const float by_all = curved_at(products, moved, part.count, c);
    curved[i * part.count + c] = by_all;
    gain -= 2 * static_cast<double>(part.pulls[i * part.stride + c]) * own;
    curvature += static_cast<double>(by_all) * own;
  }
  const bool falls = sum_of_lanes(curvature) < certain_share * sum_of_lanes(gain);
  __syncwarp();
  for (int c = sweep_lane(); !falls && c < part.count; c += sweep_lanes) moved[c] = curved[i * part.count + c] = 0;
  if (sweep_lane() == 0) part.taken[i] = falls ? 1 : 0;
}

/// Codes one after the other, each the nearest to where the error would be least, a warp a row, a lane a column; and
/// curved = moved · H.
template <class Planes>
__global__ void __launch_bounds__(sweep_threads)
    codes_kernel(Planes planes, SweptWeight swept, SweepPart part, const float* gram, float* curved) {
  const int64_t i = sweep_task();
  if (i >= part.rows) return;
  const int lane = sweep_lane();
  const bool inside = lane < part.count;
  const int64_t row = part.row(i), at = row * swept.k + part.first + lane, own = i * part.count + lane;
  float pull = inside ? part.pulls[i * part.stride + lane] : 0.0f;
  float value = inside ? swept.values[at] : 0.0f;
  uint8_t code = inside ? swept.codes[at] : uint8_t{0};
  const float before = value;
  const Scale scale = planes.load(row, part.first + (inside ? lane : 0));
  for (int position = 0; position < part.count; ++position) {
    const int column = part.order[position];
    const float* coupled = gram + (part.first + column) * swept.k + part.first;
    const float curvature = coupled[column] + part.ridge;
    float move = 0;
    if (lane == column && curvature > 0) {
      const uint8_t found = planes.nearest(value + pull / curvature, scale);
      const float there = planes.value(found, scale), step = there - value;
      if (static_cast<double>(curvature) * step * step < certain_share * 2 * static_cast<double>(pull) * step) {
        move = step;
        value = there;
        code = found;
      }
    }
    move = __shfl_sync(0xFFFFFFFFu, move, column);
    if (move != 0 && inside) pull -= move * (lane == column ? curvature : coupled[lane]);
  }
  if (lane == 0) part.taken[i] = 0;
  if (inside) {
    part.moved[own] = before - value;
    part.codes[own] = code;
  }
  __syncwarp();
  const UnitProducts products{gram + part.first * swept.k + part.first, swept.k, part.ridge};
  if (inside) curved[own] = curved_at(products, part.moved + i * part.count, part.count, lane);
}

/// Column c of row i of a proposal becomes the weight's.
template <class Planes>
__device__ void commit(const Planes& planes, const SweptWeight& swept, const SweepPart& part, int64_t at) {
  const int64_t i = at / part.count, c = at % part.count, row = part.row(i);
  const bool scaled = part.taken[i] != 0;
  if (!scaled && part.moved[at] == 0) return;
  const Scale scale = scaled ? part.scales[i] : planes.load(row, part.first + c);
  const int64_t to = row * swept.k + part.first + c;
  swept.codes[to] = part.codes[at];
  swept.values[to] = planes.value(part.codes[at], scale);
  swept.residuals[to] += part.moved[at];
  if (scaled && c == 0) planes.store(row, part.first, scale);
}

template <class Planes>
__global__ void __launch_bounds__(256) commit_kernel(Planes planes, SweptWeight swept, SweepPart part) {
  const int64_t at = sweep_at();
  if (at < part.rows * part.count) commit(planes, swept, part, at);
}

/// The same if all of it together lessens the error; own pulls, by parts, follow what moved, whose product with H is
/// `curved`, and that is kept.
template <class Planes>
__global__ void __launch_bounds__(256)
    settle_kernel(Planes planes, SweptWeight swept, SweepPart part, const float* curved, const int* falls, float* own,
                  float* all_moved) {
  const int64_t at = sweep_at();
  if (at >= part.rows * part.count) return;
  const int64_t i = at / part.count, c = at % part.count;
  const bool stays = *falls != 0;
  all_moved[part.row(i) * part.count + c] = stays ? part.moved[at] : 0.0f;
  if (!stays) return;
  own[part.position(i) * part.count + c] += curved[at];
  commit(planes, swept, part, at);
}

/// pulls of these rows = (Σ_p H_O[r, p] · own pulls of p) / H_O[r, r], of which the sums stand there. H_O and own pulls
/// are by parts.
static __global__ void __launch_bounds__(256)
    mix_kernel(SweepPart part, const float* outputs, int64_t n, float ridge, const float* own, float* pulls) {
  const int64_t at = sweep_at();
  if (at >= part.rows * part.count) return;
  const int64_t row = part.position(at / part.count);
  const float apart = own[row * part.count + at % part.count], diagonal = outputs[row * n + row] + ridge;
  pulls[at] = diagonal > 0 ? (pulls[at] + ridge * apart) / diagonal : apart;
}

inline constexpr int weighing_blocks = 64;
/// What the thread blocks that weigh a change leave for the last of them.
struct Weighing {
  double sums[weighing_blocks];
  unsigned done;
  int falls;
};

/// Whether all changes together lessen the error of both sides: `coupled` is H_O · moved without its ridge, `curved`
/// moved · H. The last thread block adds what all found, in their order.
static __global__ void __launch_bounds__(256)
    weigh_kernel(SweepPart part, const float* outputs, int64_t n, float ridge, const float* coupled,
                 const float* curved, Weighing* weighing) {
  __shared__ double slots[32];
  double sum = 0;
  for (int64_t at = sweep_at(); at < part.rows * part.count; at += int64_t{gridDim.x} * 256) {
    const int64_t i = at / part.count, row = part.position(i);
    const double moved = part.moved[at], pull = part.pulls[i * part.stride + at % part.count];
    const double diagonal = static_cast<double>(outputs[row * n + row]) + static_cast<double>(ridge);
    const double lateral = static_cast<double>(coupled[at]) + static_cast<double>(ridge) * moved;
    sum += lateral * static_cast<double>(curved[at]) + certain_share * 2 * diagonal * pull * moved;
  }
  sum = kernels::block_reduce(sum, slots, 0.0, [](double a, double b) { return a + b; });
  if (threadIdx.x != 0) return;
  weighing->sums[blockIdx.x] = sum;
  __threadfence();
  if (atomicAdd(&weighing->done, 1u) + 1 != gridDim.x) return;
  __threadfence();
  const volatile double* const sums = weighing->sums;
  double all = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) all += sums[b];
  weighing->falls = all < 0 ? 1 : 0;
  weighing->done = 0;
}

/// to [n, n]: the rows of parts one after the other, of `from` [n, n], and the columns likewise.
static __global__ void __launch_bounds__(256) by_parts_kernel(const float* from, int64_t n, int64_t parts, float* to) {
  const int64_t at = sweep_at();
  if (at < n * n) to[at] = from[row_at(at / n, n, parts) * n + row_at(at % n, n, parts)];
}

/// own [n, count] by parts = pulls, `stride` apart.
static __global__ void __launch_bounds__(256)
    take_pulls_kernel(SweepPart part, int64_t n, const float* pulls, int64_t stride, float* own) {
  const int64_t at = sweep_at();
  if (at < n * part.count) own[at] = pulls[row_at(at / part.count, n, part.row_step) * stride + at % part.count];
}

/// Both kinds of sweeps, the order of them as in sweeps.h. `Propose` is what a family makes of targets:
/// propose(unit, rows, targets [rows, count] by positions, codes [rows, count] as columns stand, scales, scratch).
/// Where outputs have costs, rows that stand `coupled_rows` apart move at once, if all of them together lessen the error.
template <class Planes, class Propose>
class Sweeps {
 public:
  Sweeps(CudaWork& work, const SweepBlocksCuda& blocks, const OutputCostsCuda& outputs, const Planes& planes,
         SweptWeight swept, const float* weight, const Propose& propose)
      : work_(work), blocks_(blocks), outputs_(outputs), planes_(planes), swept_(swept), propose_(propose) {
    const int64_t n = swept.n, k = swept.k, widest = widest_unit();
    const int64_t wide = n * widest;
    const int64_t values =
        2 * n * k + (outputs.gram ? 8 : 4) * wide + (outputs.gram ? n * n : 0) + widest * k + widest * widest;
    floats_ = device::DeviceBuffer(work.stream, static_cast<size_t>(values) * sizeof(float));
    float* next = floats_.as<float>();
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    swept_.values = take(n * k);
    swept_.residuals = take(n * k);
    for (float** buffer : {&pulls_, &targets_, &moved_, &curved_}) *buffer = take(wide);
    for (float** buffer : {&own_, &mixed_, &coupled_, &all_moved_}) *buffer = take(outputs.gram ? wide : 0);
    by_parts_ = take(outputs.gram ? n * n : 0);
    rows_ = take(widest * k);
    among_ = take(widest * widest);
    proposed_ = device::DeviceBuffer(work.stream, static_cast<size_t>(wide + n));
    scales_ = device::DeviceBuffer(work.stream, static_cast<size_t>(n) * sizeof(Scale));
    columns_ = device::DeviceBuffer(work.stream, static_cast<size_t>(k) * sizeof(int64_t));
    weighing_ = device::DeviceBuffer(work.stream, sizeof(Weighing));
    weighing_.fill(0, work.stream);
    if (outputs.gram != nullptr)
      by_parts_kernel<<<blocks_of(n * n), 256, 0, stream()>>>(outputs.gram, n, parts(), by_parts_);
    load_kernel<<<blocks_of(n * k), 256, 0, stream()>>>(planes, swept_, weight);
    device::check_launch("sweeps", concat(n, " × ", k));
  }

  void run() {
    for (int s = 0; s < block_sweeps; ++s) {
      blocks_.blocks().empty() ? pass<false>(blocks_.codes()) : pass<true>(blocks_.blocks());
    }
    for (int s = 0; s < code_sweeps; ++s) pass<false>(blocks_.codes());
    device::check_launch("sweeps", concat(swept_.n, " × ", swept_.k));
    work_.stream.synchronize();
  }

 private:
  static dim3 blocks_of(int64_t count) { return dim3(static_cast<unsigned>((count + 255) / 256)); }
  static dim3 warps_of(int64_t count) { return dim3(static_cast<unsigned>((count + sweep_warps - 1) / sweep_warps)); }
  cudaStream_t stream() const { return work_.stream.get(); }
  int64_t parts() const { return std::min(swept_.n, coupled_rows); }
  int64_t widest_unit() const {
    int64_t widest = pulled_columns;
    for (const auto& unit : blocks_.blocks()) widest = std::max<int64_t>(widest, unit.count);
    return widest;
  }

  template <bool whole>
  void pass(std::span<const SweepUnitCuda> units) {
    put_columns(units);
    int64_t placed = 0;
    for (size_t first = 0, last = 0; first < units.size(); first = last) {
      int64_t columns = 0;
      while (last < units.size() && (last == first || columns + units[last].count <= pulled_columns)) {
        columns += units[last++].count;
      }
      superblock<whole>(units.subspan(first, last - first), columns, placed);
      placed += columns;
    }
  }

  void put_columns(std::span<const SweepUnitCuda> units) {
    std::vector<int64_t> columns;
    for (const auto& unit : units) {
      for (int c = 0; c < unit.count; ++c) columns.push_back(unit.first + c);
    }
    columns_.upload(bytes_of(columns), work_.stream);
    work_.stream.synchronize();
  }

  /// Pulls of all units from one product, which follow what the units before move.
  template <bool whole>
  void superblock(std::span<const SweepUnitCuda> units, int64_t columns, int64_t placed) {
    const int64_t n = swept_.n, k = swept_.k;
    gather_kernel<<<blocks_of(columns * k), 256, 0, stream()>>>(
        blocks_.gram().data(), k, columns_.as<int64_t>() + placed, columns, rows_, among_);
    multiply(n, columns, k, {swept_.residuals, k}, {rows_, k, true}, {pulls_, columns});
    int64_t at = 0;
    for (const auto& unit : units) {
      ridge_kernel<<<blocks_of(n * unit.count), 256, 0, stream()>>>(swept_, unit.first, unit.count, blocks_.ridge(),
                                                                    pulls_ + at, columns);
      outputs_.gram == nullptr ? alone<whole>(unit, pulls_ + at, columns) : together<whole>(unit, pulls_ + at, columns);
      at += unit.count;
      if (at == columns) break;
      multiply(n, columns - at, unit.count, {outputs_.gram == nullptr ? moved_ : all_moved_, unit.count},
               {among_ + (at - unit.count) * columns + at, columns}, {pulls_ + at, columns, true});
    }
  }

  SweepPart part_of(const SweepUnitCuda& unit) {
    return {.first = unit.first,
            .count = unit.count,
            .order = unit.order,
            .ridge = blocks_.ridge(),
            .first_row = 0,
            .row_step = 1,
            .rows = swept_.n,
            .pulls = nullptr,
            .stride = unit.count,
            .moved = moved_,
            .codes = proposed_.as<uint8_t>(),
            .scales = scales_.as<Scale>(),
            .taken = proposed_.as<uint8_t>() + swept_.n * widest_unit()};
  }

  /// All rows, each by itself.
  template <bool whole>
  void alone(const SweepUnitCuda& unit, const float* pulls, int64_t stride) {
    SweepPart part = part_of(unit);
    part.pulls = pulls;
    part.stride = stride;
    decide<whole>(unit, part);
    commit_kernel<<<blocks_of(part.rows * part.count), 256, 0, stream()>>>(planes_, swept_, part);
  }

  /// Rows of which one in `coupled_rows` moves at a time: what a row's unit pulls at is what all rows do.
  template <bool whole>
  void together(const SweepUnitCuda& unit, const float* pulls, int64_t stride) {
    const int64_t n = swept_.n;
    SweepPart part = part_of(unit);
    part.row_step = parts();
    take_pulls_kernel<<<blocks_of(n * unit.count), 256, 0, stream()>>>(part, n, pulls, stride, own_);
    for (; part.first_row < part.row_step; ++part.first_row) {
      part.rows = (n - part.first_row + part.row_step - 1) / part.row_step;
      some_rows<whole>(unit, part);
      part.first_position += part.rows;
    }
  }

  template <bool whole>
  void some_rows(const SweepUnitCuda& unit, SweepPart part) {
    const int64_t n = swept_.n, count = unit.count, values = part.rows * count;
    const float* const rows = by_parts_ + part.first_position * n;
    auto* const weighing = weighing_.as<Weighing>();
    part.pulls = mixed_;
    multiply(part.rows, count, n, {rows, n}, {own_, count}, {mixed_, count});
    mix_kernel<<<blocks_of(values), 256, 0, stream()>>>(part, by_parts_, n, outputs_.ridge, own_, mixed_);
    decide<whole>(unit, part);
    multiply(part.rows, count, part.rows, {rows + part.first_position, n}, {part.moved, count}, {coupled_, count});
    const auto weighers = static_cast<unsigned>(std::min<int64_t>(weighing_blocks, (values + 255) / 256));
    weigh_kernel<<<weighers, 256, 0, stream()>>>(part, by_parts_, n, outputs_.ridge, coupled_, curved_, weighing);
    settle_kernel<<<blocks_of(values), 256, 0, stream()>>>(planes_, swept_, part, curved_, &weighing->falls, own_,
                                                           all_moved_);
  }

  /// Fills codes, moved, curved, taken and, of blocks, scales.
  template <bool whole>
  void decide(const SweepUnitCuda& unit, const SweepPart& part) {
    if constexpr (whole) {
      target_kernel<<<blocks_of(part.rows * part.count), 256, 0, stream()>>>(swept_, part, unit.inverse, targets_);
      propose_(unit, part.rows, targets_, part.codes, part.scales, part.moved);
      accept_kernel<<<warps_of(part.rows), sweep_threads, 0, stream()>>>(planes_, swept_, part, products_of(unit),
                                                                         curved_);
    } else {
      codes_kernel<<<warps_of(part.rows), sweep_threads, 0, stream()>>>(planes_, swept_, part, blocks_.gram().data(),
                                                                        curved_);
    }
  }

  /// Of a block, whose ridge stands in them.
  UnitProducts products_of(const SweepUnitCuda& unit) const {
    if (unit.products != nullptr) return {unit.products, unit.count, 0};
    return {blocks_.gram().data() + unit.first * swept_.k + unit.first, swept_.k, blocks_.ridge()};
  }

  struct Factor {
    const float* data;
    int64_t ld;
    bool turned = false;
  };
  struct Result {
    float* data;
    int64_t ld;
    bool add = false;
  };
  void multiply(int64_t rows, int64_t cols, int64_t inner, const Factor& a, const Factor& b, const Result& c) {
    const device::CublasFloatProduct product{.m = rows,
                                             .n = cols,
                                             .k = inner,
                                             .a = a.data,
                                             .lda = a.ld,
                                             .b = b.data,
                                             .ldb = b.ld,
                                             .c = c.data,
                                             .ldc = c.ld,
                                             .workspace = work_.cublas.data(),
                                             .b_transposed = b.turned,
                                             .add = c.add};
    device::cublas_multiply(product, work_.stream);
  }

  CudaWork& work_;
  const SweepBlocksCuda& blocks_;
  const OutputCostsCuda outputs_;
  const Planes planes_;
  SweptWeight swept_;
  const Propose& propose_;
  device::DeviceBuffer floats_, proposed_, scales_, columns_, weighing_;
  float *pulls_, *targets_, *moved_, *curved_;   ///< [n, widest unit]
  float *own_, *mixed_, *coupled_, *all_moved_;  ///< likewise, where outputs have costs
  float* by_parts_;                              ///< [n, n], what errors of outputs cost
  float *rows_, *among_;
};

}  // namespace w4q::quantize::cuda
