// What the dialects of integer weights share: which schemes they can hold, and linears found in a checkpoint.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/dialect/dialect.h"
#include "formats/scale_codec.h"

namespace w4q::checkpoint {

/// The integer weights that a dialect has a place for.
struct IntegerLimits {
  std::span<const int> bits;
  std::span<const formats::ScaleType> scales;  ///< scales of other types become the first, where they can
  bool symmetric = true;                       ///< without zero points
  bool asymmetric = true;                      ///< with them; a dialect that has only one takes what it can say so
  bool act_order = false;
  int64_t n_multiple = 1;
  int64_t k_multiple = 1;
  bool whole_groups = false;      ///< k is a multiple of the group
  std::span<const int> groups{};  ///< Scheme::block; empty: any
  /// Types that readers take and writers of AWQ and GPTQ store, too: kept where such a checkpoint has them.
  std::span<const formats::ScaleType> kept_scales{};
};

namespace detail {
inline constexpr std::array marlin_bits{4};
inline constexpr std::array marlin_scales{formats::ScaleType::f16};
inline constexpr std::array every_scale{formats::ScaleType::f16, formats::ScaleType::bf16, formats::ScaleType::f32};
inline constexpr std::array marlin_groups{128, formats::whole_row};
}  // namespace detail

/// What checkpoints of Marlin's words hold, whatever names they give them.
inline constexpr IntegerLimits marlin_limits{.bits = detail::marlin_bits,
                                             .scales = detail::marlin_scales,
                                             .asymmetric = false,
                                             .n_multiple = 256,
                                             .k_multiple = 128,
                                             .whole_groups = true,
                                             .groups = detail::marlin_groups};
/// Inputs of a tile of such words: the codes tensor is [k / 16, 2 · n] words.
inline constexpr int64_t marlin_tile_inputs = 16;

/// DialectRow::fit for such a dialect.
DialectFit fit_integer(const PackedLinearInfo& info, const IntegerLimits& limits);

/// DialectRow::refuses for dialects whose zero points are codes: the first zero of 2^bits.
std::string refuse_large_zero(const formats::PackedWeight& canonical);

/// The type of a linear's scales, of those that integers have. Throws bad_file naming the tensor.
formats::ScaleType integer_scale_type(const io::Checkpoint& checkpoint, const std::string& scales);

/// Names of the linears that have a tensor NAME + suffix, in the checkpoint's order.
std::vector<std::string> linears_with(const io::Checkpoint& checkpoint, std::string_view suffix);
/// A linear of one pass whose tensors are `specs`.
PackedLinearInfo dialect_linear(std::string name, const formats::Scheme& scheme, int64_t n, int64_t k,
                                DType source_dtype, std::span<const formats::StoredSpec> specs);

/// Throws bad_file for the first tensor of info.stored that is missing or of another type or shape; `what` says whom
/// the expectation comes from: "AWQ with group_size 128".
void check_stored(const io::Checkpoint& checkpoint, const PackedLinearInfo& info, std::string_view what);

/// A tensor's shape where it must have two dimensions. Throws bad_file naming it.
const Shape& matrix_shape(const io::Checkpoint& checkpoint, const std::string& name);

/// Tensors that are the planes of a layout, in the order of `roles`: to canonical planes, and back in the order of
/// `specs`.
formats::PackedWeight unpack_stored(std::string_view layout, const formats::Scheme& scheme,
                                    const PackedLinearInfo& info, std::vector<formats::StoredTensor> tensors,
                                    std::span<const formats::PlaneRole> roles);
std::vector<formats::StoredTensor> pack_stored(std::string_view layout, const formats::PackedWeight& canonical,
                                               std::vector<formats::StoredSpec> specs,
                                               std::span<const formats::PlaneRole> roles);

/// True when all bytes of a zeros plane are the symmetric zero.
bool has_symmetric_zeros(const formats::PackedWeight& canonical);
/// The same weight as a symmetric scheme. Throws bad_file naming `name` when has_symmetric_zeros does not hold.
formats::PackedWeight without_zeros(formats::PackedWeight canonical, std::string_view name);

}  // namespace w4q::checkpoint
