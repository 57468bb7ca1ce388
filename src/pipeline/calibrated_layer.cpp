#include "pipeline/calibrated_layer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/scheme_registry.h"
#include "formats/small_float.h"
#include "kernels/dequantize/dequantize.h"
#include "kernels/linear/linear.h"
#include "model/turn_weight.h"
#include "pipeline/calibrated_passes.h"
#include "pipeline/layer_cuda.h"
#include "pipeline/rotated_weight.h"
#include "pipeline/shared_factor.h"
#include "quantize/awq.h"
#include "quantize/feedback.h"
#include "quantize/rounding.h"

namespace w4q::pipeline {
namespace {

using quantize::StepKind;
using Kind = ScaleTarget::Kind;

/// The options of rounding each weight by itself: what everything else is compared with.
quantize::QuantizeOptions plainly(quantize::QuantizeOptions options) {
  options.steps = options.steps.without(&quantize::StepRow::searches);
  options.input = nullptr;
  return options;
}

/// The mean square of x·Wᵀ, summed over outputs: of a weight, or of what is wrong with it.
double output_power(MatrixView<const float> weight, MatrixView<const float> gram) {
  std::vector<double> parts(static_cast<size_t>(weight.rows));
  parallel_for(weight.rows, 64, [&](int64_t begin, int64_t end) {
    parts[static_cast<size_t>(begin)] =
        quantize::output_error({weight.row(begin), end - begin, weight.cols, weight.stride}, gram);
  });
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

class LayerJob {
 public:
  LayerJob(const model::OpenedModel& model, int64_t layer, const LayerStatistics& statistics,
           const CalibratedPacking& packing, const LayerSources& sources)
      : checkpoint_(model.folder.tensors),
        config_(model.config),
        layer_(layer),
        statistics_(statistics),
        packing_(packing),
        sources_(sources),
        scheme_of_(packing.scheme_of),
        options_(packing.options),
        groups_(model::input_groups(config_, layer)),
        targets_(wanted_targets(config_, layer, scheme_of_, options_.steps)),
        scales_(groups_.size()),
        reports_(groups_.size()),
        notes_(groups_.size()) {
    for (const auto& group : groups_) rotations_.emplace_back(run_time_rotation(options_, group), group.width);
    lanes_ = lanes();
    if (sources.gpu != nullptr) gpu_.emplace(sources.gpu, lanes_);
  }

  CalibratedLayer run() {
    // All scales before any packing: those of o_proj and down_proj change the rows of v_proj and up_proj.
    const bool known = !statistics_.empty();
    if (known) each_group([this](size_t group) { search(group); });
    auto folded = fold_scales(checkpoint_, config_, layer_, targets_, std::move(scales_));
    scales_ = std::move(folded.columns);
    row_scales_ = std::move(folded.rows);
    result_.tensors = std::move(folded.tensors);
    result_.rescaled = std::move(folded.rescaled);
    each_group([&](size_t group) {
      if (packed_linears(group).empty()) return;
      if (sources_.paired != nullptr) {
        pair_.reset();
        pair_ = sources_.paired->of(group);
      }
      if (!known) search(group);
      pack(group);
    });
    for (size_t group = 0; group < groups_.size(); ++group) {
      if (!packed_linears(group).empty()) result_.groups.push_back(reports_[group]);
      std::ranges::move(notes_[group], std::back_inserter(result_.notes));
    }
    count_experts();
    return std::move(result_);
  }

 private:
  /// Experts have few rows each, and a GPU waits for its launches: groups of so many lanes are worked on side by side. Those
  /// that follow inputs go in their order, and trellises are rounded together.
  size_t lanes() const {
    if (sources_.gpu == nullptr || sources_.paired != nullptr) return 1;
    bool mixture = false;
    for (const auto& group : groups_) {
      mixture |= group.expert.has_value();
      for (const auto& name : group.names()) {
        const auto scheme = scheme_of_(name);
        if (scheme && scheme->family == formats::SchemeFamily::trellis) return 1;
      }
    }
    return mixture ? std::clamp<size_t>(static_cast<size_t>(threads()), 1, 16) : 1;
  }

  void each_group(const std::function<void(size_t)>& work) {
    parallel_for(std::ssize(groups_) == 0 ? 0 : static_cast<int64_t>(lanes_), 1, [&](int64_t begin, int64_t end) {
      for (auto lane = static_cast<size_t>(begin); lane < static_cast<size_t>(end); ++lane) {
        for (size_t group = lane; group < groups_.size(); group += lanes_) work(group);
      }
    });
  }

  void count_experts() {
    for (size_t group = 0; group < groups_.size(); ++group) {
      if (!groups_[group].expert || groups_[group].inputs != model::Basis::stream) continue;
      const auto& [count, width] = std::pair(statistics_[group].count, groups_[group].width);
      result_.experts.add({1, count == 0 ? 1 : 0, count > 0 && count < width ? 1 : 0});
    }
  }

  const quantize::InputStatistics& statistics(size_t group) const {
    return statistics_.empty() ? pair_->quantized : statistics_[group];
  }

  /// An expert that was sent fewer rows than it has channels: they say little of their inputs, and less of its outputs.
  bool is_scarce(size_t group) const { return groups_[group].expert && statistics(group).count < groups_[group].width; }

  /// Whether scales are searched for a group. Of a scarce expert many channels hardly spoke: small scales cost nothing on
  /// those rows, and what they divide afterwards ruins the weights.
  bool searches_scales(size_t group) const { return targets_[group].kind != Kind::none && !is_scarce(group); }

  /// Integers are rounded in the basis of their channels, so that what feedback leaves of a scale's errors is known. Small
  /// floats gain nothing by it (docs/notes/awq.md).
  std::optional<quantize::AwqFeedback> feedback_behind_scales(size_t group,
                                                              const std::vector<std::string>& names) const {
    const quantize::Step* const feedback = options_.steps.find(StepKind::feedback);
    const auto is_integer = [this](const std::string& name) {
      return scheme_of_(name)->family == formats::SchemeFamily::integer;
    };
    if (feedback == nullptr || rotates(group) || !std::ranges::all_of(names, is_integer)) return std::nullopt;
    return quantize::AwqFeedback{quantize::feedback_block(*scheme_of_(names.front()), groups_[group].width),
                                 feedback->damping, groups_[group].name()};
  }

  std::vector<std::string> packed_linears(size_t group) const {
    std::vector<std::string> result;
    for (const auto& name : groups_[group].names()) {
      if (scheme_of_(name)) result.push_back(name);
    }
    return result;
  }

  void search(size_t group) {
    check_interrupt();
    GroupReport& report = reports_[group];
    report.name = groups_[group].name();
    report.target = targets_[group].kind;
    const auto names = packed_linears(group);
    if (gpu_) return search_on_gpu(group, names);
    if (names.empty()) return;
    const auto gram = quantize::supported_gram(statistics(group));
    const auto mean_abs = statistics(group).mean_abs();
    const int64_t k = groups_[group].width;
    const MatrixView<const float> gram_view(gram.data(), k, k);
    const auto shared = shared_channels(groups_[group], targets_[group]);
    std::vector<Values> weights;
    std::vector<quantize::AwqLinear> linears;
    weights.reserve(names.size());
    for (const auto& name : names) {
      weights.push_back(load_values(checkpoint_, name + ".weight"));
      linears.push_back({weights.back().matrix(), quantize::rounding_of(*scheme_of_(name), k, plainly(options_))});
      if (rotates_by_itself(name)) linears.back().rounding = in_basis(std::move(linears.back().rounding), group);
      OutputError& output = outputs_[name];
      output.power = output_power(linears.back().weight, gram_view);
      report.output += output.power;
      output.plain = quantize::plain_error(linears.back(), gram_view);
      report.plain_error += output.plain;
    }
    report.scaled_error = report.plain_error;
    if (!searches_scales(group)) return;
    for (size_t i = 0; i < linears.size(); ++i) {
      if (rotates(group) && !rotates_by_itself(names[i]))
        linears[i].rounding = in_basis(std::move(linears[i].rounding), group);
    }
    quantize::ChannelMagnitudes magnitudes(k);
    for (size_t i = 0; i < linears.size(); ++i) {
      magnitudes.add({names[i], DType::f32, weights[i].shape, bytes_of(weights[i].values)}, linears[i].rounding.block);
    }
    const auto sizes = magnitudes.mean();
    const auto found =
        quantize::search_scales(linears, {mean_abs, gram_view, shared, sizes, feedback_behind_scales(group, names)});
    if (found.point.scales()) scales_[group] = found.scales;
    report.point = found.point;
    report.scaled_error = found.error;
  }

  void search_on_gpu(size_t group, const std::vector<std::string>& names) {
    GroupReport& report = reports_[group];
    gpu_->add_group(group, statistics(group));
    const int64_t k = groups_[group].width;
    const bool scales = searches_scales(group);
    quantize::ChannelMagnitudes magnitudes(k);
    for (const auto& name : names) {
      const auto loaded = checkpoint_.load(name + ".weight");
      if (scales) {
        magnitudes.add(loaded.view(), quantize::rounding_of(*scheme_of_(name), k, plainly(options_)).block);
      }
      const auto measured = gpu_->add(group, loaded.view(), *scheme_of_(name), plainly(options_));
      note_output(name, {measured.power, measured.plain, 0});
      report.output += measured.power;
      report.plain_error += measured.plain;
    }
    report.scaled_error = report.plain_error;
    if (names.empty() || !scales) return;
    const auto mean_abs = statistics(group).mean_abs();
    const auto shared = shared_channels(groups_[group], targets_[group]);
    const auto sizes = magnitudes.mean();
    const auto found = gpu_->search(group, {mean_abs, {}, shared, sizes, feedback_behind_scales(group, names)},
                                    report.plain_error, rotates(group) ? &rotations_[group] : nullptr);
    if (found.point.scales()) scales_[group] = found.scales;
    report.point = found.point;
    report.scaled_error = found.error;
  }

  void pack_on_gpu(size_t group, const std::vector<std::string>& names) {
    GroupReport& report = reports_[group];
    set_up_on_gpu(group);
    const auto tables = tables_on_gpu(group, names);
    std::vector<LayerCuda::Wanted> wanted;
    for (size_t i = 0; i < names.size(); ++i) {
      wanted.push_back({i, with_shared_table(options_, tables, *scheme_of_(names[i])), divisors(names[i]),
                        output_costs(group, names[i])});
    }
    std::vector<CalibratedLinear> linears(names.size());
    std::vector<Values> weights(names.size());
    std::vector<double> errors(names.size()), dampings(names.size());
    gpu_->pack(group, wanted, [&](size_t i, LayerCuda::Packed packed) {
      check_interrupt();
      CalibratedLinear& linear = linears[i];
      linear.linear.name = names[i];
      linear.linear.source_dtype = checkpoint_.stored_dtype(names[i] + ".weight");
      linear.linear.passes.push_back(std::move(packed.result.weight));
      if (rotates(group)) linear.linear.rotations.push_back(rotations_[group]);
      linear.stats = packed.result.stats;
      linear.seconds = packed.seconds;
      errors[i] = packed.error;
      dampings[i] = packed.damping;
      weights[i] = effective_weight(linear.linear, group, row_scales(names[i]));
      linear.error = effective_error(weights[i]);
    });
    for (size_t i = 0; i < names.size(); ++i) {
      report.packed_error += errors[i];
      keep(group, std::move(linears[i]), std::move(weights[i]), errors[i]);
    }
    note_damping(group, *std::ranges::max_element(dampings));
    gpu_->drop(group);
  }

  void pack(size_t group) {
    GroupReport& report = reports_[group];
    const auto names = packed_linears(group);
    if (names.empty()) return;
    if (options_.steps.has(StepKind::feedback) || options_.steps.has(StepKind::fit_norms)) check_gram(group);
    if (gpu_) return pack_on_gpu(group, names);
    auto gram = quantize::supported_gram(pair_ ? pair_->quantized : statistics(group));
    auto drift = pair_ ? quantize::mean_drift(*pair_) : std::vector<float>{};
    CalibratedPasses passes(in_scaled_basis(gram, group), options_, groups_[group].name());
    if (pair_) passes.follow(in_scaled_basis(drift, group), pair_->quantized.count);
    passes.turn(rotations_[group]);
    passes.share_factor(shared_factor(group, names));
    passes.share_tables(tables_of(group, names, passes.gram()));
    std::vector<PassWork> several;
    for (const auto& name : names) {
      PassWork work = first_pass(group, name, passes);
      if (further_passes(name).empty()) {
        report.packed_error += finish(group, std::move(work), passes);
      } else {
        several.push_back(std::move(work));
      }
    }
    for (PassWork& work : several) {
      check_interrupt();
      for (const quantize::Pass& pass : further_passes(work.name)) passes.add_further(work, pass);
      report.packed_error += finish(group, std::move(work), passes);
    }
    note_damping(group, passes.damping());
  }

  /// A weight as it is packed: rotated, every scale in it.
  Values scaled_weight(size_t group, const std::string& name) const {
    Values weight = load_values(checkpoint_, name + ".weight");
    if (!scales_[group].empty()) model::multiply_columns(weight.matrix(), scales_[group]);
    if (rotates(group)) rotate_rows(weight.matrix(), rotations_[group]);
    return weight;
  }

  /// Of linears that share an input and have a factor; 0 where that is one alone.
  float shared_factor(size_t group, const std::vector<std::string>& names) const {
    std::vector<std::string> sharing;
    for (const auto& name : names) {
      if (has_tensor_factor(*scheme_of_(name))) sharing.push_back(name);
    }
    if (sharing.size() < 2) return 0;
    float largest = 0;
    for (const auto& name : sharing) {
      Values weight = scaled_weight(group, name);
      if (const auto* rows = row_scales(name)) model::divide_rows(weight.matrix(), *rows);
      largest = std::max(largest, formats::table_max(weight.values));
    }
    return formats::small_float_factor(std::isfinite(largest) ? largest : 0);
  }

  std::map<std::string, std::vector<size_t>> that_share_tables(const std::vector<std::string>& names) const {
    std::vector<formats::Scheme> schemes;
    for (const auto& name : names) schemes.push_back(*scheme_of_(name));
    return linears_that_share_tables(schemes, options_.steps);
  }

  /// Brings groups to the basis in which they are packed, this one and, where they need not follow it, those behind it;
  /// what gains by it is rounded side by side.
  void set_up_on_gpu(size_t group) {
    if (lanes_ > 1) return to_basis_on_gpu(group);
    if (group < set_up_) return;
    std::vector<LayerCuda::Part> parts;
    for (set_up_ = group; set_up_ < groups_.size() && parts.size() < LayerCuda::parts_together; ++set_up_) {
      const auto names = packed_linears(set_up_);
      if (names.empty()) continue;
      if (sources_.paired != nullptr && set_up_ > group) break;
      if (pair_) gpu_->follow(set_up_, *pair_);
      to_basis_on_gpu(set_up_);
      LayerCuda::Part& part = parts.emplace_back(LayerCuda::Part{.group = set_up_});
      for (size_t i = 0; i < names.size(); ++i) {
        part.linears.push_back(i);
        part.divisors.push_back(divisors(names[i]));
      }
    }
    gpu_->round_together(parts, options_);
  }

  void to_basis_on_gpu(size_t group) {
    if (!scales_[group].empty()) gpu_->scale(group, scales_[group]);
    if (rotates(group)) gpu_->rotate(group, rotations_[group]);
  }

  SharedTables tables_on_gpu(size_t group, const std::vector<std::string>& names) {
    SharedTables tables;
    for (const auto& [scheme, members] : that_share_tables(names)) {
      std::vector<std::span<const float>> rows;
      for (const size_t member : members) rows.push_back(divisors(names[member]));
      tables[scheme] = gpu_->learn_table(group, members, rows, options_);
    }
    return tables;
  }

  SharedTables tables_of(size_t group, const std::vector<std::string>& names, MatrixView<const float> gram) const {
    SharedTables tables;
    for (const auto& [scheme, members] : that_share_tables(names)) {
      std::vector<Values> weights;
      std::vector<TensorView> views;
      quantize::BlockMaxima extremes;
      for (const size_t member : members) {
        weights.push_back(scaled_weight(group, names[member]));
        if (const auto* rows = row_scales(names[member])) model::divide_rows(weights.back().matrix(), *rows);
        views.push_back({names[member], DType::f32, weights.back().shape, bytes_of(weights.back().values)});
        const auto maxima = quantize::find_block_maxima(views.back());
        const float room = pair_ ? quantize::room_for_targets : 1;
        quantize::join_extremes(extremes, maxima.smallest, maxima.largest * room);
      }
      const auto mean_squares = diagonal(gram);
      const quantize::CalibratedInput input{.mean_squares = mean_squares};
      auto options = options_;
      options.input = &input;
      const auto importance = quantize::channel_importance(options, gram.rows);
      tables[scheme] =
          quantize::learn_shared_table(views, *scheme_of_(names[members.front()]), extremes, importance, options);
    }
    return tables;
  }

  /// Products of a group's inputs [k, k] as those that are divided by the scales of their channels; in place.
  MatrixView<float> in_scaled_basis(std::vector<float>& products, size_t group) const {
    const MatrixView<float> view(products.data(), groups_[group].width, groups_[group].width);
    if (const auto& scales = scales_[group]; !scales.empty()) {
      model::divide_rows(view, scales);
      model::divide_columns(view, scales);
    }
    return view;
  }

  /// Of the largest damping that feedback took.
  void note_damping(size_t group, double damping) {
    const quantize::Step* feedback = options_.steps.find(StepKind::feedback);
    if (feedback == nullptr || damping <= feedback->damping) return;
    notes_[group].push_back(concat(printable(groups_[group].name()),
                                   ": its inputs are nearly dependent; the damping was raised to ", damping));
  }

  void check_gram(size_t group) {
    const auto& known = statistics(group);
    if (!known.has_gram()) {
      throw Error(ErrorCode::bad_argument, "error feedback and norms need Gram matrices, and the statistics have none")
          .hint("calibrate without --diagonal");
    }
    if (known.count < known.width && !groups_[group].expert) {
      notes_[group].push_back(concat(printable(groups_[group].name()), ": ", known.count, " calibration rows for ",
                                     known.width, " channels: they say little; give more text"));
    }
  }

  std::span<const quantize::Pass> further_passes(const std::string& name) const {
    const auto found = packing_.residual.find(name);
    return found == packing_.residual.end() ? std::span<const quantize::Pass>{} : std::span(found->second);
  }

  int bits_of_passes(const std::string& name) const {
    int bits = scheme_of_(name)->bits;
    for (const quantize::Pass& pass : further_passes(name)) bits += pass.scheme.bits;
    return bits;
  }

  std::span<const float> divisors(const std::string& name) const {
    const auto* rows = row_scales(name);
    return rows == nullptr ? std::span<const float>{} : std::span(*rows);
  }

  /// What the rows of a linear were divided by; null where no scales were folded into it.
  const std::vector<float>* row_scales(const std::string& name) const {
    const auto found = row_scales_.find(name);
    return found == row_scales_.end() ? nullptr : &found->second;
  }

  PassWork first_pass(size_t group, const std::string& name, CalibratedPasses& passes) {
    check_interrupt();
    const Stopwatch watch;
    const auto scheme = *scheme_of_(name);
    PassWork work{name, scaled_weight(group, name), {}};
    work.packed.linear.name = name;
    work.packed.linear.source_dtype = work.rest.dtype;
    Values& weight = work.rest;
    passes.aim(weight.matrix(), scheme, bits_of_passes(name));
    const auto* rows = row_scales(name);
    // Clips are chosen before the rows are scaled: a row's scale changes nothing but the unit of its error.
    Values clipped{weight.name, weight.dtype, weight.shape, {}};
    if (options_.steps.awq_clips() && !formats::shares_bits(scheme)) {
      clipped.values = weight.values;
      quantize::search_clip(clipped.matrix(), passes.gram(),
                            quantize::rounding_of(scheme, weight.shape[1], plainly(options_)));
      if (rows != nullptr) model::divide_rows(clipped.matrix(), *rows);
    }
    if (rows != nullptr) model::divide_rows(weight.matrix(), *rows);
    take_costs(group, work, rows);
    passes.add_first(work, scheme, clipped.values.empty() ? weight : clipped);
    work.packed.seconds = watch.seconds();
    return work;
  }

  /// Outputs that were divided by scales cost their squares more.
  void take_costs(size_t group, PassWork& work, const std::vector<float>* rows) const {
    const auto triangle = output_costs(group, work.name);
    if (triangle.empty()) return;
    const int64_t n = work.rest.shape[0];
    work.output_costs = quantize::expand_triangle(triangle, n);
    const MatrixView<float> matrix(work.output_costs.data(), n, n);
    if (rows != nullptr) {
      model::multiply_rows(matrix, *rows);
      model::multiply_columns(matrix, *rows);
    }
  }

  /// The upper triangle, before outputs were divided; empty where none are known.
  std::span<const float> output_costs(size_t group, const std::string& name) const {
    if (is_scarce(group)) return {};
    const auto found = sources_.costs.find(name);
    return found == sources_.costs.end() ? std::span<const float>{} : found->second;
  }

  /// Keeps what was packed; returns the error of its outputs.
  double finish(size_t group, PassWork work, const CalibratedPasses& passes) {
    if (const auto* rows = row_scales(work.name)) model::multiply_rows(work.rest.matrix(), *rows);
    const double error = output_power(work.rest.matrix(), passes.gram());
    Values weight = effective_weight(work.packed.linear, group, row_scales(work.name));
    work.packed.error = effective_error(weight);
    keep(group, std::move(work.packed), std::move(weight), error);
    return error;
  }

  /// A linear whose passes, errors, times and counts are there, what it computes with, and the error of its outputs.
  void keep(size_t group, CalibratedLinear packed, Values weight, double output_error) {
    const std::string& name = packed.linear.name;
    if (targets_[group].kind == Kind::input_scale) {
      packed.input_scale =
          scales_[group].empty() ? std::vector<float>(static_cast<size_t>(groups_[group].width), 1.0f) : scales_[group];
    }
    packed.columns = scales_[group];
    if (const auto* rows = row_scales(name)) packed.rows = *rows;
    if (sources_.paired != nullptr) sources_.paired->take(name, std::move(weight));
    const std::lock_guard lock(mutex_);
    packed.output = outputs_[name];
    packed.output.packed = output_error;
    result_.linears.emplace(name, std::move(packed));
  }

  void note_output(const std::string& name, const OutputError& output) {
    const std::lock_guard lock(mutex_);
    outputs_[name] = output;
  }

  bool rotates(size_t group) const noexcept { return !rotations_[group].rotation().identity(); }

  /// The rotation belongs to the scheme and is no step beyond plain rounding.
  bool rotates_by_itself(const std::string& name) const {
    return !options_.rotation().identity() && scheme_of_(name)->family == formats::SchemeFamily::rotated;
  }

  quantize::Rounding in_basis(quantize::Rounding rounding, size_t group) const {
    return in_rotated_basis(std::move(rounding), rotations_[group]);
  }

  /// The weight that computes with the inputs of the model as it is: rotations and every scale undone.
  Values effective_weight(const formats::PackedLinear& linear, size_t group, const std::vector<float>* rows) const {
    const std::vector<float>& columns = scales_[group];
    const int64_t n = linear.passes.front().n, k = linear.passes.front().k;
    Values decoded{linear.name, DType::f32, {n, k}, std::vector<float>(static_cast<size_t>(n * k))};
    const auto matrix = decoded.matrix();
    parallel_for(n, 16, [&](int64_t begin, int64_t end) {
      kernels::dequantize_rows(linear, begin, {matrix.row(begin), end - begin, k});
      for (int64_t r = begin; r < end; ++r) {
        float* row = matrix.row(r);
        const float row_scale = rows == nullptr ? 1.0f : (*rows)[static_cast<size_t>(r)];
        for (int64_t c = 0; c < k; ++c)
          row[c] *= columns.empty() ? row_scale : row_scale / columns[static_cast<size_t>(c)];
      }
    });
    return decoded;
  }

  /// Of an effective weight against the one in the checkpoint.
  model::WeightError effective_error(const Values& decoded) const {
    const std::string& name = decoded.name;
    const int64_t n = decoded.shape[0], k = decoded.shape[1];
    const auto loaded = std::make_shared<const io::LoadedTensor>(checkpoint_.load(name + ".weight"));
    const TensorView view{name, DType::f32, decoded.shape, bytes_of(decoded.values)};
    using Dense = kernels::LinearWeight::Dense;
    const kernels::LinearWeight reference{name, n, k, Dense{loaded->view(), loaded}, {}};
    const kernels::LinearWeight candidate{name, n, k, Dense{view, nullptr}, {}};
    return model::compare_weights(reference, candidate);
  }

  const io::Checkpoint& checkpoint_;
  const model::ModelConfig& config_;
  const int64_t layer_;
  const LayerStatistics& statistics_;
  const CalibratedPacking& packing_;
  const LayerSources& sources_;
  const SchemeOf& scheme_of_;
  const quantize::QuantizeOptions& options_;
  const std::vector<model::InputGroup> groups_;
  const ScaleTargets targets_;
  std::vector<formats::InputRotation> rotations_;  // of each group's input
  std::optional<quantize::InputPair> pair_;        // of the group that is being packed
  std::vector<std::vector<float>> scales_;         // empty: ones
  std::vector<GroupReport> reports_;
  std::vector<std::vector<std::string>> notes_;  // of each group
  std::map<std::string, OutputError, std::less<>> outputs_;
  std::map<std::string, std::vector<float>, std::less<>> row_scales_;  // of linears that scales were folded into
  std::optional<LayerCuda> gpu_;  // the groups of the layer on the GPU, by their numbers
  size_t lanes_ = 1;              // of groups
  size_t set_up_ = 0;             // those before this are in their basis, where there is one lane
  std::mutex mutex_;              // guards outputs_ and result_.linears
  CalibratedLayer result_;
};

}  // namespace

ScaleTargets wanted_targets(const model::ModelConfig& config, int64_t layer, const SchemeOf& scheme_of,
                            const quantize::Steps& steps) {
  const quantize::Step* awq = steps.find(StepKind::awq);
  if (awq != nullptr) return scale_targets(config, layer, scheme_of, awq->input_scales);
  return ScaleTargets(model::input_groups(config, layer).size());
}

bool packs_on_gpu(const model::ModelConfig& config, int64_t layer, const CalibratedPacking& packing) {
  for (const auto& group : model::input_groups(config, layer)) {
    for (const auto& name : group.names()) {
      const auto scheme = packing.scheme_of(name);
      const auto further = packing.residual.find(name);
      if (scheme && further != packing.residual.end() && !further->second.empty()) return false;
      if (scheme && !LayerCuda::takes(*scheme, packing.options)) return false;
    }
  }
  return true;
}

bool needs_statistics(const model::ModelConfig& config, int64_t layer, const CalibratedPacking& packing) {
  const auto targets = wanted_targets(config, layer, packing.scheme_of, packing.options.steps);
  const auto groups = model::input_groups(config, layer);
  return std::ranges::any_of(targets, [](const auto& target) { return target.kind != Kind::none; }) ||
         std::ranges::any_of(groups, [](const auto& group) { return group.expert.has_value(); });
}

CalibratedLayer quantize_layer(const model::OpenedModel& model, int64_t layer, const LayerStatistics& statistics,
                               const CalibratedPacking& packing, const LayerSources& sources) {
  return LayerJob(model, layer, statistics, packing, sources).run();
}

}  // namespace w4q::pipeline
