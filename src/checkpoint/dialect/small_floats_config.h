// What config.json says of checkpoints of small floats, in the words of compressed-tensors, ModelOpt and DeepSeek.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/dialect/dialect.h"

namespace w4q::checkpoint {

/// The file that ModelOpt writes beside config.json, and what stands there.
inline constexpr std::string_view modelopt_config_file = "hf_quant_config.json";
io::Json modelopt_side_config(io::Json quantization, const std::vector<io::PlannedTensor>& tensors);

/// Whether all groups of compressed-tensors' config hold floats, in one format or several.
bool holds_float_groups(const DialectSource& source);

/// ActivationForm::state.
void state_float_activations(io::Json& quantization, bool inputs, bool cache);
void state_modelopt_activations(io::Json& quantization, bool inputs, bool cache);

/// Whether a format of compressed-tensors holds floats.
bool is_float_format(std::string_view format) noexcept;
/// Whether it is "naive-quantized", as floats whose activations stay as they are are called, of floats of 8 bits.
bool is_naive_float(const io::Json& quantization);

/// DialectRow::describe.
io::Json describe_float_groups(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept);
io::Json describe_modelopt(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept);
io::Json describe_fp8(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept);

}  // namespace w4q::checkpoint
