// A packed linear layer in memory: y = Σ_p W_p · x + b, each W_p a set of planes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/views.h"
#include "formats/scheme.h"

namespace w4q::formats {

enum class PlaneRole { codes, scales, codebook };

/// "codes", "scales", "codebook": the last part of the plane's tensor name `<linear>.<pass>.<role>`.
std::string_view to_string(PlaneRole role) noexcept;

/// Role, type and shape of a plane, without its bytes.
struct PlaneSpec {
  PlaneRole role = PlaneRole::codes;
  DType dtype = DType::u8;
  Shape shape;

  bool operator==(const PlaneSpec&) const = default;
};

struct Plane {
  PlaneSpec spec;
  Buffer bytes;
};

/// The name of the layout that quantizers produce and every other layout permutes.
inline constexpr std::string_view canonical_layout = "canonical";

/// One pass: n outputs × k inputs under one scheme in one layout. `n` and `k` are the true sizes; planes may be padded.
struct PackedWeight {
  Scheme scheme;
  std::string layout{canonical_layout};
  int64_t n = 0;
  int64_t k = 0;
  std::vector<Plane> planes;

  /// The plane of a role. Throws internal when there is none.
  const Plane& plane(PlaneRole role) const;
  Plane& plane(PlaneRole role);
  PackedWeight clone() const;
  /// Sum of plane bytes.
  int64_t size_bytes() const noexcept;
};

/// All passes of one linear layer. `name` is the module path without ".weight".
struct PackedLinear {
  std::string name;
  DType source_dtype = DType::bf16;  ///< what the weight was stored in before quantizing
  std::vector<PackedWeight> passes;
};

/// Equal scheme, layout, sizes and bytes of every plane (class E0).
bool bytes_equal(const PackedWeight& a, const PackedWeight& b) noexcept;

}  // namespace w4q::formats
