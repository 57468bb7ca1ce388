#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "core/text.h"
#include "verify/gguf/blocks.h"
#include "verify/median.h"

namespace w4q::verify {
namespace of_blocks {
namespace {

/// Beyond chance, in standard errors: a file has thousands of matrices, and none may look wrong by chance.
constexpr double beyond_chance = 5;
/// Others to be compared with, and the share of them that must be as sound ones are.
constexpr size_t least_peers = 4;
constexpr double nearly_all = 0.9;
/// Scales that hardly differ say nothing.
constexpr double least_spread = 0.03;
/// Fewer parts prove nothing.
constexpr int64_t least_parts = 64;
/// Matrices of one type of which none has what all quantizers leave.
constexpr size_t least_together = 4, least_of_role = 2;

std::string share(int64_t count, int64_t all, std::string_view what) { return concat(count, " of ", all, " ", what); }

/// A number that sound matrices have within narrow bounds, whatever was rounded.
struct Relation {
  std::string_view what;            ///< "scales follow from the codes of their parts by "
  std::string_view fault;           ///< what it says of one that lacks it
  Slope (*of)(const GgufSubject&);  ///< no error: it is not known
  double sound;                     ///< what the others have and more
  double part;                      ///< of what nearly all others have: less is none
  double lost;                      ///< less of all of a role, or of a type, is none
  double beyond = INFINITY;         ///< times what nearly all others have: more is another unit
  double least = -INFINITY;  ///< what is in another place follows from nothing; against it go blocks that were pruned
  bool of_type = true;       ///< weights of few values have it, too, so that a whole type that lacks it has lost it
};

bool has_many_values(const GgufFigures& figures) {
  return figures.commonest < 0.5 && figures.levels_in_use > 0.5 && figures.parts >= least_parts;
}

Slope match_of(const GgufSubject& subject) {
  const bool asked = subject.figures.spread > least_spread && subject.figures.fine >= least_parts;
  return asked ? subject.figures.match : Slope{};
}
Slope minimums_of(const GgufSubject& subject) {
  return subject.figures.fine >= least_parts ? subject.figures.minimums : Slope{};
}
Slope units_of(const GgufSubject& subject) {
  return subject.figures.blocks >= least_parts && !subject.figures.one_unit ? subject.figures.units : Slope{};
}
/// A share has an error, too.
Slope ends_of(const GgufSubject& subject, bool offsets) {
  const GgufFigures& figures = subject.figures;
  if (subject.form->has_offset() != offsets || figures.fine < least_parts || !has_many_values(figures)) return {};
  const double parts = static_cast<double>(figures.fine), share = std::clamp(figures.ends, 1 / parts, 1 - 1 / parts);
  return {figures.ends, std::sqrt(share * (1 - share) / parts)};
}
Slope one_end_of(const GgufSubject& subject) { return ends_of(subject, false); }
Slope both_ends_of(const GgufSubject& subject) { return ends_of(subject, true); }

constexpr Relation relations[] = {
    {"scales follow from the codes of their parts by ", "scales do not belong to the codes of their parts", match_of,
     0.6, 0.6, 0.45, INFINITY, -1.5},
    {"mean codes follow from minimums by ", "minimums do not belong to the codes of their parts", minimums_of, 0.4, 0.7,
     0.42, 1.8},
    {"units of blocks follow from their scales and codes by ", "units do not belong to the scales of their blocks",
     units_of, 0.4, 0.5, 0.2, INFINITY, -0.3},
    {"codes reach an end of their range in a share of the parts of ", "codes are not those of their scales", one_end_of,
     0.9, 0.9, 0.85, INFINITY, -INFINITY, false},
    // Loud columns keep a part from either end.
    {"codes reach both ends of their range in a share of the parts of ", "codes are not those of their scales",
     both_ends_of, 0.9, 0.6, 0.5, INFINITY, -INFINITY, false},
};

/// One matrix beside the others of its file.
class GgufJudge {
 public:
  explicit GgufJudge(std::span<const GgufSubject> all) : all_(all) {}

  std::string fault(const GgufSubject& subject) const {
    if (std::string plain = plain_fault(subject); !plain.empty()) return plain;
    for (const Relation& relation : relations) {
      if (std::string found = relation_fault(subject, relation); !found.empty()) return found;
    }
    for (const auto rule : {&GgufJudge::lean_fault, &GgufJudge::unit_fault, &GgufJudge::size_fault}) {
      if (std::string found = (this->*rule)(subject); !found.empty()) return found;
    }
    return {};
  }

 private:
  /// Values of the others, ascending; those of its type where there are enough.
  std::vector<double> others(const GgufSubject& subject,
                             const std::function<std::optional<double>(const GgufSubject&)>& value) const {
    std::vector<double> same, all;
    for (const GgufSubject& other : all_) {
      const auto found = &other == &subject ? std::nullopt : value(other);
      if (!found) continue;
      all.push_back(*found);
      if (other.form == subject.form) same.push_back(*found);
    }
    auto& chosen = same.size() >= least_peers ? same : all;
    std::ranges::sort(chosen);
    return std::move(chosen);
  }
  bool all_others(const GgufSubject& subject, const std::function<bool(const GgufSubject&)>& sound) const {
    const auto count = std::ranges::count_if(all_, [&](const auto& other) { return &other != &subject; });
    return count >= static_cast<std::ptrdiff_t>(least_peers) &&
           std::ranges::all_of(all_, [&](const auto& other) { return &other == &subject || sound(other); });
  }

  /// What no program writes.
  std::string plain_fault(const GgufSubject& subject) const {
    const GgufFigures& figures = subject.figures;
    if (figures.invalid > 0)
      return concat("units that are no number in ", share(figures.invalid, figures.blocks, "blocks"));
    if (figures.negative > 0)
      return concat("negative units in ", share(figures.negative, figures.blocks, "blocks"),
                    ", which its type does not have");
    if (figures.unscaled > 0) {
      return concat("all scales of a block are zero beside its unit, over codes that differ, in ",
                    share(figures.unscaled, figures.blocks, "blocks"));
    }
    constexpr double nearly_all_units = 0.99;
    const bool half = subject.form->unit == formats::GgufUnit::f16;
    if (half && !figures.one_unit && figures.blocks >= least_parts && figures.near_one > nearly_all_units) {
      return "all its units are from 1/2 to 2 in size, weights of models are far smaller: BF16 in the place of F16";
    }
    constexpr double most = 0.5, next_to_none = 0.05;
    const auto mostly = [](int64_t count, const GgufFigures& of, double least) {
      return static_cast<double>(count) > least * static_cast<double>(of.parts);
    };
    if (mostly(figures.empty, figures, most) && all_others(subject, [&](const auto& other) {
          return !mostly(other.figures.empty, other.figures, next_to_none);
        })) {
      return concat("scales of zero over codes that differ in ", share(figures.empty, figures.parts, "parts"));
    }
    if (mostly(figures.constant, figures, most) && all_others(subject, [&](const auto& other) {
          return !mostly(other.figures.constant, other.figures, next_to_none);
        })) {
      return concat("all codes are the same beside scales that are not zero, in ",
                    share(figures.constant, figures.parts, "parts"), ": they were not written");
    }
    return {};
  }

  /// What nearly all others have at least, or at most.
  static double low_end(const std::vector<double>& sorted) {
    return sorted[static_cast<size_t>((1 - nearly_all) * static_cast<double>(sorted.size() - 1))];
  }
  static double high_end(const std::vector<double>& sorted) {
    return sorted[static_cast<size_t>(nearly_all * static_cast<double>(sorted.size() - 1))];
  }

  std::string relation_fault(const GgufSubject& subject, const Relation& relation) const {
    const auto [value, error] = relation.of(subject);
    if (!(error > 0) || value + error < relation.least) return {};
    const auto of = [&](const GgufSubject& other) -> std::optional<double> {
      const Slope found = relation.of(other);
      return found.error > 0 ? std::optional(found.value) : std::nullopt;
    };
    const auto values = others(subject, of);
    const auto said = [&](std::string_view beside) {
      return concat(relation.fault, ": ", relation.what, fixed(value, 2), ", give or take ", fixed(error, 3), beside);
    };
    if (values.size() >= least_peers && low_end(values) > relation.sound) {
      const double low = low_end(values), high = high_end(values);
      const bool none = value + beyond_chance * error < relation.part * std::min(low, 1.0);
      const bool more = value - beyond_chance * error > relation.beyond * high;
      if (none || more) {
        return said(concat(", in nearly all others by ", fixed(low, 2), " … ", fixed(high, 2)));
      }
    }
    if (value > relation.lost) return {};
    const auto elsewhere = others(
        subject, [&](const GgufSubject& other) { return other.role == subject.role ? std::nullopt : of(other); });
    const bool others_have_it = elsewhere.size() >= least_peers && low_end(elsewhere) > relation.sound;
    if (others_have_it && is_lost(subject, relation, true)) return said(", and no other of its role has it");
    return relation.of_type && is_lost(subject, relation, false) ? said(", and no other of its type has it")
                                                                 : std::string();
  }

  /// Whether no matrix of its type, or of its role too, has what every quantizer leaves in weights of many values.
  bool is_lost(const GgufSubject& subject, const Relation& relation, bool of_role) const {
    double weights = 0, sum = 0;
    size_t count = 0;
    for (const GgufSubject& other : all_) {
      if (other.form != subject.form || (of_role && other.role != subject.role)) continue;
      const auto [value, error] = relation.of(other);
      if (!(error > 0) || !has_many_values(other.figures)) continue;
      if (value > relation.lost) return false;
      weights += 1 / (error * error), sum += value / (error * error), ++count;
    }
    return count >= (of_role ? least_of_role : least_together) && has_many_values(subject.figures) &&
           sum / weights + beyond_chance / std::sqrt(weights) < relation.lost;
  }

  /// Weights lie around nothing: what minimums that were lost leave is all on one side.
  std::string lean_fault(const GgufSubject& subject) const {
    constexpr double one_side = 1, hardly = 0.3, of_codes = 1.9;
    const double lean = subject.figures.lean;
    if (!(std::abs(lean) > one_side) || subject.figures.parts < least_parts) return {};
    const auto of_role = [&](const GgufSubject& other) {
      return other.role == subject.role && other.figures.lean > of_codes && other.form->highest_minimum > 0;
    };
    const auto sound = [&](const GgufSubject& other) {
      return std::abs(other.figures.lean) < hardly || (of_role(subject) && of_role(other));
    };
    const std::string said =
        concat("its weights lie to one side of zero: their mean is ", fixed(lean, 1), " of their deviations");
    if (all_others(subject, sound)) return said + ", in all others less than 0.3: minimums or units are lost";
    // Weights of one sign are, too, but spread more than codes around their middle do.
    const auto lost = [](const GgufSubject& other) {
      return other.form->highest_minimum == 0 || (other.figures.no_minimums && other.figures.lean > of_codes);
    };
    const auto typed = std::ranges::count_if(all_, [](const auto& other) { return other.form->highest_minimum > 0; });
    if (subject.form->highest_minimum == 0 || typed < static_cast<std::ptrdiff_t>(least_together)) return {};
    return std::ranges::all_of(all_, lost) ? said + ", and so are all that have minimums, which are zero"
                                           : std::string();
  }

  std::string unit_fault(const GgufSubject& subject) const {
    if (!subject.figures.one_unit || subject.figures.blocks < least_parts) return {};
    if (!has_many_values(subject.figures)) return {};
    if (!all_others(subject, [](const auto& other) { return !other.figures.one_unit; })) return {};
    return concat("all its ", subject.figures.blocks, " blocks have one and the same unit, and those of no other do");
  }

  std::string size_fault(const GgufSubject& subject) const {
    constexpr double far = 10'000, larger_than_weights = 50;
    const auto sizes = others(subject, [](const GgufSubject& other) -> std::optional<double> {
      return other.figures.size > 0 ? std::optional(other.figures.size) : std::nullopt;
    });
    const double size = subject.figures.size, usual = sizes.size() >= least_peers ? sizes[sizes.size() / 2] : 0;
    const bool apart = usual > 0 && size > 0 && (size > far * usual || size * far < usual);
    if (!apart && size < larger_than_weights) return {};
    return concat("its weights have the size ", size, apart ? concat(", those of the others ", usual) : std::string());
  }

  std::span<const GgufSubject> all_;
};

}  // namespace
}  // namespace of_blocks

std::vector<std::string> gguf_block_faults(std::span<const GgufSubject> subjects) {
  std::vector<std::string> faults;
  const of_blocks::GgufJudge judge(subjects);
  for (const GgufSubject& subject : subjects) {
    if (std::string fault = judge.fault(subject); !fault.empty())
      faults.push_back(concat(printable(subject.name), ": ", fault));
  }
  return faults;
}

}  // namespace w4q::verify
