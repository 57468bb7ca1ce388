// What configs say of integers that are stored a byte each (byte_integers.cpp).
#pragma once

#include <string>
#include <vector>

#include "checkpoint/dialect/dialect.h"

namespace w4q::checkpoint {

/// Whether quantization_config says so: compressed-tensors' formats of integers that are not packed, Quark's int8,
/// ModelOpt's INT8, SGLang's w8a8_int8 and blockwise_int8.
bool states_byte_integers(const io::Json& quantization);

/// What AMD Quark's config says that weights are: "fp8_e4m3", "fp4", "int8"; empty: it is not Quark's, or says nothing.
std::string quark_weights(const io::Json& quantization);

/// DialectRow::describe, in the words of compressed-tensors.
io::Json describe_byte_integers(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept);

}  // namespace w4q::checkpoint
