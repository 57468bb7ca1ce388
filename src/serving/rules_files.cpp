// Tensors that are missing, or of other types and shapes than the scheme that is asked for has.
#include <algorithm>
#include <map>
#include <set>

#include "core/text.h"
#include "serving/rules.h"

namespace w4q::serving {
namespace {

using enum Program;

constexpr Programs loaders_of_folders{vllm, sglang, transformers, trt_llm, mlx};

constexpr std::string_view make_again = "the file is damaged or incomplete: make it again";
constexpr std::string_view other_scheme = "the file is damaged, or the program takes it for another scheme than it has";
constexpr std::string_view one_scheme = "parts of what is loaded as one share a scheme: quantize them alike";

int64_t blocks(int64_t size, int64_t block) { return block <= 0 ? 1 : (size + block - 1) / block; }

/// What one tensor beside the codes must be.
struct Wanted {
  std::string_view suffix;
  std::vector<DType> dtypes;
  std::vector<Shape> shapes;  ///< one of them
  bool optional = false;
};

const std::vector<DType> halves{DType::f16, DType::bf16, DType::f32};

std::vector<Wanted> wanted_words(const StoredLinear& linear, const StatedScheme& scheme) {
  const int64_t n = linear.n, bits = scheme.bits;
  const io::TensorInfo* const scales = linear.find("weight_scale");
  const bool grouped = scheme.group > 0;
  int64_t k = 0;
  const auto* const codes = linear.find("weight_packed");
  if (codes->shape.size() != 2) return {{"weight_packed", {DType::i32}, {{n, 0}}}};
  const int64_t words = codes->shape[1];
  const bool whole_codes = bits > 0 && 32 % bits == 0;
  if (whole_codes) {
    k = words * 32 / bits;
  } else if (grouped && scales != nullptr && scales->shape.size() == 2) {
    k = scales->shape[1] * scheme.group;
  }
  // A dense stream: older releases of compressed-tensors left the ends of words empty, which nothing here reads.
  const int64_t dense = (k * bits + 31) / 32;
  std::vector<Wanted> list;
  if (k > 0) list.push_back({"weight_packed", {DType::i32}, {{n, dense}}});
  const int64_t inputs = bits > 0 ? words * 32 / bits : 0;
  const int64_t groups = grouped ? blocks(k > 0 ? k : inputs, scheme.group) : 1;
  list.push_back({"weight_scale", halves, {{n, groups}}});
  if (!scheme.symmetric) list.push_back({"weight_zero_point", {DType::i32}, {{(n * bits + 31) / 32, groups}}});
  return list;
}

std::vector<Wanted> wanted_gptq(const StoredLinear& linear, const StatedScheme& scheme) {
  const auto& shape = linear.find("qweight")->shape;
  const int64_t n = linear.n, bits = scheme.bits;
  const int64_t k = linear.k > 0 ? linear.k : bits > 0 ? shape[0] * 32 / bits : 0;
  const int64_t groups = scheme.group > 0 ? blocks(k, scheme.group) : 1;
  return {{"qweight", {DType::i32}, {{k * bits / 32, n}}},
          {"scales", halves, {{groups, n}}},
          {"qzeros", {DType::i32}, {{groups, n * bits / 32}}},
          {"g_idx", {DType::i32, DType::i64}, {{k}}, true}};
}

std::vector<Wanted> wanted_fp8(const StoredLinear& linear, const StatedScheme& scheme, Method method) {
  const int64_t n = linear.n, k = linear.k;
  if (linear.form == Form::mxfp8 || scheme.form == Form::mxfp8) {
    const std::string_view suffix = linear.find("weight_scale_inv") != nullptr ? "weight_scale_inv" : "weight_scale";
    return {{suffix, {DType::u8, DType::f8_e8m0}, {{n, blocks(k, 32)}}}};
  }
  const std::vector<DType> types{DType::f32, DType::bf16, DType::f16, DType::u8, DType::f8_e8m0};
  if (scheme.block_rows > 0) {
    const int64_t down = blocks(n, scheme.block_rows), across = blocks(k, scheme.block_cols);
    const Shape shape = method == Method::modelopt ? Shape{down, 1, across, 1} : Shape{down, across};
    return {{method == Method::fp8 ? "weight_scale_inv" : "weight_scale", types, {shape}}};
  }
  return {{"weight_scale", types, {{}, {1}, {n}, {n, 1}, {1, 1}}}};
}

/// Inputs are told by scales of groups alone.
std::vector<Wanted> wanted_humming(const StoredLinear& linear, const StatedScheme& scheme) {
  const io::TensorInfo* const scales = linear.find("weight_scale");
  const std::vector<DType> types{DType::f16, DType::bf16, DType::f32, DType::f8_e4m3, DType::f8_e8m0, DType::u8};
  const int64_t n = linear.n;
  if (scheme.group < 0) return {{"weight_scale", types, {{}, {1}, {n}, {n, 1}, {1, 1}}}};
  if (scheme.block_rows > 0 || scales == nullptr || scales->shape.size() != 2) return {{"weight_scale", types, {}}};
  const int64_t k = scales->shape[1] * scheme.group;
  std::vector<Wanted> list{{"weight", {DType::i32}, {{n, k * scheme.bits / 32}}}};
  if (!scheme.symmetric) list.push_back({"zero_point", {DType::i32}, {{n * scheme.bits / 32, scales->shape[1]}}});
  return list;
}

std::vector<Wanted> wanted(const StoredLinear& linear, const StatedScheme& scheme, Method method) {
  const int64_t n = linear.n, k = linear.k;
  const std::vector<Shape> one{{}, {1}};
  switch (linear.form) {
    case Form::words:
      return wanted_words(linear, scheme);
    case Form::gptq:
      return wanted_gptq(linear, scheme);
    case Form::awq: {
      const int64_t groups = scheme.group > 0 ? blocks(k, scheme.group) : 1;
      return {{"qweight", {DType::i32}, {{k, n / 8}}},
              {"scales", halves, {{groups, n}}},
              {"qzeros", {DType::i32}, {{groups, n / 8}}, scheme.symmetric}};
    }
    case Form::nvfp4:
      return {{"weight_scale", {DType::f8_e4m3}, {{n, blocks(k, 16)}}}, {"weight_global_scale", {DType::f32}, one}};
    case Form::nvfp4_modelopt:
      return {{"weight_scale", {DType::f8_e4m3}, {{n, blocks(k, 16)}}}, {"weight_scale_2", {DType::f32}, one}};
    case Form::mxfp4:
      return {{"weight_scale", {DType::u8, DType::f8_e8m0}, {{n, blocks(k, 32)}}}};
    case Form::mxfp4_stack:
      return {{"_scales", {DType::u8, DType::f8_e8m0}, {{linear.experts, n, blocks(k, 32)}}}};
    case Form::fp8:
    case Form::mxfp8:
      return wanted_fp8(linear, scheme, method);
    case Form::humming:
      return wanted_humming(linear, scheme);
    case Form::int8:
      return {{"weight_scale", halves, {{}, {1}, {n}, {n, 1}, {n, scheme.group > 0 ? blocks(k, scheme.group) : 1}}}};
    default:
      return {};
  }
}

std::string shapes_text(const std::vector<Shape>& shapes) {
  std::vector<std::string> texts;
  for (const Shape& shape : shapes) {
    if (std::string one = shape_text(shape); std::ranges::find(texts, one) == texts.end())
      texts.push_back(std::move(one));
  }
  return join(texts, " or ");
}

std::string types_text(const std::vector<DType>& types) {
  std::vector<std::string> texts;
  for (const DType type : types) texts.emplace_back(dtype_name(type));
  return join(texts, " or ");
}

void tensors_of(const Question& question, const Layer& layer, const std::string& path, const StoredLinear& linear,
                const StatedScheme& scheme, Findings& findings) {
  const StoredModel& model = question.model;
  const std::string base = path + (path.empty() ? "" : ".");
  for (const Wanted& each : wanted(linear, scheme, model.method())) {
    const io::TensorInfo* const info = linear.find(each.suffix);
    if (info == nullptr) {
      if (each.optional) continue;
      findings.add(Severity::refused,
                   each.suffix.starts_with('_') ? concat(path, each.suffix) : concat(base, each.suffix), {},
                   concat("a tensor beside the codes of ", to_text(scheme)), "none", std::string(make_again));
      continue;
    }
    const bool typed = std::ranges::find(each.dtypes, info->dtype) != each.dtypes.end();
    const bool shaped = each.shapes.empty() || std::ranges::find(each.shapes, info->shape) != each.shapes.end();
    if (typed && shaped) continue;
    // The type that is there, where that is not what differs.
    const std::string types = typed ? std::string(dtype_name(info->dtype)) : types_text(each.dtypes);
    findings.add(Severity::refused, info->name, {},
                 concat(types, " ", shapes_text(each.shapes), ", by ", to_text(scheme)),
                 concat(dtype_name(info->dtype), " ", shape_text(info->shape)),
                 std::string(typed && layer.parts.size() > 1 ? one_scheme : other_scheme));
  }
  if (linear.form == Form::words && scheme.symmetric && linear.find("weight_zero_point") != nullptr) {
    // Who has no place for a tensor either ends there or leaves it out.
    const Severity severity = describe(question.program).fuses ? Severity::refused : Severity::wrong;
    findings.add(severity, linear.find("weight_zero_point")->name, concat(model.place(), ".config_groups"),
                 "no zero points, by symmetric true", "a tensor of them", "write symmetric false");
  }
}

void shapes(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() == Method::none) return;
  for (const Layer& layer : model.layers(describe(question.program).fuses)) {
    const Program reader =
        describe(question.program).fuses || question.program == transformers ? question.program : transformers;
    const Asked asked = question.asked.of(reader, layer);
    if (!asked.scheme || !asked.refused.empty()) continue;
    for (const auto& part : layer.parts) {
      const StoredLinear& linear = model.linears().find(part)->second;
      if (linear.form != Form::plain) tensors_of(question, layer, part, linear, *asked.scheme, findings);
    }
  }
}

void orphans(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() == Method::none) return;
  for (const auto& [name, info] : model.tensors()) {
    for (const std::string_view suffix : {".weight_scale", ".weight_scale_inv", ".weight_global_scale",
                                          ".weight_scale_2", ".qzeros", ".scales", ".weight_zero_point"}) {
      if (!name.ends_with(suffix)) continue;
      const std::string path = name.substr(0, name.size() - suffix.size());
      const auto found = model.linears().find(path);
      const bool codes = found != model.linears().end() && found->second.form != Form::plain;
      if (codes) continue;
      findings.add(Severity::refused, name, {}, "codes beside it", "none", std::string(make_again));
    }
  }
}

/// Every layer of every kind has all parts that the others have.
void parts(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const auto missing = [&](const std::string& path, std::string_view why) {
    findings.add(Severity::refused, path, {}, concat("a linear, ", why), "none", std::string(make_again));
  };
  const auto has = [&](const std::string& path) { return model.linears().contains(path); };
  std::set<std::string> parents;
  for (const auto& [path, linear] : model.linears()) {
    if (expert_place(path).mixture.empty() && is_served_linear(path)) parents.insert(std::string(parent(path)));
  }
  for (const auto& above : parents) {
    const auto need = [&](std::string_view given, std::string_view needed) {
      const std::string from = concat(above, ".", given), to = concat(above, ".", needed);
      if (has(from) && !has(to)) missing(to, concat("beside ", given));
    };
    need("gate_proj", "up_proj"), need("up_proj", "down_proj"), need("gate_proj", "down_proj");
    need("down_proj", model.linears().contains(above + ".gate_up_proj") ? "gate_up_proj" : "up_proj");
    need("k_proj", "q_proj"), need("q_proj", "o_proj"), need("v_proj", "k_proj"), need("v_proj", "q_proj");
    if (has(above + ".up_proj") && !has(above + ".gate_proj")) {
      // Plain MLPs have no gate: all of them, or none.
      const bool gated = std::ranges::any_of(parents, [&](const auto& other) { return has(other + ".gate_proj"); });
      if (gated) missing(above + ".gate_proj", "as other layers have it");
    }
    const bool values = !model.flag("attention_k_eq_v", false) && std::ranges::all_of(parents, [&](const auto& other) {
      return other == above || !has(other + ".k_proj") || has(other + ".v_proj");
    });
    if (values && has(above + ".k_proj") && !has(above + ".v_proj") && parents.size() > 2) {
      missing(above + ".v_proj", "as other layers have it");
    }
  }
}

void experts(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const int64_t stated = model.number({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"});
  for (const Layer& layer : model.layers(true)) {
    if (layer.split != Split::experts) continue;
    std::map<int64_t, std::set<std::string>> found;
    std::set<std::string> projections;
    for (const auto& part : layer.parts) {
      const ExpertPlace place = expert_place(part);
      if (place.expert < 0) continue;
      found[place.expert].emplace(place.projection);
      projections.emplace(place.projection);
    }
    if (found.empty()) continue;
    const int64_t count =
        std::max<int64_t>(found.rbegin()->first + 1, layer.name.find("shared") == std::string::npos ? stated : 0);
    for (int64_t expert = 0; expert < std::min<int64_t>(count, 1 << 16); ++expert) {
      for (const auto& projection : projections) {
        if (found[expert].contains(projection)) continue;
        findings.add(Severity::refused, concat(layer.name, ".", expert, ".", projection), {},
                     concat("a linear of each of ", count, " experts"), "none", std::string(make_again));
      }
    }
  }
}

void head_and_tokens(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const int64_t vocabulary = model.number({"vocab_size"});
  bool head = false, table = false;
  for (const auto& [path, linear] : model.linears()) {
    const bool is_table = path.ends_with("embed_tokens") && path.find("visual") == std::string::npos;
    head = head || is_head(path), table = table || is_table;
    if ((!is_table && !is_head(path)) || vocabulary <= 0 || linear.form != Form::plain || linear.n == vocabulary)
      continue;
    findings.add(Severity::refused, linear.name(), "config.json: vocab_size", concat(vocabulary, " rows"),
                 concat(linear.n, " rows"), "write the vocab_size of the weights, or the whole table");
  }
  if (!table || head || model.number({"num_hidden_layers"}) <= 0) return;
  // transformers ties unless it is told otherwise.
  if (model.flag("tie_word_embeddings", true)) return;
  findings.add(Severity::refused, "lm_head.weight", "config.json: tie_word_embeddings", "a head, as it is false",
               "none", "put the head back, or write true if it is the embedding table");
}

void layer_count(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const int64_t layers = model.number({"num_hidden_layers"});
  if (layers <= 0 || layers > 10000) return;
  std::set<int64_t> found;
  for (const auto& [name, info] : model.tensors()) {
    const size_t at = name.find("layers.");
    const bool other = name.find("visual") != std::string::npos || name.find("vision") != std::string::npos ||
                       name.find("audio") != std::string::npos || name.find("mtp") != std::string::npos;
    if (at == std::string::npos || other) continue;
    found.insert(std::strtoll(name.c_str() + at + 7, nullptr, 10));
  }
  if (found.empty()) return;
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (found.contains(layer)) continue;
    findings.add(Severity::refused, concat("layers.", layer), "config.json: num_hidden_layers", "tensors of each layer",
                 "none", "the file is incomplete: make it again, or write the number of layers that it has");
  }
}

}  // namespace

std::vector<Rule> file_rules() {
  return {
      {"tensors", loaders_of_folders, "the tensors of each linear have the types and shapes that its scheme gives",
       "vllm layers/quantization: create_weights", shapes},
      {"orphans", loaders_of_folders, "scales and zero points have codes", "vllm models/*.py load_weights", orphans},
      {"parts", loaders_of_folders, "linears come in whole blocks: q with k and o, gate with up and down",
       "vllm models/*.py load_weights", parts},
      {"experts", loaders_of_folders, "every expert has all of its linears", "vllm fused_moe weight_loader", experts},
      {"head", loaders_of_folders, "embeddings and head have a row a token; an untied head is there",
       "vllm vocab_parallel_embedding.py weight_loader", head_and_tokens},
      {"layer-count", loaders_of_folders, "num_hidden_layers layers are there",
       "vllm default_loader.py track_weights_loading", layer_count},
  };
}

}  // namespace w4q::serving
