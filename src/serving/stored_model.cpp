#include "serving/stored_model.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "checkpoint/dialect/dialect.h"
#include "checkpoint/folder.h"
#include "core/convert.h"
#include "core/error.h"
#include "core/float_formats.h"
#include "core/text.h"
#include "io/files.h"
#include "io/system.h"

namespace w4q::serving {
namespace {

struct MethodRow {
  std::string_view name;
  Method method;
};

constexpr std::array<MethodRow, 24> method_rows{{{"awq", Method::awq},
                                                 {"gptq", Method::gptq},
                                                 {"compressed-tensors", Method::compressed_tensors},
                                                 {"compressed_tensors", Method::compressed_tensors},
                                                 {"fp8", Method::fp8},
                                                 {"mxfp4", Method::mxfp4},
                                                 {"gpt_oss_mxfp4", Method::mxfp4},
                                                 {"mxfp8", Method::mxfp8},
                                                 {"modelopt", Method::modelopt},
                                                 {"modelopt_fp4", Method::modelopt},
                                                 {"modelopt_fp8", Method::modelopt},
                                                 {"modelopt_mxfp8", Method::modelopt},
                                                 {"modelopt_mixed", Method::modelopt},
                                                 {"auto-round", Method::auto_round},
                                                 {"intel/auto-round", Method::auto_round},
                                                 {"bitsandbytes", Method::bitsandbytes},
                                                 {"humming", Method::humming},
                                                 {"exl3", Method::exl3},
                                                 {"exl2", Method::exl3},
                                                 {"marlin", Method::marlin},
                                                 {"torchao", Method::torchao},
                                                 {"quark", Method::quark},
                                                 {"w4q", Method::w4q},
                                                 {"turboquant", Method::turboquant}}};

Method method_of(std::string_view name) {
  const auto found = std::ranges::find(method_rows, name, &MethodRow::name);
  return found == method_rows.end() ? Method::other : found->method;
}

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

/// AutoGPTQ's files with Marlin's words.
bool is_marlin(const io::Json& quantization) {
  return text(quantization, "checkpoint_format") == "marlin" ||
         boolean(quantization, "is_marlin_format").value_or(false);
}

/// Names what the config leaves unnamed, as old programs did.
std::string name_of(const io::Json& quantization) {
  if (std::string name = text(quantization, "quant_method"); !name.empty()) return lower(std::move(name));
  if (quantization.contains("quant_algo")) return "modelopt";
  if (quantization.contains("desc_act")) return "gptq";
  if (quantization.contains("w_bit") || quantization.contains("zero_point")) return "awq";
  if (quantization.contains("load_in_4bit") || quantization.contains("load_in_8bit")) return "bitsandbytes";
  return "(none)";
}

double decoded(std::span<const std::byte> bytes, DType dtype, size_t index) {
  const auto read = [&]<class T>(T value) {
    std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
    return value;
  };
  switch (dtype) {
    case DType::f32:
      return read(float{});
    case DType::f64:
      return read(double{});
    case DType::bf16:
      return f32_from_bf16(read(uint16_t{}));
    case DType::f16:
      return f32_from_f16(read(uint16_t{}));
    case DType::i32:
      return read(int32_t{});
    case DType::i64:
      return static_cast<double>(read(int64_t{}));
    case DType::i16:
      return read(int16_t{});
    case DType::u8:
      return read(uint8_t{});
    case DType::f8_e4m3:
      return f32_from_e4m3(read(uint8_t{}));
    default:
      return 0;
  }
}

}  // namespace

StoredModel StoredModel::open(const std::filesystem::path& path) {
  StoredModel model;
  if (!io::is_folder(path) && io::is_gguf(path)) {
    model = planned(io::GgufFile::open(path).header());
    model.place_ = path.filename().string();
    return model;
  }
  checkpoint::require_folder(path);
  model.config_ = io::read_json(path / "config.json");
  model.checkpoint_ = std::make_shared<const io::Checkpoint>(io::Checkpoint::open(path, false));
  model.tensors_ = model.checkpoint_->tensors();
  model.read_config(path);
  model.read_linears();
  return model;
}

StoredModel StoredModel::planned(io::Json config, const std::vector<io::PlannedTensor>& tensors) {
  StoredModel model;
  model.config_ = std::move(config);
  for (const auto& tensor : tensors) {
    const auto size = static_cast<uint64_t>(tensor.size());
    if (!tensor.sidecar)
      model.tensors_.emplace(tensor.name, io::TensorInfo{tensor.name, tensor.dtype, tensor.shape, 0, size});
  }
  model.read_config({});
  model.read_linears();
  return model;
}

StoredModel StoredModel::planned(io::GgufHeader header) {
  StoredModel model;
  model.gguf_ = std::make_shared<const io::GgufHeader>(std::move(header));
  model.method_ = Method::gguf, model.method_name_ = "gguf";
  return model;
}

void StoredModel::read_config(const std::filesystem::path& folder) {
  place_ = "config.json: quantization_config";
  quantization_ = member(config_, "quantization_config");
  if (quantization_.is_null()) quantization_ = member(member(config_, "text_config"), "quantization_config");
  if (quantization_.is_null()) quantization_ = member(config_, "compression_config");
  const auto read_beside = [&](std::string_view name) {
    if (!quantization_.is_null() || folder.empty() || !io::path_exists(folder / name)) return;
    quantization_ = io::read_json(folder / name);
    place_ = name;
  };
  for (const auto name : checkpoint::side_config_files) read_beside(name);
  read_beside("hf_quant_config.json");
  if (quantization_.is_null()) {
    const bool rotated = !folder.empty() && io::path_exists(folder / checkpoint::turboquant_config_file);
    method_ = rotated ? Method::turboquant : Method::none;
    method_name_ = rotated ? "turboquant" : "";
    return;
  }
  if (!quantization_.is_object()) {
    throw Error(ErrorCode::bad_file, concat(place_, ": is ", printable(quantization_.dump()), ", expected an object"));
  }
  if (member(quantization_, "quantization").is_object()) {
    wrapped_ = true;
    const io::Json inner = quantization_["quantization"];
    quantization_ = inner;
    method_name_ = "modelopt";
  } else {
    method_name_ = name_of(quantization_);
  }
  method_ = method_of(method_name_);
  if (method_ == Method::gptq && is_marlin(quantization_)) method_ = Method::marlin;
}

void StoredModel::read_linears() {
  linears_ = stored_linears(tensors_);
  layers_ = layers_of(linears_, false);
  fused_ = layers_of(linears_, true);
}

const io::Json& StoredModel::stated(std::initializer_list<const char*> keys) const {
  for (const io::Json* object : {&member(config_, "text_config"), &config_}) {
    for (const char* key : keys) {
      if (const io::Json& value = member(*object, key); !value.is_null()) return value;
    }
  }
  static const io::Json nothing;
  return nothing;
}

int64_t StoredModel::number(std::initializer_list<const char*> keys) const {
  const io::Json& value = stated(keys);
  return value.is_number_integer() ? value.get<int64_t>() : 0;
}

bool StoredModel::flag(const char* key, bool otherwise) const {
  const io::Json& value = stated({key});
  return value.is_boolean() ? value.get<bool>() : otherwise;
}

std::optional<std::vector<double>> StoredModel::values(std::string_view tensor) const {
  constexpr uint64_t most_bytes = 1 << 20;
  const auto found = tensors_.find(tensor);
  if (!checkpoint_ || found == tensors_.end() || found->second.size() > most_bytes) return std::nullopt;
  const auto loaded = checkpoint_->load(tensor);
  std::vector<double> values(static_cast<size_t>(element_count(loaded->shape)));
  if (dtype_bits(loaded->dtype) < 8) return std::nullopt;
  for (size_t i = 0; i < values.size(); ++i) values[i] = decoded(loaded->bytes, loaded->dtype, i);
  return values;
}

std::vector<std::string> texts(const io::Json& object, const char* key) {
  std::vector<std::string> list;
  const io::Json& value = member(object, key);
  if (value.is_array()) {
    for (const auto& entry : value) {
      if (entry.is_string()) list.push_back(entry.get<std::string>());
    }
  }
  return list;
}

const io::Json& member(const io::Json& object, const char* key) {
  static const io::Json nothing;
  if (!object.is_object()) return nothing;
  const auto found = object.find(key);
  return found == object.end() ? nothing : *found;
}

std::optional<int64_t> integer(const io::Json& object, const char* key) {
  const io::Json& value = member(object, key);
  return value.is_number_integer() ? std::optional(value.get<int64_t>()) : std::nullopt;
}

std::optional<bool> boolean(const io::Json& object, const char* key) {
  const io::Json& value = member(object, key);
  return value.is_boolean() ? std::optional(value.get<bool>()) : std::nullopt;
}

std::string text(const io::Json& object, const char* key) {
  const io::Json& value = member(object, key);
  return value.is_string() ? value.get<std::string>() : std::string();
}

}  // namespace w4q::serving
