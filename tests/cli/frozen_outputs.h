// Fingerprints of every file that ways through the program write, against testdata/golden/w4q_outputs.json: one line
// per file, "<section>/<way>/<file>". They change only with the format version. W4Q_PRINT_FROZEN=1 prints what the
// present program writes, of which scripts/freeze adds what is new; W4Q_PROGRAM=FILE runs another build of it.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "program.h"

namespace w4q::test {

class FrozenOutputs {
 public:
  /// The ways of one section start from `model`.
  FrozenOutputs(std::string section, std::filesystem::path model);

  /// Runs `w4q arguments… -o OUTPUT` and takes the fingerprints of what it writes; files that the model has too, byte
  /// by byte, are only counted. Returns OUTPUT, empty where the program refused. Thread-safe for different ways.
  std::string write(const std::string& way, std::vector<std::string> arguments);
  /// The same, for what no further way starts from.
  void write_last(const std::string& way, std::vector<std::string> arguments);
  /// Takes the fingerprints of what stands there already.
  void add(const std::string& way, const std::filesystem::path& output);

  /// False for a way that the frozen program refused, so that nobody asks again: `parent`/`step` has no frozen line
  /// though both its halves have. What is new is always worth trying, and everything is while W4Q_PRINT_FROZEN prints.
  bool worth_trying(const std::string& parent, const std::string& step) const;

  const std::filesystem::path& model() const noexcept { return model_; }
  /// Where a way writes: the name of a folder becomes the name of the model in GGUF files.
  std::filesystem::path output_of(const std::string& way) const;

  /// Every line of the section is as it is frozen, and nothing else is written.
  void expect_frozen() const;

 private:
  std::string section_;
  std::filesystem::path model_;
  TemporaryFolder folder_;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> frozen_, lines_;
  std::map<std::string, std::string> refusals_;  // by way
};

/// A way through quantize, and what is made of it.
struct Way {
  std::string name;
  std::vector<std::string> quantize;
  std::vector<std::vector<std::string>> repack;
};

/// All of them, each of which is taken.
void write_ways(FrozenOutputs& outputs, const std::vector<Way>& ways);

/// Runs all of them, as many at a time as there are cores, two at least: much of a run is waiting for the disk.
void run_all(const std::vector<std::function<void()>>& jobs);

}  // namespace w4q::test
