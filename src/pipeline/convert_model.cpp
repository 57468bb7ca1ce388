#include "pipeline/convert_model.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/dialect/dialect.h"
#include "checkpoint/dialect/stacks.h"
#include "checkpoint/folder.h"
#include "checkpoint/fused.h"
#include "core/buffer.h"
#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "io/output.h"
#include "model/model.h"
#include "model/opened.h"
#include "model/stacked_experts.h"
#include "model/stored_sizes.h"
#include "pipeline/convert_linear.h"
#include "pipeline/output_rules.h"
#include "pipeline/shared_output.h"
#include "serving/prediction.h"

namespace w4q::pipeline {
namespace {

using checkpoint::PackedLinearInfo;

constexpr std::string_view own_dialect = "w4q";

/// The scale of what a program quantizes while it runs.
struct ScaleTensor {
  enum class Of { input, keys, values } of = Of::input;
  std::string path;  ///< the linear, or the attention
  io::PlannedTensor tensor;
  double largest_code = 0;  ///< the scale is largest magnitude / this
  bool divides = false;     ///< its reciprocal
};

struct ConvertPlan {
  checkpoint::Folder source;
  const checkpoint::DialectRow* dialect = nullptr;  ///< null: w4q's own
  std::vector<LinearPlan> linears;
  std::vector<io::PlannedTensor> carried;
  std::vector<std::string> kept;  ///< linear layers in 16 bit
  ActivationRequest activations;
  std::vector<ScaleTensor> scales;  ///< of activations
};

const checkpoint::DialectRow* find_target(const std::string& name) {
  if (name == own_dialect) return nullptr;
  const auto* row = checkpoint::find_dialect(name);
  if (row == nullptr) {
    throw Error(ErrorCode::bad_argument, concat("--to ", printable(name), ": a packed checkpoint cannot become this"))
        .detail("known: " + join(convert_targets()));
  }
  return row;
}

std::string refuse_rotation(const PackedLinearInfo& info, const checkpoint::DialectRow& row) {
  if (info.passes.front().rotation.identity()) return {};
  if (row.refuses_rotation == nullptr) return "its input is rotated, which readers would leave out";
  return row.refuses_rotation(info);
}

/// What a dialect has no tensor for, beside the codes.
std::string refuse_structure(const PackedLinearInfo& info, const checkpoint::DialectRow& row) {
  if (info.passes.size() > 1) return concat("it is the sum of ", info.passes.size(), " passes");
  if (info.input_scale) return "its input is divided by an input_scale, which readers would leave out";
  return refuse_rotation(info, row);
}

/// What a request says of every linear.
struct LinearWishes {
  bool allow_lossy = false, scales_inputs = false, no_act_order = false;
};

LinearPlan plan_part(const PackedLinearInfo& whole, const model::ExpertPart& part, const checkpoint::DialectRow& row,
                     const LinearWishes& wishes) {
  PackedLinearInfo info = whole;
  info.name = part.name;
  info.n = part.rows;
  const auto refuse = [&](const std::string& why) {
    return Error(ErrorCode::unsupported, concat(printable(info.name), ": ", row.name, " cannot hold ",
                                                formats::to_string(info.passes.front().scheme)))
        .detail(why);
  };
  if (info.name.ends_with("embed_tokens")) {
    throw refuse("it packs linear layers, not embedding tables").hint("quantize without --embeddings");
  }
  if (!row.stacks.empty() && !checkpoint::stacked_part(row, concat(info.name, row.stacks.front().part))) {
    throw refuse("it packs the experts of stacks, and has all else in 16 bit")
        .hint(concat("quantize --to ", row.name, " keeps what it does not pack"));
  }
  checkpoint::DialectFit fit = row.fit(info);
  if (!fit.scheme) {
    std::string last = info.name.substr(info.name.rfind('.') + 1);
    if (last.find_first_not_of("0123456789") == std::string::npos) {  // an expert: those of its stack stay with it
      const std::string stack = info.name.substr(0, info.name.rfind('.'));
      last = concat(stack.substr(stack.rfind('.') + 1), ".*");
    }
    throw refuse(fit.loses).hint(concat("another scheme, or quantize --keep '*.", last, "' leaves it in 16 bit"));
  }
  if (!wishes.scales_inputs && row.needs_inputs != nullptr && row.needs_inputs(*fit.scheme)) {
    throw refuse("its readers want a scale of the inputs beside that of the weights")
        .hint("--activation-scales --calib TEXT measures them");
  }
  if (auto why = refuse_structure(info, row); !why.empty()) fit.loses = std::move(why);
  if (wishes.no_act_order && fit.scheme->act_order) {
    fit.scheme->act_order = false;
    fit.loses = "its inputs belong to groups in an order of their own (--no-act-order)";
  }
  if (!fit.loses.empty() && !wishes.allow_lossy) {
    throw refuse(fit.loses).hint(
        concat("--allow-lossy rounds the weights anew to ", formats::to_string(*fit.scheme), " and reports the error"));
  }
  LinearPlan plan{&whole, {info.name, info.n, info.k, info.source_dtype, {}}, part.first_row, std::move(fit.loses)};
  // Weights that are rounded anew are those of the inputs as they are.
  const formats::Rotation rotation = plan.loses.empty() ? info.passes.front().rotation : formats::Rotation{};
  plan.to.passes = {{*fit.scheme, std::string(formats::canonical_layout), rotation}};
  plan.to.dialect = &row;
  for (const auto& spec : row.tensors(*fit.scheme, info.n, info.k)) {
    plan.to.stored.push_back({info.name + spec.suffix, spec.dtype, spec.shape});
  }
  return plan;
}

/// One for each linear that readers know: an expert of a stack is several, by names of their own.
void plan_linear(const PackedLinearInfo& info, bool halves, const checkpoint::DialectRow& row,
                 const LinearWishes& wishes, std::vector<LinearPlan>& plans) {
  const auto parts =
      halves ? model::expert_parts(info.name, info.n) : std::vector<model::ExpertPart>{{info.name, 0, info.n}};
  for (const auto& part : parts) plans.push_back(plan_part(info, part, row, wishes));
}

/// The tensors of the files.
std::vector<io::PlannedTensor> planned_linears(const std::vector<LinearPlan>& linears) {
  std::vector<io::PlannedTensor> result;
  for (const auto& linear : linears)
    std::ranges::move(checkpoint::planned_planes(linear.to), std::back_inserter(result));
  const auto* const row = linears.empty() ? nullptr : linears.front().to.dialect;
  return row == nullptr ? result : checkpoint::stacked_tensors(*row, std::move(result));
}

LinearPlan plan_own(const PackedLinearInfo& info) {
  LinearPlan plan{&info, info, 0, {}};
  plan.to.dialect = nullptr;
  plan.to.stored.clear();
  for (auto& pass : plan.to.passes) pass.layout = formats::canonical_layout;
  return plan;
}

bool is_linear_layer(const io::TensorInfo& info) {
  return info.name.ends_with(".weight") && info.shape.size() == 2 && is_weight_dtype(info.dtype) &&
         !info.name.ends_with("embed_tokens.weight");
}

/// Modules of a mixture whose experts stay in one tensor, by the names that servers ask for: that of the mixture and
/// those of its first expert, who decides for all.
void keep_mixture(const io::TensorInfo& info, std::vector<std::string>& kept) {
  const std::string mixture = info.name.substr(0, info.name.rfind('.'));
  if (info.shape.size() != 3 || !mixture.ends_with(".experts")) return;
  for (const char* module : {"", ".0.gate_proj", ".0.up_proj", ".0.down_proj"}) {
    std::string name = mixture + module;
    if (std::ranges::find(kept, name) == kept.end()) kept.push_back(std::move(name));
  }
}

/// As it is, or a bias as the dialect wants it.
io::PlannedTensor carried(const ConvertPlan& plan, const io::TensorInfo& info) {
  constexpr std::string_view suffix = ".bias";
  const int64_t multiple = plan.dialect == nullptr ? 0 : plan.dialect->bias_multiple;
  const std::string_view name = info.name;
  const bool bias = multiple > 0 && name.ends_with(suffix) && info.shape.size() == 1 &&
                    plan.source.quantization.find(name.substr(0, name.size() - suffix.size())) != nullptr;
  if (!bias) return {info.name, info.dtype, info.shape};
  return {info.name, DType::f16, {(info.shape[0] + multiple - 1) / multiple * multiple}};
}

/// How others quantize activations is not converted.
bool leaves_out(const ConvertPlan& plan, std::string_view name) {
  const auto* from = plan.source.quantization.dialect;
  return from != nullptr &&
         std::ranges::any_of(from->activations, [&](std::string_view suffix) { return name.ends_with(suffix); });
}

/// What carried tensors leave in 16 bit.
std::vector<std::string> kept_linears(const std::vector<io::TensorInfo>& carried) {
  std::vector<std::string> kept;
  for (const auto& info : carried) {
    if (is_linear_layer(info)) kept.emplace_back(model::module_path(info.name));
    keep_mixture(info, kept);
  }
  return kept;
}

/// Everything that belongs to no packed linear.
void plan_carried(ConvertPlan& plan) {
  std::set<std::string> packed;
  for (const auto& [name, info] : plan.source.quantization.linears) {
    for (auto& tensor : checkpoint::planned_planes(info)) packed.insert(std::move(tensor.name));
  }
  std::vector<io::TensorInfo> others;
  for (const auto& [name, info] : plan.source.tensors.tensors()) {
    if (packed.contains(name) || leaves_out(plan, name)) continue;
    plan.carried.push_back(carried(plan, info));
    others.push_back(info);
  }
  plan.kept = kept_linears(others);
}

constexpr double largest_float8 = 448, largest_float4 = 6 * largest_float8;

/// The scale that readers of a linear's scheme want; nothing: none, or such as they find while they run.
std::optional<ScaleTensor> input_scale(const checkpoint::ActivationForm& form, const LinearPlan& plan) {
  const PackedLinearInfo& to = plan.to;
  const formats::Scheme& scheme = to.passes.front().scheme;
  if (scheme.family != formats::SchemeFamily::small_float) return std::nullopt;
  const bool float4 = scheme.scale == formats::ScaleType::e4m3;
  if (!float4 && scheme.block != formats::whole_tensor) return std::nullopt;
  return ScaleTensor{.path = plan.from->name,
                     .tensor = {concat(to.name, float4 ? form.float4 : form.float8), DType::f32, form.shape},
                     .largest_code = float4 ? largest_float4 : largest_float8,
                     .divides = float4 && form.float4_divides};
}

std::vector<ScaleTensor> plan_activations(const checkpoint::DialectRow* dialect, const ActivationRequest& wanted,
                                          const std::vector<LinearPlan>& linears, const std::filesystem::path& model) {
  std::vector<ScaleTensor> scales;
  if (wanted.empty()) return scales;
  const auto* form = dialect == nullptr ? nullptr : dialect->activation_form;
  if (auto why = activation_obstacle(dialect, wanted); !why.empty()) {
    throw Error(ErrorCode::bad_argument, std::move(why)).hint(std::string(who_has_scales));
  }
  require_cache(model, wanted);
  if (wanted.inputs) {
    for (const auto& linear : linears) {
      if (auto scale = input_scale(*form, linear)) scales.push_back(std::move(*scale));
    }
  }
  if (!wanted.cache) return scales;
  for (const auto& path : cached_attentions(model::open_model(model).config)) {
    using Of = ScaleTensor::Of;
    for (const auto& [of, end] : {std::pair{Of::keys, form->keys}, {Of::values, form->values}}) {
      scales.push_back({of, path, {concat(path, end), DType::f32, form->shape}, largest_float8});
    }
  }
  return scales;
}

ConvertPlan make_plan(const ConvertRequest& request) {
  ConvertPlan plan{checkpoint::open_packed_folder(request.input), find_target(request.to), {}, {}, {}, {}, {}};
  plan.activations = request.activations;
  const LinearWishes wishes{request.allow_lossy, plan.activations.inputs, request.no_act_order};
  model::fit_to_config(plan.source);
  const bool halves = model::stacks_halves(plan.source.config);
  for (const auto& [name, info] : plan.source.quantization.linears) {
    if (plan.dialect == nullptr) {
      plan.linears.push_back(plan_own(info));
    } else {
      plan_linear(info, halves, *plan.dialect, wishes, plan.linears);
    }
  }
  plan_carried(plan);
  plan.scales = plan_activations(plan.dialect, plan.activations, plan.linears, request.input);
  return plan;
}

/// What config.json says of the output.
io::Json describe(const checkpoint::DialectRow& dialect, const std::vector<LinearPlan>& plans,
                  const std::vector<std::string>& kept, const ActivationRequest& activations) {
  std::vector<checkpoint::DialectLinear> linears;
  for (const auto& linear : plans) {
    const auto& from = linear.from->passes.front().scheme;
    const auto& to = linear.to.passes.front().scheme;
    const bool symmetric = linear.loses.empty() ? !from.asymmetric : !to.asymmetric;
    linears.push_back({linear.to.name, to, symmetric, linear.to.n, linear.to.k, linear.to.passes.front().rotation});
  }
  io::Json json = dialect.describe(linears, kept);
  json[conversion_mark] = own_dialect;
  if (!activations.empty()) dialect.activation_form->state(json, activations.inputs, activations.cache);
  return json;
}

io::Json describe(const ConvertPlan& plan) {
  return describe(*plan.dialect, plan.linears, plan.kept, plan.activations);
}

checkpoint::QuantizationConfig own_quantization(const ConvertPlan& plan) {
  checkpoint::QuantizationConfig result;
  result.method = plan.source.quantization.method;
  result.rescaled = plan.source.quantization.rescaled;
  for (const auto& linear : plan.linears) result.linears.emplace(linear.to.name, linear.to);
  return result;
}

/// All tensors of the output.
std::vector<io::PlannedTensor> planned_tensors(const ConvertPlan& plan) {
  std::vector<io::PlannedTensor> planned = plan.carried;
  std::ranges::move(planned_linears(plan.linears), std::back_inserter(planned));
  for (const auto& scale : plan.scales) planned.push_back(scale.tensor);
  return planned;
}

/// What programs would make of the output that nobody asked for.
void note_readers(const ConvertPlan& plan, std::vector<std::string>& notes) {
  if (plan.dialect == nullptr) return;
  io::Json config = plan.source.config;
  const io::Json quantization = describe(plan);
  config["quantization_config"] = quantization;
  auto note = serving::rounded_scales_note(serving::StoredModel::planned(std::move(config), planned_tensors(plan)));
  if (!note.empty()) notes.push_back(std::move(note));
  const io::Json& groups = serving::member(quantization, "config_groups");
  const bool states = std::ranges::any_of(
      groups, [](const io::Json& group) { return serving::member(group, "input_activations").is_object(); });
  if (!states || plan.activations.inputs) return;
  notes.emplace_back(
      "config.json says dynamic inputs in FP8 (input_activations): vLLM and SGLang have experts of FP8 with them "
      "alone");
}

ConvertReport make_report(const ConvertPlan& plan) {
  ConvertReport report;
  const auto* from = plan.source.quantization.dialect;
  report.from = from == nullptr ? own_dialect : from->name;
  report.to = plan.dialect == nullptr ? own_dialect : plan.dialect->name;
  for (const auto& linear : plan.linears) {
    report.linears.push_back({.name = linear.to.name,
                              .from = linear.from->passes.front().scheme,
                              .to = linear.to.passes.front().scheme,
                              .shape = {linear.to.n, linear.to.k},
                              .bytes_before = checkpoint::stored_bytes(*linear.from) * linear.to.n / linear.from->n,
                              .bytes_after = checkpoint::stored_bytes(linear.to),
                              .loses = linear.loses,
                              .proof = {},
                              .error = {}});
  }
  report.carried = static_cast<int64_t>(plan.carried.size());
  for (const auto& tensor : plan.carried) report.carried_bytes += tensor.size();
  report.notes = plan.source.quantization.notes;
  for (const auto& warning : plan.source.tensors.warnings()) report.notes.push_back(warning);
  note_readers(plan, report.notes);
  return report;
}

// ---- all linears ----------------------------------------------------------------------------------------------------

/// Tensors of a linear that are in memory together: stored, canonical, recast, written, decoded once more.
constexpr int64_t copies_of_linear = 5;

/// Calls body(0) … body(count − 1), started in this order by at most `workers` threads. The failure of the lowest index
/// is the one that is thrown, whatever the timing.
void in_order(int64_t count, int64_t workers, const std::function<void(int64_t)>& body) {
  std::mutex mutex;
  int64_t next = 0, failed = count;
  std::exception_ptr failure;
  const auto take = [&] {
    const std::lock_guard lock(mutex);
    return failed < count ? count : next++;
  };
  parallel_for(workers, 1, [&](int64_t, int64_t) {
    for (int64_t index = take(); index < count; index = take()) {
      try {
        body(index);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (index < failed) failed = index, failure = std::current_exception();
      }
    }
  });
  if (failure) std::rethrow_exception(failure);
}

std::vector<std::string> write_companions(const ConvertPlan& plan, const ConvertRequest& request,
                                          const std::filesystem::path& to) {
  const auto& from = request.input;
  if (plan.dialect == nullptr) {
    return carry_companions(from, to, plan.source.config, own_quantization(plan), request.write);
  }
  const io::Json quantization = describe(plan);
  io::Json config = plan.source.config;
  config["quantization_config"] = quantization;
  auto notes = carry_companions(from, to, config, request.write);
  if (!plan.dialect->config_file.empty()) {
    const io::Json json = plan.dialect->list_tensors == nullptr
                              ? quantization
                              : plan.dialect->list_tensors(quantization, planned_tensors(plan));
    io::write_file(to / plan.dialect->config_file, json.dump(2) + "\n", false);
  }
  return notes;
}

/// Linears that are converted at a time: as many as there are threads, as far as the memory for the largest allows.
/// One whole linear for each thread keeps reading, moving, proving and writing busy side by side.
int64_t linears_at_a_time(int64_t largest_bytes) {
  constexpr int64_t memory = int64_t{1} << 30;
  return std::clamp<int64_t>(memory / std::max<int64_t>(1, copies_of_linear * largest_bytes), 1, threads());
}

/// Linears whose tensors stand together in the files, by their numbers: each for itself, or the experts of a stack.
std::vector<std::vector<size_t>> stacks_of(const std::vector<LinearPlan>& linears) {
  std::vector<std::vector<size_t>> result;
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < linears.size(); ++i) {
    const auto& to = linears[i].to;
    const auto part = to.dialect == nullptr || to.stored.empty()
                          ? std::nullopt
                          : checkpoint::stacked_part(*to.dialect, to.stored.front().name);
    if (!part) {
      result.push_back({i});
      continue;
    }
    const auto [at, added] = places.try_emplace(part->whole, result.size());
    if (added) result.emplace_back();
    result[at->second].push_back(i);
  }
  return result;
}

/// What a linear's report says beyond the plan.
io::Json record_of(const ConvertedLinear& linear) {
  const auto& [codes, codes_equal, zeros, zeros_equal, scales, scales_equal, groups_equal] = linear.proof;
  return {{"loses", linear.loses},
          {"proof", {codes, codes_equal, zeros, zeros_equal, scales, scales_equal, groups_equal}},
          {"error", to_record(linear.error)}};
}

void read_record(const io::Json& json, ConvertedLinear& linear) {
  const io::Json& proof = json.at("proof");
  linear.loses = json.at("loses");
  linear.proof = {proof.at(0), proof.at(1), proof.at(2), proof.at(3), proof.at(4), proof.at(5), proof.at(6)};
  linear.error = conversion_error(json.at("error"));
}

/// The linears, those of a stack together, and then what is carried along.
std::vector<WorkUnit> units_of(const ConvertPlan& plan, const ConvertReport& report,
                               const std::vector<std::vector<size_t>>& stacks) {
  std::vector<WorkUnit> units;
  for (const auto& stack : stacks) {
    units.push_back({plan.linears[stack.front()].to.name, {}, 0});
    std::vector<LinearPlan> linears;
    for (const size_t index : stack) {
      units.back().cost += report.linears[index].bytes_before;
      linears.push_back(plan.linears[index]);
    }
    for (auto& tensor : planned_linears(linears)) units.back().tensors.push_back(std::move(tensor.name));
  }
  for (const auto& tensor : plan.carried) units.push_back({tensor.name, {tensor.name}, tensor.size()});
  if (plan.scales.empty()) return units;
  units.push_back({"scales of activations", {}, 1});
  for (const auto& scale : plan.scales) units.back().tensors.push_back(scale.tensor.name);
  return units;
}

/// Those of this rank.
void convert_linears(const ConvertPlan& plan, bool allow_lossy, const std::vector<std::vector<size_t>>& stacks,
                     io::CheckpointWriter& writer, SharedWork& work, Progress& progress, ConvertReport& report) {
  int64_t largest = 0;
  std::vector<size_t> mine;
  for (size_t unit = 0; unit < stacks.size(); ++unit) {
    if (!work.mine(unit)) continue;
    for (const size_t index : stacks[unit]) {
      largest = std::max({largest, report.linears[index].bytes_before, report.linears[index].bytes_after});
    }
    mine.push_back(unit);
  }
  const int64_t workers = linears_at_a_time(largest);
  const BufferReuse reuse(static_cast<size_t>(workers * copies_of_linear * largest));
  in_order(static_cast<int64_t>(mine.size()), workers, [&](int64_t next) {
    const size_t unit = mine[static_cast<size_t>(next)];
    io::Json records = io::Json::array();
    for (const size_t index : stacks[unit]) {
      auto& linear = report.linears[index];
      convert_linear(plan.source.tensors, plan.linears[index], allow_lossy, writer, linear);
      records.push_back(record_of(linear));
      progress.advance(linear.bytes_before);
    }
    work.done(unit, records);
  });
}

/// Throws unsupported where a bias does not fit its type.
void write_carried(const io::Checkpoint& source, const io::PlannedTensor& tensor, io::CheckpointWriter& writer) {
  const io::TensorInfo& info = source.at(tensor.name);
  if (info.dtype == tensor.dtype && info.shape == tensor.shape) return writer.copy(source, tensor.name);
  std::vector<float> values(static_cast<size_t>(tensor.shape[0]));
  widen(source.load(tensor.name)->bytes, info.dtype, std::span(values).first(static_cast<size_t>(info.shape[0])));
  constexpr float largest_half = 65504;
  const auto beyond = std::ranges::find_if(values, [](float value) { return !(std::abs(value) <= largest_half); });
  if (beyond != values.end()) {
    throw Error(ErrorCode::unsupported, concat(printable(tensor.name), ": ", *beyond, " is beyond F16"));
  }
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.size()));
  narrow(values, tensor.dtype, bytes);
  writer.write(tensor.name, bytes);
}

/// Measures what is wanted; scales of what was zero all along are 1.
std::vector<std::pair<std::string, float>> measured_scales(const ConvertPlan& plan, const ConvertRequest& request) {
  std::vector<std::pair<std::string, float>> result;
  if (plan.scales.empty()) return result;
  const auto maxima = measure_activations(request.input, plan.activations.text);
  for (const auto& scale : plan.scales) {
    using Of = ScaleTensor::Of;
    const auto input = maxima.inputs.find(scale.path);
    const auto cache = maxima.caches.find(scale.path);
    const float largest = scale.of == Of::input          ? (input == maxima.inputs.end() ? 0.0f : input->second)
                          : cache == maxima.caches.end() ? 0.0f
                          : scale.of == Of::keys         ? cache->second.keys
                                                         : cache->second.values;
    const auto value = static_cast<float>(largest / scale.largest_code);
    const float written = !(value > 0)    ? 1.0f
                          : scale.divides ? static_cast<float>(scale.largest_code / largest)
                                          : value;
    if (!std::isfinite(written)) {
      throw Error(ErrorCode::unsupported,
                  concat(printable(scale.tensor.name), ": no scale for magnitudes of ", largest));
    }
    result.emplace_back(scale.tensor.name, written);
  }
  return result;
}

/// The last unit of all, where there are any.
void write_scales(const ConvertPlan& plan, const ConvertRequest& request, size_t unit, io::CheckpointWriter& writer,
                  SharedWork& work, ConvertReport& report) {
  if (plan.scales.empty()) return;
  if (work.mine(unit)) {
    for (const auto& [name, value] : measured_scales(plan, request)) {
      writer.write(name, std::as_bytes(std::span(&value, 1)));
    }
    work.done(unit, nullptr);
  }
  report.notes.push_back(concat(plan.scales.size(), " scales of activations, as the text has them"));
}

}  // namespace

std::vector<std::string> convert_targets() {
  std::vector<std::string> names{std::string(own_dialect)};
  for (const auto& row : checkpoint::dialect_registry()) names.emplace_back(row.name);
  return names;
}

ConvertReport plan_convert(const ConvertRequest& request) { return make_report(make_plan(request)); }

serving::StoredModel planned_headers(const ConvertRequest& request) {
  const ConvertPlan plan = make_plan(request);
  for (const auto& linear : plan.linears) {
    // Readers settle it by the values: an order that is stated is another than that of inputs.
    const auto orders = [](const PackedLinearInfo& info) { return info.passes.front().scheme.act_order; };
    const bool keeps = plan.dialect == nullptr || !orders(*linear.from) || orders(linear.to) || !linear.loses.empty();
    if (keeps) continue;
    throw Error(ErrorCode::unsupported,
                concat(printable(linear.to.name), ": its inputs belong to groups in an order of their own, which ",
                       plan.dialect->name, " cannot say"))
        .hint("w4q quantize reads these weights and rounds them again, in order");
  }
  io::Json config = plan.source.config;
  if (plan.dialect == nullptr) {
    checkpoint::write_quantization_config(own_quantization(plan), config);
  } else {
    config["quantization_config"] = describe(plan);
  }
  return serving::StoredModel::planned(std::move(config), planned_tensors(plan));
}

serving::StoredModel planned_headers(const Plan& plan, const std::filesystem::path& model, const std::string& to,
                                     const ActivationRequest& activations) {
  io::Json config = io::read_json(model / "config.json");
  const checkpoint::DialectRow* const row = find_target(to);
  const LinearWishes wishes{.scales_inputs = activations.inputs};
  std::vector<PackedLinearInfo> packed;
  std::vector<io::TensorInfo> others;
  std::vector<io::PlannedTensor> tensors;
  for (const auto& tensor : plan.tensors) {
    if (tensor.scheme) {
      packed.push_back(tensor.packed_info(false));
    } else {
      others.push_back({tensor.name, tensor.dtype, tensor.shape, 0, 0});
      tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
    }
  }
  std::vector<LinearPlan> linears;
  const bool halves = model::stacks_halves(config);
  for (const auto& info : packed) {
    if (row == nullptr) {
      linears.push_back(plan_own(info));
    } else {
      plan_linear(info, halves, *row, wishes, linears);
    }
  }
  std::ranges::move(planned_linears(linears), std::back_inserter(tensors));
  for (auto& scale : plan_activations(row, activations, linears, model)) tensors.push_back(std::move(scale.tensor));
  config["quantization_config"] = row == nullptr ? io::Json{{"quant_method", own_dialect}}
                                                 : describe(*row, linears, kept_linears(others), activations);
  return serving::StoredModel::planned(std::move(config), tensors);
}

ConvertReport convert_model(const ConvertRequest& request) {
  const Stopwatch watch;
  const ConvertPlan plan = make_plan(request);
  checkpoint::check_digests(request.input, plan.source.tensors);
  ConvertReport report = make_report(plan);
  SharedFolder output(request.sharing, request.output, request.overwrite, {request.input},
                      former_outputs(request.input));
  io::CheckpointWriter writer(output.staging(), planned_tensors(plan), with_companions(request.write, request.input),
                              output.shard_files());
  const auto stacks = stacks_of(plan.linears);
  SharedWork work(output, writer, units_of(plan, report, stacks));
  Progress progress("convert", work.cost(), "bytes");
  write_scales(plan, request, stacks.size() + plan.carried.size(), writer, work, report);
  convert_linears(plan, request.allow_lossy, stacks, writer, work, progress, report);
  for (size_t i = 0; i < plan.carried.size(); ++i) {
    const size_t unit = stacks.size() + i;
    if (!work.mine(unit)) continue;
    write_carried(plan.source.tensors, plan.carried[i], writer);
    work.done(unit, nullptr);
    progress.advance(plan.carried[i].size());
  }
  const auto records = work.gather();
  for (size_t unit = 0; unit < stacks.size() && !records.empty(); ++unit) {
    for (size_t i = 0; i < stacks[unit].size(); ++i) read_record(records[unit].at(i), report.linears[stacks[unit][i]]);
  }
  add_notes(report, output.notes());
  return finished(std::move(report), writer, output, watch, checkpoint::bases_through(plan.source),
                  [&](const auto& to) { return write_companions(plan, request, to); });
}

}  // namespace w4q::pipeline
