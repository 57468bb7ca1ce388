// A width that is known only when the program runs, as a constant of the code that depends on it.
#pragma once

#include "core/error.h"

namespace w4q {

/// Calls body.operator()<bits>() when `bits` is one of `widths`. Throws internal for any other.
template <int... widths, class Body>
void with_bits(int bits, const Body& body) {
  const bool known = ((bits == widths && (body.template operator()<widths>(), true)) || ...);
  ensure(known, "no code was made for codes of this width");
}

/// The same for the widths of codes into a table: 2 to 5 bits.
template <class Body>
void with_table_bits(int bits, const Body& body) {
  with_bits<2, 3, 4, 5>(bits, body);
}

}  // namespace w4q
