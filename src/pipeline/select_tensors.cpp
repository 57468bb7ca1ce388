#include "pipeline/select_tensors.h"

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/fused.h"
#include "core/error.h"
#include "core/text.h"
#include "model/model.h"
#include "pipeline/linear_groups.h"
#include "repack/layout_registry.h"

namespace w4q::pipeline {
namespace {

constexpr int exl3_head_bits = 6;

/// Answers "which scheme?" for one module and remembers which globs were of use.
class Selector {
 public:
  Selector(const QuantizeRequest& request, const model::ModelConfig& config) : request_(request), config_(config) {
    used_.resize(request.keep.size());
    rule_used_.resize(request.recipe ? request.recipe->rules.size() : 0);
  }

  /// The passes of a module; none: it is kept, and `why` says why.
  std::vector<quantize::Pass> choose(const model::Parameter& parameter, std::string& why) {
    const auto module = model::module_path(parameter.name);
    why = parameter.left;
    if (kept(module)) {
      why = "--keep";
      return {};
    }
    if (request_.recipe) return by_recipe(module, parameter.linear);
    const bool outside = parameter.left == model::left_head || parameter.left == model::left_embeddings;
    if (!parameter.linear || !(parameter.left.empty() || outside)) return {};
    if (model::is_head(module)) {
      why = "head: --lm-head";
      return request_.lm_head ? passes(module, of_head(), request_.residual) : std::vector<quantize::Pass>{};
    }
    if (model::is_embedding(module)) return of_embeddings(module, why);
    return passes(module, request_.scheme, request_.residual);
  }

  /// A glob that matches nothing is a typing error that would silently give another model than was asked for.
  void check_all_used() const {
    for (size_t i = 0; i < used_.size(); ++i) {
      if (!used_[i]) refuse_unused(concat("--keep ", request_.keep[i]));
    }
    for (size_t i = 0; i < rule_used_.size(); ++i) {
      if (!rule_used_[i])
        refuse_unused(concat("recipe rule ", i + 1, " (", printable(request_.recipe->rules[i].glob), ")"));
    }
  }

 private:
  /// EXL3's head has 6 bits, whatever the layers have.
  formats::Scheme of_head() const {
    formats::Scheme scheme = request_.scheme;
    if (scheme.family == formats::SchemeFamily::exl3) scheme.bits = std::max(scheme.bits, exl3_head_bits);
    return scheme;
  }

  std::vector<quantize::Pass> of_embeddings(std::string_view module, std::string& why) const {
    why = "embeddings: --embeddings";
    if (!request_.embeddings && !(config_.tied_embeddings && request_.lm_head)) return {};
    if (request_.table) return passes(module, *request_.table, {});
    return passes(module, request_.scheme, request_.residual);
  }

  bool kept(std::string_view module) {
    bool result = false;
    for (size_t i = 0; i < request_.keep.size(); ++i) {
      if (!quantize::glob_match(request_.keep[i], module)) continue;
      used_[i] = true;
      result = true;
    }
    return result;
  }

  std::vector<quantize::Pass> by_recipe(std::string_view module, bool packable) {
    const auto* found = request_.recipe->find(module);
    // Later rules that would have matched too are of use in principle: only the order hides them.
    for (size_t i = 0; i < rule_used_.size(); ++i) {
      if (quantize::glob_match(request_.recipe->rules[i].glob, module)) rule_used_[i] = true;
    }
    if (found == nullptr || !found->scheme) return {};
    // A broad glob such as * passes over norms and biases; naming one exactly is a mistake.
    if (!packable && found->glob == module) {
      throw Error(ErrorCode::bad_argument,
                  concat(printable(module), ": only linear layers and embeddings can be packed"))
          .hint("remove the recipe rule");
    }
    if (!packable) return {};
    return passes(module, *found->scheme, found->residual);
  }

  /// Only linears of the layers take the rotation that was asked for: rows of an embedding table are looked up.
  std::vector<quantize::Pass> passes(std::string_view module, const formats::Scheme& first,
                                     const std::vector<formats::Scheme>& further) const {
    quantize::RotationChoice choice = request_.rotation;
    if (const auto place = model::find_linear(config_, module)) {
      choice.first = run_time_rotation(request_.options, place->group);
    }
    return quantize::plan_passes(first, further, choice);
  }

  [[noreturn]] static void refuse_unused(const std::string& what) {
    throw Error(ErrorCode::bad_argument, what + " matches no module of this model")
        .detail("globs are matched against whole module paths, e.g. model.layers.0.mlp.up_proj")
        .hint("w4q quantize MODEL --dry-run lists the names");
  }

  const QuantizeRequest& request_;
  const model::ModelConfig& config_;
  std::vector<bool> used_;
  std::vector<bool> rule_used_;
};

TensorPlan plan_tensor(const io::Checkpoint& checkpoint, const io::TensorInfo& info,
                       std::span<const quantize::Pass> passes) {
  TensorPlan plan;
  plan.name = info.name;
  plan.dtype = checkpoint.stored_dtype(info.name);
  plan.shape = info.shape;
  plan.bytes_before = byte_count(plan.dtype, info.shape);
  plan.bytes_after = plan.bytes_before;
  if (passes.empty()) return plan;
  if (!is_weight_dtype(info.dtype)) {
    throw Error(ErrorCode::unsupported, concat(printable(info.name), ": cannot quantize ", dtype_name(info.dtype)))
        .detail("expected BF16, F16 or F32")
        .hint("start from the 16-bit checkpoint, or --keep this module");
  }
  plan.scheme = passes.front().scheme;
  plan.layout = formats::canonical_layout;
  plan.rotation = passes.front().rotation;
  for (const auto& pass : passes.subspan(1)) plan.residual.push_back({pass.scheme, plan.layout, pass.rotation});
  plan.bytes_after = checkpoint::stored_bytes(plan.packed_info(false));
  return plan;
}

void check_shape(const io::TensorInfo& found, const model::Parameter& parameter, const io::Checkpoint& checkpoint) {
  if (found.shape == parameter.shape) return;
  throw Error(ErrorCode::bad_file, concat(printable(found.name), ": wrong shape"))
      .detail(concat("expected ", shape_text(parameter.shape), " by config.json, found ", shape_text(found.shape),
                     " in ", checkpoint.file_of(found.name)))
      .hint("config.json and the weights belong to different models, or one of them is damaged");
}

/// A stack of which no expert is packed stays as it was.
void put_together(Plan& plan, const model::StackedExperts& stack, const io::Checkpoint& tensors) {
  std::set<std::string, std::less<>> names;
  for (int64_t index = 0; index < stack.experts; ++index) names.insert(stack.expert(index));
  const auto is_expert = [&](const TensorPlan& tensor) { return names.contains(tensor.name); };
  const bool packed =
      std::ranges::any_of(plan.tensors, [&](const TensorPlan& tensor) { return tensor.scheme && is_expert(tensor); });
  if (packed) return;
  const auto first = std::ranges::find_if(plan.tensors, is_expert);
  TensorPlan whole = plan_tensor(tensors, tensors.at(stack.name), {});
  whole.why = first->why;
  *first = std::move(whole);
  std::erase_if(plan.tensors, is_expert);
}

/// Throws bad_argument for the first layer of servers whose linears a recipe gives several schemes.
void require_fused_alike(const Plan& plan) {
  std::map<std::string, const TensorPlan*> first;
  for (const auto& tensor : plan.tensors) {
    const std::string module(model::module_path(tensor.name));
    const std::string name = checkpoint::served_name(module);
    if (name == module || !is_weight_dtype(tensor.dtype) || tensor.shape.size() < 2) continue;
    const auto [at, added] = first.emplace(name, &tensor);
    const TensorPlan& other = *at->second;
    const bool kept = !other.scheme && !tensor.scheme;  // for whatever reason
    if (added || kept || other.scheme_text() == tensor.scheme_text()) continue;
    throw Error(ErrorCode::bad_argument,
                concat("--recipe: ", printable(name), " is one layer in the programs that read ",
                       "the output, and has two schemes"))
        .detail(concat(printable(model::module_path(other.name)), ": ", other.scheme_text()))
        .detail(concat(printable(module), ": ", tensor.scheme_text()))
        .hint("one rule for all its parts; --no-ties writes it as it is, for programs that keep them apart");
  }
}

}  // namespace

Plan select_tensors(const model::OpenedModel& source, const QuantizeRequest& request) {
  const io::Checkpoint& tensors = source.folder.tensors;
  const model::ModelConfig& config = source.config;
  Plan plan;
  Selector selector(request, config);
  std::set<std::string_view> known;
  const auto wanted = model::parameters(source);
  for (const auto& parameter : wanted) {
    const io::TensorInfo& info = tensors.at(parameter.name);
    check_shape(info, parameter, tensors);
    std::string why;
    plan.tensors.push_back(plan_tensor(tensors, info, selector.choose(parameter, why)));
    if (!plan.tensors.back().scheme) plan.tensors.back().why = std::move(why);
    known.insert(info.name);
  }
  if (config.architecture == nullptr) {
    plan.notes.push_back(
        concat(config.undecoded, " is not known: linears are taken by names and shapes, by themselves"));
  }
  for (const auto& stack : source.apart) {
    put_together(plan, stack, tensors);
    known.insert(stack.name);
  }
  std::map<std::string_view, int64_t> carried;
  for (const auto& [name, info] : tensors.tensors()) {
    if (known.contains(name)) continue;
    plan.tensors.push_back(plan_tensor(tensors, info, {}));
    const auto why = config.architecture == nullptr ? std::string_view() : model::reason_to_carry(config, name);
    plan.tensors.back().why = why;
    if (!why.empty()) {
      ++carried[why];
    } else {
      plan.notes.push_back(
          concat(printable(name), " is no parameter of ", config.architecture_name, ": carried along as it is"));
    }
  }
  for (const auto& [why, count] : carried) plan.notes.push_back(concat(count, " tensors are carried along: ", why));
  selector.check_all_used();
  if (request.fused_alike && request.recipe) require_fused_alike(plan);
  if (config.tied_embeddings && !request.recipe && (request.lm_head || request.embeddings)) {
    plan.notes.push_back("head and embeddings are tied: the one table that both use is packed");
  }
  return plan;
}

}  // namespace w4q::pipeline
