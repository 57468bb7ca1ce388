#include "decoder_cuda/stack.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "core/error.h"
#include "device/copy.h"
#include "formats/scheme_registry.h"
#include "formats/small_float.h"

namespace w4q::decoder_cuda {
namespace {

using formats::PackedWeight;
using formats::Plane;
using formats::PlaneRole;

const Plane* find_plane(const PackedWeight& weight, PlaneRole role) {
  const auto found = std::ranges::find_if(weight.planes, [&](const Plane& plane) { return plane.spec.role == role; });
  return found == weight.planes.end() ? nullptr : &*found;
}

/// Planes that have no rows, and so have to be equal where rows are stacked.
constexpr std::array shared_roles = {PlaneRole::codebook, PlaneRole::group_index};

bool is_shared(PlaneRole role) { return std::ranges::find(shared_roles, role) != shared_roles.end(); }

size_t bytes_of_all(std::span<const Pieces> planes) {
  return std::accumulate(planes.begin(), planes.end(), size_t{0},
                         [](size_t sum, const Pieces& plane) { return sum + plane.bytes.size(); });
}

}  // namespace

bool can_stack(const PackedWeight& a, const PackedWeight& b) {
  if (a.scheme != b.scheme || a.layout != b.layout || a.k != b.k) return false;
  // Tiles of 64 outputs have one scale or two of such weights.
  const bool in_squares = formats::shares_rows(a.scheme) && a.scheme.block != formats::whole_tensor;
  if (in_squares && (a.n % 64 != 0 || b.n % 64 != 0)) return false;
  return std::ranges::all_of(shared_roles, [&](PlaneRole role) {
    const Plane* const first = find_plane(a, role);
    const Plane* const second = find_plane(b, role);
    if (first == nullptr || second == nullptr) return first == second;
    return std::ranges::equal(first->bytes.bytes(), second->bytes.bytes());
  });
}

int64_t rows_of(Weights weights) {
  return std::accumulate(weights.begin(), weights.end(), int64_t{0},
                         [](int64_t sum, const PackedWeight* weight) { return sum + weight->n; });
}

std::vector<Pieces> lay_out(Weights weights, PlaneRole role, int64_t rows_in_turn) {
  std::vector<Pieces> all;
  size_t first = 0;
  for (const auto* weight : weights) {
    ensure(rows_in_turn == 0 || (weight->n == weights.front()->n && weight->n % rows_in_turn == 0),
           "lay_out: rows do not take turns");
    const auto bytes = weight->plane(role).bytes.bytes();
    const auto turns = static_cast<size_t>(rows_in_turn > 0 ? weight->n / rows_in_turn : 1);
    const size_t piece = bytes.size() / turns;
    all.push_back({bytes, first, piece, piece * weights.size()});
    first += piece;
  }
  return all;
}

Buffer stack_on_host(std::span<const Pieces> planes) {
  Buffer stacked(bytes_of_all(planes));
  for (const auto& [bytes, first, piece, pitch] : planes) {
    size_t to = first;
    for (size_t from = 0; from < bytes.size(); from += piece, to += pitch) {
      std::ranges::copy(bytes.subspan(from, piece), stacked.bytes().subspan(to).begin());
    }
  }
  return stacked;
}

device::DeviceBuffer stack_on_gpu(std::span<const Pieces> planes, const device::Stream& stream) {
  device::DeviceBuffer stacked(stream.context(), bytes_of_all(planes));
  for (const auto& [bytes, first, piece, pitch] : planes) {
    device::copy_rows(device::Way::to_gpu, {stacked.data() + first, pitch}, {bytes.data(), piece}, piece,
                      bytes.size() / piece, stream, "copying weights to the GPU");
  }
  return stacked;
}

PackedWeight stack_floats(Weights weights, int64_t rows_in_turn) {
  const PackedWeight& first = *weights.front();
  formats::Scheme scheme = first.scheme;
  const bool in_blocks = scheme.block == 16 || scheme.block == 32;
  if (!in_blocks) {
    scheme.block = formats::whole_row;
    scheme.scale = formats::ScaleType::f32;
  }
  PackedWeight all = formats::allocate_canonical(scheme, rows_of(weights), first.k);
  for (Plane& plane : all.planes) {
    const PlaneRole role = plane.spec.role;
    if (role == PlaneRole::codes || (role == PlaneRole::scales && in_blocks)) {
      plane.bytes = stack_on_host(lay_out(weights, role, rows_in_turn));
    } else if (role == PlaneRole::scales) {
      std::ranges::fill(plane.bytes.as<float>(), 1.0f);
    } else {
      plane.bytes = first.plane(role).bytes.clone();
    }
  }
  return all;
}

PackedWeight stack(Weights weights, int64_t rows_in_turn) {
  PackedWeight all = weights.front()->clone();
  all.n = rows_of(weights);
  for (Plane& plane : all.planes) {
    if (is_shared(plane.spec.role)) continue;
    plane.bytes = stack_on_host(lay_out(weights, plane.spec.role, rows_in_turn));
    plane.spec.shape.front() = all.n;
  }
  return all;
}

}  // namespace w4q::decoder_cuda
