// Rules by names and shapes: what is missing, left in 16 bit, or of another form than config.json says.
#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "checkpoint/affine_integers.h"
#include "checkpoint/fused.h"
#include "checkpoint/low_precision.h"
#include "core/text.h"
#include "model/parameters.h"
#include "verify/contents/contents.h"
#include "verify/names.h"

namespace w4q::verify {
namespace {

using Kind = StoredLinear::Kind;

/// A name of a tower for pictures.
bool sees(std::string_view name) { return has_part(name, {"vis", "image", "img", "vit."}); }

int64_t layers_of(const StoredContents& contents) { return contents.number({"num_hidden_layers"}); }

/// A linear of the text model's layers that few bits do not ruin.
bool is_meant(const StoredContents& contents, const StoredLinear& linear) {
  return model::reason_to_leave(linear.path, layers_of(contents)).empty();
}

/// Of tensors with three dimensions experts alone: convolutions and states of recurrent layers have as many.
bool is_matrix(const StoredLinear& linear) { return linear.experts == 0 || has_part(linear.path, {"expert", "moe"}); }

/// compressed-tensors' readers take a path as a whole: one that is only a part in the middle of another leaves nothing out.
bool is_in_the_middle(const StoredContents& contents, const std::string& entry, const std::string& path) {
  return !contents.globs() && path != entry && !path.starts_with(entry + ".") && !path.ends_with("." + entry) &&
         path.find("." + entry + ".") != std::string::npos;
}

void in_16_bit(const StoredContents& contents, ContentsFindings& findings) {
  for (const auto& linear : contents.linears()) {
    const bool in_layer = model::layer_numbers(linear.path).layer >= 0;
    const std::string entry = contents.left_out_by(linear.path);
    const bool is_plain = linear.kind == Kind::plain && !contents.is_left_by_program(linear) && is_matrix(linear);
    if (is_plain && entry.empty() && in_layer && is_meant(contents, linear)) {
      findings.fault(linear.path, linear.experts > 0 ? "holds experts in 16 bit, but the config lists them as quantized"
                                                     : "is in 16 bit, but the config lists it as quantized");
    } else if (linear.kind != Kind::plain && !entry.empty() && !is_in_the_middle(contents, entry, linear.path)) {
      findings.fault(linear.path, concat("is quantized, but the config leaves it out by ", printable(entry)));
    }
  }
}

void without_scales(const StoredContents& contents, ContentsFindings& findings) {
  for (const auto& linear : contents.linears()) {
    const bool small = linear.kind == Kind::fp8 || linear.kind == Kind::mxfp4 || linear.kind == Kind::nvfp4;
    if (small && linear.scales.empty()) findings.fault(linear.path, "has codes without their scales");
    if (linear.kind == Kind::nvfp4 && linear.factor.empty()) findings.fault(linear.path, "has no global scale");
  }
  for (const auto& [name, info] : contents.tensors().tensors()) {
    for (const std::string_view suffix :
         {".weight_scale_inv", ".weight_scale", ".weight_global_scale", ".weight_scale_2", ".scale"}) {
      if (!name.ends_with(suffix) || (suffix == ".scale" && info.dtype != DType::f8_e8m0)) continue;
      const auto* linear = contents.find(std::string_view(name).substr(0, name.size() - suffix.size()));
      if (linear == nullptr || linear->kind == Kind::plain) findings.fault(name, "scales nothing: there are no codes");
    }
  }
}

/// Weights as a group of compressed-tensors describes them, by the group's name.
std::map<std::string, io::Json> described_weights(const StoredContents& contents) {
  std::map<std::string, io::Json> described;
  const io::Json& quantization = contents.quantization();
  if (!quantization.is_object()) return described;
  const auto groups = quantization.find("config_groups");
  if (groups == quantization.end() || !groups->is_object()) return described;
  for (const auto& [name, group] : groups->items()) {
    if (!group.is_object() || !group.contains("weights") || !group["weights"].is_object()) continue;
    described[name] = group["weights"];
    const io::Json& own = group.value("format", io::Json());
    described[name]["format"] = own.is_string() ? own : quantization.value("format", io::Json());
  }
  return described;
}

/// What a format of compressed-tensors has by its definition.
struct FormatSizes {
  std::string_view format;
  int64_t bits, group;  ///< 0: any
};
constexpr FormatSizes format_sizes[] = {{"nvfp4-pack-quantized", 4, 16},
                                        {"mxfp4-pack-quantized", 4, 32},
                                        {"mxfp8-quantized", 8, 32},
                                        {"float-quantized", 8, 0}};

void stated_sizes(const StoredContents& contents, ContentsFindings& findings) {
  for (const auto& [name, weights] : described_weights(contents)) {
    const auto row = std::ranges::find_if(format_sizes, [&, &described = weights](const FormatSizes& sizes) {
      return described["format"] == sizes.format;
    });
    if (row == std::end(format_sizes)) continue;
    const auto hold = [&, &group = name, &described = weights](const char* key, int64_t wanted) {
      const auto found = described.find(key);
      if (found == described.end() || !found->is_number_integer() || wanted == 0 || *found == wanted) return;
      findings.fault("config.json", concat("says ", key, " ", found->dump(), " in ", printable(group), ", ",
                                           row->format, " has ", wanted));
    };
    hold("num_bits", row->bits);
    hold("group_size", row->group);
    if (weights.value("symmetric", io::Json()) == false) {
      findings.fault("config.json", concat("calls ", printable(name), " asymmetric, but floats have no zero points"));
    }
  }
}

/// Rows and columns that share a scale of FP8, as config.json says.
std::pair<int64_t, int64_t> stated_block(const StoredContents& contents) {
  io::Json size = contents.quantization().value("weight_block_size", io::Json());
  for (const auto& [name, weights] : described_weights(contents)) {
    if (size.is_null()) size = weights.value("block_structure", io::Json());
  }
  const bool stated = size.is_array() && size.size() == 2 && size[0].is_number_integer() && size[1].is_number_integer();
  if (!stated) return {128, 128};
  return {std::max<int64_t>(1, size[0].get<int64_t>()), std::max<int64_t>(1, size[1].get<int64_t>())};
}

bool is_power(DType dtype) { return dtype == DType::u8 || dtype == DType::f8_e8m0; }

/// Shapes of scales against those of their codes: a transposed one is told by name.
void shapes_of_scales(const StoredContents& contents, ContentsFindings& findings) {
  const auto [rows, cols] = stated_block(contents);
  const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  for (const auto& linear : contents.linears()) {
    if (linear.scales.empty() || linear.kind == Kind::integer) continue;
    const Shape found = checkpoint::shape_of_scales(contents.tensors().at(linear.scales).shape);
    const int64_t group = linear.kind == Kind::nvfp4 ? 16 : 32;
    Shape wanted = linear.kind == Kind::fp8 ? Shape{blocks(linear.n, rows), blocks(linear.k, cols)}
                                            : Shape{linear.n, blocks(linear.k, group)};
    if (linear.experts > 0) wanted.insert(wanted.begin(), linear.experts);
    const bool powers =
        is_power(contents.tensors().at(linear.scales).dtype) &&  // MXFP8, and that of ModelOpt's stacks
        (found == Shape{linear.n, blocks(linear.k, 32)} || found == Shape{blocks(linear.n, 32), linear.k});
    const bool simple = linear.kind == Kind::fp8 && (powers || element_count(found) == 1 || found == Shape{linear.n} ||
                                                     found == Shape{linear.n, 1});
    if (found == wanted || simple) continue;
    Shape turned = wanted;
    std::swap(turned[turned.size() - 1], turned[turned.size() - 2]);
    findings.fault(linear.scales, concat(found == turned ? "is transposed: it has shape " : "has shape ",
                                         shape_text(found), ", its codes need ", shape_text(wanted)));
  }
}

/// "model.layers.3.mlp.experts.5.up_proj" → "model.layers.3.mlp.experts" and 5.
struct Expert {
  std::string mixture, linear;
  int64_t number = -1;
};
std::optional<Expert> expert_of(const std::string& path) {
  constexpr std::string_view part = ".experts.";
  const size_t at = path.find(part);
  if (at == std::string::npos) return std::nullopt;
  const size_t begin = at + part.size(), end = path.find('.', begin);
  const std::string digits = path.substr(begin, end - begin);
  if (end == std::string::npos || digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  return Expert{path.substr(0, at + part.size() - 1), path.substr(end + 1), std::atoll(digits.c_str())};
}

void missing_experts(const StoredContents& contents, ContentsFindings& findings) {
  std::map<std::string, std::map<std::string, std::set<int64_t>>> mixtures;
  for (const auto& linear : contents.linears()) {
    if (const auto expert = expert_of(linear.path)) mixtures[expert->mixture][expert->linear].insert(expert->number);
  }
  const int64_t stated = contents.number({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"});
  std::set<std::string> roles;  // what a mixture of this model has
  for (const auto& [mixture, linears] : mixtures) {
    for (const auto& [name, numbers] : linears) roles.insert(name);
  }
  for (const auto& [mixture, linears] : mixtures) {
    int64_t count = stated;
    for (const auto& [name, numbers] : linears) count = std::max(count, *numbers.rbegin() + 1);
    for (const auto& role : roles) {
      const auto found = linears.find(role);
      for (int64_t number = 0; number < count; ++number) {
        if (found != linears.end() && found->second.contains(number)) continue;
        findings.fault(concat(mixture, ".", number, ".", role),
                       concat("is missing: the mixture has ", count, " experts"));
      }
    }
  }
}

void missing_layers(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t layers = layers_of(contents);
  std::set<int64_t> found;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    if (has_part(name, {"vis", "audio", "mtp", "image"})) continue;
    const size_t at = name.find("layers.");
    if (at == std::string::npos && name.find("h.") == std::string::npos) continue;
    found.insert(model::layer_numbers(name).layer);
  }
  if (found.empty()) return;
  for (int64_t layer = 0; layer < std::min<int64_t>(layers, 10000); ++layer) {
    if (!found.contains(layer)) findings.fault(concat("layer ", layer), concat("of ", layers, " is missing"));
  }
}

/// Models that see whose head is tied unless the file's top says otherwise, whatever text_config does.
constexpr std::string_view tied_wrappers[] = {"Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration",
                                              "InternVLForConditionalGeneration", "Mistral3ForConditionalGeneration"};

/// Of a model that is wrapped the file's top decides, where it says anything.
bool is_untied(const StoredContents& contents) {
  constexpr const char* key = "tie_word_embeddings";
  const io::Json& config = contents.config();
  const bool top = config.is_object() && config.contains(key) && config[key].is_boolean();
  const io::Json& classes = contents.stated({"architectures"});
  const auto wraps = [&](std::string_view name) {
    return classes.is_array() && !classes.empty() && classes[0] == name;
  };
  if (!top && std::ranges::any_of(tied_wrappers, wraps)) return false;
  const io::Json& tied = top ? config[key] : contents.stated({key});
  return tied.is_boolean() && !tied.get<bool>();
}

/// Outside of the layers, by its name or by having a row for each token, as embeddings have.
bool has_head(const StoredContents& contents) {
  const int64_t tokens = contents.number({"vocab_size"});
  int64_t tables = 0;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    if (model::layer_numbers(name).layer >= 0) continue;
    if (has_part(name, {"lm_head", "embed_out", "output.", "head."})) return true;
    tables += info.shape.size() == 2 && tokens > 0 && info.shape[0] == tokens;
  }
  return tables > 1;
}

/// MTP layers, towers and heads that config.json promises.
void promised_parts(const StoredContents& contents, ContentsFindings& findings) {
  const auto& tensors = contents.tensors().tensors();
  const int64_t layers = layers_of(contents);
  const auto any = [&](auto holds) {
    return std::ranges::any_of(tensors, [&](const auto& entry) { return holds(entry.first); });
  };
  const int64_t further = contents.number({"num_nextn_predict_layers", "mtp_num_hidden_layers"});
  const bool has_further = any([&](const std::string& name) {
    return has_part(name, {"mtp", "nextn"}) || (layers > 0 && model::layer_numbers(name).layer >= layers);
  });
  // mlx-lm leaves them out of every model that it writes.
  if (further > 0 && !has_further && !checkpoint::states_mlx(contents.quantization())) {
    findings.fault("config.json", concat("promises ", further, " layers for further tokens (MTP), and none is there"));
  }
  const io::Json &vision = contents.stated({"vision_config"}), &audio = contents.stated({"audio_config"});
  if (vision.is_object() && !any([](const auto& name) { return sees(name); })) {
    findings.fault("config.json", "has a vision_config, but no tensor of such a tower is there");
  }
  if (audio.is_object() && !any([](const auto& name) { return has_part(name, {"audio", "speech", "perception"}); })) {
    findings.fault("config.json", "has an audio_config, but no tensor of such a tower is there");
  }
  if (is_untied(contents) && !has_head(contents)) {
    findings.fault("lm_head.weight", "is missing, and config.json says that the embeddings are not the head");
  }
}

/// Layers behind the last one predict further tokens: where config.json speaks of none, they are another model's.
void layers_beyond(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t layers = layers_of(contents);
  const std::string config = nlohmann::json(contents.config()).dump();
  const bool further = has_part(config, {"nextn", "mtp", "eagle", "further"});
  // Where these have a name of their own they are not behind the last one.
  const bool elsewhere = std::ranges::any_of(contents.tensors().tensors(),
                                             [](const auto& tensor) { return tensor.first.starts_with("mtp."); });
  if (layers <= 0 || (further && !elsewhere)) return;
  std::set<int64_t> beyond, predicting;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    if (has_part(name, {"vis", "audio", "mtp", "image", "encoder", "adapter", "lora"})) continue;
    const size_t at = name.find("layers.");
    if (at == std::string::npos || (at > 0 && name[at - 1] != '.')) continue;
    const int64_t layer = model::layer_numbers(name).layer;
    if (layer < layers) continue;
    beyond.insert(layer);
    // What only such a layer has says what it is, whatever config.json leaves out.
    if (has_part(name, {"eh_proj", "enorm", "hnorm", "shared_head"})) predicting.insert(layer);
  }
  for (const int64_t layer : beyond) {
    if (predicting.contains(layer)) continue;
    findings.fault(concat("layer ", layer), concat("is there, but config.json says num_hidden_layers ", layers,
                                                   " and nothing of layers for further tokens"));
  }
}

/// Blocks of a tower are numbered without gaps, and as many as its config says.
void missing_tower_blocks(const StoredContents& contents, ContentsFindings& findings) {
  std::map<std::string, std::set<int64_t>> towers;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    if (!has_part(name, {"vis", "audio", "mtp"})) continue;
    for (const std::string_view part : {".layers.", ".blocks."}) {
      const size_t at = name.find(part);
      if (at != std::string::npos)
        towers[name.substr(0, at + part.size() - 1)].insert(std::atoll(name.c_str() + at + part.size()));
    }
  }
  const auto promised = [&](const std::string& tower) -> int64_t {
    if (tower.find("vis") == std::string::npos) return 0;
    const io::Json& config = contents.stated({"vision_config"});
    if (!config.is_object()) return 0;
    for (const char* key : {"depth", "num_hidden_layers"}) {
      if (config.contains(key) && config[key].is_number_integer()) return config[key].get<int64_t>();
    }
    return 0;
  };
  const bool numbered = std::ranges::any_of(contents.tensors().tensors(), [](const auto& tensor) {
    return sees(tensor.first) && model::layer_numbers(tensor.first).layer >= 0;
  });
  if (!numbered && promised("vision") > 0)
    findings.fault("the vision tower", concat("has none of its ", promised("vision"), " blocks: each is missing"));
  for (const auto& [tower, numbers] : towers) {
    const int64_t count = std::max(promised(tower), *numbers.rbegin() + 1);
    for (int64_t number = 0; number < std::min<int64_t>(count, 10000); ++number) {
      if (!numbers.contains(number))
        findings.fault(concat(tower, ".", number), concat("is missing: there should be ", count));
    }
  }
}

/// Whether anything in the files bears the name of an entry: a path, a part of one, or, of experts in one tensor, their
/// mixture.
bool is_used_as_written(const StoredContents& contents, const std::string& entry) {
  if (contents.find(entry) != nullptr) return true;
  const NameList list({entry}, contents.globs());
  const size_t experts = entry.find(".experts");
  const bool pattern = entry.starts_with("re:") || (contents.globs() && entry.find('*') != std::string::npos);
  const std::string mixture = experts == std::string::npos ? std::string() : entry.substr(0, experts + 9);
  return std::ranges::any_of(contents.tensors().tensors(), [&](const auto& tensor) {
    const auto& [name, info] = tensor;
    if (!pattern && name.find(entry) != std::string::npos) return true;
    if (!mixture.empty() && info.shape.size() >= 3 && name.starts_with(mixture)) return true;
    return pattern && !list.entry_for(std::string_view(name).substr(0, name.rfind('.'))).empty();
  });
}

/// An entry by what it may be called in files: lists of models that see have names as in memory, "model.vision_tower" and
/// "model.language_model.layers", which transformers 4 stores as "vision_tower" and "language_model.model.layers".
std::vector<std::string> stored_names(const std::string& entry) {
  constexpr std::string_view outer = "model.", inner = "model.language_model.", older = "language_model.model.";
  std::vector<std::string> names{entry};
  if (entry.starts_with(outer)) names.push_back(entry.substr(outer.size()));
  if (entry.starts_with(inner)) names.push_back(std::string(older) + entry.substr(inner.size()));
  if (entry.starts_with(older)) names.push_back(std::string(inner) + entry.substr(older.size()));
  return names;
}

bool is_used(const StoredContents& contents, const std::string& entry) {
  return std::ranges::any_of(stored_names(entry),
                             [&](const std::string& name) { return is_used_as_written(contents, name); });
}

void idle_entries(const StoredContents& contents, ContentsFindings& findings) {
  std::set<std::string, std::less<>> fused;  // as servers name what they load as one
  for (const auto& linear : contents.linears()) fused.insert(checkpoint::served_name(linear.path));
  for (const auto& entry : contents.ignored()) {
    // Programs name the head whether or not embeddings stand for it.
    const bool head = !NameList({entry}, contents.globs()).entry_for("lm_head").empty();
    if (head || fused.contains(entry) || is_used(contents, entry)) continue;
    findings.fault("config.json", concat("leaves out ", printable(entry), ", and nothing has that name"));
  }
}

void mixed_fused(const StoredContents& contents, ContentsFindings& findings) {
  for (const auto& row : checkpoint::fused_rows()) {
    for (const auto& linear : contents.linears()) {
      if (checkpoint::last_part(linear.path) != row.parts.front()) continue;
      for (const auto part : row.parts.subspan(1)) {
        const auto* other = contents.find(concat(checkpoint::parent(linear.path), ".", part));
        if (other == nullptr || other->kind == linear.kind || contents.is_carried(other->path)) continue;
        findings.fault(other->path, concat("is stored in another way than ", row.parts.front(),
                                           ", with which servers put it into one matrix"));
      }
    }
  }
}

/// Architectures whose table has rows for tokens that the head never says: those of pictures, or of the beginning.
bool has_longer_table(const StoredContents& contents) {
  const io::Json& type = contents.stated({"model_type"});
  const std::string name = type.is_string() ? type.get<std::string>() : std::string();
  return name.starts_with("mllama") || name == "moshi";
}

void vocabulary(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t stated = contents.number({"vocab_size"});
  for (const auto& linear : contents.linears()) {
    const bool table = model::is_embedding(linear.path) || model::is_head(linear.path);
    const bool main = model::layer_numbers(linear.path).layer < 0 && !has_part(linear.path, {"mtp", "vis", "audio"});
    if (!table || !main || linear.kind == Kind::integer || stated == 0 || linear.n == stated) continue;
    if (model::is_embedding(linear.path) && linear.n > stated && has_longer_table(contents)) continue;
    findings.fault(linear.path, concat("has ", linear.n, " rows, config.json says vocab_size ", stated,
                                       linear.n > stated ? ": a padded vocabulary" : ": a cut vocabulary"));
  }
}

/// Architectures that store the inputs of stacked experts first.
bool stores_inputs_first(const StoredContents& contents) {
  const io::Json& type = contents.stated({"model_type"});
  const std::string name = type.is_string() ? type.get<std::string>() : std::string();
  return name.starts_with("gpt_oss") || name.starts_with("llama4");
}
bool stores_outputs_first(const StoredContents& contents) {
  const io::Json& type = contents.stated({"model_type"});
  const std::string name = type.is_string() ? type.get<std::string>() : std::string();
  return name.starts_with("qwen3_5") || name.starts_with("gemma4") || name.starts_with("granitemoe");
}

/// Experts in one tensor: as many as config.json says come first, then outputs and inputs the one way or the other.
void stacks(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t experts = contents.number({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"});
  const int64_t hidden = contents.number({"hidden_size"});
  std::map<std::string, std::map<bool, std::string>> ways;  // of a mixture: inputs first → a stack that stands so
  for (const auto& linear : contents.linears()) {
    const std::string_view last = std::string_view(linear.path).substr(linear.path.rfind('.') + 1);
    const bool reads = last.starts_with("gate") || last.starts_with("up") || last.starts_with("input");
    const bool writes = last.starts_with("down") || last.starts_with("output");
    if (linear.experts == 0 || !is_meant(contents, linear) || (!reads && !writes) || experts == 0 || hidden == 0)
      continue;
    const Shape shape = {linear.experts, linear.n, linear.k};
    if (linear.path.find("shared") != std::string::npos) continue;
    if (linear.experts != experts) {
      findings.fault(linear.path, concat("has shape ", shape_text(shape), ": ", experts, " experts should come first"));
      continue;
    }
    if (linear.n != hidden && linear.k != hidden) {
      findings.fault(linear.path, concat("has shape ", shape_text(shape), ": neither size is hidden_size ", hidden));
      continue;
    }
    if ((linear.n == hidden) == (linear.k == hidden)) continue;
    const bool inputs_first = reads == (linear.n == hidden);
    // Always outputs first.
    const bool codes = linear.kind != Kind::plain || checkpoint::states_mlx(contents.quantization());
    if ((inputs_first && (codes || stores_outputs_first(contents))) ||
        (!inputs_first && !codes && stores_inputs_first(contents))) {
      findings.fault(linear.path, concat("is transposed: it has shape ", shape_text(shape), ", ",
                                         inputs_first ? "inputs" : "outputs", " first"));
    }
    ways[linear.path.substr(0, linear.path.rfind('.'))][inputs_first] = linear.path;
  }
  for (const auto& [mixture, stacks] : ways) {
    if (stacks.size() < 2) continue;
    findings.fault(stacks.at(true),
                   concat("has its inputs first, ", stacks.at(false), " its outputs: one is transposed"));
  }
}

}  // namespace

std::span<const ContentsRule> name_rules() {
  static constexpr ContentsRule rules[] = {
      {"linears are quantized, or left out by name", true, in_16_bit},
      {"codes have scales, and scales codes", true, without_scales},
      {"scales have the shape that their codes need", true, shapes_of_scales},
      {"config.json states what formats have", true, stated_sizes},
      {"experts are all there", false, missing_experts},
      {"layers are all there", false, missing_layers},
      {"MTP layers, towers and heads are there", false, promised_parts},
      {"no layer is beyond the last", false, layers_beyond},
      {"towers have all their blocks", false, missing_tower_blocks},
      {"lists of what stays in 16 bit name something", false, idle_entries},
      {"what servers fuse is stored in one way", true, mixed_fused},
      {"embeddings and head have as many rows as there are tokens", false, vocabulary},
      {"stacked experts stand as the architecture has them", false, stacks},
  };
  return rules;
}

}  // namespace w4q::verify
