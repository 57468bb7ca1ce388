#include "checkpoint/folder.h"

#include "checkpoint/affine_integers.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/dialect.h"
#include "checkpoint/dialect/stacks.h"
#include "checkpoint/low_precision.h"
#include "checkpoint/turned_stacks.h"
#include "core/error.h"
#include "core/text.h"
#include "io/system.h"

namespace w4q::checkpoint {
namespace {

using io::Json;

constexpr const char* config_key = "quantization_config";
/// Of the first versions of compressed-tensors.
constexpr const char* old_config_key = "compression_config";

QuantizationConfig read_dialect(const DialectSource& source) {
  const DialectRow& row = detect_dialect(source);
  QuantizationConfig result = row.read(source);
  result.dialect = &row;
  result.method = row.name;
  for (auto& [name, info] : result.linears) info.dialect = &row;
  return result;
}

/// What a dialect of small floats says of its checkpoint; nothing where no dialect detects it or knows its names.
std::optional<QuantizationConfig> read_floats(const DialectSource& source) {
  const auto detects = [&](const DialectRow& row) { return row.detect(source); };
  if (std::ranges::none_of(dialect_registry(), detects)) return std::nullopt;
  auto result = read_dialect(source);
  return result.linears.empty() ? std::nullopt : std::optional(std::move(result));
}

/// The same, nothing where one of its linears is none that the dialect has.
std::optional<QuantizationConfig> read_known_floats(const DialectSource& source) {
  try {
    return read_floats(source);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal) throw;
    return std::nullopt;
  }
}

DialectSource source_of(const Folder& folder, const StatedQuantization& stated) {
  return {stated.json, stated.place, folder.tensors, stated_dtype(folder.config).value_or(DType::f16)};
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

std::set<std::string, std::less<>> tuned_norms(const Folder& folder) {
  std::set<std::string, std::less<>> result;
  const auto found = folder.config.is_object() ? folder.config.find(tuned_norms_key) : folder.config.end();
  if (!folder.config.is_object() || found == folder.config.end()) return result;
  const bool names =
      found->is_array() && std::ranges::all_of(*found, [](const Json& name) { return name.is_string(); });
  if (!names) {
    throw Error(ErrorCode::bad_file,
                concat(folder.config_path().string(), ": \"", tuned_norms_key, "\" is not an array of names"));
  }
  for (const Json& name : *found) result.insert(name.get<std::string>());
  return result;
}

bool states_moved_targets(const Folder& folder) {
  const auto found = folder.config.is_object() ? folder.config.find(moved_targets_key) : folder.config.end();
  if (!folder.config.is_object() || found == folder.config.end()) return false;
  if (found->is_boolean()) return found->get<bool>();
  throw Error(ErrorCode::bad_file,
              concat(folder.config_path().string(), ": \"", moved_targets_key, "\" is neither true nor false"));
}

/// ModelOpt's hf_quant_config.json, which older exports have alone: what it says stands beside who says it.
Json without_producer(Json side) {
  const auto inner = side.find("quantization");
  if (inner == side.end() || !inner->is_object() || side.contains("quant_method")) return side;
  Json stated = *inner;
  if (!stated.contains("quant_method")) stated["quant_method"] = "modelopt";
  return stated;
}

constexpr const char* decoded_alone = "w4q quantize, calibrate and repack --to hf16 read what its weights stand for";

/// Packed linears of small floats, or why they are none.
std::optional<QuantizationConfig> read_packed_floats(const DialectSource& source) {
  try {
    return read_floats(source);
  } catch (Error& error) {
    if (error.hint().empty()) error.hint(decoded_alone);
    throw;
  }
}

/// The groups of transform_config; an empty object: there are none.
Json transform_groups(const Json& quantization) {
  const Json transforms = quantization.is_object() ? quantization.value("transform_config", Json()) : Json();
  const Json groups = transforms.is_object() ? transforms.value("config_groups", Json()) : Json();
  return groups.is_object() ? groups : Json::object();
}

/// Where a transform of a group of transform_config is applied that no weight holds; empty: all of it is in the weights.
std::string run_time_location(const Json& group) {
  const auto apply = group.is_object() ? group.find("apply") : group.end();
  if (!group.is_object() || apply == group.end() || !apply->is_array()) return {};
  for (const Json& entry : *apply) {
    if (!entry.is_object()) continue;
    const Json location = entry.value("location", Json());
    if (location != "weight_input" && location != "weight_output") return location.dump();
  }
  return {};
}

/// Its config.json is a 16-bit model's; its tensors are not.
void refuse_turboquant(const std::filesystem::path& folder) {
  if (!io::path_exists(folder / turboquant_config_file)) return;
  throw Error(ErrorCode::unsupported, concat(printable(folder.native()), ": is TurboQuant's checkpoint"))
      .hint("w4q repack --to w4q converts it");
}

}  // namespace

Json read_config_file(const std::filesystem::path& folder) {
  const auto path = folder / "config.json";
  if (!io::path_exists(path)) {
    throw Error(ErrorCode::bad_file, concat(printable(path.native()), ": there is none"))
        .hint("give the folder that holds config.json and the .safetensors files");
  }
  Json config = io::read_json(path);
  if (!config.is_object()) return config;
  const auto states = [](const Json& object, const char* key) {
    const auto found = object.find(key);
    return found != object.end() && found->is_object();
  };
  if (!states(config, config_key) && states(config, old_config_key)) {
    Json stated = config[old_config_key];
    if (!stated.contains("quant_method")) stated["quant_method"] = "compressed-tensors";
    config.erase(old_config_key);
    config[config_key] = std::move(stated);
  }
  if (!states(config, "text_config") || !config["text_config"].contains(config_key)) return config;
  Json stated = config["text_config"][config_key];
  config["text_config"].erase(config_key);
  if (!states(config, config_key) && stated.is_object()) config[config_key] = std::move(stated);
  return config;
}

std::optional<DType> stated_dtype(const Json& config) {
  for (const char* key : {"dtype", "torch_dtype"}) {
    const auto found = config.find(key);
    if (found == config.end() || !found->is_string()) continue;
    const auto name = found->get<std::string>();
    if (name.ends_with("bfloat16")) return DType::bf16;
    if (name.ends_with("float16")) return DType::f16;
    if (name.ends_with("float32")) return DType::f32;
  }
  return std::nullopt;
}

void require_folder(const std::filesystem::path& folder) {
  if (io::is_folder(folder)) return;
  const std::string shown = concat(folder.empty() ? "\"\"" : printable(folder.native()));
  throw Error(ErrorCode::bad_file, concat(shown, io::path_exists(folder) ? ": not a folder" : ": does not exist"))
      .hint(
          "give the folder that holds config.json and the .safetensors files; w4q repack FILE.gguf -o FOLDER --to hf16 "
          "makes one of a GGUF file");
}

Folder open_headers(const std::filesystem::path& folder, bool residual) {
  return {folder, read_config_file(folder), turn_stacks(io::Checkpoint::open(folder, residual))};
}

Folder open_folder(const std::filesystem::path& folder, bool residual, FloatForm floats) {
  require_folder(folder);
  return read_quantization(open_headers(folder, residual), floats);
}

Folder open_packed_folder(const std::filesystem::path& folder, std::string_view quantizer) {
  Folder opened = open_folder(folder, true, FloatForm::packed);
  if (!opened.quantization.linears.empty()) return opened;
  if (opened.small_floats) {
    throw Error(ErrorCode::unsupported, folder.string() + ": its small floats are no packed linears to w4q")
        .detail("their names or scales are of no dialect that is written")
        .hint(decoded_alone);
  }
  throw Error(ErrorCode::bad_argument, folder.string() + ": holds no packed tensors")
      .hint(concat(quantizer, " makes a packed checkpoint from a 16-bit one"));
}

std::optional<StatedQuantization> stated_quantization(const Json& config, const std::filesystem::path& folder) {
  if (!config.is_object()) return std::nullopt;
  if (const auto found = config.find(config_key); found != config.end() && !found->is_null()) {
    const bool foreign = found->is_object() && found->value("quant_method", Json()) != "w4q";
    return StatedQuantization{*found, concat((folder / "config.json").string(), ": ", config_key), foreign};
  }
  // mlx-lm has a name of its own for it, and writes the usual one beside it since 2025.
  if (const auto found = config.find("quantization"); found != config.end() && states_mlx(*found)) {
    return StatedQuantization{*found, concat((folder / "config.json").string(), ": quantization"), true};
  }
  for (const auto name : side_config_files) {
    const auto path = folder / name;
    if (!io::path_exists(path)) continue;
    Json side = io::read_json(path);
    if (side.is_object()) return StatedQuantization{without_producer(std::move(side)), path.string(), true};
  }
  return std::nullopt;
}

bool turns_weights(const StatedQuantization& stated) { return !transform_groups(stated.json).empty(); }

void refuse_transforms_at_run_time(const StatedQuantization& stated) {
  const Json groups = transform_groups(stated.json);
  for (const auto& [name, group] : groups.items()) {
    const std::string location = run_time_location(group);
    if (location.empty()) continue;
    throw Error(ErrorCode::unsupported, concat(stated.place, ": transform_config.config_groups.", printable(name),
                                               ": a transform at location ", printable(location)))
        .detail("it turns activations while the model runs, which w4q does not: its weights alone are another model's")
        .hint(
            "start from the 16-bit checkpoint; transforms at weight_input and weight_output alone are in the weights");
  }
}

bool has_packed_floats(const Folder& headers, const StatedQuantization& stated) {
  return is_low_precision(stated.json) && read_known_floats(source_of(headers, stated)).has_value();
}

Folder read_quantization(Folder folder, FloatForm floats) {
  folder.tuned = tuned_norms(folder);
  folder.has_moved_targets = states_moved_targets(folder);
  const auto stated = stated_quantization(folder.config, folder.path);
  if (stated && stated->foreign) {
    refuse_transforms_at_run_time(*stated);
    const DialectSource source = source_of(folder, *stated);
    if (is_low_precision(stated->json)) {
      auto packed = floats == FloatForm::packed   ? read_packed_floats(source)
                    : floats == FloatForm::either ? read_known_floats(source)
                                                  : std::nullopt;
      if (!packed) return read_low_precision(std::move(folder), *stated);
      folder.quantization = std::move(*packed);
      folder.tensors = take_apart(std::move(folder.tensors), folder.quantization);
      return folder;
    }
    folder.quantization = read_dialect(source);
    return folder;
  }
  if (!stated) refuse_turboquant(folder.path);
  folder.quantization = parse_quantization_config(folder.config, folder.config_path().string());
  keep_present_passes(folder.tensors, folder.quantization);
  return folder;
}

}  // namespace w4q::checkpoint
