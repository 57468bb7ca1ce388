// What a program sees before it loads a checkpoint: config.json, what it says of quantization, the headers of weights.
#pragma once

#include <filesystem>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"
#include "io/gguf.h"
#include "io/json.h"
#include "serving/layers.h"
#include "serving/stored_linear.h"

namespace w4q::serving {

/// quant_method, or what stands in its place.
enum class Method {
  none,
  awq,
  gptq,
  compressed_tensors,
  fp8,
  mxfp4,
  mxfp8,
  modelopt,
  auto_round,
  bitsandbytes,
  humming,
  exl3,
  marlin,
  torchao,
  quark,
  w4q,
  turboquant,
  gguf,
  other,
};

class StoredModel {
 public:
  /// A folder, or a GGUF file, as far as headers and what is small beside them. Throws bad_file as their readers do.
  static StoredModel open(const std::filesystem::path& path);
  /// One that is not written yet: without values.
  static StoredModel planned(io::Json config, const std::vector<io::PlannedTensor>& tensors);
  /// A GGUF file that is not written yet.
  static StoredModel planned(io::GgufHeader header);

  Method method() const noexcept { return method_; }
  /// As config.json has it: "compressed-tensors"; empty: none.
  const std::string& method_name() const noexcept { return method_name_; }
  const io::Json& config() const noexcept { return config_; }
  /// The object of quantization_config or of the file in its place, without ModelOpt's wrapping.
  const io::Json& quantization() const noexcept { return quantization_; }
  /// Where that stands: "config.json: quantization_config".
  const std::string& place() const noexcept { return place_; }
  /// Whether ModelOpt's settings were wrapped in "quantization" of hf_quant_config.json.
  bool wrapped() const noexcept { return wrapped_; }

  /// A key of config.json, in its text_config where that has it; null: by none of these keys.
  const io::Json& stated(std::initializer_list<const char*> keys) const;
  int64_t number(std::initializer_list<const char*> keys) const;  ///< 0 where it is no integer
  bool flag(const char* key, bool otherwise) const;               ///< of config.json

  const std::map<std::string, io::TensorInfo, std::less<>>& tensors() const noexcept { return tensors_; }
  const std::map<std::string, StoredLinear, std::less<>>& linears() const noexcept { return linears_; }
  const std::vector<Layer>& layers(bool fuses) const noexcept { return fuses ? fused_ : layers_; }

  /// Values of a small tensor; nothing where they are not there yet, or too many.
  std::optional<std::vector<double>> values(std::string_view tensor) const;
  /// Null unless it is a GGUF file.
  const io::GgufHeader* gguf() const noexcept { return gguf_.get(); }

 private:
  void read_config(const std::filesystem::path& folder);
  void read_linears();

  io::Json config_, quantization_;
  Method method_ = Method::none;
  std::string method_name_, place_;
  bool wrapped_ = false;
  std::map<std::string, io::TensorInfo, std::less<>> tensors_;
  std::map<std::string, StoredLinear, std::less<>> linears_;
  std::vector<Layer> layers_, fused_;
  std::shared_ptr<const io::Checkpoint> checkpoint_;
  std::shared_ptr<const io::GgufHeader> gguf_;
};

/// Texts of an array; what is none is left out.
std::vector<std::string> texts(const io::Json& object, const char* key);
/// The value of a key; null where it is missing.
const io::Json& member(const io::Json& object, const char* key);
std::optional<int64_t> integer(const io::Json& object, const char* key);
std::optional<bool> boolean(const io::Json& object, const char* key);
std::string text(const io::Json& object, const char* key);

}  // namespace w4q::serving
