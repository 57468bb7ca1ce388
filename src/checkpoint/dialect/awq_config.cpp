#include "checkpoint/dialect/awq_config.h"

#include <algorithm>
#include <iterator>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/fused.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"

namespace w4q::checkpoint {
namespace {

using formats::Scheme;

constexpr int bits = 4;
constexpr int64_t fields = 8;
constexpr std::string_view head = "lm_head";

/// AutoAWQ's own spelling of the keys is accepted beside Hugging Face's.
bool is_awq(const DialectSource& source) {
  if (auto_round_words(source) == "awq") return true;
  if (source.config.contains("quant_method")) return config_text(source, {"quant_method"}, "") == "awq";
  return source.config.contains("zero_point");
}

std::string version_of_config(const DialectSource& source) {
  std::string version = config_text(source, {"version"}, "gemm");
  std::ranges::transform(version, version.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return version;
}

/// What types and shapes of one linear allow: every version that they fit.
std::vector<std::string> possible_versions(const io::Checkpoint& checkpoint, const std::string& name) {
  if (checkpoint.at(name + ".qweight").dtype == DType::i16) return {"gemv_fast"};
  const Shape& qweight = matrix_shape(checkpoint, name + ".qweight");
  const Shape& scales = matrix_shape(checkpoint, name + ".scales");
  std::vector<std::string> versions;
  if (qweight[1] == 2 * scales[1] && !checkpoint.contains(name + ".qzeros")) versions.emplace_back("marlin");
  if (scales[1] == qweight[1] * fields) versions.emplace_back("gemm");
  if (scales[0] == qweight[0]) versions.emplace_back("gemv");
  return versions;
}

Scheme scheme_of(const DialectSource& source) {
  if (const int64_t found = config_integer(source, {"bits", "w_bit"}, bits, 1, 64); found != bits) {
    throw Error(ErrorCode::unsupported, concat(source.place, ": AWQ with ", found, " bits"))
        .detail("AWQ's words hold 4-bit codes");
  }
  return {formats::SchemeFamily::integer, bits, config_group(source, {"group_size", "q_group_size"}),
          formats::ScaleType::f16,        true, false};
}

/// modules_to_not_convert is matched as a part of a module's path.
void check_not_converted(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  for (const auto& skipped : kept) {
    const auto hit = std::ranges::find_if(
        linears, [&](const DialectLinear& linear) { return linear.name.find(skipped) != std::string::npos; });
    if (hit == linears.end()) continue;
    throw Error(ErrorCode::unsupported, concat(printable(hit->name), ": AWQ's config cannot tell it from ", skipped))
        .detail(concat("modules_to_not_convert leaves out every module whose path contains ", skipped))
        .hint("a GPTQ or compressed-tensors dialect can; w4q list --dialects");
  }
}

}  // namespace

std::string awq_version(const DialectSource& source) {
  if (!is_awq(source)) return {};
  std::string version = version_of_config(source);
  const auto linears = linears_with(source.checkpoint, ".qweight");
  if (linears.empty()) return version;
  const auto possible = possible_versions(source.checkpoint, linears.front());
  if (possible.empty() || std::ranges::find(possible, version) != possible.end()) return version;
  return possible.front();
}

QuantizationConfig read_awq(const DialectSource& source, const AwqVersion& version) {
  QuantizationConfig result;
  bool symmetric = true;
  Scheme scheme = scheme_of(source);
  for (const auto& name : linears_with(source.checkpoint, ".qweight")) {
    const auto [n, k] = version.sizes(matrix_shape(source.checkpoint, name + ".qweight"));
    formats::check_dimensions(n, k, name);
    // Of a type that the version does not have, the tensors of f16 say what is expected.
    const auto type = integer_scale_type(source.checkpoint, name + ".scales");
    const bool has = std::ranges::find(version.scales, type) != version.scales.end();
    scheme.scale = has ? type : formats::ScaleType::f16;
    const auto specs = version.tensors(scheme, n, k);
    PackedLinearInfo info = dialect_linear(name, scheme, n, k, source.source_dtype, specs);
    check_stored(source.checkpoint, info, concat("AWQ with group_size ", group_size_of(scheme)));
    if (version.is_symmetric != nullptr) symmetric = symmetric && version.is_symmetric(source.checkpoint, info);
    result.linears.emplace(name, std::move(info));
  }
  for (auto& [name, info] : result.linears) info.passes.front().scheme.asymmetric = !symmetric;
  return result;
}

io::Json describe_awq(std::string_view version, const std::vector<DialectLinear>& linears,
                      std::vector<std::string> kept) {
  const Scheme& scheme = linears.front().scheme;
  for (const auto& linear : linears) {
    if (linear.name == head) {
      throw Error(ErrorCode::unsupported, "lm_head: AWQ packs the linears of the layers only")
          .hint("a GPTQ dialect can hold it, or quantize without --lm-head");
    }
    if (linear.scheme.block == scheme.block) continue;
    throw Error(ErrorCode::unsupported, concat(printable(linear.name), ": AWQ has one group_size for all linears"))
        .detail(concat(group_size_of(linear.scheme), " here, ", group_size_of(scheme), " in ",
                       printable(linears.front().name)))
        .hint("a GPTQ or compressed-tensors dialect can say it; w4q list --dialects");
  }
  std::erase(kept, head);
  std::vector<std::string> packed;
  for (const auto& linear : linears) packed.push_back(linear.name);
  std::ranges::move(fused_names(kept, packed), std::back_inserter(kept));
  check_not_converted(linears, kept);
  io::Json json = {{"quant_method", "awq"},           {"bits", bits},       {"group_size", group_size_of(scheme)},
                   {"zero_point", scheme.asymmetric}, {"version", version}, {"modules_to_not_convert", nullptr}};
  if (!kept.empty()) json["modules_to_not_convert"] = kept;
  return json;
}

}  // namespace w4q::checkpoint
