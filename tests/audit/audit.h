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
  bool text = false;  ///< decode a short text, too
};

/// Makes variants in a folder of its own, and keeps the 16-bit models that they come from.
class Workshop {
 public:
  Specimen make(const VariantRow& row);
  /// Nothing where the fault has nothing to damage there.
  std::optional<Outcome> seed(const Specimen& specimen, const FaultRow& fault, const Options& options);
  /// The sound folder itself.
  std::array<Answer, ways.size()> verify_sound(const Specimen& specimen, const Options& options);
  /// A folder that is somebody else's, of this base.
  Answer verify(const std::filesystem::path& folder, const std::filesystem::path& base, Way way,
                const Options& options) const;

 private:
  std::filesystem::path source(const std::string& name, bool other);
  Outcome judge(const Specimen& specimen, const CheckpointCopy& copy, const Options& options);

  test::TemporaryFolder folder_;
};

/// What was named, by kind and way.
class Tally {
 public:
  void add(const FaultRow& fault, const VariantRow& variant, const Outcome& outcome);

  int64_t faults(bool of_values) const;  ///< that change values, or that change none
  int64_t named(Way way) const;          ///< of those that change values
  double share(Way way) const { return static_cast<double>(named(way)) / static_cast<double>(faults(true)); }
  size_t kinds() const { return rows_.size(); }
  /// Lines of a table in Markdown: kind, faults, and for each way the share that was named and by which rungs.
  std::string table() const;
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
