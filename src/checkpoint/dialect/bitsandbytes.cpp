// bitsandbytes' 4-bit checkpoints: NF4 and FP4, block maxima plain or nested.
#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/dialect/rows.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/dialect/bitsandbytes.h"
#include "formats/lut.h"
#include "formats/table/nested_scales.h"

namespace w4q::checkpoint {
namespace {

using formats::BitsandbytesState;
using formats::PackedWeight;
using formats::Scheme;
using formats::SchemeFamily;
using formats::StoredSpec;
using formats::StoredTensor;

constexpr size_t largest_state = 4096;  ///< bytes of a sound state's text: far fewer
constexpr std::string_view types[] = {"nf4", "fp4"};
/// What a reader decodes to before it casts to the type of the activations.
constexpr std::string_view written_dtype = "bfloat16";

std::string state_suffix(std::string_view type) { return concat(formats::bitsandbytes_state, type); }

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Reads a state's text. `place` is its tensor. Throws bad_file.
BitsandbytesState parse_state(std::span<const std::byte> bytes, const std::string& place) {
  const auto refuse = [&](const std::string& what) -> Error {
    return Error(ErrorCode::bad_file, concat(printable(place), ": ", what));
  };
  if (bytes.size() > largest_state) throw refuse(concat("has ", bytes.size(), " bytes, expected a short text"));
  const io::Json json = io::parse_json(text_of(bytes), place);
  if (!json.is_object()) throw refuse("is not an object");
  const auto integer = [&](const io::Json& value, int64_t most) {
    if (!value.is_number_integer() || value < 1 || value > most) throw refuse(concat("holds ", value.dump()));
    return value.get<int64_t>();
  };
  const auto member = [&](const char* key) -> const io::Json& {
    const auto found = json.find(key);
    if (found == json.end()) throw refuse(concat("has no \"", key, "\""));
    return *found;
  };
  BitsandbytesState state;
  if (!member("quant_type").is_string() || !member("dtype").is_string()) throw refuse("quant_type or dtype is no text");
  state.type = member("quant_type").get<std::string>();
  state.dtype = member("dtype").get<std::string>();
  if (!place.ends_with(state_suffix(state.type))) {
    throw refuse(concat("says quant_type \"", printable(state.type), "\", which its name does not"));
  }
  state.block = static_cast<int>(integer(member("blocksize"), 4096));
  if (!formats::is_lut_block(state.block)) throw refuse(concat("blocksize ", state.block, " does not exist"));
  const io::Json& shape = member("shape");
  if (!shape.is_array() || shape.size() != 2) throw refuse("shape is not that of a matrix");
  state.n = integer(shape[0], formats::max_dimension);
  state.k = integer(shape[1], formats::max_dimension);
  state.nested = json.contains("nested_offset");
  if (!state.nested) return state;
  if (integer(member("nested_blocksize"), 4096) != formats::nested_block || member("nested_dtype") != "float32") {
    throw refuse("nested blocks other than 256 of float32");
  }
  if (!member("nested_offset").is_number()) throw refuse("nested_offset is no number");
  state.nested_offset = static_cast<float>(member("nested_offset").get<double>());
  return state;
}

Scheme scheme_of(const BitsandbytesState& state) {
  return {SchemeFamily::lut, formats::lut_bits, state.block,
          state.nested ? formats::ScaleType::nested : formats::ScaleType::f32};
}

/// The bytes of the codes may stand under any type.
void take_code_tensor(const io::Checkpoint& checkpoint, const std::string& linear, StoredSpec& spec) {
  const io::TensorInfo& found = checkpoint.at(linear + spec.suffix);
  const int64_t bytes = byte_count(spec.dtype, spec.shape);
  if (static_cast<int64_t>(found.size()) != bytes) {
    throw Error(ErrorCode::bad_file, concat(printable(linear), spec.suffix, ": wrong number of bytes"))
        .detail(concat("expected ", bytes, " for two codes a byte, found ", found.size()));
  }
  spec.dtype = found.dtype;
  spec.shape = found.shape;
}

PackedLinearInfo read_linear(const DialectSource& source, const std::string& name, std::string_view type) {
  const std::string place = concat(name, state_suffix(type));
  const io::TensorInfo& tensor = source.checkpoint.at(place);
  if (tensor.dtype != DType::u8) throw Error(ErrorCode::bad_file, concat(printable(place), ": is not U8"));
  const auto loaded = source.checkpoint.load(place);
  const BitsandbytesState state = parse_state(loaded->bytes, place);
  auto specs = formats::bitsandbytes_specs(scheme_of(state), state.n, state.k);
  take_code_tensor(source.checkpoint, name, specs.front());
  specs.push_back({state_suffix(type), DType::u8, tensor.shape});
  PackedLinearInfo info = dialect_linear(name, scheme_of(state), state.n, state.k, source.source_dtype, specs);
  check_stored(source.checkpoint, info, "its quant_state");
  return info;
}

bool is_ours(const DialectSource& source, std::string_view type) {
  return config_text(source, {"quant_method"}, "") == "bitsandbytes" &&
         !linears_with(source.checkpoint, state_suffix(type)).empty();
}

/// A checkpoint may hold both types: the row of either reads all.
QuantizationConfig read(const DialectSource& source) {
  QuantizationConfig result;
  for (const auto type : types) {
    for (const auto& name : linears_with(source.checkpoint, state_suffix(type))) {
      if (!result.linears.emplace(name, read_linear(source, name, type)).second) {
        throw Error(ErrorCode::bad_file, concat(printable(name), ": has two quant_states"));
      }
    }
  }
  return result;
}

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> tensors) {
  const StoredTensor& state = tensors.back();
  return decode_bitsandbytes(parse_state(state.bytes.bytes(), info.name + state.spec.suffix), tensors);
}

DialectFit fit(const PackedLinearInfo& info) {
  const Scheme& scheme = info.passes.front().scheme;
  if (scheme.family == SchemeFamily::lut) return {scheme, {}};
  return {std::nullopt, "NF4 and FP4 are tables of uneven values, in which the steps of other codes have no place"};
}

/// Long enough for every offset, so that the size of the tensor is known beforehand; the rest is blank.
constexpr size_t longest_float = 24;

std::string state_text(const BitsandbytesState& state) {
  std::string text = to_json_text(state);
  if (!state.nested) return text;
  BitsandbytesState zero = state;
  zero.nested_offset = 0;
  text.resize(to_json_text(zero).size() + longest_float, ' ');
  return text;
}

template <int type>
std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  auto specs = formats::bitsandbytes_specs(scheme, n, k);
  const bool nested = scheme.scale == formats::ScaleType::nested;
  const auto size =
      state_text({std::string(types[type]), scheme.block, std::string(written_dtype), n, k, nested, 0}).size();
  specs.push_back({state_suffix(types[type]), DType::u8, {static_cast<int64_t>(size)}});
  return specs;
}

template <int type>
std::string refuses(const PackedWeight& canonical) {
  const auto found = formats::bitsandbytes_type(canonical);
  if (found == types[type]) return {};
  return concat("its table is ", found.empty() ? "not bitsandbytes'" : found, ", the dialect's is ", types[type]);
}

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  auto result = encode_bitsandbytes(canonical, written_dtype);
  StoredTensor& state = result.back();
  const auto parsed = parse_state(state.bytes.bytes(), state.spec.suffix);
  const std::string text = state_text(parsed);
  state = formats::allocate_stored({state.spec.suffix, DType::u8, {static_cast<int64_t>(text.size())}});
  std::ranges::copy(std::as_bytes(std::span(text)), state.bytes.data());
  return result;
}

template <int type>
io::Json describe(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  const auto nested = [](const DialectLinear& linear) { return linear.scheme.scale == formats::ScaleType::nested; };
  std::vector<std::string> skipped = kept;
  const bool packed_head = std::ranges::any_of(linears, [](const auto& linear) { return linear.name == "lm_head"; });
  if (!packed_head && std::ranges::find(skipped, "lm_head") == skipped.end()) skipped.emplace_back("lm_head");
  return {{"quant_method", "bitsandbytes"},
          {"load_in_4bit", true},
          {"load_in_8bit", false},
          {"_load_in_4bit", true},
          {"_load_in_8bit", false},
          {"bnb_4bit_quant_type", types[type]},
          {"bnb_4bit_use_double_quant", std::ranges::any_of(linears, nested)},
          {"bnb_4bit_compute_dtype", written_dtype},
          {"bnb_4bit_quant_storage", "uint8"},
          {"llm_int8_threshold", 6.0},
          {"llm_int8_skip_modules", skipped},
          {"llm_int8_enable_fp32_cpu_offload", false},
          {"llm_int8_has_fp16_weight", false}};
}

template <int type>
DialectRow row(std::string_view name, std::string_view description) {
  return {.name = name,
          .description = description,
          .holds = "the codes of bitsandbytes' own table, block maxima f32 or nested; no integers",
          .detect = [](const DialectSource& source) { return is_ours(source, types[type]); },
          .read = read,
          .decode = decode,
          .fit = fit,
          .tensors = tensors<type>,
          .encode = encode,
          .describe = describe<type>,
          .refuses = refuses<type>};
}

}  // namespace

DialectRow bitsandbytes_nf4_row() { return row<0>("bitsandbytes-nf4", "bitsandbytes 4-bit, NF4"); }
DialectRow bitsandbytes_fp4_row() { return row<1>("bitsandbytes-fp4", "bitsandbytes 4-bit, FP4"); }

}  // namespace w4q::checkpoint
