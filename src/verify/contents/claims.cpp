// Rules on what config.json claims of numbers: zero points, methods, scales of the cache and of inputs.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "checkpoint/fused.h"
#include "checkpoint/low_precision.h"
#include "core/convert.h"
#include "core/text.h"
#include "model/parameters.h"
#include "verify/contents/contents.h"

namespace w4q::verify {
namespace {

// ---- the method ----

/// Programs find the reader of a quantization_config by its quant_method; without one they refuse, or take codes for
/// weights. Files of their own, and MLX's, have none.
void unnamed_method(const StoredContents& contents, ContentsFindings& findings) {
  const auto stated = contents.config().find("quantization_config");
  if (stated == contents.config().end() || !stated->is_object() || stated->contains("quant_method")) return;
  constexpr std::array of_methods = {"zero_point",        "desc_act",      "checkpoint_format", "weight_block_size",
                                     "activation_scheme", "config_groups", "packing_format"};
  const auto known = std::ranges::find_if(of_methods, [&](const char* key) { return stated->contains(key); });
  if (known == of_methods.end()) return;
  findings.fault("config.json", concat("has a quantization_config with ", *known,
                                       " but without quant_method: programs do not know how to read it"));
}

// ---- zero points ----

/// What a program's words of zero points say together.
struct ZeroWords {
  size_t tensors = 0;
  std::set<int32_t> values;  ///< a few of them are enough
  std::string name;          ///< of the first tensor with several
};

ZeroWords zero_words(const StoredContents& contents) {
  constexpr size_t enough = 4;
  ZeroWords found;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    if (!name.ends_with(".qzeros") || info.dtype != DType::i32) continue;
    ++found.tensors;
    if (found.values.size() >= enough) continue;
    const auto loaded = contents.tensors().load(name);
    const size_t before = found.values.size();
    for (size_t at = 0; at + sizeof(int32_t) <= loaded->bytes.size() && found.values.size() < enough;
         at += sizeof(int32_t)) {
      int32_t word = 0;
      std::memcpy(&word, loaded->bytes.data() + at, sizeof(word));
      found.values.insert(word);
    }
    if (found.name.empty() && found.values.size() > std::max<size_t>(1, before)) found.name = name;
  }
  return found;
}

/// The words of zero points that are all in the middle, of both versions of GPTQ; nothing: a word holds no whole number.
std::optional<std::array<int32_t, 2>> symmetric_words(int64_t bits) {
  switch (bits) {
    case 2:
      return {{0x55555555, static_cast<int32_t>(0xAAAAAAAA)}};
    case 4:
      return {{0x77777777, static_cast<int32_t>(0x88888888)}};
    case 8:
      return {{0x7F7F7F7F, static_cast<int32_t>(0x80808080)}};
    default:
      return std::nullopt;
  }
}

/// GPTQ's `sym`: who believes it leaves zero points out.
void symmetry_of_words(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t fewest = 6;
  const io::Json& quantization = contents.quantization();
  if (!quantization.is_object() || quantization.contains("dynamic")) return;
  const io::Json method = quantization.value("quant_method", io::Json()), sym = quantization.value("sym", io::Json()),
                 bits = quantization.value("bits", io::Json());
  if ((method != "gptq" && method != "auto-round") || !sym.is_boolean() || !bits.is_number_integer()) return;
  const auto symmetric = symmetric_words(bits.get<int64_t>());
  const ZeroWords found = zero_words(contents);
  if (!symmetric || found.tensors < fewest) return;
  const bool even =
      found.values.size() == 1 && std::ranges::find(*symmetric, *found.values.begin()) != symmetric->end();
  if (sym.get<bool>() && found.values.size() > 1) {
    findings.fault("config.json", concat("says \"sym\": true, but ", printable(found.name),
                                         " has zero points that differ: programs that believe it leave them out"));
  } else if (!sym.get<bool>() && even) {
    findings.notes.push_back(concat("config.json says \"sym\": false, but all zero points of ", found.tensors,
                                    " linears are in the middle, as those of symmetric weights are"));
  }
}

/// compressed-tensors stores zero points where weights are not symmetric, and nowhere else.
void symmetry_of_groups(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json& quantization = contents.quantization();
  if (!quantization.is_object()) return;
  const auto groups = quantization.find("config_groups");
  if (groups == quantization.end() || !groups->is_object() || groups->size() != 1) return;
  const io::Json weights = groups->begin()->is_object() ? groups->begin()->value("weights", io::Json()) : io::Json();
  if (!weights.is_object() || weights.value("type", io::Json()) != "int") return;
  const io::Json symmetric = weights.value("symmetric", io::Json());
  if (!symmetric.is_boolean()) return;
  const auto& tensors = contents.tensors().tensors();
  const auto zeros =
      std::ranges::find_if(tensors, [](const auto& tensor) { return tensor.first.ends_with(".weight_zero_point"); });
  const bool packed =
      std::ranges::any_of(contents.linears(), [](const auto& one) { return one.kind == StoredLinear::Kind::integer; });
  if (!symmetric.get<bool>() && zeros == tensors.end() && packed) {
    findings.fault("config.json", concat("says \"symmetric\": false in ", printable(groups->begin().key()),
                                         ", but no linear has a weight_zero_point"));
  } else if (symmetric.get<bool>() && zeros != tensors.end()) {
    findings.fault("config.json", concat("says \"symmetric\": true in ", printable(groups->begin().key()), ", but ",
                                         printable(zeros->first), " is there"));
  }
}

// ---- lists and groups ----

/// Lists of modules hold paths or patterns; what is empty, or no text, programs take for everything, or stop at.
void lists_of_modules(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json& quantization = contents.quantization();
  if (!quantization.is_object()) return;
  for (const char* key : {"ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"}) {
    const auto list = quantization.find(key);
    if (list == quantization.end() || list->is_null()) continue;
    if (!list->is_array()) {
      findings.fault("config.json", concat("has ", key, " that is no list: ", printable(list->dump())));
      continue;
    }
    for (const auto& entry : *list) {
      if (!entry.is_string() || entry.get<std::string>().empty()) {
        findings.fault("config.json", concat("has ", printable(entry.dump()), " in ", key, ", which names no module"));
        continue;
      }
      // Modules are left out, not their tensors.
      const auto name = entry.get<std::string>();
      const auto* linear = contents.find(name.substr(0, name.rfind('.')));
      if (linear != nullptr && linear->kind != StoredLinear::Kind::plain && contents.tensors().contains(name))
        findings.fault("config.json",
                       concat("leaves out ", printable(name), ", a tensor of a module that is quantized"));
    }
  }
}

/// Whether a target is a path or a pattern, not the name of a class.
bool is_path(const std::string& target) { return target.starts_with("re:") || target.find('.') != std::string::npos; }

/// What a group promises is there: targets that name nothing leave in 16 bit what was meant.
void targets_of_groups(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json& quantization = contents.quantization();
  if (!quantization.is_object()) return;
  const auto groups = quantization.find("config_groups");
  if (groups == quantization.end() || !groups->is_object()) return;
  for (const auto& [name, group] : groups->items()) {
    const auto targets = group.is_object() ? group.find("targets") : group.end();
    if (!group.is_object() || targets == group.end() || !targets->is_array() || targets->empty()) continue;
    std::vector<std::string> paths;
    for (const auto& target : *targets) {
      if (target.is_string()) paths.push_back(target.get<std::string>());
    }
    if (!std::ranges::all_of(paths, is_path)) continue;
    const NameList list(paths);
    const auto named = [&](const auto& linear) {
      return !list.entry_for(linear.path).empty() || !list.entry_for(checkpoint::served_name(linear.path)).empty();
    };
    if (std::ranges::any_of(contents.linears(), named)) continue;
    findings.fault("config.json", concat("has a group ", printable(name), " whose targets (",
                                         printable(join(paths, ", ")), ") name nothing that is there"));
  }
}

/// Scales of inputs that were measured stand beside every linear whose group says so.
void promised_inputs(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json& quantization = contents.quantization();
  if (!quantization.is_object()) return;
  const io::Json method = quantization.value("quant_method", io::Json());
  if (method != "compressed-tensors" && method != "modelopt") return;
  const io::Json groups = quantization.value("config_groups", io::Json());
  if (!groups.is_object() || groups.size() != 1 || !groups.begin()->is_object()) return;
  const io::Json inputs = groups.begin()->value("input_activations", io::Json());
  if (!inputs.is_object()) return;
  const io::Json dynamic = inputs.value("dynamic", io::Json());
  const bool local = dynamic == "local";
  if (!local && dynamic != false) return;
  const std::string_view suffix = local ? ".input_global_scale" : ".input_scale";
  size_t lacking = 0, all = 0;
  std::string first;
  for (const auto& linear : contents.linears()) {
    if (linear.kind == StoredLinear::Kind::plain || linear.experts > 0) continue;
    ++all;
    if (contents.tensors().contains(concat(linear.path, suffix))) continue;
    ++lacking;
    if (first.empty()) first = concat(linear.path, suffix);
  }
  // One alone is named by what the others have.
  if (lacking > 1)
    findings.fault("config.json", concat("promises measured scales of inputs, but ", lacking, " of ", all,
                                         " packed linears have none, the first is ", printable(first)));
}

// ---- the cache and inputs ----

/// compressed-tensors measures the scales of a cache that is not scaled as it is filled.
void promised_cache(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json& quantization = contents.quantization();
  if (!contents.has_method("compressed-tensors")) return;
  const io::Json scheme = quantization.value("kv_cache_scheme", io::Json());
  if (!scheme.is_object() || scheme.value("dynamic", io::Json()) != false) return;
  const bool there = std::ranges::any_of(contents.tensors().tensors(), [](const auto& tensor) {
    return tensor.first.ends_with("k_scale") || tensor.first.ends_with("v_scale");
  });
  if (!there) {
    findings.fault("config.json", "promises measured scales of the cache (kv_cache_scheme), and none is there");
  }
}

/// All that stand in attention beside its linears: of keys, values, both, queries, and what comes of them.
constexpr std::string_view of_cache[] = {".k_scale",
                                         ".v_scale",
                                         ".kv_scale",
                                         ".q_scale",
                                         ".prob_scale",
                                         ".k_proj.output_scale",
                                         ".v_proj.output_scale",
                                         ".qkv_proj.output_scale"};

/// A scale of the cache is the largest value that it holds over that of its type: of any model these lie far within. There is
/// one of a layer, of each head, or of each channel; and where a layer has one, all that have keys do.
void sound_cache(const StoredContents& contents, ContentsFindings& findings) {
  constexpr float least = 1e-8f, most = 1e4f;
  const auto& tensors = contents.tensors();
  const int64_t heads = contents.number({"num_key_value_heads"}),
                query_heads = contents.number({"num_attention_heads"});
  std::set<int64_t> with, keys;
  for (const auto& linear : contents.linears()) {
    if (linear.path.ends_with(".self_attn.k_proj") && linear.path.find("vis") == std::string::npos &&
        linear.path.find("mtp") == std::string::npos)
      keys.insert(model::layer_numbers(linear.path).layer);
  }
  for (const auto& [name, info] : tensors.tensors()) {
    const auto suffix = std::ranges::find_if(of_cache, [&](std::string_view end) { return name.ends_with(end); });
    if (suffix == std::end(of_cache) || name.find("vis") != std::string::npos) continue;
    if (suffix < of_cache + 3) with.insert(model::layer_numbers(name).layer);
    if (!is_weight_dtype(info.dtype)) {
      findings.fault(name, concat("has type ", dtype_name(info.dtype), ": a scale is a float"));
      continue;
    }
    const int64_t count = element_count(info.shape);
    if (count != 1 && heads > 0 && count % heads != 0 && (query_heads <= 0 || count % query_heads != 0))
      findings.fault(name, concat("has shape ", shape_text(info.shape), ", of ", heads, " heads of the cache"));
    std::vector<float> values(static_cast<size_t>(count));
    const auto loaded = tensors.load(name);
    widen(loaded->bytes, loaded->dtype, values);
    const bool said = suffix < of_cache + 2;  // another rule says what is not positive
    const auto bad = std::ranges::find_if(
        values, [&](float value) { return value > 0 && std::isfinite(value) ? value < least || value > most : !said; });
    if (bad != values.end())
      findings.fault(name,
                     concat("is ", *bad, ": a scale of the cache or of queries is between ", least, " and ", most));
  }
  constexpr size_t fewest = 2;
  if (with.size() < fewest || !std::ranges::includes(keys, with) || keys.size() == with.size()) return;
  for (const int64_t layer : keys) {
    if (!with.contains(layer))
      findings.fault(concat("layer ", layer), "has no scale of the cache (k_scale, v_scale), other layers have theirs");
  }
}

constexpr std::string_view of_inputs[] = {".input_scale", ".activation_scale", ".input_global_scale"};

/// Of linears that read the same, what was measured of it is nearly the same.
void inputs_of_fused(const StoredContents& contents, ContentsFindings& findings) {
  constexpr double far = 8;
  constexpr std::array<std::array<std::string_view, 3>, 3> together = {
      {{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj", ""}, {"w1", "w3", ""}}};
  const auto& tensors = contents.tensors();
  const auto value_of = [&](const std::string& name) {
    if (!tensors.contains(name)) return NAN;
    const auto loaded = tensors.load(name);
    if (!is_weight_dtype(loaded->dtype) || element_count(loaded->shape) != 1) return NAN;
    float value = NAN;
    widen(loaded->bytes, loaded->dtype, {&value, 1});
    return value;
  };
  for (const auto& linear : contents.linears()) {
    for (const auto& names : together) {
      if (!linear.path.ends_with(concat(".", names[0]))) continue;
      const std::string path = linear.path.substr(0, linear.path.size() - names[0].size());
      for (const std::string_view suffix : of_inputs) {
        const float own = value_of(concat(linear.path, suffix));
        for (const auto name : {names[1], names[2]}) {
          const std::string other = concat(path, name, suffix);
          const float value = name.empty() ? NAN : value_of(other);
          if (!(own > 0) || !(value > 0) || (value < far * own && own < far * value)) continue;
          findings.fault(other, concat("is ", value, ", ", linear.path, suffix, " ", own,
                                       ": the two read the same, one of them was not measured there"));
        }
      }
    }
  }
}

}  // namespace

std::span<const ContentsRule> claim_rules() {
  static constexpr ContentsRule rules[] = {
      {"quantization_config says how it is read", false, unnamed_method},
      {"sym agrees with the zero points", false, symmetry_of_words},
      {"symmetric agrees with the zero points", false, symmetry_of_groups},
      {"lists name modules", false, lists_of_modules},
      {"groups have what they name", false, targets_of_groups},
      {"inputs have the scales that are promised", false, promised_inputs},
      {"scales of the cache are there", false, promised_cache},
      {"scales of the cache are those of a cache", false, sound_cache},
      {"inputs that are shared have one size", false, inputs_of_fused},
  };
  return rules;
}

}  // namespace w4q::verify
