#include "checkpoint/packed_checkpoint.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "checkpoint/dialect/checkpoint.h"
#include "checkpoint/dialect/dialect.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "repack/layout_registry.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedLinear;
using formats::PackedWeight;
using io::Json;

constexpr std::string_view config_key = "quantization_config";
constexpr std::string_view method_name = "w4q";
constexpr int64_t max_dimension = int64_t{1} << 31;
using formats::max_passes;

/// Reads the members of one JSON object and says where it stood when something is off.
class Fields {
 public:
  Fields(const Json& object, std::string place) : object_(object), place_(std::move(place)) {
    if (!object.is_object()) fail("is not an object");
  }

  const Json& at(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) fail(concat("has no \"", key, "\""));
    return *found;
  }

  std::string text(const char* key) const {
    const Json& value = at(key);
    if (!value.is_string()) fail(concat("\"", key, "\" is not a string"));
    return value.get<std::string>();
  }

  int64_t integer(const char* key, int64_t least, int64_t most) const {
    const Json& value = at(key);
    const bool huge = value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(most);
    if (huge || !value.is_number_integer() || value < least || value > most) {
      fail(concat("\"", key, "\" is ", value.dump(), ", expected an integer from ", least, " to ", most));
    }
    return value.get<int64_t>();
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::bad_file, concat(place_, " ", what)).hint("the checkpoint was damaged or edited by hand");
  }

 private:
  const Json& object_;
  std::string place_;
};

bool is_known_layout(std::string_view name) {
  const auto rows = repack::layout_registry();
  return std::any_of(rows.begin(), rows.end(), [&](const auto& row) { return row.name == name; });
}

PackedPass parse_pass(const Json& json, const std::string& place) {
  const Fields fields(json, place);
  std::string layout = fields.text("layout");
  if (!is_known_layout(layout)) {
    throw Error(ErrorCode::unsupported,
                concat(place, " names the layout \"", printable(layout), "\", which is unknown"))
        .hint("w4q list shows the layouts of this version");
  }
  PackedPass pass{formats::parse_scheme(fields.text("scheme")), std::move(layout)};
  if (json.contains("rotation")) pass.rotation = formats::parse_rotation(fields.text("rotation"));
  return pass;
}

/// The layout must be able to hold the scheme at this size.
void check_fits(const PackedLinearInfo& info, const PackedPass& pass, const std::string& place) {
  std::string why;
  if (repack::layout_row(pass.layout).accepts(pass.scheme, info.n, info.k, &why)) return;
  throw Error(ErrorCode::bad_file,
              concat(place, " puts ", formats::to_string(pass.scheme), " into layout ", pass.layout))
      .detail(why)
      .hint("the checkpoint was damaged or edited by hand");
}

PackedLinearInfo parse_linear(const std::string& name, const Json& json, std::string_view source) {
  const std::string place = concat(source, ": ", config_key, ".linears[\"", printable(name), "\"]");
  const Fields fields(json, place);
  PackedLinearInfo info;
  info.name = name;
  info.n = fields.integer("n", 1, max_dimension);
  info.k = fields.integer("k", 1, max_dimension);
  const auto dtype = parse_dtype(fields.text("dtype"));
  if (!dtype || !is_weight_dtype(*dtype)) fields.fail("\"dtype\" is not one of F32, F16, BF16");
  info.source_dtype = *dtype;
  const Json& passes = fields.at("passes");
  if (!passes.is_array() || passes.empty() || passes.size() > max_passes) {
    fields.fail(concat("\"passes\" is not an array of 1 to ", max_passes, " passes"));
  }
  for (const auto& pass : passes) {
    info.passes.push_back(parse_pass(pass, place + ".passes"));
    check_fits(info, info.passes.back(), place);
  }
  if (const auto scaled = json.find("input_scale"); scaled != json.end()) {
    if (!scaled->is_boolean()) fields.fail("\"input_scale\" is neither true nor false");
    info.input_scale = scaled->get<bool>();
  }
  return info;
}

/// A plane of the checkpoint, in its memory, after checking it against what the layout demands.
formats::Plane load_plane(const io::Checkpoint& checkpoint, const std::string& name, const formats::PlaneSpec& spec) {
  const io::TensorInfo& found = checkpoint.at(name);
  if (found.dtype != spec.dtype || found.shape != spec.shape) {
    throw Error(ErrorCode::bad_file, concat(printable(name), ": wrong type or shape"))
        .detail(concat("expected ", dtype_name(spec.dtype), " ", shape_text(spec.shape), ", found ",
                       dtype_name(found.dtype), " ", shape_text(found.shape), " in ", checkpoint.file_of(name)))
        .hint("the planes do not fit the n, k, scheme and layout that config.json states");
  }
  return {spec, checkpoint.load(name).buffer()};
}

std::vector<float> load_input_scale(const io::Checkpoint& checkpoint, const PackedLinearInfo& info) {
  std::vector<float> scales;
  if (!info.input_scale) return scales;
  const std::string name = input_scale_name(info.name);
  const formats::Plane plane =
      load_plane(checkpoint, name, {.role = formats::PlaneRole::scales, .dtype = DType::f32, .shape = {info.k}});
  const auto values = plane.bytes.as<float>();
  for (size_t c = 0; c < values.size(); ++c) {
    if (std::isnormal(values[c]) && values[c] > 0) continue;
    throw Error(ErrorCode::bad_file, concat(printable(name), "[", c, "] is ", values[c]))
        .detail("expected a positive number in the normal range of fp32");
  }
  scales.assign(values.begin(), values.end());
  return scales;
}

bool is_rotated(const PackedPass& pass) { return !pass.rotation.identity(); }

bool has_rotations(const QuantizationConfig& quantization) {
  return std::ranges::any_of(quantization.linears,
                             [](const auto& entry) { return std::ranges::any_of(entry.second.passes, is_rotated); });
}

/// One for each pass, or none at all.
std::vector<formats::InputRotation> ready_rotations(const PackedLinearInfo& info) {
  std::vector<formats::InputRotation> result;
  if (std::ranges::none_of(info.passes, is_rotated)) return result;
  for (const auto& pass : info.passes) result.emplace_back(pass.rotation, info.k);
  return result;
}

}  // namespace

const PackedLinearInfo* QuantizationConfig::find(std::string_view linear) const {
  const auto found = linears.find(linear);
  return found == linears.end() ? nullptr : &found->second;
}

QuantizationConfig parse_quantization_config(const Json& config, std::string_view source) {
  QuantizationConfig result;
  const auto found = config.is_object() ? config.find(config_key) : config.end();
  if (found == config.end() || found->is_null()) return result;
  const Fields fields(*found, concat(source, ": ", config_key));
  const std::string quant_method = fields.text("quant_method");
  if (quant_method != method_name) {
    throw Error(ErrorCode::unsupported, concat(source, ": quant_method \"", printable(quant_method), "\" is not w4q's"))
        .hint("w4q repack --to w4q converts the dialects that w4q list --dialects shows");
  }
  const int64_t version = fields.integer("format_version", 1, 1'000'000);
  if (version > packed_format_version) {
    throw Error(ErrorCode::unsupported, concat(source, ": format_version ", version, " is newer than this w4q"))
        .detail(concat("this w4q reads up to ", packed_format_version))
        .hint("update w4q");
  }
  result.method = fields.text("method");
  const Json& linears = fields.at("linears");
  if (!linears.is_object()) fields.fail("\"linears\" is not an object");
  for (const auto& [name, json] : linears.items()) result.linears.emplace(name, parse_linear(name, json, source));
  if (const auto rescaled = found->find("rescaled"); rescaled != found->end()) {
    if (!rescaled->is_array()) fields.fail("\"rescaled\" is not an array");
    for (const auto& name : *rescaled) {
      if (!name.is_string()) fields.fail("\"rescaled\" holds something that is not a name");
      result.rescaled.insert(name.get<std::string>());
    }
  }
  return result;
}

void write_quantization_config(const QuantizationConfig& quantization, Json& config) {
  Json linears = Json::object();
  for (const auto& [name, info] : quantization.linears) {
    Json passes = Json::array();
    for (const auto& pass : info.passes) {
      passes.push_back({{"scheme", formats::to_string(pass.scheme)}, {"layout", pass.layout}});
      if (is_rotated(pass)) passes.back()["rotation"] = formats::to_string(pass.rotation);
    }
    linears[name] = {{"n", info.n}, {"k", info.k}, {"dtype", dtype_name(info.source_dtype)}, {"passes", passes}};
    if (info.input_scale) linears[name]["input_scale"] = true;
  }
  const int version = has_rotations(quantization) ? packed_format_version : 1;
  Json& target = config[std::string(config_key)];
  target = {{"quant_method", method_name}, {"format_version", version}, {"method", quantization.method}};
  if (!quantization.rescaled.empty()) target["rescaled"] = quantization.rescaled;
  target["linears"] = std::move(linears);
}

std::string plane_name(std::string_view linear, size_t pass, formats::PlaneRole role) {
  return concat(linear, ".", pass, ".", formats::to_string(role));
}

std::string input_scale_name(std::string_view linear) { return concat(linear, ".input_scale"); }

std::vector<io::PlannedTensor> planned_planes(const PackedLinearInfo& info) {
  if (info.dialect != nullptr) return info.stored;
  std::vector<io::PlannedTensor> result;
  for (size_t pass = 0; pass < info.passes.size(); ++pass) {
    const auto& [scheme, layout, rotation] = info.passes[pass];
    for (const auto& spec : repack::layout_row(layout).planes(scheme, info.n, info.k)) {
      result.push_back({plane_name(info.name, pass, spec.role), spec.dtype, spec.shape, pass > 0});
    }
  }
  if (info.input_scale) result.push_back({input_scale_name(info.name), DType::f32, {info.k}});
  return result;
}

int64_t stored_bytes(const PackedLinearInfo& info) {
  int64_t sum = 0;
  for (const auto& plane : planned_planes(info)) sum += plane.size();
  return sum;
}

PackedLinear load_packed(const io::Checkpoint& checkpoint, const PackedLinearInfo& info) {
  if (info.dialect != nullptr) return load_stored(checkpoint, info);
  PackedLinear result{info.name, info.source_dtype, {}, load_input_scale(checkpoint, info), ready_rotations(info)};
  for (size_t pass = 0; pass < info.passes.size(); ++pass) {
    const auto& [scheme, layout, rotation] = info.passes[pass];
    PackedWeight weight{scheme, layout, info.n, info.k, {}};
    for (const auto& spec : repack::layout_row(layout).planes(scheme, info.n, info.k)) {
      weight.planes.push_back(load_plane(checkpoint, plane_name(info.name, pass, spec.role), spec));
    }
    result.passes.push_back(std::move(weight));
  }
  return result;
}

PackedLinear load_canonical(const io::Checkpoint& checkpoint, const PackedLinearInfo& info) {
  return to_canonical(load_packed(checkpoint, info));
}

PackedLinear to_canonical(const PackedLinear& packed) {
  PackedLinear result{packed.name, packed.source_dtype, {}, packed.input_scale, packed.rotations};
  for (const auto& pass : packed.passes) {
    result.passes.push_back(repack::layout_row(pass.layout).unpack(pass, packed.name));
    formats::scheme_row(pass.scheme.family).validate(result.passes.back(), packed.name);
  }
  return result;
}

}  // namespace w4q::checkpoint
