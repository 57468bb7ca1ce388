#include "gguf_commands.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "formats/gguf_blocks.h"
#include "io/gguf.h"

namespace w4q::app {
namespace {

constexpr size_t longest_text = 60;  // of a value in a table
constexpr size_t shown_elements = 4;

std::string cut(const std::string& text) {
  const std::string line = printable(text);
  return line.size() <= longest_text ? line : printable(text.substr(0, longest_text)) + "…";
}

template <class T>
std::string element_text(const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    return "\"" + cut(value) + "\"";
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_floating_point_v<T>) {
    return concat(value);
  } else {
    return std::to_string(value);
  }
}

std::string array_text(const io::GgufArray& array) {
  const auto text = [&]<class T>(const T& values) -> std::string {
    if constexpr (std::is_same_v<T, std::monostate>) {
      return "";
    } else {
      std::vector<std::string> first;
      for (size_t i = 0; i < std::min(values.size(), shown_elements); ++i) {
        first.push_back(element_text<typename T::value_type>(values[i]));
      }
      const bool more = values.size() > shown_elements;
      return concat("[", join(first), more ? concat(", … ", values.size(), " in all") : "", "]");
    }
  };
  return std::visit(text, array);
}

std::string value_text(const io::GgufValue& value) {
  const auto text = [&]<class T>(const T& alternative) {
    if constexpr (std::is_same_v<T, io::GgufArray>) {
      return array_text(alternative);
    } else {
      return element_text<T>(alternative);
    }
  };
  return std::visit(text, value);
}

/// Scalars as they are; of an array its length and first elements, since vocabularies have hundreds of thousands.
io::Json value_json(const io::GgufValue& value) {
  const auto json = [&]<class T>(const T& alternative) -> io::Json {
    if constexpr (std::is_same_v<T, io::GgufArray>) {
      return array_text(alternative);
    } else {
      return alternative;
    }
  };
  return {{"type", io::type_text(value)}, {"value", std::visit(json, value)}};
}

double bits_per_weight(const io::GgufTensor& tensor) {
  const auto count = static_cast<double>(element_count(tensor.shape));
  return count == 0 ? 0 : 8.0 * static_cast<double>(tensor.size) / count;
}

io::Json tensor_json(const io::GgufTensor& tensor) {
  return {{"name", tensor.name},     {"type", ggml_type_name(tensor.type)},
          {"shape", tensor.shape},   {"bytes", tensor.size},
          {"offset", tensor.offset}, {"bits_per_weight", bits_per_weight(tensor)}};
}

int show_file(const CommonOptions& common, const io::GgufFile& file) {
  const auto& header = file.header();
  TextTable keys({"key", "type", "value"}), tensors({"tensor", "type", "shape", "bits/weight", "bytes"});
  io::Json metadata_json = io::Json::object(), tensors_json = io::Json::array();
  for (const auto& entry : header.metadata) {
    keys.row({printable(entry.key), io::type_text(entry.value), value_text(entry.value)});
    metadata_json[entry.key] = value_json(entry.value);
  }
  int64_t bytes = 0;
  for (const auto& tensor : header.tensors) {
    tensors.row({printable(tensor.name), std::string(ggml_type_name(tensor.type)), shape_text(tensor.shape),
                 fixed(bits_per_weight(tensor), 3), concat(tensor.size)});
    tensors_json.push_back(tensor_json(tensor));
    bytes += static_cast<int64_t>(tensor.size);
  }
  std::string text = concat("GGUF version ", header.version, ", alignment ", header.alignment, "\n\n", keys.str(), "\n",
                            tensors.str(), "\n", header.tensors.size(), " tensors, ", human_bytes(bytes), "\n");
  for (const auto& warning : header.warnings) text += "note: " + warning + "\n";
  print(common, schema::inspect_gguf, text,
        {{"gguf_version", header.version},
         {"alignment", header.alignment},
         {"metadata", std::move(metadata_json)},
         {"tensors", std::move(tensors_json)},
         {"tensor_bytes", bytes},
         {"warnings", header.warnings}});
  return 0;
}

/// The first values of the first row, decoded.
std::vector<float> sample_of(const io::GgufFile& file, const io::GgufTensor& tensor) {
  const auto& row = describe(tensor.type);
  if (!formats::gguf_decodes(tensor.type) || tensor.size == 0) return {};
  std::vector<float> block(static_cast<size_t>(row.block));
  formats::gguf_decode(tensor.type, file.bytes(tensor).first(static_cast<size_t>(row.block_bytes)), block);
  block.resize(std::min<size_t>(block.size(), 8));
  return block;
}

int show_tensor(const CommonOptions& common, const io::GgufFile& file, const std::string& name) {
  const auto* tensor = file.find(name);
  if (tensor == nullptr) {
    throw Error(ErrorCode::bad_argument,
                concat(printable(name), ": no such tensor in ", printable(file.path().native())))
        .hint("w4q inspect FILE.gguf lists them");
  }
  std::vector<std::string> values;
  const auto sample = sample_of(file, *tensor);
  for (const float value : sample) values.push_back(concat(value));
  io::Json json = tensor_json(*tensor);
  json["first_values"] = sample;
  print(common, schema::inspect_gguf_tensor,
        concat(printable(name), ": ", ggml_type_name(tensor->type), " ", shape_text(tensor->shape), ", ", tensor->size,
               " bytes at ", tensor->offset, " of the data, ", fixed(bits_per_weight(*tensor), 3),
               " bits per weight\nfirst values: ", values.empty() ? "(not decoded)" : join(values), "\n"),
        json);
  return 0;
}

}  // namespace

bool names_gguf(const std::string& path) { return path.ends_with(".gguf") || io::is_gguf(path); }

int inspect_gguf(const CommonOptions& common, const std::string& path, const std::string& tensor) {
  const auto file = io::GgufFile::open(path);
  return tensor.empty() ? show_file(common, file) : show_tensor(common, file, tensor);
}

}  // namespace w4q::app
