// Rules beside other layers and other experts, by shapes alone or by what is all zero: a router that is no router of its
// mixture, a matrix of another shape than everywhere else, parts beside the text model that hold nothing or lead nowhere.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/text.h"
#include "model/parameters.h"
#include "verify/contents/contents.h"
#include "verify/names.h"
#include "verify/statistics/norms.h"

namespace w4q::verify {
namespace {

using Kind = StoredLinear::Kind;

bool is_of_tower(std::string_view name) { return has_part(name, {"vis", "audio", "image", "speech"}); }
bool is_of_further(std::string_view name) { return has_part(name, {"mtp", "nextn", "eh_proj"}); }
bool is_beside_text(std::string_view name) {
  return is_of_tower(name) || is_of_further(name) || has_part(name, {"encoder", "adapter", "lora", "draft"});
}

int64_t stated_experts(const StoredContents& contents) {
  return contents.number({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"});
}

bool is_router(std::string_view path) {
  return path.ends_with(".mlp.gate") || path.ends_with(".block_sparse_moe.gate") || path.ends_with(".router") ||
         path.ends_with(".router.proj") || path.ends_with(".moe.gate");
}

// ---- routers ----

/// Experts that compute nothing, beside the others, have rows as well: config.json counts them under a key of its own.
bool is_stated_beside(const io::Json& config, int64_t more) {
  if (!config.is_object()) return false;
  return std::ranges::any_of(config.items(), [&](const auto& entry) {
    if (entry.value().is_object()) return is_stated_beside(entry.value(), more);
    return entry.key().find("expert") != std::string::npos && entry.value().is_number_integer() &&
           entry.value() == more;
  });
}

/// The first row that differs from the row before; 0: all are the same.
int64_t first_other_row(const StoredContents& contents, const StoredLinear& router) {
  const auto loaded = contents.tensors().load(router.codes);
  const size_t width = loaded->bytes.size() / static_cast<size_t>(router.n);
  for (int64_t row = 1; row < router.n; ++row) {
    const std::byte* const at = loaded->bytes.data() + static_cast<size_t>(row) * width;
    if (std::memcmp(at, at - width, width) != 0) return row;
  }
  return 0;
}

/// Whether the second half of the experts is the first one again, byte for byte, in one part at least; false, too, where
/// they are stored otherwise.
bool experts_repeat(const StoredContents& contents, const StoredLinear& router) {
  const std::string mixture = router.path.substr(0, router.path.rfind('.'));
  for (const std::string_view part : {"up_proj", "w3", "gate_proj", "w1"}) {
    const auto expert = [&](int64_t at) { return contents.find(concat(mixture, ".experts.", at, ".", part)); };
    const auto *one = expert(0), *other = expert(router.n / 2);
    if (one == nullptr || other == nullptr || one->codes.empty() || other->codes.empty()) continue;
    return std::ranges::equal(contents.tensors().load(one->codes)->bytes, contents.tensors().load(other->codes)->bytes);
  }
  return true;  // of stacks nothing is known
}

/// Whether a router's rows are those of the first half of its experts, twice, as of one of two ranks.
bool halves_of_router_repeat(const StoredContents& contents, const StoredLinear& router) {
  constexpr int64_t fewest = 4;
  if (router.n < fewest || router.n % 2 != 0) return false;
  const auto loaded = contents.tensors().load(router.codes);
  const auto bytes = loaded->bytes;
  const size_t half = bytes.size() / 2, width = bytes.size() / static_cast<size_t>(router.n);
  if (!std::ranges::equal(bytes.first(half), bytes.last(half))) return false;
  return !std::ranges::equal(bytes.first(width), bytes.subspan(width, width));
}

void routers(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t experts = stated_experts(contents), hidden = contents.number({"hidden_size"});
  std::map<Kind, int64_t> stored;
  for (const auto& linear : contents.linears()) {
    if (is_router(linear.path) && !is_beside_text(linear.path)) ++stored[linear.kind];
  }
  for (const auto& router : contents.linears()) {
    if (!is_router(router.path) || is_beside_text(router.path) || experts <= 1 || router.experts > 0) continue;
    if (router.kind != Kind::plain) {
      if (stored[Kind::plain] > 0)
        findings.fault(router.path, "is quantized, other routers are in 16 bit, as servers read them");
      continue;
    }
    if (!contents.is_known() && hidden > 0 && router.k != hidden && router.n == hidden && router.k == experts) {
      findings.fault(router.path, concat("is transposed: it has shape [", router.n, ", ", router.k, "]"));
    } else if (!contents.is_known() && router.n != experts &&
               !is_stated_beside(contents.config(), router.n - experts)) {
      findings.fault(router.path,
                     concat("has ", router.n, " rows, config.json says that there are ", experts, " experts"));
    } else if (router.n > 1 && first_other_row(contents, router) == 0) {
      findings.fault(router.path, "has the same row for every expert");
    } else if (halves_of_router_repeat(contents, router) && !experts_repeat(contents, router)) {
      findings.fault(
          router.path,
          "has the rows of the first half of its experts twice, but the experts of the second half are others");
    }
  }
}

// ---- shapes ----

/// Shapes of one role: who has each.
using Shapes = std::map<Shape, std::vector<std::string>>;

/// The one of a role whose shape no other has; empty: there is none, or there are several.
std::string lone(const Shapes& shapes, size_t fewest) {
  if (shapes.size() != 2) return {};
  const auto &one = shapes.begin()->second, &other = std::next(shapes.begin())->second;
  const auto& few = one.size() < other.size() ? one : other;
  return few.size() == 1 && one.size() + other.size() > fewest ? few.front() : std::string();
}

/// A tensor of 16 bit whose shape differs from that of all other layers, where nothing else in its layer does: sizes
/// belong to two tensors at least.
void lone_shapes(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t fewest_layers = 5;
  if (contents.is_known()) return;
  std::map<std::string, Shapes> roles;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const model::LayerNumbers place = model::layer_numbers(name);
    if (place.layer < 0 || place.expert >= 0 || is_beside_text(name) || !is_weight_dtype(info.dtype)) continue;
    if (name.ends_with(".weight") || name.ends_with(".bias")) roles[role_of(name)][info.shape].push_back(name);
  }
  std::map<int64_t, std::vector<std::string>> lone_in, other_in;  // by layer
  for (const auto& [role, shapes] : roles) {
    const auto usual = std::ranges::max_element(shapes, {}, [](const auto& entry) { return entry.second.size(); });
    const std::string found = lone(shapes, fewest_layers);
    for (const auto& [shape, names] : shapes) {
      if (shape == usual->first) continue;
      for (const auto& name : names)
        (found == name ? lone_in : other_in)[model::layer_numbers(name).layer].push_back(name);
    }
  }
  for (const auto& [layer, names] : lone_in) {
    if (names.size() != 1 || other_in.contains(layer) || is_router(model::module_path(names.front()))) continue;
    const Shape& shape = contents.tensors().at(names.front()).shape;
    findings.fault(names.front(), concat("has shape ", shape_text(shape), ", as in no other layer"));
  }
}

/// Experts of one mixture have one shape, or, where there are two kinds of them, two.
void lone_experts(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t fewest_experts = 6;
  if (contents.is_known()) return;
  std::map<std::string, Shapes> roles;
  for (const auto& linear : contents.linears()) {
    const size_t at = linear.path.find(".experts.");
    if (at == std::string::npos || linear.experts > 0 || linear.n <= 0 || linear.k <= 0) continue;
    if (linear.kind == Kind::integer) continue;  // of two widths they have two shapes
    const size_t end = linear.path.find('.', at + 9);
    if (end == std::string::npos) continue;
    roles[concat(linear.path.substr(0, at), linear.path.substr(end))][{linear.n, linear.k}].push_back(linear.path);
  }
  for (const auto& [role, shapes] : roles) {
    const std::string found = lone(shapes, fewest_experts);
    if (found.empty()) continue;
    const auto* linear = contents.find(found);
    findings.fault(found, concat("has shape [", linear->n, ", ", linear->k, "], as no other expert of its mixture"));
  }
}

// ---- what is there and holds nothing ----

bool is_all_zero(std::span<const std::byte> bytes) {
  return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}
bool is_all_zero(const StoredContents& contents, const std::string& name) {
  return is_all_zero(contents.tensors().load(name)->bytes);
}

/// Matrices that add to a residual stream are zero in blocks that were put between others.
bool adds_to_stream(std::string_view path) {
  return has_part(path, {"o_proj", "out_proj", "down_proj", "fc2", ".proj", "wo", "w2", "dense"});
}

/// A matrix of a tower, of layers for further tokens, or of a projector, that nobody wrote.
void zeros_beside_text(const StoredContents& contents, ContentsFindings& findings) {
  for (const auto& linear : contents.linears()) {
    const bool beside = is_of_tower(linear.path) || is_of_further(linear.path);
    if (!beside || linear.codes.empty() || linear.n <= 1 || linear.k <= 1 || adds_to_stream(linear.path)) continue;
    if (has_part(linear.path, {"pos", "lora", "adapter"}) || !is_all_zero(contents, linear.codes)) continue;
    findings.fault(linear.path, "holds nothing but zeros: it was made, and never written");
  }
}

/// In a stack, experts of zeros, where most are none; and the same one twice. A mixture whose experts were all copied from
/// one matrix has the same ones by half and more.
void experts_of_stacks(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t fewest = 256;
  for (const auto& linear : contents.linears()) {
    if (linear.experts < 2 || linear.codes.empty() || is_beside_text(linear.path)) continue;
    const auto loaded = contents.tensors().load(linear.codes);
    const size_t plane = loaded->bytes.size() / static_cast<size_t>(linear.experts);
    if (plane < fewest || plane * static_cast<size_t>(linear.experts) != loaded->bytes.size()) continue;
    std::vector<int64_t> zeros;
    std::vector<std::pair<int64_t, int64_t>> twins;
    std::map<std::string, int64_t> seen;  // by the first bytes
    for (int64_t expert = 0; expert < linear.experts; ++expert) {
      const auto bytes = loaded->bytes.subspan(static_cast<size_t>(expert) * plane, plane);
      if (is_all_zero(bytes)) {
        zeros.push_back(expert);
        continue;
      }
      const std::string first(reinterpret_cast<const char*>(bytes.data()), std::min(plane, size_t{4096}));
      const auto [found, added] = seen.try_emplace(first, expert);
      if (added) continue;
      const auto other = loaded->bytes.subspan(static_cast<size_t>(found->second) * plane, plane);
      if (std::memcmp(bytes.data(), other.data(), plane) == 0) twins.emplace_back(expert, found->second);
    }
    if (2 * std::ssize(zeros) < linear.experts) {
      for (const int64_t expert : zeros) findings.fault(concat(linear.path, "[", expert, "]"), "is an expert of zeros");
    }
    if (2 * std::ssize(twins) >= linear.experts) continue;
    for (const auto& [expert, other] : twins)
      findings.fault(concat(linear.path, "[", expert, "]"), concat("holds the codes of expert ", other));
  }
}

// ---- blocks of towers ----

/// "visual.blocks.3.attn.qkv.weight" → "visual.blocks.", 3 and ".attn.qkv.weight"; of a nested number the first.
struct TowerPlace {
  std::string tower, rest;
  int64_t block = -1;
};
TowerPlace tower_place(const std::string& name) {
  for (const std::string_view part : {".layers.", ".blocks.", ".layer.", ".resblocks."}) {
    const size_t at = name.find(part);
    if (at == std::string::npos) continue;
    const size_t begin = at + part.size(), end = name.find('.', begin);
    const std::string digits = name.substr(begin, end == std::string::npos ? end : end - begin);
    if (end == std::string::npos || digits.empty() || digits.size() > 5 ||
        digits.find_first_not_of("0123456789") != std::string::npos)
      continue;
    return {name.substr(0, begin), name.substr(end), std::atoll(digits.c_str())};
  }
  return {};
}

/// Blocks of a tower are alike. What one between the first and the last lacks, or has in another shape, where it is as all
/// others otherwise, was lost or cut.
void tower_blocks(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t fewest_blocks = 6;
  std::map<std::string, std::map<std::string, std::map<int64_t, Shape>>> towers;  // → rest → block → shape
  for (const auto& [name, info] : contents.tensors().tensors()) {
    if (!is_of_tower(name)) continue;
    TowerPlace place = tower_place(name);
    if (place.block >= 0) towers[place.tower][place.rest][place.block] = info.shape;
  }
  for (const auto& [tower, rests] : towers) {
    std::set<int64_t> blocks;
    for (const auto& [rest, held] : rests) {
      for (const auto& [block, shape] : held) blocks.insert(block);
    }
    if (blocks.size() < fewest_blocks) continue;
    std::map<int64_t, std::vector<std::pair<std::string, std::string>>> odd;  // by block: what of it, and how
    for (const auto& [rest, held] : rests) {
      Shapes shapes;
      for (const auto& [block, shape] : held) shapes[shape].push_back(std::to_string(block));
      const std::string found = lone(shapes, fewest_blocks - 1);
      if (!found.empty() && held.size() == blocks.size()) {
        const Shape& shape = held.at(std::atoll(found.c_str()));
        odd[std::atoll(found.c_str())].emplace_back(rest,
                                                    concat("has shape ", shape_text(shape), ", as in no other block"));
      }
      for (const int64_t block : blocks) {
        if (held.size() + 1 == blocks.size() && !held.contains(block))
          odd[block].emplace_back(rest, "is missing: all other blocks have it");
      }
    }
    for (const auto& [block, faults] : odd) {
      // A weight and its bias.
      if (block == *blocks.begin() || block == *blocks.rbegin() || faults.size() > 2) continue;
      for (const auto& [rest, what] : faults) findings.fault(concat(tower, block, rest), what);
    }
  }
}

// ---- types ----

/// Linears of one kind hold codes, and scales, of one type each: programs read all by one.
void lone_types(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t fewest = 8;
  std::map<DType, std::vector<std::string>> scales, codes;
  for (const auto& linear : contents.linears()) {
    const bool fours = linear.kind == Kind::mxfp4 || linear.kind == Kind::nvfp4;
    if (fours && !linear.scales.empty()) scales[contents.tensors().at(linear.scales).dtype].push_back(linear.scales);
    if (linear.kind == Kind::fp8) codes[DType::f8_e4m3].push_back(linear.codes);
  }
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const bool scaled =
        contents.tensors().contains(name + "_scale_inv") || contents.tensors().contains(name + "_scale");
    if (name.ends_with(".weight") && scaled && (info.dtype == DType::i8 || info.dtype == DType::u8) &&
        info.shape.size() == 2)
      codes[info.dtype].push_back(name);
  }
  for (const auto& types : {scales, codes}) {
    if (types.size() != 2) continue;
    const auto &one = *types.begin(), &other = *std::next(types.begin());
    const auto& [type, few] = one.second.size() < other.second.size() ? one : other;
    const auto& [usual, many] = one.second.size() < other.second.size() ? other : one;
    if (few.size() != 1 || many.size() < fewest) continue;
    findings.fault(few.front(), concat("has type ", dtype_name(type), ", all others like it ", dtype_name(usual)));
  }
}

// ---- parts that lead somewhere ----

/// Where a tower is narrower or wider than the text model, a matrix leads from the one to the other.
void towers_lead_to_text(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t hidden = contents.number({"hidden_size"});
  if (hidden <= 0 || !contents.stated({"vision_config"}).is_object()) return;
  bool tower = false, leads = false;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const bool in_text = model::layer_numbers(name).layer >= 0 && !is_of_tower(name);
    if (in_text || is_of_further(name)) continue;
    const bool table = model::is_embedding(model::module_path(name)) || model::is_head(model::module_path(name));
    tower = tower || (is_of_tower(name) && model::layer_numbers(name).layer >= 0);
    // A norm or a bias of that size tells it as well, and so do the codes of what is packed.
    leads = leads || (!table && (is_of_tower(name) || info.shape.size() > 1 || has_part(name, {"proj", "merger"})) &&
                      std::ranges::find(info.shape, hidden) != info.shape.end());
  }
  for (const auto& linear : contents.linears()) {
    const bool table = model::is_embedding(linear.path) || model::is_head(linear.path);
    const bool in_text = model::layer_numbers(linear.path).layer >= 0 && !is_of_tower(linear.path);
    if (!table && !in_text && !is_of_further(linear.path)) leads = leads || linear.n == hidden || linear.k == hidden;
  }
  if (tower && !leads)
    findings.fault("the vision tower", concat("leads nowhere: nothing beside it has the hidden_size ", hidden,
                                              " of the text model (a projector, or merger, is missing)"));
}

/// Layers for further tokens join the embedding of one with the state of another: one matrix that is twice as wide, or one
/// for each; and there is a layer behind it.
void further_layers(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t hidden = contents.number({"hidden_size"}), layers = contents.number({"num_hidden_layers"});
  const int64_t further = contents.number({"num_nextn_predict_layers", "mtp_num_hidden_layers"});
  if (further <= 0 || hidden <= 0) return;
  bool any = false, joins = false, computes = false;
  for (const auto& linear : contents.linears()) {
    const bool behind = layers > 0 && model::layer_numbers(linear.path).layer >= layers && !is_beside_text(linear.path);
    if (!is_of_further(linear.path) && !behind) continue;
    if (model::is_embedding(linear.path) || has_part(linear.path, {"embed", "head"})) continue;
    any = true;
    const bool joint = linear.k == 2 * hidden || linear.n == 2 * hidden || linear.kind == Kind::integer;
    const bool named = has_part(linear.path, {"eh_proj", "e_proj", "h_proj", ".fc", "linear_proj", "input_proj"});
    joins = joins || joint || named;
    computes = computes || !named;
  }
  if (any && !joins)
    findings.fault("layers for further tokens",
                   concat("have nothing that joins a state and an embedding, ", 2 * hidden, " wide (eh_proj, fc)"));
  if (any && joins && !computes)
    findings.fault("layers for further tokens", "have what joins a state and an embedding, but no layer behind it");
  constexpr std::pair<std::string_view, std::string_view> wanted_beside[] = {
      {"enorm.weight", "hnorm.weight"},
      {"hnorm.weight", "enorm.weight"},
      {"eh_proj.weight", "enorm.weight"},
      {"eh_proj.weight", "hnorm.weight"},
      {"pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"},
      {"pre_fc_norm_hidden.weight", "pre_fc_norm_embedding.weight"},
      {"pre_fc_norm_hidden.weight", "norm.weight"}};
  for (const auto& [name, info] : contents.tensors().tensors()) {
    for (const auto& [has, lacks] : wanted_beside) {
      if (!name.ends_with(concat(".", has))) continue;
      const std::string wanted = concat(name.substr(0, name.size() - has.size()), lacks);
      if (!contents.tensors().contains(wanted))
        findings.fault(wanted, concat("is missing, although ", printable(name), " is there"));
    }
  }
}

/// Text layers under two prefixes, which count on where the other leaves a gap.
void one_prefix(const StoredContents& contents, ContentsFindings& findings) {
  const int64_t stated = contents.number({"num_hidden_layers"});
  if (contents.is_known() || stated < 2) return;
  std::map<std::string, std::set<int64_t>> prefixes;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const size_t at = name.find("layers.");
    const int64_t layer = model::layer_numbers(name).layer;
    if (at == std::string::npos || layer < 0 || is_beside_text(name)) continue;
    prefixes[name.substr(0, at)].insert(layer);
  }
  if (prefixes.size() != 2) return;
  const auto &first = *prefixes.begin(), &second = *std::next(prefixes.begin());
  const auto& [prefix, few] = first.second.size() < second.second.size() ? first : second;
  const auto& [usual, many] = first.second.size() < second.second.size() ? second : first;
  std::set<int64_t> all = few;
  all.insert(many.begin(), many.end());
  if (std::ssize(all) != std::ssize(few) + std::ssize(many) || std::ssize(all) != stated || *all.rbegin() + 1 != stated)
    return;
  findings.fault(concat(prefix, "layers.", *few.begin()),
                 concat("has another prefix than the other layers, which begin with ", printable(usual)));
}

}  // namespace

std::span<const ContentsRule> layer_rules() {
  static constexpr ContentsRule rules[] = {
      {"routers have a row for each expert", false, routers},
      {"no tensor has a shape of its own", false, lone_shapes},
      {"experts of a mixture have one shape", false, lone_experts},
      {"what is beside the text model was written", false, zeros_beside_text},
      {"experts of a stack are several", false, experts_of_stacks},
      {"blocks of towers are alike", false, tower_blocks},
      {"codes and scales have one type", true, lone_types},
      {"towers lead to the text model", false, towers_lead_to_text},
      {"layers for further tokens are whole", false, further_layers},
      {"layers have one prefix", false, one_prefix},
  };
  return rules;
}

}  // namespace w4q::verify
