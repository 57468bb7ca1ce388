#include "formats/packed.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/text.h"

namespace w4q::formats {
namespace {

std::string spec_text(const PlaneSpec& spec) { return concat(dtype_name(spec.dtype), " ", shape_text(spec.shape)); }

const Plane* find_plane(const std::vector<Plane>& planes, PlaneRole role) noexcept {
  const auto found =
      std::find_if(planes.begin(), planes.end(), [role](const Plane& plane) { return plane.spec.role == role; });
  return found == planes.end() ? nullptr : &*found;
}

void check_plane(const Plane& plane, const PlaneSpec& spec, std::string_view name) {
  const std::string_view role = to_string(spec.role);
  if (plane.spec != spec) {
    throw Error(ErrorCode::bad_file, concat(printable(name), ": plane ", role, " has another type or shape"))
        .detail(concat("expected ", spec_text(spec), ", got ", spec_text(plane.spec)));
  }
  const auto expected = static_cast<size_t>(byte_count(spec.dtype, spec.shape));
  if (plane.bytes.size() != expected) {
    throw Error(ErrorCode::bad_file, concat(printable(name), ": plane ", role, " has the wrong number of bytes"))
        .detail(concat("expected ", expected, " for ", spec_text(spec), ", got ", plane.bytes.size()));
  }
}

}  // namespace

std::string_view to_string(PlaneRole role) noexcept {
  switch (role) {
    case PlaneRole::codes:
      return "codes";
    case PlaneRole::scales:
      return "scales";
    case PlaneRole::codebook:
      return "codebook";
    case PlaneRole::zeros:
      return "zeros";
    case PlaneRole::group_index:
      return "group_index";
    case PlaneRole::nested_scales:
      return "nested_scales";
    case PlaneRole::nested_codebook:
      return "nested_codebook";
    case PlaneRole::nested_offset:
      return "nested_offset";
    case PlaneRole::input_scales:
      return "input_scales";
    case PlaneRole::tensor_scale:
      return "tensor_scale";
  }
  return "?";
}

const Plane& PackedWeight::plane(PlaneRole role) const {
  const Plane* found = find_plane(planes, role);
  if (found == nullptr) throw Error(ErrorCode::internal, concat("a packed weight has no plane ", to_string(role)));
  return *found;
}

Plane& PackedWeight::plane(PlaneRole role) { return const_cast<Plane&>(std::as_const(*this).plane(role)); }

PackedWeight PackedWeight::clone() const {
  PackedWeight copy{scheme, layout, n, k, {}};
  copy.planes.reserve(planes.size());
  for (const Plane& plane : planes) copy.planes.push_back({plane.spec, plane.bytes.clone()});
  return copy;
}

int64_t PackedWeight::size_bytes() const noexcept {
  int64_t sum = 0;
  for (const Plane& plane : planes) sum += static_cast<int64_t>(plane.bytes.size());
  return sum;
}

size_t shared_input_end(const PackedLinear& linear, size_t first) noexcept {
  if (linear.rotations.empty()) return linear.passes.size();
  size_t end = first + 1;
  while (end < linear.passes.size() && linear.rotations[end].rotation() == linear.rotations[first].rotation()) ++end;
  return end;
}

bool bytes_equal(const PackedWeight& a, const PackedWeight& b) noexcept {
  const auto same = [](const Plane& x, const Plane& y) {
    return x.spec == y.spec && same_bytes(x.bytes.bytes(), y.bytes.bytes());
  };
  return a.scheme == b.scheme && a.layout == b.layout && a.n == b.n && a.k == b.k &&
         std::ranges::equal(a.planes, b.planes, same);
}

void check_dimensions(int64_t n, int64_t k, std::string_view name) {
  if (n >= 1 && k >= 1 && n <= max_dimension && k <= max_dimension) return;
  throw Error(ErrorCode::unsupported, concat(printable(name), ": cannot pack ", n, " outputs × ", k, " inputs"))
      .detail(concat("each must be in 1 … ", max_dimension));
}

PackedWeight allocate_planes(const Scheme& scheme, std::string_view layout, int64_t n, int64_t k,
                             std::span<const PlaneSpec> specs) {
  PackedWeight weight{scheme, std::string(layout), n, k, {}};
  weight.planes.reserve(specs.size());
  for (const PlaneSpec& spec : specs) {
    weight.planes.push_back({spec, Buffer(static_cast<size_t>(byte_count(spec.dtype, spec.shape)))});
  }
  return weight;
}

void check_canonical_layout(const PackedWeight& weight, std::string_view name) {
  if (weight.layout != canonical_layout) {
    throw Error(ErrorCode::bad_file,
                concat(printable(name), ": expected layout ", canonical_layout, ", got ", printable(weight.layout)));
  }
}

void check_planes(const PackedWeight& weight, std::span<const PlaneSpec> specs, std::string_view name) {
  for (const PlaneSpec& spec : specs) {
    const Plane* plane = find_plane(weight.planes, spec.role);
    if (plane == nullptr) {
      throw Error(ErrorCode::bad_file, concat(printable(name), ": plane ", to_string(spec.role), " is missing"))
          .detail(concat("expected ", spec_text(spec), " for ", to_string(weight.scheme), " in layout ",
                         printable(weight.layout)));
    }
    check_plane(*plane, spec, name);
  }
  if (weight.planes.size() != specs.size()) {
    throw Error(ErrorCode::bad_file, concat(printable(name), ": planes that do not belong to the scheme"))
        .detail(concat("expected ", specs.size(), " planes, got ", weight.planes.size()));
  }
}

}  // namespace w4q::formats
