#include <algorithm>

#include "core/text.h"
#include "device/check.h"
#include "quantize/feedback_steps.cuh"
#include "quantize/kbit_rows_cuda.h"
#include "quantize/kbit_trial.cuh"
#include "quantize/sweep_steps.cuh"
#include "quantize/two_sided_steps.cuh"

namespace w4q::quantize {
namespace {

using cuda::all_lanes;
using cuda::KbitRule;
using cuda::warp_lanes;
using formats::kbit_block;
using formats::PlaneRole;

constexpr int warps = 4;

struct RowCounters {
  unsigned long long zero_blocks, subnormal_scales;
};

/// Where blocks are read and written. Without feedback warps have all blocks of all rows; with it all rows of one
/// block, by positions.
struct Blocks {
  int64_t n, k, row_blocks;
  const float* targets;     ///< [n, k]
  const float* weights;     ///< [n, k]
  const float* importance;  ///< [k]
  uint32_t* words;          ///< [n][row_blocks][bits]
  void* scales;             ///< [n][row_blocks]
  RowCounters* counters;
  // With feedback:
  const float* coupling;  ///< [k, k]
  const int32_t* columns;
  int64_t position;
  int cols;
  float* errors;  ///< [n, cols]
};

/// Shared memory of a thread block.
struct Shared {
  float levels[32], midpoints[32];
  alignas(16) float coupling[kbit_block * kbit_block];
  float target[warps][kbit_block], weights[warps][kbit_block], importance[warps][kbit_block];
  uint8_t placed[warps][kbit_block];
};

template <bool coupled>
__device__ void fill_shared(const KbitRule& rule, const Blocks& blocks, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 32) {
    shared.levels[thread] = rule.levels[thread];
    shared.midpoints[thread] = rule.midpoints[thread];
  }
  if constexpr (coupled) {
    for (int i = thread; i < kbit_block * kbit_block; i += warps * warp_lanes) {
      const int from = i / kbit_block, to = i % kbit_block;
      const bool inside = to < blocks.cols && from < to;
      shared.coupling[i] = inside ? blocks.coupling[(blocks.position + to) * blocks.k + blocks.position + from] : 0.0f;
    }
  }
  __syncthreads();
}

/// Writes the codes of a block, a bit of every lane's at a time.
__device__ void write_planes(const KbitRule& rule, const Blocks& blocks, int64_t index, int code, uint16_t scale) {
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  for (int bit = 0; bit < rule.bits; ++bit) {
    const unsigned word = __ballot_sync(all_lanes, (code >> bit & 1) != 0);
    if (lane == bit) blocks.words[index * rule.bits + bit] = word;
  }
  if (lane != 0) return;
  if (rule.e4m4) {
    static_cast<uint8_t*>(blocks.scales)[index] = static_cast<uint8_t>(scale);
  } else {
    static_cast<uint16_t*>(blocks.scales)[index] = scale;
  }
}

__device__ void count_block(const KbitRule& rule, const Blocks& blocks, float weight, uint16_t scale) {
  float absmax = fabsf(weight);
  for (int step = 16; step > 0; step /= 2) absmax = fmaxf(absmax, __shfl_xor_sync(all_lanes, absmax, step));
  if (threadIdx.x % warp_lanes != 0) return;
  if (absmax == 0) {
    atomicAdd(&blocks.counters->zero_blocks, 1ull);
  } else if (scale < (rule.e4m4 ? 0x10 : 0x0400)) {
    atomicAdd(&blocks.counters->subnormal_scales, 1ull);
  }
}

template <bool coupled, int bits>
__global__ void __launch_bounds__(warps* warp_lanes) encode_kernel(KbitRule rule, Blocks blocks) {
  __shared__ Shared shared;
  fill_shared<coupled>(rule, blocks, shared);
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes, lane = static_cast<int>(threadIdx.x) % warp_lanes;
  const int64_t task = int64_t{blockIdx.x} * warps + warp;
  if (task >= (coupled ? blocks.n : blocks.n * blocks.row_blocks)) return;
  const int64_t row = coupled ? task : task / blocks.row_blocks;
  const int64_t first = coupled ? blocks.position : task % blocks.row_blocks * kbit_block;
  const int columns = coupled ? blocks.cols : static_cast<int>(min(int64_t{kbit_block}, blocks.k - first));
  const bool inside = lane < columns;
  const int64_t at = row * blocks.k + first + lane;
  shared.target[warp][lane] = inside ? blocks.targets[at] : 0.0f;
  shared.weights[warp][lane] = inside ? blocks.weights[at] : 0.0f;
  shared.importance[warp][lane] = inside ? blocks.importance[first + lane] : 0.0f;
  shared.placed[warp][lane] = 0;
  __syncwarp();
  const cuda::KbitBlock block{shared.target[warp], shared.weights[warp], shared.importance[warp], shared.coupling,
                              columns};
  const auto [scale, codes] = cuda::ScaleChoice<coupled, bits>(rule, shared.levels, shared.midpoints, block).choose();
  int code = inside ? codes.at(lane) : 0;
  int64_t block_index = first / kbit_block;
  if constexpr (coupled) {
    block_index = blocks.columns[first] / kbit_block;
    if (inside) {
      shared.placed[warp][blocks.columns[first + lane] % kbit_block] = static_cast<uint8_t>(code);
      blocks.errors[row * columns + lane] =
          shared.weights[warp][lane] - shared.levels[code] * cuda::decode_scale(rule, scale);
    }
    __syncwarp();
    code = shared.placed[warp][lane];
  }
  write_planes(rule, blocks, row * blocks.row_blocks + block_index, code, scale);
  count_block(rule, blocks, shared.weights[warp][lane], scale);
}

/// Calls launch.operator()<bits>().
template <class Launch>
void with_bits(const KbitRule& rule, const Launch& launch) {
  switch (rule.bits) {
    case 2:
      return launch.template operator()<2>();
    case 3:
      return launch.template operator()<3>();
    case 4:
      return launch.template operator()<4>();
    default:
      return launch.template operator()<5>();
  }
}

template <bool coupled>
void launch(const KbitRule& rule, const Blocks& blocks, const device::Stream& stream) {
  const int64_t tasks = coupled ? blocks.n : blocks.n * blocks.row_blocks;
  with_bits(rule, [&]<int bits>() {
    encode_kernel<coupled, bits>
        <<<static_cast<unsigned>((tasks + warps - 1) / warps), warps * warp_lanes, 0, stream.get()>>>(rule, blocks);
  });
  device::check_launch("kbit", concat(blocks.n, " × ", blocks.k));
}

void feed_back(CudaWork& work, const KbitRule& rule, Blocks blocks, const float* weight,
               const ErrorFactorCuda& factor) {
  cuda::FeedbackSteps steps(work, weight, blocks.n, factor, kbit_block);
  blocks.targets = steps.targets();
  blocks.weights = steps.weights();
  blocks.importance = factor.pivots();
  blocks.coupling = factor.coupling();
  blocks.columns = factor.columns();
  blocks.errors = steps.errors();
  const auto& starts = factor.order().starts;
  for (size_t b = 0; b + 1 < starts.size(); ++b) {
    blocks.position = starts[b];
    blocks.cols = static_cast<int>(starts[b + 1] - starts[b]);
    launch<true>(rule, blocks, work.stream);
    steps.move_rest(starts[b], starts[b + 1]);
  }
}

/// A cell of feedback on both sides, rounded by its first warps.
template <int bits>
struct KbitCells {
  KbitRule rule;
  Blocks blocks;

  struct Shared {
    float levels[32], midpoints[32], importance[kbit_block];
    alignas(16) float coupling[kbit_block * kbit_block];
    uint8_t placed[kbit_block];
    typename cuda::ScaleChoice<true, bits>::Best best;
  };

  __device__ void prepare(Shared& shared, const cuda::Wave& wave, int64_t from, int cols) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < 32) {
      shared.levels[thread] = rule.levels[thread];
      shared.midpoints[thread] = rule.midpoints[thread];
      shared.importance[thread] = thread < cols ? wave.pivots[from + thread] : 0.0f;
      shared.placed[thread] = 0;
    }
    for (int i = thread; i < kbit_block * kbit_block; i += cuda::cell_threads) {
      const int to = i / kbit_block, before = i % kbit_block;  // as it lies in memory
      const bool inside = to < cols && before < to;
      shared.coupling[before * kbit_block + to] = inside ? wave.along[(from + to) * wave.k + from + before] : 0.0f;
    }
  }

  __device__ void round(Shared& shared, const cuda::Wave& wave, cuda::Cell<kbit_block>& cell, int64_t row, int64_t,
                        int64_t from, int cols) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (cols < kbit_block) {
      if (thread >= cols && thread < kbit_block) cell.target[thread] = cell.weight[thread] = cell.shift[thread] = 0;
      __syncthreads();
    }
    const cuda::KbitBlock block{cell.target, cell.weight, shared.importance, shared.coupling, cols};
    using Choice = cuda::ScaleChoice<true, bits>;
    Choice choice(rule, shared.levels, shared.midpoints, block);
    const int warp = thread / warp_lanes;
    if (warp < Choice::parts) choice.search(warp);
    if (thread == warp_lanes) shared.best = choice.best();
    __syncthreads();
    if (warp > 0) return;
    choice.take_in(shared.best);
    const auto [chosen, codes] = choice.settle();
    const float scale = cuda::decode_scale(rule, chosen);
    const int code = codes.at(thread);
    if (thread < cols) {
      cell.value[thread] = shared.levels[code] * scale;
      shared.placed[wave.columns[from + thread] % kbit_block] = static_cast<uint8_t>(code);
    }
    __syncwarp();
    const int64_t index = row * blocks.row_blocks + wave.columns[from] / kbit_block;
    write_planes(rule, blocks, index, shared.placed[thread], chosen);
    count_block(rule, blocks, cell.weight[thread] - cell.shift[thread], chosen);
  }
};

__global__ void __launch_bounds__(256)
    difference_kernel(KbitRule rule, Blocks blocks, const float* original, const float* rows, float* difference) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at >= blocks.n * blocks.k) return;
  const int64_t row = at / blocks.k, c = at % blocks.k;
  const int64_t index = row * blocks.row_blocks + c / kbit_block;
  unsigned code = 0;
  for (int bit = 0; bit < rule.bits; ++bit) {
    code |= (blocks.words[index * rule.bits + bit] >> (c % kbit_block) & 1u) << bit;
  }
  const uint16_t bits = rule.e4m4 ? static_cast<const uint8_t*>(blocks.scales)[index]
                                  : static_cast<const uint16_t*>(blocks.scales)[index];
  const float value = rule.levels[code] * cuda::decode_scale(rule, bits);
  difference[at] = original[at] - value * (rows == nullptr ? 1.0f : rows[row]);
}

/// How sweeps see scales and codes.
struct KbitPlanes {
  KbitRule rule;
  void* scales;  ///< [n][row_blocks]
  int64_t row_blocks;

  __device__ float value(uint8_t code, const cuda::Scale& scale) const { return rule.levels[code] * scale.value; }
  __device__ uint8_t nearest(float x, const cuda::Scale& scale) const {
    const float level = scale.value == 0 ? 0.0f : x / scale.value;
    int code = 0;
    for (int i = 0; i + 1 < rule.count; ++i) code += level > rule.midpoints[i] ? 1 : 0;
    return static_cast<uint8_t>(code);
  }
  __device__ cuda::Scale load(int64_t row, int64_t column) const {
    const int64_t index = row * row_blocks + column / kbit_block;
    const uint16_t bits =
        rule.e4m4 ? static_cast<const uint8_t*>(scales)[index] : static_cast<const uint16_t*>(scales)[index];
    return {cuda::decode_scale(rule, bits), bits, 0, false};
  }
  __device__ void store(int64_t row, int64_t column, const cuda::Scale& scale) const {
    const int64_t index = row * row_blocks + column / kbit_block;
    if (rule.e4m4) {
      static_cast<uint8_t*>(scales)[index] = static_cast<uint8_t>(scale.bits);
    } else {
      static_cast<uint16_t*>(scales)[index] = static_cast<uint16_t>(scale.bits);
    }
  }
};

__global__ void __launch_bounds__(256) unpack_kernel(KbitRule rule, Blocks blocks, uint8_t* codes) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at >= blocks.n * blocks.k) return;
  const int64_t c = at % blocks.k, index = at / blocks.k * blocks.row_blocks + c / kbit_block;
  unsigned code = 0;
  for (int bit = 0; bit < rule.bits; ++bit) {
    code |= (blocks.words[index * rule.bits + bit] >> (c % kbit_block) & 1u) << bit;
  }
  codes[at] = static_cast<uint8_t>(code);
}

/// Words of codes, and the counts of blocks, a warp a block.
__global__ void __launch_bounds__(warps* warp_lanes)
    pack_kernel(KbitPlanes planes, Blocks blocks, const uint8_t* codes, const float* weight) {
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes;
  const int64_t index = int64_t{blockIdx.x} * warps + threadIdx.x / warp_lanes;
  if (index >= blocks.n * blocks.row_blocks) return;
  const int64_t row = index / blocks.row_blocks, column = index % blocks.row_blocks * kbit_block + lane;
  const bool inside = column < blocks.k;
  const auto scale = static_cast<uint16_t>(planes.load(row, column - lane).bits);
  write_planes(planes.rule, blocks, index, inside ? codes[row * blocks.k + column] : 0, scale);
  count_block(planes.rule, blocks, inside ? weight[row * blocks.k + column] : 0.0f, scale);
}

/// A block of every row rounded as a whole, a warp a row; `coupling` [count, count] and targets by positions.
template <int bits>
__global__ void __launch_bounds__(warps* warp_lanes)
    propose_kernel(KbitRule rule, SweepUnitCuda unit, int64_t n, const float* targets, uint8_t* codes,
                   cuda::Scale* scales) {
  __shared__ Shared shared;
  Blocks square{};
  square.k = square.cols = unit.count;
  square.coupling = unit.coupling;
  fill_shared<true>(rule, square, shared);
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes, lane = static_cast<int>(threadIdx.x) % warp_lanes;
  const int64_t row = int64_t{blockIdx.x} * warps + warp;
  if (row >= n) return;
  const bool inside = lane < unit.count;
  shared.target[warp][lane] = inside ? targets[row * unit.count + lane] : 0.0f;
  shared.importance[warp][lane] = inside ? unit.pivots[lane] : 0.0f;
  __syncwarp();
  const cuda::KbitBlock block{shared.target[warp], shared.target[warp], shared.importance[warp], shared.coupling,
                              unit.count};
  const auto [chosen, found] = cuda::ScaleChoice<true, bits>(rule, shared.levels, shared.midpoints, block).choose();
  const float scale = cuda::decode_scale(rule, chosen);
  if (inside) codes[row * unit.count + unit.order[lane]] = static_cast<uint8_t>(found.at(lane));
  if (lane == 0) scales[row] = {scale, chosen, 0, false};
}

void sweep_kbit(CudaWork& work, const KbitRule& rule, const Blocks& blocks, const float* weight,
                const FeedbackCuda& feedback) {
  const int64_t n = blocks.n, count = n * blocks.row_blocks;
  device::DeviceBuffer codes(work.stream, static_cast<size_t>(n * blocks.k));
  unpack_kernel<<<static_cast<unsigned>((n * blocks.k + 255) / 256), 256, 0, work.stream.get()>>>(rule, blocks,
                                                                                                  codes.as<uint8_t>());
  const KbitPlanes planes{rule, blocks.scales, blocks.row_blocks};
  const auto propose = [&](const SweepUnitCuda& unit, int64_t rows, const float* targets, uint8_t* proposed,
                           cuda::Scale* scales, float*) {
    with_bits(rule, [&]<int bits>() {
      propose_kernel<bits>
          <<<static_cast<unsigned>((rows + warps - 1) / warps), warps * warp_lanes, 0, work.stream.get()>>>(
              rule, unit, rows, targets, proposed, scales);
    });
  };
  const cuda::SweptWeight swept{n, blocks.k, codes.as<uint8_t>(), nullptr, nullptr};
  cuda::Sweeps(work, *feedback.sweeps, feedback.outputs, planes, swept, weight, propose).run();
  device::fill(blocks.counters, 0, sizeof(RowCounters), work.stream, "counting blocks");
  pack_kernel<<<static_cast<unsigned>((count + warps - 1) / warps), warps * warp_lanes, 0, work.stream.get()>>>(
      planes, blocks, codes.as<uint8_t>(), weight);
  device::check_launch("swept kbit", concat(n, " × ", blocks.k));
  work.stream.synchronize();
}

std::span<const float> codebook_of(const formats::PackedWeight& packed) {
  return packed.plane(PlaneRole::codebook).bytes.as<const float>();
}

}  // namespace

QuantizeStats kbit_rows_cuda(CudaWork& work, const float* weight, std::span<const float> importance,
                             const FeedbackCuda& feedback, Scales scales, const float* original, const float* rows,
                             float* difference, formats::PackedWeight& packed) {
  const KbitRule rule = cuda::kbit_rule(packed.scheme, codebook_of(packed), scales);
  Buffer& codes = packed.plane(PlaneRole::codes).bytes;
  Buffer& stored = packed.plane(PlaneRole::scales).bytes;
  device::DeviceBuffer words(work.stream, codes.size()), device_scales(work.stream, stored.size()),
      counters(work.stream, sizeof(RowCounters));
  counters.fill(0, work.stream);
  Blocks blocks{};
  blocks.n = packed.n;
  blocks.k = packed.k;
  blocks.row_blocks = formats::kbit_blocks(packed.k);
  blocks.words = words.as<uint32_t>();
  blocks.scales = device_scales.data();
  blocks.counters = counters.as<RowCounters>();
  if (feedback.factor != nullptr) {
    if (feedback.across != nullptr) {
      with_bits(rule, [&]<int bits>() {
        cuda::FeedbackOnBothSides<kbit_block, KbitCells<bits>>(work, weight, *feedback.factor, *feedback.across,
                                                               {rule, blocks})
            .run();
      });
    } else {
      feed_back(work, rule, blocks, weight, *feedback.factor);
    }
    if (feedback.sweeps != nullptr) sweep_kbit(work, rule, blocks, weight, feedback);
  } else {
    blocks.targets = blocks.weights = weight;
    blocks.importance = work.put(work.columns, importance.data(), packed.k);
    launch<false>(rule, blocks, work.stream);
  }
  if (difference != nullptr) {
    difference_kernel<<<static_cast<unsigned>((packed.n * packed.k + 255) / 256), 256, 0, work.stream.get()>>>(
        rule, blocks, original, rows, difference);
    device::check_launch("kbit errors", concat(packed.n, " × ", packed.k));
  }
  words.download(codes.bytes(), work.stream);
  device_scales.download(stored.bytes(), work.stream);
  const RowCounters seen = work.fetch(counters.as<RowCounters>(), 1).front();
  QuantizeStats stats;
  stats.blocks = blocks.n * blocks.row_blocks;
  stats.zero_blocks = static_cast<int64_t>(seen.zero_blocks);
  stats.subnormal_scales = static_cast<int64_t>(seen.subnormal_scales);
  return stats;
}

}  // namespace w4q::quantize
