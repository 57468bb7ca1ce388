#include "decoder_cuda/rotated.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "decoder_cuda/stack.h"
#include "decoder_cuda/stored.h"
#include "formats/rotated.h"
#include "formats/scale_range.h"
#include "kernels/common/table_stretch.h"
#include "kernels/rotated/norms_cuda.h"
#include "kernels/rotated/pack.h"
#include "kernels/rotated/rotate_input.h"
#include "repack/layout_kbit_fragment.h"
#include "repack/map_pass_cuda.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;
using formats::PackedLinear;
using formats::PackedWeight;
using formats::PlaneRole;
using kernels::DevicePass;
using Linears = std::span<const PackedLinear* const>;

/// Canonical, or as it stands in a checkpoint.
bool reads_pass(const PackedWeight& pass) {
  const bool rotated = pass.scheme.family == formats::SchemeFamily::rotated;
  if (!rotated && pass.scheme.family != formats::SchemeFamily::kbit) return false;
  return pass.layout == formats::canonical_layout || pass.layout == (rotated ? "rotated-fragment" : "kbit-fragment");
}

/// Pass `index` of each linear.
std::vector<const PackedWeight*> pass_of(Linears linears, size_t index) {
  std::vector<const PackedWeight*> pass;
  for (const auto* linear : linears) pass.push_back(&linear->passes[index]);
  return pass;
}

bool is_canonical(const PackedWeight& weight) { return weight.layout == formats::canonical_layout; }

/// The largest norm of a pass. Of stored planes it is checked.
float largest_norm(Linears linears, size_t index) {
  float largest = least_scale_max;
  for (const auto* linear : linears) {
    const PackedWeight& pass = linear->passes[index];
    const float own = is_canonical(pass)
                          ? formats::scale_range(pass.plane(PlaneRole::scales), pass.scheme.scale).largest
                          : checked_scale(*linear, index);
    largest = std::max(largest, own);
  }
  return largest;
}

/// Σ norm²: times the square of a level, what the energy of a pass goes by.
double squares(Weights weights) {
  double sum = 0;
  for (const auto* weight : weights) {
    const formats::Plane& norms = weight->plane(PlaneRole::scales);
    std::vector<float> values(static_cast<size_t>(element_count(norms.spec.shape)));
    formats::load_scales(norms, 0, values);
    for (const float value : values) sum += std::pow(double{value}, 2);
  }
  return sum;
}

/// Codes of weights that become one, in the order of kbit-fragment.
DeviceBuffer place_codes(Weights weights, int64_t rows_in_turn, UploadRing& ring) {
  const device::Stream& stream = ring.stream();
  const PackedWeight& first = *weights.front();
  const int64_t n = rows_of(weights);
  const repack::KbitFragmentMap map(n, first.k);
  DeviceBuffer codes(stream.context(),
                     static_cast<size_t>(map.tiles() * map.tile_words(first.scheme.bits)) * sizeof(uint32_t));
  if (!is_canonical(first)) {
    place_plane(weights, PlaneRole::codes, rows_in_turn, codes.data(), ring.scratch(codes.size()), ring);
    return codes;
  }
  DeviceBuffer canonical = stack_on_gpu(lay_out(weights, PlaneRole::codes, rows_in_turn), stream);
  repack::pack_cuda("kbit-fragment", first.scheme, n, first.k, {canonical.as<uint32_t>(), nullptr},
                    {codes.as<uint32_t>(), nullptr}, stream);
  stream.synchronize();
  return codes;
}

/// Their scales · 2^exponent as the norms that kernels read.
DeviceBuffer place_norms(Weights weights, int64_t rows_in_turn, int exponent, UploadRing& ring) {
  const device::Stream& stream = ring.stream();
  const PackedWeight& first = *weights.front();
  const int64_t n = rows_of(weights), groups = formats::rotated_groups(first.scheme, first.k);
  DeviceBuffer norms(stream.context(), static_cast<size_t>(kernels::norm_count(n, groups)) * sizeof(uint16_t));
  kernels::NormSource source{.type = first.scheme.scale, .n = n, .groups = groups, .exponent = exponent};
  const auto convert = [&] { kernels::norms_cuda(source, norms.as<uint16_t>(), stream); };
  if (is_canonical(first)) {
    const DeviceBuffer scales = stack_on_gpu(lay_out(weights, PlaneRole::scales, rows_in_turn), stream);
    source.scales = scales.data();
    convert();
    stream.synchronize();
    return norms;
  }
  const bool rotated = first.layout == "rotated-fragment";
  const size_t bytes = stacked_bytes(weights, PlaneRole::scales);
  std::byte* const scratch = ring.scratch(2 * place_bytes(bytes));
  const bool as_they_are = rotated && first.scheme.scale == formats::ScaleType::f16;
  std::byte* const to = as_they_are ? norms.data() : scratch + place_bytes(bytes);
  place_plane(weights, PlaneRole::scales, rows_in_turn, to, scratch, ring);
  if (as_they_are) return norms;
  source.scales = to;
  source.order = rotated ? kernels::NormOrder::rotated_fragment : kernels::NormOrder::kbit_fragment;
  convert();
  return norms;
}

class Uploader {
 public:
  Uploader(Linears linears, int64_t rows_in_turn, bool offload, UploadRing& ring)
      : linears_(linears), rows_in_turn_(rows_in_turn), offload_(offload), ring_(ring) {}

  CudaRotated run() && {
    for (size_t pass = 0; pass < linears_.front()->passes.size(); ++pass) add(pass);
    return std::move(result_);
  }

 private:
  void add(size_t index) {
    const PackedLinear& linear = *linears_.front();
    const auto weights = pass_of(linears_, index);
    const PackedWeight& first = *weights.front();
    const float largest = largest_norm(linears_, index);
    const int exponent = kernels::norm_exponent(first.scheme.scale, largest);
    DevicePass pass;
    pass.scheme = kernels::rotated_device_scheme(first.scheme);
    pass.layout = "rotated-fragment";
    pass.n = rows_of(weights);
    pass.k = first.k;
    pass.scale_max = std::ldexp(largest, exponent);
    set_levels(kernels::norm_levels(first, exponent), pass);
    pass.rotation = upload_rotation(linear, index, result_.passes, ring_, result_.memory);
    DeviceBuffer codes = place_codes(weights, rows_in_turn_, ring_);
    DeviceBuffer norms = place_norms(weights, rows_in_turn_, exponent, ring_);
    result_.offloaded.emplace_back();
    if (offload_) {
      const double energy = squares(weights) * std::pow(std::ldexp(double{pass.table_max}, exponent), 2);
      if (index == 0) first_energy_ = energy;
      const double error = first_energy_ > 0 ? energy / first_energy_ : 0;
      pass.resident = index == 0;
      if (index > 0) result_.offloaded.back() = move_to_host(codes, norms, error, ring_.stream());
    }
    if (pass.resident) {
      pass.codes = read(std::move(codes)).as<uint32_t>();
      pass.scales = read(std::move(norms)).data();
    }
    result_.passes.push_back(pass);
  }

  void set_levels(const std::vector<float>& levels, DevicePass& pass) {
    if (first_levels_.empty()) first_levels_ = levels;
    pass.codebook = keep(ring_.copy_of(bytes_of(levels))).as<float>();
    pass.table_max = formats::table_max(levels);
    pass.table_stretch = kernels::table_stretch(levels);
    pass.table_over_first = kernels::level_ratio(first_levels_, levels);
  }

  DeviceBuffer& read(DeviceBuffer buffer) {
    result_.bytes += static_cast<int64_t>(buffer.size());
    return keep(std::move(buffer));
  }
  DeviceBuffer& keep(DeviceBuffer buffer) {
    result_.memory.push_back(std::move(buffer));
    return result_.memory.back();
  }

  Linears linears_;
  const int64_t rows_in_turn_;
  const bool offload_;
  UploadRing& ring_;
  double first_energy_ = 0;
  std::vector<float> first_levels_;
  CudaRotated result_;
};

}  // namespace

kernels::DeviceRotation upload_rotation(const PackedLinear& linear, size_t index, std::span<const DevicePass> before,
                                        UploadRing& ring, std::vector<DeviceBuffer>& memory) {
  const formats::InputRotation& own = linear.rotations[index];
  for (size_t earlier = 0; earlier < index; ++earlier) {
    if (linear.rotations[earlier].rotation() == own.rotation()) return before[earlier].rotation;
  }
  kernels::DeviceRotation result{.block = own.rotation().block};
  memory.push_back(ring.copy_of(std::as_bytes(own.factors())));
  result.factors = memory.back().as<float>();
  memory.push_back(ring.copy_of(bytes_of(kernels::rotation_signs(own))));
  result.signs = memory.back().as<uint32_t>();
  return result;
}

bool reads_rotation(const formats::Rotation& rotation) {
  return rotation.block >= 2 && rotation.block <= kernels::rotate_input_max_block;
}

bool reads_rotated(const PackedLinear& linear) {
  if (linear.passes.empty() || linear.rotations.size() != linear.passes.size()) return false;
  for (size_t pass = 0; pass < linear.passes.size(); ++pass) {
    if (!reads_pass(linear.passes[pass])) return false;
    if (!reads_rotation(linear.rotations[pass].rotation())) return false;
  }
  return true;
}

bool can_stack_rotated(const PackedLinear& a, const PackedLinear& b) {
  if (a.passes.size() != b.passes.size() || a.input_scale != b.input_scale) return false;
  for (size_t pass = 0; pass < a.passes.size(); ++pass) {
    if (!(a.rotations[pass].rotation() == b.rotations[pass].rotation())) return false;
    if (!can_stack(a.passes[pass], b.passes[pass])) return false;
  }
  return true;
}

CudaRotated upload_rotated(Linears linears, int64_t rows_in_turn, bool offload, UploadRing& ring) {
  ensure(!linears.empty(), "upload_rotated: no linears");
  return Uploader(linears, rows_in_turn, offload, ring).run();
}

std::shared_ptr<const OffloadedPass> move_to_host(const DeviceBuffer& codes, const DeviceBuffer& norms, double error,
                                                  const device::Stream& stream) {
  auto host = std::make_shared<OffloadedPass>();
  host->error = error;
  host->norms_at = codes.size();
  host->bytes = device::PinnedBuffer(stream.context(), codes.size() + norms.size());
  codes.download(host->bytes.bytes().first(codes.size()), stream);
  norms.download(host->bytes.bytes().subspan(codes.size()), stream);
  stream.synchronize();
  return host;
}

DevicePass at_bytes(DevicePass pass, const OffloadedPass& planes, const std::byte* bytes) {
  pass.codes = reinterpret_cast<const uint32_t*>(bytes);
  pass.scales = bytes + planes.norms_at;
  pass.resident = true;
  return pass;
}

}  // namespace w4q::decoder_cuda
