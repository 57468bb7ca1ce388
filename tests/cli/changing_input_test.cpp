// Files that somebody cuts or writes over while they are read: exit status 3, one error that names the file, and
// nothing left behind.
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "core/text.h"
#include "program.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;

/// Runs long enough that there is a middle to it: 5 layers of 29 MB, which are holes in a file.
class ChangingInput : public ::testing::Test {
 protected:
  void SetUp() override { write_sparse_model(folder_ / "m", 5, 1024, 4096); }
  void make_quantized() const { ASSERT_EQ(run_w4q({"quantize", path("m"), "-o", path("q"), "--quiet"}).status, 0); }
  void make_gguf() const {
    ASSERT_EQ(run_w4q({"repack", path("m"), "-o", path("m.gguf"), "--to", "gguf", "--no-tokenizer"}).status, 0);
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  void remove_output() const {
    fs::remove_all(path("out"));
    fs::remove(path("out.w4q_digests.json"));  // of a GGUF file
  }

  std::vector<std::string> listing() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) names.push_back(entry.path().string());
    std::sort(names.begin(), names.end());
    return names;
  }

  /// Runs the program and changes `file` after `seconds`, earlier where the run was over by then; expects one error about
  /// it, and an untouched disk. `restore` undoes the change.
  void expect_refused(const Arguments& arguments, const std::string& file, double seconds,
                      const std::function<void()>& change, const std::function<void()>& restore) {
    constexpr int tries = 6;
    for (int i = 0; i < tries; ++i, seconds *= 0.6) {
      const auto before = listing();
      std::chrono::steady_clock::time_point changed;
      std::thread changing([&] {
        ::usleep(static_cast<useconds_t>(seconds * 1e6));
        change();
        changed = std::chrono::steady_clock::now();
      });
      const auto result = run_w4q(arguments);
      const auto ended = std::chrono::steady_clock::now();
      changing.join();
      restore();
      // What a program does after its last look at its inputs, to end, takes a few milliseconds.
      const bool too_late = changed > ended - std::chrono::milliseconds(20);
      if (result.status == 0 && too_late && i + 1 < tries) {
        remove_output();
        continue;
      }
      const auto what = concat(arguments[0], " after ", seconds, " of ", result.seconds, " s, signal ", result.signal,
                               ":\n", result.out, result.err);
      EXPECT_EQ(result.status, 3) << what;
      EXPECT_EQ(result.err.rfind("error: ", 0), 0u) << what;
      EXPECT_EQ(result.err.find("error: ", 1), std::string::npos) << what;
      EXPECT_NE(result.err.find(file), std::string::npos) << what;
      EXPECT_EQ(result.out, "") << what;
      EXPECT_EQ(listing(), before) << "something was left behind";
      return;
    }
  }

  /// The same at several moments of the run: cut to half, within the last page, and to nothing.
  void expect_refused_when_cut(Arguments arguments, const std::string& file) {
    arguments.emplace_back("--quiet");
    const fs::path kept = folder_ / "kept";
    fs::copy_file(file, kept);
    const auto whole = run_w4q(arguments);
    ASSERT_EQ(whole.status, 0) << whole.err;
    remove_output();
    const auto size = fs::file_size(file);
    const uintmax_t sizes[] = {size / 2, size - 100, 0};
    for (int i = 0; i < 3; ++i) {
      expect_refused(
          arguments, file, whole.seconds * (0.3 + 0.2 * i), [&] { fs::resize_file(file, sizes[i]); },
          [&] { fs::copy_file(kept, file, fs::copy_options::overwrite_existing); });
    }
    fs::remove(kept);
  }

  TemporaryFolder folder_;
};

TEST_F(ChangingInput, CutWhileQuantizing) {
  expect_refused_when_cut({"quantize", path("m"), "-o", path("out")}, path("m/model.safetensors"));
}

TEST_F(ChangingInput, CutWhileRepacking) {
  make_quantized();
  expect_refused_when_cut({"repack", path("q"), "-o", path("out"), "--target", "sm89", "--device", "cpu"},
                          path("q/model.safetensors"));
}

TEST_F(ChangingInput, CutWhileVerifying) {
  make_quantized();
  expect_refused_when_cut({"verify", path("q"), "--base", path("m")}, path("q/model.safetensors"));
  expect_refused_when_cut({"verify", path("q"), "--base", path("m")}, path("m/model.safetensors"));
}

TEST_F(ChangingInput, CutWhileHashing) {
  make_gguf();
  expect_refused_when_cut({"hash", path("m")}, path("m/model.safetensors"));
  expect_refused_when_cut({"hash", path("m.gguf")}, path("m.gguf"));
}

TEST_F(ChangingInput, CutWhileConverting) {
  make_gguf();
  expect_refused_when_cut({"repack", path("m"), "-o", path("out"), "--to", "gguf-q8_0", "--no-tokenizer"},
                          path("m/model.safetensors"));
  expect_refused_when_cut({"repack", path("m.gguf"), "-o", path("out"), "--to", "hf16", "--no-tokenizer"},
                          path("m.gguf"));
}

TEST_F(ChangingInput, WrittenOverOrReplaced) {
  const Arguments quantize{"quantize", path("m"), "-o", path("out"), "--quiet"};
  const double seconds = run_w4q({"quantize", path("m"), "-o", path("whole")}).seconds;
  const auto write_over = [&] {
    std::fstream weights(path("m/model.safetensors"), std::ios::in | std::ios::out | std::ios::binary);
    weights.seekp(-2, std::ios::end);
    weights << std::string(2, '\0');  // the same bytes: what matters is that somebody writes
  };
  const auto replace = [&] {
    fs::copy_file(path("m/config.json"), path("other"));
    fs::rename(path("other"), path("m/config.json"));
  };
  expect_refused(quantize, path("m/model.safetensors"), seconds / 2, write_over, [] {});
  expect_refused(quantize, path("m/config.json"), seconds / 2, replace, [] {});
}

}  // namespace
}  // namespace w4q::test
