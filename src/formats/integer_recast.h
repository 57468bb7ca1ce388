// Saying one weight under another integer scheme without touching a code: other scale types, zeros that are all alike,
// a group_index that is in order.
#pragma once

#include <string>

#include "formats/integer.h"

namespace w4q::formats {

/// Why `canonical` cannot be said under `scheme` with every value the same; empty: it can. The first value that has no
/// place is named by row and group.
std::string integer_recast_loss(const PackedWeight& canonical, const Scheme& scheme);

/// The same weight under `scheme`, codes, zeros and scales with the same values. Throws unsupported with the reason of
/// integer_recast_loss, naming `name`.
PackedWeight integer_recast(const PackedWeight& canonical, const Scheme& scheme, std::string_view name);

/// How much of one weight is in another: values, whatever the type they are stored in.
struct RecastProof {
  int64_t codes = 0, codes_equal = 0;
  int64_t zeros = 0, zeros_equal = 0;
  int64_t scales = 0, scales_equal = 0;
  bool groups_equal = true;  ///< every input belongs to the same group

  bool complete() const noexcept {
    return codes == codes_equal && zeros == zeros_equal && scales == scales_equal && groups_equal;
  }
  RecastProof& operator+=(const RecastProof& other) noexcept;
};

/// Compares two canonical weights of one size, of any integer schemes. Where widths or groups differ nothing is equal.
RecastProof integer_compare(const PackedWeight& a, const PackedWeight& b);

}  // namespace w4q::formats
