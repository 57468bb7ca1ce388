// The blocks of GGUF tensors: what their bytes mean, and how floats become blocks (docs/gguf.md).
//
// Decoding is the definition: every product and sum is one fp32 operation, rounded, in the order that the format's own
// reference uses, so that the values are equal bit by bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/ggml_type.h"

namespace w4q::formats {

/// True for the types that gguf_decode understands: F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K
/// IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS MXFP4.
bool gguf_decodes(GgmlType type) noexcept;
/// True for the types that gguf_encode makes by the reference's own rule: F32 F16 BF16 Q4_0 Q4_1 Q8_0.
bool gguf_encodes(GgmlType type) noexcept;

/// Decodes whole blocks. `out` has as many elements as `blocks` holds. Throws internal for another size or type.
void gguf_decode(GgmlType type, std::span<const std::byte> blocks, std::span<float> out);

/// The largest magnitude that gguf_encode can represent: beyond it the scale of a block, or the value itself, would be
/// infinite.
float gguf_largest(GgmlType type) noexcept;

/// Rounds `values` to whole blocks by the rules of the reference. All values are finite, at most gguf_largest(type).
/// Throws internal for another size or type.
void gguf_encode(GgmlType type, std::span<const float> values, std::span<std::byte> blocks);

// Blocks from integer planes, nothing rounded: one scale for 32 codes, given as the bits of an f16. Sizes agree, which
// is checked (internal).

/// Q4_0: w = (code − 8) · scale, codes 0 … 15.
void gguf_pack_q4_0(std::span<const uint8_t> codes, std::span<const uint16_t> scales, std::span<std::byte> blocks);
/// Q8_0: w = (code − 128) · scale.
void gguf_pack_q8_0(std::span<const uint8_t> codes, std::span<const uint16_t> scales, std::span<std::byte> blocks);
/// The inverses.
void gguf_unpack_q4_0(std::span<const std::byte> blocks, std::span<uint8_t> codes, std::span<uint16_t> scales);
void gguf_unpack_q8_0(std::span<const std::byte> blocks, std::span<uint8_t> codes, std::span<uint16_t> scales);

}  // namespace w4q::formats
