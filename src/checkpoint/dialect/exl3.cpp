// exllamav3's checkpoints, EXL3: the tensors of a linear are those of the family exl3 as they stand. Which code decodes
// them says a tensor that holds its multiplier; older files have signs alone in the place of scales.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/dialect/rows.h"
#include "core/error.h"
#include "core/float_formats.h"
#include "core/text.h"
#include "formats/exl3.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::SchemeFamily;
using formats::StoredSpec;
using formats::StoredTensor;
using formats::TrellisCode;

constexpr std::string_view method = "exl3", written_version = "1.4.1";
constexpr std::string_view codes_suffix = ".trellis";
constexpr uint16_t plus_one = 0x3C00, minus_one = 0xBC00;

/// A side of the matrix: its scales, or in older files its signs, 16 to a word.
struct Side {
  PlaneRole role;
  std::string_view scales, signs, name;
};
constexpr Side sides[] = {{PlaneRole::input_scales, ".suh", ".su", "inputs"},
                          {PlaneRole::scales, ".svh", ".sv", "outputs"}};

/// A code and the tensor that says so.
struct Code {
  TrellisCode code;
  std::string_view name, suffix;
  uint32_t multiplier;
};
constexpr Code known_codes[] = {{TrellisCode::mul1, "mul1", ".mul1", formats::trellis_multiplier},
                                {TrellisCode::mcg, "mcg", ".mcg", formats::exl3_mcg},
                                {TrellisCode::three_inst, "3inst", "", 0}};

const Code& row_of(TrellisCode code) { return *std::ranges::find(known_codes, code, &Code::code); }

Error refuse(const std::string& tensor, const std::string& what) {
  return Error(ErrorCode::bad_file, concat(printable(tensor), ": ", what))
      .hint("the checkpoint is damaged or no EXL3: fetch it again");
}

/// n, k and bits, from the shape of the codes.
struct Size {
  int64_t n = 0, k = 0;
  int bits = 0;
};
Size size_of(const io::Checkpoint& checkpoint, const std::string& linear) {
  const std::string name = concat(linear, codes_suffix);
  const io::TensorInfo& info = checkpoint.at(name);
  const auto found = [&] { return concat("found ", dtype_name(info.dtype), " ", shape_text(info.shape)); };
  if (info.dtype != DType::i16 || info.shape.size() != 3) {
    throw refuse(name, "wrong type or shape")
        .detail(concat("expected I16 [inputs / 16, outputs / 16, 16 · bits], ", found()));
  }
  const int64_t inputs = info.shape[0], outputs = info.shape[1], words = info.shape[2];
  constexpr int64_t most = formats::max_dimension / formats::exl3_tile;
  if (inputs < 1 || outputs < 1 || inputs > most || outputs > most || inputs % 8 != 0 || outputs % 8 != 0) {
    throw refuse(name, "its tiles do not fill blocks of 128")
        .detail(concat("expected inputs and outputs in multiples of 128, 8 tiles each, ", found()));
  }
  if (words % 16 != 0 || words < 16 * formats::exl3_min_bits || words > 16 * formats::exl3_max_bits) {
    throw refuse(name, "no such width").detail(concat("expected 16 words for each of 1 to 8 bits, ", found()));
  }
  return {outputs * formats::exl3_tile, inputs * formats::exl3_tile, static_cast<int>(words / 16)};
}

StoredSpec side_spec(const io::Checkpoint& checkpoint, const std::string& linear, const Side& side, int64_t size) {
  const bool scales = checkpoint.contains(concat(linear, side.scales));
  const bool signs = checkpoint.contains(concat(linear, side.signs));
  if (scales && signs) {
    throw refuse(concat(linear, side.signs),
                 concat("stands beside ", side.scales, ": the ", side.name, " have two scales"));
  }
  if (signs) return {std::string(side.signs), DType::i16, {size / 16}};
  return {std::string(side.scales), DType::f16, {size}};
}

/// The multiplier must be the code's: readers compute with theirs, whatever the tensor holds.
void check_multiplier(const io::Checkpoint& checkpoint, const std::string& name, const Code& code) {
  const io::TensorInfo& info = checkpoint.at(name);
  if (info.dtype != DType::i32 || element_count(info.shape) != 1) {
    throw refuse(name, "wrong type or shape")
        .detail(concat("expected one I32, found ", dtype_name(info.dtype), " ", shape_text(info.shape)));
  }
  uint32_t value = 0;
  std::memcpy(&value, checkpoint.load(name)->bytes.data(), sizeof value);
  if (value == code.multiplier) return;
  throw refuse(name, concat("holds the multiplier ", value))
      .detail(concat("expected ", code.multiplier, ", that of ", code.name));
}

/// The code of a linear, from the tensor that says so.
const Code& code_of(const DialectSource& source, const std::string& linear) {
  const Code* found = nullptr;
  for (const Code& code : known_codes) {
    const std::string name = concat(linear, code.suffix);
    if (code.suffix.empty() || !source.checkpoint.contains(name)) continue;
    if (found != nullptr) {
      throw refuse(name, concat("stands beside ", found->suffix, ": a linear has one code"));
    }
    check_multiplier(source.checkpoint, name, code);
    found = &code;
  }
  if (found != nullptr) return *found;
  const std::string stated = config_text(source, {"codebook"}, "3inst");
  const auto* const row = std::ranges::find(known_codes, stated, &Code::name);
  if (row != std::end(known_codes) && !row->suffix.empty()) {
    throw refuse(concat(linear, row->suffix), "is missing")
        .detail(concat(source.place, " says codebook \"", stated, "\""));
  }
  return row_of(TrellisCode::three_inst);
}

std::vector<StoredSpec> specs_of(const Scheme& scheme, int64_t n, int64_t k) {
  const Code& code = row_of(scheme.code);
  const int64_t outputs = formats::exl3_padded(n), inputs = formats::exl3_padded(k);
  std::vector<StoredSpec> specs = {
      {std::string(codes_suffix), DType::i16, {inputs / 16, outputs / 16, 16 * int64_t{scheme.bits}}},
      {std::string(sides[0].scales), DType::f16, {inputs}},
      {std::string(sides[1].scales), DType::f16, {outputs}}};
  if (!code.suffix.empty()) specs.push_back({std::string(code.suffix), DType::i32, {}});
  return specs;
}

PackedLinearInfo read_linear(const DialectSource& source, const std::string& name) {
  const Size size = size_of(source.checkpoint, name);
  const Code& code = code_of(source, name);
  const Scheme scheme{.family = SchemeFamily::exl3,
                      .bits = size.bits,
                      .block = formats::whole_row,
                      .scale = formats::ScaleType::f16,
                      .window = formats::exl3_window,
                      .code = code.code};
  auto specs = specs_of(scheme, size.n, size.k);
  for (size_t i = 0; i < std::size(sides); ++i) {
    specs[1 + i] = side_spec(source.checkpoint, name, sides[i], i == 0 ? size.k : size.n);
  }
  if (specs.size() > 3) specs[3].shape = source.checkpoint.at(concat(name, code.suffix)).shape;
  PackedLinearInfo info = dialect_linear(name, scheme, size.n, size.k, source.source_dtype, specs);
  check_stored(source.checkpoint, info, concat("EXL3's ", name.substr(name.rfind('.') + 1), codes_suffix));
  return info;
}

bool detect(const DialectSource& source) { return config_text(source, {"quant_method"}, "") == method; }

QuantizationConfig read(const DialectSource& source) {
  QuantizationConfig result;
  for (const auto& name : linears_with(source.checkpoint, codes_suffix)) {
    result.linears.emplace(name, read_linear(source, name));
  }
  for (const Side& side : sides) {
    for (const auto& name : linears_with(source.checkpoint, side.scales)) {
      if (result.find(name) == nullptr) {
        throw refuse(concat(name, codes_suffix), concat("is missing, although ", side.scales, " is there"));
      }
    }
  }
  return result;
}

Buffer scales_of_signs(std::span<const uint16_t> words) {
  Buffer scales(words.size() * 16 * sizeof(uint16_t));
  const auto bits = scales.as<uint16_t>();
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = (words[i / 16] >> (i % 16) & 1) != 0 ? minus_one : plus_one;
  return scales;
}

void check_finite(const std::string& tensor, std::span<const uint16_t> bits) {
  for (size_t i = 0; i < bits.size(); ++i) {
    const float scale = f32_from_f16(bits[i]);
    if (!std::isfinite(scale)) {
      throw refuse(tensor, concat("[", i, "] is ", scale)).detail("expected a finite number");
    }
  }
}

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> tensors) {
  const Scheme& scheme = info.passes.front().scheme;
  PackedWeight weight{scheme, std::string(formats::canonical_layout), info.n, info.k, {}};
  weight.planes.push_back({{PlaneRole::codes, DType::i16, tensors[0].spec.shape}, std::move(tensors[0].bytes)});
  for (const Side* side : {&sides[1], &sides[0]}) {
    StoredTensor& stored = tensors[side == &sides[0] ? 1 : 2];
    const auto words = stored.bytes.as<uint16_t>();
    if (stored.spec.suffix == side->signs) {
      const auto size = static_cast<int64_t>(words.size() * 16);
      weight.planes.push_back({{side->role, DType::f16, {size}}, scales_of_signs(words)});
      continue;
    }
    check_finite(concat(info.name, side->scales), words);
    weight.planes.push_back({{side->role, DType::f16, stored.spec.shape}, std::move(stored.bytes)});
  }
  return weight;
}

DialectFit fit(const PackedLinearInfo& info) {
  const Scheme& scheme = info.passes.front().scheme;
  if (scheme.family == SchemeFamily::exl3) return {scheme, {}};
  return {std::nullopt,
          "its tiles are searched when a weight is quantized, and no other code has its values: `w4q quantize "
          "--scheme exl3-3 --to exl3` makes them from the 16-bit checkpoint"};
}

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  std::vector<StoredTensor> result;
  const auto specs = specs_of(canonical.scheme, canonical.n, canonical.k);
  for (const PlaneRole role : {PlaneRole::codes, sides[0].role, sides[1].role}) {
    result.push_back({specs[result.size()], canonical.plane(role).bytes.clone()});
  }
  if (specs.size() > 3) {
    result.push_back(formats::allocate_stored(specs[3]));
    result[3].bytes.as<uint32_t>()[0] = row_of(canonical.scheme.code).multiplier;
  }
  return result;
}

bool is_head(const DialectLinear& linear) { return linear.name == "lm_head" || linear.name.ends_with(".lm_head"); }

/// Bits a weight over some linears, to two digits; nothing: there are none.
std::optional<double> mean_bits(const std::vector<DialectLinear>& linears, bool head) {
  double bits = 0, weights = 0;
  for (const DialectLinear& linear : linears) {
    if (is_head(linear) != head) continue;
    const double count = static_cast<double>(linear.n) * static_cast<double>(linear.k);
    bits += linear.scheme.bits * count, weights += count;
  }
  if (weights == 0) return std::nullopt;
  return std::round(100 * bits / weights) / 100;
}

io::Json describe(const std::vector<DialectLinear>& linears, const std::vector<std::string>&) {
  const TrellisCode code = linears.front().scheme.code;
  const auto other = std::ranges::find_if(linears, [&](const auto& linear) { return linear.scheme.code != code; });
  if (other != linears.end()) {
    throw Error(ErrorCode::unsupported, concat(printable(other->name), ": EXL3 has one codebook for all linears"))
        .detail(concat(row_of(other->scheme.code).name, " here, ", row_of(code).name, " in ",
                       printable(linears.front().name)))
        .hint("quantize all linears with one code");
  }
  const auto layers = mean_bits(linears, false), head = mean_bits(linears, true);
  io::Json json = {{"quant_method", method}, {"version", written_version}, {"bits", layers.value_or(head.value_or(0))}};
  json["head_bits"] = head ? static_cast<int>(*head) : 16;
  json["out_scales"] = "always";
  json["codebook"] = row_of(code).name;
  return json;
}

std::string torch_name(DType dtype) {
  constexpr std::pair<DType, std::string_view> names[] = {
      {DType::f32, "float32"}, {DType::f16, "float16"}, {DType::bf16, "bfloat16"}, {DType::i16, "int16"},
      {DType::i32, "int32"},   {DType::i64, "int64"},   {DType::u8, "uint8"},      {DType::i8, "int8"}};
  const auto* const found = std::ranges::find(names, dtype, [](const auto& row) { return row.first; });
  return concat("torch.", found == std::end(names) ? dtype_name(dtype) : found->second);
}

/// The tensors of each module, beside what config.json says.
io::Json storage(io::Json quantization, const std::vector<io::PlannedTensor>& tensors) {
  io::Json modules = io::Json::object();
  for (const auto& tensor : tensors) {
    const size_t dot = tensor.name.rfind('.');
    const std::string module = tensor.name.substr(0, dot);
    modules[module]["stored_tensors"][tensor.name] = {
        {"shape", tensor.shape}, {"n_bytes", tensor.size()}, {"dtype", torch_name(tensor.dtype)}};
    const std::string_view last = std::string_view(tensor.name).substr(std::min(dot, tensor.name.size()));
    if (last == codes_suffix) {
      modules[module]["quant_format"] = method;
      modules[module]["bits_per_weight"] = tensor.shape[2] / 16;
    }
    for (const Code& code : known_codes) {
      if (last == code.suffix) modules[module][concat(code.name, "_multiplier")] = code.multiplier;
    }
  }
  quantization["tensor_storage"] = std::move(modules);
  return quantization;
}

}  // namespace

DialectRow exl3_dialect_row() {
  return {
      .name = "exl3",
      .description = "exllamav3's EXL3",
      .holds =
          "the family exl3 as it is, 1 to 8 bits, codes mul1, mcg and 3inst; nothing else without searching it anew",
      .detect = detect,
      .read = read,
      .decode = decode,
      .fit = fit,
      .tensors = specs_of,
      .encode = encode,
      .describe = describe,
      .config_file = "quantization_config.json",
      .list_tensors = storage,
      .bias_multiple = formats::exl3_block};
}

}  // namespace w4q::checkpoint
