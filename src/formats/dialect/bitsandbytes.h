// bitsandbytes' 4-bit weights (NF4, FP4): bytes of two codes, high nibble first, over the matrix taken flat
// (docs/dialects.md). For n outputs × k inputs, B blocks:
//
//   .weight                        U8 [ceil(n·k/2), 1]    any type of so many bytes may hold them
//   .weight.absmax                 F32 [B]; nested U8 [B]
//   .weight.quant_map              F32 [16]
//   .weight.nested_absmax          F32 [ceil(B/256)]      nested
//   .weight.nested_quant_map       F32 [256]              nested
//   .weight.quant_state.bitsandbytes__nf4 (or __fp4)      U8 [length]: JSON, the rest of what a reader needs
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "formats/dialect/stored_tensor.h"
#include "formats/packed.h"

namespace w4q::formats {

inline constexpr std::string_view bitsandbytes_state = ".weight.quant_state.bitsandbytes__";

/// The JSON's content. Its members are written in the order that bitsandbytes has.
struct BitsandbytesState {
  std::string type;  ///< "nf4" or "fp4"
  int block = 64;
  std::string dtype = "bfloat16";  ///< torch's name of the type before packing
  int64_t n = 0;
  int64_t k = 0;
  bool nested = false;  ///< absmax are bytes; "nested_blocksize": 256, "nested_dtype": "float32"
  float nested_offset = 0;
};

/// The JSON text as bitsandbytes writes it, the offset in the shortest digits that give the same double.
std::string to_json_text(const BitsandbytesState& state);

/// "nf4" or "fp4", by the table of a lut weight; empty for a table that is neither.
std::string_view bitsandbytes_type(const PackedWeight& canonical);

/// Everything but the state's tensor, whose length is its text's.
std::vector<StoredSpec> bitsandbytes_specs(const Scheme& scheme, int64_t n, int64_t k);
/// Canonical planes of tensors with the byte counts of bitsandbytes_specs. With an odd n·k the last low nibble is
/// dropped.
PackedWeight decode_bitsandbytes(const BitsandbytesState& state, std::span<const StoredTensor> tensors);
/// The inverse, the state's tensor last. `dtype`: torch's name.
std::vector<StoredTensor> encode_bitsandbytes(const PackedWeight& canonical, std::string_view dtype);

}  // namespace w4q::formats
