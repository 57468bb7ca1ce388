#include "quantize/table_sums_cuda.h"

#include <algorithm>

#include "core/text.h"
#include "core/with_bits.h"
#include "device/alignment.h"
#include "device/check.h"
#include "quantize/kbit_search.h"
#include "quantize/kbit_trial.cuh"

namespace w4q::quantize {
namespace {

using cuda::KbitRule;
using cuda::warp_lanes;
using formats::kbit_block;

constexpr int most_entries = KbitLevels::max_codes;
/// Of a panel: `weighted` and `weights` of every entry, `error`, `power`.
constexpr int panel_sums = 2 * most_entries + 2;

/// The rows of a weight that take part, and what they are rounded to.
struct Sample {
  const float* weight;  ///< rows `stride` · k apart
  const float* importance;
  int64_t k, stride, rows, row_blocks;
  float* scales;   ///< [rows][row_blocks]
  uint8_t* codes;  ///< [rows][k]

  __device__ const float* row(int64_t index) const { return weight + index * stride * k; }
  __device__ int columns(int64_t block) const {
    return static_cast<int>(min(int64_t{kbit_block}, k - block * kbit_block));
  }
};

constexpr int round_warps = 4;

/// A block of a row a warp.
template <int bits>
__global__ void __launch_bounds__(round_warps* warp_lanes) sample_kernel(KbitRule rule, Sample sample) {
  __shared__ float levels[most_entries], midpoints[most_entries];
  __shared__ float target[round_warps][kbit_block], importance[round_warps][kbit_block];
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes, lane = static_cast<int>(threadIdx.x) % warp_lanes;
  if (warp == 0) {
    levels[lane] = rule.levels[lane];
    midpoints[lane] = rule.midpoints[lane];
  }
  __syncthreads();
  const int64_t task = int64_t{blockIdx.x} * round_warps + warp;
  if (task >= sample.rows * sample.row_blocks) return;
  const int64_t row = task / sample.row_blocks, block = task % sample.row_blocks;
  const int64_t column = block * kbit_block + lane;
  const int columns = sample.columns(block);
  const bool inside = lane < columns;
  target[warp][lane] = inside ? sample.row(row)[column] : 0.0f;
  importance[warp][lane] = inside ? sample.importance[column] : 0.0f;
  __syncwarp();
  const float* const own = target[warp];
  const cuda::KbitBlock values{own, own, importance[warp], own, columns};  // nothing is coupled
  const auto [scale, codes] = cuda::ScaleChoice<false, bits>(rule, levels, midpoints, values).choose();
  if (lane == 0) sample.scales[task] = cuda::decode_scale(rule, scale);
  if (inside) sample.codes[row * sample.k + column] = static_cast<uint8_t>(codes.at(lane));
}

constexpr int makers = 4;  ///< warps that make terms, while …
constexpr int adders = 2;  ///< … these add up those of the block before: one has entries, the other the two sums
constexpr int sum_threads = (makers + adders) * warp_lanes;
/// From one column's terms to the next one's: lanes that write them meet in no bank.
constexpr int column_terms = panel_rows + 1;
constexpr int block_terms = column_terms * kbit_block;
/// The code of what has no scale and counts nowhere.
constexpr uint8_t nowhere = 0xFF;

/// Terms of a block of a panel, by columns and rows, the order in which they are added.
struct Terms {
  double weighted[block_terms], weights[block_terms], error[block_terms], power[block_terms];
  uint8_t codes[block_terms];
};

__device__ void make_terms(const KbitRule& rule, const Sample& sample, int64_t panel, int64_t block, int thread,
                           Terms& terms) {
  const int lane = thread % warp_lanes;
  const bool inside = lane < sample.columns(block);
  const int64_t column = block * kbit_block + lane;
  const double importance = inside ? sample.importance[column] : 0.0f;
  for (int r = thread / warp_lanes; r < panel_rows; r += makers) {
    const int64_t row = panel * panel_rows + r;
    const int at = lane * column_terms + r;
    const bool there = inside && row < sample.rows;
    const float scale = there ? sample.scales[row * sample.row_blocks + block] : 0.0f;
    const int code = there ? sample.codes[row * sample.k + column] : 0;
    const double target = there ? sample.row(row)[column] : 0.0f;
    const double miss = target - static_cast<double>(rule.levels[code] * scale);
    const bool counts = scale != 0;
    terms.weighted[at] = importance * scale * target;
    terms.weights[at] = importance * scale * scale;
    terms.error[at] = counts ? importance * miss * miss : 0;
    terms.power[at] = counts ? importance * target * target : 0;
    terms.codes[at] = counts ? static_cast<uint8_t>(code) : nowhere;
  }
}

/// Sums of a panel, a thread block each: a lane has an entry, and all add in one order.
__global__ void __launch_bounds__(sum_threads) sum_kernel(KbitRule rule, Sample sample, double* sums) {
  __shared__ Terms terms[2];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_lanes;
  const int64_t panel = blockIdx.x;
  const int maker = thread - adders * warp_lanes;
  if (maker >= 0) make_terms(rule, sample, panel, 0, maker, terms[0]);
  __syncthreads();
  double first = 0, second = 0;
  for (int64_t block = 0; block < sample.row_blocks; ++block) {
    const Terms& own = terms[block % 2];
    const int count = sample.columns(block) * column_terms;
    if (maker >= 0) {
      if (block + 1 < sample.row_blocks) make_terms(rule, sample, panel, block + 1, maker, terms[(block + 1) % 2]);
    } else if (thread < warp_lanes) {
      for (int column = 0; column < count; column += column_terms) {
#pragma unroll
        for (int i = column; i < column + panel_rows; ++i) {
          const bool mine = own.codes[i] == lane;
          first = mine ? first + own.weighted[i] : first;
          second = mine ? second + own.weights[i] : second;
        }
      }
    } else {
      for (int column = 0; column < count; column += column_terms) {
#pragma unroll
        for (int i = column; i < column + panel_rows; ++i) {
          first += own.error[i];
          second += own.power[i];
        }
      }
    }
    __syncthreads();
  }
  double* const to = sums + panel * panel_sums;
  if (thread < warp_lanes) {
    to[lane] = first;
    to[most_entries + lane] = second;
  } else if (thread == warp_lanes) {
    to[2 * most_entries] = first;
    to[2 * most_entries + 1] = second;
  }
}

EntrySums of_panel(std::span<const double> sums) {
  EntrySums result;
  std::copy_n(sums.begin(), most_entries, result.weighted.begin());
  std::copy_n(sums.begin() + most_entries, most_entries, result.weights.begin());
  result.error = sums[2 * most_entries];
  result.power = sums[2 * most_entries + 1];
  return result;
}

int64_t sampled_rows(const TableSumsCuda::Weight& weight) {
  const int64_t stride = learning_stride(weight.n, weight.k);
  return (weight.n + stride - 1) / stride;
}
int64_t panels_of(const TableSumsCuda::Weight& weight) { return (sampled_rows(weight) + panel_rows - 1) / panel_rows; }

}  // namespace

TableSumsCuda::TableSumsCuda(CudaWork& work, std::span<const Weight> weights, const formats::Scheme& scheme,
                             std::span<const float> importance, Scales rule)
    : work_(work), weights_(weights.begin(), weights.end()), scheme_(scheme), rule_(rule) {
  int64_t codes = 0, scales = 0;
  for (const Weight& weight : weights) {
    panels_ += panels_of(weight);
    codes = std::max(codes, sampled_rows(weight) * weight.k);
    scales = std::max(scales, sampled_rows(weight) * formats::kbit_blocks(weight.k));
  }
  const size_t sums_bytes = device::round_up_256(static_cast<size_t>(panels_ * panel_sums) * sizeof(double)),
               importance_bytes = device::round_up_256(importance.size_bytes()),
               scales_bytes = device::round_up_256(static_cast<size_t>(scales) * sizeof(float));
  memory_ =
      device::DeviceBuffer(work.stream, sums_bytes + importance_bytes + scales_bytes + static_cast<size_t>(codes));
  std::byte* at = memory_.data();
  sums_ = reinterpret_cast<double*>(at);
  importance_ = reinterpret_cast<float*>(at += sums_bytes);
  scales_ = reinterpret_cast<float*>(at += importance_bytes);
  codes_ = reinterpret_cast<uint8_t*>(at + scales_bytes);
  work.send(importance_, std::as_bytes(importance));
}

EntrySums TableSumsCuda::operator()(std::span<const float> codebook) const {
  const KbitRule rule = cuda::kbit_rule(scheme_, codebook, rule_);
  double* to = sums_;
  for (const Weight& weight : weights_) {
    const Sample sample{.weight = weight.values,
                        .importance = importance_,
                        .k = weight.k,
                        .stride = learning_stride(weight.n, weight.k),
                        .rows = sampled_rows(weight),
                        .row_blocks = formats::kbit_blocks(weight.k),
                        .scales = scales_,
                        .codes = codes_};
    const auto rounding = static_cast<unsigned>((sample.rows * sample.row_blocks + round_warps - 1) / round_warps);
    const auto panels = static_cast<unsigned>(panels_of(weight));
    with_table_bits(rule.bits, [&]<int bits>() {
      sample_kernel<bits><<<rounding, round_warps * warp_lanes, 0, work_.stream.get()>>>(rule, sample);
    });
    sum_kernel<<<panels, sum_threads, 0, work_.stream.get()>>>(rule, sample, to);
    device::check_launch("sums for a table", concat(weight.n, " × ", weight.k));
    to += int64_t{panels} * panel_sums;
  }
  const auto sums = work_.fetch(sums_, panels_ * panel_sums);
  EntrySums total;
  size_t from = 0;
  for (const Weight& weight : weights_) {
    std::vector<EntrySums> panels;
    for (int64_t panel = 0; panel < panels_of(weight); ++panel, from += panel_sums) {
      panels.push_back(of_panel(std::span(sums).subspan(from, panel_sums)));
    }
    total.add_weight(panels, std::ssize(weights_));
  }
  return total;
}

}  // namespace w4q::quantize
