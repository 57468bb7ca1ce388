// Rules on the tensors of one module, and on how modules are named: a bias without its weight, a norm of another type, a
// matrix beside the text model that is turned, and what wrappers of training leave in names.
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/text.h"
#include "model/parameters.h"
#include "verify/contents/contents.h"
#include "verify/statistics/norms.h"

namespace w4q::verify {
namespace {

constexpr std::string_view bias_end = ".bias";

/// Whether anything but its bias stands below a module.
bool has_more(const io::Checkpoint& tensors, const std::string& module) {
  const std::string begin = module + ".";
  auto at = tensors.tensors().lower_bound(begin);
  for (; at != tensors.tensors().end() && at->first.starts_with(begin); ++at) {
    if (std::string_view(at->first).substr(module.size()) != bias_end) return true;
  }
  return false;
}

bool is_bias(const io::TensorInfo& info) {
  return info.name.ends_with(bias_end) && info.shape.size() == 1 && info.shape[0] > 1 && is_weight_dtype(info.dtype);
}

/// A bias adds to what a weight or a norm computes: where others of its role have one, it was lost.
void biases_have_weights(const StoredContents& contents, ContentsFindings& findings) {
  std::map<std::string, std::pair<int64_t, std::vector<std::string>>>
      roles;  // those that are whole, those that are not
  for (const auto& [name, info] : contents.tensors().tensors()) {
    if (!is_bias(info)) continue;
    const std::string module = name.substr(0, name.size() - bias_end.size());
    auto& [whole, alone] = roles[role_of(name)];
    if (has_more(contents.tensors(), module)) {
      ++whole;
    } else {
      alone.push_back(module);
    }
  }
  for (const auto& [role, found] : roles) {
    const auto& [whole, alone] = found;
    if (whole <= std::ssize(alone)) continue;  // buffers that are called so
    for (const auto& module : alone)
      findings.fault(module + ".weight", "is missing: its bias is there, and others of its role have both");
  }
}

/// As many values as a matrix has outputs; of those that are stored inputs first, as its columns.
void biases_fit(const StoredContents& contents, ContentsFindings& findings) {
  for (const auto& linear : contents.linears()) {
    const std::string bias = linear.path + std::string(bias_end);
    if (linear.kind != StoredLinear::Kind::plain || linear.experts > 0 || linear.n <= 0 || linear.k <= 0) continue;
    if (model::is_head(linear.path) || !contents.tensors().contains(bias)) continue;
    const io::TensorInfo& info = contents.tensors().at(bias);
    if (!is_bias(info) || info.shape[0] == linear.n || info.shape[0] == linear.k) continue;
    findings.fault(bias,
                   concat("has ", info.shape[0], " values, its weight has shape [", linear.n, ", ", linear.k, "]"));
  }
}

/// Programs read norms in 16 or 32 bit.
void types_of_norms(const StoredContents& contents, ContentsFindings& findings) {
  constexpr std::array small{DType::f8_e4m3, DType::f8_e5m2, DType::i8, DType::u8};
  for (const auto& [name, info] : contents.tensors().tensors()) {
    if (contents.is_known() || !name.ends_with("norm.weight") || info.shape.size() != 1) continue;
    if (std::ranges::find(small, info.dtype) != small.end())
      findings.fault(name, concat("has type ", dtype_name(info.dtype), ": norms are stored in 16 or 32 bit"));
  }
}

/// Programs write the scales of all matrices of a kind in one type: one in another was rounded, or its bytes are read as
/// something else.
void types_of_scales(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t fewest = 6;  // others
  using Alike = std::tuple<StoredLinear::Kind, size_t, std::string>;
  std::map<Alike, std::map<DType, std::vector<const StoredLinear*>>> alike;
  for (const auto& linear : contents.linears()) {
    if (linear.scales.empty() || model::layer_numbers(linear.path).layer < 0) continue;
    const io::TensorInfo& info = contents.tensors().at(linear.scales);
    std::string name = linear.scales.substr(linear.scales.rfind('.') + 1);
    alike[{linear.kind, info.shape.size(), std::move(name)}][info.dtype].push_back(&linear);
  }
  for (const auto& [what, types] : alike) {
    if (types.size() != 2) continue;
    for (const auto& [type, lone] : types) {
      const auto& [usual, others] = type == types.begin()->first ? *types.rbegin() : *types.begin();
      if (lone.size() != 1 || others.size() < fewest) continue;
      findings.fault(lone.front()->scales, concat("has type ", dtype_name(type), ", the scales of all other ",
                                                  others.size(), " matrices like it ", dtype_name(usual)));
    }
  }
}

// ---- names ----

/// Parts of names that wrappers leave, which programs that load a model do not look for.
constexpr std::string_view wrappers[] = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"};

std::string first_wrapper(std::string_view name) {
  for (const std::string_view wrapper : wrappers) {
    const bool first = name.starts_with(concat(wrapper, "."));
    // A module may be called so within a model of its own.
    const bool inside = wrapper.front() == '_' && name.find(concat(".", wrapper, ".")) != std::string_view::npos;
    if (first || inside) return std::string(wrapper);
  }
  return {};
}

void names_of_wrappers(const StoredContents& contents, ContentsFindings& findings) {
  if (contents.is_known()) return;
  size_t doubled = 0, once = 0, all = 0;
  std::string beside;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const std::string wrapper = first_wrapper(name);
    if (!wrapper.empty()) {
      return findings.fault(name,
                            concat("has \"", wrapper, ".\" in its name, as programs that train leave it: those that ",
                                   "load look for the name without it"));
    }
    if (name.starts_with("optimizer.") || name.ends_with(".exp_avg") || name.ends_with(".exp_avg_sq"))
      return findings.fault(name, "is a state of an optimizer, as programs that train leave it");
    const bool twice = name.starts_with("model.model.");
    ++all, doubled += twice, once += !twice && name.starts_with("model.");
    if (name == "lm_head.weight" || name.starts_with("mtp.")) beside = name;
  }
  // A class of its own would have all in its model.
  if (2 * doubled > all && once == 0 && !beside.empty()) {
    return findings.fault("\"model.model.\"",
                          concat("begins the names of ", doubled, " tensors, but ", printable(beside),
                                 " stands beside them: \"model.\" was put before names twice"));
  }
  // A class of its own may have been saved so.
  if (2 * doubled > all)
    findings.notes.push_back("names begin with \"model.model.\": programs that look for \"model.\" find nothing");
}

// ---- layers for further tokens ----

/// "mtp.layers.0.mlp.up_proj" → "mlp.up_proj"; empty: it is in no layer.
std::string part_of_layer(const std::string& path) {
  constexpr std::string_view layers = "layers.";
  const size_t at = path.rfind(layers);
  const size_t end = at == std::string::npos ? at : path.find('.', at + layers.size());
  return end == std::string::npos ? std::string() : path.substr(end + 1);
}

bool is_of_further_layers(std::string_view path) {
  return path.find("mtp") != std::string_view::npos || path.find("nextn") != std::string_view::npos;
}

/// They are built of the parts that layers of the text are built of, and of one that joins a state and an embedding.
void further_layers_stand_right(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t hidden = contents.number({"hidden_size"}), layers = contents.number({"num_hidden_layers"});
  if (hidden <= 0) return;
  std::map<std::string, std::set<std::pair<int64_t, int64_t>>> of_text;
  const auto is_further = [&](const StoredLinear& linear) {
    const int64_t layer = model::layer_numbers(linear.path).layer;
    return is_of_further_layers(linear.path) || (layers > 0 && layer >= layers);
  };
  const auto is_asked = [](const StoredLinear& linear) {
    return linear.kind != StoredLinear::Kind::integer && linear.experts == 0 && linear.n > 0 && linear.k > 0;
  };
  for (const auto& linear : contents.linears()) {
    const std::string part = part_of_layer(linear.path);
    const bool tower = linear.path.find("vis") != std::string::npos || linear.path.find("audio") != std::string::npos;
    if (!part.empty() && !tower && is_asked(linear) && !is_further(linear)) of_text[part].emplace(linear.n, linear.k);
  }
  for (const auto& linear : contents.linears()) {
    if (!is_asked(linear) || !is_further(linear)) continue;
    const bool joins = linear.path.ends_with("eh_proj") || linear.path.ends_with("mtp.fc");
    const auto usual = of_text.find(part_of_layer(linear.path));
    const bool one = usual != of_text.end() && usual->second.size() == 1 && linear.n != linear.k;
    const bool turned = (joins && linear.n == 2 * hidden && linear.k == hidden) ||
                        (one && *usual->second.begin() == std::pair(linear.k, linear.n));
    if (!turned) continue;
    findings.fault(linear.path, concat("is transposed: it has shape [", linear.n, ", ", linear.k, "], [", linear.k,
                                       ", ", linear.n, "] expected"));
  }
}

}  // namespace

std::span<const ContentsRule> module_rules() {
  static constexpr ContentsRule rules[] = {
      {"biases have their weights", false, biases_have_weights},
      {"biases are as long as their weights", false, biases_fit},
      {"norms are in 16 or 32 bit", false, types_of_norms},
      {"scales of a kind have one type", false, types_of_scales},
      {"names are the model's", false, names_of_wrappers},
      {"layers for further tokens stand as those of the text", false, further_layers_stand_right},
  };
  return rules;
}

}  // namespace w4q::verify
