#include "decoder_cuda/rotated.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/float_formats.h"
#include "decoder_cuda/stack.h"
#include "formats/kbit.h"
#include "formats/rotated.h"
#include "kernels/common/table_stretch.h"
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

bool reads_rotation(const formats::Rotation& rotation) {
  return rotation.block >= 2 && rotation.block <= kernels::rotate_input_max_block;
}

bool reads_pass(const PackedWeight& pass) {
  if (pass.layout != formats::canonical_layout) return false;
  return pass.scheme.family == formats::SchemeFamily::rotated || pass.scheme.family == formats::SchemeFamily::kbit;
}

/// Pass `index` of each linear.
std::vector<const PackedWeight*> pass_of(Linears linears, size_t index) {
  std::vector<const PackedWeight*> pass;
  for (const auto* linear : linears) pass.push_back(&linear->passes[index]);
  return pass;
}

/// Codes of weights that become one, in the order of kbit-fragment.
DeviceBuffer upload_codes(Weights weights, int64_t rows_in_turn, const device::Stream& stream) {
  const int64_t n = rows_of(weights), k = weights.front()->k;
  const formats::Scheme scheme{formats::SchemeFamily::kbit, weights.front()->scheme.bits, formats::kbit_block,
                               formats::ScaleType::e4m4};
  DeviceBuffer canonical = stack_on_gpu(lay_out(weights, PlaneRole::codes, rows_in_turn), stream);
  // The pass wants scales too, and they go where they came from: nowhere.
  const repack::KbitFragmentMap map(n, k);
  DeviceBuffer no_scales(stream.context(), static_cast<size_t>(n * formats::kbit_blocks(k)));
  DeviceBuffer no_packed_scales(stream.context(), static_cast<size_t>(map.tiles() * map.tile_scales));
  DeviceBuffer codes(stream.context(),
                     static_cast<size_t>(map.tiles() * map.tile_words(scheme.bits)) * sizeof(uint32_t));
  repack::pack_cuda("kbit-fragment", scheme, n, k, {canonical.as<uint32_t>(), no_scales.data()},
                    {codes.as<uint32_t>(), no_packed_scales.data()}, stream);
  stream.synchronize();
  return codes;
}

/// Their norms as one weight without codes.
PackedWeight stacked_norms(Weights weights, int64_t rows_in_turn) {
  const PackedWeight& first = *weights.front();
  PackedWeight all;
  all.scheme = first.scheme;
  all.n = rows_of(weights);
  all.k = first.k;
  all.planes.push_back({first.plane(PlaneRole::codebook).spec, first.plane(PlaneRole::codebook).bytes.clone()});
  formats::Plane scales{first.plane(PlaneRole::scales).spec,
                        stack_on_host(lay_out(weights, PlaneRole::scales, rows_in_turn))};
  scales.spec.shape.front() = all.n;
  all.planes.push_back(std::move(scales));
  return all;
}

/// Σ norm²: times the square of a level, what the energy of a pass goes by.
double squares(const std::vector<uint16_t>& norms) {
  double sum = 0;
  for (const uint16_t norm : norms) sum += std::pow(double{f32_from_f16(norm)}, 2);
  return sum;
}

class Uploader {
 public:
  Uploader(Linears linears, int64_t rows_in_turn, bool offload, const device::Stream& stream)
      : linears_(linears), rows_in_turn_(rows_in_turn), offload_(offload), stream_(stream) {}

  CudaRotated run() && {
    for (size_t pass = 0; pass < linears_.front()->passes.size(); ++pass) add(pass);
    return std::move(result_);
  }

 private:
  void add(size_t index) {
    const PackedLinear& linear = *linears_.front();
    const auto weights = pass_of(linears_, index);
    const kernels::RotatedPlanes planes = kernels::rotated_planes(stacked_norms(weights, rows_in_turn_));
    if (index == 0) first_levels_ = planes.levels;
    DevicePass pass;
    pass.scheme = kernels::rotated_device_scheme(linear.passes[index].scheme);
    pass.layout = "rotated-fragment";
    pass.n = rows_of(weights);
    pass.k = linear.passes[index].k;
    DeviceBuffer codes = upload_codes(weights, rows_in_turn_, stream_);
    const double energy = squares(planes.norms) * std::pow(double{planes.level_max}, 2);
    if (index == 0) first_energy_ = energy;
    result_.offloaded.emplace_back();
    DeviceBuffer norms = DeviceBuffer::copy_of(bytes_of(planes.norms), stream_);
    if (offload_ && index > 0) {
      pass.resident = false;
      result_.offloaded.back() = move_to_host(codes, norms, first_energy_ > 0 ? energy / first_energy_ : 0, stream_);
    } else {
      pass.codes = read(std::move(codes)).as<uint32_t>();
      pass.scales = read(std::move(norms)).data();
    }
    pass.codebook = keep(DeviceBuffer::copy_of(bytes_of(planes.levels), stream_)).as<float>();
    pass.table_max = planes.level_max;
    pass.table_stretch = kernels::table_stretch(planes.levels);
    pass.scale_max = planes.norm_max;
    pass.table_over_first = kernels::level_ratio(first_levels_, planes.levels);
    const formats::InputRotation& rotation = linear.rotations[index];
    pass.rotation.block = rotation.rotation().block;
    set_rotation(index, pass);
    stream_.synchronize();  // the planes may go
    result_.passes.push_back(pass);
  }

  /// Passes that share a rotation share its factors.
  void set_rotation(size_t index, DevicePass& pass) {
    const auto& rotations = linears_.front()->rotations;
    for (size_t earlier = 0; earlier < index; ++earlier) {
      if (!(rotations[earlier].rotation() == rotations[index].rotation())) continue;
      pass.rotation.factors = result_.passes[earlier].rotation.factors;
      pass.rotation.signs = result_.passes[earlier].rotation.signs;
      return;
    }
    pass.rotation.factors = keep(DeviceBuffer::copy_of(std::as_bytes(rotations[index].factors()), stream_)).as<float>();
    const auto signs = kernels::rotation_signs(rotations[index]);
    pass.rotation.signs = keep(DeviceBuffer::copy_of(bytes_of(signs), stream_)).as<uint32_t>();
    stream_.synchronize();  // the signs go
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
  const device::Stream& stream_;
  double first_energy_ = 0;
  std::vector<float> first_levels_;
  CudaRotated result_;
};

}  // namespace

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

CudaRotated upload_rotated(Linears linears, int64_t rows_in_turn, bool offload, const device::Stream& stream) {
  ensure(!linears.empty(), "upload_rotated: no linears");
  return Uploader(linears, rows_in_turn, offload, stream).run();
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
