#include "checkpoint/dialect/checkpoint.h"

#include <optional>
#include <utility>

#include "checkpoint/dialect/dialect.h"
#include "checkpoint/dialect/integer.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/scheme_registry.h"

namespace w4q::checkpoint {
namespace {

using io::Json;

constexpr const char* config_key = "quantization_config";

/// The type that the model had before it was packed, as config.json remembers it.
DType source_dtype(const Json& config) {
  for (const char* key : {"dtype", "torch_dtype"}) {
    const auto found = config.find(key);
    if (found == config.end() || !found->is_string()) continue;
    const auto name = found->get<std::string>();
    if (name.ends_with("bfloat16")) return DType::bf16;
    if (name.ends_with("float32")) return DType::f32;
  }
  return DType::f16;
}

/// A config of its own file, where config.json says nothing; nothing where there is none.
std::optional<std::pair<Json, std::string>> side_config(const io::Checkpoint& checkpoint) {
  for (const auto name : side_config_files) {
    const auto path = checkpoint.folder() / name;
    if (std::filesystem::exists(path)) return std::pair(io::read_json(path), path.string());
  }
  return std::nullopt;
}

bool is_ours(const Json& quantization) {
  return quantization.is_object() && quantization.value("quant_method", Json()) == "w4q";
}

QuantizationConfig read_dialect(const DialectSource& source) {
  const DialectRow& row = detect_dialect(source);
  QuantizationConfig result = row.read(source);
  result.dialect = &row;
  result.method = row.name;
  for (auto& [name, info] : result.linears) info.dialect = &row;
  return result;
}

/// A checkpoint without its sidecar, which holds all passes but the first, is its base passes.
void keep_present_passes(const io::Checkpoint& checkpoint, QuantizationConfig& quantization) {
  const auto is_there = [&](const io::PlannedTensor& tensor) {
    return tensor.sidecar && checkpoint.contains(tensor.name);
  };
  bool several = false;
  for (const auto& [name, info] : quantization.linears) {
    several = several || info.passes.size() > 1;
    if (info.passes.size() > 1 && std::ranges::any_of(planned_planes(info), is_there)) return;
  }
  if (!several) return;
  for (auto& [name, info] : quantization.linears) info.passes.resize(1);
  quantization.notes.push_back("without its residual passes: the base passes alone");
}

/// Its config.json is a 16-bit model's; its tensors are not.
void refuse_turboquant(const io::Checkpoint& checkpoint) {
  if (!std::filesystem::exists(checkpoint.folder() / turboquant_config_file)) return;
  throw Error(ErrorCode::unsupported, concat(printable(checkpoint.folder().native()), ": is TurboQuant's checkpoint"))
      .hint("w4q repack --to w4q converts it");
}

}  // namespace

QuantizationConfig read_quantization(const Json& config, const io::Checkpoint& checkpoint, std::string_view source) {
  const auto read_ours = [&] {
    QuantizationConfig result = parse_quantization_config(config, source);
    keep_present_passes(checkpoint, result);
    return result;
  };
  if (!config.is_object()) return parse_quantization_config(config, source);
  const auto found = config.find(config_key);
  if (found != config.end() && !found->is_null()) {
    if (is_ours(*found) || !found->is_object()) return read_ours();
    return read_dialect({*found, concat(source, ": ", config_key), checkpoint, source_dtype(config)});
  }
  refuse_turboquant(checkpoint);
  const auto side = side_config(checkpoint);
  if (!side || !side->first.is_object()) return {};
  return read_dialect({side->first, side->second, checkpoint, source_dtype(config)});
}

formats::PackedLinear load_stored(const io::Checkpoint& checkpoint, const PackedLinearInfo& info) {
  ensure(info.dialect != nullptr && info.passes.size() == 1, "load_stored: not a linear of a dialect");
  check_stored(checkpoint, info, info.dialect->name);
  std::vector<formats::StoredTensor> tensors;
  for (const auto& [name, dtype, shape, sidecar] : info.stored) {
    tensors.push_back({{name.substr(info.name.size()), dtype, shape}, Buffer::copy_of(checkpoint.load(name)->bytes)});
  }
  formats::PackedLinear result{info.name, info.source_dtype, {}};
  result.passes.push_back(info.dialect->decode(info, std::move(tensors)));
  const formats::PackedWeight& weight = result.passes.front();
  formats::scheme_row(weight.scheme.family).validate(weight, info.name);
  return result;
}

}  // namespace w4q::checkpoint
