// compressed-tensors' "pack-quantized" checkpoints, in the packing of release 0.18 and in the one before.
#include <algorithm>
#include <array>
#include <cstdio>

#include "checkpoint/dialect/awq_config.h"
#include "checkpoint/dialect/compressed_tensors_config.h"
#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/dialect/rows.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/dialect/compressed_tensors.h"
#include "formats/integer.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedWeight;
using formats::Scheme;
using formats::StoredSpec;
using formats::StoredTensor;
using formats::StreamPacking;

constexpr std::array widths{2, 3, 4, 5, 6, 7, 8};
constexpr std::array scale_types{formats::ScaleType::bf16, formats::ScaleType::f16, formats::ScaleType::f32};
constexpr IntegerLimits limits{.bits = widths, .scales = scale_types, .act_order = true, .whole_groups = true};

constexpr std::string_view codes_suffix = ".weight_packed";
constexpr std::string_view of_activations[] = {
    ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale", ".q_scale"};

bool is_ours(const DialectSource& source) {
  return config_text(source, {"quant_method"}, "") == "compressed-tensors" &&
         !linears_with(source.checkpoint, codes_suffix).empty();
}

/// True for the releases that pack densely: "0.18" and later, a pre-release included.
bool packs_densely(const DialectSource& source) {
  const std::string version = config_text(source, {"version"}, "");
  int major = 0, minor = 0;
  if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2) return false;
  return major > 0 || minor >= 18;
}

struct Size {
  int64_t n = 0, k = 0;
};

Size size_of(const io::Checkpoint& checkpoint, const std::string& linear) {
  const std::string name = linear + ".weight_shape";
  const io::TensorInfo& info = checkpoint.at(name);
  const bool narrow = info.dtype == DType::i32;  // Kimi's
  if ((info.dtype != DType::i64 && !narrow) || info.shape != Shape{2}) {
    throw Error(ErrorCode::bad_file, concat(printable(name), ": wrong type or shape"))
        .detail(concat("expected I64 [2], found ", dtype_name(info.dtype), " ", shape_text(info.shape), " in ",
                       checkpoint.file_of(name)));
  }
  const Buffer bytes = Buffer::copy_of(checkpoint.load(name)->bytes);
  const Size size = narrow ? Size{bytes.as<int32_t>()[0], bytes.as<int32_t>()[1]}
                           : Size{bytes.as<int64_t>()[0], bytes.as<int64_t>()[1]};
  formats::check_dimensions(size.n, size.k, linear);
  return size;
}

formats::ScaleType scale_type(const io::Checkpoint& checkpoint, const std::string& linear) {
  const std::string name = linear + ".weight_scale";
  const DType dtype = checkpoint.at(name).dtype;
  for (const formats::ScaleType type : scale_types) {
    if (formats::scale_codec(type).dtype == dtype) return type;
  }
  throw Error(ErrorCode::bad_file, concat(printable(name), ": wrong type"))
      .detail(concat("expected BF16, F16 or F32, found ", dtype_name(dtype)));
}

/// The packing, by the width of the words and, where that leaves both open, the version.
StreamPacking packing_of(const DialectSource& source, const std::string& linear, int64_t k, int bits) {
  const std::string name = concat(linear, codes_suffix);
  const Shape shape = matrix_shape(source.checkpoint, name);
  bool ambiguous = false;
  const auto packing = formats::packing_of_width(shape[1], k, bits, &ambiguous);
  if (packing) return *packing;
  if (ambiguous && packs_densely(source)) return StreamPacking::dense;
  if (ambiguous) {
    throw Error(ErrorCode::unsupported, concat(printable(name), ": two packings have words of this shape"))
        .detail(concat(bits, " bits, ", k, " inputs, ", shape[1], " words; \"version\" does not say 0.18 or later"));
  }
  throw Error(ErrorCode::bad_file, concat(printable(name), ": wrong number of words"))
      .detail(concat("expected ", formats::stream_words(StreamPacking::dense, k, bits), " or, before release 0.18, ",
                     formats::stream_words(StreamPacking::padded, k, bits), " for ", k, " inputs of ", bits,
                     " bits, found ", shape[1]));
}

/// What the tensors of a linear say about its scheme beyond the config.
Scheme scheme_of(const io::Checkpoint& checkpoint, const CtWeights& weights, const std::string& linear) {
  const bool zeros = weights.asymmetric || checkpoint.contains(linear + ".weight_zero_point");
  const bool index = weights.group != formats::whole_row && checkpoint.contains(linear + ".weight_g_idx");
  return {formats::SchemeFamily::integer, weights.bits, weights.group, scale_type(checkpoint, linear), zeros, index};
}

QuantizationConfig read(const DialectSource& source) {
  const CtConfig config(source);
  QuantizationConfig result;
  result.notes = config.notes();
  for (const auto& name : linears_with(source.checkpoint, codes_suffix)) {
    const CtWeights& weights = config.weights_of(name);
    const auto [n, k] = size_of(source.checkpoint, name);
    const Scheme scheme = scheme_of(source.checkpoint, weights, name);
    const StreamPacking packing = packing_of(source, name, k, scheme.bits);
    auto specs = formats::compressed_tensors_specs(scheme, n, k, packing);
    // One scale for the whole matrix stands for as many as there are rows.
    if (weights.one_scale) specs[1].shape = source.checkpoint.at(name + ".weight_scale").shape;
    specs[2].dtype = source.checkpoint.at(name + ".weight_shape").dtype;
    PackedLinearInfo info = dialect_linear(name, scheme, n, k, source.source_dtype, specs);
    check_stored(source.checkpoint, info, concat("compressed-tensors with group_size ", group_size_of(scheme)));
    result.linears.emplace(name, std::move(info));
  }
  return result;
}

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> tensors) {
  const Scheme& scheme = info.passes.front().scheme;
  const int64_t words = formats::stored(tensors, codes_suffix).spec.shape[1];
  const bool dense = words == formats::stream_words(StreamPacking::dense, info.k, scheme.bits);
  return decode_compressed_tensors(scheme, info.n, info.k, dense ? StreamPacking::dense : StreamPacking::padded,
                                   std::move(tensors), info.name);
}

DialectFit fit(const PackedLinearInfo& info) { return fit_integer(info, limits); }

std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  return formats::compressed_tensors_specs(scheme, n, k);
}

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  return formats::encode_compressed_tensors(canonical);
}

io::Json describe(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  return describe_compressed_tensors("0.18.0", linears, kept);
}

/// Nothing of 2, 4 and 8 bits tells the releases apart: the later row takes those.
bool detect_padded(const DialectSource& source) {
  if (!is_ours(source)) return false;
  const CtConfig config(source);
  const auto names = linears_with(source.checkpoint, codes_suffix);
  return std::ranges::any_of(names, [&](const std::string& name) {
    const int bits = config.weights_of(name).bits;
    return packing_of(source, name, size_of(source.checkpoint, name).k, bits) == StreamPacking::padded;
  });
}

/// Shapes whose words do not show the packing would be read as the other one.
DialectFit fit_padded(const PackedLinearInfo& info) {
  DialectFit result = fit(info);
  if (!result.scheme) return result;
  bool ambiguous = false;
  const int bits = result.scheme->bits;
  formats::packing_of_width(formats::stream_words(StreamPacking::padded, info.k, bits), info.k, bits, &ambiguous);
  if (ambiguous) return {std::nullopt, concat(info.k, " inputs of ", bits, " bits look the same in both packings")};
  return result;
}

std::vector<StoredSpec> tensors_padded(const Scheme& scheme, int64_t n, int64_t k) {
  return formats::compressed_tensors_specs(scheme, n, k, StreamPacking::padded);
}

std::vector<StoredTensor> encode_padded(const PackedWeight& canonical) {
  return formats::encode_compressed_tensors(canonical, StreamPacking::padded);
}

io::Json describe_padded(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  return describe_compressed_tensors("0.17.1", linears, kept);
}

}  // namespace

DialectRow compressed_tensors_row() {
  return {.name = "compressed-tensors",
          .description = "compressed-tensors pack-quantized, as release 0.18 and vLLM have it",
          .holds = "2 to 8 bits, with and without zero points, even groups or whole rows, act-order",
          .detect = is_ours,
          .read = read,
          .decode = decode,
          .fit = fit,
          .tensors = tensors,
          .encode = encode,
          .describe = describe,
          .activations = of_activations,
          .activation_form = &compressed_tensors_cache,
          .refuses = refuse_large_zero};
}

DialectRow compressed_tensors_padded_row() {
  DialectRow row = compressed_tensors_row();
  row.name = "compressed-tensors-0.17";
  row.description = "the same before release 0.18: other words of 3, 5, 6 and 7 bits";
  row.detect = detect_padded;
  row.fit = fit_padded;
  row.tensors = tensors_padded;
  row.encode = encode_padded;
  row.describe = describe_padded;
  return row;
}

}  // namespace w4q::checkpoint
