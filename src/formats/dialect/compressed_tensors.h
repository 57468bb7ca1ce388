// compressed-tensors' "pack-quantized" weights: codes along the inputs as in the canonical layout, zero points packed
// down the outputs (docs/dialects.md). For n outputs × k inputs, G groups:
//
//   .weight_packed      I32 [n, words(k)]             per output a stream of codes: the signed code + 2^(b−1)
//   .weight_scale       F16, BF16 or F32 [n, G]
//   .weight_shape       I64 [2]                       n, k; I32 of some is read
//   .weight_zero_point  I32 [words(n), G]             asymmetric: per group a stream down the outputs
//   .weight_g_idx       I32 [k]                       act order
//
// Releases up to 0.17.1 packed both streams padded, later ones dense (bit_stream.h); of 3, 5, 6 and 7 bits these
// differ.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "formats/dialect/stored_tensor.h"
#include "formats/packed.h"

namespace w4q::formats {

enum class StreamPacking { dense, padded };

/// Words of `count` codes.
int64_t stream_words(StreamPacking packing, int64_t count, int bits) noexcept;
/// The packing of a stream of `count` codes in `words` words: nothing when neither gives so many, or both do and they
/// are not the same; then `ambiguous` says which.
std::optional<StreamPacking> packing_of_width(int64_t words, int64_t count, int bits, bool* ambiguous = nullptr);

/// The tensors of a weight, in the order above. Throws unsupported when n or k is out of range.
std::vector<StoredSpec> compressed_tensors_specs(const Scheme& scheme, int64_t n, int64_t k,
                                                 StreamPacking packing = StreamPacking::dense);
/// Tensors with the types and shapes of compressed_tensors_specs, in its order, a scale [1] for the whole matrix
/// allowed → canonical planes. Throws bad_file naming `name`: a weight_shape that is not n, k, padding bits of codes or
/// zero points that are not zero.
PackedWeight decode_compressed_tensors(const Scheme& scheme, int64_t n, int64_t k, StreamPacking packing,
                                       std::vector<StoredTensor> tensors, std::string_view name);
/// The inverse. Every zero point of `canonical` is below 2^bits.
std::vector<StoredTensor> encode_compressed_tensors(const PackedWeight& canonical,
                                                    StreamPacking packing = StreamPacking::dense);

}  // namespace w4q::formats
