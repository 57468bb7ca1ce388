// Files and tensors that are not there, not whole, or not what their header says.
#include <algorithm>
#include <fstream>
#include <limits>

#include "audit/faults.h"
#include "core/text.h"

namespace w4q::audit {
namespace {

namespace fs = std::filesystem;

constexpr const char* file_group = "files";

std::string any_tensor(Subject& s) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : s.copy.tensors) names.push_back(name);
  return s.pick(names);
}

/// A weight file that some tensor lies in.
std::string any_file(Subject& s) { return s.copy.at(any_tensor(s)).file; }

bool truncate(Subject& s, uint64_t keep_percent) {
  const std::string file = any_file(s);
  s.copy.afterwards.emplace_back([file, keep_percent](const fs::path& folder) {
    fs::resize_file(folder / file, fs::file_size(folder / file) * keep_percent / 100);
  });
  return true;
}

bool remove_tensor(Subject& s, const std::string& name) { return s.copy.tensors.erase(name) == 1; }

bool rename_tensor(Subject& s, const std::string& name, const std::string& to) {
  auto node = s.copy.tensors.extract(name);
  node.key() = to;
  s.copy.tensors.insert(std::move(node));
  return true;
}

std::string any_plane(Subject& s) {
  const std::string linear = s.linear();
  return linear.empty() ? std::string{} : s.pick(s.planes(linear));
}

bool poison(Subject& s, std::string_view part, float value) {
  const auto names = s.kept(part);
  if (names.empty()) return false;
  s.edit_values(s.pick(names), [&](std::vector<float>& values) { values[s.below(values.size())] = value; });
  return true;
}

/// The first float among the planes of a linear, of scales of any name.
bool poison_scale(Subject& s, float value) {
  const std::string linear = s.linear();
  if (linear.empty()) return false;
  for (const auto& name : s.planes(linear)) {
    Tensor& tensor = s.copy.at(name);
    const bool scales = name.find("scale") != std::string::npos || name.find("absmax") != std::string::npos;
    if (!scales || !is_weight_dtype(tensor.dtype)) continue;
    s.edit_values(name, [&](std::vector<float>& values) { values[s.below(values.size())] = value; });
    return true;
  }
  return false;
}

bool edit_index(Subject& s, bool (*change)(Subject&, io::Json& map)) {
  const auto found = s.copy.files.find("model.safetensors.index.json");
  if (found == s.copy.files.end()) return false;
  io::Json index = io::parse_json(found->second, "index");
  if (!change(s, index["weight_map"])) return false;
  found->second = index.dump(2);
  return true;
}

/// The whole weight file of another model, or all that lies in one shard.
bool take_shard(Subject& s, const std::function<bool(const std::string&)>& belongs) {
  bool any = false;
  for (auto& [name, tensor] : s.copy.tensors) {
    const auto other = s.specimen.other_copy.tensors.find(name);
    if (other == s.specimen.other_copy.tensors.end() || !belongs(name) || other->second.shape != tensor.shape) continue;
    tensor.bytes = other->second.bytes;
    any = true;
  }
  return any;
}

std::string random_layer(Subject& s) {
  return concat(".layers.", s.below(static_cast<uint64_t>(s.config().layers)), ".");
}

/// A weight file that nothing refers to, with tensors of another model.
bool stale_file(Subject& s, bool same_names) {
  const std::string layer = random_layer(s);
  auto& stale = s.copy.further_files["model-00002-of-00002.safetensors"];
  for (const auto& [name, tensor] : s.specimen.other_copy.tensors) {
    if (name.find(layer) != std::string::npos) stale[same_names ? name : "old." + name] = tensor;
  }
  return true;
}

}  // namespace

Faults file_faults() {
  return {
      {file_group, "a weight file ends early", [](Subject& s) { return truncate(s, 90); }},
      {file_group, "a weight file is empty", [](Subject& s) { return truncate(s, 0); }},
      {file_group, "a weight file is missing",
       [](Subject& s) {
         const std::string file = any_file(s);
         s.copy.afterwards.emplace_back([file](const fs::path& folder) { fs::remove(folder / file); });
         return true;
       }},
      {file_group, "a weight file's header is overwritten",
       [](Subject& s) {
         const std::string file = any_file(s);
         s.copy.afterwards.emplace_back([file](const fs::path& folder) {
           std::fstream stream(folder / file, std::ios::binary | std::ios::in | std::ios::out);
           stream.seekp(40);
           stream << "\0\0\0\0";
           stream << "xxxx";
         });
         return true;
       }},
      {file_group, "a kept tensor is missing", [](Subject& s) { return remove_tensor(s, s.pick(s.kept())); }},
      {file_group, "a plane is missing",
       [](Subject& s) {
         const std::string plane = any_plane(s);
         return !plane.empty() && remove_tensor(s, plane);
       }},
      {file_group, "a packed linear is missing",
       [](Subject& s) {
         const std::string linear = s.linear();
         if (linear.empty()) return false;
         for (const auto& name : s.planes(linear)) remove_tensor(s, name);
         return true;
       }},
      {file_group, "a tensor is extra",
       [](Subject& s) {
         const std::string name = any_tensor(s);
         s.copy.tensors["model.layers.0.mlp.extra"] = s.copy.at(name);
         return true;
       }},
      {file_group, "a 16-bit weight stands beside its planes",
       [](Subject& s) {
         const std::string linear = s.linear();
         if (linear.empty() || s.copy.has(linear + ".weight")) return false;
         const auto& info = *s.quantization().find(linear);
         Tensor weight{DType::bf16, {info.n, info.k}, s.copy.at(s.planes(linear).front()).file, {}};
         set_values(weight, std::vector<float>(static_cast<size_t>(info.n * info.k), 0.5f));
         s.copy.tensors[linear + ".weight"] = std::move(weight);
         return true;
       }},
      {file_group, "a kept tensor is renamed",
       [](Subject& s) {
         const std::string name = s.pick(s.kept());
         return rename_tensor(s, name, name + "_orig");
       }},
      {file_group, "a plane is renamed",
       [](Subject& s) {
         const std::string plane = any_plane(s);
         return !plane.empty() && rename_tensor(s, plane, plane + "_0");
       }},
      {file_group, "names have a prefix more",
       [](Subject& s) {
         std::map<std::string, Tensor, std::less<>> renamed;
         for (auto& [name, tensor] : s.copy.tensors) renamed["module." + name] = std::move(tensor);
         s.copy.tensors = std::move(renamed);
         return true;
       }},
      {file_group, "a kept tensor has another shape",
       [](Subject& s) {
         Tensor& tensor = s.copy.at(s.pick(s.kept()));
         tensor.shape = {tensor.shape.back(), element_count(tensor.shape) / tensor.shape.back()};
         return true;
       }},
      {file_group, "a plane has another shape",
       [](Subject& s) {
         const std::string plane = any_plane(s);
         if (plane.empty()) return false;
         Tensor& tensor = s.copy.at(plane);
         tensor.shape = {element_count(tensor.shape)};
         return s.specimen.copy.tensors.at(plane).shape != tensor.shape;
       }},
      {file_group, "a plane has another type",
       [](Subject& s) {
         const std::string plane = any_plane(s);
         if (plane.empty()) return false;
         Tensor& tensor = s.copy.at(plane);
         const int bits = dtype_bits(tensor.dtype);
         tensor.dtype = bits == 8 ? DType::i8 : bits == 16 ? DType::i16 : bits == 32 ? DType::u32 : DType::i64;
         if (tensor.dtype == s.specimen.copy.tensors.at(plane).dtype) tensor.dtype = DType::u16;
         return dtype_bits(tensor.dtype) == bits;
       }},
      {file_group, "bytes of BF16 are labelled F16",
       [](Subject& s) {
         bool any = false;
         for (const auto& name : s.kept()) {
           Tensor& tensor = s.copy.at(name);
           if (tensor.dtype != DType::bf16) continue;
           tensor.dtype = DType::f16;
           any = true;
         }
         return any;
       }},
      {file_group, "a norm holds NaN",
       [](Subject& s) { return poison(s, "norm", std::numeric_limits<float>::quiet_NaN()); }},
      {file_group, "the embeddings hold infinity",
       [](Subject& s) { return poison(s, "embed_tokens", std::numeric_limits<float>::infinity()); }},
      {file_group, "a scale is NaN",
       [](Subject& s) { return poison_scale(s, std::numeric_limits<float>::quiet_NaN()); }},
      {file_group, "a scale is infinite",
       [](Subject& s) { return poison_scale(s, std::numeric_limits<float>::infinity()); }},
      {file_group, "the index sends a tensor to another shard",
       [](Subject& s) {
         return edit_index(s, [](Subject& subject, io::Json& map) {
           const std::string name = any_tensor(subject), file = map[name];
           for (const auto& [other, theirs] : map.items()) {
             if (theirs != file) return map[name] = theirs, true;
           }
           return false;
         });
       }},
      {file_group, "the index leaves a tensor out",
       [](Subject& s) {
         return edit_index(s, [](Subject& subject, io::Json& map) { return map.erase(any_tensor(subject)) == 1; });
       }},
      {file_group, "the index names a tensor that is nowhere",
       [](Subject& s) {
         return edit_index(s, [](Subject&, io::Json& map) {
           return map["model.layers.9.mlp.up_proj.weight"] = map.begin().value(), true;
         });
       }},
      {file_group, "a stale weight file with the same names", [](Subject& s) { return stale_file(s, true); }},
      {file_group, "a stale weight file with other names", [](Subject& s) { return stale_file(s, false); }},
      {file_group, "all tensors are another model's",
       [](Subject& s) { return take_shard(s, [](auto&) { return true; }); }},
      {file_group, "one layer is another model's",
       [](Subject& s) {
         const std::string layer = random_layer(s);
         return take_shard(s, [&](const std::string& name) { return name.find(layer) != std::string::npos; });
       }},
      {file_group, "the packed weights are another model's",
       [](Subject& s) {
         const auto names = s.kept();
         return take_shard(s, [&](const std::string& name) { return std::ranges::find(names, name) == names.end(); });
       }},
      {file_group, "the kept tensors are another model's",
       [](Subject& s) {
         const auto names = s.kept();
         return take_shard(s, [&](const std::string& name) { return std::ranges::find(names, name) != names.end(); });
       }},
      {file_group, "config.json is cut off",
       [](Subject& s) {
         s.copy.afterwards.emplace_back([](const fs::path& folder) {
           fs::resize_file(folder / "config.json", fs::file_size(folder / "config.json") / 2);
         });
         return true;
       }},
  };
}

}  // namespace w4q::audit
