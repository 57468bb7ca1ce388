#include "verify/structure.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "checkpoint/dialect/dialect.h"
#include "core/convert.h"
#include "core/interrupt.h"
#include "core/text.h"
#include "io/files.h"
#include "model/layer_plan.h"
#include "serving/prediction.h"
#include "verify/rungs.h"
#include "verify/weights/base_values.h"
#include "verify/weights/computation.h"
#include "verify/weights/kept.h"
#include "verify/weights/requantized.h"

namespace w4q::verify {
namespace {

/// Collects faults of the structure check; `expected` ends as the set of all names that may stand in the checkpoint.
class StructureCheck {
 public:
  StructureCheck(const model::OpenedModel& candidate, const model::OpenedModel* base)
      : parameters_(parameters_of(candidate, base)),
        folder_(candidate.folder),
        base_(base != nullptr ? &base->folder : nullptr),
        candidate_apart_(candidate.apart),
        apart_(base != nullptr ? base->apart : std::vector<model::StackedExperts>{}),
        config_(candidate.config),
        base_config_(base != nullptr ? &base->config : nullptr) {
    if (base != nullptr && is_requantized(candidate)) requantized_.emplace(candidate, *base);
  }

  Check run() {
    if (config_.architecture != nullptr) {
      for (const auto& norm : model::all_norms(config_)) norms_[norm.name + ".weight"] = norm.offset;
    }
    for (const auto& parameter : parameters_) check_parameter(parameter);
    for (const auto& name : folder_.quantization.rescaled) {
      if (!is_parameter(name)) fault(name, "is said to be rescaled, but no parameter of the architecture");
    }
    for (const auto& [name, info] : folder_.quantization.linears) {
      const bool carried =
          config_.architecture != nullptr && !model::reason_to_carry(config_, name + ".weight").empty();
      if (!carried && !packed_.contains(name)) fault(name, "is packed, but no parameter of the architecture");
    }
    check_rescaled_names();
    for (const auto& name : folder_.tuned) {
      if (config_.architecture != nullptr && !norms_.contains(name))
        fault(name, "is said to be a norm that was tuned, and is none");
    }
    check_sizes();
    if (!folder_.quantization.linears.empty()) check_files();
    if (base_ != nullptr) check_against_base();
    for (const auto& stack : candidate_apart_) expected_.insert(stack.name);
    for (const auto& [name, info] : folder_.tensors.tensors()) {
      const bool expected = expected_.contains(name);
      if (config_.architecture != nullptr && !model::reason_to_carry(config_, name).empty()) {
        carried_ += !is_parameter(name);
      } else if (!expected && !scales_activations(name)) {
        fault(name, "is extra: neither a parameter nor a plane of a packed one");
      }
    }
    Check check{"structure", faults_.empty(), {}, std::move(faults_)};
    check.detail = concat(packed_.size(), " packed and ", kept_, " kept parameters");
    if (carried_ > 0) check.detail += concat(", ", carried_, " tensors beside the text model");
    if (base_ != nullptr) {
      check.detail += concat("; ", identical_, " kept tensors ",
                             requantized_ ? "hold the base's values" : "are byte-equal to the base");
      if (rounded_ > 0) check.detail += concat(", ", rounded_, " others are rounded");
    }
    if (!check.passed) check.detail += concat("; ", check.faults.size(), " faults");
    return check;
  }

 private:
  /// Of an architecture that is not known, what the base holds or, without one, the candidate itself.
  static std::vector<model::Parameter> parameters_of(const model::OpenedModel& candidate,
                                                     const model::OpenedModel* base) {
    const bool of_base = candidate.config.architecture == nullptr && base != nullptr &&
                         base->config.architecture == nullptr && base->folder.quantization.linears.empty();
    return model::parameters(of_base ? *base : candidate);
  }

  /// Decoded from a GGUF file, or read of small floats: its types and keys are other ones than the base's, and what they
  /// hold is rounded.
  static bool is_requantized(const model::OpenedModel& candidate) {
    const auto& quantization = candidate.folder.quantization;
    if (candidate.folder.small_floats) return true;
    if (!quantization.linears.empty()) return quantization.method == "gguf";
    return !candidate.folded && candidate.folder.config.value("converted_by", io::Json()) == "w4q";
  }

  void fault(std::string_view subject, const std::string& what) {
    faults_.push_back(concat(printable(subject), " ", what));
  }

  void check_parameter(const model::Parameter& parameter) {
    const auto module = model::module_path(parameter.name);
    const auto* info = folder_.quantization.find(module);
    if (info == nullptr) {
      ++kept_;
      expected_.insert(parameter.name);
      return check_tensor(parameter.name, std::nullopt, parameter.shape);
    }
    packed_.insert(std::string(module));
    if (!parameter.linear) return fault(module, "is packed, but is no linear layer");
    if (Shape{info->n, info->k} != parameter.shape) {
      fault(module, concat("is packed as [", info->n, ", ", info->k, "], the architecture needs ",
                           shape_text(parameter.shape)));
    }
    for (const auto& plane : checkpoint::planned_planes(*info)) {
      expected_.insert(plane.name);
      check_tensor(plane.name, plane.dtype, plane.shape);
    }
    // Of some dialects a plane has the parameter's own name: it was held against its own type and shape above.
    if (folder_.tensors.contains(parameter.name) && !expected_.contains(parameter.name)) {
      fault(parameter.name, "stands beside its packed planes");
    }
  }

  void check_tensor(const std::string& name, std::optional<DType> dtype, const Shape& shape) {
    if (!folder_.tensors.contains(name)) return is_left_out(name) ? void() : fault(name, "is missing");
    const auto& found = folder_.tensors.at(name);
    if (found.shape != shape)
      fault(name, concat("has shape ", shape_text(found.shape), ", expected ", shape_text(shape)));
    if (!dtype && config_.architecture == nullptr) return;  // what is not known may be of any type
    if (dtype ? found.dtype != *dtype : !is_weight_dtype(found.dtype)) {
      fault(name, concat("has type ", dtype_name(found.dtype), ", expected ",
                         dtype ? dtype_name(*dtype) : "BF16, F16 or F32"));
    }
  }

  /// What no model that was trained has.
  void check_sizes() {
    constexpr double most_eps = 2e-3;
    if (config_.architecture == nullptr || config_.rms_norm_eps <= most_eps) return;
    fault("config.json", concat("has a rms_norm_eps of ", config_.rms_norm_eps, ", more than any trained model (",
                                most_eps, "): it would drown what small activations say"));
  }

  /// Shards of another version of the model: other programs load all that they find.
  void check_files() {
    std::set<std::string> read;
    for (const auto& [name, info] : folder_.tensors.tensors()) {
      read.insert(std::filesystem::path(folder_.tensors.file_of(name)).filename().string());
    }
    for (const auto& entry : std::filesystem::directory_iterator(folder_.tensors.folder())) {
      const std::string file = entry.path().filename().string();
      if (io::is_weight_file(file) && is_shard(file) && !read.contains(file)) {
        fault(file, "is a stale shard: no tensor of the checkpoint is read from it");
      }
    }
  }

  /// "model-00002-of-00005.safetensors", with anything behind it.
  static bool is_shard(std::string_view file) {
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    const size_t at = file.find("-of-");
    return at != std::string_view::npos && at > 0 && is_digit(file[at - 1]) && at + 4 < file.size() &&
           is_digit(file[at + 4]);
  }

  void check_against_base() {
    io::Json ours = folder_.config;
    io::Json theirs = base_->config;
    for (auto* config : {&ours, &theirs}) {
      for (const char* key : {"quantization_config", "converted_by"}) config->erase(key);
      for (const auto key : {checkpoint::tuned_norms_key, checkpoint::moved_targets_key})
        config->erase(std::string(key));
      // A head that is packed beside embeddings is tied to nothing.
      if (folder_.quantization.find(config_.names.head) != nullptr) config->erase("tie_word_embeddings");
    }
    // Another version of transformers writes a config with all its defaults, and under names of its own.
    const bool written_anew =
        ours.contains("transformers_version") &&
        (is_copy() || ours["transformers_version"] != theirs.value("transformers_version", io::Json()));
    const bool known = config_.architecture != nullptr;
    auto otherwise = known ? computed_otherwise(config_, *base_config_) : stated_otherwise(ours, theirs);
    const bool same = requantized_   ? computes_as_base()
                      : written_anew ? known ? computes_just_as_base() : otherwise.empty()
                                     : nlohmann::json(ours) == nlohmann::json(theirs);
    if (!same) {
      const bool named = (requantized_ || written_anew) && !otherwise.empty();
      fault("config.json", concat("differs from the base's beyond the quantization",
                                  named ? concat(": ", join(otherwise, "; ")) : first_other_key(ours, theirs)));
    }
    for (const auto& [name, info] : base_->tensors.tensors()) {
      if (folder_.quantization.find(model::module_path(name)) != nullptr || taken_apart(name)) continue;
      check_interrupt();
      expected_.insert(name);
      check_kept(name, info);
    }
    if (requantized_) std::ranges::move(requantized_->faults_of_norms(), std::back_inserter(faults_));
  }

  /// ": rope_theta is 1e4, in the base 5e5"; of nested objects the path.
  static std::string first_other_key(const io::Json& ours, const io::Json& theirs, const std::string& path = {}) {
    // What changes results, before what programs write at will.
    std::vector<std::string> keys = {"rope_theta",     "rms_norm_eps", "num_attention_heads", "num_key_value_heads",
                                     "head_dim",       "hidden_act",   "rope_scaling",        "rope_parameters",
                                     "sliding_window", "text_config"};
    for (const auto* config : {&ours, &theirs}) {
      for (const auto& [key, value] : config->items()) keys.push_back(key);
    }
    for (const auto& key : keys) {
      const auto a = ours.find(key), b = theirs.find(key);
      const bool both = a != ours.end() && b != theirs.end();
      if (a == ours.end() && b == theirs.end()) continue;
      if (both && nlohmann::json(*a) == nlohmann::json(*b)) continue;
      if (both && a->is_object() && b->is_object()) return first_other_key(*a, *b, concat(path, key, "."));
      const auto said = [](const auto& at, const auto& end) {
        return at == end ? std::string("not there") : printable(at->dump());
      };
      return concat(": ", printable(path + key), " is ", said(a, ours.end()), ", in the base ", said(b, theirs.end()));
    }
    return {};
  }

  /// Another program's version of the base in 16 bit.
  bool is_copy() const {
    return !requantized_ && folder_.quantization.linears.empty() && folder_.quantization.dialect == nullptr &&
           !folder_.config.contains("converted_by");
  }

  /// What the candidate's program leaves out of every model, and what no program reads.
  bool is_left_out(const std::string& name) const {
    const bool known = config_.architecture != nullptr;
    if (known && model::reason_to_carry(config_, name) == model::never_read) return true;
    if (!folder_.text_alone) return false;
    const auto why =
        known ? model::reason_to_carry(config_, name) : model::reason_to_leave(model::module_path(name), 0);
    return why == model::of_tower || why == model::further_tokens;
  }

  /// Whether a tensor says how programs quantize activations.
  bool scales_activations(const std::string& name) const {
    const auto* const dialect = folder_.quantization.dialect;
    return dialect != nullptr &&
           std::ranges::any_of(dialect->activations, [&](std::string_view suffix) { return name.ends_with(suffix); });
  }

  void check_kept(const std::string& name, const io::TensorInfo& info) {
    if (!folder_.tensors.contains(name)) {
      // A missing parameter has been reported already.
      const bool lost = base_->quantization.linears.empty() && !is_parameter(name) && !is_left_out(name);
      return lost ? fault(name, "of the base is missing") : void();
    }
    const auto& found = folder_.tensors.at(name);
    if (requantized_) return check_requantized(name, found, info);
    const DType wanted = base_->tensors.stored_dtype(name);
    if (is_copy() && found.dtype != wanted && found.shape == info.shape && holds_rounded(name)) {
      ++rounded_;
      return;
    }
    if (found.dtype != wanted || found.shape != info.shape) {
      return fault(name, concat("is ", dtype_name(found.dtype), " ", shape_text(found.shape), ", in the base ",
                                dtype_name(wanted), " ", shape_text(info.shape)));
    }
    const auto a = folder_.tensors.load(name);
    const auto b = base_->tensors.load_stored(name);
    if (folder_.quantization.rescaled.contains(name) || folder_.tuned.contains(name)) {
      return check_rescaled(name, a.view(), b.view());
    }
    if (!std::ranges::equal(a->bytes, b->bytes)) return fault(name, "was kept, but its bytes differ from the base's");
    ++identical_;
  }

  /// Whether a tensor of weights holds the base's values as its type has them.
  bool holds_rounded(const std::string& name) const {
    const auto ours = folder_.tensors.load(name), theirs = base_->tensors.load(name);
    return is_weight_dtype(ours->dtype) && is_weight_dtype(theirs->dtype) &&
           hold_same_values(ours.view(), theirs.view(), 0);
  }

  /// One factor a channel, and a positive one. That the weights behind a norm carry it is for their errors to show.
  void check_rescaled(const std::string& name, const TensorView& ours, const TensorView& theirs) {
    const auto norm = norms_.find(name);
    if (norm == norms_.end()) return;
    std::vector<float> is(static_cast<size_t>(element_count(ours.shape))), was(is.size());
    widen(ours.bytes, ours.dtype, is);
    widen(theirs.bytes, theirs.dtype, was);
    for (size_t i = 0; i < is.size(); ++i) {
      const float a = is[i] + norm->second, b = was[i] + norm->second;
      if (a == b || a / b > 0) continue;
      return fault(name,
                   concat("is said to be rescaled or tuned, but channel ", i, " is ", is[i], ", in the base ", was[i]));
    }
  }

  /// Only norms and the linears behind them, and those whose rows others read, may be rescaled: each with whatever is on
  /// the other side.
  void check_rescaled_names() {
    const auto& rescaled = folder_.quantization.rescaled;
    std::set<std::string> allowed;
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const auto groups = model::input_groups(config_, layer);
      const auto is_rescaled = [&](const std::string& module) { return rescaled.contains(module + ".weight"); };
      for (const auto& group : groups) {
        const auto names = group.names();
        const bool readers = std::ranges::all_of(names, is_rescaled);
        if (group.norm && readers) allowed.insert(group.norm->name + ".weight");
        const bool norm = group.norm && is_rescaled(group.norm->name);
        const bool producer = !group.producer.empty() && is_rescaled(group.producer);
        for (const auto& name : names) {
          if (norm || producer) allowed.insert(name + ".weight");
        }
        if (!group.producer.empty() && readers) {
          for (const char* what : {".weight", ".bias"}) allowed.insert(group.producer + what);
        }
      }
    }
    for (const auto& name : rescaled) {
      if (is_parameter(name) && !allowed.contains(name)) {
        fault(name, "is said to be rescaled, but not what is on the other side of it");
      }
    }
  }

  /// What shapes do not tell, in the fp32 of GGUF's metadata.
  bool computes_as_base() const {
    const auto same = [](double a, double b) { return static_cast<float>(a) == static_cast<float>(b); };
    const auto &ours = config_, &theirs = *base_config_;
    return ours.architecture == theirs.architecture && ours.heads == theirs.heads && ours.kv_heads == theirs.kv_heads &&
           same(ours.rms_norm_eps, theirs.rms_norm_eps) && ours.rope.type == theirs.rope.type &&
           same(ours.rope.theta, theirs.rope.theta) && same(ours.rope.factor, theirs.rope.factor) &&
           computed_otherwise(ours, theirs).empty();
  }

  /// The same of all that an unrounded copy keeps.
  bool computes_just_as_base() const {
    const auto of_all = [](const model::ModelConfig& config) {
      return std::tie(config.rope, config.head_dim, config.max_positions, config.sliding_window, config.tied_embeddings,
                      config.activation, config.activation_limit, config.activation_slope, config.embedding_scale,
                      config.residual_scale, config.logit_scale, config.logit_cap, config.intermediate_sizes,
                      config.delta_layers, config.delta, config.mixture_layers, config.layer_embedding_size,
                      config.attention);
    };
    return computes_as_base() && ends_alike(folder_, config_, *base_, *base_config_) &&
           of_all(config_) == of_all(*base_config_) && chooses_as_base();
  }
  /// However experts stand in the files.
  bool chooses_as_base() const {
    model::MixtureConfig ours = config_.mixture;
    ours.storage = base_config_->mixture.storage;
    return ours == base_config_->mixture;
  }

  void check_requantized(const std::string& name, const io::TensorInfo& found, const io::TensorInfo& info) {
    if (found.shape != info.shape || !is_weight_dtype(found.dtype) || !is_weight_dtype(info.dtype))
      return;  // a parameter's were looked at already
    const auto finding = requantized_->look_at(name);
    if (!finding.fault.empty()) fault(name, finding.fault);
    ++(finding.same ? identical_ : rounded_);
  }

  /// A stack of the base whose experts are parameters by themselves.
  bool taken_apart(std::string_view name) const {
    return std::ranges::find(apart_, name, &model::StackedExperts::name) != apart_.end();
  }

  bool is_parameter(std::string_view name) const {
    return std::ranges::find(parameters_, name, &model::Parameter::name) != parameters_.end();
  }

  const std::vector<model::Parameter> parameters_;
  const checkpoint::Folder& folder_;
  const checkpoint::Folder* base_;
  const std::vector<model::StackedExperts> candidate_apart_, apart_;
  const model::ModelConfig& config_;
  const model::ModelConfig* base_config_;
  std::optional<RequantizedTensors> requantized_;  ///< of such a candidate beside a base
  std::set<std::string, std::less<>> expected_;
  std::set<std::string, std::less<>> packed_;
  std::map<std::string, float, std::less<>> norms_;  // all of them, and their offsets
  int64_t kept_ = 0, carried_ = 0;
  int64_t identical_ = 0;
  int64_t rounded_ = 0;
  std::vector<std::string> faults_;
};

}  // namespace

Check check_structure(const model::OpenedModel& candidate, const model::OpenedModel* base) {
  return StructureCheck(candidate, base).run();
}

namespace {

/// --for says it of each program.
void note_rounded_scales(CheckContext& context, Findings& findings) {
  const auto& options = context.options();
  const std::filesystem::path& path = options.given.empty() ? options.model : options.given;
  if (options.asked.contains("--for") || !io::is_folder(path)) return;
  if (auto note = serving::rounded_scales_note(serving::StoredModel::open(path)); !note.empty()) findings.note(note);
}

}  // namespace

CheckRow structure_check() {
  return {.name = "structure",
          .help = "every parameter is stored once, with its type and shape; nothing is missing, nothing extra",
          .stops = true,
          .run = [](CheckContext& context, Findings& findings) {
            const model::OpenedModel& candidate = context.candidate();
            for (const auto& note : candidate.folder.quantization.notes) findings.note(note);
            note_rounded_scales(context, findings);
            if (candidate.config.architecture == nullptr) {
              findings.note(candidate.config.undecoded + " is not known: structure is judged by names and shapes");
            }
            const model::OpenedModel* const base = context.holds_base() ? &context.base() : nullptr;
            if (context.options().has_base() && base == nullptr) {
              findings.note("transform_config turned the weights: they are not held against the base's");
            }
            if (const auto& left = context.left_out(); !left.empty()) {
              findings.note(concat(left.size(), " tensors of the base stand beside its text model, as ",
                                   printable(left.front()), ": GGUF has no place for them"));
            }
            // Other programs fold scales into what they keep, so it need not be the base's byte for byte.
            Check structure = check_structure(candidate, context.foreign() ? nullptr : base);
            const bool sound = structure.passed;
            findings.checks.add(std::move(structure));
            if (sound && context.foreign() && base != nullptr) findings.checks.add(check_kept(candidate, *base));
          }};
}

}  // namespace w4q::verify
