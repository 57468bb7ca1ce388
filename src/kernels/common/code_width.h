// Widths of kbit codes as constants.
#pragma once

namespace w4q::kernels {

/// Calls body.operator()<bits>() for 2 to 5 bits.
template <class Body>
void with_width(int bits, const Body& body) {
  switch (bits) {
    case 2:
      return body.template operator()<2>();
    case 3:
      return body.template operator()<3>();
    case 4:
      return body.template operator()<4>();
    default:
      return body.template operator()<5>();
  }
}

}  // namespace w4q::kernels
