// Runs the w4q program as a user does and looks at what comes out.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "io/json.h"
#include "support.h"

namespace w4q::test {

struct ProgramResult {
  int status = 0;  ///< exit status, or −1 when a signal ended it
  int signal = 0;  ///< that signal
  std::string out;
  std::string err;
  double seconds = 0;
  int64_t peak_bytes = 0;  ///< largest resident set

  /// Its output, which must be as docs/schema says.
  io::Json json() const;
};

/// Runs `w4q arguments…`. `prepare` runs in the child before the program starts (limits, working folder).
ProgramResult run_w4q(const std::vector<std::string>& arguments, const std::function<void()>& prepare = {});

/// The same behind the words of another program, which starts it: mpirun and its options.
ProgramResult run_w4q_behind(std::vector<std::string> launcher, const std::vector<std::string>& arguments);

/// Starts it and returns the process id at once; its output goes nowhere.
pid_t start_w4q(const std::vector<std::string>& arguments);
/// The same behind the words of another program.
pid_t start_w4q_behind(std::vector<std::string> launcher, const std::vector<std::string>& arguments);

/// The bundled 16-bit model.
inline std::string bundled_model() { return (testdata() / "w4q-llama-tiny").string(); }

/// The first layer, or the first two, of the bundled model as a model of its own, which lasts as long as this process: a
/// quarter or half of the work where what is asked is asked of every matrix alike.
const std::string& one_layer_model();
const std::string& two_layer_model();

/// Copies the bundled model into `folder`, where a test may damage it.
std::string copy_bundled_model(const std::filesystem::path& folder);

/// Writes a Llama checkpoint whose weights are a hole in the file: zeros that take no space. Returns the file's size.
/// `fp8`: linears are E4M3 in blocks of 128 × 128.
int64_t write_sparse_model(const std::filesystem::path& folder, int layers, int64_t hidden, int64_t intermediate,
                           int64_t vocabulary = 1024, bool fp8 = false);

/// Tests that quantize the bundled model, or a part of it, into a folder of their own.
class OnBundledModel : public ::testing::Test {
 protected:
  explicit OnBundledModel(std::string model = bundled_model()) : model_(std::move(model)) {}

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  ProgramResult quantize(const std::string& name, const std::vector<std::string>& more) const {
    std::vector<std::string> arguments{"quantize", model_, "-o", path(name), "--quiet", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments);
  }

  const std::string model_;

 private:
  TemporaryFolder folder_;
};

/// Names and bytes of all files below `folder`, to compare two folders.
std::string folder_digest(const std::filesystem::path& folder);

}  // namespace w4q::test
