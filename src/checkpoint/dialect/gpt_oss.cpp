// gpt-oss: the experts of a mixture in MXFP4, all of one projection in two tensors, and everything else in 16 bit.
#include <utility>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/rows.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/dialect/small_float.h"

namespace w4q::checkpoint {
namespace {

using formats::Scheme;
using formats::StoredSpec;
using formats::StoredTensor;

constexpr int64_t expert_block = 32;
constexpr formats::FloatNames expert_names{".blocks", ".scales", {}, false, false};
constexpr StackedTensor expert_stacks[] = {{".blocks", "_blocks"}, {".scales", "_scales"}};
/// What config.json says is in 16 bit, as the published checkpoints list it.
constexpr const char* kept_modules[] = {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                        "lm_head"};
/// Of this, what would be packed if nobody said so.
constexpr std::string_view kept_globs[] = {"*.self_attn.*"};

constexpr Scheme expert_scheme{
    .family = formats::SchemeFamily::small_float, .bits = 4, .block = expert_block, .scale = formats::ScaleType::e8m0};

/// Codes stand as [n, k / 32, 16]: the bytes of [n, k / 2].
std::vector<StoredSpec> expert_tensors(const Scheme& scheme, int64_t n, int64_t k) {
  auto specs = formats::small_float_specs(scheme, n, k, expert_names);
  specs[0].shape = {n, k / expert_block, expert_block / 2};
  return specs;
}

DialectFit fit_expert(const PackedLinearInfo& info) {
  if (info.passes.front().scheme != expert_scheme) return {std::nullopt, "its experts are MXFP4"};
  if (info.k % expert_block != 0)
    return {std::nullopt, concat("blocks of 32 do not divide the ", info.k, " inputs evenly")};
  return {expert_scheme, {}};
}

formats::PackedWeight decode_expert(const PackedLinearInfo& info, std::vector<StoredTensor> stored) {
  return formats::decode_small_float(info.passes.front().scheme, info.n, info.k, stored, expert_names);
}

std::vector<StoredTensor> encode_expert(const formats::PackedWeight& canonical) {
  auto stored = formats::encode_small_float(canonical, expert_names);
  stored[0].spec = expert_tensors(canonical.scheme, canonical.n, canonical.k)[0];
  return stored;
}

[[noreturn]] void refuse_stack(const DialectSource& source, const std::string& name, const std::string& expected) {
  const io::TensorInfo& info = source.checkpoint.at(name);
  throw Error(ErrorCode::bad_file, concat(printable(name), ": ", dtype_name(info.dtype), " ", shape_text(info.shape)))
      .detail(concat("expected ", expected, ", in ", source.checkpoint.file_of(name)));
}

/// The linears of one stack.
void read_expert_stack(const DialectSource& source, const std::string& stack, QuantizationConfig& result) {
  const std::string codes = concat(stack, expert_stacks[0].whole), scales = concat(stack, expert_stacks[1].whole);
  const Shape shape = source.checkpoint.at(codes).shape;
  const bool known =
      source.checkpoint.at(codes).dtype == DType::u8 && shape.size() == 4 && shape[3] == expert_block / 2;
  if (!known) refuse_stack(source, codes, "U8 [experts, n, k / 32, 16]");
  const Shape expected{shape[0], shape[1], shape[2]};
  const io::TensorInfo& found = source.checkpoint.at(scales);
  if (found.dtype != DType::u8 || found.shape != expected)
    refuse_stack(source, scales, concat("U8 ", shape_text(expected)));
  const int64_t n = shape[1], k = shape[2] * expert_block;
  for (int64_t expert = 0; expert < shape[0]; ++expert) {
    const std::string name = concat(stack, ".", expert);
    PackedLinearInfo info{name, n, k, source.source_dtype, {{expert_scheme, std::string(formats::canonical_layout)}}};
    for (const auto& spec : expert_tensors(expert_scheme, n, k))
      info.stored.push_back({name + spec.suffix, spec.dtype, spec.shape});
    result.linears.emplace(name, std::move(info));
  }
}

QuantizationConfig read_experts(const DialectSource& source) {
  QuantizationConfig result;
  for (const auto& [name, info] : source.checkpoint.tensors()) {
    constexpr std::string_view codes = expert_stacks[0].whole;
    if (name.ends_with(codes)) read_expert_stack(source, name.substr(0, name.size() - codes.size()), result);
  }
  return result;
}

io::Json describe_experts(const std::vector<DialectLinear>&, const std::vector<std::string>&) {
  return {{"quant_method", "mxfp4"}, {"modules_to_not_convert", kept_modules}};
}

}  // namespace

DialectRow gpt_oss_row() {
  return {.name = "gpt-oss",
          .description = "gpt-oss: the experts of a mixture in MXFP4, stacked, all else in 16 bit",
          .holds = "MXFP4 of experts whose gates and ups take turns",
          .detect = [](const DialectSource& source) { return config_text(source, {"quant_method"}, "") == "mxfp4"; },
          .read = read_experts,
          .decode = decode_expert,
          .fit = fit_expert,
          .tensors = expert_tensors,
          .encode = encode_expert,
          .describe = describe_experts,
          .stacks = expert_stacks,
          .keeps = kept_globs};
}

}  // namespace w4q::checkpoint
