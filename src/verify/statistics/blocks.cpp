#include "verify/statistics/blocks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "core/text.h"
#include "model/parameters.h"
#include "verify/median.h"

namespace w4q::verify {
namespace {

using formats::PackedWeight;

/// A scale that is too small, as a logarithm; one that is too large by so much at least, as a bit of an exponent makes it
/// (16 times): by 10 times.
constexpr double least_quiet = 9, least_turned = 2.3;

/// BlockSample::kurtosis below which codes are spread evenly.
constexpr double most_even_kurtosis = 2.2;

/// Slopes below which scales may stand in another order.
constexpr double unsure_match = 0.4;

}  // namespace

BlockFigures figures_of(const PackedWeight& canonical) {
  BlockFigures figures;
  const BlockSample sample(canonical);
  if (!sample.readable()) return figures;
  figures.blocks = sample.blocks();
  figures.empty = sample.empty_blocks();
  figures.constant = sample.constant_blocks();
  figures.constant_rows = sample.constant_rows();
  figures.lone_constant = sample.lone_constant_blocks();
  figures.endless = sample.endless_blocks();
  figures.table = sample.table();
  figures.histogram = sample.histogram();
  figures.mean_step = sample.mean_step();
  // Of a weight that is nothing but one code, as those of layers that were added and not yet trained, none counts.
  const bool counted = std::ranges::any_of(figures.histogram, [](double share) { return share > 0; });
  figures.codes = counted ? static_cast<double>(sample.rows() * canonical.k) : 0;
  if (sample.by_largest()) figures.loudest = sample.loudest(), figures.loudest_values = sample.loudest_values(1);
  if (sample.by_largest()) figures.quietest_values = sample.loudest_values(-1);
  figures.negative = sample.negative_scales();
  figures.scales = sample.scales();
  figures.one_value = sample.one_value_blocks();
  figures.far_zeros = sample.far_zeros();
  figures.near_one = sample.scales_near_one();
  figures.ends = sample.ends_over_middle();
  figures.light_tailed = sample.kurtosis() < most_even_kurtosis;
  figures.scale_spread = sample.scale_spread();
  figures.size = sample.size();
  figures.unscaled = sample.unscaled();
  if (!sample.by_largest()) figures.spread = sample.spread();
  // Of blocks that are nearly the same in all rows no relation is known.
  if (sample.rows_are_alike()) return figures;
  figures.even_zeros = sample.even_zeros();
  figures.match = sample.scale_match();
  // Where they follow as stored, no other order is asked.
  if (figures.match.value < unsure_match) figures.reordered = sample.best_order();
  figures.zeros = sample.zero_match();
  return figures;
}

namespace {

/// Beyond chance: a model has thousands of weights, and none may look wrong by chance.
constexpr double beyond_chance = 5;
/// What is unrelated is nothing, give or take so many standard errors.
constexpr double nothing_within = 4;
/// Slopes of sound weights are 0.7 and more where weights spread as those of models do; those of weights of a few
/// values are anything, but then in all of the model.
constexpr double sound_match = 0.5;
/// Sound zeros: 0.85 and more.
constexpr double sound_zeros = 0.7;
/// Sound norms: 0.6 and more with 2 bits, 2.5 and more with 4.
constexpr double sound_norms = 0.5, least_norms = 0.35;
/// Scales that hardly differ say nothing.
constexpr double least_scale_spread = 0.05;
/// Of blocks whose codes are all the same; and a scale that stands out, in standard deviations and as a logarithm over
/// the next one.
/// Mean codes: so many steps from the median of the others, and so many times as far as nearly all of them.
constexpr double least_steps = 0.5, times_steps = 8;
/// Of which not one is so: fewer prove nothing.
constexpr int64_t many_blocks = 1024;
constexpr double many_constant = 0.05, least_step = 1;
constexpr int64_t few_negative = 4;
constexpr double nearly_all_scales = 0.99;
/// Weights of models are of 0.001 to 1; scales upside down put them far away.
constexpr double largest_size = 50, far = 100;
/// The slope of scales that are inverted is −1.
constexpr double upside_down = -0.4;
/// Mean squares: of sound codes the ends are five times as far from the middle as the codes are.
constexpr double ends_over_middle = 2.5;
/// Others to be compared with, and the share of them that is as sound weights are.
constexpr size_t least_peers = 6, least_alike = 2;
constexpr double most_peers = 0.9;

double log_spread(const BlockFigures& figures) {
  return figures.spread.blocks > 0 && figures.spread.stored > 0 && figures.spread.mixed > 0
             ? std::log(figures.spread.mixed / figures.spread.stored)
             : 0;
}
double spread_error(const BlockFigures& figures) { return std::sqrt(4 / std::max(1.0, figures.spread.blocks)); }

/// What all linears say of one: a relation that nearly all others have.
class BlockJudge {
 public:
  explicit BlockJudge(std::span<const BlockSubject> all) : all_(all) {
    for (const BlockSubject& subject : all) places_.push_back(model::layer_numbers(subject.name));
  }

  std::vector<std::string> faults(const BlockSubject& subject) const {
    const BlockFigures& figures = subject.figures;
    std::vector<std::string> faults;
    if (figures.empty > 0) {
      faults.push_back(
          concat("scales of zero in ", figures.empty, " of ", figures.blocks, " blocks whose codes differ"));
    }
    for (const auto rule :
         {&BlockJudge::size_fault, &BlockJudge::even_fault, &BlockJudge::squared_fault, &BlockJudge::offset_fault,
          &BlockJudge::constant_fault, &BlockJudge::lone_fault, &BlockJudge::table_fault, &BlockJudge::histogram_fault,
          &BlockJudge::step_fault, &BlockJudge::loud_fault, &BlockJudge::quiet_fault, &BlockJudge::sign_fault,
          &BlockJudge::label_fault, &BlockJudge::order_fault, &BlockJudge::match_fault, &BlockJudge::norm_fault,
          &BlockJudge::zero_fault}) {
      if (auto fault = (this->*rule)(subject); !fault.empty()) return faults.push_back(std::move(fault)), faults;
    }
    for (const auto rule : {even_zeros_fault, far_zeros_fault}) {
      if (auto fault = rule(subject); !fault.empty()) return faults.push_back(std::move(fault)), faults;
    }
    return faults;
  }

 private:
  /// Whether both are experts of one mixture, which may all be wrong.
  bool share_mixture(const BlockSubject& subject, const BlockSubject& other) const {
    const auto &one = places_[static_cast<size_t>(&subject - all_.data())],
               &two = places_[static_cast<size_t>(&other - all_.data())];
    return one.expert >= 0 && two.expert >= 0 && one.layer == two.layer;
  }

  /// Whether nearly all others of this scheme, and all of this role, are so; of an expert those of other mixtures, where
  /// there are several.
  bool others_are(const BlockSubject& subject, const std::function<bool(const BlockFigures&)>& sound) const {
    return others_are(subject, sound, false) || others_are(subject, sound, true);
  }
  bool others_are(const BlockSubject& subject, const std::function<bool(const BlockFigures&)>& sound,
                  bool elsewhere) const {
    size_t peers = 0, like = 0, same = 0, same_like = 0;
    for (const BlockSubject& other : all_) {
      if (&other == &subject || other.scheme != subject.scheme || other.figures.blocks == 0) continue;
      if (elsewhere && share_mixture(subject, other)) continue;
      const bool holds = sound(other.figures), alike = other.role == subject.role;
      ++peers, like += holds, same += alike, same_like += alike && holds;
    }
    return peers >= least_peers && static_cast<double>(like) >= most_peers * static_cast<double>(peers) &&
           static_cast<double>(same_like) > 0.5 * static_cast<double>(same);
  }

  /// Codes that have a share worth the name.
  static auto codes_in_use(const BlockFigures& figures) {
    return std::ranges::count_if(figures.histogram, [](double share) { return share > 0.002; });
  }

  /// Of integers, whose scales alone say how large weights are.
  std::string size_fault(const BlockSubject& subject) const {
    const BlockFigures& figures = subject.figures;
    if (!subject.scheme.starts_with("int") || figures.blocks < 64) return {};
    if (figures.unscaled && codes_in_use(figures) > 4) return "all its scales are one: they were never loaded";
    std::vector<double> others;
    for (const BlockSubject& other : all_) {
      if (&other != &subject && other.scheme == subject.scheme && other.figures.size > 0)
        others.push_back(other.figures.size);
    }
    const double usual = others.size() >= least_peers ? median(std::move(others)) : 0;
    const bool apart = usual > 0 && figures.size > 0 && (figures.size > far * usual || figures.size * far < usual);
    if (!apart && figures.size < largest_size) return {};
    // Sound rows are as far apart where scales were folded into them, and new layers write next to nothing: scales upside
    // down follow from their codes the other way round.
    const auto [slope, error] = figures.match;
    if (!(error > 0) || slope + beyond_chance * error > upside_down) return {};
    return concat("decodes to weights of the size ", figures.size,
                  apart ? concat(", those of the others have ", usual) : std::string(),
                  ", and its scales follow from its codes by ", fixed(slope, 2),
                  ", sound ones by 1: they are inverted");
  }

  /// The same where zero points say what codes lie around: of codes that are all in use, those of a group lie at the ends
  /// of their range. Weights of a few values do, too, but then few codes are in use.
  static std::string turned_fault(const BlockSubject& subject) {
    const auto& shares = subject.figures.histogram;
    if (shares.size() < 16 || subject.figures.codes < 4096 || subject.figures.ends < ends_over_middle) return {};
    const auto looked_at = static_cast<std::ptrdiff_t>(std::min<size_t>(shares.size(), 64));
    if (8 * codes_in_use(subject.figures) < 7 * looked_at) return {};
    return concat("codes of a group are at the ends of their range: they vary by ",
                  fixed(std::sqrt(subject.figures.ends), 1),
                  " times as much as with their highest bit turned: signed codes beside zero points of unsigned ones");
  }

  /// Codes around the middle that were stored around zero, in two's complement: they are at both ends then.
  std::string offset_fault(const BlockSubject& subject) const {
    const auto& shares = subject.figures.histogram;
    if (!subject.scheme.starts_with("int")) return {};
    if (subject.scheme.find("asym") != std::string::npos) return turned_fault(subject);
    if (shares.size() < 16 || subject.figures.codes < 4096) return {};
    if (2 * codes_in_use(subject.figures) < static_cast<std::ptrdiff_t>(std::min<size_t>(shares.size(), 64))) return {};
    const auto middle = static_cast<double>(shares.size() / 2);
    double stored = 0, turned = 0;
    for (size_t code = 0; code < shares.size(); ++code) {
      const auto at = static_cast<double>(code), other = static_cast<double>(code ^ shares.size() / 2);
      stored += shares[code] * (at - middle) * (at - middle),
          turned += shares[code] * (other - middle) * (other - middle);
    }
    if (stored < ends_over_middle * turned) return {};
    return concat("codes are at the ends of their range, ", fixed(std::sqrt(stored), 1),
                  " steps from the middle, with their highest bit turned ", fixed(std::sqrt(turned), 1),
                  ": signed codes read as unsigned ones, or the other way round");
  }

  /// Half the sum of differences of shares.
  static double distance(std::span<const double> a, std::span<const double> b) {
    double sum = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) sum += std::abs(a[i] - b[i]);
    return sum / 2;
  }

  /// Codes whose bits stand in another order, or of which one is turned, have the shares of all others once they are read
  /// so. Asked where weights agree so well that no sound one is as far off.
  static std::string bits_fault(std::span<const double> own, std::span<const double> usual, double found,
                                double nearly_all) {
    constexpr double least = 0.04, times_nearly_all = 2, times_better = 4;
    constexpr size_t most_codes = 16;
    if (own.size() > most_codes || own.size() < 8 || found < std::max(least, times_nearly_all * nearly_all)) return {};
    const auto bits = static_cast<size_t>(std::countr_zero(own.size()));
    std::vector<size_t> order(bits), best_order;
    std::iota(order.begin(), order.end(), size_t{0});
    std::vector<double> moved(own.size());
    double best = found;
    size_t best_turned = 0;
    do {
      for (size_t turned = 0; turned < own.size(); ++turned) {
        for (size_t code = 0; code < own.size(); ++code) {
          size_t read = 0;
          for (size_t bit = 0; bit < bits; ++bit) read |= (code >> bit & 1) << order[bit];
          moved[read ^ turned] = own[code];
        }
        if (const double here = distance(moved, usual); here < best)
          best = here, best_turned = turned, best_order = order;
      }
    } while (std::ranges::next_permutation(order).found);
    if (best_order.empty() || best * times_better > found || best > std::max(nearly_all, least / 2)) return {};
    const bool exchanged = !std::ranges::is_sorted(best_order);
    return concat("codes are as frequent as those of the other weights with their bits ",
                  exchanged ? "in another order" : concat("turned by ", best_turned), ": ", fixed(100 * found, 1),
                  " % stand elsewhere as stored, ", fixed(100 * best, 1), " % so");
  }

  /// The codes of each scheme have their shares, whatever the weights of a model are like.
  std::string histogram_fault(const BlockSubject& subject) const {
    const auto& own = subject.figures.histogram;
    if (own.empty() || std::ranges::max(own) > 0.9 || subject.figures.codes < 4096) return {};
    std::vector<double> usual(own.size());
    std::vector<const BlockSubject*> peers;
    for (const BlockSubject& other : all_) {
      if (&other != &subject && other.scheme == subject.scheme && other.figures.histogram.size() == own.size() &&
          other.figures.codes >= 4096) {
        peers.push_back(&other);
      }
    }
    if (peers.size() < least_peers) return {};
    std::vector<double> shares;
    for (size_t code = 0; code < own.size(); ++code) {
      shares.clear();
      for (const auto* peer : peers) shares.push_back(peer->figures.histogram[code]);
      usual[code] = median(shares);
    }
    // Weights of two and three values have as many codes: which ones, the last bit of a zero point decides.
    if (std::ranges::count_if(usual, [](double share) { return share > 0.01; }) <= 3) return {};
    const double found = distance(own, usual);
    std::vector<double> others;
    for (const auto* peer : peers) others.push_back(distance(peer->figures.histogram, usual));
    std::ranges::sort(others);
    const double nearly_all = others[static_cast<size_t>(most_peers * static_cast<double>(others.size() - 1))];
    if (std::string reading = bits_fault(own, usual, found, nearly_all); !reading.empty()) return reading;
    return lacking_fault(subject, usual);
  }

  /// A bit that all codes have, or none, where the others have it as often as not. Not the highest one of integers, which is
  /// a sign; how often codes stand where is otherwise anything, for scales were folded into one layer and not into another.
  static std::string lacking_fault(const BlockSubject& subject, std::span<const double> usual) {
    constexpr double next_to_none = 1e-4, as_often = 0.2;
    const auto& own = subject.figures.histogram;
    const auto bits = static_cast<size_t>(std::countr_zero(own.size()));
    const size_t looked_at = bits - (subject.scheme.starts_with("int") ? 1 : 0);
    for (size_t bit = 0; bit < looked_at; ++bit) {
      double with = 0, usual_with = 0;
      for (size_t code = 0; code < own.size(); ++code) {
        if ((code >> bit & 1) != 0) with += own[code], usual_with += usual[code];
      }
      const bool one_way = with < next_to_none || with > 1 - next_to_none;
      if (!one_way || usual_with < as_often || usual_with > 1 - as_often) continue;
      return concat("bit ", bit, " of its codes is ", with < 0.5 ? "never" : "always", " set, in the others in ",
                    fixed(100 * usual_with, 0), " % of the codes");
    }
    return {};
  }

  /// Weights lie around nothing: codes that are all one too high do not.
  std::string step_fault(const BlockSubject& subject) const {
    std::vector<double> others, same;
    for (const BlockSubject& other : all_) {
      if (&other == &subject || other.scheme != subject.scheme || other.figures.codes < 4096) continue;
      others.push_back(other.figures.mean_step);
      if (other.role == subject.role) same.push_back(other.figures.mean_step);
    }
    // Of more bits a step is too small a part of what weights differ by; codes of tables stand for no steps.
    constexpr size_t most_codes = 16;
    if (!subject.scheme.starts_with("int")) return {};
    if (others.size() < least_peers || subject.figures.codes < 4096) return {};
    if (subject.figures.histogram.size() > most_codes) return {};
    const double usual = median(others), found = subject.figures.mean_step - usual;
    for (double& other : others) other = std::abs(other - usual);
    std::ranges::sort(others);
    const double nearly_all = others[static_cast<size_t>(most_peers * static_cast<double>(others.size() - 1))];
    const auto as_far = [&](double other) { return std::abs(other - usual) > std::abs(found) / 3; };
    if (std::abs(found) < std::max(least_steps, times_steps * nearly_all) || std::ranges::any_of(same, as_far))
      return {};
    return concat("codes are ", fixed(std::abs(found), 2), " steps ", found > 0 ? "above" : "below",
                  " what they are around in the other weights, of which nearly all are within ", fixed(nearly_all, 2));
  }

  /// Weights of one value differ in no scale; of others 16 and more are one value, and not zero, by no chance.
  static std::string one_value_fault(const BlockSubject& subject) {
    constexpr int64_t fewest = 32;
    constexpr double least_share = 0.1;
    const BlockFigures& figures = subject.figures;
    if (figures.one_value < fewest || figures.scale_spread < least_scale_spread) return {};
    if (static_cast<double>(figures.one_value) < least_share * static_cast<double>(figures.blocks)) return {};
    return concat("all codes are the same, and stand for something other than zero, in ", figures.one_value, " of ",
                  figures.blocks, " blocks, although their scales differ: they were not written");
  }

  std::string constant_fault(const BlockSubject& subject) const {
    if (subject.figures.constant_rows > 0 &&
        others_are(subject, [](const auto& other) { return other.constant_rows == 0; })) {
      return concat(subject.figures.constant_rows,
                    " rows hold one and the same code throughout, although their scales "
                    "differ");
    }
    if (auto fault = one_value_fault(subject); !fault.empty()) return fault;
    const auto share = [](const BlockFigures& figures) {
      return static_cast<double>(figures.constant) / static_cast<double>(figures.blocks);
    };
    if (subject.figures.blocks < 64 || share(subject.figures) < many_constant) return {};
    if (!others_are(subject, [&](const auto& other) { return share(other) < many_constant / 20; })) return {};
    return concat("all codes are the same in ", subject.figures.constant, " of ", subject.figures.blocks,
                  " blocks, although their scales differ");
  }

  /// Whether there are peers, some of its role, and all of them are so: a recipe may treat a head otherwise.
  bool all_others_are(const BlockSubject& subject, const std::function<bool(const BlockFigures&)>& sound) const {
    size_t peers = 0, alike = 0;
    int64_t blocks = 0;
    for (const BlockSubject& other : all_) {
      if (&other == &subject || other.scheme != subject.scheme || other.figures.blocks == 0) continue;
      if (!sound(other.figures)) return false;
      ++peers, blocks += other.figures.blocks, alike += other.role == subject.role;
    }
    return peers >= least_peers && alike >= least_alike && blocks >= many_blocks;
  }

  /// What a few blocks have and none of the other weights.
  std::string lone_fault(const BlockSubject& subject) const {
    const BlockFigures& figures = subject.figures;
    const auto blocks = static_cast<double>(figures.blocks);
    // Low bits, pruned and small weights leave some; a page that was lost leaves more.
    constexpr int64_t least_constant = 32;
    if (figures.lone_constant >= least_constant &&
        static_cast<double>(figures.lone_constant) <= many_constant * blocks &&
        all_others_are(subject, [](const auto& other) { return other.lone_constant == 0; })) {
      return concat("all codes are the same in ", figures.lone_constant, " of ", figures.blocks,
                    " blocks, although their scales are as those of others; no block of another weight is so");
    }
    // Fed-back errors and scales that were searched leave one such block in 60,000 of sound weights (best, 4 bits, tiny).
    constexpr int64_t least_endless = 16;
    if (figures.endless < least_endless || static_cast<double>(figures.endless) > many_constant * blocks) return {};
    if (!all_others_are(subject, [](const auto& other) { return other.endless == 0; })) return {};
    return concat("no code is near the end of the table in ", figures.endless, " of ", figures.blocks,
                  " blocks; one does in every block of the other weights");
  }

  /// One table for all, but for one weight.
  std::string table_fault(const BlockSubject& subject) const {
    const auto& own = subject.figures.table;
    if (own.empty()) return {};
    const std::vector<float>* common = nullptr;
    for (const BlockSubject& other : all_) {
      if (&other == &subject || other.scheme != subject.scheme || other.figures.table.empty()) continue;
      if (common == nullptr) common = &other.figures.table;
      if (other.figures.table != *common) return {};
    }
    if (common == nullptr || *common == own) return {};
    if (!all_others_are(subject, [](const auto&) { return true; })) return {};
    const auto at = std::ranges::mismatch(own, *common).in1 - own.begin();
    // A table that was learned for one weight alone differs in more.
    size_t different = 0;
    for (size_t code = 0; code < std::min(own.size(), common->size()); ++code)
      different += own[code] != (*common)[code];
    if (different > 1) return {};
    return concat("entry ", at, " of its table is ", own[static_cast<size_t>(at)], ", in all other weights ",
                  (*common)[static_cast<size_t>(at)], " (largest: 1)");
  }

  static bool is_loud(const BlockSample::Loudest& loud) {
    return loud.spread > 0 && loud.above >= most_spreads * loud.spread && loud.above - loud.next >= least_step;
  }

  std::string loud_fault(const BlockSubject& subject) const {
    const bool by_scale = is_loud(subject.figures.loudest);
    const auto& loud = by_scale ? subject.figures.loudest : subject.figures.loudest_values;
    if (!by_scale && (!is_loud(loud) || loud.above < least_loud)) return {};
    if (loud.above < least_turned) return {};
    return concat("the scale of row ", loud.row, ", block ", loud.group, " is ", fixed(std::exp(loud.above), 1),
                  " times what its row and its place have (", fixed(loud.above / loud.spread, 0),
                  " standard deviations), the next one ", fixed(std::exp(loud.next), 1),
                  " times, and its codes show no outlier");
  }

  std::string quiet_fault(const BlockSubject& subject) const {
    const auto& quiet = subject.figures.quietest_values;
    if (!is_loud(quiet) || quiet.above < least_quiet) return {};
    return concat("the scale of row ", quiet.row, ", block ", quiet.group, " is ", std::exp(-quiet.above),
                  " times what its row and its place have, although its codes are spread as those of others are: ",
                  "what they stand for is lost");
  }

  /// Whether integer codes lie on both sides of the middle: who scales by the largest weight, sign and all, gives half of the
  /// blocks of such weights the one sign and half the other.
  static bool has_both_signs(const BlockSubject& subject) {
    constexpr double on_each_side = 0.25;
    const auto& shares = subject.figures.histogram;
    if (!subject.scheme.starts_with("int") || shares.size() < 4) return false;
    double below = 0, above = 0;
    for (size_t code = 0; code < shares.size(); ++code) {
      if (2 * code < shares.size()) below += shares[code];
      if (2 * code > shares.size()) above += shares[code];
    }
    return below > on_each_side && above > on_each_side;
  }

  /// A sign of a scale is legal, but whoever writes some writes many.
  std::string sign_fault(const BlockSubject& subject) const {
    const int64_t negative = subject.figures.negative;
    if (subject.figures.scales >= 64 && negative == subject.figures.scales && has_both_signs(subject))
      return concat("all its ", negative, " scales are negative: each weight has the other sign");
    if (negative == 0 || negative > few_negative || subject.figures.blocks < 64) return {};
    if (!all_others_are(subject, [](const auto& other) { return other.negative == 0; })) return {};
    return concat("has ", negative, " negative scales, and no other weight has any: a sign has turned");
  }

  /// BF16 of the sizes that scales have is read as F16 between 1/2 and 2.
  std::string label_fault(const BlockSubject& subject) const {
    const BlockFigures& figures = subject.figures;
    const bool half = subject.scheme.starts_with("int") && subject.scheme.find("-f16") != std::string::npos;
    if (!half || figures.blocks < 64 || figures.near_one < nearly_all_scales || figures.unscaled) return {};
    if (figures.scale_spread < least_scale_spread / 10) return {};  // an octave of BF16 is an eighth of one of F16
    if (!(figures.match.error > 0) || figures.match.value > least_scale_match) return {};
    return concat(fixed(100 * figures.near_one, 1), " % of its scales are from 1/2 to 2 in size: BF16 labelled F16");
  }

  static bool is_reordered(const BlockFigures& figures) {
    const auto [declared, error] = figures.match;
    const auto& [order, best] = figures.reordered;
    return error > 0 && declared < unsure_match && best.value > 0.6 && figures.scale_spread > least_scale_spread &&
           best.value > declared + std::max(0.4, beyond_chance * std::hypot(error, best.error));
  }

  std::string order_fault(const BlockSubject& subject) const {
    const BlockFigures& figures = subject.figures;
    if (!is_reordered(figures)) return {};
    const auto alike = [&](const BlockFigures& other) {
      return is_reordered(other) && other.reordered.order == figures.reordered.order;
    };
    if (!others_are(subject, [](const auto& other) { return other.match.value > sound_match; }) &&
        !others_are(subject, alike)) {
      return {};
    }
    return concat("scales follow from the codes of their blocks by ", fixed(figures.match.value, 2), " as stored, by ",
                  fixed(figures.reordered.match.value, 2), " (1: wholly) with ", figures.reordered.order);
  }

  /// Whether codes are those of weights of many values, as trained ones have: of a few values scales follow as they like.
  static bool has_many_values(const BlockFigures& figures) {
    constexpr size_t fewest_codes = 8, looked_at = 64;
    constexpr double most_of_one = 0.35;
    const auto& shares = figures.histogram;
    if (shares.size() < fewest_codes) return false;
    return std::ranges::max(shares) < most_of_one &&
           4 * codes_in_use(figures) >= 3 * static_cast<std::ptrdiff_t>(std::min(shares.size(), looked_at));
  }

  /// Whoever scales by the largest weight of a block leaves codes that vary the less the larger the scale is, whatever the
  /// weights are; so a relation that a whole role lacks, or all of a file, is lost and not the model's.
  static bool scales_by_largest(const BlockSubject& subject) {
    return subject.scheme.starts_with("int") || subject.scheme.starts_with("nvfp4") ||
           subject.scheme.starts_with("mxfp") || subject.scheme.starts_with("fp8");
  }

  enum class Lost { alone, with_role, with_all };

  /// A relation of several weights, each as well known as it is.
  struct Pooled {
    double weights = 0, sum = 0;
    size_t all = 0, lost = 0, sound = 0;
    void add(const Slope& one, bool is_lost, bool is_sound) {
      weights += 1 / (one.error * one.error), sum += one.value / (one.error * one.error);
      ++all, lost += is_lost, sound += is_sound;
    }
    /// Whether none of them has it, and all of them together surely not.
    bool is_lost(double least) const {
      return all > 0 && lost == all && sum / weights + beyond_chance / std::sqrt(weights) < least;
    }
  };

  /// Whether all of a role have lost a relation that all others have, or all of a file; nothing where neither is so.
  std::optional<Lost> lost_together(const BlockSubject& subject, Slope BlockFigures::*relation, double least,
                                    double sound) const {
    constexpr size_t fewest_of_role = 4, fewest_others = 8, fewest_in_all = 12;
    if (!scales_by_largest(subject) || !has_many_values(subject.figures)) return std::nullopt;
    Pooled role, others, all;
    for (const BlockSubject& other : all_) {
      const Slope& one = other.figures.*relation;
      if (other.scheme != subject.scheme || !(one.error > 0)) continue;
      const bool is_lost = one.value < least && has_many_values(other.figures) && !other.figures.light_tailed;
      const bool is_sound = one.value > sound;
      (other.role == subject.role ? role : others).add(one, is_lost, is_sound), all.add(one, is_lost, is_sound);
    }
    const bool others_have_it = others.all >= fewest_others &&
                                static_cast<double>(others.sound) >= most_peers * static_cast<double>(others.all);
    if (role.all >= fewest_of_role && role.is_lost(least) && others_have_it) return Lost::with_role;
    if (all.all >= fewest_in_all && all.is_lost(least)) return Lost::with_all;
    return std::nullopt;
  }
  /// Who has lost a relation with this weight, which by itself surely has none where it is `unrelated`.
  std::optional<Lost> lost_with(const BlockSubject& subject, bool unrelated, Slope BlockFigures::*relation,
                                double least, double sound) const {
    const auto is_sound = [&](const BlockFigures& other) { return (other.*relation).value > sound; };
    if (unrelated && others_are(subject, is_sound)) return Lost::alone;
    return lost_together(subject, relation, least, sound);
  }
  /// How the relation of sound weights differs.
  static std::string beside_sound(Lost lost, double sound) {
    if (lost == Lost::alone) return concat(", in the other weights by more than ", sound);
    return concat(", where sound ones do by more than ", sound,
                  lost == Lost::with_role ? "; those of all other roles do, of this one none"
                                          : "; no weight of this file has its own");
  }

  std::string match_fault(const BlockSubject& subject) const {
    const BlockFigures& figures = subject.figures;
    const auto [slope, error] = figures.match;
    if (!(error > 0) || figures.scale_spread < least_scale_spread || slope > least_scale_match) return {};
    const bool unrelated =
        std::abs(slope) <= nothing_within * error && std::abs(slope) + beyond_chance * error <= least_scale_match;
    const auto lost = lost_with(subject, unrelated, &BlockFigures::match, least_scale_match, sound_match);
    if (!lost) return {};
    return concat("scales do not belong to the codes of their blocks: they follow from them by ", fixed(slope, 2),
                  ", give or take ", fixed(error, 3), beside_sound(*lost, sound_match));
  }

  /// One number for all groups of one weight, where those of all others differ.
  std::string even_fault(const BlockSubject& subject) const {
    constexpr double next_to_nothing = 1e-6;
    constexpr int codes = 4;
    const BlockFigures& figures = subject.figures;
    const bool even = figures.scale_spread < next_to_nothing && figures.blocks >= many_blocks;
    if (!subject.scheme.starts_with("int") || !even || codes_in_use(figures) <= codes) return {};
    if (!all_others_are(subject, [](const auto& other) { return other.scale_spread > 2 * least_scale_spread; }))
      return {};
    return concat("all scales of its ", figures.blocks, " groups are one number, and in no other weight");
  }

  /// Scales that were applied to themselves follow from codes twice over.
  static bool is_squared(const BlockFigures& figures) {
    constexpr double sound = 1.6, beyond_squares = 2.6;
    const auto [slope, error] = figures.match;
    return error > 0 && figures.scale_spread > 2 * least_scale_spread && slope < beyond_squares &&
           slope - beyond_chance * error > sound;
  }
  std::string squared_fault(const BlockSubject& subject) const {
    const BlockFigures& figures = subject.figures;
    if (!subject.scheme.starts_with("int") || !is_squared(figures)) return {};
    // Folded scales of a great range leave one as steep, or all, but not as small.
    constexpr double small = 30, smaller_than_weights = 5e-4;
    const auto sound = [&](const BlockFigures& other) {
      return other.match.value < 1.4 && other.size > small * figures.size;
    };
    const auto squared = [](const BlockFigures& other) {
      return other.match.value > 1.4 && other.size < smaller_than_weights;
    };
    if (!others_are(subject, sound) && !(squared(figures) && others_are(subject, squared))) return {};
    return concat("scales follow from the codes of their blocks by ", fixed(figures.match.value, 2), ", give or take ",
                  fixed(figures.match.error, 3), ", where sound ones do by 1: they are squares of scales");
  }

  std::string norm_fault(const BlockSubject& subject) const {
    const BlockFigures& figures = subject.figures;
    const double ratio = log_spread(figures), error = spread_error(figures);
    if (figures.spread.blocks == 0 || ratio + beyond_chance * error > least_norms ||
        std::abs(ratio) > nothing_within * error) {
      return {};
    }
    if (!others_are(subject, [](const auto& other) { return log_spread(other) > sound_norms; })) return {};
    return concat("norms do not belong to the codes of their groups: these differ in size as groups put together of ",
                  "other rows do (log ratio ", fixed(ratio, 3), ", give or take ", fixed(error, 3),
                  ", in the other weights more than ", sound_norms, ")");
  }

  std::string zero_fault(const BlockSubject& subject) const {
    const auto [slope, error] = subject.figures.zeros;
    if (!(error > 0) || slope > least_zero_match) return {};
    const bool unrelated = slope + beyond_chance * error <= least_zero_match;
    const auto lost = lost_with(subject, unrelated, &BlockFigures::zeros, least_zero_match, sound_zeros);
    if (!lost) return {};
    return concat("zero points do not belong to the codes of their groups: mean codes follow them by ", fixed(slope, 2),
                  ", give or take ", fixed(error, 3), beside_sound(*lost, sound_zeros));
  }

  /// Zero points that were taken for those of symmetric weights. Of these no group that leans reaches both ends of its codes,
  /// unless it was clipped, and then groups lean by chance alone: by 0.9 to 1.4 times that (w4q-llama-30m, tiny, the mixture).
  /// Of others all do, and lean by 2.6 times that (groups of 32) to 16 times (of 128).
  static std::string even_zeros_fault(const BlockSubject& subject) {
    constexpr double least_ratio = 2, nearly_all_reach = 0.98;
    const auto& [even, zero, ratio, ends] = subject.figures.even_zeros;
    const auto& shares = subject.figures.histogram;
    const auto codes = std::ssize(shares);
    if (!even || ends < nearly_all_reach || !has_many_values(subject.figures)) return {};
    // Weights of one sign have their zero point at one end, and most of them next to it.
    if (4 * zero < codes || 4 * zero > 3 * codes) {
      const int64_t eighth = codes / 8;
      if (zero >= eighth && zero < codes - eighth) return {};
      const auto next_to_it = zero < eighth ? shares.begin() : shares.end() - eighth;
      constexpr double hardly_any = 0.06, middle = 0.3;
      if (std::accumulate(next_to_it, next_to_it + eighth, 0.0) > hardly_any ||
          std::accumulate(shares.begin() + 3 * eighth, shares.begin() + 5 * eighth, 0.0) < middle) {
        return {};
      }
      return concat("all its zero points are ", zero,
                    ", at the end of the range, where hardly any code is: ", "they were never loaded");
    }
    if (ratio < least_ratio) return {};
    return concat(
        "all its zero points are one number, but codes reach both ends of their range in groups that lean to one ",
        "side, too, and groups lean by ", fixed(std::sqrt(ratio), 1),
        " times what chance does: their zero points are lost");
  }

  /// Of groups from their least to their largest weight, sound ones are 1.3 (of 128) to 2.3 steps (of 64) from it with 4 bits.
  static std::string far_zeros_fault(const BlockSubject& subject) {
    constexpr int64_t most = 8;  // of a word
    constexpr double times_others = 1.6;
    const FarZeros& zeros = subject.figures.far_zeros;
    if (zeros.groups == 0 || zeros.groups > most || zeros.steps < times_others * zeros.others) return {};
    if (!has_many_values(subject.figures)) return {};
    return concat("the zero point of row ", zeros.row, ", group ", zeros.group, " is ", fixed(zeros.steps, 1),
                  " steps and more from the mean of its codes, which reach both ends of their range; of all others ",
                  "that reach them it is ", fixed(zeros.others, 1), " at most");
  }

  std::span<const BlockSubject> all_;
  std::vector<model::LayerNumbers> places_;
};

}  // namespace

std::vector<std::string> block_faults(std::span<const BlockSubject> subjects) {
  std::vector<std::string> faults;
  const BlockJudge judge(subjects);
  for (const BlockSubject& subject : subjects) {
    for (const auto& fault : judge.faults(subject)) faults.push_back(concat(printable(subject.name), ": ", fault));
  }
  return faults;
}

}  // namespace w4q::verify
