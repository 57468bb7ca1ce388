#include <algorithm>
#include <bit>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "formats/kbit.h"
#include "kernels/common/block_reduce.cuh"
#include "quantize/awq_cuda.h"
#include "quantize/error_factor_cuda.h"
#include "quantize/integer_round.cuh"
#include "quantize/rotated.h"
#include "quantize/row_norms.cuh"
#include "quantize/weight_cuda.h"

namespace w4q::quantize {
namespace {

using cuda::group_lanes;
using cuda::Rule;
using formats::SchemeFamily;

using device::element_blocks;
using device::element_threads;

constexpr int warp = 32;
/// Rows that share a range exponent when kbit rounds: those of a task of the definition.
constexpr int64_t strip_rows = 64;

/// Weights under scales.
struct Scaled {
  const float* weights;
  const float* scales;  ///< or null
  __device__ float scale(int64_t i) const { return scales == nullptr ? 1.0f : scales[i]; }
  __device__ float operator()(int64_t i) const { return scales == nullptr ? weights[i] : weights[i] * scales[i]; }
};

struct Matrix {
  int64_t n, k, groups, group;
};

/// Half a warp has a group.
__global__ void __launch_bounds__(element_threads)
    integer_error_kernel(Rule rule, Matrix matrix, const float* weights, const float* scales, float* difference) {
  const int64_t index = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / group_lanes;
  if (index >= matrix.n * matrix.groups) return;
  const int64_t first = index % matrix.groups * matrix.group;
  const int64_t at = index / matrix.groups * matrix.k + first;
  const Scaled values{weights + at, scales == nullptr ? nullptr : scales + first};
  const cuda::Group group(values, min(matrix.group, matrix.k - first));
  float low, high;
  group.range(low, high);
  const cuda::Scale scale = group.choose(rule, low, high);
  for (int64_t i = group.lane; i < group.count; i += group_lanes) {
    const float rounded = cuda::steps_of(values(i), scale, rule.bits) * scale.value;
    difference[at + i] = weights[at + i] - (scales == nullptr ? rounded : rounded / values.scale(i));
  }
}

/// A table in the kernel's arguments.
struct Table {
  float levels[32];
  float midpoints[32];
  int count;
  float largest;
  bool e4m4;
};

/// The largest magnitudes of a warp's block of 32.
__device__ float block_absmax(float value) { return kernels::warp_max(fabsf(value)); }

/// extremes[strip] = bits of the smallest and the largest block maximum that is not zero; positive floats order as
/// ints.
__global__ void __launch_bounds__(element_threads)
    kbit_extremes_kernel(Matrix matrix, const float* weights, const float* scales, int* extremes) {
  const int64_t index = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / warp;
  if (index >= matrix.n * matrix.groups) return;
  const int64_t row = index / matrix.groups, c = index % matrix.groups * warp + threadIdx.x % warp;
  const Scaled values{weights + row * matrix.k, scales};
  const float absmax = block_absmax(c < matrix.k ? values(c) : 0.0f);
  if (threadIdx.x % warp != 0 || absmax == 0) return;
  int* const strip = extremes + 2 * (row / strip_rows);
  atomicMin(strip, __float_as_int(absmax));
  atomicMax(strip + 1, __float_as_int(absmax));
}

/// A warp has a block; rows of a strip have the table times 2^exponent.
__global__ void __launch_bounds__(element_threads)
    kbit_error_kernel(Table table, Matrix matrix, const float* weights, const float* scales, const int* exponents,
                      float* difference) {
  const int64_t index = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / warp;
  if (index >= matrix.n * matrix.groups) return;
  const int64_t row = index / matrix.groups, c = index % matrix.groups * warp + threadIdx.x % warp;
  const Scaled values{weights + row * matrix.k, scales};
  const float x = c < matrix.k ? values(c) : 0.0f;
  const int exponent = exponents[row / strip_rows];
  const float scale = block_absmax(x) / ldexpf(table.largest, exponent);
  float decoded;
  if (table.e4m4) {
    decoded = formats::e4m4_decode(formats::e4m4_encode(scale));
  } else {
    decoded = __half2float(
        __ushort_as_half(min(__half_as_ushort(__float2half_rn(scale)), static_cast<unsigned short>(0x7BFF))));
  }
  if (c >= matrix.k) return;
  const float quotient = decoded == 0 ? 0.0f : x / decoded;
  int code = 0;
  for (int i = 0; i + 1 < table.count; ++i) code += quotient > ldexpf(table.midpoints[i], exponent) ? 1 : 0;
  const float rounded = ldexpf(table.levels[code], exponent) * decoded;
  const float weight = weights[row * matrix.k + c];
  difference[row * matrix.k + c] = weight - (scales == nullptr ? rounded : rounded / scales[c]);
}

/// norms[row]: of weights under scales; a warp has a row.
__global__ void __launch_bounds__(element_threads)
    norms_kernel(int64_t n, int64_t k, const float* weights, const float* scales, double* norms) {
  const int64_t row = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / warp;
  if (row >= n) return;
  const double norm = cuda::warp_norm(Scaled{weights + row * k, scales}, k, k);
  if (threadIdx.x % warp == 0) norms[row] = norm;
}

/// To the table's levels times the norm of a row; rows of a strip have the table times 2^exponent.
__global__ void __launch_bounds__(element_threads)
    normal_error_kernel(Table table, int64_t n, int64_t k, const float* weights, const float* scales,
                        const float* norms, const int* exponents, float* difference) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at >= n * k) return;
  const int64_t row = at / k, c = at % k;
  const float norm = norms[row];
  const int exponent = exponents[row / strip_rows];
  const float quotient = norm == 0 ? 0.0f : Scaled{weights + row * k, scales}(c) / norm;
  int code = 0;
  for (int i = 0; i + 1 < table.count; ++i) code += quotient > ldexpf(table.midpoints[i], exponent) ? 1 : 0;
  const float rounded = ldexpf(table.levels[code], exponent) * norm;
  difference[at] = weights[at] - (scales == nullptr ? rounded : rounded / scales[c]);
}

/// What to do with a block of columns of some rows.
struct ClipBlock {
  int64_t rows, k, begin, cols;
  const float* weights;  ///< from the first of the rows on, as is `errors`
  float* errors;
};

constexpr int clip_choices = 10;
__device__ float share_of(int choice) { return 1.0f - 0.05f * static_cast<float>(choice + 1); }

/// Clipped weights of one group.
struct Clipped {
  const float* weights;
  float low, high;
  __device__ float operator()(int64_t i) const { return fminf(fmaxf(weights[i], low), high); }
};

__device__ Clipped clipped(const Rule& rule, const float* weights, float low, float high, int choice) {
  if (!rule.asymmetric) {
    low = fminf(low, -high);
    high = -low;
  }
  const float share = share_of(choice);
  return {weights, low * share, high * share};
}

/// changes[choice][row][c]: how the error changes when the block is clipped to that share. Half a warp has a row.
__global__ void __launch_bounds__(element_threads) clip_changes_kernel(Rule rule, ClipBlock block, float* changes) {
  const int64_t index = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / group_lanes;
  if (index >= block.rows * clip_choices) return;
  const int64_t row = index % block.rows;
  const float* const weights = block.weights + row * block.k + block.begin;
  const float* const errors = block.errors + row * block.k + block.begin;
  float low, high;
  cuda::Group(cuda::Stored<float>{weights}, block.cols).range(low, high);
  const cuda::Group group(clipped(rule, weights, low, high, static_cast<int>(index / block.rows)), block.cols);
  group.range(low, high);
  const cuda::Scale scale = group.choose(rule, low, high);
  for (int64_t i = group.lane; i < block.cols; i += group_lanes) {
    const float rounded = cuda::steps_of(group.values(i), scale, rule.bits) * scale.value;
    changes[index * block.cols + i] = (weights[i] - rounded) - errors[i];
  }
}

/// Applies the best choice of each row: weights are clipped, errors changed, and the change is left in changes[0]. A
/// warp has a row.
__global__ void __launch_bounds__(element_threads)
    choose_clips_kernel(Rule rule, ClipBlock block, float* weights, const float* products, const float* spread,
                        float* changes, unsigned long long* clipped_blocks) {
  const int64_t row = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / warp;
  const int lane = static_cast<int>(threadIdx.x) % warp;
  if (row >= block.rows) return;
  const float* const product = products + row * block.k + block.begin;
  double least = 0;
  int best = -1;
  for (int choice = 0; choice < clip_choices; ++choice) {
    const int64_t at = (choice * block.rows + row) * block.cols;
    double gain = 0;
    for (int64_t i = lane; i < block.cols; i += warp) {
      const double change = changes[at + i];
      gain += 2 * change * static_cast<double>(product[i]) + change * static_cast<double>(spread[at + i]);
    }
    gain = kernels::warp_reduce(gain, [](double a, double b) { return a + b; });
    if (!(gain < least)) continue;
    least = gain;
    best = choice;
  }
  float* const own = weights + row * block.k + block.begin;
  float* const errors = block.errors + row * block.k + block.begin;
  float* const change = changes + row * block.cols;
  if (best < 0) {
    for (int64_t i = lane; i < block.cols; i += warp) change[i] = 0;
    return;
  }
  float low = 0, high = 0;
  for (int64_t i = lane; i < block.cols; i += warp) low = fminf(low, own[i]), high = fmaxf(high, own[i]);
  low = kernels::warp_reduce(low, [](float a, float b) { return fminf(a, b); });
  high = kernels::warp_max(high);
  const Clipped values = clipped(rule, own, low, high, best);
  const float* const taken = changes + (best * block.rows + row) * block.cols;
  for (int64_t i = lane; i < block.cols; i += warp) {
    const float moved = taken[i];
    errors[i] += moved;
    own[i] = values(i);
    change[i] = moved;
  }
  if (lane == 0) atomicAdd(clipped_blocks, 1ull);
}

/// sums[row] = Σ a[row][c] · b[row][c], a block per row.
__global__ void __launch_bounds__(element_threads)
    row_dots_kernel(const float* a, const float* b, int64_t k, double* sums) {
  __shared__ double slots[32];
  double sum = 0;
  for (int64_t c = threadIdx.x; c < k; c += element_threads) {
    sum += static_cast<double>(a[blockIdx.x * k + c]) * static_cast<double>(b[blockIdx.x * k + c]);
  }
  sum = kernels::block_reduce(sum, slots, 0.0, [](double x, double y) { return x + y; });
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

Table table_of(const formats::Scheme& scheme, std::span<const float> levels) {
  Table table{};
  std::ranges::copy(levels, table.levels);
  formats::kbit_midpoints(levels, std::span(table.midpoints).first(levels.size() - 1));
  table.count = static_cast<int>(levels.size());
  table.largest = formats::table_max(levels);
  table.e4m4 = scheme.scale == formats::ScaleType::e4m4;
  return table;
}

/// The range exponents of kbit's strips of rows.
const int* strip_exponents(CudaWork& work, const AwqCudaLinear& linear, const Matrix& matrix, const float* scales) {
  const int64_t strips = (matrix.n + strip_rows - 1) / strip_rows;
  std::vector<int> extremes(static_cast<size_t>(2 * strips), 0);
  for (size_t i = 0; i < extremes.size(); i += 2) extremes[i] = 0x7F7FFFFF;
  int* const device = work.put(work.sums, extremes.data(), 2 * strips);
  kbit_extremes_kernel<<<element_blocks(matrix.n * matrix.groups * warp), element_threads, 0, work.stream.get()>>>(
      matrix, linear.weight, scales, device);
  device::check_launch("kbit maxima", concat(matrix.n, " × ", matrix.k));
  extremes = work.fetch(device, 2 * strips);
  std::vector<int> exponents(static_cast<size_t>(strips));
  for (size_t i = 0; i < exponents.size(); ++i) {
    const auto largest = std::bit_cast<float>(extremes[2 * i + 1]);
    const float smallest = largest == 0 ? 0 : std::bit_cast<float>(extremes[2 * i]);
    exponents[i] = formats::kbit_range_exponent(smallest, largest, linear.scheme.scale);
  }
  return work.put(work.sums, exponents.data(), strips);
}

/// What rows are divided by, and the range exponents of strips of rows, when they are rounded to levels for N(0, 1).
struct RowNorms {
  std::vector<float> norms;
  std::vector<int> exponents;
};
RowNorms row_norms(std::span<const double> sizes, std::span<const float> table, int bits) {
  constexpr auto type = formats::ScaleType::f16;
  const double gain = formats::rotated_gain(table, bits);
  RowNorms result;
  for (size_t first = 0; first < sizes.size(); first += strip_rows) {
    const auto strip = sizes.subspan(first, std::min(sizes.size() - first, static_cast<size_t>(strip_rows)));
    double smallest = 0, largest = 0;
    for (const double size : strip) {
      if (size != 0 && (smallest == 0 || size < smallest)) smallest = size;
      largest = std::max(largest, size);
    }
    const int exponent = rotated_range_exponent(smallest / gain, largest / gain, type);
    for (const double size : strip) {
      result.norms.push_back(formats::rotated_scale(size / std::ldexp(gain, exponent), type).value);
    }
    result.exponents.push_back(exponent);
  }
  return result;
}

/// The scalar rounding that stands for a trellis of as many bits: quantize::rounding_of().
void normal_error(CudaWork& work, const AwqCudaLinear& linear, int64_t k, const float* scales, float* difference) {
  const int bits = std::clamp(linear.scheme.bits, formats::table_min_bits, formats::table_max_bits);
  const int64_t n = linear.n;
  auto* const sizes = work.sums.get<double>(n);
  norms_kernel<<<element_blocks(n * warp), element_threads, 0, work.stream.get()>>>(n, k, linear.weight, scales, sizes);
  device::check_launch("norms of rows", concat(n, " × ", k));
  const auto base = formats::normal_codebook(bits);
  const auto rows = row_norms(work.fetch(sizes, n), base, bits);
  auto* const norms = work.rows.get<float>(n);
  device::copy(device::Way::to_gpu, norms, rows.norms.data(), rows.norms.size() * sizeof(float), work.stream,
               "copying norms");
  const int* const exponents = work.put(work.sums, rows.exponents.data(), static_cast<int64_t>(rows.exponents.size()));
  normal_error_kernel<<<element_blocks(n * k), element_threads, 0, work.stream.get()>>>(
      table_of(linear.scheme, RotatedLevels(base, k).levels), n, k, linear.weight, scales, norms, exponents,
      difference);
}

/// search_clip for some rows.
class ClipSearch {
 public:
  ClipSearch(CudaWork& work, const AwqCudaLinear& linear, const GramCuda& gram)
      : work_(work), gram_(gram), k_(gram.width()), rule_(cuda::rule_of(linear.scheme, linear.clip)) {}

  /// Rows of `weight`, whose errors are in `errors`.
  AwqClip run(float* weight, float* errors, int64_t rows, int64_t group) {
    AwqClip result;
    auto* const products = products_.get<float>(rows * k_);
    multiply(errors, rows, k_, gram_.data(), products, k_, false);
    result.plain_error = total(errors, products, rows);
    auto* const clipped = work_.columns.get<unsigned long long>(1);
    device::fill(clipped, 0, sizeof(*clipped), work_.stream, "clearing");
    for (int64_t begin = 0; begin < k_; begin += group) {
      step({rows, k_, begin, std::min(group, k_ - begin), weight, errors}, weight, products, clipped);
    }
    result.error = total(errors, products, rows);
    result.clipped_blocks = static_cast<int64_t>(work_.fetch(clipped, 1).front());
    return result;
  }

 private:
  void step(const ClipBlock& block, float* weight, float* products, unsigned long long* clipped) {
    const device::Stream& stream = work_.stream;
    const int64_t values = clip_choices * block.rows * block.cols;
    auto* const changes = changes_.get<float>(2 * values);
    auto* const spread = changes + values;
    clip_changes_kernel<<<element_blocks(block.rows * clip_choices * group_lanes), element_threads, 0, stream.get()>>>(
        rule_, block, changes);
    multiply(changes, clip_choices * block.rows, block.cols, gram_.data() + block.begin * k_ + block.begin, spread,
             block.cols, false);
    choose_clips_kernel<<<element_blocks(block.rows * warp), element_threads, 0, stream.get()>>>(
        rule_, block, weight, products, spread, changes, clipped);
    device::check_launch("clips", concat(block.rows, " × ", block.cols));
    multiply(changes, block.rows, block.cols, gram_.data() + block.begin * k_, products, k_, true);
  }

  /// c [rows, n] = a [rows, cols] · b [cols, n], where rows of b are those of the Gram matrix.
  void multiply(const float* a, int64_t rows, int64_t cols, const float* b, float* c, int64_t n, bool add) {
    device::cublas_multiply({.m = rows,
                             .n = n,
                             .k = cols,
                             .a = a,
                             .lda = cols,
                             .b = b,
                             .ldb = k_,
                             .c = c,
                             .ldc = n,
                             .workspace = work_.cublas.data(),
                             .add = add},
                            work_.stream);
  }

  double total(const float* errors, const float* products, int64_t rows) {
    auto* const sums = work_.sums.get<double>(rows);
    row_dots_kernel<<<static_cast<unsigned>(rows), element_threads, 0, work_.stream.get()>>>(errors, products, k_,
                                                                                             sums);
    device::check_launch("output error", concat(rows));
    double sum = 0;
    for (const double row : work_.fetch(sums, rows)) sum += row;
    return sum;
  }

  CudaWork& work_;
  const GramCuda& gram_;
  int64_t k_;
  Rule rule_;
  CudaRoom products_{work_.context}, changes_{work_.context};
};

}  // namespace

bool awq_cuda_accepts(const formats::Scheme& scheme) noexcept {
  return (scheme.family == SchemeFamily::integer && !scheme.act_order) || scheme.family == SchemeFamily::kbit ||
         scheme.family == SchemeFamily::trellis;
}

namespace {

/// The same without a rotation.
void plain_rounding_error(CudaWork& work, const AwqCudaLinear& linear, int64_t k, const float* scales,
                          float* difference) {
  const device::Stream& stream = work.stream;
  if (linear.scheme.family == SchemeFamily::integer) {
    const Matrix matrix{linear.n, k, formats::integer_groups(linear.scheme, k),
                        formats::integer_group_size(linear.scheme, k)};
    integer_error_kernel<<<element_blocks(matrix.n * matrix.groups * group_lanes), element_threads, 0, stream.get()>>>(
        cuda::rule_of(linear.scheme, linear.clip), matrix, linear.weight, scales, difference);
  } else if (linear.scheme.family == SchemeFamily::trellis) {
    normal_error(work, linear, k, scales, difference);
  } else {
    const Matrix matrix{linear.n, k, formats::kbit_blocks(k), formats::kbit_block};
    const int* const exponents = strip_exponents(work, linear, matrix, scales);
    kbit_error_kernel<<<element_blocks(matrix.n * matrix.groups * warp), element_threads, 0, stream.get()>>>(
        table_of(linear.scheme, linear.table), matrix, linear.weight, scales, exponents, difference);
  }
  device::check_launch("rounding errors", concat(linear.n, " × ", k));
}

}  // namespace

void rounding_error_cuda(CudaWork& work, const AwqCudaLinear& linear, int64_t k, const float* scales, float* difference,
                         const RotationCuda* rotation) {
  if (rotation == nullptr) return plain_rounding_error(work, linear, k, scales, difference);
  const int64_t n = linear.n;
  AwqCudaLinear turned = linear;
  turned.weight = work.scaled.get<float>(n * k);
  device::copy(device::Way::on_gpu, turned.weight, linear.weight, static_cast<size_t>(n * k) * sizeof(float),
               work.stream, "copying weights");
  if (scales != nullptr) multiply_columns_cuda(work, turned.weight, n, k, scales);
  rotation->rotate(work, turned.weight, n);
  plain_rounding_error(work, turned, k, nullptr, difference);
  rotation->restore(work, difference, n);
  if (scales != nullptr) divide_columns_cuda(work, difference, n, k, scales);
}

namespace {

/// sums[row] = Σ_c pivots[c]·difference[row][c]², a block per row.
__global__ void __launch_bounds__(element_threads)
    left_by_feedback_kernel(const float* difference, const float* pivots, int64_t k, double* sums) {
  __shared__ double slots[32];
  const float* const row = difference + int64_t{blockIdx.x} * k;
  double sum = 0;
  for (int64_t c = threadIdx.x; c < k; c += element_threads) {
    const double error = row[c];
    sum += static_cast<double>(pivots[c]) * error * error;
  }
  sum = kernels::block_reduce(sum, slots, 0.0, [](double a, double b) { return a + b; });
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

/// What candidates are judged by, as the CPU's.
class Judge {
 public:
  Judge(CudaWork& work, std::span<const AwqCudaLinear> linears, const AwqInput& input, const GramCuda& gram,
        const RotationCuda* rotation)
      : work_(work), linears_(linears), gram_(gram), rotation_(rotation) {
    if (!input.feedback) return;
    const auto& [block, damping, name] = *input.feedback;
    const ErrorFactorCuda factor(work, gram, block, damping, name);
    const auto pivots = pivots_of_channels(factor.order().columns, work.fetch(factor.pivots(), gram.width()));
    pivots_ = device::DeviceBuffer(work.stream, pivots.size() * sizeof(float));
    pivots_.upload(std::as_bytes(std::span(pivots)), work.stream);
    work.stream.synchronize();
  }

  bool by_outputs() const noexcept { return pivots_.size() == 0; }
  /// Of the group under scales, which stand on the CPU.
  double operator()(std::span<const float> scales, bool scaled) const {
    if (by_outputs()) return output_error(scales, scaled);
    double error = 0;
    each(scales, scaled, [&](const float* difference, const AwqCudaLinear& linear) {
      auto* const sums = work_.sums.get<double>(linear.n);
      left_by_feedback_kernel<<<static_cast<unsigned>(linear.n), element_threads, 0, work_.stream.get()>>>(
          difference, pivots_.as<float>(), gram_.width(), sums);
      device::check_launch("error behind feedback", concat(linear.n, " × ", gram_.width()));
      for (const double sum : work_.fetch(sums, linear.n)) error += sum;
    });
    return error;
  }
  double output_error(std::span<const float> scales, bool scaled) const {
    each(scales, scaled, [&](const float* difference, const AwqCudaLinear& linear) {
      gram_.add_square(difference, linear.n, &linear != linears_.data());
    });
    return gram_.square_error();
  }

 private:
  template <class Use>
  void each(std::span<const float> scales, bool scaled, const Use& use) const {
    const int64_t k = gram_.width();
    const float* const device = work_.put(work_.columns, scales.data(), k);
    for (const AwqCudaLinear& linear : linears_) {
      auto* const difference = work_.errors.get<float>(linear.n * k);
      rounding_error_cuda(work_, linear, k, scaled ? device : nullptr, difference, rotation_);
      use(difference, linear);
    }
  }

  CudaWork& work_;
  std::span<const AwqCudaLinear> linears_;
  const GramCuda& gram_;
  const RotationCuda* rotation_;
  device::DeviceBuffer pivots_;
};

}  // namespace

AwqScales search_scales_cuda(CudaWork& work, std::span<const AwqCudaLinear> linears, const AwqInput& input,
                             const GramCuda& gram, double plain_error, const RotationCuda* rotation) {
  ensure(static_cast<int64_t>(input.mean_abs.size()) == gram.width() && !linears.empty(),
         "search_scales_cuda: shapes do not fit");
  const Judge judge(work, linears, input, gram, rotation);
  AwqScales best;
  best.plain_error = plain_error;
  double least = 0;
  for (const AwqPoint point : awq_points(input)) {
    auto scales = awq_scales_at(input, point);
    const bool known = !point.scales() && rotation == nullptr && judge.by_outputs();
    const double error = known ? plain_error : judge(scales, point.scales());
    if (point.scales() && !(error < least)) continue;
    best.scales = std::move(scales);
    best.point = point;
    least = error;
    if (!point.scales() && judge.by_outputs()) best.plain_error = error;
  }
  if (judge.by_outputs()) {
    best.error = least;
  } else {
    best.error = best.point.scales() ? judge.output_error(best.scales, true) : plain_error;
  }
  return best;
}

AwqClip search_clip_cuda(CudaWork& work, const AwqCudaLinear& linear, const GramCuda& gram) {
  ensure(linear.scheme.family == SchemeFamily::integer, "search_clip_cuda: not an integer scheme");
  const int64_t k = gram.width();
  const int64_t group = formats::integer_group_size(linear.scheme, k);
  // The changes of all choices, and what the Gram matrix makes of them, for as many rows as 256 MB hold.
  constexpr int64_t most_values = int64_t{64} << 20;
  const int64_t most = std::clamp<int64_t>(most_values / (2 * clip_choices * group), 1, linear.n);
  auto* const errors = work.errors.get<float>(linear.n * k);
  rounding_error_cuda(work, linear, k, nullptr, errors);
  ClipSearch search(work, linear, gram);
  AwqClip sum;
  for (int64_t first = 0; first < linear.n; first += most) {
    const AwqClip part =
        search.run(linear.weight + first * k, errors + first * k, std::min(most, linear.n - first), group);
    sum.error += part.error;
    sum.plain_error += part.plain_error;
    sum.clipped_blocks += part.clipped_blocks;
  }
  return sum;
}

}  // namespace w4q::quantize
