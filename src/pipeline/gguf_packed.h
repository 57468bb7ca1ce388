// Integer weights that GGUF can hold without loss: symmetric 4 and 8 bits, groups of 32, f16 scales are Q4_0 and Q8_0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "core/ggml_type.h"
#include "formats/packed.h"

namespace w4q::pipeline {

/// The scheme that says the same as a block type, and the reverse; nothing where there is none.
std::optional<formats::Scheme> scheme_of_gguf(GgmlType type);
std::optional<GgmlType> gguf_of_scheme(const formats::Scheme& scheme);

/// Row `row` of a canonical weight as blocks of `type`, bit by bit. k is a multiple of 32.
void pack_gguf_row(const formats::PackedWeight& weight, int64_t row, GgmlType type, std::span<std::byte> blocks);

/// A canonical weight of n × k from blocks, bit by bit; `row_bytes(row)` are the blocks of output `row`. Not validated:
/// scales may be anything.
formats::PackedWeight packed_from_gguf(GgmlType type, int64_t n, int64_t k,
                                       const std::function<std::span<const std::byte>(int64_t row)>& row_bytes);

}  // namespace w4q::pipeline
