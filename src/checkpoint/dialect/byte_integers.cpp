// Integers of a byte each, as programs store those that run on int8 tensor cores: compressed-tensors' int-quantized and
// naive-quantized, and the same tensors under the configs of AMD Quark, NVIDIA ModelOpt and SGLang.
#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/dialect/byte_integers_config.h"
#include "checkpoint/dialect/compressed_tensors_config.h"
#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/dialect/rows.h"
#include "checkpoint/low_precision.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/integer.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::StoredSpec;
using formats::StoredTensor;

constexpr std::array widths{2, 3, 4, 5, 6, 7, 8};
constexpr std::array scale_types{formats::ScaleType::bf16, formats::ScaleType::f16, formats::ScaleType::f32};
constexpr IntegerLimits limits{.bits = widths, .scales = scale_types, .whole_groups = true};

constexpr std::string_view codes_suffix = ".weight", scale_suffix = ".weight_scale",
                           inverse_suffix = ".weight_scale_inv", zeros_suffix = ".weight_zero_point";
constexpr std::string_view activation_suffixes[] = {".input_scale",       ".input_zero_point", ".output_scale",
                                                    ".output_zero_point", ".k_scale",          ".v_scale"};
constexpr int64_t grain = 64;

/// How a stored tensor of scales or zero points lies over the outputs and groups of its codes.
struct Spread {
  int64_t rows = 1;    ///< outputs that share one
  int64_t across = 1;  ///< of an output
  int64_t group = 0;   ///< inputs that share one; the last ones may be fewer
};

/// One for all, one an output, one a group of an output, or one a block of 128 × 128.
std::optional<Spread> spread_of(const Shape& shape, int64_t n, int64_t k) {
  if (element_count(shape) == 1) return Spread{n, 1, k};
  if (shape == Shape{n}) return Spread{1, 1, k};
  if (shape.size() != 2 || shape[0] < 1 || shape[1] < 1) return std::nullopt;
  if (shape[0] == n && k % shape[1] == 0) return Spread{1, shape[1], k / shape[1]};
  constexpr int64_t block = 128;
  const auto blocks = [](int64_t size) { return (size + block - 1) / block; };
  if (shape == Shape{blocks(n), blocks(k)}) return Spread{block, shape[1], block};
  return std::nullopt;
}

std::vector<std::string> byte_linears(const io::Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const auto& name : linears_with(checkpoint, codes_suffix)) {
    const io::TensorInfo& info = checkpoint.at(concat(name, codes_suffix));
    if (info.dtype == DType::i8 && info.shape.size() == 2) names.push_back(name);
  }
  return names;
}

PackedLinearInfo read_linear(const DialectSource& source, const std::string& name, int bits) {
  const io::Checkpoint& checkpoint = source.checkpoint;
  const Shape& shape = matrix_shape(checkpoint, concat(name, codes_suffix));
  const int64_t n = shape[0], k = shape[1];
  formats::check_dimensions(n, k, name);
  const bool inverse = checkpoint.contains(concat(name, inverse_suffix));
  const std::string scales = concat(name, inverse ? inverse_suffix : scale_suffix);
  const io::TensorInfo& found = checkpoint.at(scales);
  const auto spread = spread_of(found.shape, n, k);
  if (!spread) {
    throw Error(ErrorCode::bad_file, concat(printable(scales), ": wrong shape ", shape_text(found.shape)))
        .detail(concat("expected one scale, ", shape_text({n, 1}), ", ", shape_text({n}), ", or those of groups or of ",
                       "blocks of 128 × 128 of ", n, " outputs and ", k, " inputs, in ", checkpoint.file_of(scales)));
  }
  const bool zeros = checkpoint.contains(concat(name, zeros_suffix));
  const int block = spread->group == k ? formats::whole_row : static_cast<int>(spread->group);
  const Scheme scheme{formats::SchemeFamily::integer,         bits,  block,
                      integer_scale_type(checkpoint, scales), zeros, false};
  std::vector<StoredSpec> specs = {{std::string(codes_suffix), DType::i8, {n, k}},
                                   {scales.substr(name.size()), found.dtype, found.shape}};
  if (zeros) specs.push_back({std::string(zeros_suffix), DType::i8, found.shape});
  PackedLinearInfo info = dialect_linear(name, scheme, n, k, source.source_dtype, specs);
  check_stored(checkpoint, info, concat("integers of ", bits, " bits in a byte each"));
  return info;
}

QuantizationConfig read(const DialectSource& source) {
  const auto& all = source.checkpoint.tensors();
  const auto smooths = [](const auto& tensor) { return tensor.first.ends_with(".pre_quant_scale"); };
  if (const auto found = std::ranges::find_if(all, smooths); found != all.end()) {
    throw Error(ErrorCode::unsupported, concat(printable(found->first), ": inputs are scaled before they are rounded"))
        .detail("weights alone do not say what such a linear computes")
        .hint("start from the 16-bit checkpoint");
  }
  QuantizationConfig result;
  std::optional<CtConfig> config;
  if (config_text(source, {"quant_method"}, "") == "compressed-tensors") config.emplace(source);
  if (config) result.notes = config->notes();
  for (const auto& name : byte_linears(source.checkpoint)) {
    result.linears.emplace(name, read_linear(source, name, config ? config->weights_of(name).bits : 8));
  }
  return result;
}

/// Signed codes of a byte as unsigned ones. Throws bad_file for the first one beyond its width.
void decode_codes(std::span<const int8_t> from, PackedWeight& to, std::string_view name) {
  const int middle = formats::integer_symmetric_zero(to.scheme.bits);
  const auto is_wrong = [&](int8_t code) { return code < -middle || code >= middle; };
  if (const auto wrong = std::ranges::find_if(from, is_wrong); wrong != from.end()) {
    const int64_t at = wrong - from.begin();
    throw Error(ErrorCode::bad_file,
                concat(printable(name), codes_suffix, "[", at / to.k, ", ", at % to.k, "] is ", +*wrong))
        .detail(concat("codes of ", to.scheme.bits, " bits are from ", -middle, " to ", middle - 1));
  }
  const auto width = static_cast<size_t>(to.k);
  parallel_for(to.n, grain, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(width);
    for (int64_t row = begin; row < end; ++row) {
      const auto line = from.subspan(static_cast<size_t>(row) * width, width);
      for (size_t col = 0; col < width; ++col) codes[col] = static_cast<uint8_t>(line[col] + middle);
      formats::integer_write_codes(to, row, codes);
    }
  });
}

/// Calls move(place in [n, groups], place in the stored tensor).
template <class Move>
void for_each_group(const Shape& stored, int64_t n, int64_t k, const Move& move) {
  const Spread spread = spread_of(stored, n, k).value();
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t group = 0; group < spread.across; ++group) {
      move(static_cast<size_t>(row * spread.across + group),
           static_cast<size_t>(row / spread.rows * spread.across + group));
    }
  }
}

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> tensors) {
  const Scheme& scheme = info.passes.front().scheme;
  PackedWeight weight = formats::allocate_integer(scheme, info.n, info.k);
  decode_codes(tensors[0].bytes.as<int8_t>(), weight, info.name);
  auto& scales = weight.plane(PlaneRole::scales).bytes;
  const auto size = static_cast<size_t>(dtype_bits(tensors[1].spec.dtype) / 8);
  for_each_group(tensors[1].spec.shape, info.n, info.k, [&](size_t to, size_t from) {
    std::copy_n(tensors[1].bytes.data() + from * size, size, scales.data() + to * size);
  });
  if (!scheme.asymmetric) return weight;
  const int middle = formats::integer_symmetric_zero(scheme.bits);
  const auto stored = tensors[2].bytes.as<int8_t>();
  const auto zeros = weight.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  for_each_group(tensors[2].spec.shape, info.n, info.k, [&](size_t to, size_t from) {
    const int zero = stored[from] + middle;
    if (zero < 0 || zero >= 2 * middle) {
      throw Error(ErrorCode::bad_file, concat(printable(info.name), zeros_suffix, " holds ", +stored[from]))
          .detail(concat("zero points of ", scheme.bits, " bits are from ", -middle, " to ", middle - 1));
    }
    zeros[to] = static_cast<uint8_t>(zero);
  });
  return weight;
}

std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  const int64_t groups = formats::integer_groups(scheme, k);
  std::vector<StoredSpec> specs = {{std::string(codes_suffix), DType::i8, {n, k}},
                                   {std::string(scale_suffix), formats::scale_codec(scheme.scale).dtype, {n, groups}}};
  if (scheme.asymmetric) specs.push_back({std::string(zeros_suffix), DType::i8, {n, groups}});
  return specs;
}

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  std::vector<StoredTensor> result;
  for (auto& spec : tensors(canonical.scheme, canonical.n, canonical.k)) {
    result.push_back(formats::allocate_stored(std::move(spec)));
  }
  const int middle = formats::integer_symmetric_zero(canonical.scheme.bits);
  const auto width = static_cast<size_t>(canonical.k);
  const auto signed_codes = result[0].bytes.as<int8_t>();
  parallel_for(canonical.n, grain, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(width);
    for (int64_t row = begin; row < end; ++row) {
      formats::integer_read_codes(canonical, row, codes);
      std::ranges::transform(codes, signed_codes.begin() + row * canonical.k,
                             [&](uint8_t code) { return static_cast<int8_t>(code - middle); });
    }
  });
  std::ranges::copy(canonical.plane(PlaneRole::scales).bytes.bytes(), result[1].bytes.data());
  if (canonical.scheme.asymmetric) {
    std::ranges::transform(canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>(), result[2].bytes.as<int8_t>().begin(),
                           [&](uint8_t zero) { return static_cast<int8_t>(zero - middle); });
  }
  return result;
}

}  // namespace

DialectRow compressed_tensors_bytes_row() {
  return {
      .name = "compressed-tensors-int8",
      .description =
          "compressed-tensors' int- and naive-quantized, a byte a code; read under Quark's, ModelOpt's and SGLang's "
          "configs, too",
      .holds = "2 to 8 bits, with and without zero points, even groups or whole rows; no act-order",
      .detect = [](const DialectSource& source) { return states_byte_integers(source.config); },
      .read = read,
      .decode = decode,
      .fit = [](const PackedLinearInfo& info) { return fit_integer(info, limits); },
      .tensors = tensors,
      .encode = encode,
      .describe = describe_byte_integers,
      .activations = activation_suffixes,
      .activation_form = &compressed_tensors_cache,
      .refuses = refuse_large_zero};
}

}  // namespace w4q::checkpoint
