#include "decoder_cuda/stored.h"

#include <algorithm>
#include <array>

#include "checkpoint/packed_checkpoint.h"
#include "core/error.h"
#include "decoder_cuda/rotated.h"
#include "decoder_cuda/trellis.h"
#include "device/copy.h"
#include "formats/codebook.h"
#include "formats/scheme_registry.h"
#include "kernels/frame/linear_fusion.h"
#include "kernels/small_float/tile_scales.h"
#include "repack/layout_registry.h"
#include "repack/turn_rows_cuda.h"

namespace w4q::decoder_cuda {
namespace {

using formats::PackedLinear;
using formats::PackedWeight;
using formats::PlaneRole;

static_assert(repack::turn_rows == kernels::gate_up_turn);

/// A layout whose planes take their places in a stack as they are. In whole tiles of 64 × 64 none of them has padding.
struct StackedLayout {
  std::string_view name;
  bool outputs_first;  ///< else they go along k first, and cut all rows across
};
constexpr StackedLayout stacked_layouts[] = {{"kbit-fragment", true},
                                             {"rotated-fragment", true},
                                             {"float-fragment", true},
                                             {"marlin", false},
                                             {"interleaved", false}};

const StackedLayout* stacked_layout(std::string_view name) {
  const auto* const found = std::ranges::find(stacked_layouts, name, &StackedLayout::name);
  return found == std::end(stacked_layouts) ? nullptr : found;
}

/// How often the rows of all weights follow one another in a plane.
int64_t row_runs(const PackedWeight& weight, PlaneRole role) {
  return stacked_layout(weight.layout)->outputs_first ? 1 : weight.plane(role).spec.shape.front();
}

/// One after the other.
void copy_all(Weights weights, PlaneRole role, std::byte* to, UploadRing& ring) {
  for (const auto* weight : weights) {
    const auto bytes = weight->plane(role).bytes.bytes();
    ring.copy(to, bytes);
    to += bytes.size();
  }
}

void set_table(const PackedWeight& weight, CudaPacked& packed, UploadRing& ring) {
  const auto& table = weight.plane(PlaneRole::codebook).bytes;
  describe_table(table.as<float>(), packed.weight);
  packed.memory.push_back(ring.copy_of(table.bytes()));
  packed.weight.codebook = packed.memory.back().as<float>();
}

/// What stands beside codes in the places of their layout.
bool has_placed_scales(const formats::Scheme& scheme) {
  return scheme.family != formats::SchemeFamily::small_float || scheme.block == 16 || scheme.block == 32;
}

/// Codes, scales and zero points in one piece of GPU memory.
void place_planes(Weights weights, int64_t rows_in_turn, CudaPacked& packed, UploadRing& ring) {
  auto& pass = packed.weight;
  std::vector<PlaneRole> roles = {PlaneRole::codes};
  if (has_placed_scales(pass.scheme)) roles.push_back(PlaneRole::scales);
  if (pass.scheme.asymmetric) roles.push_back(PlaneRole::zeros);
  size_t size = 0, largest = 0;
  for (const PlaneRole role : roles) {
    size += place_bytes(stacked_bytes(weights, role));
    largest = std::max(largest, stacked_bytes(weights, role));
    packed.bytes += static_cast<int64_t>(stacked_bytes(weights, role));
  }
  packed.memory.emplace_back(ring.stream().context(), size);
  std::byte* const staging = weights.size() > 1 ? ring.scratch(largest) : nullptr;
  std::array<std::byte*, 3> at = {};
  std::byte* next = packed.memory.back().data();
  for (size_t i = 0; i < roles.size(); ++i) {
    at[i] = next;
    place_plane(weights, roles[i], rows_in_turn, at[i], staging, ring);
    next += place_bytes(stacked_bytes(weights, roles[i]));
  }
  pass.codes = reinterpret_cast<const uint32_t*>(at[0]);
  pass.scales = at[1];
  pass.zeros = reinterpret_cast<const uint32_t*>(at[2]);
}

/// The table of small floats, and their factors, of FP8 those of tiles too.
void set_floats(Weights weights, int64_t rows_in_turn, CudaPacked& packed, UploadRing& ring) {
  auto& pass = packed.weight;
  const kernels::FloatScales scales = kernels::float_scales(weights, rows_in_turn);
  const auto keep = [&](const std::vector<float>& values) {
    packed.bytes += static_cast<int64_t>(values.size() * sizeof(float));
    packed.memory.push_back(ring.copy_of(bytes_of(values)));
    return packed.memory.back().as<float>();
  };
  if (!scales.tile_pairs.empty()) pass.scales = keep(scales.tile_pairs);
  if (!scales.outputs.empty()) pass.output_factors = keep(scales.outputs);
  pass.scale_max = std::max(least_scale_max, scales.largest);
  const auto& table = weights.front()->plane(PlaneRole::codebook).bytes;
  pass.table_max = formats::table_max(table.as<float>());
  packed.memory.push_back(ring.copy_of(table.bytes()));
  pass.codebook = packed.memory.back().as<float>();
}

}  // namespace

bool goes_as_stored(const device::Properties& gpu, const PackedLinear& linear) {
  if (reads_trellis(linear)) return trellis_goes_as_stored(linear);
  const auto stands_ready = [](const PackedWeight& pass) {
    return stacked_layout(pass.layout) != nullptr && pass.n % 64 == 0 && pass.k % 64 == 0;
  };
  if (!std::ranges::all_of(linear.passes, stands_ready)) return false;
  if (!linear.rotations.empty()) return reads_rotated(linear);
  return linear.passes.size() == 1 && !kernel_layout(gpu, linear.passes.front()).empty();
}

float checked_scale(const PackedLinear& linear, size_t pass) {
  const PackedWeight& weight = linear.passes[pass];
  const auto largest = formats::scheme_row(weight.scheme.family).largest_scale(weight, linear.name);
  if (largest) return *largest;
  checkpoint::to_canonical(linear);  // says what is wrong, and where
  throw Error(ErrorCode::internal, linear.name + ": stored planes are unsound, canonical ones are not");
}

size_t stacked_bytes(Weights weights, PlaneRole role) {
  size_t bytes = 0;
  for (const auto* weight : weights) bytes += weight->plane(role).bytes.size();
  return bytes;
}

void place_plane(Weights weights, PlaneRole role, int64_t rows_in_turn, std::byte* to, std::byte* staging,
                 UploadRing& ring) {
  const PackedWeight& first = *weights.front();
  const int64_t runs = row_runs(first, role);
  if (weights.size() == 1 || (rows_in_turn == 0 && runs == 1)) return copy_all(weights, role, to, ring);
  copy_all(weights, role, staging, ring);
  if (rows_in_turn > 0) {
    ensure(weights.size() == 2 && rows_in_turn == repack::turn_rows, "place_plane: rows do not take such turns");
    const std::byte* const second = staging + first.plane(role).bytes.size();
    return repack::turn_rows_cuda(first.layout, first.scheme, role, first.n, first.k, {staging, second, to},
                                  ring.stream());
  }
  const size_t pitch = stacked_bytes(weights, role) / static_cast<size_t>(runs);
  for (const auto* weight : weights) {
    const size_t run = weight->plane(role).bytes.size() / static_cast<size_t>(runs);
    device::copy_rows(device::Way::on_gpu, {to, pitch}, {staging, run}, run, static_cast<size_t>(runs), ring.stream(),
                      "stacking weights");
    to += run;
    staging += weight->plane(role).bytes.size();
  }
}

CudaPacked upload_stored(std::span<const PackedLinear* const> linears, int64_t rows_in_turn, UploadRing& ring) {
  std::vector<const PackedWeight*> weights;
  float largest = least_scale_max;
  for (const auto* linear : linears) {
    weights.push_back(&linear->passes.front());
    largest = std::max(largest, checked_scale(*linear, 0));
  }
  const PackedWeight& first = *weights.front();
  CudaPacked packed;
  packed.weight.scheme = first.scheme;
  packed.weight.layout = repack::layout_row(first.layout).name;
  packed.weight.n = rows_of(weights);
  packed.weight.k = first.k;
  packed.weight.scale_max = largest;
  place_planes(weights, rows_in_turn, packed, ring);
  if (first.scheme.family == formats::SchemeFamily::kbit) set_table(first, packed, ring);
  if (first.scheme.family == formats::SchemeFamily::small_float) set_floats(weights, rows_in_turn, packed, ring);
  if (first.scheme.act_order) {
    packed.memory.push_back(ring.copy_of(bytes_of(sorted_inputs(first))));
    packed.weight.input_order = packed.memory.back().as<int32_t>();
  }
  return packed;
}

}  // namespace w4q::decoder_cuda
