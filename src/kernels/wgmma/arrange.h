// Activations as the copy engine and the tensor cores want them: tiles of `rows` rows × 64 inputs, each row 128 bytes
// whose 16-byte pieces are exchanged as 128-byte swizzling does (piece c of row r stands at c ^ (r mod 8)), zeros where
// x ends. Arranged once for a launch, so that every block of it copies whole tiles, 8 KB and more at a time.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace w4q::kernels::wgmma {

/// The order of a tile's inputs along a row.
enum class InputOrder {
  plain,          ///< as they are
  kbit_fragment,  ///< word t of piece 4·block + i is word i of piece 4·block + t: the columns that a lane's A
                  ///< registers hold in the kbit-fragment layout
};

struct Activations {
  const void* x;  ///< [m, k] of 16 bits, rows `ldx` elements apart
  int64_t m, k, ldx;
  const int32_t* order = nullptr;  ///< [k] where the input at a place comes from; null: from there
};

/// Bytes of the result for tiles of `rows` rows.
size_t arranged_bytes(int64_t m, int64_t k, int rows);
/// Launches on `stream`. With `overlap` it begins while the launch before still runs, and touches nothing until then.
void arrange(const Activations& x, InputOrder order, int rows, void* arranged, bool overlap,
             const device::Stream& stream);

}  // namespace w4q::kernels::wgmma
