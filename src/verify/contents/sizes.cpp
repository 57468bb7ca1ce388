// Rules on what config.json says of sizes, for architectures that are not known: of others the rung of structure knows all.
#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "core/text.h"
#include "model/parameters.h"
#include "verify/contents/contents.h"
#include "verify/statistics/norms.h"

namespace w4q::verify {
namespace {

bool has_word(std::string_view name, std::initializer_list<std::string_view> words) {
  return std::ranges::any_of(words, [&](std::string_view word) { return name.find(word) != std::string_view::npos; });
}

bool is_of_text(std::string_view name) {
  return !has_word(name, {"vis", "vit.", "audio", "image", "mtp", "nextn", "encoder", "adapter", "lora", "draft"});
}

/// Rows and columns that linears of one role have, over all layers.
struct RoleSizes {
  std::set<int64_t> rows, cols;
  std::string first;
};

std::map<std::string, RoleSizes> sizes_by_role(const StoredContents& contents) {
  std::map<std::string, RoleSizes> roles;
  for (const auto& linear : contents.linears()) {
    const auto place = model::layer_numbers(linear.path);
    if (place.layer < 0 || !is_of_text(linear.path) || linear.n <= 0 || linear.experts > 0) continue;
    const std::string_view path = linear.path;
    const size_t dot = path.rfind('.'), before = dot == 0 ? 0 : path.rfind('.', dot - 1) + 1;
    const bool expert = path.find(".experts.") != std::string_view::npos;
    auto& role = roles[concat(expert ? "experts" : path.substr(before, dot - before), path.substr(dot))];
    if (role.first.empty()) role.first = linear.path;
    role.rows.insert(linear.n);
    if (linear.k > 0) role.cols.insert(linear.k);
  }
  return roles;
}

/// Where no layer has the size that is stated. Packed integers of other dialects have none here.
void hold(const std::map<std::string, RoleSizes>& roles, const std::string& role, int64_t rows, const std::string& says,
          ContentsFindings& findings) {
  const auto found = roles.find(role);
  if (found == roles.end() || found->second.rows.size() != 1 || rows <= 0 || found->second.rows.contains(rows)) return;
  findings.fault("config.json", concat("says ", says, ", but ", printable(found->second.first),
                                       ", and all like it, has ", *found->second.rows.begin(), " outputs"));
}

void stated_widths(const StoredContents& contents, ContentsFindings& findings) {
  if (contents.is_known()) return;
  const auto roles = sizes_by_role(contents);
  const int64_t hidden = contents.number({"hidden_size"}), heads = contents.number({"num_attention_heads"}),
                key_heads = contents.number({"num_key_value_heads"}), stated_head = contents.number({"head_dim"});
  for (const auto& linear : contents.linears()) {
    const bool table = linear.path.ends_with("embed_tokens") && model::layer_numbers(linear.path).layer < 0;
    if (!table || !is_of_text(linear.path) || linear.kind != StoredLinear::Kind::plain || hidden == 0) continue;
    // Tables may be narrower than the layers are.
    const bool read = std::ranges::any_of(roles, [&](const auto& role) { return role.second.cols.contains(hidden); });
    if (linear.k != hidden && !read)
      findings.fault("config.json", concat("says hidden_size ", hidden, ", but ", printable(linear.path), " has ",
                                           linear.k, " columns"));
  }
  const io::Json& inner = contents.stated({"intermediate_size"});
  if (inner.is_number_integer() && roles.contains("mlp.down_proj"))
    hold(roles, "mlp.up_proj", inner.get<int64_t>(), concat("intermediate_size ", inner.dump()), findings);
  const io::Json& of_expert = contents.stated({"moe_intermediate_size"});
  if (of_expert.is_number_integer())
    hold(roles, "experts.up_proj", of_expert.get<int64_t>(), concat("moe_intermediate_size ", of_expert.dump()),
         findings);
  const auto query = roles.find("self_attn.q_proj"), key = roles.find("self_attn.k_proj"),
             value = roles.find("self_attn.v_proj");
  if (query == roles.end() || key == roles.end() || value == roles.end() || heads <= 0) return;
  if (query->second.rows.size() != 1 || key->second.rows != value->second.rows) return;
  const int64_t queries = *query->second.rows.begin();
  const int64_t head = stated_head > 0 ? stated_head : hidden % heads == 0 && queries == hidden ? hidden / heads : 0;
  if (head == 0) return;
  // With gates of the output queries have as many rows again.
  if (stated_head > 0 && queries != 2 * heads * head)
    hold(roles, "self_attn.q_proj", heads * head, concat(heads, " heads of ", head), findings);
  hold(roles, "self_attn.k_proj", key_heads * head, concat(key_heads, " heads of keys of ", head), findings);
}

/// As much as the rung of structure allows.
void stated_eps(const StoredContents& contents, ContentsFindings& findings) {
  constexpr double most = 2e-3;
  const io::Json& eps = contents.stated({"rms_norm_eps", "layer_norm_eps", "norm_eps"});
  if (contents.is_known() || !eps.is_number() || eps.get<double>() <= most) return;
  findings.fault("config.json", concat("has an eps of norms of ", eps.dump(), ", more than any trained model"));
}

/// Layers that config.json says are dense have no experts. (Keys of Qwen's and of DeepSeek's.)
void dense_layers(const StoredContents& contents, ContentsFindings& findings) {
  if (contents.is_known()) return;
  std::set<int64_t> dense;
  const io::Json& listed = contents.stated({"mlp_only_layers"});
  if (listed.is_array()) {
    for (const auto& layer : listed) {
      if (layer.is_number_integer()) dense.insert(layer.get<int64_t>());
    }
  }
  const int64_t layers = std::min<int64_t>(contents.number({"num_hidden_layers"}), 10000);
  const int64_t step = contents.number({"decoder_sparse_step"}), first = contents.number({"first_k_dense_replace"});
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (layer < first || (step > 1 && (layer + 1) % step != 0)) dense.insert(layer);
  }
  std::set<int64_t> said;
  for (const auto& linear : contents.linears()) {
    const int64_t layer = model::layer_numbers(linear.path).layer;
    const bool experts = linear.path.find(".experts.") != std::string::npos && is_of_text(linear.path);
    if (!experts || !dense.contains(layer) || !said.insert(layer).second) continue;
    findings.fault(linear.path, concat("is there, but config.json says that layer ", layer, " has no experts"));
  }
}

/// Of stacks as well: their inner size is the one that is neither hidden nor the number of experts.
void stated_inner(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t inner = contents.number({"moe_intermediate_size"}), hidden = contents.number({"hidden_size"});
  if (contents.is_known() || inner <= 0 || hidden <= 0) return;
  for (const auto& linear : contents.linears()) {
    if (linear.experts == 0 || !linear.path.ends_with("experts.down_proj") || !is_of_text(linear.path)) continue;
    const int64_t other = linear.n == hidden ? linear.k : linear.k == hidden ? linear.n : 0;
    if (other == 0 || other == inner) continue;
    findings.fault("config.json", concat("says moe_intermediate_size ", inner, ", but ", printable(linear.path),
                                         " has ", other, " inputs"));
    return;
  }
}

void stated_experts(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t stated = contents.number({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"});
  const int64_t chosen = contents.number({"num_experts_per_tok", "moe_k", "top_k_experts"});
  if (stated <= 0) return;
  const io::Json& choice = contents.stated({"num_experts_per_tok", "moe_k", "top_k_experts"});
  if (choice.is_number_integer() && chosen <= 0)
    findings.fault("config.json", concat("chooses ", chosen, " of ", stated, " experts for each token"));
  if (chosen > stated)
    findings.fault("config.json", concat("chooses ", chosen, " of ", stated, " experts for each token"));
  for (const auto& linear : contents.linears()) {
    const size_t at = linear.path.find(".experts.");
    if (at == std::string::npos || !is_of_text(linear.path)) continue;
    const int64_t number = model::layer_numbers(linear.path).expert;
    if (number < stated) continue;
    findings.fault(linear.path, concat("is there, but config.json says that there are ", stated, " experts"));
    return;
  }
}

/// A language model has embeddings or, of drafts that read another model's, a head; and what its layers end with is normed
/// where they have norms.
void ends_of_model(const StoredContents& contents, ContentsFindings& findings) {
  if (contents.is_known() || contents.number({"num_hidden_layers"}) < 2) return;
  bool table = false, layers = false, normed = false, ended = false;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    if (!is_of_text(name)) continue;
    const bool in_layer = model::layer_numbers(name).layer >= 0;
    const bool norm = info.shape.size() == 1 && has_word(name, {"norm", "ln"}) && !name.ends_with(".bias");
    layers = layers || in_layer;
    table = table || (!in_layer && has_word(name, {"embed", "wte", "head", "output", "word"}));
    normed = normed || (in_layer && norm);
    ended = ended || (!in_layer && norm);
  }
  if (layers && !table) findings.fault("the embeddings", "are missing, and so is a head");
  if (normed && !ended) findings.fault("the norm behind the last layer", "is missing, though layers have norms");
}

/// A head that is stored although config.json says that the embeddings are the head must be these. What a text_config says
/// of it by itself some classes heed and some do not.
void tied_head(const StoredContents& contents, ContentsFindings& findings) {
  constexpr const char* key = "tie_word_embeddings";
  const io::Json& config = contents.config();
  const bool tied = config.is_object() && config.contains(key) && config[key].is_boolean() && config[key].get<bool>();
  const auto text = config.find("text_config");
  if (text != config.end() && text->is_object() && text->contains(key) && (*text)[key] == false) return;
  const auto& tensors = contents.tensors();
  if (!tied) return;
  std::vector<std::string> heads, tables;
  for (const auto& linear : contents.linears()) {
    if (model::layer_numbers(linear.path).layer >= 0 || linear.kind != StoredLinear::Kind::plain) continue;
    if (model::is_head(linear.path)) heads.push_back(linear.codes);
    if (linear.path.ends_with("embed_tokens") && is_of_text(linear.path)) tables.push_back(linear.codes);
  }
  if (heads.size() != 1 || tables.size() != 1) return;
  const auto &head = tensors.at(heads.front()), &table = tensors.at(tables.front());
  if (head.dtype != table.dtype || head.shape != table.shape) return;
  if (!std::ranges::equal(tensors.load(head.name)->bytes, tensors.load(table.name)->bytes))
    findings.fault(head.name, "differs from the embeddings, which config.json says are the head");
}

/// Biases are those of all linears of a role or of none.
void lone_biases(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t fewest_layers = 6;
  std::map<std::string, std::vector<const StoredLinear*>> roles;
  for (const auto& linear : contents.linears()) {
    const auto place = model::layer_numbers(linear.path);
    if (place.layer >= 0 && is_of_text(linear.path) && linear.path.ends_with("_proj"))
      roles[role_of(linear.path)].push_back(&linear);
  }
  for (const auto& [role, linears] : roles) {
    if (linears.size() < fewest_layers) continue;
    std::vector<std::string> biases;
    for (const auto* linear : linears) {
      if (contents.tensors().contains(linear->path + ".bias")) biases.push_back(linear->path + ".bias");
    }
    if (biases.size() == 1) findings.fault(biases.front(), "is there, and no other layer has one");
  }
}

}  // namespace

std::span<const ContentsRule> size_rules() {
  static constexpr ContentsRule rules[] = {
      {"sizes are those that config.json states", false, stated_widths},
      {"eps of norms is small", false, stated_eps},
      {"experts are those that config.json states", false, stated_experts},
      {"layers without experts have none", false, dense_layers},
      {"stacks have the inner size that config.json states", false, stated_inner},
      {"embeddings and the last norm are there", false, ends_of_model},
      {"a head that is tied is the embeddings", false, tied_head},
      {"biases are in all layers or in none", false, lone_biases},
  };
  return rules;
}

}  // namespace w4q::verify
