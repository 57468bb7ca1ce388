#include "formats/cut_rows.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"

namespace w4q::formats {

PackedWeight cut_rows(const PackedWeight& weight, int64_t first, int64_t rows, std::span<const PlaneSpec> specs,
                      std::string_view name) {
  check_canonical_layout(weight, name);
  ensure(first >= 0 && rows > 0 && first + rows <= weight.n, "cut_rows: rows beyond the weight");
  PackedWeight result{weight.scheme, weight.layout, rows, weight.k, {}};
  for (const PlaneSpec& spec : specs) {
    const Plane& plane = weight.plane(spec.role);
    if (plane.spec.shape == spec.shape) {
      result.planes.push_back({spec, plane.bytes.clone()});
      continue;
    }
    const auto size = static_cast<int64_t>(plane.bytes.size()), part = byte_count(spec.dtype, spec.shape);
    if (part * weight.n != size * rows || size * first % weight.n != 0) {
      throw Error(ErrorCode::unsupported, concat(printable(name), ": its ", to_string(spec.role), " cannot be cut"))
          .detail(concat("rows ", first, " to ", first + rows - 1, " of ", weight.n, " are no whole blocks"));
    }
    const auto begin = static_cast<size_t>(size * first / weight.n);
    Buffer bytes(static_cast<size_t>(part));
    std::ranges::copy(plane.bytes.bytes().subspan(begin, static_cast<size_t>(part)), bytes.bytes().begin());
    result.planes.push_back({spec, std::move(bytes)});
  }
  return result;
}

}  // namespace w4q::formats
