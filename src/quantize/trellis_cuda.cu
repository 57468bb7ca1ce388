#include "quantize/trellis_cuda.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "core/interrupt.h"
#include "core/text.h"
#include "core/with_bits.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "device/launch.h"
#include "device/ranked_stream.h"
#include "formats/scale_codec.h"
#include "quantize/feedback_steps.cuh"
#include "quantize/row_norms.cuh"
#include "quantize/trellis.h"
#include "quantize/trellis_rings.cuh"
#include "quantize/weight_cuda.h"

namespace w4q::quantize {
namespace {

using cuda::TrellisJob;
using cuda::TrellisStrip;
using device::element_blocks;
using device::element_threads;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::trellis_rows;

constexpr int warp = 32;
/// Of weights that are widened at a time, in bytes: a third of a second of an RTX 4090 at most.
constexpr int64_t chunk_bytes = int64_t{64} << 20;

__global__ void __launch_bounds__(element_threads)
    sizes_kernel(const float* weight, int64_t n, int64_t k, double* sizes) {
  const int64_t row = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / warp;
  if (row >= n) return;
  const double size = cuda::warp_norm([&](int64_t i) { return weight[row * k + i]; }, k, 1);
  if (threadIdx.x % warp == 0) sizes[row] = size;
}

/// Canonical planes in GPU memory.
struct Planes {
  int64_t n, k;
  int bits, window;
  float unit;
  const uint32_t* codes;
  const float* scales;  ///< [n], decoded; null: not needed

  /// level · u of the weight at `row`, `col`.
  __device__ float level(int64_t row, int64_t col) const {
    const int words = formats::trellis_ring_words(bits);
    const uint32_t* const ring = codes + (row / trellis_rows * k + col) * words;
    const int last = (static_cast<int>(row % trellis_rows) + 1) * bits - 1, word = last / 32;
    const uint64_t pair = static_cast<uint64_t>(ring[(word == 0 ? words : word) - 1]) << 32 | ring[word];
    const auto state = static_cast<uint32_t>(pair >> (31 - last % 32)) & ((1u << window) - 1);
    return cuda::level_of(state) * unit;
  }
};

__global__ void __launch_bounds__(element_threads) levels_kernel(Planes planes, float* levels) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at < planes.n * planes.k) levels[at] = planes.level(at / planes.k, at % planes.k);
}

__global__ void __launch_bounds__(element_threads)
    difference_kernel(Planes planes, const float* original, const float* rows, float* difference) {
  const int64_t at = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  if (at >= planes.n * planes.k) return;
  const int64_t row = at / planes.k;
  const float value = planes.level(row, at % planes.k) * planes.scales[row];
  difference[at] = original[at] - value * (rows == nullptr ? 1.0f : rows[row]);
}

/// sums[row] = Σ levels · products, Σ weights · products; a warp has a row.
__global__ void __launch_bounds__(element_threads)
    fit_kernel(const float* levels, const float* weight, const float* products, int64_t n, int64_t k, double2* sums) {
  const int64_t row = (int64_t{blockIdx.x} * element_threads + threadIdx.x) / warp;
  if (row >= n) return;
  double2 sum{0, 0};
  for (int64_t at = row * k + threadIdx.x % warp; at < (row + 1) * k; at += warp) {
    sum.x += static_cast<double>(levels[at]) * static_cast<double>(products[at]);
    sum.y += static_cast<double>(weight[at]) * static_cast<double>(products[at]);
  }
  for (int step = warp / 2; step > 0; step /= 2) {
    sum.x += __shfl_xor_sync(~0u, sum.x, step);
    sum.y += __shfl_xor_sync(~0u, sum.y, step);
  }
  if (threadIdx.x % warp == 0) sums[row] = sum;
}

float unit_of(const PackedWeight& packed) { return packed.plane(PlaneRole::codebook).bytes.as<const float>()[0]; }

/// Codes, and decoded scales, of a weight that stands.
class PlanesCuda {
 public:
  PlanesCuda(CudaWork& work, const PackedWeight& packed)
      : codes_(device::DeviceBuffer::copy_of(packed.plane(PlaneRole::codes).bytes.bytes(), work.stream)),
        values_{packed.n, packed.k, packed.scheme.bits, packed.scheme.window, unit_of(packed), nullptr, nullptr} {
    std::vector<float> scales(static_cast<size_t>(packed.n));
    formats::load_scales(packed.plane(PlaneRole::scales), 0, scales);
    values_.scales = work.put(work.columns, scales.data(), packed.n);
    values_.codes = codes_.as<uint32_t>();
  }
  const Planes& operator*() const noexcept { return values_; }

 private:
  device::DeviceBuffer codes_;
  Planes values_;
};

/// Rings of weights that stand one below the other.
class Rings {
 public:
  Rings(CudaWork& work, std::span<const TrellisCudaWeight> weights)
      : work_(work), weights_(weights), scheme_(weights.front().packed->scheme), k_(weights.front().packed->k) {
    std::vector<TrellisStrip> strips;
    std::vector<float> steps;
    for (const auto& weight : weights) {
      const auto first = static_cast<int64_t>(steps.size()), n = weight.packed->n;
      for (int64_t row = 0; row < n; row += trellis_rows) {
        strips.push_back({first + row, static_cast<int>(std::min<int64_t>(trellis_rows, n - row))});
      }
      for (int64_t row = 0; row < n; ++row) steps.push_back(formats::trellis_load_scale(*weight.packed, row).step);
    }
    job_.window = scheme_.window;
    job_.strips = static_cast<int64_t>(strips.size());
    job_.k = k_;
    strips_ = device::DeviceBuffer::copy_of(std::as_bytes(std::span(strips)), work.stream);
    sizes_ = device::DeviceBuffer::copy_of(bytes_of(steps), work.stream);
    codes_ = device::DeviceBuffer(work.context, static_cast<size_t>(job_.strips * k_) * ring_bytes());
    work.stream.synchronize();  // the host's go
    job_.strip = strips_.as<TrellisStrip>();
    job_.steps = sizes_.as<float>();
    job_.codes = codes_.as<uint32_t>();
  }

  int64_t strips() const noexcept { return job_.strips; }
  int64_t rows() const noexcept { return static_cast<int64_t>(sizes_.size() / sizeof(float)); }

  /// Each column by itself.
  void round(const float* targets) {
    job_.targets = targets;
    job_.end = k_;
    launch();
  }

  /// Whether blocks of a cluster can have a ring: at the widest window, where the GPU and the code for it have them.
  bool clusters() const {
    if (cuda::search_tiles(scheme_.window) == 1 || work_.context.properties().sm < 90) return false;
    const auto* const kernel = reinterpret_cast<const void*>(cuda::trellis_clusters_kernel<3, 2>);
    return work_.context.prepare(kernel, {.overlap = true});
  }

  /// How much faster two blocks have a ring than one: measured on an H200.
  double speed_of_pairs() const noexcept { return scheme_.bits == 2 ? 1.4 : scheme_.bits == 3 ? 1.07 : 1.2; }

  /// From now on columns are rounded in the factor's order, block by block: step(). `blocks` of a cluster have a ring.
  void begin(const ErrorFactorCuda& factor, int blocks) {
    blocks_ = blocks;
    steps_.emplace(work_, rows(), factor, cuda::rings_columns);
    int64_t first = 0;
    for (const auto& weight : weights_) {
      steps_->take(weight.values, first, weight.packed->n);
      first += weight.packed->n;
    }
    job_.targets = steps_->targets();
    job_.weights = steps_->weights();
    job_.errors = steps_->errors();
    job_.columns = factor.columns();
    job_.coupling = factor.coupling();
    starts_ = factor.order().starts;
  }
  /// The share of the columns that is done or queued.
  double progress() const noexcept { return static_cast<double>(job_.end) / static_cast<double>(k_); }
  void step() {
    job_.begin = starts_[block_];
    job_.end = starts_[++block_];
    launch();
    steps_->move_rest(job_.begin, job_.end);
  }

  /// Copies codes to the planes.
  void take() const {
    size_t first = 0;
    for (const auto& weight : weights_) {
      Buffer& codes = weight.packed->plane(PlaneRole::codes).bytes;
      device::copy(device::Way::from_gpu, codes.data(), codes_.data() + first, codes.size(), work_.stream,
                   "copying codes from the GPU");
      first += codes.size();
    }
    work_.stream.synchronize();
  }

 private:
  size_t ring_bytes() const {
    return static_cast<size_t>(formats::trellis_ring_words(scheme_.bits)) * sizeof(uint32_t);
  }

  void launch() {
    with_bits<2, 3, 4>(scheme_.bits, [&]<int bits>() {
      const int threads = cuda::search_block(scheme_.window);
      constexpr int tiles = cuda::most_tiles;
      if (cuda::search_tiles(scheme_.window) == 1) {
        return launch_as<bits, 1>(cuda::trellis_rings_kernel<bits, 1>, threads);
      }
      if (blocks_ == 1) return launch_as<bits, tiles>(cuda::trellis_rings_kernel<bits, tiles>, threads);
      launch_as<bits, 1>(cuda::trellis_clusters_kernel<bits, 2>, cuda::cluster_threads(2));
    });
  }

  template <int bits, int tiles, class Kernel>
  void launch_as(Kernel kernel, int threads) {
    const size_t shared = cuda::rings_shared_bytes(bits, scheme_.window, tiles);
    const auto* const address = reinterpret_cast<const void*>(kernel);
    work_.context.prepare(address, {.shared_bytes = static_cast<int>(shared)});
    // As many as registers suffice for; with feedback all, so that what goes on beside them finds its place.
    const int64_t most =
        int64_t{work_.context.properties().multiprocessors} * (blocks_ == 1 ? cuda::search_threads / threads : 1);
    const int64_t rings = std::min(job_.tasks(), (job_.coupling == nullptr ? 1 : 4) * most);
    const size_t rows = static_cast<size_t>(cuda::kept_rows(bits, scheme_.window)) << (scheme_.window - bits);
    const size_t bytes = static_cast<size_t>(rings) * rows * sizeof(float);
    if (kept_.size() < bytes) kept_ = device::DeviceBuffer(work_.context, bytes);
    job_.kept = kept_.as<float>();
    void* parameters[] = {&job_};
    device::launch(address,
                   {.grid = dim3(static_cast<unsigned>(rings * blocks_)), .threads = threads, .shared_bytes = shared},
                   parameters, work_.stream, "trellis rings");
  }

  CudaWork& work_;
  std::span<const TrellisCudaWeight> weights_;
  Scheme scheme_;
  int64_t k_;
  TrellisJob job_;
  device::DeviceBuffer strips_, sizes_, codes_, kept_;
  int blocks_ = 1;  ///< of a cluster that has a ring
  // With feedback:
  std::optional<cuda::FeedbackSteps> steps_;
  std::span<const int64_t> starts_;
  size_t block_ = 0;
};

/// Whether two blocks of a cluster should have a ring together, which ends sooner and takes more of the GPU: where a
/// column after the other takes longer than all there is to do, `rings` for each multiprocessor, and all strips still
/// find their place at once.
bool pays_in_pairs(device::Context& gpu, const Rings& own, int64_t columns, double rings) {
  const int multiprocessors = gpu.properties().multiprocessors;
  if (2 * own.strips() > multiprocessors || !own.clusters()) return false;
  const double speed = own.speed_of_pairs(), each = static_cast<double>(columns);
  const double mine = each * static_cast<double>(own.strips()) / multiprocessors;
  return std::max(each / speed, rings + mine * (2 / speed - 1)) < std::max(each, rings);
}

/// Calls body(weights on the GPU, first row, rows) for whole strips of a weight in host memory.
template <class Body>
void each_chunk(CudaWork& work, const TensorView& weight, const Body& body) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  const int64_t strips = std::max<int64_t>(chunk_bytes / (trellis_rows * k * int64_t{sizeof(float)}), 1);
  for (int64_t first = 0; first < n; first += strips * trellis_rows) {
    check_interrupt();
    const int64_t rows = std::min(strips * trellis_rows, n - first);
    const auto values = upload_rows(work, weight, first, rows);
    body(values.as<float>(), first, rows);
  }
}

/// Rows of a weight with their scales; codes still zero.
PackedWeight rows_of(const PackedWeight& packed, int64_t first, int64_t rows) {
  PackedWeight some = formats::allocate_canonical(packed.scheme, rows, packed.k);
  some.plane(PlaneRole::codebook).bytes.as<float>()[0] = unit_of(packed);
  const auto scales = packed.plane(PlaneRole::scales).bytes.as<const uint16_t>();
  std::ranges::copy(scales.subspan(static_cast<size_t>(first), static_cast<size_t>(rows)),
                    some.plane(PlaneRole::scales).bytes.as<uint16_t>().begin());
  return some;
}

/// The scale with the least error, given Σ q·p, Σ w·p and the one that stands: as calibrate_norms().
bool fit_scale(PackedWeight& packed, int64_t row, double2 sums, double damping) {
  const auto at = static_cast<size_t>(row);
  const double scale = formats::load_scale(packed.plane(PlaneRole::scales), at);
  const double slope = sums.y - sums.x * scale, curvature = sums.x * (1 + damping);
  const double wanted = scale + slope / (curvature > 0 ? curvature : 1);
  if (!(wanted > 0 && scale > 0)) return false;
  const auto stored = formats::trellis_store_scale(wanted, unit_of(packed));
  const double change = double{stored.value} - scale;
  if (!(change * sums.x * change - 2 * change * slope < 0)) return false;
  formats::put_scale(packed.plane(PlaneRole::scales), at, stored.bits);
  return true;
}

}  // namespace

std::vector<double> trellis_sizes_cuda(CudaWork& work, const float* weight, int64_t n, int64_t k) {
  auto* const sizes = work.sums.get<double>(n);
  sizes_kernel<<<element_blocks(n * warp), element_threads, 0, work.stream.get()>>>(weight, n, k, sizes);
  device::check_launch("sizes of rows", concat(n, " × ", k));
  return work.fetch(sizes, n);
}

void trellis_codes_cuda(CudaWork& work, const TrellisCudaWeight& weight) {
  Rings rings(work, {&weight, 1});
  rings.round(weight.values);
  rings.take();
}

void trellis_feedback_cuda(CudaWork& work, std::span<const TrellisCudaInput> inputs) {
  work.stream.synchronize();  // what the others' streams read
  struct Side {
    Side(device::Context& gpu, int rank) : stream(gpu, rank), work(stream.view()) {}
    device::RankedStream stream;
    CudaWork work;
    std::optional<Rings> rings;
  };
  std::vector<std::unique_ptr<Side>> sides;
  double rings = 0;  // for each multiprocessor
  for (const auto& input : inputs) {
    // Those with more columns take the longest whatever else there is to do.
    const auto wider =
        std::ranges::count_if(inputs, [&](const auto& other) { return other.factor->width() > input.factor->width(); });
    Side& side = *sides.emplace_back(std::make_unique<Side>(work.context, static_cast<int>(wider)));
    side.rings.emplace(side.work, input.weights);
    rings +=
        static_cast<double>(side.rings->strips() * input.factor->width()) / work.context.properties().multiprocessors;
  }
  for (size_t i = 0; i < sides.size(); ++i) {
    const ErrorFactorCuda& factor = *inputs[i].factor;
    sides[i]->rings->begin(factor, pays_in_pairs(work.context, *sides[i]->rings, factor.width(), rings) ? 2 : 1);
  }
  const auto behind = [](const auto& a, const auto& b) { return a->rings->progress() < b->rings->progress(); };
  for (auto next = sides.begin(); (*next)->rings->progress() < 1; next = std::ranges::min_element(sides, behind)) {
    check_interrupt();
    (*next)->rings->step();
  }
  for (const auto& side : sides) side->rings->take();
}

int64_t trellis_feedback_bytes(int64_t rows, int64_t k) noexcept {
  constexpr int64_t weights_and_targets = 2, search = int64_t{2} << 20;  // of a strip, at two bits
  const int64_t each = trellis_rows * k * (weights_and_targets * int64_t{sizeof(float)} + 1) + search;
  return formats::trellis_strips(rows) * each + static_cast<int64_t>(device::cublas_workspace_bytes);
}

int64_t fit_trellis_scales_cuda(CudaWork& work, const float* weight, const GramCuda& gram, double damping,
                                PackedWeight& packed) {
  const int64_t n = packed.n, k = packed.k;
  auto* const levels = work.errors.get<float>(n * k);
  auto* const products = work.scaled.get<float>(n * k);
  const PlanesCuda planes(work, packed);
  levels_kernel<<<element_blocks(n * k), element_threads, 0, work.stream.get()>>>(*planes, levels);
  device::cublas_multiply({.m = n,
                           .n = k,
                           .k = k,
                           .a = levels,
                           .lda = k,
                           .b = gram.data(),
                           .ldb = k,
                           .c = products,
                           .ldc = k,
                           .workspace = work.cublas.data()},
                          work.stream);
  auto* const device = work.sums.get<double2>(n);
  fit_kernel<<<element_blocks(n * warp), element_threads, 0, work.stream.get()>>>(levels, weight, products, n, k,
                                                                                  device);
  device::check_launch("scales of rows", concat(n, " × ", k));
  const auto sums = work.fetch(device, n);
  int64_t changed = 0;
  for (int64_t row = 0; row < n; ++row) changed += fit_scale(packed, row, sums[static_cast<size_t>(row)], damping);
  return changed;
}

void trellis_difference_cuda(CudaWork& work, const PackedWeight& packed, const float* original, const float* rows,
                             float* difference) {
  const PlanesCuda planes(work, packed);
  difference_kernel<<<element_blocks(packed.n * packed.k), element_threads, 0, work.stream.get()>>>(*planes, original,
                                                                                                    rows, difference);
  device::check_launch("trellis errors", concat(packed.n, " × ", packed.k));
  work.stream.synchronize();  // the planes go
}

QuantizeResult quantize_trellis_cuda(const TensorView& weight, const Scheme& scheme, device::Context& gpu) {
  CudaWork work(gpu);
  const int64_t n = weight.shape[0], k = weight.shape[1];
  std::vector<double> sizes;
  each_chunk(work, weight, [&](const float* values, int64_t, int64_t rows) {
    const auto some = trellis_sizes_cuda(work, values, rows, k);
    sizes.insert(sizes.end(), some.begin(), some.end());
  });
  QuantizeResult result{allocate_trellis(scheme, n, k, sizes), {}};
  std::byte* codes = result.weight.plane(PlaneRole::codes).bytes.data();
  each_chunk(work, weight, [&](const float* values, int64_t first, int64_t rows) {
    PackedWeight some = rows_of(result.weight, first, rows);
    trellis_codes_cuda(work, {values, &some});
    const auto found = some.plane(PlaneRole::codes).bytes.bytes();
    codes = std::ranges::copy(found, codes).out;
  });
  result.stats = trellis_stats(result.weight);
  return result;
}

}  // namespace w4q::quantize
