#include "verify/weights/weights.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"
#include "model/parameters.h"
#include "verify/rungs.h"
#include "verify/weights/carried.h"
#include "verify/weights/kept.h"
#include "verify/weights/rescaled.h"
#include "verify/weights/streams.h"

namespace w4q::verify {

std::string scheme_text(const checkpoint::PackedLinearInfo& info) {
  std::vector<std::string> names;
  for (const auto& pass : info.passes) names.push_back(formats::to_string(pass.scheme));
  return join(names, "+");
}

namespace {

/// Of all schemes but those that round each input for itself, which may give up a column that hardly anything multiplies.
bool column_is_lost(const WeightLimit& limit) {
  return limit.gains.column >= 0 && (limit.turned || limit.gains.column_is_wild);
}

/// What no way of rounding makes of the base's.
bool is_another_weight(const TensorError& tensor) {
  const WeightLimit& limit = *tensor.limit;
  return !limit.holds() || limit.gains.row >= 0 || column_is_lost(limit) || tensor.streams ||
         limit.worst_row() != nullptr;
}

std::string fault_of(const TensorError& tensor) {
  const WeightLimit& limit = *tensor.limit;
  const std::string remedy = "; quantize it anew, or give the base it was made from (--no-limits: report alone)";
  if (!limit.holds()) {
    return concat(printable(tensor.name), ": ", tensor.scheme, " is ", fixed(limit.sqnr(), 2),
                  " dB from the base's weight, at least ", fixed(limit.floor(), 2), " expected; ",
                  fixed(limit.gain(), 2), " of its size, ", least_gain, " to ", most_gain, " expected", remedy);
  }
  if (const Gains& gains = limit.gains; gains.row >= 0) {
    return concat(printable(tensor.name), ": row ", gains.row, " holds ", fixed(gains.row_gain, 2), " of the base's, ",
                  limit.moves.least_of_line, " to ", most_gain, " expected: its codes or scales are others'", remedy);
  }
  if (column_is_lost(limit)) {
    return concat(printable(tensor.name), ": column ", limit.gains.column, " holds ", fixed(limit.gains.column_gain, 2),
                  " of the base's, ", limit.moves.least_of_line, " to ", most_gain,
                  " expected: its codes or scales are others'", remedy);
  }
  if (tensor.streams) return concat(printable(tensor.name), ": ", *tensor.streams, remedy);
  const RoundedRow* row = limit.worst_row();
  return concat(printable(tensor.name), ": row ", row->row, " has ", fixed(row->noise / row->rounded_noise, 1),
                " times the squared error of rounding to nearest, at most ", most_row_noise, " expected", remedy);
}

/// Codes and values that are not what rounding makes of the base where in nearly all others each one is: whoever rounded
/// all of them did not round these.
class RoundingJudge {
 public:
  explicit RoundingJudge(const WeightReport& report) : report_(report) {}

  /// Empty: nothing is said against it.
  std::string fault_of(const TensorError& tensor) const {
    for (const auto& [what, first, text] :
         {std::tuple(&RoundedRow::off, &RoundedRow::first_off, "not the nearest under their scales"),
          std::tuple(&RoundedRow::unlike, &RoundedRow::first_unlike, "not those of rounding to nearest")}) {
      // Where scales were folded, the scale or the zero point of a whole group may be the next one. Of powers of two programs
      // take one or the next where a block's largest weight lies between what the two reach.
      const bool powers = tensor.scheme.starts_with("mx") || tensor.scheme.find("e8m0") != std::string::npos;
      if ((tensor.folded || powers) && what == &RoundedRow::unlike) continue;
      const int64_t count = tensor.limit->count(what);
      if (count == 0 || static_cast<double>(count) > most_share * static_cast<double>(tensor.limit->values)) continue;
      if (!others_are_rounded(tensor, what)) continue;
      const auto& rows = tensor.limit->rows;
      const auto row = std::ranges::find_if(rows, [&](const RoundedRow& each) { return each.*what > 0; });
      return concat(printable(tensor.name), ": ", count, " of ", tensor.limit->values, " codes are ", text,
                    ", the first in row ", row->row, ", column ", (*row).*first,
                    "; in the other weights none is; quantize it anew, or give the base it was made from");
    }
    auto scales = scale_fault_of(tensor);
    return scales.empty() ? lost_fault_of(tensor) : scales;
  }

 private:
  /// Whatever else rounds a weight where all others were rounded to nearest keeps its columns, and from 4 bits on its size.
  /// Where others were not, columns that hardly anything multiplies may have been given up.
  std::string lost_fault_of(const TensorError& tensor) const {
    constexpr double most_away = 0.04;
    const Gains& gains = tensor.limit->gains;
    // Where rounding by the definition is what shrinks a weight, one that holds all of it is none the worse.
    const double away = std::min(std::abs(tensor.limit->gain() - 1), std::abs(tensor.limit->held() - 1));
    const bool another_size = tensor.limit->bits >= least_bits(tensor) && !tensor.limit->measured && away > most_away;
    if ((gains.column < 0 && !another_size) || tensor.folded) return {};
    if (another_size && others_are(tensor, [](const WeightLimit& limit) {
          return limit.turned && std::abs(limit.gain() - 1) < most_away / 2;
        })) {
      return concat(printable(tensor.name), ": holds ", fixed(tensor.limit->gain(), 3),
                    " of what rounding to nearest leaves of the base's, the other weights within ",
                    fixed(50 * most_away, 0), " %: its scales are of another size");
    }
    if (!others_are_rounded(tensor, &RoundedRow::off) || !others_are_rounded(tensor, &RoundedRow::unlike)) return {};
    constexpr const char* elsewhere =
        "; the other weights were rounded to nearest; quantize it anew, or give the base it was made from";
    if (another_size)
      return concat(printable(tensor.name), ": holds ", fixed(tensor.limit->gain(), 3),
                    " of what rounding to nearest leaves of the base's: ", "its scales are of another size", elsewhere);
    return concat(printable(tensor.name), ": column ", gains.column, " holds ", fixed(gains.column_gain, 2),
                  " of the base's: its codes are others'", elsewhere);
  }

  /// Of fewer bits rounding itself leaves sizes that differ. Trellises leave what has twice the levels.
  static int least_bits(const TensorError& tensor) {
    return tensor.scheme.starts_with("trellis") || tensor.scheme.starts_with("exl3") ? 3 : 4;
  }

  /// Spreads of rows: of one whose scales are others', and of sound ones.
  static constexpr double least_spread = 0.05, sound_spread = 0.01;

  std::string scale_fault_of(const TensorError& tensor) const {
    const double spread = tensor.limit->row_spread();
    if (spread < least_spread || tensor.limit->bits < least_bits(tensor)) return {};
    if (!others_are(tensor, [](const WeightLimit& limit) { return limit.row_spread() < sound_spread; })) return {};
    return concat(printable(tensor.name), ": rows would have to be multiplied by factors that differ by ",
                  fixed(100 * spread, 1),
                  " % from row to row to come nearest to the base's, those of the other weights ", "by less than ",
                  fixed(100 * sound_spread, 0), " %: scales of other rows");
  }

  /// More than this was rounded in another way.
  static constexpr double most_share = 0.02;
  static constexpr size_t least_peers = 6;

  /// Whether a tensor's factor is stored as what block scales are divided by is no matter of rounding, and seen only of factors
  /// that are no powers of two.
  static std::string_view kin_of(std::string_view scheme) {
    constexpr std::string_view divided = "-div";
    return scheme.ends_with(divided) ? scheme.substr(0, scheme.size() - divided.size()) : scheme;
  }

  static std::string role_of(const std::string& name) { return name.substr(name.rfind('.') + 1); }

  bool others_are_rounded(const TensorError& tensor, int64_t RoundedRow::*what) const {
    return others_are(tensor, [&](const WeightLimit& limit) { return limit.count(what) == 0; });
  }

  /// Whether nearly all others of this scheme, and most of this role, are so, and where scales were folded into it, of those
  /// with folded scales, too: what these are is known to the rounding of a norm, so that codes are off in such layers alone.
  /// Those whose rows were measured are not asked, for nothing is said of their codes.
  bool others_are(const TensorError& tensor, const std::function<bool(const WeightLimit&)>& is_sound) const {
    return most_are(tensor, false, is_sound) && (!tensor.folded || most_are(tensor, true, is_sound));
  }

  bool most_are(const TensorError& tensor, bool folded, const std::function<bool(const WeightLimit&)>& is_sound) const {
    size_t peers = 0, sound = 0, alike = 0, sound_alike = 0;
    for (const TensorError& other : report_.tensors) {
      if (&other == &tensor || !other.limit || kin_of(other.scheme) != kin_of(tensor.scheme)) continue;
      if (other.limit->measured || (folded && !other.folded)) continue;
      const bool holds = is_sound(*other.limit), like = role_of(other.name) == role_of(tensor.name);
      ++peers, sound += holds, alike += like, sound_alike += like && holds;
    }
    return peers >= least_peers && 10 * sound >= 9 * peers && 2 * sound_alike > alike;
  }

  const WeightReport& report_;
};

/// What the ladder says of it.
std::string summary(const WeightReport& report) {
  const TensorError* nearest = nullptr;
  size_t judged = 0;
  for (const auto& tensor : report.tensors) {
    if (!tensor.limit) continue;
    ++judged;
    if (nearest == nullptr || tensor.limit->margin() < nearest->limit->margin()) nearest = &tensor;
  }
  std::string text =
      concat("SQNR ", fixed(report.total.sqnr(), 2), " dB over ", report.tensors.size(), " packed weights");
  if (judged < report.tensors.size()) text += concat("; ", report.tensors.size() - judged, " have no limit");
  if (nearest == nullptr) return text;
  return text + concat("; nearest to its limit: ", printable(nearest->name), ", ", fixed(nearest->limit->sqnr(), 2),
                       " dB, floor ", fixed(nearest->limit->floor(), 2));
}

/// A bit of a norm that turned is no folding.
bool are_many(const Units& units) {
  constexpr std::ptrdiff_t few = 16;
  const auto changed = std::ranges::count_if(units.cols, [](float unit) { return std::abs(unit - 1) > 1e-3f; });
  return !units.rows.empty() || few * changed > std::ssize(units.cols);
}

/// "model.layers.3.mlp.experts.5.up_proj" → "model.layers..mlp.experts..up_proj".
std::string without_numbers(std::string name) {
  std::erase_if(name, [](char c) { return c >= '0' && c <= '9'; });
  return name;
}

/// Every packed linear beside the base's: errors of one after the other, each on all threads, and what rounding would leave
/// of some rows of many at once.
class BaseComparison {
 public:
  BaseComparison(const model::OpenedModel& candidate, const model::OpenedModel& base)
      : candidate_(candidate), base_(base), weights_(candidate, base) {
    // Of an architecture that is not known nobody can tell what another program's norms gave their factors to.
    const bool foreign = quantization().dialect != nullptr && candidate.config.architecture == nullptr;
    if (foreign) unknown_ = layers_of_other_norms(candidate, base);
  }

  WeightReport run() {
    report_.norms = norms_not_carried(candidate_, base_);
    Progress progress("weights", static_cast<int64_t>(quantization().linears.size()), "tensors");
    std::vector<Held> batch;
    int64_t held = 0;
    const auto finish = [&] {
      judge(batch);
      progress.advance(std::ssize(batch));
      batch.clear(), held = 0;
    };
    for (const auto& [name, info] : quantization().linears) {
      if (!in_base(name)) {
        (is_named_otherwise(name) ? report_.not_in_base : report_.extra).push_back(name);
        continue;
      }
      batch.push_back(measured(name, info));
      held += batch.back().values;
      if (held >= most_held || std::ssize(batch) >= batches_of_threads * threads()) finish();
    }
    finish();
    return std::move(report_);
  }

 private:
  struct Held {
    std::string name, scheme;
    Units units;
    int64_t values = 0;
    model::WeightError error;
    std::vector<int64_t> loudest;  ///< rows
    std::optional<std::string> streams = {};
  };
  /// Weights that are looked at side by side: some are unpacked for it.
  static constexpr int64_t most_held = int64_t{1} << 28;
  static constexpr int64_t batches_of_threads = 4;

  const checkpoint::QuantizationConfig& quantization() const { return candidate_.folder.quantization; }

  bool in_base(const std::string& name) const {
    return base_.folder.tensors.contains(name + ".weight") || base_.folder.quantization.find(name) != nullptr;
  }

  /// Experts each program names as it likes: none of what this one is called is in the base.
  bool is_named_otherwise(const std::string& name) {
    if (name.find(".experts.") == std::string::npos) return false;
    if (roles_.empty()) {
      for (const auto& [other, info] : quantization().linears) roles_[without_numbers(other)] |= in_base(other);
    }
    return !roles_[without_numbers(name)];
  }

  Held measured(const std::string& name, const checkpoint::PackedLinearInfo& info) {
    const auto wanted = stored_weight(base_.folder, name);
    std::vector<model::WeightError> rows;
    const auto error = model::compare_weights(wanted, weights_.effective(name), &rows);
    Held held{name, scheme_text(info), weights_.units(name), wanted.n * wanted.k, error, loudest_errors(rows)};
    if (formats::shares_bits(info.passes.front().scheme))
      held.streams = stream_fault_of(wanted, stored_weight(candidate_.folder, name), held.units,
                                     was_moved(candidate_.folder, name));
    return held;
  }

  std::optional<WeightLimit> limit_behind(const Held& held, const Units& units) const {
    return limit_of(stored_weight(base_.folder, held.name), stored_weight(candidate_.folder, held.name), units,
                    held.loudest, was_moved(candidate_.folder, held.name));
  }

  void judge(const std::vector<Held>& batch) {
    auto limits = parallel_results(batch, [&](const Held& held) {
      const bool judged = !unknown_.contains(model::layer_numbers(held.name).layer);
      return judged ? limit_behind(held, held.units) : std::nullopt;
    });
    for (size_t i = 0; i < batch.size(); ++i) {
      const Held& held = batch[i];
      if (limits[i]) count_off_behind_rows(*limits[i], held);
      if (!held.units.cols.empty()) ++report_.rescaled;
      report_.tensors.push_back(
          {held.name, held.scheme, held.error, std::move(limits[i]), are_many(held.units), held.streams});
      report_.total.add(held.error);
    }
  }

  /// Scales that hardly differ from one leave no trace but codes that are the nearest behind them. Where more are off than such
  /// scales can have moved, errors were fed back.
  void count_off_behind_rows(WeightLimit& limit, const Held& held) {
    constexpr double most_moved = 0.1;
    const auto off = static_cast<double>(limit.count(&RoundedRow::off));
    if (off == 0 || off > most_moved * static_cast<double>(limit.values)) return;
    const auto units = weights_.measured_units(held.name);
    if (!units) return;
    const auto behind = limit_behind(held, *units);
    if (!behind || behind->rows.size() != limit.rows.size()) return;
    for (size_t i = 0; i < limit.rows.size(); ++i) {
      if (behind->rows[i].off >= limit.rows[i].off) continue;
      limit.rows[i].off = behind->rows[i].off, limit.rows[i].first_off = behind->rows[i].first_off;
    }
  }

  const model::OpenedModel& candidate_;
  const model::OpenedModel& base_;
  RescaledWeights weights_;
  std::map<std::string, bool> roles_;  ///< of linears, by their names without numbers: whether the base has any
  std::set<int64_t> unknown_;          ///< layers of whose norms nobody knows who reads them
  WeightReport report_;
};

}  // namespace

WeightReport compare_with_base(const model::OpenedModel& candidate, const model::OpenedModel& base) {
  return BaseComparison(candidate, base).run();
}

std::vector<std::string> faults_of(const WeightReport& report) {
  std::vector<std::string> faults = report.norms;
  for (const auto& name : report.extra) faults.push_back(concat(printable(name), ": the base has no such weight"));
  const RoundingJudge judge(report);
  for (const auto& tensor : report.tensors) {
    if (!tensor.limit) continue;
    if (is_another_weight(tensor)) {
      faults.push_back(fault_of(tensor));
    } else if (auto fault = judge.fault_of(tensor); !fault.empty()) {
      faults.push_back(std::move(fault));
    }
  }
  return faults;
}

namespace {

/// "3 packed experts are not held against the base, which has nothing of their names: a, b and 1 more".
std::string not_in_base_text(const WeightReport& report) {
  constexpr size_t most = 3;
  const auto& names = report.not_in_base;
  std::vector<std::string> first;
  for (size_t i = 0; i < std::min(most, names.size()); ++i) first.push_back(printable(names[i]));
  return concat(names.size(),
                " packed experts are not held against the base, which has nothing of their names: ", join(first),
                names.size() > most ? concat(" and ", names.size() - most, " more") : "");
}

std::string tensors_text(const WeightReport& report, model::Detail detail) {
  TextTable table({"packed weight", "scheme", "SQNR dB", "relative error", "max error", "at row", "column"});
  for (const TensorError* tensor :
       model::named_rows(report.tensors, detail, [](const TensorError& row) { return row.error.sqnr(); })) {
    table.row({printable(tensor->name), tensor->scheme, fixed(tensor->error.sqnr(), 2),
               fixed(tensor->error.relative(), 5), fixed(tensor->error.max_error, 6), concat(tensor->error.row),
               concat(tensor->error.col)});
  }
  return table.str();
}

std::string kinds_text(const WeightReport& report) {
  std::vector<std::string> head{"linear", "count", "scheme"};
  std::ranges::copy(model::KindError::head(), std::back_inserter(head));
  TextTable table(head);
  for (const auto& kind : model::by_kind(report.tensors)) {
    std::set<std::string> schemes;
    model::KindError error;
    for (const TensorError* tensor : kind.rows) {
      schemes.insert(tensor->scheme);
      error.add(tensor->error);
    }
    std::vector<std::string> row{printable(kind.name), concat(kind.rows.size()), model::words_text(schemes)};
    std::ranges::copy(error.cells(), std::back_inserter(row));
    table.row(row);
  }
  return table.str();
}

}  // namespace

std::string to_text(const WeightReport& report, model::Detail detail) {
  const bool all = model::names_all(detail, report.tensors.size());
  std::string text = all ? "" : concat(kinds_text(report), "\nthe worst of them (--verbose: all)\n");
  text += tensors_text(report, detail);
  if (report.rescaled == 0) return text;
  return text + concat("folded scales were undone in ", report.rescaled, " of them\n");
}

io::Json to_json(const WeightReport& report) {
  io::Json tensors = io::Json::array();
  for (const auto& tensor : report.tensors) {
    io::Json limit;
    if (tensor.limit) {
      const double noise = tensor.limit->rounded_noise;
      double row = 0;
      for (const RoundedRow& each : tensor.limit->rows) {
        if (each.rounded_noise > 0) row = std::max(row, each.noise / each.rounded_noise);
      }
      limit = {{"sqnr_db", tensor.limit->sqnr()},
               {"floor_db", tensor.limit->floor()},
               {"margin_db", tensor.limit->margin()},
               {"noise_over_rounding", noise > 0 ? tensor.limit->noise / noise : 0},
               {"noise_limit", tensor.limit->most()},
               {"gain", tensor.limit->gain()},
               {"gain_limits", {least_gain, most_gain}},
               {"worst_row_over_rounding", row},
               {"codes_not_nearest", tensor.limit->count(&RoundedRow::off)},
               {"values_not_rounded", tensor.limit->count(&RoundedRow::unlike)},
               {"row_limit", tensor.limit->bits < 4 ? io::Json() : io::Json(most_row_noise)},
               {"passed", tensor.limit->holds() && tensor.limit->worst_row() == nullptr}};
    }
    tensors.push_back({{"name", tensor.name},
                       {"limit", std::move(limit)},
                       {"scheme", tensor.scheme},
                       {"sqnr_db", tensor.error.sqnr()},
                       {"relative_error", tensor.error.relative()},
                       {"max_error", tensor.error.max_error},
                       {"row", tensor.error.row},
                       {"column", tensor.error.col}});
  }
  return {{"rescaled", report.rescaled},
          {"sqnr_db", report.total.sqnr()},
          {"relative_error", report.total.relative()},
          {"tensors", std::move(tensors)}};
}

CheckRow weights_check() {
  static constexpr Limit limits[] = {{"--min-sqnr", "Fail when the SQNR of the packed weights (dB) is less", true}};
  return {.name = "weights",
          .help = "how far each packed weight is from the base's",
          .limits = limits,
          .needs = {.base = true, .packed = true},
          .run = [](CheckContext& context, Findings& findings) {
            const auto report = compare_with_base(context.candidate(), context.base());
            if (!report.not_in_base.empty()) findings.note(not_in_base_text(report));
            findings.add("weights", to_text(report, context.options().detail), to_json(report));
            const double sqnr = report.total.sqnr();
            auto faults = context.options().default_limits ? faults_of(report) : std::vector<std::string>{};
            if (report.tensors.empty())
              faults.emplace_back("none of them is in the base: give the one it was made from");
            Check check{"weights", !std::isnan(sqnr) && faults.empty(), summary(report), std::move(faults)};
            for (const auto& tensor : report.tensors) {
              if (!tensor.limit || !context.options().default_limits) continue;
              check.verdicts.push_back(
                  {concat("SQNR of ", tensor.name), tensor.limit->sqnr(), tensor.limit->floor(), true});
            }
            findings.checks.add(std::move(check));
            if (const auto least = context.limit("--min-sqnr")) {
              findings.checks.add_threshold("SQNR", sqnr, *least, true);
            }
          }};
}

}  // namespace w4q::verify
