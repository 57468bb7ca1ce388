// Checkpoints of Humming, the GEMM library that vLLM and SGLang install: integers of 2 to 8 bits and small floats, codes
// as one dense stream a row whatever they are.
#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/dialect/rows.h"
#include "checkpoint/fused.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/dialect/compressed_tensors.h"
#include "formats/dialect/small_float.h"
#include "formats/scale_codec.h"
#include "formats/small_float.h"
#include "text/regex.h"
#include "text/work_budget.h"

namespace w4q::checkpoint {
namespace {

using formats::FloatNames;
using formats::PackedWeight;
using formats::ScaleType;
using formats::Scheme;
using formats::SchemeFamily;
using formats::StoredSpec;
using formats::StoredTensor;
using io::Json;

constexpr std::string_view codes_suffix = ".weight", scales_suffix = ".weight_scale", zeros_suffix = ".zero_point",
                           factor_suffix = ".weight_scale_2";
constexpr std::string_view head = "lm_head";
constexpr FloatNames float_names{codes_suffix, scales_suffix, factor_suffix, false, false};

/// Humming's names of types of codes and of scales.
constexpr std::string_view float4 = "float4e2m1", float8 = "float8e4m3", powers = "float8e8m0", floats32 = "float32";

/// The width of the blocks of inputs that a Hadamard matrix turns, without signs, and the largest that its kernel has.
constexpr const char* rotation_key = "hadamard_block_size";
constexpr int64_t largest_rotation = 512;

constexpr std::array widths{2, 3, 4, 5, 6, 7, 8};
constexpr std::array scale_types{ScaleType::bf16, ScaleType::f16};
constexpr IntegerLimits limits{
    .bits = widths, .scales = scale_types, .n_multiple = 32, .k_multiple = 32, .whole_groups = true};

bool is_integer(const Scheme& scheme) { return scheme.family == SchemeFamily::integer; }

// ---- config ---------------------------------------------------------------------------------------------------------

/// What config.json says of a linear.
struct Setting {
  std::string codes, scales;
  int group = 0, group_rows = 0;
  int64_t rotation = 0;
  bool zeros = false, tensor_scale = false, whole = false;
};

Setting read_setting(const Json& config, const std::string& place, const io::Checkpoint& checkpoint) {
  const DialectSource source{config, place, checkpoint};
  const auto refuse = [&](const std::string& what) -> Error {
    return {ErrorCode::unsupported, concat(place, ": ", what)};
  };
  if (config_flag(source, {"is_fp_zero_point"}, false)) throw refuse("is_fp_zero_point: zero points that are no codes");
  Setting result;
  result.codes = config_text(source, {"b_dtype", "weight_dtype", "dtype"}, "");
  result.scales = config_text(source, {"bs_dtype", "weight_scale_dtype", "scale_dtype"}, "");
  result.group = static_cast<int>(config_integer(source, {"weight_scale_group_size", "group_size"}, 0, 0, 1 << 20));
  result.rotation = config_integer(source, {rotation_key}, 0, 0, largest_rotation);
  if ((result.rotation & (result.rotation - 1)) != 0) {
    throw refuse(concat(rotation_key, " ", result.rotation, ": no power of two"));
  }
  result.group_rows =
      static_cast<int>(config_integer(source, {"weight_scale_group_size_n", "group_size_n"}, 0, 0, 1 << 20));
  result.zeros = config_flag(source, {"has_zero_point"}, false);
  const std::string second = config_text(source, {"weight_scale_2_type", "scale_2_type"}, "none");
  if (second != "none" && second != "tensor") throw refuse(concat("weight_scale_2_type ", printable(second)));
  result.tensor_scale = second == "tensor";
  result.whole = config_text(source, {"weight_scale_type", "scale_type"}, "") == "tensor";
  return result;
}

/// Settings of linears: those of all, and rules that change some keys.
class Settings {
 public:
  explicit Settings(const DialectSource& source) : source_(source) {
    const Json* const dynamic = config_overrides(source, "dynamic");
    if (dynamic == nullptr) return;
    for (const auto& [key, value] : dynamic->items()) {
      if (!key.starts_with("+:")) continue;
      const std::string place = concat(source.place, ": dynamic[\"", printable(key), "\"]");
      if (!value.is_object()) throw Error(ErrorCode::bad_file, place + " is not an object");
      rules_.push_back({text::Regex(std::string_view(key).substr(2), place), value, place});
    }
  }

  Setting of(const std::string& linear) {
    for (const Rule& rule : rules_) {
      const auto match = rule.expression.search(linear, 0, budget_);
      if (!match || match->begin != 0) continue;
      Json merged = source_.config;
      merged.update(rule.overrides);
      return read_setting(merged, rule.place, source_.checkpoint);
    }
    return read_setting(source_.config, source_.place, source_.checkpoint);
  }

 private:
  struct Rule {
    text::Regex expression;
    Json overrides;
    std::string place;
  };

  const DialectSource& source_;
  std::vector<Rule> rules_;
  text::WorkBudget budget_{1 << 20};
};

/// The keys of a linear, all of them, for a rule adds to what all have.
Json describe_scheme(const Scheme& scheme, bool symmetric) {
  const bool blocks = !is_integer(scheme) && scheme.block == 128, whole = scheme.block == formats::whole_tensor;
  const std::string codes =
      is_integer(scheme) ? concat("uint", scheme.bits) : std::string(scheme.bits == 4 ? float4 : float8);
  Json json = {{"b_dtype", codes},
               {"bs_dtype", nullptr},
               {"weight_scale_group_size", scheme.block > 0 ? scheme.block : 0},
               {"weight_scale_group_size_n", blocks ? 128 : 0},
               {"weight_scale_type", blocks             ? "block"
                                     : whole            ? "tensor"
                                     : scheme.block > 0 ? "group"
                                                        : "channel"},
               {"weight_scale_2_type", scheme.scale == ScaleType::e4m3 ? "tensor" : "none"},
               {"has_zero_point", is_integer(scheme) && !symmetric}};
  if (scheme.scale == ScaleType::e4m3) json["bs_dtype"] = float8;
  if (scheme.scale == ScaleType::e8m0) json["bs_dtype"] = powers;
  return json;
}

/// Of a linear; the key of rotations stands where any of them has one.
Json describe_linear(const DialectLinear& linear, bool rotates) {
  Json json = describe_scheme(linear.scheme, !linear.scheme.asymmetric);
  if (rotates) json[rotation_key] = linear.rotation.identity() ? 0 : linear.rotation.block;
  return json;
}

std::string exactly(const std::string& path) {
  std::string result = "^";
  for (const char c : path) result += c == '.' ? std::string("\\.") : std::string(1, c);
  return result + "$";
}

std::vector<std::string> with_fused(std::vector<std::string> names, const std::vector<std::string>& others) {
  std::ranges::move(fused_names(names, others), std::back_inserter(names));
  return names;
}

Json describe(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  std::vector<std::pair<Json, std::vector<std::string>>> groups;
  std::vector<std::string> packed;
  const bool rotates = std::ranges::any_of(linears, [](const auto& linear) { return !linear.rotation.identity(); });
  for (const auto& linear : linears) {
    packed.push_back(linear.name);
    Json keys = describe_linear(linear, rotates);
    const auto same = std::ranges::find(groups, keys, &std::pair<Json, std::vector<std::string>>::first);
    (same == groups.end() ? groups.emplace_back(std::move(keys), std::vector<std::string>{}) : *same)
        .second.push_back(linear.name);
  }
  Json json = {{"quant_method", "humming"}};
  if (groups.empty()) return json;
  const auto most = std::ranges::max_element(groups, {}, [](const auto& group) { return group.second.size(); });
  json.update(most->first);
  Json dynamic = Json::object();
  // Programs match the names of what they fuse.
  for (const auto& name : with_fused(kept, packed)) {
    if (name != head) dynamic["-:" + exactly(name)] = Json::object();
  }
  for (auto group = groups.begin(); group != groups.end(); ++group) {
    if (group == most) continue;
    std::vector<std::string> others = kept;
    std::ranges::copy_if(packed, std::back_inserter(others), [&](const std::string& name) {
      return std::ranges::find(group->second, name) == group->second.end();
    });
    for (const auto& name : with_fused(group->second, others)) dynamic["+:" + exactly(name)] = group->first;
  }
  if (!dynamic.empty()) json["dynamic"] = std::move(dynamic);
  json["ignore"] = Json::array({head});
  return json;
}

// ---- tensors --------------------------------------------------------------------------------------------------------

/// compressed-tensors' tensors under Humming's names; its shape has none.
constexpr std::pair<std::string_view, std::string_view> renamed[] = {
    {".weight_packed", codes_suffix}, {".weight_scale", scales_suffix}, {".weight_zero_point", zeros_suffix}};

std::optional<std::string> humming_name(std::string_view theirs) {
  for (const auto& [from, to] : renamed) {
    if (from == theirs) return std::string(to);
  }
  return std::nullopt;
}

/// Words of 32 bits, whatever the codes are.
StoredSpec words_of(StoredSpec codes) {
  const int64_t bytes_a_row = codes.shape[1];
  return {codes.suffix, DType::i32, {codes.shape[0], bytes_a_row / 4}};
}

std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  std::vector<StoredSpec> result;
  if (is_integer(scheme)) {
    for (auto& spec : formats::compressed_tensors_specs(scheme, n, k)) {
      if (auto name = humming_name(spec.suffix)) result.push_back({*name, spec.dtype, spec.shape});
    }
    return result;
  }
  result = formats::small_float_specs(scheme, n, k, float_names);
  result.front() = words_of(result.front());
  if (scheme.scale == ScaleType::e8m0) result[1].dtype = DType::f8_e8m0;
  return result;
}

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  const auto specs = tensors(canonical.scheme, canonical.n, canonical.k);
  auto made = is_integer(canonical.scheme) ? formats::encode_compressed_tensors(canonical)
                                           : formats::encode_small_float(canonical, float_names);
  std::vector<StoredTensor> result;
  for (auto& tensor : made) {
    if (is_integer(canonical.scheme) && !humming_name(tensor.spec.suffix)) continue;
    result.push_back({specs[result.size()], std::move(tensor.bytes)});
  }
  return result;
}

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> tensors) {
  const Scheme& scheme = info.passes.front().scheme;
  if (!is_integer(scheme)) return formats::decode_small_float(scheme, info.n, info.k, tensors, float_names);
  std::vector<StoredTensor> theirs;
  for (auto& spec : formats::compressed_tensors_specs(scheme, info.n, info.k)) {
    const auto name = humming_name(spec.suffix);
    if (!name) {
      theirs.push_back(formats::allocate_stored(spec));
      theirs.back().bytes.as<int64_t>()[0] = info.n;
      theirs.back().bytes.as<int64_t>()[1] = info.k;
      continue;
    }
    const auto found = std::ranges::find_if(tensors, [&](const auto& tensor) { return tensor.spec.suffix == *name; });
    theirs.push_back({spec, std::move(found->bytes)});
  }
  return formats::decode_compressed_tensors(scheme, info.n, info.k, formats::StreamPacking::dense, std::move(theirs),
                                            info.name);
}

/// The type of scales that are no floats of 8 bits.
ScaleType stored_scales(const DialectSource& source, const std::string& name) {
  const DType dtype = source.checkpoint.at(name).dtype;
  for (const auto type : {ScaleType::bf16, ScaleType::f16, ScaleType::f32}) {
    if (formats::scale_codec(type).dtype == dtype) return type;
  }
  throw Error(ErrorCode::bad_file, concat(printable(name), ": wrong type"))
      .detail(concat("expected BF16, F16 or F32, found ", dtype_name(dtype)));
}

Scheme scheme_of(const DialectSource& source, const std::string& linear, const Setting& setting) {
  const auto refuse = [&](const std::string& what) -> Error {
    return Error(ErrorCode::unsupported, concat(printable(linear), ": ", what)).detail(concat("in ", source.place));
  };
  const std::string scales = concat(linear, scales_suffix);
  for (const int bits : widths) {
    if (setting.codes != concat("uint", bits) && setting.codes != concat("int", bits)) continue;
    if (!setting.scales.empty() && setting.scales != "float16" && setting.scales != "bfloat16") {
      throw refuse(concat("integers under scales of type ", printable(setting.scales)));
    }
    if (setting.tensor_scale || setting.whole) throw refuse("integers under a scale of the tensor");
    return {SchemeFamily::integer, bits, setting.group, stored_scales(source, scales), setting.zeros, false};
  }
  Scheme scheme{.family = SchemeFamily::small_float, .bits = setting.codes == float4 ? 4 : 8, .block = setting.group};
  const bool mx = setting.scales == powers;
  if (setting.codes == float4 && setting.scales == float8 && setting.tensor_scale && setting.group == 16) {
    scheme.scale = ScaleType::e4m3;
    return scheme;
  }
  if ((setting.codes == float4 || setting.codes == float8) && mx && setting.group == 32 && !setting.tensor_scale) {
    scheme.scale = ScaleType::e8m0;
    return scheme;
  }
  const bool blocks = setting.group == 128 && setting.group_rows == 128;
  const bool float_scales = setting.scales.empty() || setting.scales == "float16" || setting.scales == "bfloat16" ||
                            setting.scales == floats32;
  if (setting.codes == float8 && float_scales && !setting.tensor_scale && (blocks || setting.group == 0)) {
    scheme.scale = stored_scales(source, scales);
    if (setting.whole) scheme.block = formats::whole_tensor;
    return scheme;
  }
  throw refuse(concat("codes of type \"", printable(setting.codes), "\", scales of type \"", printable(setting.scales),
                      "\", groups of ", setting.group));
}

formats::Rotation rotation_of(const DialectSource& source, const PackedLinearInfo& info, int64_t block) {
  if (info.k % block == 0) return {block, std::nullopt};
  throw Error(ErrorCode::bad_file, concat(printable(info.name), ": its ", info.k, " inputs are no whole blocks of ",
                                          rotation_key, " ", block))
      .detail(concat("in ", source.place))
      .hint("a width that divides them, or 0 where inputs are as they are");
}

QuantizationConfig read(const DialectSource& source) {
  Settings settings(source);
  QuantizationConfig result;
  for (const auto& name : linears_with(source.checkpoint, codes_suffix)) {
    const std::string codes = concat(name, codes_suffix);
    if (source.checkpoint.at(codes).dtype != DType::i32) continue;
    const Setting setting = settings.of(name);
    const Scheme scheme = scheme_of(source, name, setting);
    const Shape shape = matrix_shape(source.checkpoint, codes);
    const int64_t n = shape[0], k = shape[1] * 32 / scheme.bits;
    PackedLinearInfo info = dialect_linear(name, scheme, n, k, source.source_dtype, tensors(scheme, n, k));
    check_stored(source.checkpoint, info, concat("Humming, ", formats::to_string(scheme)));
    if (setting.rotation > 1) info.passes.front().rotation = rotation_of(source, info, setting.rotation);
    result.linears.emplace(name, std::move(info));
  }
  return result;
}

/// What keeps small floats out; empty: nothing.
std::string obstacle(const PackedLinearInfo& info) {
  const Scheme& scheme = info.passes.front().scheme;
  const bool blocks = scheme.block == 128, mx = scheme.scale == ScaleType::e8m0;
  if (info.k % 32 != 0) return concat(info.k, " inputs are no whole words of 32");
  if (scheme.block > 0 && info.k % scheme.block != 0) {
    return concat("blocks of ", scheme.block, " do not divide the ", info.k, " inputs evenly");
  }
  if (blocks && (mx || scheme.scale != ScaleType::f32)) return "its scales of 128 × 128 are F32";
  if (blocks && info.n % 128 != 0) return concat("blocks of 128 do not divide the ", info.n, " outputs evenly");
  if (scheme.block == formats::whole_tensor && scheme.scale != ScaleType::f32) return "its scale of a tensor is F32";
  if (scheme.block == formats::whole_row && scheme.scale == ScaleType::f32) return "its scales of rows have 16 bits";
  return {};
}

DialectFit fit(const PackedLinearInfo& info) {
  const Scheme& scheme = info.passes.front().scheme;
  if (scheme.family != SchemeFamily::small_float) return fit_integer(info, limits);
  if (auto why = obstacle(info); !why.empty()) return {std::nullopt, std::move(why)};
  return {scheme, {}};
}

std::string refuses_rotation(const PackedLinearInfo& info) {
  const formats::Rotation& rotation = info.passes.front().rotation;
  const std::string turned = concat("its input is rotated by ", formats::to_string(rotation), ", ");
  if (rotation.seed) return turned + "and readers have no signs: quantize with --rotation-seed none";
  if (rotation.block == formats::whole_row || rotation.block > largest_rotation) {
    return concat(turned, "and readers have blocks of at most ", largest_rotation);
  }
  if (info.k % rotation.block != 0) return concat(turned, "whose blocks do not divide the ", info.k, " inputs evenly");
  return {};
}

std::string refuses(const PackedWeight& canonical) {
  if (is_integer(canonical.scheme)) return refuse_large_zero(canonical);
  if (!canonical.scheme.divisor || formats::has_exact_reciprocal(formats::tensor_factor(canonical))) return {};
  return concat("the reciprocal of its tensor's divisor ", formats::tensor_factor(canonical),
                " is no float: values would move by a rounding of fp32");
}

}  // namespace

DialectRow humming_row() {
  return {.name = "humming",
          .description = "Humming, the GEMM library of vLLM and SGLang",
          .holds = "2 to 8 bits with and without zero points, NVFP4, MXFP4, MXFP8, FP8 of tensors, rows and blocks",
          .detect = [](const DialectSource& source) { return config_text(source, {"quant_method"}, "") == "humming"; },
          .read = read,
          .decode = decode,
          .fit = fit,
          .tensors = tensors,
          .encode = encode,
          .describe = describe,
          .refuses = refuses,
          .refuses_rotation = refuses_rotation};
}

}  // namespace w4q::checkpoint
