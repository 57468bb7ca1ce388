// Checkpoints of small floats: compressed-tensors' float formats, ModelOpt's, and FP8 in blocks as DeepSeek stores it.
#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/dialect/rows.h"
#include "checkpoint/dialect/small_floats_config.h"
#include "checkpoint/low_precision.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/dialect/small_float.h"
#include "formats/scale_codec.h"
#include "formats/small_float.h"

namespace w4q::checkpoint {
namespace {

using formats::FloatNames;
using formats::PackedWeight;
using formats::ScaleType;
using formats::Scheme;
using formats::SchemeFamily;
using formats::StoredSpec;
using formats::StoredTensor;

enum class Dialect { compressed_tensors, modelopt, fp8 };

constexpr std::string_view activation_suffixes[] = {
    ".input_scale", ".input_global_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale"};
constexpr std::string_view plain = ".weight", packed = ".weight_packed";

/// The names of the tensors, by the width of the codes.
FloatNames names_of(Dialect dialect, int bits) {
  switch (dialect) {
    case Dialect::compressed_tensors:
      return {bits == 4 ? packed : plain, ".weight_scale", ".weight_global_scale", true, false};
    case Dialect::modelopt:
      return {plain, ".weight_scale", ".weight_scale_2", false, true};
    case Dialect::fp8:
      break;
  }
  return {plain, ".weight_scale_inv", {}, false, false};
}

[[noreturn]] void refuse(const DialectSource& source, const std::string& name, const std::string& expected) {
  const io::TensorInfo& info = source.checkpoint.at(name);
  throw Error(ErrorCode::unsupported,
              concat(printable(name), ": ", dtype_name(info.dtype), " ", shape_text(info.shape)))
      .detail(concat("expected ", expected, ", in ", source.checkpoint.file_of(name)));
}

ScaleType scale_type(const DialectSource& source, const std::string& name) {
  const DType dtype = source.checkpoint.at(name).dtype;
  if (dtype == DType::u8) return ScaleType::e8m0;
  for (const auto type : {ScaleType::f32, ScaleType::f16, ScaleType::bf16, ScaleType::e4m3, ScaleType::e8m0}) {
    if (formats::scale_codec(type).dtype == dtype) return type;
  }
  refuse(source, name, "scales of F32, F16, BF16, F8_E4M3, F8_E8M0 or U8");
}

Scheme scheme_with(int bits, int block, ScaleType scale) {
  return {.family = SchemeFamily::small_float, .bits = bits, .block = block, .scale = scale};
}

/// What types and shapes say: n × k codes of 8 bits under scales of this shape.
std::optional<Scheme> fp8_scheme(const Shape& scales, int64_t n, int64_t k, ScaleType type) {
  const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  if (type == ScaleType::e8m0 && scales == Shape{n, blocks(k, 32)}) return scheme_with(8, 32, type);
  if (scales == Shape{blocks(n, 128), blocks(k, 128)}) return scheme_with(8, 128, type);
  if (element_count(scales) == 1) return scheme_with(8, formats::whole_tensor, type);
  if (scales == Shape{n} || scales == Shape{n, 1}) return scheme_with(8, formats::whole_row, type);
  return std::nullopt;
}

float factor_of(const DialectSource& source, const std::string& name) {
  const io::TensorInfo& info = source.checkpoint.at(name);
  if (info.dtype != DType::f32 || element_count(info.shape) != 1) refuse(source, name, "one F32");
  return Buffer::copy_of(source.checkpoint.load(name)->bytes).as<const float>()[0];
}

Scheme scheme_of(const DialectSource& source, const std::string& linear, const FloatNames& names, int bits, int64_t n,
                 int64_t k) {
  const std::string scales = concat(linear, names.scales);
  const ScaleType type = scale_type(source, scales);
  const Shape shape = shape_of_scales(source.checkpoint.at(scales).shape);
  if (bits == 8) {
    const auto scheme = fp8_scheme(shape, n, k, type);
    if (scheme && formats::parse_scheme(formats::to_string(*scheme)) == *scheme) return *scheme;
    refuse(source, scales, "a scale for the matrix, for each row, or for blocks of 128 × 128");
  }
  if (type == ScaleType::e8m0) return scheme_with(4, 32, type);
  Scheme scheme = scheme_with(4, 16, ScaleType::e4m3);
  // Values are those of the stored number, whichever of the two it is.
  const bool exact = formats::has_exact_reciprocal(factor_of(source, concat(linear, names.factor)));
  scheme.divisor = names.divides && !exact;
  return scheme;
}

/// The tensors as the file has them, where another type or shape says the same.
void take_stored_forms(const DialectSource& source, const std::string& linear, std::vector<StoredSpec>& specs) {
  for (size_t i = 1; i < specs.size(); ++i) {
    const io::TensorInfo& found = source.checkpoint.at(linear + specs[i].suffix);
    const bool powers = specs[i].dtype == DType::u8 && found.dtype == DType::f8_e8m0;
    if (powers) specs[i].dtype = found.dtype;
    if (element_count(found.shape) == element_count(specs[i].shape)) specs[i].shape = found.shape;
  }
}

/// Tensors without which a linear stands for something else.
void check_companions(const DialectSource& source, const std::string& linear, const FloatNames& names) {
  const std::string scales = concat(linear, names.scales), factors = linear + ".pre_quant_scale";
  if (!source.checkpoint.contains(scales)) {
    throw Error(ErrorCode::unsupported, concat(source.place, ": ", printable(linear), " has no ", names.scales))
        .detail(concat("in ", source.checkpoint.file_of(concat(linear, names.codes))));
  }
  if (!source.checkpoint.contains(factors)) return;
  throw Error(ErrorCode::unsupported, concat(source.place, ": ", printable(factors), " has no place beside its codes"))
      .detail(concat("in ", source.checkpoint.file_of(factors)));
}

template <Dialect dialect>
QuantizationConfig read(const DialectSource& source) {
  if (const std::string algorithm = integer_algorithm(source.config); !algorithm.empty()) {
    throw Error(ErrorCode::unsupported, concat(source.place, ": ModelOpt's ", printable(algorithm), " is not read"))
        .detail("of its formats those of floats are: FP8, MXFP8, MXFP4 and NVFP4")
        .hint("start from the 16-bit checkpoint");
  }
  for (const auto& [name, info] : source.checkpoint.tensors()) {
    if (info.dtype != DType::f8_e4m3 || info.shape.size() < 3) continue;
    throw Error(ErrorCode::unsupported, concat(printable(name), ": experts of FP8 in one tensor are no packed linears"))
        .detail(concat("in ", source.checkpoint.file_of(name)));
  }
  QuantizationConfig result;
  for (const int bits : {4, 8}) {
    const FloatNames names = names_of(dialect, bits);
    for (const auto& linear : linears_with(source.checkpoint, names.codes)) {
      const std::string codes = concat(linear, names.codes);
      const io::TensorInfo& info = source.checkpoint.at(codes);
      if (info.dtype != (bits == 4 ? DType::u8 : DType::f8_e4m3)) continue;
      check_companions(source, linear, names);
      const Shape shape = matrix_shape(source.checkpoint, codes);
      const int64_t n = shape[0], k = bits == 4 ? 2 * shape[1] : shape[1];
      const Scheme scheme = scheme_of(source, linear, names, bits, n, k);
      auto specs = formats::small_float_specs(scheme, n, k, names);
      take_stored_forms(source, linear, specs);
      PackedLinearInfo linear_info = dialect_linear(linear, scheme, n, k, source.source_dtype, specs);
      check_stored(source.checkpoint, linear_info, formats::to_string(scheme));
      result.linears.emplace(linear, std::move(linear_info));
    }
  }
  return result;
}

template <Dialect dialect>
PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> tensors) {
  const Scheme& scheme = info.passes.front().scheme;
  return formats::decode_small_float(scheme, info.n, info.k, tensors, names_of(dialect, scheme.bits));
}

template <Dialect dialect>
std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  return formats::small_float_specs(scheme, n, k, names_of(dialect, scheme.bits));
}

template <Dialect dialect>
std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  return formats::encode_small_float(canonical, names_of(dialect, canonical.scheme.bits));
}

/// What keeps a scheme of small floats out; empty: nothing.
template <Dialect dialect>
std::string obstacle(const Scheme& scheme) {
  const bool mx = scheme.scale == ScaleType::e8m0;
  if (dialect == Dialect::fp8) return scheme.bits == 8 && scheme.block == 128 ? "" : "it has blocks of 128 × 128 alone";
  if (scheme.block == 128 && mx) return "its scales of 128 × 128 are floats";
  if (dialect == Dialect::modelopt && scheme.block == formats::whole_tensor && scheme.scale != ScaleType::f32) {
    return "its scales are F32";
  }
  if (dialect == Dialect::modelopt && scheme.bits == 4 && mx) return "it has no MXFP4 of weights alone";
  if (dialect == Dialect::modelopt && scheme.bits == 8 && !mx && scheme.scale != ScaleType::f32) {
    return "its scales are F32";
  }
  return {};
}

template <Dialect dialect>
DialectFit fit(const PackedLinearInfo& info) {
  const Scheme& scheme = info.passes.front().scheme;
  if (scheme.family != SchemeFamily::small_float) {
    return {std::nullopt, "its codes are small floats, in which the steps of others have no place"};
  }
  if (auto why = obstacle<dialect>(scheme); !why.empty()) return {std::nullopt, std::move(why)};
  if (scheme.block > 0 && scheme.block < 128 && info.k % scheme.block != 0) {
    return {std::nullopt, concat("blocks of ", scheme.block, " do not divide the ", info.k, " inputs evenly")};
  }
  return {scheme, {}};
}

template <Dialect dialect>
std::string refuses(const PackedWeight& canonical) {
  if (canonical.scheme.scale != ScaleType::e4m3) return {};
  if (canonical.scheme.divisor == names_of(dialect, 4).divides) return {};
  const float factor = formats::tensor_factor(canonical);
  if (formats::has_exact_reciprocal(factor)) return {};
  return concat("the reciprocal of its tensor's ", canonical.scheme.divisor ? "divisor" : "factor", " ", factor,
                " is no float: values would move by a rounding of fp32");
}

/// The nearest factor that survives.
void bend(PackedWeight& canonical) {
  float& factor = canonical.plane(formats::PlaneRole::tensor_scale).bytes.as<float>()[0];
  factor = 1 / (1 / factor);
}

bool states(const DialectSource& source, std::string_view method) {
  return config_text(source, {"quant_method"}, "") == method;
}

template <Dialect dialect>
DialectRow row(std::string_view name, std::string_view description, std::string_view holds) {
  return {.name = name,
          .description = description,
          .holds = holds,
          .detect = nullptr,
          .read = read<dialect>,
          .decode = decode<dialect>,
          .fit = fit<dialect>,
          .tensors = tensors<dialect>,
          .encode = encode<dialect>,
          .describe = nullptr,
          .activations = activation_suffixes,
          .refuses = refuses<dialect>,
          .bend = bend};
}

const ActivationForm compressed_tensors_activations{.float4 = ".input_global_scale",
                                                    .float8 = ".input_scale",
                                                    .float4_divides = true,
                                                    .keys = ".k_scale",
                                                    .values = ".v_scale",
                                                    .shape = {1},
                                                    .state = state_float_activations};
const ActivationForm modelopt_activations{.float4 = ".input_scale",
                                          .float8 = ".input_scale",
                                          .keys = ".k_proj.k_scale",
                                          .values = ".v_proj.v_scale",
                                          .state = state_modelopt_activations};

}  // namespace

DialectRow compressed_tensors_float_row() {
  DialectRow result = row<Dialect::compressed_tensors>(
      "compressed-tensors-float", "compressed-tensors' nvfp4-, mxfp4-pack-quantized, mxfp8- and float-quantized",
      "NVFP4, MXFP4, MXFP8; FP8 of tensors, rows and blocks of 128 × 128");
  result.detect = [](const DialectSource& source) {
    return states(source, "compressed-tensors") && (holds_float_groups(source) || is_naive_float(source.config));
  };
  result.describe = describe_float_groups;
  result.activation_form = &compressed_tensors_activations;
  return result;
}

DialectRow modelopt_row() {
  DialectRow result =
      row<Dialect::modelopt>("modelopt", "NVIDIA ModelOpt, weights alone: hf_quant_config.json",
                             "NVFP4, MXFP8; FP8 of tensors, rows and blocks of 128 × 128 with f32 scales");
  result.detect = [](const DialectSource& source) { return states(source, "modelopt"); };
  result.describe = describe_modelopt;
  result.config_file = modelopt_config_file;
  result.list_tensors = modelopt_side_config;
  result.activation_form = &modelopt_activations;
  result.needs_inputs = [](const Scheme& scheme) { return scheme.block == formats::whole_tensor; };
  return result;
}

DialectRow fp8_row() {
  DialectRow result = row<Dialect::fp8>("fp8", "FP8 in blocks as DeepSeek stores it: weight_scale_inv",
                                        "FP8 of blocks of 128 × 128, scales f32, f16, bf16 or e8m0");
  result.detect = [](const DialectSource& source) { return states(source, "fp8"); };
  result.describe = describe_fp8;
  return result;
}

}  // namespace w4q::checkpoint
