#include <algorithm>
#include <cmath>
#include <vector>

#include "device/alignment.h"
#include "device/cublas.h"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/kbit/launch.cuh"
#include "kernels/linear/dequantize_gemm.h"
#include "kernels/rotated/dequantize_sum.h"
#include "kernels/rotated/input.cuh"
#include "kernels/rotated/rotate_input.h"
#include "kernels/rotated/variants.h"
#include "kernels/rotated/wgmma.h"
#include "kernels/wgmma/plan.h"
#include "repack/layout_rotated_fragment.h"

namespace w4q::kernels {
namespace {

using rotated::rotate_alike;
using rotated::RotatedLaunch;
using rotated::rotates_inside;
using rotated::Source;
using rotated::Variant;
using Passes = std::span<const RotatedDevicePass>;

void refuse_unless(bool holds, std::string_view what) {
  if (!holds) throw Error(ErrorCode::bad_argument, concat("rotated_linear: ", what));
}

/// Semaphores, and the parts of the scratch: a panel and cuBLAS, up to two rotated inputs, norms spread out to scales.
struct Parts {
  size_t semaphores, panel, input, scales;
  Parts(const device::Properties& gpu, int64_t m, int64_t n, int64_t k)
      : input(device::round_up_256(static_cast<size_t>(padded_rows(m) * padded_inputs(k)) * 2)),
        scales(device::round_up_256(static_cast<size_t>(frame::Map(n, k).tiles() * frame::Map::tile_scales) * 2)) {
    const int64_t rows = m < rotated::least_warpgroup_rows ? m : std::max(m, most_gemv_rows + 1);
    const DividedWorkspace product = divided_workspace({gpu, {}, "kbit-fragment", rows, n, k});
    semaphores = device::round_up_256(product.semaphores) + spare_semaphore_bytes;
    panel = device::round_up_256(product.scratch);
    if (m >= rotated::least_panel_rows) panel = std::max(panel, device::round_up_256(panel_memory_bytes(n, k)));
  }
  static int64_t padded_inputs(int64_t k) { return (k + 63) / 64 * 64; }
  static int64_t padded_rows(int64_t m) {
    const int tile = wgmma::tile_rows(m);
    return (m + tile - 1) / tile * tile;
  }
  size_t scratch() const { return panel + 2 * input + scales; }
};

/// The passes of the launch that begins with pass `first`: two, if the second `joins` it.
template <class Joins>
Passes together(Passes passes, size_t first, const Joins& joins) {
  const bool two = first + 1 < passes.size() && joins(passes[first], passes[first + 1]);
  return passes.subspan(first, two ? 2 : 1);
}

/// The passes of the launch that begins with pass `first`.
Passes launched_at(const device::Properties& gpu, const RotatedLinearArgs& args, size_t first) {
  return together(args.passes, first, [&](const RotatedDevicePass& a, const RotatedDevicePass& b) {
    const RotatedDevicePass both[] = {a, b};
    return rotated::variant_of(gpu, args, both).has_value();
  });
}

std::string_view kernel_of(const device::Properties& gpu, const RotatedLinearArgs& args, Passes passes) {
  const RotatedDevicePass& first = passes.front();
  switch (*rotated::variant_of(gpu, args, passes)) {
    case Variant::gemv:
      return "rotated-gemv";
    case Variant::gemm:
      return "rotated-gemm";
    case Variant::warpgroup:
      return "rotated-wgmma";
    case Variant::dequantize_gemm:
      return "rotated-wide";
    default:
      return rotated::kbit_kernel(gpu, first.bits, args.m, first.n, first.k, args.activation);
  }
}

/// Launches one linear.
class Linear {
 public:
  Linear(const RotatedLinearArgs& args, const device::Stream& stream)
      : args_(args),
        stream_(stream),
        gpu_(stream.context().properties()),
        n_(args.passes.front().n),
        k_(args.passes.front().k),
        parts_(gpu_, args.m, n_, k_),
        input_(static_cast<std::byte*>(args.scratch) + parts_.panel),
        scales_(input_ + 2 * parts_.input) {}

  void run() {
    check_fusion(product(args_.x, args_.ldx, false), "rotated-gemv", rotated_fuses(args_.passes));
    for (size_t at = 0; at < args_.passes.size();) {
      const Passes some = launched_at(gpu_, args_, at);
      run(some, *rotated::variant_of(gpu_, args_, some), at > 0);
      at += some.size();
    }
  }

 private:
  void run(Passes passes, Variant variant, bool add) {
    switch (variant) {
      case Variant::gemv:
        return run_gemv(passes, add);
      case Variant::dequantize_gemm:
        return run_dequantize_gemm(passes, add);
      case Variant::kbit:
        return run_product(passes.front(), add);
      default:
        return run_rows(passes, add, variant);
    }
  }

  void rotate(Passes passes) {
    at_hand_ = nullptr;
    RotateInputArgs rotation{args_.m,
                             k_,
                             passes.front().block,
                             args_.activation,
                             args_.x,
                             args_.ldx,
                             passes.front().factors,
                             args_.input_scale,
                             input_,
                             Parts::padded_inputs(k_)};
    if (!rotate_alike(passes)) {
      rotation.second_factors = passes.back().factors;
      rotation.second_y = input_ + parts_.input;
    }
    rotation.overlap = args_.weights_ready;
    rotate_input(rotation, stream_);
  }

  /// What kernels in the frame of kbit's need, but for weights.
  LinearArgs product(const void* x, int64_t ldx, bool add) const {
    LinearArgs product;
    product.m = args_.m;
    product.activation = args_.activation;
    product.x = x;
    product.ldx = ldx;
    product.weight.n = n_;
    product.weight.k = k_;
    product.bias = add ? nullptr : args_.bias;
    product.residual = add || args_.add ? args_.y : nullptr;
    product.y = args_.y;
    product.ldy = args_.ldy;
    product.fp32 = args_.fp32;
    product.fusion = args_.fusion;
    product.prefetch = args_.prefetch;
    product.workspace = args_.semaphores;
    product.workspace_bytes = args_.semaphore_bytes;
    product.weights_ready = args_.weights_ready;
    return product;
  }

  /// Passes side by side, but for factors.
  RotatedLaunch launch_of(Passes passes, const LinearArgs& args) const {
    const RotatedDevicePass& first = passes.front();
    RotatedLaunch launch{};
    static_cast<frame::Launch&>(launch) = prepare(args);
    launch.pass_tiles = launch.k_tiles;
    launch.k_tiles *= static_cast<int>(passes.size());
    launch.tiles *= static_cast<int>(passes.size());
    launch.sources[0] = rotated::source_of(first, first);
    launch.sources[1] = rotated::source_of(first, passes.back());
    launch.passes = static_cast<int>(passes.size());
    launch.block = static_cast<int>(first.block);
    return launch;
  }

  /// Rotated inputs stand in the scratch.
  void read_scratch(RotatedLaunch& launch, Passes passes) const {
    launch.x = input_;
    launch.ldx = Parts::padded_inputs(k_);
    launch.aligned = true;
    launch.input_stride = rotate_alike(passes) ? 0 : static_cast<int64_t>(parts_.input / 2);
  }
  /// The blocks make their input of x, by rotations of `block`. One more semaphore is used, behind the first `behind`
  /// bytes.
  void make_input(RotatedLaunch& launch, Passes passes, int64_t block, size_t behind) {
    if (block > 1) at_hand_ = nullptr;
    auto* const barrier = static_cast<std::byte*>(args_.semaphores) + device::round_up_256(behind);
    launch.inputs = {static_cast<const __half*>(launch.x),
                     launch.ldx,
                     launch.m,
                     static_cast<int>(k_),
                     launch.aligned,
                     rotate_alike(passes) ? 1 : 2,
                     static_cast<int>(block),
                     {passes.front().signs, passes.back().signs},
                     reinterpret_cast<uint32_t*>(barrier)};
    if (block > 1) launch.result_factor *= rotated::FragmentRotation::scale(static_cast<int>(block));
    read_scratch(launch, passes);
  }

  void run_gemv(Passes passes, bool add) {
    const RotatedDevicePass& first = passes.front();
    const LinearArgs args = product(args_.x, args_.ldx, add);
    RotatedLaunch launch = launch_of(passes, args);
    launch.result_factor = 1 / rotated::table_factor(first);
    launch.rotates = args_.m == 1 && launch.aligned && rotates_inside(args_, first);
    if (launch.rotates) {
      launch.result_factor *= rotated::FragmentRotation::scale(launch.block);
    } else if (args_.m > 1 && rotates_inside(args_, first)) {
      make_input(launch, passes, first.block, gemv_workspace(describe(args, gpu_)));
    } else if (!args_.input_rotated) {
      rotate(passes);
      read_scratch(launch, passes);
    }
    const int second_bits = passes.size() > 1 ? passes.back().bits : 0;
    const auto launch_it = takes_fused_kernel(args) ? rotated::launch_fused_gemv : rotated::launch_gemv;
    launch_it(launch, first.bits, second_bits, blocks_for(stream_, frame::Map(n_, k_).tiles()), stream_,
              shape_of(first));
  }

  /// The factors of weights that are scaled in registers, such that those of all passes stay inside f16.
  void set_factors(RotatedLaunch& launch, Passes passes, LinearArgs args) const {
    args.weight.scheme.scale = formats::ScaleType::f16;
    args.weight.table_stretch = passes.front().level_stretch;  // whose table serves all
    float least = INFINITY;
    for (const RotatedDevicePass& pass : passes) {
      args.weight.table_max = pass.level_max;
      args.weight.scale_max = pass.norm_max;
      set_weight_factors(args, launch);
      least = std::min(least, launch.table_factor);
    }
    launch.table_factor = least;
    launch.result_factor = 1 / least;
  }

  void run_rows(Passes passes, bool add, Variant variant) {
    const RotatedDevicePass& first = passes.front();
    const bool inside = rotates_inside(args_, first);
    const LinearArgs all = inside ? product(args_.x, args_.ldx, add) : rotated_product(first, add);
    in_slices(all, variant == Variant::gemm ? packed_linear_max_rows : most_rows, [&](const LinearArgs& part) {
      RotatedLaunch launch = launch_of(passes, part);
      set_factors(launch, passes, part);
      if (variant == Variant::warpgroup) {
        make_input(launch, passes, inside ? first.block : 1, wgmma::exchange_bytes(gpu_.multiprocessors));
        std::byte* const arranged = inside ? input_ : input_ + parts_.input;
        return rotated::launch_wgmma(launch, first.bits, arranged, stream_, shape_of(first));
      }
      const int blocks = frame::gemm_blocks(launch, blocks_for(stream_, frame::Map(n_, k_).tiles()));
      if (inside) make_input(launch, passes, first.block, gemm_workspace(describe(part, gpu_)));
      rotated::launch_gemm(launch, first.bits, blocks, stream_, shape_of(first));
    });
  }

  /// A product over the input as `pass` wants it.
  LinearArgs rotated_product(const RotatedDevicePass& pass, bool add) {
    if (args_.input_rotated) return product(args_.x, args_.ldx, add);
    if (pass.factors != at_hand_) rotate({&pass, 1});
    at_hand_ = pass.factors;
    return product(input_, Parts::padded_inputs(k_), add);
  }

  void run_dequantize_gemm(Passes passes, bool add) {
    const RotatedDevicePass &first = passes.front(), &second = passes.back();
    const rotated::TwoPasses both{
        {rotated::source_of(first, first), rotated::source_of(first, second)}, {first.bits, second.bits}, k_};
    const auto decode = [&](int64_t at, int64_t count, const DeviceRows& out) {
      rotated::dequantize_sum(both, at, count, out, stream_);
    };
    dequantize_gemm(rotated_product(first, add), args_.scratch, decode, stream_);
  }

  void run_product(const RotatedDevicePass& pass, bool add) {
    LinearArgs all = rotated_product(pass, add);
    spread_norms(pass);
    all.weight.scheme = {formats::SchemeFamily::kbit, pass.bits, 32, formats::ScaleType::f16};
    all.weight.codes = pass.codes;
    all.weight.scales = scales_;
    all.weight.codebook = pass.levels;
    all.weight.table_max = pass.level_max;
    all.weight.table_stretch = pass.level_stretch;
    all.weight.scale_max = pass.norm_max;
    all.weights_ready = false;  // scales have just been written
    if (!pick_kernel(describe(all, gpu_)).keeps_semaphores) {
      all.workspace = args_.scratch;
      all.workspace_bytes = parts_.panel;
    }
    packed_linear(all, stream_);
  }

  void spread_norms(const RotatedDevicePass& pass);

  std::string shape_of(const RotatedDevicePass& pass) const {
    return concat(n_, " × ", k_, ", ", args_.m, " rows, rotated", pass.bits);
  }

  const RotatedLinearArgs& args_;
  const device::Stream& stream_;
  const device::Properties& gpu_;
  const int64_t n_, k_;
  const Parts parts_;
  std::byte* const input_;
  std::byte* const scales_;
  const float* at_hand_ = nullptr;
};

/// scales [tile][lane group][block] ← norms [N-tile][group][lane group], 16 bytes each.
__global__ void spread_norms_kernel(const uint4* norms, uint4* scales, int64_t count, int k_tiles, int groups,
                                    int group_shift) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t tile = i / 16;
  const int64_t n_tile = tile / k_tiles;
  const int column = static_cast<int>(tile - n_tile * k_tiles);
  const int group = min((64 * column + 32 * static_cast<int>(i % 2)) >> group_shift, groups - 1);
  scales[i] = norms[repack::norm_eight(n_tile, group, groups, static_cast<int>(i % 16 / 2))];
}

void Linear::spread_norms(const RotatedDevicePass& pass) {
  const frame::Map map(n_, k_);
  const Source source = rotated::source_of(pass, pass);
  const int64_t count = map.tiles() * 16;
  const LaunchShape shape{dim3(static_cast<unsigned>((count + 255) / 256)), 256, 0, false};
  launch<spread_norms_kernel>(shape, stream_, "spread_norms", source.norms, reinterpret_cast<uint4*>(scales_), count,
                              static_cast<int>(map.col_groups), source.groups, source.group_shift);
}

void check(const RotatedLinearArgs& args, const device::Properties& gpu) {
  refuse_unless(!args.passes.empty(), "no pass");
  const int64_t n = args.passes.front().n, k = args.passes.front().k;
  refuse_unless(n >= 1 && k >= 1 && n <= most_rows && k <= most_rows && args.m >= 1 && args.m <= most_rows,
                "sizes out of range");
  refuse_unless(args.ldx >= k && args.ldy >= n, "rows overlap");
  refuse_unless(args.x != nullptr && args.y != nullptr, "a pointer is null");
  refuse_unless(!args.fp32 || aligned(args.y, 4), "f32 is aligned to 4 bytes");
  for (const RotatedDevicePass& pass : args.passes) {
    refuse_unless(!args.input_rotated || pass.factors == args.passes.front().factors,
                  "an input rotated before belongs to one rotation");
    refuse_unless(pass.n == n && pass.k == k, "passes of different sizes");
    refuse_unless(pass.bits >= 2 && pass.bits <= 5, "2 to 5 bits");
    refuse_unless(pass.group >= k || (pass.group >= 32 && std::has_single_bit(static_cast<uint64_t>(pass.group))),
                  "a group is 32 · 2^i inputs, or all");
    refuse_unless(pass.codes != nullptr && pass.norms != nullptr && pass.levels != nullptr && pass.factors != nullptr &&
                      pass.signs != nullptr,
                  "a pass has a null pointer");
    refuse_unless(aligned(pass.codes, 16) && aligned(pass.norms, 16), "codes and norms are aligned to 16 bytes");
    refuse_unless(
        std::isfinite(pass.level_max) && pass.level_max > 0 && std::isfinite(pass.norm_max) && pass.norm_max > 0,
        "largest level and norm must be positive");
    refuse_unless(pass.level_stretch >= 1 && pass.level_stretch < 2, "a stretch is from 1 to 2");
  }
  const Parts parts(gpu, args.m, n, k);
  refuse_unless(args.semaphores != nullptr && args.scratch != nullptr && aligned(args.semaphores, 256) &&
                    aligned(args.scratch, 256) && args.semaphore_bytes >= parts.semaphores &&
                    args.scratch_bytes >= parts.scratch(),
                "the workspace is too small or misaligned");
}

}  // namespace

RotatedWorkspace rotated_linear_workspace(const device::Properties& gpu, int64_t m, int64_t n, int64_t k) {
  const Parts parts(gpu, m, n, k);
  return {parts.semaphores, parts.scratch()};
}

bool decoded_together(const device::Properties& gpu, int64_t rows, const RotatedDevicePass& first,
                      const RotatedDevicePass& second) {
  if (rows < rotated::least_panel_rows || first.factors != second.factors || !rotated::fit_together(first, second))
    return false;
  const bool warpgroups = rows < rotated::least_panel_rows_beside_warpgroups &&
                          rotated::rows_fit_together(first, second) &&
                          rotated::variant_of_many(gpu, rows, first.n, first.k) == Variant::warpgroup;
  return !warpgroups && device::have_cublas();
}

int rotated_linear_launches(std::span<const RotatedDevicePass> passes) {
  int launches = 0;
  for (size_t at = 0; at < passes.size(); at += together(passes, at, rotated::fit_together).size()) ++launches;
  return launches;
}

std::vector<std::string_view> rotated_kernels(const device::Properties& gpu, const RotatedLinearArgs& args) {
  std::vector<std::string_view> names;
  for (size_t at = 0; at < args.passes.size();) {
    const Passes some = launched_at(gpu, args, at);
    names.push_back(kernel_of(gpu, args, some));
    at += some.size();
  }
  return names;
}

bool rotated_fuses(Passes passes) { return rotated_linear_launches(passes) == 1; }

void rotated_linear(const RotatedLinearArgs& args, const device::Stream& stream) {
  check(args, stream.context().properties());
  Linear(args, stream).run();
}

}  // namespace w4q::kernels
