// The table of layouts: where the bits stand. A layout is a closed-form bijection (layout_*.h); rows wrap it with the
// question whether it fits and with the passes that move bits.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/packed.h"
#include "formats/scheme_registry.h"

namespace w4q::device {
class Context;
}

namespace w4q::repack {

struct LayoutRow {
  std::string_view name;         ///< "kbit-tile"
  std::string_view description;  ///< one line for `w4q list`
  std::string_view reason = {};  ///< why it is as it is and who reads it, one line for `w4q list --layouts`
  std::vector<int> sms;          ///< GPU targets it is made for; empty: none, it is for interchange or editing
  /// True when a weight of this scheme and size can take the layout; otherwise `why` says what does not fit and what
  /// would.
  bool (*accepts)(const formats::Scheme&, int64_t n, int64_t k, std::string* why);
  /// Planes in this layout, padding included.
  std::vector<formats::PlaneSpec> (*planes)(const formats::Scheme&, int64_t n, int64_t k);
  /// canonical → this layout. Padding bytes are zero.
  formats::PackedWeight (*pack)(const formats::PackedWeight& canonical);
  /// This layout → canonical, bit for bit what was packed. Throws bad_file when padding is not zero, naming `name`.
  formats::PackedWeight (*unpack)(const formats::PackedWeight& packed, std::string_view name);
  /// Where bit `bit` of the code of weight (row, col) stands in the codes plane, and its group's scale. For the law
  /// tests and `w4q inspect --layout`. With act order, a layout that sorts inputs by group counts `col` in that order.
  using BitPlace = formats::BitPlace;
  BitPlace (*place)(const formats::Scheme&, int64_t n, int64_t k, int64_t row, int64_t col, int bit);
  /// Where bit `bit` of the zero point of group `group` of row `row` stands in the zeros plane; null where zeros stand
  /// as in the canonical layout, or there are none.
  struct ZeroPlace {
    int64_t word;
    int bit;
  };
  ZeroPlace (*zero_place)(const formats::Scheme&, int64_t n, int64_t k, int64_t row, int64_t group, int bit) = nullptr;
  /// With act order, codes stand in the stable order of their inputs' groups.
  bool sorts_inputs = false;
  /// pack and unpack by way of a GPU: the same bytes and errors. Null where this build or the layout has no such way.
  formats::PackedWeight (*pack_cuda)(const formats::PackedWeight& canonical, device::Context& gpu) = nullptr;
  formats::PackedWeight (*unpack_cuda)(const formats::PackedWeight& packed, std::string_view name,
                                       device::Context& gpu) = nullptr;
};

/// In the order of preference: a target takes the first row that fits.
std::span<const LayoutRow> layout_registry();
/// By name. Throws bad_argument and lists the names.
const LayoutRow& layout_row(std::string_view name);
/// The layout for a GPU target ("sm80", "sm89", "sm90"): the first row made for it that accepts the weight. Throws
/// bad_argument for an unknown target, unsupported with every row's reason when none fits.
const LayoutRow& layout_for_target(std::string_view target, const formats::Scheme&, int64_t n, int64_t k);
/// Targets named by any row, for messages.
std::vector<std::string> known_targets();

}  // namespace w4q::repack
