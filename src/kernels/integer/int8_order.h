// How rows of int8 activations stand in GPU memory: as the product's B operands, in the very places that they take in
// shared memory, so that bringing them there is copying.
//
// Marlin's words give lane t of four the inputs 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16. Sums do not mind order, so
// the inputs are renamed: of 32 inputs, the sixteen with (i mod 16) < 8 come first, and a lane's four bytes of either
// half are inputs 2t and 2t + 1 of both sixteens, in turn. Two of Marlin's words are a fragment then.
//
//   [128 inputs][8 rows][row][16 bytes, exchanged by the row's number: eight rows lie in eight groups of banks]
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace w4q::kernels::int8 {

constexpr int chunk_inputs = 128;
constexpr int group_rows = 8;
constexpr int group_bytes = group_rows * chunk_inputs;

/// Where in its row's 128 bytes input `i` of 128 stands, before rows exchange their pieces.
W4Q_HOST_DEVICE constexpr int place_of_input(int i) {
  const int sixteen = i % 32 / 16;
  const int r = i % 16;
  return i / 32 * 32 + r / 8 * 16 + r % 8 / 2 * 4 + r % 2 * 2 + sixteen;
}

/// Piece `piece` of 16 bytes of row `row` of a group of rows, in bytes.
W4Q_HOST_DEVICE constexpr int place_of_piece(int row, int piece) {
  return row % group_rows * chunk_inputs + (piece ^ row % group_rows) * 16;
}

namespace detail {
constexpr bool places_are_a_bijection() {
  bool seen[chunk_inputs] = {};
  for (int i = 0; i < chunk_inputs; ++i) seen[place_of_input(i)] = true;
  for (const bool is : seen) {
    if (!is) return false;
  }
  return true;
}
}  // namespace detail
static_assert(detail::places_are_a_bijection());

/// Of m rows of k inputs; rows are padded to whole tiles of the product.
struct Int8Order {
  static constexpr int64_t tile_rows = 128;
  int64_t padded_rows, chunks;

  W4Q_HOST_DEVICE constexpr Int8Order(int64_t m, int64_t k)
      : padded_rows((m + tile_rows - 1) / tile_rows * tile_rows), chunks((k + chunk_inputs - 1) / chunk_inputs) {}
  W4Q_HOST_DEVICE constexpr int64_t bytes() const { return padded_rows * chunks * chunk_inputs; }
  /// The group of eight rows that row `row` is in.
  W4Q_HOST_DEVICE constexpr int64_t group(int64_t row, int64_t chunk) const {
    return (chunk * (padded_rows / group_rows) + row / group_rows) * group_bytes;
  }
};

}  // namespace w4q::kernels::int8
