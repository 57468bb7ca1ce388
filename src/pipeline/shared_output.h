// A checkpoint that the ranks of a run write together, and that a later run can take up.
//
// The work is cut into units, each of which is done by one rank: the costliest first, to the rank that has the least.
// A unit's tensors go to their places in the files that the first rank has made, so the bytes do not depend on how many
// ranks there are. Units that are finished stand in a journal in the hidden folder, with the digests of their tensors and
// with what the report says of them; whoever takes the folder up checks them and goes on with the others.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint_writer.h"
#include "io/json.h"
#include "io/output.h"
#include "io/partial.h"
#include "pipeline/output_rules.h"
#include "pipeline/sharing.h"

namespace w4q::pipeline {

/// The folder of the output: the first rank makes, commits and removes it.
class SharedFolder {
 public:
  /// As io::OutputFolder, at every rank.
  SharedFolder(const Sharing& sharing, const std::filesystem::path& target, bool overwrite,
               const std::vector<std::filesystem::path>& inputs,
               const std::function<bool(const std::filesystem::path&)>& replaceable);
  ~SharedFolder();

  ranks::Ranks& ranks() const noexcept { return *sharing_.ranks; }
  const std::filesystem::path& staging() const noexcept { return staging_; }
  /// For CheckpointWriter: who makes the files.
  io::ShardFiles shard_files() const noexcept {
    if (!ranks().first()) return io::ShardFiles::join;
    return taken_up_ ? io::ShardFiles::mend : io::ShardFiles::create;
  }
  bool taken_up() const noexcept { return taken_up_; }
  /// What became of the wish to resume.
  const std::vector<std::string>& notes() const noexcept { return notes_; }

  void note(std::string text) { notes_.push_back(std::move(text)); }
  /// From now on there is something to take up.
  void begin_journal();
  void end_journal();
  /// Before the output is in its place, once all ranks have read all that they read: whatever they read from must be what
  /// it was, and may change from then on. Throws where it has changed, Stopped where another rank finds that.
  void agree_on_inputs() const;
  /// At the first rank.
  io::OutputFolder& output() { return *output_; }

 private:
  bool is_ours(const std::filesystem::path& left, const io::InputStates& inputs);
  std::string difference(const io::Json& journal, const io::InputStates& inputs) const;

  const Sharing sharing_;
  std::optional<io::OutputFolder> output_;   // at the first rank
  io::InputStates inputs_;                   // at the others
  std::optional<io::OthersPartial> others_;  // at the others, where nothing is kept
  std::filesystem::path staging_;
  std::vector<std::string> notes_;
  bool taken_up_ = false;
};

/// Work of one rank: what it writes, in tensors of the output, and how much it is.
struct WorkUnit {
  std::string name;
  std::vector<std::string> tensors;
  int64_t cost = 0;
  bool in_turn = false;  ///< goes to the ranks in their order, whatever it costs: layers, which all walk through
};

/// The rank of each unit: those in turn first, then the costliest, each to the rank with the least so far; of equal ones
/// the first.
std::vector<int> deal(std::span<const WorkUnit* const> units, int ranks);

class SharedWork {
 public:
  /// Checks what an earlier run finished. `folder` and `writer` outlive this.
  SharedWork(SharedFolder& folder, io::CheckpointWriter& writer, std::vector<WorkUnit> units);

  /// Whether this rank has to do it: not where an earlier run has.
  bool mine(size_t unit) const noexcept { return !records_[unit] && owners_[unit] == folder_.ranks().rank(); }
  /// The rank that has to; −1: an earlier run has.
  int owner(size_t unit) const noexcept { return owners_[unit]; }
  /// Of the units of this rank.
  int64_t cost() const noexcept;
  /// All tensors of a unit are written; `record` is what the report will say.
  void done(size_t unit, const io::Json& record);  // by any thread
  /// Once a rank has done all of its units. At the first rank the record of every unit, and the writer knows all tensors
  /// then; elsewhere nothing.
  std::vector<io::Json> gather();

 private:
  void take_up();
  std::vector<std::string> checked(const std::vector<std::string>& lines) const;
  void adopt(const io::Json& line);
  void append(std::string_view text);

  SharedFolder& folder_;
  io::CheckpointWriter& writer_;
  const std::vector<WorkUnit> units_;
  std::map<std::string, size_t, std::less<>> numbers_;  // of units, by their names
  std::vector<int> owners_;                             // −1: finished before
  std::vector<std::optional<io::Json>> records_;
  io::FileDescriptor journal_;
  std::string finished_;  // lines of this run
  std::mutex mutex_;      // guards the two
};

/// finished() of output_rules.h, at the first rank; the others wait.
template <class Report, class Companions>
Report finished(Report report, io::CheckpointWriter& writer, SharedFolder& folder, const Stopwatch& watch,
                std::vector<io::TensorDigests> bases, const Companions& companions) {
  folder.agree_on_inputs();
  if (folder.ranks().first()) {
    report = finished(std::move(report), writer, folder.output(), watch, std::move(bases), [&](const auto& to) {
      folder.end_journal();
      return companions(to);
    });
  }
  folder.ranks().barrier();
  return report;
}

}  // namespace w4q::pipeline
