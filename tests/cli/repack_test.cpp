// What w4q repack and its neighbours say to inputs and options that are not theirs.
#include <fstream>

#include "io/files.h"
#include "program.h"

namespace w4q::test {
namespace {

class Repack : public OnBundledModel {
 protected:
  static void expect_refused(const std::vector<std::string>& arguments, int status,
                             std::initializer_list<const char*> parts) {
    const auto result = run_w4q(arguments);
    std::string line;
    for (const auto& argument : arguments) line += argument + " ";
    EXPECT_EQ(result.status, status) << line << result.err;
    EXPECT_EQ(result.err.rfind("error: ", 0), 0u) << line << result.err;
    EXPECT_EQ(result.out, "") << line;
    for (const char* part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << line << result.err;
  }
};

TEST_F(Repack, RefusesWhatItWouldIgnore) {
  ASSERT_EQ(quantize("q", {"--scheme", "int4-g128-f16"}).status, 0);
  ASSERT_EQ(run_w4q({"repack", bundled_model(), "-o", path("m.gguf"), "--to", "gguf", "--quiet"}).status, 0);
  const auto refused = [&](const std::string& input, std::vector<std::string> more, const char* part) {
    more.insert(more.begin(), {"repack", input, "-o", path("never")});
    expect_refused(more, 2, {part});
    EXPECT_FALSE(std::filesystem::exists(path("never")));
  };
  refused(bundled_model(), {"--to", "gguf", "--shard-size", "1MB"}, "--shard-size means nothing to --to gguf");
  refused(bundled_model(), {"--to", "gguf-q8_0", "--compress"}, "--compress means nothing to --to gguf-q8_0");
  refused(bundled_model(), {"--to", "gguf", "--allow-lossy"}, "--allow-lossy means nothing to --to gguf");
  refused(bundled_model(), {"--to", "gguf", "--device", "cuda"}, "--device cuda belongs to --target and --layout");
  refused(path("m.gguf"), {"--to", "hf16", "--allow-lossy"}, "--allow-lossy means nothing to --to hf16");
  refused(path("q"), {"--to", "awq-gemm", "--no-tokenizer"}, "--no-tokenizer means nothing to --to awq-gemm");
  refused(path("q"), {"--target", "sm89", "--no-tokenizer"}, "--no-tokenizer belongs to --to");
}

TEST_F(Repack, SaysWhatIsNoFolderOfItsKind) {
  ASSERT_EQ(run_w4q({"repack", bundled_model(), "-o", path("m.gguf"), "--to", "gguf", "--quiet"}).status, 0);
  const auto no_folder = {"m.gguf: not a folder", "w4q repack FILE.gguf"};
  expect_refused({"repack", path("m.gguf"), "-o", path("x"), "--target", "sm89"}, 3, no_folder);
  expect_refused({"quantize", path("m.gguf"), "-o", path("x")}, 3, no_folder);
  ASSERT_EQ(quantize("q", {"--scheme", "int4-g128-f16"}).status, 0);
  ASSERT_EQ(run_w4q({"repack", path("q"), "-o", path("awq"), "--to", "awq-gemm", "--quiet"}).status, 0);
  // Another program's is a source like any other, and what that means is said.
  const auto again = run_w4q({"quantize", path("awq"), "-o", path("again"), "--quiet"});
  EXPECT_EQ(again.status, 0);
  EXPECT_NE((again.out + again.err).find("rounded once more"), std::string::npos) << again.out << again.err;
  expect_refused({"calibrate", path("q"), "--ids", "x", "-o", path("x")}, 2, {"is quantized already"});
}

/// Its config.json is that of a 16-bit model.
TEST_F(Repack, TurboQuantIsKnownByName) {
  ASSERT_EQ(quantize("q", {"--scheme", "rotated4-d128"}).status, 0);
  const std::string turbo = path("turbo");
  ASSERT_EQ(run_w4q({"repack", path("q"), "-o", turbo, "--to", "turboquant", "--quiet"}).status, 0);
  for (const std::vector<std::string>& command : {std::vector<std::string>{"verify", turbo},
                                                  {"generate", turbo, "--prompt", "x"},
                                                  {"compare", turbo, path("q"), "--base", bundled_model()},
                                                  {"quantize", turbo, "-o", path("x")},
                                                  {"calibrate", turbo, "--ids", "x", "-o", path("x")},
                                                  {"repack", turbo, "-o", path("x"), "--target", "sm89"},
                                                  {"repack", turbo, "-o", path("x"), "--to", "gguf"}}) {
    expect_refused(command, 3, {"turbo: is TurboQuant's checkpoint", "w4q repack --to w4q"});
  }
  EXPECT_EQ(run_w4q({"inspect", turbo}).status, 0);
}

/// A packed weight of another size than config.json says is not written as something else.
TEST_F(Repack, PackedShapesMustBeTheModels) {
  ASSERT_EQ(quantize("q", {"--scheme", "int4-g32-f16"}).status, 0);
  const std::string config = path("q") + "/config.json";
  std::string text = io::read_file(config);
  const std::string size = "\"intermediate_size\": 768";
  ASSERT_NE(text.find(size), std::string::npos);
  text.replace(text.find(size), size.size(), "\"intermediate_size\": 769");
  std::ofstream(config) << text;
  for (const char* to : {"gguf", "gguf-f16"}) {
    expect_refused({"repack", path("q"), "-o", path("x.gguf"), "--to", to}, 3,
                   {"mlp.gate_proj.weight: wrong shape", "expected [769, 256] by config.json, found [768, 256]"});
  }
}

}  // namespace
}  // namespace w4q::test
