#include "serving/stored_linear.h"

#include <algorithm>
#include <array>

namespace w4q::serving {
namespace {

constexpr std::array form_names{"16 bit",
                                "AWQ words",
                                "AWQ words of another version than gemm",
                                "GPTQ words",
                                "compressed-tensors words",
                                "INT8",
                                "FP8",
                                "MXFP8",
                                "NVFP4",
                                "NVFP4 of ModelOpt",
                                "MXFP4",
                                "stacked MXFP4",
                                "Humming words",
                                "bitsandbytes",
                                "another program's words"};

/// Ends of names, the longer before those that they end with.
constexpr std::array<std::string_view, 27> suffixes{".weight_packed",
                                                    ".weight_scale_inv",
                                                    ".weight_scale_2",
                                                    ".weight_global_scale",
                                                    ".weight_zero_point",
                                                    ".weight_g_idx",
                                                    ".weight_shape",
                                                    ".weight_scale",
                                                    ".weight.absmax",
                                                    ".weight.quant_map",
                                                    ".weight.nested_absmax",
                                                    ".weight.nested_quant_map",
                                                    ".input_global_scale",
                                                    ".input_scale",
                                                    ".zero_point",
                                                    ".weight",
                                                    ".qweight",
                                                    ".qzeros",
                                                    ".scales",
                                                    ".g_idx",
                                                    ".trellis",
                                                    ".codes",
                                                    ".B",
                                                    ".s",
                                                    ".SCB",
                                                    "_blocks",
                                                    "_scales"};

constexpr std::array<std::string_view, 9> code_suffixes{"weight_packed", "qweight", "weight", "_blocks", "trellis",
                                                        "codes",         "B",       "",       "s"};

bool is_type(const io::TensorInfo* info, DType dtype) { return info != nullptr && info->dtype == dtype; }
bool has_rank(const io::TensorInfo* info, size_t rank) { return info != nullptr && info->shape.size() == rank; }

/// gemm's shapes fit each other: qweight [k, n/8] and scales [g, n].
Form form_of_words(StoredLinear& linear, bool awq) {
  const io::TensorInfo* const words = linear.find("qweight");
  const io::TensorInfo* const scales = linear.find("scales");
  if (!is_type(words, DType::i32) || !has_rank(words, 2)) return Form::awq_other;
  if (!has_rank(scales, 2)) return awq ? Form::awq : Form::gptq;
  const int64_t n = scales->shape[1];
  if (words->shape[0] == scales->shape[0]) return Form::awq_other;  // gemv: both have a row for each output
  const bool gemm = words->shape[1] * 8 == n, gptq = words->shape[1] == n;
  if (gptq && !gemm) {
    linear.n = n;
    if (const auto* order = linear.find("g_idx"); has_rank(order, 1)) linear.k = order->shape[0];
    return Form::gptq;
  }
  if (!gemm) return Form::awq_other;
  linear.n = n, linear.k = words->shape[0];
  return Form::awq;
}

Form form_of_packed(StoredLinear& linear) {
  const io::TensorInfo* const codes = linear.find("weight_packed");
  const io::TensorInfo* const scales = linear.find("weight_scale");
  if (has_rank(codes, 2)) linear.n = codes->shape[0];
  if (!is_type(codes, DType::u8)) return Form::words;
  if (has_rank(codes, 2)) linear.k = codes->shape[1] * 2;
  const bool nvfp4 = linear.find("weight_global_scale") != nullptr || is_type(scales, DType::f8_e4m3);
  return nvfp4 ? Form::nvfp4 : Form::mxfp4;
}

Form form_of_weight(StoredLinear& linear) {
  const io::TensorInfo* const weight = linear.find("weight");
  const io::TensorInfo* const scales = linear.find("weight_scale");
  const size_t rank = weight->shape.size();
  if (rank >= 2) linear.n = weight->shape[rank - 2], linear.k = weight->shape[rank - 1];
  if (rank == 3) linear.experts = weight->shape[0];
  if (linear.find("weight.absmax") != nullptr || linear.find("SCB") != nullptr) {
    linear.n = 0, linear.k = 0;  // its words stand in a row
    return Form::bitsandbytes;
  }
  if (is_weight_dtype(weight->dtype)) return Form::plain;
  if (weight->dtype == DType::i8) return Form::int8;
  if (weight->dtype == DType::f8_e4m3) {
    const io::TensorInfo* const any = scales != nullptr ? scales : linear.find("weight_scale_inv");
    const bool exponents = is_type(any, DType::u8) || is_type(any, DType::f8_e8m0);
    return exponents && any->shape.size() == rank && any->shape.back() * 32 == linear.k ? Form::mxfp8 : Form::fp8;
  }
  if (weight->dtype == DType::u8) {
    linear.k *= 2;
    return linear.find("weight_scale_2") != nullptr || is_type(scales, DType::f8_e4m3) ? Form::nvfp4_modelopt
                                                                                       : Form::mxfp4;
  }
  if (weight->dtype == DType::i32) {
    linear.k = 0;
    return Form::humming;
  }
  return Form::other;
}

Form form_of(StoredLinear& linear) {
  if (linear.find("qweight") != nullptr) return form_of_words(linear, linear.find("g_idx") == nullptr);
  if (linear.find("weight_packed") != nullptr) return form_of_packed(linear);
  if (linear.find("weight") != nullptr) return form_of_weight(linear);
  if (const auto* blocks = linear.find("_blocks"); has_rank(blocks, 4)) {
    linear.experts = blocks->shape[0], linear.n = blocks->shape[1], linear.k = blocks->shape[2] * blocks->shape[3] * 2;
    return Form::mxfp4_stack;
  }
  return Form::other;
}

/// A matrix by itself: norms and convolutions are none.
bool is_matrix(const StoredLinear& linear) {
  if (linear.tensors.contains("")) return true;
  if (std::ranges::any_of(linear.tensors, [](const auto& entry) {
        return entry.first != "weight" && std::ranges::find(code_suffixes, entry.first) != code_suffixes.end();
      })) {
    return true;
  }
  const io::TensorInfo* const weight = linear.find("weight");
  if (weight == nullptr) return false;
  return weight->shape.size() == 2 ||
         (weight->shape.size() == 3 && !linear.tensors.empty() && weight->name.find("conv") == std::string::npos);
}

}  // namespace

std::string_view to_string(Form form) noexcept { return form_names[static_cast<size_t>(form)]; }

const io::TensorInfo* StoredLinear::find(std::string_view suffix) const {
  const auto found = tensors.find(suffix);
  return found == tensors.end() ? nullptr : found->second;
}

const std::string& StoredLinear::name() const {
  for (const auto suffix : code_suffixes) {
    if (const auto* info = find(suffix)) return info->name;
  }
  return tensors.begin()->second->name;
}

std::map<std::string, StoredLinear, std::less<>> stored_linears(
    const std::map<std::string, io::TensorInfo, std::less<>>& tensors) {
  std::map<std::string, StoredLinear, std::less<>> linears;
  for (const auto& [name, info] : tensors) {
    const auto suffix = std::ranges::find_if(suffixes, [&](std::string_view end) { return name.ends_with(end); });
    if (suffix != suffixes.end()) {
      const std::string_view bare = suffix->starts_with('.') ? suffix->substr(1) : *suffix;
      linears[name.substr(0, name.size() - suffix->size())].tensors.emplace(bare, &info);
    } else if (info.shape.size() == 3 && is_weight_dtype(info.dtype) && name.find("experts") != std::string::npos) {
      // A stack of experts is a parameter of its own: "….experts.gate_up_proj".
      auto& linear = linears[name];
      linear.tensors.emplace("", &info);
      linear.experts = info.shape[0], linear.n = info.shape[1], linear.k = info.shape[2];
    }
  }
  std::erase_if(linears, [](const auto& entry) { return !is_matrix(entry.second); });
  for (auto& [path, linear] : linears) {
    if (linear.experts == 0) linear.form = form_of(linear);
  }
  return linears;
}

}  // namespace w4q::serving
