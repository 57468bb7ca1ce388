// Orders in which rows, heads or columns may have been written by mistake.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "verify/behaviour/passage.h"

namespace w4q::verify::behaviour {

/// Column c of what is read otherwise is column from[c].
struct Order {
  std::string what;  ///< "one row on"
  std::vector<int64_t> from;
};

/// Of `count` rows in heads of `head` (0: none): moved on by one, back, reversed, halves exchanged; by heads as well.
std::vector<Order> orders_of(int64_t count, int64_t head);
/// The two ways in which a rotary embedding pairs rows, each written where the other one is read.
std::vector<Order> pair_orders(int64_t count, int64_t head, int64_t turning);

Activations reordered(const Activations& x, const std::vector<int64_t>& from);
Activations times(const Activations& x, float factor);

}  // namespace w4q::verify::behaviour
