// Seeds faults and asks verify: with the digests, with the base but without digests, and alone.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "audit/faults.h"
#include "support.h"

namespace w4q::audit {

enum class Way { digests, base, alone };
inline constexpr std::array ways = {Way::digests, Way::base, Way::alone};
/// "with the base"
std::string_view name_of(Way way) noexcept;

/// How a run of verify ended.
struct Answer {
  bool named = false;  ///< exit status 1, or an error instead
  std::string rung;    ///< the first check that did not hold; "open": it could not be opened
  std::string detail;  ///< the first fault
};

/// Runs that are made of one seeded folder.
struct Outcome {
  std::array<Answer, ways.size()> answers;
  bool changes_values = true;  ///< the model computes something else, or cannot be loaded
};

struct Options {
  bool text = false;  ///< decode a short text, too: by the whole model, of which otherwise a part is enough
};

/// Makes variants in a folder of its own, and keeps the 16-bit models that they come from.
class Workshop {
 public:
  explicit Workshop(const Options& options = {}) : options_(options) {}

  /// Throws internal where verify names something in the sound folder.
  Specimen make(const VariantRow& row);
  /// Nothing where the fault has nothing to damage there.
  std::optional<Outcome> seed(const Specimen& specimen, const FaultRow& fault);
  /// Of a variant as it is made: nothing may be named.
  std::array<Answer, ways.size()> verify_sound(const VariantRow& row);

 private:
  std::filesystem::path source(const std::string& name, bool other);
  Outcome judge(const Specimen& specimen, const CheckpointCopy& copy);

  const Options options_;
  test::TemporaryFolder folder_;
};

/// What was named, by kind and way.
class Tally {
 public:
  void add(const FaultRow& fault, const VariantRow& variant, const Outcome& outcome);

  int64_t faults(bool of_values) const;  ///< that change values, or that change none
  double share(Way way) const;           ///< of those that change values, what was named
  /// A table in Markdown: kinds, faults, and for each way the share that was named and by which rungs.
  std::string table() const;
  /// The same by group, with the number of kinds.
  std::string summary() const;
  /// "kind: variants" of those that were not named in this way.
  std::string misses(Way way) const;

 private:
  struct Row {
    std::string group, kind;
    int64_t seeded = 0, silent = 0;
    std::array<int64_t, ways.size()> named{};
    std::array<std::map<std::string, int64_t>, ways.size()> rungs;
    std::array<std::vector<std::string>, ways.size()> missed;
  };
  std::vector<Row> rows_;  // in the order in which kinds came
};

}  // namespace w4q::audit
