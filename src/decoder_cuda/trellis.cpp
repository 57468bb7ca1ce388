#include "decoder_cuda/trellis.h"

#include <algorithm>

#include "core/error.h"
#include "decoder_cuda/rotated.h"
#include "decoder_cuda/stack.h"
#include "decoder_cuda/stored.h"
#include "formats/trellis.h"
#include "repack/layout_trellis_fragment.h"
#include "repack/trellis_pass_cuda.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;
using formats::PackedLinear;
using formats::PackedWeight;
using formats::PlaneRole;
using Linears = std::span<const PackedLinear* const>;

constexpr std::string_view fragment_layout = "trellis-fragment";

class TrellisUploader {
 public:
  TrellisUploader(Linears linears, UploadRing& ring) : linears_(linears), ring_(ring) {}

  CudaTrellis run() && {
    for (size_t pass = 0; pass < linears_.front()->passes.size(); ++pass) add(pass);
    return std::move(result_);
  }

 private:
  void add(size_t index) {
    std::vector<const PackedWeight*> weights;
    for (const auto* linear : linears_) weights.push_back(&linear->passes[index]);
    const PackedWeight& first = *weights.front();
    kernels::DevicePass pass;
    pass.scheme = first.scheme;
    pass.layout = fragment_layout;
    pass.n = rows_of(weights);
    pass.k = first.k;
    pass.table_max = first.plane(PlaneRole::codebook).bytes.as<float>()[0];
    pass.scale_max = least_scale_max;
    for (const auto* linear : linears_) pass.scale_max = std::max(pass.scale_max, checked_scale(*linear, index));
    pass.codes = place_codes(weights, pass).as<uint32_t>();
    pass.scales = place(weights, PlaneRole::scales).data();
    if (const PackedLinear& linear = *linears_.front(); !linear.rotations.empty()) {
      pass.rotation = upload_rotation(linear, index, result_.passes, ring_, result_.memory);
    }
    result_.passes.push_back(pass);
  }

  /// Whole strips follow one another in either layout.
  DeviceBuffer& place_codes(Weights weights, const kernels::DevicePass& pass) {
    if (weights.front()->layout == fragment_layout) return place(weights, PlaneRole::codes);
    std::byte* const rings = ring_.scratch(stacked_bytes(weights, PlaneRole::codes));
    copy(weights, PlaneRole::codes, rings);
    const repack::TrellisFragmentMap map(pass.n, pass.k);
    const size_t bytes = static_cast<size_t>(map.tiles() * map.tile_words(pass.scheme.bits)) * sizeof(uint32_t);
    DeviceBuffer& codes = read(DeviceBuffer(ring_.stream().context(), bytes));
    repack::pack_trellis_cuda(pass.scheme, pass.n, pass.k, reinterpret_cast<const uint32_t*>(rings),
                              codes.as<uint32_t>(), ring_.stream());
    return codes;
  }
  DeviceBuffer& place(Weights weights, PlaneRole role) {
    DeviceBuffer& buffer = read(DeviceBuffer(ring_.stream().context(), stacked_bytes(weights, role)));
    copy(weights, role, buffer.data());
    return buffer;
  }
  void copy(Weights weights, PlaneRole role, std::byte* to) {
    for (const auto* weight : weights) {
      const auto bytes = weight->plane(role).bytes.bytes();
      ring_.copy(to, bytes);
      to += bytes.size();
    }
  }

  DeviceBuffer& read(DeviceBuffer buffer) {
    result_.bytes += static_cast<int64_t>(buffer.size());
    result_.memory.push_back(std::move(buffer));
    return result_.memory.back();
  }

  Linears linears_;
  UploadRing& ring_;
  CudaTrellis result_;
};

}  // namespace

bool reads_trellis(const PackedLinear& linear) {
  const auto reads = [](const PackedWeight& pass) {
    return pass.scheme.family == formats::SchemeFamily::trellis &&
           (pass.layout == formats::canonical_layout || pass.layout == fragment_layout);
  };
  if (linear.passes.empty() || !std::ranges::all_of(linear.passes, reads)) return false;
  if (linear.rotations.empty()) return true;
  return linear.rotations.size() == linear.passes.size() &&
         std::ranges::all_of(linear.rotations, [](const auto& each) { return reads_rotation(each.rotation()); });
}

bool trellis_goes_as_stored(const PackedLinear& linear) {
  return reads_trellis(linear) && std::ranges::all_of(linear.passes, [](const PackedWeight& pass) {
           return pass.layout == fragment_layout && pass.n % repack::TrellisFragmentMap::tile_rows == 0 &&
                  pass.k % repack::TrellisFragmentMap::tile_cols == 0;
         });
}

bool can_stack_trellis(const PackedLinear& a, const PackedLinear& b) {
  if (a.passes.size() != b.passes.size() || a.rotations.size() != b.rotations.size()) return false;
  if (a.input_scale != b.input_scale || a.passes.front().n % formats::trellis_rows != 0) return false;
  for (size_t pass = 0; pass < a.passes.size(); ++pass) {
    if (!can_stack(a.passes[pass], b.passes[pass])) return false;
    if (!a.rotations.empty() && !(a.rotations[pass].rotation() == b.rotations[pass].rotation())) return false;
  }
  return true;
}

CudaTrellis upload_trellis(Linears linears, UploadRing& ring) {
  ensure(!linears.empty(), "upload_trellis: no linears");
  return TrellisUploader(linears, ring).run();
}

}  // namespace w4q::decoder_cuda
