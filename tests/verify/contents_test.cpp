// What others write, without a base: every seeded fault is named, or stands in the list of those that nothing but the
// base can tell; clean checkpoints raise no alarm.
#include "verify/contents/contents.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/progress.h"
#include "made_checkpoint.h"
#include "support.h"
#include "verify/ladder.h"

namespace w4q::verify {
namespace {

namespace fs = std::filesystem;
using test::MadeCheckpoint;
using test::Storage;

struct Climbed {
  bool passed = false;
  std::string text;
};

Climbed climbed(const fs::path& folder) {
  set_progress_enabled(false);
  try {
    CheckOptions options;
    options.model = folder;
    options.device = "cpu";
    CheckContext context(options);
    // What this rung names needs no other; of what it does not, the rest of the ladder is asked.
    const auto contents = check_contents(context.headers());
    if (contents && !contents->passed) return {false, join(contents->faults, "\n")};
    const Findings findings = climb(context);
    return {findings.checks.passed(), findings.text};
  } catch (const Error& error) {
    return {false, error.what()};
  }
}

/// A linear by its path: all tensors that hold it.
std::vector<std::string> tensors_of(const MadeCheckpoint& made, const std::string& path) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : made.tensors) {
    if (name.starts_with(path + ".") || name.starts_with(path + "_")) names.push_back(name);
  }
  return names;
}

/// The first tensor of a name that ends so and holds this part.
std::optional<std::string> find(const MadeCheckpoint& made, std::string_view part, std::string_view end) {
  for (const auto& [name, tensor] : made.tensors) {
    const bool text_layer = name.find("mtp") == std::string::npos && name.find("visual") == std::string::npos;
    if (text_layer && name.find(part) != std::string::npos && name.ends_with(end)) return name;
  }
  return std::nullopt;
}

/// The scales of a linear of the layers, whatever they are called.
std::optional<std::string> scales(const MadeCheckpoint& made, std::string_view part) {
  for (const char* end : {".weight_scale_inv", ".weight_scale", "_proj_scales"}) {
    if (auto name = find(made, part, end)) return name;
  }
  return std::nullopt;
}

std::string path_of(const std::string& tensor) {
  const size_t at = tensor.rfind(tensor.ends_with("_scales") || tensor.ends_with("_blocks") ? '_' : '.');
  return tensor.substr(0, at);
}

bool small(const MadeCheckpoint& made) {
  return made.config.contains("quantization_config") &&
         made.config["quantization_config"].value("format", "") != "pack-quantized";
}

/// Of fewer than these a slope says nothing.
bool enough_scales(const MadeCheckpoint& made, const std::string& name) {
  return element_count(made.tensors.at(name).shape) >= 128;
}

void drop(MadeCheckpoint& made, std::string_view part) {
  std::erase_if(made.tensors, [&](const auto& entry) { return entry.first.find(part) != std::string::npos; });
}

bool drop_some(MadeCheckpoint& made, std::string_view part) {
  const size_t before = made.tensors.size();
  drop(made, part);
  return made.tensors.size() < before;
}

/// Puts the linear there in 16 bit, unquantized.
bool make_plain(MadeCheckpoint& made, const std::string& scale_name) {
  const std::string path = path_of(scale_name);
  Shape shape{64, 64};
  for (const char* codes : {".weight_packed", ".weight"}) {
    if (!made.tensors.contains(path + codes)) continue;
    shape = made.tensors[path + codes].shape;
    if (made.tensors[path + codes].dtype == DType::u8) shape[1] *= 2;
    if (made.tensors[path + codes].dtype == DType::i32) shape[1] *= 8;
  }
  for (const auto& name : tensors_of(made, path)) made.tensors.erase(name);
  test::MadeWriter(made, Storage::bf16).dense(path + ".weight", shape);
  return true;
}

io::Json& list_of(MadeCheckpoint& made) {
  io::Json& quantization = made.config["quantization_config"];
  const bool fp8 = quantization["quant_method"] == "fp8" || quantization["quant_method"] == "mxfp4";
  io::Json& list = quantization[fp8 ? "modules_to_not_convert" : "ignore"];
  if (list.is_null()) list = io::Json::array();
  return list;
}

io::Json& text_config(MadeCheckpoint& made) {
  return made.config.contains("text_config") ? made.config["text_config"] : made.config;
}

template <class Change>
bool change_floats(MadeCheckpoint& made, const std::string& name, Change change) {
  auto& tensor = made.tensors.at(name);
  if (tensor.dtype == DType::f32) {
    for (float& value : made.values<float>(name)) value = change(value);
  } else if (tensor.dtype == DType::bf16) {
    for (uint16_t& value : made.values<uint16_t>(name)) value = bf16_from_f32(change(f32_from_bf16(value)));
  } else {
    return false;
  }
  return true;
}

/// Exchanges the last two dimensions, values and all, of a tensor of whole bytes.
void transpose(test::MadeTensor& tensor) {
  const size_t rank = tensor.shape.size();
  const auto rows = static_cast<size_t>(tensor.shape[rank - 2]), cols = static_cast<size_t>(tensor.shape[rank - 1]);
  const auto width = static_cast<size_t>(dtype_bits(tensor.dtype) / 8), plane = rows * cols * width;
  const auto before = tensor.bytes;
  for (size_t at = 0; at < tensor.bytes.size(); at += plane) {
    for (size_t i = 0; i < rows * cols; ++i) {
      std::copy_n(before.begin() + static_cast<std::ptrdiff_t>(at + i * width), width,
                  tensor.bytes.begin() + static_cast<std::ptrdiff_t>(at + (i % cols * rows + i / cols) * width));
    }
  }
  std::swap(tensor.shape[rank - 2], tensor.shape[rank - 1]);
}

bool is_stack(const MadeCheckpoint& made, const std::string& name) {
  const Shape& shape = made.tensors.at(name).shape;
  return shape.size() == 3 && is_weight_dtype(made.tensors.at(name).dtype) &&
         name.find("experts") != std::string::npos && name.find("bias") == std::string::npos;
}

std::optional<std::string> bf16_stack(const MadeCheckpoint& made, std::string_view part) {
  for (const auto& [name, tensor] : made.tensors) {
    if (name.find(part) != std::string::npos && name.find("mtp") == std::string::npos && is_stack(made, name))
      return name;
  }
  return std::nullopt;
}

/// Adds rows to a matrix of 16 bit.
bool pad_rows(MadeCheckpoint& made, std::string_view end) {
  for (auto& [name, tensor] : made.tensors) {
    if (!name.ends_with(end) || name.find("layers.") != std::string::npos) continue;
    tensor.bytes.resize(tensor.bytes.size() + tensor.bytes.size() / static_cast<size_t>(tensor.shape[0]) * 32);
    tensor.shape[0] += 32;
    return true;
  }
  return false;
}

struct Fault {
  const char* name;
  const char* says;                           ///< part of what names it; nullptr: nothing but the base can tell
  std::function<bool(MadeCheckpoint&)> seed;  ///< false: there is nothing that could have it
};

/// Two linears of the same role in two experts, as stored.
std::optional<std::pair<std::string, std::string>> two_experts(const MadeCheckpoint& made, std::string_view role) {
  const auto one = scales(made, concat("experts.0.", role)), other = scales(made, concat("experts.1.", role));
  if (!one || !other) return std::nullopt;
  return std::pair(*one, *other);
}

const std::vector<Fault>& all_faults() {
  static const std::vector<Fault> faults = {
      {"an expert in 16 bit", "in 16 bit, but the config",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "experts.1.");
         return name && make_plain(made, *name);
       }},
      {"an attention weight in 16 bit", "in 16 bit, but the config",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "self_attn");
         return name && make_plain(made, *name);
       }},
      {"all experts of a layer in 16 bit", "in 16 bit, but the config",
       [](MadeCheckpoint& made) {
         bool any = false;
         while (const auto name = scales(made, "layers.1.mlp.experts.")) {
           if (name->ends_with("_scales")) break;
           any = make_plain(made, *name);
         }
         return any;
       }},
      {"a stack in 16 bit", "holds experts in 16 bit",
       [](MadeCheckpoint& made) {
         const auto name = find(made, "experts", "_blocks");
         if (!name) return false;
         const std::string path = path_of(*name);
         const Shape shape = made.tensors[*name].shape;
         made.tensors.erase(path + "_blocks"), made.tensors.erase(path + "_scales");
         test::MadeWriter(made, Storage::bf16).dense(path, {shape[0], shape[2] * 32, shape[1]});
         return true;
       }},
      {"a linear of an expert is missing", "is missing",
       [](MadeCheckpoint& made) { return drop_some(made, "experts.1.up_proj"); }},
      {"an expert is missing", "is missing", [](MadeCheckpoint& made) { return drop_some(made, "experts.2."); }},
      {"the last expert is missing", "is missing",
       [](MadeCheckpoint& made) {
         const auto count = text_config(made).value("num_experts", text_config(made).value("n_routed_experts", 0));
         return count > 0 && drop_some(made, concat("experts.", count - 1, "."));
       }},
      {"gate and up have other global scales", "servers fuse the two",
       [](MadeCheckpoint& made) {
         for (const char* end : {".weight_global_scale", ".weight_scale_2"}) {
           const auto name = find(made, "gate_proj", end);
           if (name && made.names_with("experts.0").size() > 1) {
             return change_floats(made, *name, [](float value) { return value * 1.2547f; });
           }
         }
         return false;
       }},
      {"v has another global scale", "servers fuse the two",
       [](MadeCheckpoint& made) {
         for (const char* end : {".weight_global_scale", ".weight_scale_2"}) {
           const auto name = find(made, "v_proj", end);
           if (name && made.names_with("experts.0").size() > 1) {
             return change_floats(made, *name, [](float value) { return value * 2; });
           }
         }
         return false;
       }},
      {"a block's scale is zero", "of zero over codes",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "layers.1");
         if (!name || !small(made)) return false;
         auto& bytes = made.tensors[*name].bytes;
         const auto width = static_cast<size_t>(dtype_bits(made.tensors[*name].dtype) / 8);
         std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(bytes.size() / width / 2 * width), width,
                     std::byte{0});
         return true;
       }},
      {"a scale is no number", "no numbers",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "layers.1");
         if (!name || !small(made)) return false;
         auto& tensor = made.tensors[*name];
         if (tensor.dtype == DType::f8_e4m3) tensor.bytes[3] = std::byte{0x7F};
         if (tensor.dtype == DType::u8) tensor.bytes[3] = std::byte{0xFF};
         bool first = true;
         change_floats(made, *name, [&](float value) { return std::exchange(first, false) ? NAN : value; });
         return true;
       }},
      {"negative scales", "negative",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "layers.1");
         return name && small(made) && change_floats(made, *name, [](float value) { return -value; });
       }},
      {"a stack is transposed", "experts",
       [](MadeCheckpoint& made) {
         const auto name = bf16_stack(made, "down");
         if (!name) return false;
         transpose(made.tensors[*name]);
         return made.tensors[*name].shape[1] != made.tensors[*name].shape[2];
       }},
      {"a stack of reading experts is transposed", "experts",
       [](MadeCheckpoint& made) {
         const auto name = bf16_stack(made, "gate_up");
         if (!name) return false;
         transpose(made.tensors[*name]);
         return made.tensors[*name].shape[1] != made.tensors[*name].shape[2];
       }},
      {"a stack begins with its rows", "should come first",
       [](MadeCheckpoint& made) {
         const auto name = bf16_stack(made, "down");
         if (!name) return false;
         auto& shape = made.tensors[*name].shape;
         std::swap(shape[0], shape[1]);
         return true;
       }},
      {"codes of a stack begin with their rows", "has shape",
       [](MadeCheckpoint& made) {
         const auto name = find(made, "experts", "_blocks");
         if (!name) return false;
         std::swap(made.tensors[*name].shape[0], made.tensors[*name].shape[1]);
         return true;
       }},
      {"codes of a stack are transposed", "has shape",
       [](MadeCheckpoint& made) {
         const auto name = find(made, "gate_up", "_blocks");
         if (!name) return false;
         auto& shape = made.tensors[*name].shape;
         auto& form = made.tensors[path_of(*name) + "_scales"].shape;
         shape[1] /= 2, shape[2] *= 2, form[1] /= 2, form[2] *= 2;
         return true;
       }},
      {"gate and up are exchanged", nullptr,
       [](MadeCheckpoint& made) {
         bool any = false;
         for (const auto& name : tensors_of(made, path_of(scales(made, "experts.0.gate_proj").value_or("none.x")))) {
           std::string other = name;
           other.replace(other.find("gate_proj"), 9, "up_proj");
           std::swap(made.tensors[name], made.tensors[other]);
           any = true;
         }
         return any;
       }},
      {"two experts are exchanged", nullptr,
       [](MadeCheckpoint& made) {
         const auto two = two_experts(made, "down_proj");
         if (!two) return false;
         for (const auto& name : tensors_of(made, path_of(two->first))) {
           std::string other = name;
           other.replace(other.find("experts.0"), 9, "experts.1");
           std::swap(made.tensors[name], made.tensors[other]);
         }
         return true;
       }},
      {"the scales of another expert", "codes",
       [](MadeCheckpoint& made) {
         const auto two = two_experts(made, "down_proj");
         if (!two || !enough_scales(made, two->first)) return false;
         std::swap(made.tensors[two->first].bytes, made.tensors[two->second].bytes);
         return true;
       }},
      {"the scales of gate for up", "codes",
       [](MadeCheckpoint& made) {
         const auto gate = scales(made, "experts.0.gate_proj"), up = scales(made, "experts.0.up_proj");
         if (!gate || !up || !enough_scales(made, *gate)) return false;
         made.tensors[*up].bytes = made.tensors[*gate].bytes;
         return true;
       }},
      {"scales of experts one place off in a stack", "codes",
       [](MadeCheckpoint& made) {
         const auto name = find(made, "down", "_scales");
         if (!name) return false;
         auto& tensor = made.tensors[*name];
         const auto expert = static_cast<std::ptrdiff_t>(tensor.bytes.size() / static_cast<size_t>(tensor.shape[0]));
         std::rotate(tensor.bytes.begin(), tensor.bytes.begin() + expert, tensor.bytes.end());
         return true;
       }},
      {"an expert stands twice", "holds the codes of",
       [](MadeCheckpoint& made) {
         const auto two = two_experts(made, "gate_proj");
         if (!two || !small(made)) return false;
         for (const auto& name : tensors_of(made, path_of(two->first))) {
           std::string other = name;
           other.replace(other.find("experts.0"), 9, "experts.1");
           made.tensors[other] = made.tensors[name];
         }
         return true;
       }},
      {"no MTP layer", "layers for further tokens",
       [](MadeCheckpoint& made) {
         const bool promised = text_config(made).contains("mtp_num_hidden_layers") ||
                               text_config(made).contains("num_nextn_predict_layers");
         if (!promised) return false;
         const auto layers = text_config(made)["num_hidden_layers"].get<int>();
         const bool one = drop_some(made, "mtp"), two = drop_some(made, concat("layers.", layers, "."));
         return one || two;
       }},
      {"no tower", "vision_config",
       [](MadeCheckpoint& made) { return made.config.contains("vision_config") && drop_some(made, "vis"); }},
      {"a block of the tower is missing", "is missing",
       [](MadeCheckpoint& made) { return drop_some(made, "visual.blocks.0."); }},
      {"the last block of the tower is missing", "is missing",
       [](MadeCheckpoint& made) { return drop_some(made, "visual.blocks.1."); }},
      {"no head", "embeddings are not the head",
       [](MadeCheckpoint& made) {
         return made.config.contains("tie_word_embeddings") && !made.config["tie_word_embeddings"].get<bool>() &&
                drop_some(made, "lm_head");
       }},
      {"a layer is missing", "is missing", [](MadeCheckpoint& made) { return drop_some(made, ".layers.1."); }},
      {"an entry that names nothing", "nothing has that name",
       [](MadeCheckpoint& made) {
         if (!made.config.contains("quantization_config")) return false;
         list_of(made).push_back("model.language.layers.0.mlp.gates");
         return true;
       }},
      {"a pattern that names nothing", "nothing has that name",
       [](MadeCheckpoint& made) {
         if (!made.config.contains("quantization_config") || !small(made)) return false;
         list_of(made).push_back(made.config["quantization_config"]["quant_method"] == "compressed-tensors"
                                     ? "re:.*visual_tower.*"
                                     : "model.visual_tower.*");
         return true;
       }},
      {"a quantized linear that is left out", "leaves it out by",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "layers.1");
         if (!name) return false;
         list_of(made).push_back(path_of(*name));
         return true;
       }},
      {"one of three that servers fuse is left out", "into one matrix",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "layers.1.self_attn.v_proj");
         if (!name || !small(made)) return false;
         list_of(made).push_back(path_of(*name));
         return make_plain(made, *name);
       }},
      {"one linear's scales are inverted", "inverted",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "layers.1");
         return name && small(made) && change_floats(made, *name, [](float value) { return 1 / value; });
       }},
      {"all scales are inverted", "inverted",
       [](MadeCheckpoint& made) {
         bool any = false;
         for (const char* part : {"weight_scale", "weight_global_scale"}) {
           for (const auto& name : made.names_with(part)) {
             if (small(made)) any = change_floats(made, name, [](float value) { return 1 / value; }) || any;
           }
         }
         return any;
       }},
      {"scales of one", "not those of its codes",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "layers.1");
         return name && small(made) && made.tensors[*name].dtype != DType::f8_e4m3 &&
                change_floats(made, *name, [](float) { return 1.0f; });
       }},
      {"exponents without their bias", "codes",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "layers.1");
         if (!name || made.tensors[*name].dtype != DType::u8) return false;
         for (uint8_t& value : made.values<uint8_t>(*name)) value = static_cast<uint8_t>(value - 64);
         return true;
       }},
      {"scales are transposed", "transposed",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "experts.0.down_proj");
         if (!name || !small(made)) return false;
         auto& tensor = made.tensors[*name];
         if (tensor.shape.size() != 2 || tensor.shape[1] == 1) return false;
         transpose(tensor);
         return true;
       }},
      {"scales are transposed under a shape that fits", "codes",
       [](MadeCheckpoint& made) {
         for (const char* part : {"q_proj", "o_proj"}) {
           const auto name = scales(made, part);
           if (!name || !small(made)) continue;
           auto& tensor = made.tensors[*name];
           if (tensor.shape.size() != 2 || tensor.shape[0] != tensor.shape[1] || tensor.shape[0] < 8) continue;
           transpose(tensor);
           return true;
         }
         return false;
       }},
      {"scales are missing", "without",
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "layers.1");
         if (!name || !small(made)) return false;
         made.tensors.erase(*name);
         return true;
       }},
      {"no global scale", "global scale",
       [](MadeCheckpoint& made) {
         for (const char* end : {".weight_global_scale", ".weight_scale_2"}) {
           if (const auto name = find(made, "layers.1", end)) return made.tensors.erase(*name) > 0;
         }
         return false;
       }},
      {"a scale of the cache is zero", "scale of the cache",
       [](MadeCheckpoint& made) {
         made.put("model.layers.0.self_attn.k_scale", DType::f32, {}, std::vector<float>{0});
         made.put("model.layers.0.self_attn.v_scale", DType::f32, {}, std::vector<float>{1});
         return true;
       }},
      {"only one scale of the cache", "v_scale is missing",
       [](MadeCheckpoint& made) {
         made.put("model.layers.0.self_attn.k_scale", DType::f32, {}, std::vector<float>{0.5f});
         return true;
       }},
      {"a scale of the cache is no number", "scale of the cache",
       [](MadeCheckpoint& made) {
         made.put("model.layers.0.self_attn.k_scale", DType::f32, {}, std::vector<float>{1});
         made.put("model.layers.0.self_attn.v_scale", DType::f32, {}, std::vector<float>{NAN});
         return true;
       }},
      {"a padded table", "padded vocabulary",
       [](MadeCheckpoint& made) { return pad_rows(made, "embed_tokens.weight"); }},
      {"a padded head", "padded vocabulary", [](MadeCheckpoint& made) { return pad_rows(made, "lm_head.weight"); }},
      {"a layer beyond the last", "is there, but config.json says",
       [](MadeCheckpoint& made) {
         const std::string config = nlohmann::json(made.config).dump();
         if (config.find("mtp") != std::string::npos || config.find("nextn") != std::string::npos) return false;
         test::MadeWriter(made, Storage::bf16).dense("model.layers.97.mlp.up_proj.weight", {64, 64});
         return true;
       }},
      {"text in the embeddings", "holds text at byte",
       [](MadeCheckpoint& made) {
         const std::string text = "a page of something else ";
         for (const auto& name : made.names_with("embed_tokens.weight")) {
           auto& tensor = made.tensors[name];
           if (tensor.bytes.size() < 8 * 4096 || tensor.dtype != DType::bf16) continue;
           for (size_t i = 0; i < 4096; ++i) tensor.bytes[5000 + i] = static_cast<std::byte>(text[i % text.size()]);
           return true;
         }
         return false;
       }},
      {"a page of zeros in the embeddings", "pages were lost",
       [](MadeCheckpoint& made) {
         for (const auto& name : made.names_with("embed_tokens.weight")) {
           auto& tensor = made.tensors[name];
           if (tensor.bytes.size() < 8 * 4096 || tensor.dtype != DType::bf16) continue;
           std::fill_n(tensor.bytes.begin() + tensor.shape[1] * 9 + 2, 4096, std::byte{0});
           return true;
         }
         return false;
       }},
      {"a page of zeros in codes", "zero",
       [](MadeCheckpoint& made) {
         for (auto& [name, tensor] : made.tensors) {
           const bool codes = tensor.dtype == DType::u8 || tensor.dtype == DType::f8_e4m3;
           if (!codes || name.ends_with("scale") || name.ends_with("scales") || tensor.bytes.size() < 2 * 4096)
             continue;
           std::fill_n(tensor.bytes.begin() + tensor.bytes.size() / 3 / 2 * 2 + 40, 4096, std::byte{0});
           return true;
         }
         return false;
       }},
      {"one code", nullptr,
       [](MadeCheckpoint& made) {
         const auto name = scales(made, "layers.1");
         if (!name) return false;
         const auto codes = tensors_of(made, path_of(*name)).front();
         made.tensors[codes].bytes[5] ^= std::byte{1};
         return true;
       }},
  };
  return faults;
}

/// Makes every fault that `source` can have; returns how many, and by kind how many were named.
struct Tally {
  int seeded = 0, named = 0, unknowable = 0;
};
void seed_all(const std::string& label, const MadeCheckpoint& source, const fs::path& folder, Tally& tally) {
  source.write(folder);
  const auto clean = climbed(folder);
  EXPECT_TRUE(clean.passed) << label << "\n" << clean.text;
  for (const auto& fault : all_faults()) {
    MadeCheckpoint made = source;
    if (!fault.seed(made)) continue;
    made.write(folder);
    const auto found = climbed(folder);
    ++tally.seeded;
    if (fault.says == nullptr) {
      ++tally.unknowable;
      continue;
    }
    const bool named = !found.passed && found.text.find(fault.says) != std::string::npos;
    tally.named += named;
    EXPECT_TRUE(named) << label << ": " << fault.name << "\n" << found.text;
  }
}

TEST(Contents, SeededFaultsAreNamed) {
  const test::TemporaryFolder folder;
  Tally tally;
  for (const Storage storage :
       {Storage::fp8_blocks, Storage::fp8_channel, Storage::fp8_tensor, Storage::mxfp4_stack, Storage::mxfp4,
        Storage::nvfp4, Storage::nvfp4_modelopt, Storage::int4, Storage::bf16}) {
    seed_all(std::string(to_string(storage)), test::made_mixture(storage), folder / "made", tally);
  }
  EXPECT_GE(tally.seeded, 150);
  EXPECT_EQ(tally.named + tally.unknowable, tally.seeded);
  std::cout << tally.seeded << " faults seeded, " << tally.named << " named, " << tally.unknowable
            << " need the base\n";
}

TEST(Contents, SeededFaultsOfOtherFamiliesAreNamed) {
  W4Q_NEEDS_SHARED_DATA();
  const test::TemporaryFolder folder;
  Tally tally;
  for (const char* name : {"deepseek-v3-fp8", "qwen3-fp8", "gpt-oss-mxfp4", "qwen3-nvfp4-ct", "qwen3-int4-ct",
                           "gpt-oss", "qwen3_5-moe", "llama4", "gemma4-moe", "glm4-moe"}) {
    const auto source = MadeCheckpoint::of(test::shared_data() / "families" / name);
    seed_all(name, source, folder / "made", tally);
  }
  EXPECT_EQ(tally.named + tally.unknowable, tally.seeded);
  std::cout << tally.seeded << " faults seeded, " << tally.named << " named, " << tally.unknowable
            << " need the base\n";
}

TEST(Contents, CleanFamiliesRaiseNoAlarm) {
  W4Q_NEEDS_SHARED_DATA();
  const test::TemporaryFolder folder;
  int clean = 0;
  for (const char* kind : {"families", "arch"}) {
    for (const auto& entry : fs::directory_iterator(test::shared_data() / kind)) {
      if (!fs::exists(entry.path() / "config.json")) continue;
      MadeCheckpoint::of(entry.path()).write(folder / "clean");
      const auto found = climbed(folder / "clean");
      EXPECT_TRUE(found.passed) << entry.path() << "\n" << found.text;
      ++clean;
    }
  }
  EXPECT_GE(clean, 40);
}

/// Scales of the cache are no parameters, and sound ones no fault.
TEST(Contents, ScalesOfTheCacheMayStandBesideSmallFloats) {
  W4Q_NEEDS_SHARED_DATA();
  const test::TemporaryFolder folder;
  auto made = MadeCheckpoint::of(test::shared_data() / "families" / "qwen3-fp8");
  for (const char* name : {"model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"}) {
    made.put(name, DType::f32, {}, std::vector<float>{0.25f});
  }
  made.write(folder / "made");
  const auto found = climbed(folder / "made");
  EXPECT_TRUE(found.passed) << found.text;
}

}  // namespace
}  // namespace w4q::verify
