#include "model/cuda_rotated.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/float_formats.h"
#include "device/check.h"
#include "formats/kbit.h"
#include "formats/rotated.h"
#include "kernels/rotate_input.h"
#include "kernels/rotated_pack.h"
#include "model/cuda_pack.h"
#include "repack/layout_kbit_fragment.h"
#include "repack/map_pass_cuda.h"

namespace w4q::model {
namespace {

using device::DeviceBuffer;
using formats::PackedLinear;
using formats::PackedWeight;
using formats::PlaneRole;
using kernels::RotatedDevicePass;
using Linears = std::span<const PackedLinear* const>;

bool reads_rotation(const formats::Rotation& rotation) {
  return rotation.block >= 2 && rotation.block <= kernels::rotate_input_max_block;
}

/// Pass `pass` of linears, rows below one another, in the order of kbit-fragment.
DeviceBuffer upload_codes(Linears linears, size_t pass, int64_t n, const device::Stream& stream) {
  const PackedWeight& first = linears.front()->passes[pass];
  const formats::Scheme scheme{formats::SchemeFamily::kbit, first.scheme.bits, formats::kbit_block,
                               formats::ScaleType::e4m4};
  size_t size = 0;
  for (const auto* linear : linears) size += linear->passes[pass].plane(PlaneRole::codes).bytes.size();
  DeviceBuffer canonical(size);
  for (size_t at = 0; const auto* linear : linears) {
    const auto bytes = linear->passes[pass].plane(PlaneRole::codes).bytes.bytes();
    device::check(
        cudaMemcpyAsync(canonical.data() + at, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream.get()),
        "copying weights to the GPU");
    at += bytes.size();
  }
  // The pass wants scales too, and they go where they came from: nowhere.
  const repack::KbitFragmentMap map(n, first.k);
  DeviceBuffer no_scales(static_cast<size_t>(n * formats::kbit_blocks(first.k)));
  DeviceBuffer no_packed_scales(static_cast<size_t>(map.tiles() * map.tile_scales));
  DeviceBuffer codes(static_cast<size_t>(map.tiles() * map.tile_words(scheme.bits)) * sizeof(uint32_t));
  repack::pack_cuda("kbit-fragment", scheme, n, first.k, {canonical.as<uint32_t>(), no_scales.data()},
                    {codes.as<uint32_t>(), no_packed_scales.data()}, stream.get());
  stream.synchronize();
  return codes;
}

/// The norms of linears below one another as one weight without codes.
PackedWeight stacked_norms(Linears linears, size_t pass, int64_t n) {
  const PackedWeight& first = linears.front()->passes[pass];
  PackedWeight all;
  all.scheme = first.scheme;
  all.n = n;
  all.k = first.k;
  all.planes.push_back({first.plane(PlaneRole::codebook).spec, first.plane(PlaneRole::codebook).bytes.clone()});
  formats::Plane scales{first.plane(PlaneRole::scales).spec, {}};
  size_t size = 0;
  for (const auto* linear : linears) size += linear->passes[pass].plane(PlaneRole::scales).bytes.size();
  scales.bytes = Buffer(size);
  auto to = scales.bytes.bytes().begin();
  for (const auto* linear : linears) {
    to = std::ranges::copy(linear->passes[pass].plane(PlaneRole::scales).bytes.bytes(), to).out;
  }
  scales.spec.shape.front() = n;
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
  Uploader(Linears linears, bool offload, const device::Stream& stream)
      : linears_(linears), offload_(offload), stream_(stream) {
    for (const auto* linear : linears) n_ += linear->passes.front().n;
  }

  CudaRotated run() && {
    for (size_t pass = 0; pass < linears_.front()->passes.size(); ++pass) add(pass);
    return std::move(result_);
  }

 private:
  void add(size_t index) {
    const PackedLinear& linear = *linears_.front();
    const kernels::RotatedPlanes planes = kernels::rotated_planes(stacked_norms(linears_, index, n_));
    if (index == 0) first_levels_ = planes.levels;
    RotatedDevicePass pass;
    pass.bits = linear.passes[index].scheme.bits;
    pass.n = n_;
    pass.k = linear.passes[index].k;
    DeviceBuffer codes = upload_codes(linears_, index, n_, stream_);
    const double energy = squares(planes.norms) * std::pow(double{planes.level_max}, 2);
    if (index == 0) first_energy_ = energy;
    result_.offloaded.emplace_back();
    DeviceBuffer norms = DeviceBuffer::copy_of(bytes_of(planes.norms), stream_);
    if (offload_ && index > 0) {
      result_.offloaded.back() = move_to_host(codes, norms, first_energy_ > 0 ? energy / first_energy_ : 0, stream_);
    } else {
      pass.codes = read(std::move(codes)).as<uint32_t>();
      pass.norms = read(std::move(norms)).as<uint16_t>();
    }
    pass.group = formats::rotated_group(linear.passes[index].scheme, pass.k);
    pass.levels = keep(DeviceBuffer::copy_of(bytes_of(planes.levels), stream_)).as<float>();
    pass.level_max = planes.level_max;
    pass.norm_max = planes.norm_max;
    pass.levels_over_first = kernels::level_ratio(first_levels_, planes.levels);
    const formats::InputRotation& rotation = linear.rotations[index];
    pass.block = rotation.rotation().block;
    set_rotation(index, pass);
    stream_.synchronize();  // the planes may go
    result_.passes.push_back(pass);
  }

  /// Passes that share a rotation share its factors.
  void set_rotation(size_t index, RotatedDevicePass& pass) {
    const auto& rotations = linears_.front()->rotations;
    for (size_t earlier = 0; earlier < index; ++earlier) {
      if (!(rotations[earlier].rotation() == rotations[index].rotation())) continue;
      pass.factors = result_.passes[earlier].factors;
      pass.signs = result_.passes[earlier].signs;
      return;
    }
    pass.factors = keep(DeviceBuffer::copy_of(std::as_bytes(rotations[index].factors()), stream_)).as<float>();
    const auto signs = kernels::rotation_signs(rotations[index]);
    pass.signs = keep(DeviceBuffer::copy_of(bytes_of(signs), stream_)).as<uint32_t>();
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
  const bool offload_;
  const device::Stream& stream_;
  int64_t n_ = 0;
  double first_energy_ = 0;
  std::vector<float> first_levels_;
  CudaRotated result_;
};

}  // namespace

bool reads_rotated(const PackedLinear& linear) {
  if (linear.passes.empty() || linear.rotations.size() != linear.passes.size()) return false;
  for (size_t pass = 0; pass < linear.passes.size(); ++pass) {
    const PackedWeight& weight = linear.passes[pass];
    if (weight.scheme.family != formats::SchemeFamily::rotated || weight.layout != formats::canonical_layout)
      return false;
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

CudaRotated upload_rotated(Linears linears, bool offload, const device::Stream& stream) {
  ensure(!linears.empty(), "upload_rotated: no linears");
  return Uploader(linears, offload, stream).run();
}

std::shared_ptr<const OffloadedPass> move_to_host(const DeviceBuffer& codes, const DeviceBuffer& norms, double error,
                                                  const device::Stream& stream) {
  auto host = std::make_shared<OffloadedPass>();
  host->error = error;
  host->norms_at = codes.size();
  host->bytes = device::PinnedBuffer(codes.size() + norms.size());
  codes.download(host->bytes.bytes().first(codes.size()), stream);
  norms.download(host->bytes.bytes().subspan(codes.size()), stream);
  stream.synchronize();
  return host;
}

RotatedDevicePass at_bytes(RotatedDevicePass pass, const OffloadedPass& planes, const std::byte* bytes) {
  pass.codes = reinterpret_cast<const uint32_t*>(bytes);
  pass.norms = reinterpret_cast<const uint16_t*>(bytes + planes.norms_at);
  return pass;
}

}  // namespace w4q::model
