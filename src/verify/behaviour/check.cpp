// What a model says of a short text, as its tensors are read and as they might have been meant. Another reading is a fault
// only where it explains the text by far better, and better than leaving the block out does: whatever few bits, folded
// scales or pruning do to a block, another order of its rows does not undo it.
#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <numeric>

#include "core/error.h"
#include "core/text.h"
#include "tokenizer/tokenizer.h"
#include "verify/behaviour/global.h"
#include "verify/behaviour/readings.h"
#include "verify/behaviour/text.h"
#include "verify/rungs.h"

namespace w4q::verify::behaviour {
namespace {

/// Of the text, and of the model: what is larger is not decoded in passing.
constexpr int64_t most_tokens = 128, least_tokens = 48, most_weights = int64_t{1} << 25;
/// What another reading has to be better by, in nats a token and in standard errors of the paired differences.
constexpr double least_gain = 0.15, least_errors = 5;
/// Of the loss of a uniform guess: what a reading must reach, or nothing says that the model knows the text at all.
constexpr double most_of_uniform = 0.5;
/// A block is too loud by itself only where no other one is by a third as much: few bits make many so.
constexpr double most_of_others = 1.0 / 3;
/// So many readings, those that gradients promise most of, are run to the end.
constexpr size_t most_run = 10, most_orders = 3;
/// Of the text, what is read first: a reading that makes that worse by as much is none for the rest of it either.
constexpr int64_t first_tokens = 32;
/// Training leaves hardly a slope (0.25 nats and less in models that were, 4 bits included): where a block is not what it
/// was, the loss rises or falls with what it adds. So only blocks with a slope are read otherwise, a quarter of them where
/// there are many, and the whole model only where one is steep.
constexpr double least_slope = 0.05, steep = 0.3;
constexpr size_t few_places = 4;

struct Candidate {
  size_t place = 0;
  double promised = 0;  ///< change of the loss, to first order
  BlockReading reading;
};

/// Σ a · b, elementwise.
double product_of(const Activations& a, const Activations& b) {
  return std::inner_product(a.values.begin(), a.values.end(), b.values.begin(), 0.0, std::plus(),
                            [](double x, double y) { return x * y; });
}

double size_of(const Activations& x) { return std::sqrt(product_of(x, x)); }

/// What readings of a block are held against, and its size.
class Promise {
 public:
  Promise(const Passage& passage, size_t place)
      : around_(passage.around(place)), added_(size_of(around_.added)), inner_(size_of(around_.inner)) {}

  /// Change of the loss, to first order. A change of more than twice what stands there is promised more than it can be:
  /// the loss bends upwards.
  double of(const BlockReading& reading) const {
    const bool is_inner = !reading.inner.empty();
    const Moved moved = is_inner ? moved_along(around_.by_inner, reading.inner, around_.inner)
                                 : moved_along(around_.by_added, reading.added, around_.added);
    const double stretch = std::sqrt(moved.squares) / std::max(2 * (is_inner ? inner_ : added_), 1e-30);
    return moved.product / static_cast<double>(around_.before.rows - 1) / std::max(1.0, stretch * stretch);
  }

 private:
  struct Moved {
    double product = 0, squares = 0;
  };
  /// Σ by · (to − from) and Σ (to − from)², elementwise.
  static Moved moved_along(const Activations& by, const Activations& to, const Activations& from) {
    Moved moved;
    for (size_t i = 0; i < to.values.size(); ++i) {
      const double change = double{to.values[i]} - double{from.values[i]};
      moved.product += double{by.values[i]} * change;
      moved.squares += change * change;
    }
    return moved;
  }

  const Passage::Around& around_;
  const double added_, inner_;
};

/// How much the loss grows with what each block adds.
std::vector<double> slopes_of(const Passage& passage) {
  std::vector<double> slopes;
  for (size_t place = 0; place < passage.places(); ++place) {
    const auto& around = passage.around(place);
    slopes.push_back(product_of(around.by_added, around.added) / static_cast<double>(around.added.rows - 1));
  }
  return slopes;
}

/// The places of blocks with a slope, the steepest first.
std::vector<size_t> places_by(const std::vector<double>& slopes) {
  std::vector<size_t> places;
  for (size_t place = 0; place < slopes.size(); ++place) {
    if (std::abs(slopes[place]) >= least_slope) places.push_back(place);
  }
  std::ranges::sort(places, std::greater(), [&](size_t place) { return std::abs(slopes[place]); });
  const size_t most = std::max(few_places, slopes.size() / 4);
  if (places.size() > most) places.resize(most);
  return places;
}

/// Of each of these blocks the best: some other orders, and one size.
std::vector<Candidate> candidates_of(Passage& passage, const std::vector<size_t>& places) {
  std::vector<Candidate> found;
  for (const size_t place : places) {
    const Promise promise(passage, place);
    std::vector<Candidate> best[2];
    for_each_reading(passage, place, [&](BlockReading reading) {
      const double promised = promise.of(reading);
      const bool is_order = reading.kind == ReadingKind::order;
      auto& kept = best[is_order ? 0 : 1];
      if (promised >= 0) return;
      kept.push_back({place, promised, std::move(reading)});
      std::ranges::sort(kept, {}, &Candidate::promised);
      if (kept.size() > (is_order ? most_orders : 1)) kept.pop_back();
    });
    for (auto& each : best) std::ranges::move(each, std::back_inserter(found));
  }
  std::ranges::sort(found, {}, &Candidate::promised);
  if (found.size() > most_run) found.resize(most_run);
  return found;
}

class Judge {
 public:
  Judge(Passage& passage, double uniform, const std::vector<double>& slopes)
      : passage_(passage), uniform_(uniform), slopes_(slopes) {}

  void hear(const Candidate& candidate) {
    const Activations added = candidate.reading.inner.empty()
                                  ? candidate.reading.added
                                  : passage_.added_from(candidate.place, candidate.reading.inner);
    const Change at_first = change_of(passage_.losses(), passage_.losses_with(candidate.place, added, first_tokens));
    if (at_first.mean >= least_gain) return;
    const Change change = change_of(passage_.losses(), passage_.losses_with(candidate.place, added));
    const bool is_size = candidate.reading.kind == ReadingKind::size;
    bool convinces = is_better(change) && (!is_size || stands_out(candidate.place));
    if (convinces) {
      const Activations nothing(added.rows, added.cols);
      const Change without = change_of(passage_.losses(), passage_.losses_with(candidate.place, nothing));
      convinces = change.mean <= without.mean - least_gain;
    }
    tell({candidate.reading.what, change, is_size}, convinces);
  }

  void hear(const GlobalReading& reading) {
    Passage other(reading.reader, reading.ids);
    other.run();
    const Change change = change_of(passage_.losses(), other.losses());
    tell({reading.what, change, false}, is_better(change));
  }

  io::Json json() const {
    return {{"loss", mean_of(passage_.losses())}, {"uniform", uniform_}, {"slopes", slopes_}, {"readings", readings_}};
  }
  /// The best reading: of sizes only where no other order convinces, for a block that is read wrongly is too loud as well.
  std::vector<std::string> faults() const {
    const auto best = std::ranges::min_element(
        convincing_, {}, [](const Heard& heard) { return std::pair(heard.is_size, heard.change.mean); });
    if (best == convincing_.end()) return {};
    const double loss = mean_of(passage_.losses());
    return {concat(best->what, ", it seems: a short text has a loss of ", fixed(loss, 2),
                   " nats a token as it stands, ", fixed(loss + best->change.mean, 2), " read otherwise (",
                   fixed(-best->change.errors, 0), " standard errors)")};
  }

 private:
  bool is_better(const Change& change) const {
    const double reached = mean_of(passage_.losses()) + change.mean;
    return change.mean <= -least_gain && change.errors <= -least_errors && reached <= most_of_uniform * uniform_;
  }
  bool stands_out(size_t place) const {
    for (size_t other = 0; other < slopes_.size(); ++other) {
      if (other != place && slopes_[other] > most_of_others * slopes_[place]) return false;
    }
    return true;
  }
  struct Heard {
    std::string what;
    Change change;
    bool is_size = false;
  };
  void tell(Heard heard, bool convinces) {
    readings_.push_back({{"what", heard.what}, {"change", heard.change.mean}, {"errors", heard.change.errors}});
    if (convinces) convincing_.push_back(std::move(heard));
  }

  Passage& passage_;
  const double uniform_;
  const std::vector<double>& slopes_;
  io::Json readings_ = io::Json::array();
  std::vector<Heard> convincing_;
};

int64_t weights_of(const model::OpenedModel& model) {
  int64_t weights = 0;
  for (const auto& parameter : model::parameters(model)) weights += element_count(parameter.shape);
  return weights;
}

/// Nothing where there is no tokenizer that w4q reads, or its ids are not the model's.
std::vector<int32_t> ids_of(const CheckOptions& options, const model::ModelConfig& config) {
  try {
    auto ids = tokenizer::Tokenizer::open(options.model).encode(plain_text(), true);
    const auto most = std::min(most_tokens, model::most_positions(config).value_or(most_tokens));
    if (std::ssize(ids) > most) ids.resize(static_cast<size_t>(most));
    const bool known = std::ranges::all_of(ids, [&](int32_t id) { return id >= 0 && id < config.vocab_size; });
    return known && std::ssize(ids) >= least_tokens ? ids : std::vector<int32_t>{};
  } catch (const Error&) {  // the rung of tokenizers has said what there is to say
    return {};
  }
}

bool are_finite(const Losses& losses) {
  return std::ranges::all_of(losses, [](double loss) { return std::isfinite(loss); });
}

void check(CheckContext& context, Findings& findings) {
  const Reader reader(context.model());
  const auto ids = ids_of(context.options(), reader.config);
  if (ids.empty()) return;
  Passage passage(reader, ids);
  passage.run();
  if (!are_finite(passage.losses())) return;
  passage.back();
  const std::vector<double> slopes = slopes_of(passage);
  Judge judge(passage, std::log(static_cast<double>(reader.config.vocab_size)), slopes);
  for (const Candidate& candidate : candidates_of(passage, places_by(slopes))) judge.hear(candidate);
  if (std::ranges::any_of(slopes, [](double slope) { return std::abs(slope) >= steep; })) {
    for_each_global_reading(reader, ids, [&](const GlobalReading& reading) { judge.hear(reading); });
  }
  findings.json["behaviour"] = judge.json();
  if (judge.faults().empty()) return;
  findings.checks.add({"behaviour", false, "a text is far more likely as these may have been meant", judge.faults()});
}

/// With a base, weights are held against it; where something is wrong already, it is named better than by this.
void run(CheckContext& context, Findings& findings) {
  if (context.holds_base() || !findings.checks.passed()) return;
  const model::OpenedModel& candidate = context.candidate();
  if (!obstacle_to_passage(candidate.config).empty() || weights_of(candidate) > most_weights) return;
  try {
    check(context, findings);
  } catch (const Error& error) {  // what cannot be decoded is no fault
    if (error.code() != ErrorCode::unsupported) throw;
  }
}

}  // namespace
}  // namespace w4q::verify::behaviour

namespace w4q::verify {

CheckRow behaviour_check() {
  return {.name = "behaviour", .help = "a short text is most likely as the tensors are read", .run = behaviour::run};
}

}  // namespace w4q::verify
