// What a user's disk and files can do to w4q: one clear error each, the right exit status, nothing left behind.
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "program.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;

class BadInput : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  /// Runs quantize on `model`, expects `status` and all `parts` in the message, and an untouched disk.
  void expect_failure(const std::string& model, int status, std::initializer_list<const char*> parts,
                      const std::function<void()>& prepare = {}, std::vector<std::string> more = {}) {
    const auto before = listing();
    std::vector<std::string> arguments{"quantize", model, "-o", path("out"), "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto result = run_w4q(arguments, prepare);
    EXPECT_EQ(result.status, status) << result.err;
    EXPECT_EQ(result.err.rfind("error: ", 0), 0u) << result.err;
    for (const char* part : parts)
      EXPECT_NE(result.err.find(part), std::string::npos) << "lacks " << part << ":\n" << result.err;
    EXPECT_EQ(listing(), before) << "something was left behind";
  }

  /// Everything in the test's folder, hidden files too.
  std::vector<std::string> listing() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) names.push_back(entry.path().string());
    std::sort(names.begin(), names.end());
    return names;
  }

  /// Overwrites bytes of the model's data buffer, counted from its end.
  static void patch(const std::string& model, int64_t from_end, const void* bytes, size_t size) {
    std::fstream file(model + "/model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-from_end, std::ios::end);
    file.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(size));
  }

  static void replace_in(const std::string& file, const std::string& from, const std::string& to) {
    std::ifstream in(file);
    std::string text((std::istreambuf_iterator<char>(in)), {});
    const auto place = text.find(from);
    ASSERT_NE(place, std::string::npos);
    text.replace(place, from.size(), to);
    std::ofstream(file) << text;
  }

  TemporaryFolder folder_;
};

TEST_F(BadInput, NoSuchFolder) {
  expect_failure(path("nothing"), 3, {"nothing: does not exist", "hint:"});
  expect_failure("", 3, {"\"\": does not exist"});
  expect_failure(bundled_model() + "/config.json", 3, {"config.json: not a folder", "hint:"});
  fs::create_directory(path("empty"));
  expect_failure(path("empty"), 3, {"config.json: there is none", "hint: give the folder that holds"});
}

/// What stands in the place of weights after a download that failed.
TEST_F(BadInput, WhatIsNoWeightsSaysWhatItLooksLike) {
  const auto model = copy_bundled_model(folder_ / "m");
  const auto fails = [&](const std::string& bytes, std::initializer_list<const char*> parts) {
    std::ofstream(model + "/model.safetensors") << bytes;
    expect_failure(model, 3, parts);
  };
  fails("", {"too short", "found 0", "hint: download or copy"});
  fails("<html><body>404 Not Found</body></html>", {"header", "hint: this looks like a web page"});
  fails("version https://git-lfs.github.com/spec/v1\n", {"hint: this looks like a Git LFS pointer"});
  fails("{\"architectures\": []}", {"header length", "hint: this looks like JSON"});
  fs::remove(model + "/model.safetensors");
  fs::copy(bundled_model() + "/model.safetensors", model + "/model-00001-of-00002.safetensors");
  expect_failure(model, 3, {"model-00001-of-00002.safetensors: is one of 2 shards", "hint: finish the download"});
}

TEST_F(BadInput, NaNInAWeightIsNamedWithItsPlace) {
  const auto model = copy_bundled_model(folder_ / "m");
  const uint16_t nan = 0x7FC0;
  // The last tensor of the file is the last by name among the BF16 ones: a norm. Damage a projection before it.
  patch(model, 2'000'000, &nan, sizeof nan);
  expect_failure(model, 3, {"NaN", "row", "model."});
}

TEST_F(BadInput, LogitsThatAreNotFiniteDrawNoToken) {
  const auto model = copy_bundled_model(folder_ / "m");
  const uint16_t nan = 0x7FC0;
  patch(model, 2, &nan, sizeof nan);  // of the last norm
  for (const char* temperature : {"0", "1"}) {
    const auto result = run_w4q({"generate", model, "--prompt", "a", "--max-tokens", "3", "--temperature", temperature,
                                 "--device", "cpu", "--quiet"});
    EXPECT_EQ(result.status, 3) << result.out;
    EXPECT_NE(result.err.find("logit"), std::string::npos) << result.err;
  }
}

TEST_F(BadInput, ShardCutShort) {
  const auto model = copy_bundled_model(folder_ / "m");
  fs::resize_file(model + "/model.safetensors", fs::file_size(model + "/model.safetensors") - 1000);
  expect_failure(model, 3, {"model.safetensors"});
}

TEST_F(BadInput, UnknownArchitectureSaysWhereTheKnownOnesAre) {
  const auto model = copy_bundled_model(folder_ / "m");
  replace_in(model + "/config.json", "LlamaForCausalLM", "MambaForCausalLM");
  replace_in(model + "/config.json", "\"llama\"", "\"mamba\"");
  std::ofstream(folder_ / "t.txt") << "A text.";
  const auto result = run_w4q({"calibrate", model, "--text", (folder_ / "t.txt").string(), "-o",
                               (folder_ / "s.safetensors").string(), "--quiet"});
  EXPECT_EQ(result.status, 3);
  for (const char* part : {"MambaForCausalLM", "w4q list"}) {
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
  }
}

TEST_F(BadInput, MissingTensorAndWrongShapeAreNamed) {
  const auto more_layers = copy_bundled_model(folder_ / "more");
  replace_in(more_layers + "/config.json", "\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5");
  expect_failure(more_layers, 3, {"model.layers.4."});
  const auto wider = copy_bundled_model(folder_ / "wider");
  replace_in(wider + "/config.json", "\"intermediate_size\": 768", "\"intermediate_size\": 1024");
  expect_failure(wider, 3, {"mlp", "1024", "768"});
}

TEST_F(BadInput, MissingConfigAndBrokenJson) {
  const auto model = copy_bundled_model(folder_ / "m");
  fs::remove(model + "/config.json");
  expect_failure(model, 3, {"config.json"});
  std::ofstream(model + "/config.json") << "{\"architectures\": [";
  expect_failure(model, 3, {"config.json"});
  std::ofstream(model + "/config.json") << "";
  expect_failure(model, 3, {"config.json: is empty", "hint:"});
  std::ofstream(model + "/config.json") << "[1, 2]";
  expect_failure(model, 3, {"config.json", "not a JSON object", "found [1,2]", "hint: take config.json from"});
  std::ofstream(model + "/config.json") << R"({"model_type": "llama", "vocab_size": "many"})";
  expect_failure(model, 3, {"vocab_size: expected an integer", "found \"many\"", "hint: take config.json from"});
}

TEST_F(BadInput, ExistingOutputIsNotTouched) {
  fs::create_directory(path("out"));
  std::ofstream(path("out") + "/thesis.txt") << "years of work";
  expect_failure(bundled_model(), 2, {"out", "--overwrite"});
  // Not even with --overwrite: it is no output of w4q.
  expect_failure(bundled_model(), 2, {"out"}, {}, {"--overwrite"});
  EXPECT_TRUE(fs::exists(path("out") + "/thesis.txt"));
}

TEST_F(BadInput, OutputInsideOrEqualToTheInput) {
  const auto model = copy_bundled_model(folder_ / "m");
  EXPECT_EQ(run_w4q({"quantize", model, "-o", model, "--overwrite"}).status, 2);
  EXPECT_EQ(run_w4q({"quantize", model, "-o", model + "/sub"}).status, 2);
  EXPECT_FALSE(fs::exists(model + "/sub"));
}

TEST_F(BadInput, OverwriteReplacesAnEarlierOutput) {
  ASSERT_EQ(run_w4q({"quantize", bundled_model(), "-o", path("out"), "--k", "2", "--quiet"}).status, 0);
  const auto first = folder_digest(path("out"));
  expect_failure(bundled_model(), 2, {"--overwrite"});
  ASSERT_EQ(run_w4q({"quantize", bundled_model(), "-o", path("out"), "--k", "3", "--overwrite", "--quiet"}).status, 0);
  EXPECT_NE(folder_digest(path("out")), first);
  EXPECT_EQ(listing().front().find(".out"), std::string::npos) << "a partial folder was left";
}

TEST_F(BadInput, UnwritableParent) {
  if (::geteuid() == 0) {
    // Root writes everywhere but where there is no folder at all.
    const auto result = run_w4q({"quantize", bundled_model(), "-o", "/proc/w4q-out", "--quiet"});
    EXPECT_EQ(result.status, 3) << result.err;
    return;
  }
  fs::create_directory(path("closed"));
  fs::permissions(path("closed"), fs::perms::owner_read | fs::perms::owner_exec);
  const auto result = run_w4q({"quantize", bundled_model(), "-o", path("closed") + "/out", "--quiet"});
  EXPECT_EQ(result.status, 3);
  EXPECT_NE(result.err.find("closed"), std::string::npos) << result.err;
}

TEST_F(BadInput, FullDiskIsOneErrorAndLeavesNothing) {
  // A limit on the size of files stands in for a full disk: write() fails in the middle.
  const auto limit = [] {
    const rlimit size{1'000'000, 1'000'000};
    ::setrlimit(RLIMIT_FSIZE, &size);
  };
  expect_failure(bundled_model(), 3, {"model"}, limit);
}

TEST_F(BadInput, MissingTokenizerNamesTheFile) {
  const auto model = copy_bundled_model(folder_ / "m");
  fs::remove(model + "/tokenizer.json");
  const auto result = run_w4q({"verify", model, "--ppl", bundled_model() + "/own/selfgen.txt"});
  EXPECT_EQ(result.status, 1);
  EXPECT_NE(result.out.find("tokenizer.json is missing"), std::string::npos) << result.out;
}

TEST_F(BadInput, DamagedPackedCheckpointFailsVerification) {
  ASSERT_EQ(run_w4q({"quantize", bundled_model(), "-o", path("q"), "--k", "3", "--quiet"}).status, 0);
  ASSERT_EQ(run_w4q({"verify", path("q"), "--base", bundled_model(), "--quiet"}).status, 0);
  // One kept tensor changed by one bit: only the comparison with the base can see it.
  fs::copy(path("q"), path("kept"), fs::copy_options::recursive);
  const uint16_t one = 0x3F80 + 1;
  patch(path("kept"), 300'000, &one, sizeof one);
  const auto kept = run_w4q({"verify", path("kept"), "--base", bundled_model(), "--quiet"});
  EXPECT_EQ(kept.status, 1) << kept.out << kept.err;
  // A parameter that config.json no longer lists as packed is missing.
  fs::copy(path("q"), path("lost"), fs::copy_options::recursive);
  replace_in(path("lost") + "/config.json", "model.layers.2.mlp.up_proj", "model.layers.2.mlp.up_prog");
  const auto lost = run_w4q({"verify", path("lost"), "--quiet"});
  EXPECT_EQ(lost.status, 1);
  EXPECT_NE(lost.out.find("model.layers.2.mlp.up_proj.weight is missing"), std::string::npos) << lost.out;
}

TEST_F(BadInput, TokenFilesOutsideTheVocabulary) {
  std::ofstream(path("bad.u16"), std::ios::binary) << std::string(4096, '\x7F');
  const auto outside = run_w4q({"verify", bundled_model(), "--ids", path("bad.u16")});
  EXPECT_EQ(outside.status, 3);
  EXPECT_NE(outside.err.find("vocabulary"), std::string::npos) << outside.err;
  std::ofstream(path("odd.u16"), std::ios::binary) << "abc";
  EXPECT_EQ(run_w4q({"verify", bundled_model(), "--ids", path("odd.u16")}).status, 3);
}

/// Or the next file that is opened would be what progress is written to. A stream that is there can be written to by
/// its number.
TEST_F(BadInput, AClosedStderrIsNoNumberForAnOutput) {
  const auto result = run_w4q({"tokenize", bundled_model(), bundled_model() + "/config.json", "-o", "/proc/self/fd/2"},
                              [] { ::close(STDERR_FILENO); });
  EXPECT_EQ(result.status, 0);
  const auto lost = run_w4q({"list"}, [] { ::close(STDOUT_FILENO); });
  EXPECT_EQ(lost.status, 3) << lost.err;
}

TEST_F(BadInput, StdoutThatCannotBeWritten) {
  const auto result = run_w4q({"list"}, [] {
    if (std::freopen("/dev/full", "w", stdout) == nullptr) std::_Exit(99);
  });
  EXPECT_EQ(result.status, 3) << result.err;
}

/// Nobody writes into a pipe that lies in a model's folder, and a device never ends.
TEST_F(BadInput, WhatIsNoFileIsNotWaitedFor) {
  const auto model = copy_bundled_model(folder_ / "m");
  for (const std::string name : {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"}) {
    const fs::path file = fs::path(model) / name;
    fs::rename(file, path("kept"));
    const auto expect_refused = [&](const char* what) {
      if (name != "tokenizer.json") return expect_failure(model, 3, {name.c_str(), what});
      const auto result = run_w4q({"tokenize", model, bundled_model() + "/config.json", "-o", path("ids.u16")});
      EXPECT_EQ(result.status, 3) << result.err;
      EXPECT_NE(result.err.find(what), std::string::npos) << result.err;
      const auto gguf = run_w4q({"repack", model, "-o", path("m.gguf"), "--to", "gguf"});
      EXPECT_EQ(gguf.status, 3) << gguf.err;
    };
    ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
    expect_refused("not a file");
    fs::remove(file);
    fs::create_symlink("/dev/zero", file);
    expect_refused("not a file");
    fs::remove(file);
    const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s", file.c_str());
    ASSERT_EQ(::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    expect_refused("cannot open");
    ::close(socket);
    fs::remove(file);
    fs::rename(path("kept"), file);
  }
}

TEST_F(BadInput, LinksThatLeadInACircle) {
  const auto model = copy_bundled_model(folder_ / "m");
  fs::create_symlink("loop", folder_ / "loop");
  expect_failure(path("loop"), 3, {"loop"});
  for (const auto& arguments :
       std::vector<std::vector<std::string>>{{"verify", path("loop")},
                                             {"hash", path("loop")},
                                             {"inspect", path("loop")},
                                             {"repack", path("loop"), "-o", path("out"), "--to", "w4q"},
                                             {"tokenize", path("loop"), path("loop"), "-o", path("ids.u16")},
                                             {"quantize", model, "-o", path("loop")},
                                             {"generate", path("loop"), "--prompt", "a"}}) {
    const auto result = run_w4q(arguments);
    EXPECT_TRUE(result.status == 3 || result.status == 2) << arguments[0] << ": " << result.status << result.err;
    EXPECT_NE(result.err.find("loop"), std::string::npos) << result.err;
  }
  for (const std::string name :
       {"config.json", "generation_config.json", "model.safetensors", "quantize_config.json"}) {
    const fs::path file = fs::path(model) / name;
    const bool there = fs::exists(file);
    if (there) fs::rename(file, path("kept"));
    fs::create_symlink(name, file);
    expect_failure(model, 3, {});
    fs::remove(file);
    if (there) fs::rename(path("kept"), file);
  }
}

TEST_F(BadInput, ConfigsBeyondAllMeasureAreNotRead) {
  const auto model = copy_bundled_model(folder_ / "m");
  for (const std::string name : {"config.json", "generation_config.json", "model.safetensors.index.json"}) {
    const fs::path file = fs::path(model) / name;
    const bool there = fs::exists(file);
    if (there) fs::copy_file(file, path("kept"));
    std::ofstream(file, std::ios::app) << "";
    fs::resize_file(file, 17'000'000'000);  // a hole, which takes no space
    if (!there) fs::rename(fs::path(model) / "model.safetensors", path("weights"));
    expect_failure(model, 3, {name.c_str(), "too large", "16000000"});
    fs::remove(file);
    if (there) fs::rename(path("kept"), file);
  }
  fs::rename(path("weights"), fs::path(model) / "model.safetensors");
  fs::resize_file(fs::path(model) / "tokenizer.json", 65'000'000);
  const auto result = run_w4q({"tokenize", model, bundled_model() + "/config.json", "-o", path("ids.u16")});
  EXPECT_EQ(result.status, 3);
  EXPECT_NE(result.err.find("tokenizer.json: too large"), std::string::npos) << result.err;
}

/// What travels along, and what is said of the rest.
TEST_F(BadInput, OnlyWhatBelongsToTheModelTravelsAlong) {
  const auto model = copy_bundled_model(folder_ / "m");
  std::ofstream(path("secret")) << "s";
  fs::create_symlink(path("secret"), fs::path(model) / "notes.txt");
  std::ofstream(fs::path(model) / "optimizer.pt") << "o";
  const auto quantize = [&](const std::string& out, std::vector<std::string> more) {
    more.insert(more.begin(), {"quantize", model, "-o", path(out), "--quiet"});
    const auto result = run_w4q(more);
    EXPECT_EQ(result.status, 0) << result.err;
    return result.out;
  };
  const std::string text = quantize("q", {});
  for (const char* part : {"note: notes.txt: not copied, a link out of the model's folder",
                           "note: optimizer.pt: not copied", "note: own: not copied, a sub-folder; --copy-all"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_TRUE(fs::exists(path("q/tokenizer.json")));
  for (const char* name : {"notes.txt", "optimizer.pt", "own"}) EXPECT_FALSE(fs::exists(folder_ / "q" / name)) << name;
  const std::string all = quantize("all", {"--copy-all"});
  EXPECT_NE(all.find("note: notes.txt"), std::string::npos) << all;
  EXPECT_FALSE(fs::exists(path("all/notes.txt")));
  EXPECT_TRUE(fs::exists(path("all/own/selfgen.txt")) && fs::exists(path("all/optimizer.pt")));
}

TEST_F(BadInput, TheDiskHasRoomForWhatTravelsAlong) {
  const auto model = copy_bundled_model(folder_ / "m");
  std::ofstream(fs::path(model) / "optimizer.pt") << "";
  struct statvfs disk {};
  ASSERT_EQ(::statvfs(model.c_str(), &disk), 0);
  const auto free = static_cast<uintmax_t>(disk.f_bavail) * disk.f_frsize;
  std::error_code too_large_for_the_file_system;
  fs::resize_file(fs::path(model) / "optimizer.pt", free + (uintmax_t{1} << 30), too_large_for_the_file_system);
  if (too_large_for_the_file_system) GTEST_SKIP() << "no such file can be made here";
  expect_failure(model, 3, {"not enough space", "needed: "}, {}, {"--copy-all"});
}

/// Weights beyond what a scale of f16 times 7 reaches.
TEST_F(BadInput, WeightsThatNoScaleReaches) {
  const auto model = copy_bundled_model(folder_ / "m");
  const uint16_t million = 0x4974;  // 999424 in bf16
  patch(model, 2'000'000, &million, sizeof million);
  expect_failure(
      model, 3,
      {"_proj.weight: 1 of", "scales of int4-g128-f16 would be too large", "999424 at row", "--keep", "int4-g128-bf16"},
      {}, {"--scheme", "int4-g128-f16"});
  for (const char* scheme : {"int4-g128-bf16", "int8-g128-f16", "rotated4-d128"}) {
    const std::string out = path(scheme);
    const auto result = run_w4q({"quantize", model, "-o", out, "--scheme", scheme, "--quiet"});
    EXPECT_EQ(result.status, 0) << result.err;
    // That the codes are right, not that rounding beside an outlier is fine.
    EXPECT_EQ(run_w4q({"verify", out, "--base", model, "--quiet", "--no-limits"}).status, 0) << scheme;
  }
}

TEST_F(BadInput, TheLargestFiniteWeights) {
  const auto model = copy_bundled_model(folder_ / "m");
  const std::vector<uint16_t> largest(256, 0x7F7F);
  patch(model, 2'000'000, largest.data(), 2 * largest.size());
  expect_failure(model, 3, {"_proj.weight: too large to be rotated", "3.38953e+38 at row"}, {},
                 {"--scheme", "rotated4-d128"});
  expect_failure(model, 3, {"_proj.weight", "would be too large"}, {}, {"--scheme", "int4-g128-f16-asym"});
}

}  // namespace
}  // namespace w4q::test
