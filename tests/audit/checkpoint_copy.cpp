#include "audit/checkpoint_copy.h"

#include <cstring>
#include <fstream>

#include "checkpoint/digests.h"
#include "checkpoint/packed_checkpoint.h"
#include "core/convert.h"
#include "io/files.h"
#include "io/safetensors.h"

namespace w4q::audit {
namespace {

namespace fs = std::filesystem;

void write_weights(const fs::path& path, const std::vector<std::pair<std::string, const Tensor*>>& tensors) {
  std::vector<io::PlannedTensor> plan;
  std::map<std::string_view, const Tensor*> by_name;
  for (const auto& [name, tensor] : tensors) {
    plan.push_back({name, tensor->dtype, tensor->shape});
    by_name.emplace(name, tensor);
  }
  const auto header = io::layout_safetensors(plan, {{"format", "pt"}});
  fs::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file << io::serialize_safetensors_header(header);
  for (const auto& info : header.tensors) {
    const auto& bytes = by_name.at(info.name)->bytes;
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
}

}  // namespace

CheckpointCopy CheckpointCopy::of(const checkpoint::Folder& source) {
  CheckpointCopy copy;
  copy.config = source.config;
  for (const auto& [name, info] : source.tensors.tensors()) {
    const auto loaded = source.tensors.load(name);
    copy.tensors[name] = {info.dtype,
                          info.shape,
                          fs::relative(source.tensors.file_of(name), source.path).native(),
                          {loaded->bytes.begin(), loaded->bytes.end()}};
  }
  for (const auto& entry : fs::directory_iterator(source.path)) {
    const std::string name = entry.path().filename();
    const bool weights = name.ends_with(".safetensors");
    if (!entry.is_regular_file() || weights || name == "config.json" || name == checkpoint::digests_file) continue;
    copy.files[name] = io::read_file(entry.path());
  }
  return copy;
}

void CheckpointCopy::write(const fs::path& folder) const {
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::map<std::string, std::vector<std::pair<std::string, const Tensor*>>> shards;
  for (const auto& [name, tensor] : tensors) shards[tensor.file].emplace_back(name, &tensor);
  for (const auto& [name, shard] : shards) write_weights(folder / name, shard);
  for (const auto& [file, further] : further_files) {
    std::vector<std::pair<std::string, const Tensor*>> shard;
    for (const auto& [name, tensor] : further) shard.emplace_back(name, &tensor);
    write_weights(folder / file, shard);
  }
  for (const auto& [name, text] : files) std::ofstream(folder / name, std::ios::binary) << text;
  std::ofstream(folder / "config.json") << config.dump(2);
  for (const auto& change : afterwards) change(folder);
}

bool same(const CheckpointCopy& a, const CheckpointCopy& b) {
  return a.afterwards.empty() && b.afterwards.empty() && a.further_files == b.further_files && a.tensors == b.tensors &&
         a.files == b.files && nlohmann::json(a.config) == nlohmann::json(b.config);
}

std::vector<float> values_of(const Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(element_count(tensor.shape)));
  widen(tensor.bytes, tensor.dtype, values);
  return values;
}

void set_values(Tensor& tensor, const std::vector<float>& values) {
  tensor.bytes.resize(static_cast<size_t>(byte_count(tensor.dtype, tensor.shape)));
  narrow(values, tensor.dtype, tensor.bytes);
}

void put_planes(CheckpointCopy& copy, const std::string& linear, size_t pass, const formats::PackedWeight& packed) {
  for (const auto& plane : packed.planes) {
    const std::string name = checkpoint::plane_name(linear, pass, plane.spec.role);
    Tensor& tensor = copy.tensors[name];
    tensor.dtype = plane.spec.dtype;
    tensor.shape = plane.spec.shape;
    if (tensor.file.empty()) tensor.file = "model.safetensors";
    const auto bytes = plane.bytes.bytes();
    tensor.bytes.assign(bytes.begin(), bytes.end());
  }
}

}  // namespace w4q::audit
