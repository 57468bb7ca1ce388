// A checkpoint in memory, to be changed and written somewhere else.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "formats/packed.h"
#include "io/json.h"

namespace w4q::audit {

struct Tensor {
  DType dtype = DType::u8;
  Shape shape;
  std::string file;  ///< relative to the folder: "model.safetensors", "residual/model.safetensors"
  std::vector<std::byte> bytes;

  bool operator==(const Tensor&) const = default;
};

struct CheckpointCopy {
  io::Json config;
  std::map<std::string, Tensor, std::less<>> tensors;
  std::map<std::string, std::string> files;  ///< all others by relative name, but for the digests
  /// Weight files beside these, which may hold tensors of the same names.
  std::map<std::string, std::map<std::string, Tensor, std::less<>>> further_files;
  /// What befalls the written folder, in order.
  std::vector<std::function<void(const std::filesystem::path&)>> afterwards;

  static CheckpointCopy of(const checkpoint::Folder& source);
  /// Takes the place of what is there.
  void write(const std::filesystem::path& folder) const;

  Tensor& at(std::string_view name) { return tensors.find(name)->second; }
  bool has(std::string_view name) const { return tensors.find(name) != tensors.end(); }
};

/// Whether both hold the same, as far as values go: white space and the order of keys mean nothing.
bool same(const CheckpointCopy& a, const CheckpointCopy& b);

/// Values of a tensor of a weight type, and back.
std::vector<float> values_of(const Tensor& tensor);
void set_values(Tensor& tensor, const std::vector<float>& values);

/// Puts the planes of pass `pass` of `linear` into the place of those that are there.
void put_planes(CheckpointCopy& copy, const std::string& linear, size_t pass, const formats::PackedWeight& packed);

}  // namespace w4q::audit
