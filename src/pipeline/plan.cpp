#include "pipeline/plan.h"

#include <algorithm>
#include <set>

#include "core/text.h"
#include "model/model.h"

namespace w4q::pipeline {

double TensorPlan::bits_per_weight() const noexcept {
  const int64_t count = weights();
  return count == 0 ? 0 : 8.0 * static_cast<double>(bytes_after) / static_cast<double>(count);
}

std::string TensorPlan::scheme_text() const {
  if (!scheme) return concat("keep ", dtype_name(dtype), why.empty() ? "" : concat(" (", why, ")"));
  std::string text = formats::to_string(*scheme);
  for (const auto& pass : residual) text += "+" + formats::to_string(pass.scheme);
  return text;
}

checkpoint::PackedLinearInfo TensorPlan::packed_info(bool input_scale) const {
  checkpoint::PackedLinearInfo info{std::string(model::module_path(name)), shape[0], shape[1], dtype, {}, input_scale};
  info.passes.push_back({*scheme, layout, rotation});
  info.passes.insert(info.passes.end(), residual.begin(), residual.end());
  return info;
}

double RanksPlan::seconds() const noexcept {
  double longest = 0;
  for (const auto& own : each) longest = std::max(longest, own.seconds);
  return longest;
}

int64_t Plan::bytes_before() const noexcept {
  int64_t sum = 0;
  for (const auto& tensor : tensors) sum += tensor.bytes_before;
  return sum;
}

int64_t Plan::bytes_after() const noexcept {
  int64_t sum = 0;
  for (const auto& tensor : tensors) sum += tensor.bytes_after;
  return sum;
}

int64_t Plan::packed_tensors() const noexcept {
  int64_t count = 0;
  for (const auto& tensor : tensors) count += tensor.scheme ? 1 : 0;
  return count;
}

double Plan::packed_bits_per_weight() const noexcept {
  double bits = 0;
  double weights = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.scheme) continue;
    bits += 8.0 * static_cast<double>(tensor.bytes_after);
    weights += static_cast<double>(tensor.weights());
  }
  return weights == 0 ? 0 : bits / weights;
}

namespace {

std::string memory_text(int64_t bytes) { return bytes > 0 ? human_bytes(bytes) : ""; }

std::string costs_text(const std::vector<CostPart>& costs) {
  TextTable table({"part", "time", "memory"});
  for (const auto& part : costs) table.row({part.name, human_seconds(part.seconds), memory_text(part.memory)});
  return table.str();
}

std::string ranks_text(const RanksPlan& ranks) {
  constexpr size_t listed = 8;
  TextTable table({"rank", "parts", "reads", "holds", "writes", "time"});
  for (size_t rank = 0; rank < ranks.each.size(); ++rank) {
    const auto& own = ranks.each[rank];
    if (rank >= listed && rank + 1 < ranks.each.size()) continue;
    table.row({concat(rank), concat(own.parts), human_bytes(own.reads), human_bytes(own.memory),
               human_bytes(own.writes), human_seconds(own.seconds)});
  }
  return concat(table.str(), ranks.each.size(), " ranks: about ", human_seconds(ranks.seconds()),
                ", with reading and writing at ", human_bytes(static_cast<int64_t>(ranks.read_rate)),
                "/s each, as this machine reads the model",
                ranks.gathered > 0 ? concat("; ", human_bytes(ranks.gathered), " go to the first one in the end") : "",
                "\n");
}

std::string presets_text(const std::vector<PresetCost>& presets) {
  TextTable table({"preset", "time", "memory", "steps"});
  for (const auto& preset : presets) {
    table.row({preset.name, human_seconds(preset.seconds), memory_text(preset.memory), join(preset.steps, " → ")});
  }
  return table.str();
}

std::string tensors_text(const Plan& plan) {
  TextTable table({"tensor", "shape", "scheme", "layout", "bits/weight", "before", "after"});
  for (const auto& tensor : plan.tensors) {
    table.row({printable(tensor.name), shape_text(tensor.shape), tensor.scheme_text(), tensor.layout,
               fixed(tensor.bits_per_weight(), 3), human_bytes(tensor.bytes_before), human_bytes(tensor.bytes_after)});
  }
  return table.str();
}

std::string kinds_text(const Plan& plan) {
  TextTable table({"tensors", "count", "shape", "scheme", "layout", "bits/weight", "before", "after"});
  for (const auto& kind : model::by_kind(plan.tensors)) {
    std::set<std::string> shapes, schemes, layouts;
    int64_t before = 0, after = 0, weights = 0;
    for (const TensorPlan* tensor : kind.rows) {
      shapes.insert(shape_text(tensor->shape));
      schemes.insert(tensor->scheme_text());
      layouts.insert(tensor->layout);
      before += tensor->bytes_before;
      after += tensor->bytes_after;
      weights += tensor->weights();
    }
    const double bits = weights == 0 ? 0 : 8.0 * static_cast<double>(after) / static_cast<double>(weights);
    table.row({printable(kind.name), concat(kind.rows.size()), model::words_text(shapes), model::words_text(schemes),
               model::words_text(layouts), fixed(bits, 3), human_bytes(before), human_bytes(after)});
  }
  return table.str();
}

}  // namespace

std::string to_text(const Plan& plan, model::Detail detail) {
  std::string text = model::names_all(detail, plan.tensors.size()) ? tensors_text(plan) : kinds_text(plan);
  if (plan.allocation) text += "\n" + to_text(*plan.allocation, detail);
  text += concat("\n", plan.packed_tensors(), " of ", plan.tensors.size(), " tensors packed at ",
                 fixed(plan.packed_bits_per_weight(), 3), " bits per weight; ", human_bytes(plan.bytes_before()), " → ",
                 human_bytes(plan.bytes_after()), "\n");
  if (plan.expected_memory > 0) {
    text += concat("expected: up to ", human_bytes(plan.expected_memory), " of memory, about ",
                   human_seconds(plan.expected_seconds), " of computing; reading and writing come on top\n");
  }
  if (plan.costs.size() > 1) text += costs_text(plan.costs);
  if (plan.ranks) text += ranks_text(*plan.ranks);
  if (!plan.presets.empty()) text += presets_text(plan.presets);
  if (!plan.steps.empty()) text += "steps: " + join(plan.steps, " → ") + "\n";
  for (const auto& note : plan.notes) text += "note: " + note + "\n";
  return text;
}

io::Json to_json(const Plan& plan) {
  io::Json tensors = io::Json::array();
  for (const auto& tensor : plan.tensors) {
    io::Json row = {{"name", tensor.name},
                    {"dtype", dtype_name(tensor.dtype)},
                    {"shape", tensor.shape},
                    {"scheme", nullptr},
                    {"layout", nullptr},
                    {"bits_per_weight", tensor.bits_per_weight()},
                    {"bytes_before", tensor.bytes_before},
                    {"bytes_after", tensor.bytes_after}};
    if (tensor.scheme) row["scheme"] = tensor.scheme_text();
    if (tensor.scheme) row["layout"] = tensor.layout;
    if (!tensor.why.empty()) row["why"] = tensor.why;
    tensors.push_back(std::move(row));
  }
  io::Json result = {{"tensors", std::move(tensors)},
                     {"packed_tensors", plan.packed_tensors()},
                     {"packed_bits_per_weight", plan.packed_bits_per_weight()},
                     {"bytes_before", plan.bytes_before()},
                     {"bytes_after", plan.bytes_after()},
                     {"expected_memory_bytes", plan.expected_memory},
                     {"expected_seconds", plan.expected_seconds},
                     {"steps", plan.steps},
                     {"notes", plan.notes}};
  for (const auto& part : plan.costs) {
    result["costs"].push_back({{"part", part.name}, {"seconds", part.seconds}, {"memory_bytes", part.memory}});
  }
  for (const auto& preset : plan.presets) {
    result["presets"].push_back(
        {{"name", preset.name}, {"steps", preset.steps}, {"seconds", preset.seconds}, {"memory_bytes", preset.memory}});
  }
  if (plan.ranks) {
    result["ranks"] = {{"seconds", plan.ranks->seconds()}, {"read_bytes_per_second", plan.ranks->read_rate}};
    if (plan.ranks->gathered > 0) result["ranks"]["gathered_bytes"] = plan.ranks->gathered;
    for (const auto& own : plan.ranks->each) {
      result["ranks"]["each"].push_back({{"parts", own.parts},
                                         {"reads", own.reads},
                                         {"writes", own.writes},
                                         {"memory_bytes", own.memory},
                                         {"seconds", own.seconds}});
    }
  }
  if (plan.allocation) result["allocation"] = to_json(*plan.allocation);
  return result;
}

}  // namespace w4q::pipeline
