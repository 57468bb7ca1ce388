// What no command destroys, not even with --overwrite: its inputs, and what the user put beside its outputs.
#include <array>
#include <fstream>
#include <span>

#include "io/files.h"
#include "program.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;

class Overwrite : public OnBundledModel {
 protected:
  using Arguments = std::vector<std::string>;

  void SetUp() override {
    model_ = copy_bundled_model(path("m"));
    fs::copy_file(fs::path(model_) / "own/selfgen.txt", path("cal.txt"));
  }

  static Arguments with(Arguments arguments, const Arguments& more) {
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  static void run(const Arguments& arguments) {
    const auto result = run_w4q(with(arguments, {"--quiet"}));
    ASSERT_EQ(result.status, 0) << result.err;
  }
  /// One error with all `parts`, status 2, and everything in the test's folder as before.
  void expect_refused(const Arguments& arguments, std::initializer_list<const char*> parts) const {
    const std::string before = folder_digest(path(""));
    const auto result = run_w4q(with(arguments, {"--quiet"}));
    std::string line;
    for (const auto& argument : arguments) line += argument + " ";
    EXPECT_EQ(result.status, 2) << line << result.out << result.err;
    EXPECT_EQ(result.err.rfind("error: ", 0), 0u) << result.err;
    for (const char* part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << line << result.err;
    EXPECT_TRUE(folder_digest(path("")) == before) << line << "changed something";
  }

  std::string model_;
};

TEST_F(Overwrite, SingleFilesNeverReplaceInputs) {
  const auto refused = [&](const Arguments& arguments) {
    expect_refused(with(arguments, {"--overwrite"}), {"the output ", "input: ", "choose another name"});
  };
  const std::string text = path("cal.txt"), weights = model_ + "/model.safetensors";
  const Arguments allocate{"quantize", model_, "-o",        path("q"), "--quality", "good", "--target-bpw", "3.5",
                           "--calib",  text,   "--samples", "1",       "--length",  "16",   "--save-recipe"};
  refused({"repack", model_, "-o", weights, "--to", "gguf"});
  refused({"calibrate", model_, "--text", text, "-o", weights});
  fs::copy_file(text, path("cal.safetensors"));
  refused({"calibrate", model_, "--text", path("cal.safetensors"), "-o", path("cal.safetensors")});
  refused({"calibrate", model_, "--merge", path("cal.safetensors"), "-o", path("cal.safetensors")});
  refused(with(allocate, {model_ + "/config.json"}));
  refused(with(allocate, {text}));
  refused({"tokenize", model_, text, "-o", model_ + "/tokenizer.json"});
  refused({"tokenize", model_, text, "-o", text});
  // A new name in the folder of the model is fine.
  run({"tokenize", model_, text, "-o", model_ + "/cal.u16"});
}

/// What the options read lies in the output, which could be replaced: the model brings files of the same names.
TEST_F(Overwrite, NeitherDoFoldersReplaceWhatOptionsRead) {
  std::ofstream(fs::path(model_) / "levels.txt") << "-1 -0.3 0.3 1";
  std::ofstream(fs::path(model_) / "recipe.json") << R"({"rules": [{"match": "*_proj", "scheme": "kbit2-b32-e4m4"}]})";
  const std::string out = path("q"), levels = out + "/levels.txt", recipe = out + "/recipe.json";
  run({"quantize", model_, "-o", out, "--k", "2", "--copy-all"});
  run({"calibrate", model_, "--text", path("cal.txt"), "--samples", "1", "--length", "16", "-o",
       path("stats.safetensors")});
  fs::copy_file(path("stats.safetensors"), model_ + "/tokenizer_config.json", fs::copy_options::overwrite_existing);
  run({"quantize", model_, "-o", out, "--k", "2", "--copy-all", "--overwrite"});
  const Arguments again{"quantize", model_, "-o", out, "--overwrite"};
  const auto refused = [&](const Arguments& more) {
    expect_refused(with(again, more), {"the output contains the input", "input: "});
  };
  refused({"--k", "2", "--codebook", levels});
  refused({"--recipe", recipe});
  refused({"--scheme", "int4-g128-f16", "--awq", "--calib", out + "/own/selfgen.txt"});
  refused({"--scheme", "int4-g128-f16", "--awq", "--calib-ids", out + "/own/selfgen.ids.u16"});
  refused({"--scheme", "int4-g128-f16", "--awq", "--stats", out + "/tokenizer_config.json"});
  refused({"--scheme", "int4-g128-f16", "--to", "gptq-v2", "--awq", "--calib", out + "/own/selfgen.txt"});
  // Nor does the recipe that is saved.
  std::ofstream(path("levels.txt")) << "-8 -7 -6 -5 -4 -3 -2 -1 1 2 3 4 5 6 7 8";
  expect_refused({"quantize", model_, "-o", path("new"), "--overwrite", "--codebook", path("levels.txt"), "--calib",
                  path("cal.txt"), "--scales", "search", "--target-bpw", "3", "--save-recipe", path("levels.txt")},
                 {"levels.txt: the output is the input"});
}

TEST_F(Overwrite, APipeIsAnInputToo) {
  run({"quantize", model_, "-o", path("q"), "--k", "2"});
  const auto result = run_w4q({"quantize", model_, "-o", path("q"), "--overwrite", "--recipe", "/dev/stdin"}, [] {
    constexpr std::string_view recipe = R"({"rules": [{"match": "*_proj", "scheme": "kbit3-b32-e4m4"}]})";
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0 || ::write(ends[1], recipe.data(), recipe.size()) < 0) std::_Exit(1);
    ::close(ends[1]);
    ::dup2(ends[0], STDIN_FILENO);
  });
  EXPECT_EQ(result.status, 0) << result.err;
}

/// Nothing is read before: the text to calibrate with does not even exist.
TEST_F(Overwrite, ARecipeThatExistsIsRefusedBeforeAnyWork) {
  std::ofstream(path("r.json")) << "{}";
  const Arguments allocate{"quantize",     model_, "--quality", "good",
                           "--target-bpw", "3.5",  "--calib",   path("nothing.txt")};
  for (const Arguments& way : {Arguments{"-o", path("q")}, Arguments{"--dry-run"}}) {
    expect_refused(with(with(allocate, way), {"--save-recipe", path("r.json")}), {"r.json: already exists"});
  }
  run({"quantize", model_, "-o", path("q"), "--k", "2"});
  const Arguments inside{"-o", path("q"), "--overwrite", "--save-recipe", path("q/r.json")};
  for (const Arguments& more : {Arguments{}, Arguments{"--to", "gptq-v2"}}) {
    expect_refused(with(with(allocate, inside), more), {"r.json: lies in the output folder", "save it elsewhere"});
  }
  expect_refused(with(allocate, {"-o", path("q")}), {"q: already exists"});
}

TEST_F(Overwrite, FoldersWithOtherFilesAreNotReplaced) {
  run({"quantize", model_, "-o", path("kbit"), "--k", "2"});
  run({"quantize", model_, "-o", path("int4"), "--scheme", "int4-g128-f16"});
  run({"quantize", model_, "-o", path("rotated"), "--scheme", "rotated4-d128"});
  run({"repack", path("rotated"), "-o", path("turbo"), "--to", "turboquant"});
  run({"quantize", model_, "-o", path("out"), "--k", "3", "--shard-size", "1MB", "--compress"});
  const Arguments ways[] = {{"quantize", model_, "--k", "3"},
                            {"quantize", model_, "--scheme", "int4-g128-f16", "--to", "gptq-v2"},
                            {"repack", path("kbit"), "--layout", "canonical"},
                            {"repack", path("int4"), "--to", "gptq-v2"},
                            {"repack", path("rotated"), "--to", "turboquant"},
                            {"repack", path("turbo"), "--to", "w4q"}};
  const Arguments over{"-o", path("out"), "--overwrite"};
  fs::create_directories(path("out/runs/1"));
  std::ofstream(path("out/runs/1/log")) << "mine";
  std::ofstream(path("out/stats.safetensors")) << "mine";
  fs::create_symlink("runs", path("out/latest"));
  for (const auto& way : ways) {
    expect_refused(with(way, over), {"out: holds files that w4q would not write again", "latest", "runs/1/log",
                                     "stats.safetensors", "move them elsewhere, or choose another name"});
  }
  fs::remove_all(path("out/runs"));
  fs::remove(path("out/latest"));
  fs::remove(path("out/stats.safetensors"));
  // All carry along what the model brought, so each may replace what another made.
  for (const auto& way : ways) run(with(way, over));
}

TEST_F(Overwrite, NeitherAreThoseMadeOfGguf) {
  run({"repack", model_, "-o", path("m.gguf"), "--to", "gguf"});
  run({"repack", path("m.gguf"), "-o", path("out"), "--to", "hf16"});
  const Arguments again{"repack", path("m.gguf"), "-o", path("out"), "--to", "w4q", "--overwrite"};
  std::ofstream(path("out/notes")) << "mine";
  expect_refused(again, {"holds files that w4q would not write again", "  notes\n"});
  fs::remove(path("out/notes"));
  run(again);
}

TEST_F(Overwrite, QuantizingToADialectTouchesNothingElse) {
  const Arguments way{"quantize", model_, "-o", path("out"), "--scheme", "int4-g128-f16", "--to", "gptq-v2"};
  fs::create_directory(path("out.packed"));
  std::ofstream(path("out.packed/mine")) << "mine";
  run(way);
  EXPECT_EQ(io::read_file(path("out.packed/mine")), "mine");
  for (const auto& entry : fs::directory_iterator(path(""))) {
    EXPECT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path();
  }
  // A model that w4q made is an input all the same.
  run({"quantize", model_, "-o", path("folded"), "--fold-rotations", "--keep", "*"});
  expect_refused(
      {"quantize", path("folded"), "-o", path("folded"), "--scheme", "int4-g128-f16", "--to", "gptq-v2", "--overwrite"},
      {"is the input"});
}

}  // namespace
}  // namespace w4q::test
