#include "pipeline/gguf_allocate.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/progress.h"
#include "core/text.h"
#include "io/gguf.h"
#include "io/partial.h"
#include "model/layer_plan.h"
#include "pipeline/mix_search.h"
#include "quantize/gguf.h"

namespace w4q::pipeline {
namespace {

/// From few bits to many; rows that are no whole blocks take what stands in for each.
constexpr std::array ladder{GgmlType::q2_k, GgmlType::q3_k, GgmlType::iq4_xs, GgmlType::q4_k,
                            GgmlType::q5_k, GgmlType::q6_k, GgmlType::q8_0};
/// Of tables, from many bits to few: fewer only where the layers would starve.
constexpr std::array tables{GgmlType::q6_k, GgmlType::q5_k, GgmlType::q4_k, GgmlType::q3_k};
constexpr double starved = 3.0;  // bits per weight of the layers

int64_t padded(int64_t bytes) {
  constexpr int64_t alignment = 32;
  return (bytes + alignment - 1) / alignment * alignment;
}

class Chooser {
 public:
  Chooser(ExportPlan& plan, int64_t bytes, const std::filesystem::path& output)
      : plan_(plan), config_(plan.model.config), bytes_(bytes), output_(output) {
    for (size_t i = 0; i < plan.tensors.size(); ++i) {
      if (plan.tensors[i].parameter.shape.size() < 2) continue;
      const auto module = model::module_path(plan.tensors[i].parameter.name);
      if (!model::find_linear(config_, module) || !has_types(plan.tensors[i].parameter.shape[1])) continue;
      const bool follows = !items_.empty() && plan.tensors[i].name() == plan.tensors[items_.back().front()].name();
      if (!follows) items_.emplace_back();
      items_.back().push_back(i);
      weights_ += element_count(plan.tensors[i].parameter.shape);
    }
    if (items_.empty()) throw Error(ErrorCode::bad_argument, "there is no linear layer to choose types for");
  }

  void run() {
    const auto windows = plan_.calibration->file().load_windows();
    if (windows.samples == 0) {
      throw Error(ErrorCode::bad_argument, "the statistics keep no text to measure predictions on")
          .hint("w4q calibrate --sensitivity keeps some; or --calib instead of --stats");
    }
    if (!can_measure_mixes(config_)) {
      throw Error(ErrorCode::unsupported, "w4q does not know this architecture: mixes of types cannot be measured");
    }
    set_tables();
    set_choices();
    const io::Partial folder(output_, io::Partial::Kind::folder);
    WidthStore store(folder.path());
    quantize(store);
    take(search(windows, store), windows);
  }

 private:
  /// Whether rows of k weights are blocks of some type for each of the ladder; others stay as they are.
  static bool has_types(int64_t k) {
    return std::ranges::all_of(
        ladder, [&](GgmlType type) { return formats::find_gguf_form(gguf_type_for_rows(type, k)) != nullptr; });
  }
  const Shape& shape(size_t at) const { return plan_.tensors[at].parameter.shape; }
  std::string module(size_t at) const { return std::string(model::module_path(plan_.tensors[at].parameter.name)); }

  /// Of a tensor of the file: a linear, or the experts of a layer.
  template <class TypeOf>
  int64_t bytes_of(const std::vector<size_t>& item, const TypeOf& type_of) const {
    int64_t sum = 0;
    for (const size_t at : item) sum += gguf_bytes(type_of(at), shape(at));
    return padded(sum);
  }
  int64_t bytes_of_type(const std::vector<size_t>& item, GgmlType type) const {
    return bytes_of(item, [&](size_t at) { return gguf_type_for_rows(type, shape(at)[1]); });
  }

  int64_t uniform_bytes(GgmlType type) const {
    int64_t sum = 0;
    for (const auto& item : items_) sum += bytes_of_type(item, type);
    return sum;
  }

  void set_type(ExportedTensor& tensor, GgmlType type) const {
    tensor.type = gguf_type_for_rows(type, tensor.parameter.shape[1]);
    tensor.form = tensor.type == GgmlType::q8_0 ? nullptr : formats::find_gguf_form(tensor.type);
  }

  /// The file without the linears.
  int64_t rest() const {
    int64_t size = static_cast<int64_t>(io::layout_gguf(planned_tensors(plan_), plan_.metadata).file_size());
    for (const auto& item : items_) size -= bytes_of(item, [&](size_t at) { return plan_.tensors[at].type; });
    return size;
  }

  /// Head and embeddings, which no statistics are of.
  void set_tables() {
    for (const GgmlType type : tables) {
      for (auto& tensor : plan_.tensors) {
        const auto module = model::module_path(tensor.parameter.name);
        const bool head = model::is_head(module), tied = config_.tied_embeddings;
        if (head || (tied && model::is_embedding(module))) set_type(tensor, type);
        if (!head && !tied && model::is_embedding(module)) set_type(tensor, std::min(type, GgmlType::q4_k));
      }
      limit_ = bytes_ - rest();
      if (8.0 * static_cast<double>(limit_) >= starved * static_cast<double>(weights_)) break;
    }
    const int64_t least = uniform_bytes(ladder.front());
    if (limit_ >= least) return;
    throw Error(ErrorCode::bad_argument, "the target is less than the smallest types give")
        .detail(concat("with ", ggml_type_name(ladder.front()), " in all layers the file has ",
                       human_bytes(bytes_ - limit_ + least)))
        .hint("give more");
  }

  /// The types next to the size, one more below them and one above.
  void set_choices() {
    size_t lower = 0;
    while (lower + 1 < ladder.size() && uniform_bytes(ladder[lower + 1]) <= limit_) ++lower;
    const size_t first = lower == 0 ? 0 : lower - 1, end = std::min(ladder.size(), lower + 3);
    choices_.assign(ladder.begin() + static_cast<ptrdiff_t>(first), ladder.begin() + static_cast<ptrdiff_t>(end));
    for (const auto& item : items_) {
      const std::string name = module(item.front());
      const int64_t layer = model::find_linear(config_, name)->layer;
      std::vector<std::string> others;
      for (const size_t at : std::span(item).subspan(1)) others.push_back(module(at));
      problem_.items.push_back({name, layer, 0, choices_.size(), false, std::move(others)});
      problem_.tables.emplace_back(choices_.size(), 0);
      auto& bytes = problem_.bytes.emplace_back();
      for (const GgmlType type : choices_) bytes.push_back(bytes_of_type(item, type));
    }
  }

  /// A linear at every choice, rounded as it will be.
  StoredLinear stored(size_t at) const {
    StoredLinear result{module(at), shape(at), {}};
    const auto loaded = plan_.model.folder.tensors.load(plan_.tensors[at].parameter.name);
    for (const GgmlType wanted : choices_) {
      const GgmlType type = gguf_type_for_rows(wanted, result.shape[1]);
      const formats::GgufForm& form = *formats::find_gguf_form(type);
      const auto input = plan_.calibration->input(result.module, form.block, gguf::Order(result.shape[1]));
      const bool known = type != GgmlType::q8_0 && input;
      result.choices.push_back({type, quantize::gguf_blocks(loaded.view(), form, known ? &*input : nullptr)});
    }
    return result;
  }

  void quantize(WidthStore& store) {
    Progress progress("types", static_cast<int64_t>(items_.size()), "tensors");
    for (const auto& item : items_) {
      std::vector<StoredLinear> all;
      for (const size_t at : item) all.push_back(stored(at));
      store.add(all);
      progress.advance(1);
    }
  }

  MixChoice search(const CalibrationWindows& windows, const WidthStore& store) {
    const int64_t others = 7 * config_.layers;
    Progress effects("effects", MixMeter::effect_runs(config_, problem_.items) + others, "runs of a layer");
    MixMeter meter(plan_.model, windows, problem_.items, store, [&] { effects.advance(1); });
    MixChoice found = search_mix(meter, problem_, limit_, {});
    fill(meter, found);
    return found;
  }

  /// Room that no exchange took goes to whom it helps most.
  void fill(MixMeter& meter, MixChoice& found) const {
    const auto gain = [&](size_t item, size_t choice) {
      return found.effects[item][found.mix[item]] - found.effects[item][choice];
    };
    Mix mix = found.mix;
    for (bool more = true; more;) {
      more = false;
      const int64_t room = limit_ - problem_.size(mix);
      std::optional<size_t> best;
      for (size_t item = 0; item < mix.size(); ++item) {
        const size_t next = mix[item] + 1;
        if (next >= choices_.size() || problem_.bytes[item][next] - problem_.bytes[item][mix[item]] > room) continue;
        if (!best || gain(item, next) > gain(*best, mix[*best] + 1)) best = item;
      }
      if (best) more = true, ++mix[*best];
    }
    if (mix == found.mix) return;
    const double divergence = meter.measure(mix);
    if (divergence > found.divergence) return;
    found.mix = std::move(mix);
    found.divergence = divergence;
  }

  void take(const MixChoice& found, const CalibrationWindows& windows) {
    std::map<GgmlType, int64_t> counts;
    for (size_t item = 0; item < items_.size(); ++item) {
      for (const size_t at : items_[item]) {
        set_type(plan_.tensors[at], choices_[found.mix[item]]);
        const std::string said = plan_.tensors[at].parameter.name + ": rows of ";  // of the types before the choice
        std::erase_if(plan_.notes, [&](const std::string& note) { return note.starts_with(said); });
      }
      ++counts[plan_.tensors[items_[item].front()].type];
    }
    std::vector<std::string> words;
    for (const auto& [type, count] : counts) words.push_back(concat(count, " × ", ggml_type_name(type)));
    plan_.notes.push_back(concat("types were chosen by the model's predictions on ", windows.samples, " windows of ",
                                 windows.length, " tokens: ", join(words), "; KL ", found.divergence,
                                 " nats per token, ", found.neighbour_divergence,
                                 " with the two types next to the size mixed by layers"));
    const int64_t unused = limit_ - problem_.size(found.mix);
    if (unused <= bytes_ / 100) return;
    plan_.notes.push_back(concat("the file is ", human_bytes(unused),
                                 " smaller than was asked for: layers get at most ", ggml_type_name(ladder.back()),
                                 ", head and embeddings at most ", ggml_type_name(tables.front())));
  }

  ExportPlan& plan_;
  const model::ModelConfig& config_;
  const int64_t bytes_;
  const std::filesystem::path& output_;
  std::vector<std::vector<size_t>> items_;  // tensors of the file, as places in the plan
  int64_t weights_ = 0, limit_ = 0;
  std::vector<GgmlType> choices_;
  MixProblem problem_;
};

}  // namespace

void choose_gguf_types(ExportPlan& plan, int64_t bytes, const std::filesystem::path& output) {
  Chooser(plan, bytes, output).run();
}

}  // namespace w4q::pipeline
