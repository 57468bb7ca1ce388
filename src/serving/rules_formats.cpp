// Which program loads which format at all.
#include <algorithm>
#include <array>

#include "core/text.h"
#include "serving/rules.h"

namespace w4q::serving {
namespace {

using enum Program;

constexpr Programs everyone{vllm, sglang, transformers, llama_cpp, trt_llm, mlx};
constexpr Programs folders{vllm, sglang, transformers, trt_llm, mlx};

constexpr std::string_view to_gguf = "w4q repack --to gguf makes a GGUF file of it";

constexpr std::array<FormatRow, 19> format_table{{
    {Method::none, "16 bit", folders, to_gguf},
    {Method::awq, "AWQ", {vllm, sglang, transformers, mlx}, "w4q repack --to compressed-tensors holds the same codes"},
    {Method::gptq,
     "GPTQ",
     {vllm, sglang, transformers, mlx},
     "w4q repack --to compressed-tensors or awq-gemm holds the same codes"},
    {Method::compressed_tensors, "compressed-tensors", folders, to_gguf},
    {Method::fp8, "FP8", folders, "w4q repack --to hf16 decodes it"},
    {Method::mxfp4, "MXFP4", folders, "w4q repack --to hf16 decodes it"},
    {Method::mxfp8, "MXFP8", {vllm, sglang, transformers, mlx}, "an FP8 or 16-bit version of the model"},
    {Method::modelopt, "ModelOpt", {vllm, sglang, trt_llm, mlx}, "w4q repack --to hf16 decodes it"},
    {Method::auto_round,
     "AutoRound",
     {vllm, sglang, transformers},
     "w4q repack --to gptq-v1, awq-gemm or compressed-tensors holds the same codes"},
    {Method::bitsandbytes,
     "bitsandbytes",
     {sglang, transformers},
     "quantize to integers: w4q quantize --to compressed-tensors"},
    {Method::humming, "Humming", {vllm, sglang}, "w4q repack --to compressed-tensors"},
    {Method::exl3, "EXL3", {}, "quantize to integers: w4q quantize --to compressed-tensors"},
    {Method::marlin, "Marlin's words", {}, "w4q repack --to gptq-v1 or compressed-tensors holds the same codes"},
    {Method::torchao, "torchao", {vllm, transformers}, "quantize the 16-bit model again"},
    {Method::quark, "quark", {vllm, sglang, transformers}, "quantize the 16-bit model again"},
    {Method::w4q, "w4q's own planes", {}, "w4q repack --to compressed-tensors, gptq-v1, awq-gemm or gguf"},
    {Method::turboquant, "TurboQuant", {}, "quantize to integers: w4q quantize --to compressed-tensors"},
    {Method::gguf, "GGUF", {sglang, transformers, llama_cpp}, "w4q repack FILE --to hf16 makes a folder of it"},
    {Method::other, "a format that none of these programs is known to load", {}, "quantize the 16-bit model again"},
}};

const FormatRow& row_of(Method method) { return *std::ranges::find(format_table, method, &FormatRow::method); }

void formats(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const FormatRow& row = row_of(model.method());
  if (row.loads.has(question.program)) return;
  std::vector<std::string> loaded;
  for (const FormatRow& other : format_table) {
    if (other.loads.has(question.program)) loaded.emplace_back(other.name);
  }
  std::string remedy(row.remedy);
  if (question.program == Program::llama_cpp) remedy = to_gguf;
  if (question.program == Program::vllm && model.method() == Method::gguf) {
    remedy = "vLLM's plugin vllm-gguf-plugin loads it; " + remedy;
  }
  const std::string name = row.method == Method::other ? model.method_name() : std::string(row.name);
  findings.add(Severity::refused, {},
               model.method() == Method::gguf || model.place().empty() ? "" : model.place() + ".quant_method",
               join(loaded), name, remedy);
}

void unnamed(const Question& question, Findings& findings) {
  const auto& linears = question.model.linears();
  if (question.model.method() != Method::none) return;
  for (const auto& [path, linear] : linears) {
    if (linear.form == Form::plain) continue;
    findings.add(Severity::refused, linear.name(), "config.json", "a quantization_config that says how it is packed",
                 concat("none, and ", to_string(linear.form)),
                 "put the quantization_config that it was made with back");
  }
}

}  // namespace

std::span<const FormatRow> format_rows() { return format_table; }

std::vector<Rule> format_rules() {
  return {
      {"format", everyone, "the format is one that the program loads",
       "vllm and sglang layers/quantization/__init__.py, transformers quantizers/auto.py, mlx_lm/utils.py load_model",
       formats},
      {"no-config", folders, "packed weights have a quantization_config", "config.json", unnamed},
  };
}

}  // namespace w4q::serving
