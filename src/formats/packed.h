// A packed linear layer in memory: y = Σ_p W_p · R_p(x ⊘ s) + b, each W_p a set of planes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/views.h"
#include "formats/rotation.h"
#include "formats/scheme.h"

namespace w4q::formats {

enum class PlaneRole {
  codes,
  scales,
  codebook,
  zeros,        ///< zero points of groups
  group_index,  ///< the group of each input, where it does not follow from its position
  nested_scales,
  nested_codebook,
  nested_offset,
  input_scales,  ///< of every input, beside those of every output
  tensor_scale,  ///< a factor of the whole tensor, in front of its block scales
};

/// "codes", "scales", "group_index" …: the last part of the plane's tensor name `<linear>.<pass>.<role>`.
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
  std::vector<float> input_scale = {};  ///< s: k positive numbers that divide the input; empty: none
  /// R_p: one for each pass, equal where passes share it; empty: none. Planes hold weights of the rotated input.
  std::vector<InputRotation> rotations = {};
};

/// The end of the run of passes that starts at `first` and takes one and the same rotated input.
size_t shared_input_end(const PackedLinear& linear, size_t first) noexcept;

/// Equal scheme, layout, sizes and bytes of every plane (class E0).
bool bytes_equal(const PackedWeight& a, const PackedWeight& b) noexcept;

/// The largest n and k: no size computed from them, counted in bits, overflows 64 bits.
inline constexpr int64_t max_dimension = int64_t{1} << 30;

/// Throws unsupported naming `name` unless n and k are both in 1 … max_dimension.
void check_dimensions(int64_t n, int64_t k, std::string_view name);

/// A weight with zeroed planes of the given types and shapes.
PackedWeight allocate_planes(const Scheme& scheme, std::string_view layout, int64_t n, int64_t k,
                             std::span<const PlaneSpec> specs);

/// Throws bad_file naming `name` unless the weight stands in the canonical layout.
void check_canonical_layout(const PackedWeight& weight, std::string_view name);

/// Checks that `weight` has exactly the planes `specs`, with their types, shapes and byte counts. Throws bad_file
/// naming `name`, what was expected and what was found.
void check_planes(const PackedWeight& weight, std::span<const PlaneSpec> specs, std::string_view name);

}  // namespace w4q::formats
