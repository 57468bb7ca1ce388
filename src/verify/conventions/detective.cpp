#include "verify/conventions/detective.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/dialect/checkpoint.h"
#include "checkpoint/dialect/dialect.h"
#include "checkpoint/dialect/gptq_planar.h"
#include "checkpoint/dialect/stacks.h"
#include "checkpoint/low_precision.h"
#include "core/convert.h"
#include "core/error.h"
#include "core/progress.h"
#include "core/text.h"
#include "formats/integer.h"
#include "formats/scheme_registry.h"
#include "io/checkpoint.h"
#include "io/json.h"
#include "model/config.h"
#include "model/layer_plan.h"
#include "model/model.h"
#include "verify/batches.h"
#include "verify/conventions/claims.h"
#include "verify/conventions/values.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

using formats::PackedWeight;
using formats::Scheme;

/// Tensors of a dialect of integer weights.
struct TensorNames {
  std::string_view dialect;  ///< beginning of the row's name
  std::string_view codes, scales, zeros, index;
  bool always_zeros;  ///< zero points are stored for symmetric weights too
  WordHabits habits;
};
constexpr TensorNames tensor_names[] = {
    {"awq-gemm", ".qweight", ".scales", ".qzeros", "", true, {true, true, true}},
    {"auto-round", ".qweight", ".scales", ".qzeros", ".g_idx", true, {}},
    {"gptq-v", ".qweight", ".scales", ".qzeros", ".g_idx", true, {}},
    {"compressed-tensors", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", false, {}},
    {"marlin", ".B", ".s", "", "", false, {true, true, false}}};

/// Any tensor of which says that a linear is, or was, packed.
constexpr std::string_view traces[] = {
    ".qweight",      ".qzeros",        ".scales", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv",
    ".weight_shape", ".weight.absmax", ".B",      ".s",     ".trellis"};

std::string one_line(const Error& error) {
  std::string text = error.what();
  std::ranges::replace(text, '\n', ' ');
  return text;
}

/// The row that takes the checkpoint; damaged tensors must not keep a row from being asked.
const checkpoint::DialectRow& find_row(const checkpoint::DialectSource& source) {
  for (const auto& row : checkpoint::dialect_registry()) {
    try {
      if (row.detect(source)) return row;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::internal) throw;
    }
  }
  return checkpoint::detect_dialect(source);
}

class Detective {
 public:
  Detective(const checkpoint::Folder& candidate, const io::Checkpoint* base)
      : stated_(checkpoint::stated_quantization(candidate.config, candidate.path)
                    .value_or(checkpoint::StatedQuantization{io::Json::object(), {}})),
        model_(config_of(candidate)),
        candidate_(candidate),
        checkpoint_(candidate.tensors),
        source_{stated_.json, stated_.place, checkpoint_},
        row_(find_row(source_)),
        claims_(source_),
        base_(base) {
    const auto found =
        std::ranges::find_if(tensor_names, [&](const auto& names) { return row_.name.starts_with(names.dialect); });
    if (found != std::end(tensor_names) && !row_.name.ends_with("-float") && !row_.name.ends_with("-int8"))
      names_ = &*found;
  }

  Check run(std::vector<std::string>& notes) {
    look_at_shards();
    look_at_version();
    const auto parameters = expected();
    Progress progress("conventions", static_cast<int64_t>(parameters.size()), "tensors");
    for (const auto& parameter : parameters) {
      if (parameter.linear && parameter.shape.size() == 2) look_at(parameter);
      progress.advance(1);
    }
    look_at_sound();
    judge_plain_experts(notes);
    look_at_profiles();
    if (names_ == nullptr && faults_.empty()) look_by_reader();
    Check check{"conventions", faults_.empty(), {}, std::move(faults_)};
    check.detail = concat(packed_, " packed linears read as ", row_.name,
                          base_ != nullptr ? ", compared with the base" : ", by shapes and statistics",
                          check.passed ? "" : concat("; ", check.faults.size(), " faults"));
    return check;
  }

 private:
  static model::ModelConfig config_of(const checkpoint::Folder& candidate) {
    auto config = model::read_any_config(candidate.config, candidate.path);
    if (config.architecture != nullptr) model::follow_tensors(candidate.tensors, config);
    if (candidate.tensors.contains(config.names.head + ".trellis")) config.tied_embeddings = false;
    return config;
  }

  /// Of an architecture that is not known, what the files hold.
  std::vector<model::Parameter> expected() const {
    if (model_.architecture != nullptr) return model::parameters(model_);
    return model::parameters(model::OpenedModel{checkpoint::read_quantization(candidate_), model_, {}});
  }

  void fault(std::string_view tensor, const std::string& what) {
    faults_.push_back(concat(printable(tensor), ": ", what));
  }

  // ---- files and config ----

  void look_at_shards() {
    std::set<std::string> used;
    for (const auto& [name, info] : checkpoint_.tensors()) {
      used.insert(std::filesystem::path(checkpoint_.file_of(name)).filename().string());
    }
    for (const auto& entry : std::filesystem::directory_iterator(checkpoint_.folder())) {
      const std::string file = entry.path().filename().string();
      if (entry.path().extension() != ".safetensors" || used.contains(file)) continue;
      // Statistics, references and adapters may stand beside a model: a shard is called as shards are.
      if (!file.starts_with("model") && file.find("-of-") == std::string::npos) continue;
      fault(file, "a stale shard: no tensor of the checkpoint is read from it");
    }
    for (const auto& warning : checkpoint_.warnings()) {
      if (warning.find(" holds ") != std::string::npos) faults_.push_back("a stale shard: " + warning);
    }
  }

  /// The words of the config about layout against the shapes that chose the row.
  void look_at_version() {
    const auto text = [&](const char* key) {
      const auto found = stated_.json.find(key);
      return found != stated_.json.end() && found->is_string() ? found->get<std::string>() : std::string();
    };
    const std::string version = text("version");
    if (row_.name.starts_with("awq-") && !version.empty()) {
      std::string wanted = "awq-" + version;
      std::ranges::replace(wanted, '_', '-');
      if (wanted != row_.name) {
        fault(first_packed(),
              concat("config says version \"", printable(version), "\", the shapes are those of ", row_.name));
      }
    }
    if (row_.name == "compressed-tensors-0.17" && !(version.starts_with("0.17") || version.empty())) {
      const int minor = version.starts_with("0.") ? std::atoi(version.c_str() + 2) : 99;
      if (minor >= 18) {
        fault(first_packed(), concat("config says version \"", printable(version),
                                     "\", the words are packed as releases before 0.18 did"));
      }
    }
  }

  std::string first_packed() const {
    for (const auto& [name, info] : checkpoint_.tensors()) {
      for (const auto trace : traces) {
        if (name.ends_with(trace)) return name;
      }
    }
    return "config.json";
  }

  // ---- one linear ----

  void look_at(const model::Parameter& parameter) {
    const std::string linear(model::module_path(parameter.name));
    const bool in_block = linear.find(".layers.") != std::string::npos;
    std::vector<std::string> found;
    for (const auto trace : traces) {
      if (checkpoint_.contains(concat(linear, trace))) found.push_back(concat(linear, trace));
    }
    for (const auto& [part, whole] : row_.stacks) {
      const auto place = checkpoint::stacked_part(row_, concat(linear, part));
      if (!place || !checkpoint_.contains(place->whole)) continue;
      const Shape& shape = checkpoint_.at(place->whole).shape;
      if (!shape.empty() && place->index < shape[0]) found.push_back(place->whole);
    }
    const bool plain = checkpoint_.contains(parameter.name);
    const std::string left_out = claims_.left_out_by(linear);
    if (found.empty()) {
      if (!plain && model::layer_numbers(linear).expert >= 0 &&
          checkpoint_.contains(linear.substr(0, linear.rfind('.')))) {
        return;  // of a stack that is kept as one
      }
      if (!plain) return fault(parameter.name, "is missing, packed or not");
      // Routers, towers and layers for further tokens are left alone by programs without a word.
      if (in_block && parameter.left.empty() && !model::is_embedding(linear) && left_out.empty() &&
          claims_.can_leave_out() && is_weight_dtype(checkpoint_.at(parameter.name).dtype)) {
        if (is_expert(linear) && row_.name.starts_with("bitsandbytes")) {
          plain_experts_.push_back(parameter.name);
        } else {
          fault(parameter.name, in_16_bit);
        }
      }
      return;
    }
    ++packed_;
    packed_experts_ += is_expert(linear);
    if (!left_out.empty() && in_block) {
      fault(found.front(), concat("is quantized, but the config leaves it out by ", left_out));
    }
    if (names_ == nullptr) return;
    if (!checkpoint_.contains(concat(linear, names_->codes))) {
      return fault(concat(linear, names_->codes), concat("is missing, although ", found.front(), " is there"));
    }
    try {
      look_at_tensors(linear, parameter.shape[0], parameter.shape[1]);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::internal) throw;
      faults_.push_back(one_line(error));
    }
  }

  /// One of several: not a shared one, which is a linear like any other.
  static bool is_expert(const std::string& linear) { return linear.find(".experts.") != std::string::npos; }

  /// bitsandbytes packs the class of linears alone: of experts that a program stacks in memory it packs none. Where it
  /// packed some, the others were forgotten.
  void judge_plain_experts(std::vector<std::string>& notes) {
    if (plain_experts_.empty()) return;
    if (packed_experts_ == 0) {
      notes.push_back(concat("all ", plain_experts_.size(), " linears of experts are in 16 bit: bitsandbytes does not ",
                             "pack those that programs stack; the first is ", printable(plain_experts_.front())));
      return;
    }
    for (const auto& name : plain_experts_) fault(name, in_16_bit);
  }

  Scheme declared_scheme(const std::string& linear) const {
    const auto words = claims_.words_of(linear);
    Scheme scheme{formats::SchemeFamily::integer, words.bits, words.group, formats::ScaleType::f16, false, false};
    const DType type = checkpoint_.at(concat(linear, names_->scales)).dtype;
    scheme.scale = type == DType::bf16  ? formats::ScaleType::bf16
                   : type == DType::f32 ? formats::ScaleType::f32
                                        : formats::ScaleType::f16;
    scheme.asymmetric =
        names_->always_zeros || (!names_->zeros.empty() && (words.asymmetric || has(linear, names_->zeros)));
    scheme.act_order = !names_->index.empty() && scheme.block != formats::whole_row && has(linear, names_->index);
    return scheme;
  }

  bool has(const std::string& linear, std::string_view suffix) const {
    return !suffix.empty() && checkpoint_.contains(concat(linear, suffix));
  }

  void look_at_tensors(const std::string& linear, int64_t n, int64_t k) {
    Scheme scheme = declared_scheme(linear);
    checkpoint::PackedLinearInfo info{linear, n, k, DType::f16, {{scheme, std::string(formats::canonical_layout)}}};
    bool sound = true;
    for (const auto& spec : row_.tensors(scheme, n, k)) {
      if (spec.suffix == names_->index && !has(linear, spec.suffix)) continue;
      const DType dtype = spec.suffix == ".weight_shape" && has(linear, spec.suffix)
                              ? checkpoint_.at(linear + spec.suffix).dtype
                              : spec.dtype;
      info.stored.push_back({linear + spec.suffix, dtype, spec.shape});
      sound = shape_is_sound(linear, spec, scheme, k) && sound;
    }
    if (!sound || !scales_are_finite(linear) || !look_at_index(linear, scheme, k)) return;
    info.passes.front().scheme = scheme;
    if (stands_in_planes(info)) return;
    info.dialect = &row_;
    sound_.push_back(std::move(info));
  }

  /// False, and a fault, where a tensor is missing or has another type or shape.
  bool shape_is_sound(const std::string& linear, const formats::StoredSpec& spec, const Scheme& scheme, int64_t k) {
    const std::string name = linear + spec.suffix;
    if (!checkpoint_.contains(name)) return fault(name, "is missing"), false;
    const io::TensorInfo& found = checkpoint_.at(name);
    const bool narrow = spec.suffix == ".weight_shape" && found.dtype == DType::i32;  // Kimi's
    if (found.shape == spec.shape && (found.dtype == spec.dtype || narrow)) return true;
    const Shape& shape = found.shape;
    if (spec.suffix == names_->scales && shape.size() == 2 && spec.shape.size() == 2) {
      // Outputs are one dimension, groups the other: [groups, n], in compressed-tensors [n, groups].
      const bool outputs_first = row_.name.starts_with("compressed-tensors");
      const int64_t wanted = spec.shape[outputs_first ? 1 : 0], outputs = spec.shape[outputs_first ? 0 : 1];
      const int64_t groups = shape[outputs_first ? 1 : 0];
      if (shape[0] == spec.shape[1] && shape[1] == spec.shape[0]) {
        return fault(name,
                     concat("its scales are transposed: ", shape_text(shape), ", expected ", shape_text(spec.shape))),
               false;
      }
      if (shape[outputs_first ? 0 : 1] == outputs && groups > 0 && groups != wanted) {
        return fault(name,
                     concat("wrong group size in the config: group_size ",
                            scheme.block == formats::whole_row ? -1 : scheme.block, " makes ", wanted, " groups of ", k,
                            " inputs, the scales have ", groups, " (groups of ", (k + groups - 1) / groups, ")")),
               false;
      }
    }
    fault(name, concat("is ", dtype_name(found.dtype), " ", shape_text(shape), ", expected ", dtype_name(spec.dtype),
                       " ", shape_text(spec.shape)));
    return false;
  }

  bool scales_are_finite(const std::string& linear) {
    const std::string name = concat(linear, names_->scales);
    const auto tensor = checkpoint_.load(name);
    std::vector<float> values(static_cast<size_t>(element_count(tensor->shape)));
    widen(tensor->bytes, tensor->dtype, values);
    const auto bad = std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
    if (bad == values.end()) return true;
    const int64_t at = bad - values.begin(), width = tensor->shape.back();
    fault(name, concat("holds ", std::isnan(*bad) ? "NaN" : "infinity", " at [", at / width, ", ", at % width, "]"));
    return false;
  }

  /// Settles whether the group index says more than positions do. False where it is no index.
  bool look_at_index(const std::string& linear, Scheme& scheme, int64_t k) {
    if (!scheme.act_order) return true;
    const std::string name = concat(linear, names_->index);
    const Buffer bytes = Buffer::copy_of(checkpoint_.load(name)->bytes);
    const auto index = bytes.as<int32_t>();
    const int64_t size = formats::integer_group_size(scheme, k), groups = formats::integer_groups(scheme, k);
    const bool zero = std::ranges::all_of(index, [](int32_t group) { return group == 0; });
    if (zero && groups > 1) {
      return fault(name, concat("is all zero, but there are ", groups, " groups")), false;
    }
    bool in_order = true;
    for (size_t col = 0; col < index.size(); ++col)
      in_order = in_order && index[col] == static_cast<int64_t>(col) / size;
    scheme.act_order = !in_order;
    return true;
  }

  /// True, and a fault, where the 3-bit codes of a linear stand in planes of bits.
  bool stands_in_planes(const checkpoint::PackedLinearInfo& info) {
    if (names_->index != ".g_idx" || info.passes.front().scheme.bits != 3) return false;
    const std::string name = concat(info.name, names_->codes);
    const std::string evidence = checkpoint::planar_evidence(checkpoint_.load(name)->bytes, info.n, info.k);
    if (!evidence.empty())
      fault(name, "its 3-bit codes stand in planes (GPTQModel's gptq_p), not in streams: " + evidence);
    return !evidence.empty();
  }

  /// What the codes of one linear say.
  struct Values {
    std::vector<std::string> faults;
    std::vector<double> energy;  ///< of columns; empty: not asked for
  };

  /// Of those whose tensors have the right types and shapes.
  void look_at_sound() {
    std::vector<const checkpoint::PackedLinearInfo*> linears;
    for (const auto& info : sound_) linears.push_back(&info);
    std::vector<Values> found(linears.size());
    in_batches(
        linears,
        [&](size_t i) {
          try {
            found[i] = values_of(*linears[i]);
          } catch (const Error& error) {
            if (error.code() == ErrorCode::internal) throw;
            found[i].faults.push_back(one_line(error));
          }
        },
        [&](size_t i) {
          for (auto& what : found[i].faults) faults_.push_back(std::move(what));
          if (!found[i].energy.empty()) {
            const int bits = linears[i]->passes.front().scheme.bits;
            energies_.emplace(linears[i]->name, std::pair(std::move(found[i].energy), bits));
          }
        });
  }

  Values values_of(const checkpoint::PackedLinearInfo& info) const {
    Values values;
    const auto say = [&](const std::string& tensor, const std::string& what) {
      values.faults.push_back(concat(printable(tensor), ": ", what));
    };
    auto loaded = checkpoint::load_stored(checkpoint_, info);
    const PackedWeight& canonical = loaded.passes.front();
    const WeightSample sample(canonical);
    const auto faults = base_ != nullptr && base_->contains(info.name + ".weight")
                            ? base_faults(canonical, sample, names_->habits, base_->load(info.name + ".weight").view())
                            : value_faults(canonical, sample, names_->habits);
    for (const auto& what : faults) {
      const bool zeros = what.starts_with("zero points") && has(info.name, names_->zeros);
      const bool scales = what.starts_with("its scales");
      say(concat(info.name, zeros ? names_->zeros : scales ? names_->scales : names_->codes), what);
    }
    if (faults.empty() && calls_symmetric(info.name, canonical)) {
      say(concat(info.name, names_->zeros),
          "holds zero points other than the symmetric one, but the config calls it symmetric: who believes it leaves "
          "them out");
    }
    if (faults.empty() && base_ == nullptr && !names_->habits.along_outputs) values.energy = sample.column_energy();
    return values;
  }

  /// Whether the config says that there are no zero points, and there are.
  bool calls_symmetric(const std::string& linear, const PackedWeight& canonical) const {
    if (!canonical.scheme.asymmetric || claims_.words_of(linear).asymmetric) return false;
    const int symmetric = formats::integer_symmetric_zero(canonical.scheme.bits);
    const auto zeros = canonical.plane(formats::PlaneRole::zeros).bytes.as<uint8_t>();
    return std::ranges::any_of(zeros, [&](uint8_t zero) { return zero != symmetric; });
  }

  // ---- all linears ----

  /// Inputs of weights that read the same activations: q, k and v; gate and up.
  void look_at_profiles() {
    if (model_.architecture == nullptr) return;
    for (int64_t layer = 0; layer < model_.layers; ++layer) {
      for (const auto& group : model::input_groups(model_, layer)) {
        if (group.linears.size() > 1) look_at_readers(group.names());
      }
    }
  }

  void look_at_readers(const std::vector<std::string>& names) {
    for (const auto& name : names) {
      const auto own = energies_.find(name);
      if (own == energies_.end()) continue;
      const auto& [energy, bits] = own->second;
      std::vector<double> siblings(energy.size(), 0.0);
      int count = 0;
      for (const auto& other : names) {
        const auto found = energies_.find(other);
        if (other == name || found == energies_.end() || found->second.first.size() != energy.size()) continue;
        const auto& theirs = found->second.first;
        double total = 0;
        for (const double value : theirs) total += value;
        for (size_t col = 0; col < siblings.size(); ++col) siblings[col] += theirs[col] / std::max(total, 1e-300);
        ++count;
      }
      if (count == 0) continue;
      if (auto what = profile_fault(energy, siblings, bits); !what.empty()) {
        fault(concat(name, names_->codes), what);
      }
    }
  }

  /// Dialects without words of integers: what their reader finds in headers. Codes and scales are the next rungs'.
  void look_by_reader() {
    try {
      row_.read(source_);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::internal || !checkpoint::integer_algorithm(source_.config).empty()) throw;
      faults_.push_back(one_line(error));
    }
  }

  const checkpoint::StatedQuantization stated_;
  model::ModelConfig model_;
  const checkpoint::Folder& candidate_;
  const io::Checkpoint& checkpoint_;
  checkpoint::DialectSource source_;
  const checkpoint::DialectRow& row_;
  Claims claims_;
  const TensorNames* names_ = nullptr;
  const io::Checkpoint* base_;
  static constexpr const char* in_16_bit = "is in 16 bit, but the config lists it as quantized";
  int64_t packed_ = 0, packed_experts_ = 0;
  std::vector<std::string> plain_experts_;
  std::vector<checkpoint::PackedLinearInfo> sound_;  // whose values are to be looked at
  std::map<std::string, std::pair<std::vector<double>, int>> energies_;
  std::vector<std::string> faults_;
};

}  // namespace

Check check_conventions(const checkpoint::Folder& candidate, const io::Checkpoint* base,
                        std::vector<std::string>* notes) {
  std::vector<std::string> found;
  Check check = Detective(candidate, base).run(found);
  if (notes != nullptr) *notes = std::move(found);
  return check;
}

namespace {

/// What it opens may be damaged itself, which is a finding.
Check audit(CheckContext& context, std::vector<std::string>& notes) {
  try {
    context.headers();
  } catch (const Error& error) {
    // Shards that do not belong together: a fault of the checkpoint, not of the file system.
    if (error.code() != ErrorCode::bad_file) throw;
    return {"conventions", false, "its weight files cannot be read", {one_line(error)}};
  }
  return check_conventions(context.headers(), context.holds_base() ? &context.base().folder.tensors : nullptr, &notes);
}

}  // namespace

CheckRow conventions_check() {
  return {.name = "conventions",
          .help = "another program's tensors hold what its config says",
          .needs = {.foreign = true},
          .stops = true,
          .run = [](CheckContext& context, Findings& findings) {
            std::vector<std::string> notes;
            findings.checks.add(audit(context, notes));
            for (const auto& note : notes) findings.note(note);
          }};
}

}  // namespace w4q::verify
