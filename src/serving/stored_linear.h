// A linear as the headers of its files hold it, whatever config.json says of it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "io/safetensors.h"

namespace w4q::serving {

/// How the weights of a linear stand in tensors.
enum class Form {
  plain,           ///< weight F32, F16 or BF16 [n, k]; experts [E, n, k]
  awq,             ///< qweight I32 [k, n/8], qzeros [k/g, n/8], scales [k/g, n]
  awq_other,       ///< the words of AWQ's other versions
  gptq,            ///< qweight I32 [k·b/32, n], qzeros [k/g, n·b/32], scales [k/g, n], g_idx [k]
  words,           ///< compressed-tensors: weight_packed I32 [n, ⌈k·b/32⌉], weight_scale [n, k/g]
  int8,            ///< weight I8 [n, k], weight_scale
  fp8,             ///< weight F8_E4M3 [n, k] with weight_scale or weight_scale_inv
  mxfp8,           ///< the same with E8M0 scales U8 [n, k/32]
  nvfp4,           ///< weight_packed U8 [n, k/2], weight_scale F8_E4M3 [n, k/16], weight_global_scale
  nvfp4_modelopt,  ///< weight U8 [n, k/2], weight_scale F8_E4M3 [n, k/16], weight_scale_2
  mxfp4,           ///< weight_packed or weight U8 [n, k/2], weight_scale U8 [n, k/32]
  mxfp4_stack,     ///< gpt-oss: …_blocks U8 [E, n, k/32, 16], …_scales
  humming,         ///< weight I32 [n, k·b/32], weight_scale
  bitsandbytes,    ///< weight U8 with absmax
  other,           ///< packed by a program that none of these loads
};
std::string_view to_string(Form form) noexcept;

struct StoredLinear {
  Form form = Form::plain;
  int64_t n = 0, k = 0;  ///< outputs and inputs of one matrix; 0: headers do not tell
  int64_t experts = 0;   ///< of a stack; 0: one matrix
  std::map<std::string, const io::TensorInfo*, std::less<>> tensors;  ///< by suffix: "qweight", "weight_scale"

  const io::TensorInfo* find(std::string_view suffix) const;
  /// The tensor that holds the codes, for messages.
  const std::string& name() const;
};

/// The linears of a checkpoint by path: "model.layers.0.mlp.up_proj". Norms, biases and what else has no matrix are
/// left out.
std::map<std::string, StoredLinear, std::less<>> stored_linears(
    const std::map<std::string, io::TensorInfo, std::less<>>& tensors);

}  // namespace w4q::serving
