// w4q hash, and the digests that every command writes and heeds.
#include <algorithm>
#include <fstream>
#include <set>

#include "core/text.h"
#include "io/files.h"
#include "io/output.h"
#include "program.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* digests = "w4q_digests.json";

class Hash : public OnBundledModel {
 protected:
  using Arguments = std::vector<std::string>;

  static ProgramResult hash(const std::string& what, const Arguments& more = {}) {
    Arguments arguments{"hash", what, "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments);
  }
  static std::string fingerprint(const std::string& what) {
    const auto result = hash(what, {"--json"});
    EXPECT_EQ(result.status, 0) << result.err;
    return result.json()["fingerprint"];
  }
  static void run(Arguments arguments, int status = 0) {
    arguments.emplace_back("--quiet");
    const auto result = run_w4q(arguments);
    ASSERT_EQ(result.status, status) << join(arguments, " ") << "\n" << result.out << result.err;
  }
  static void flip(const std::string& file, std::streamoff from_end) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(-from_end, std::ios::end);
    const int byte = stream.get();
    stream.seekp(-from_end, std::ios::end);
    stream.put(static_cast<char>(byte ^ 16));
  }
  static void expect_part(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " not in\n" << text;
  }
};

TEST_F(Hash, DoesNotDependOnShardsCompressionOrThreads) {
  quantize("plain", {"--k", "3"});
  quantize("shards", {"--k", "3", "--shard-size", "300kB"});
  quantize("zst", {"--k", "3", "--compress", "--threads", "1"});
  quantize("other", {"--k", "4"});
  const std::string plain = fingerprint(path("plain"));
  EXPECT_EQ(plain.size(), 32u);
  for (const char* same : {"shards", "zst"}) {
    EXPECT_EQ(fingerprint(path(same)), plain) << same;
    EXPECT_EQ(io::read_file(path(same) + "/" + digests), io::read_file(path("plain") + "/" + digests)) << same;
  }
  EXPECT_NE(fingerprint(path("other")), plain);
  const auto file = hash(path("plain") + "/model.safetensors", {"--json"}).json();
  EXPECT_EQ(file["tensors_fingerprint"], hash(path("plain"), {"--json"}).json()["tensors_fingerprint"]);
  EXPECT_EQ(run_w4q({"inspect", path("plain"), "--json"}).json()["fingerprint"], plain);
  EXPECT_EQ(run_w4q({"inspect", path("plain"), "--digests", "--json"}).json()["fingerprint"], plain);
}

/// Every command writes digests that its output has, and that say what it was made from.
TEST_F(Hash, WhateverIsWrittenIsAsItWasWritten) {
  run({"quantize", two_layer_model(), "-o", path("int4"), "--scheme", "int4-g32-f16-asym"});
  run({"quantize", two_layer_model(), "-o", path("residual"), "--scheme", "rotated4-d128+rotated4-d128"});
  run({"quantize", two_layer_model(), "-o", path("folded"), "--fold-rotations", "--keep", "*"});
  run({"quantize", path("folded"), "-o", path("of-folded"), "--k", "4"});
  run({"quantize", two_layer_model(), "-o", path("awq"), "--scheme", "int4-g32-f16-asym", "--to", "awq-gemm"});
  run({"repack", path("int4"), "-o", path("tiles"), "--target", "sm89"});
  run({"repack", path("residual"), "-o", path("turbo"), "--to", "turboquant"});
  run({"repack", path("turbo"), "-o", path("back"), "--to", "w4q"});
  run({"repack", two_layer_model(), "-o", path("m.gguf"), "--to", "gguf"});
  run({"repack", path("m.gguf"), "-o", path("from-gguf"), "--to", "hf16"});
  for (const char* name :
       {"int4", "residual", "folded", "of-folded", "awq", "tiles", "turbo", "back", "m.gguf", "from-gguf"}) {
    const auto result = hash(path(name), {"--check"});
    EXPECT_EQ(result.status, 0) << name << ": " << result.out << result.err;
    if (name != std::string("turbo") && name != std::string("m.gguf")) run({"verify", path(name)});
  }
  for (const char* name : {"int4", "residual", "folded", "of-folded", "awq", "tiles", "back"}) {
    const auto result = run_w4q({"verify", path(name), "--base", two_layer_model(), "--quiet"});
    EXPECT_EQ(result.status, 0) << name << result.out << result.err;
    expect_part(result.out, "pass  base: is what it was made from");
  }
  run({"verify", path("residual"), "--no-residual"});
  fs::remove_all(path("residual") + "/residual");
  run({"verify", path("residual")});
}

/// Whatever the registries hold: every layout and every format, of schemes that have codes in each of them.
TEST_F(Hash, EveryLayoutAndFormatIsAsItWasWritten) {
  const io::Json layouts = run_w4q({"list", "--json"}).json(),
                 dialects = run_w4q({"list", "--dialects", "--json"}).json();
  std::set<std::string> taken;
  std::vector<Arguments> forms;
  for (const auto& row : layouts.at("layouts")) forms.push_back({"--layout", row["name"]});
  for (const auto& row : dialects.at("conversions")) {
    if (row["from"] == "folder") forms.push_back({"--to", row["to"]});
  }
  ASSERT_GE(forms.size(), 60u);
  const std::string& model = one_layer_model();
  const auto try_form = [&](const std::string& source, const Arguments& form) {
    const bool to_gguf = form[1].starts_with("gguf");
    const std::string out = to_gguf ? path(form[1] + ".gguf") : concat(source, "-", form[1]);
    const auto repacked = run_w4q({"repack", source, "-o", out, form[0], form[1], "--quiet"});
    if (repacked.status != 0) return;
    const bool is_first = taken.insert(form[1]).second;
    const auto checked = hash(out, {"--check"});
    EXPECT_EQ(checked.status, 0) << out << ": " << checked.out << checked.err;
    if (!is_first || to_gguf || form[1] == "turboquant") return;
    const auto verified = run_w4q({"verify", out, "--base", model, "--json", "--quiet"}).json();
    EXPECT_EQ(verified["checks"][0]["name"], "digests") << out;
    EXPECT_TRUE(verified["checks"][0]["passed"]) << out;
    EXPECT_EQ(verified["checks"][1]["name"], "base") << out;
    EXPECT_TRUE(verified["checks"][1]["passed"]) << out;
  };
  for (const char* scheme : {"kbit3-b32-e4m4", "int4-g128-f16", "int4-g32-f16-asym", "int8-g128-f16", "rotated4-d128",
                             "nvfp4", "fp8-block128", "trellis2"}) {
    run({"quantize", model, "-o", path(scheme), "--scheme", scheme, "--keep", "*.mlp.*"});
    for (const Arguments& form : forms) {
      if (!form[1].starts_with("gguf")) try_form(path(scheme), form);
    }
  }
  const auto is_searched = [](const std::string& form) {
    return form == "exl3" || form.starts_with("gguf-iq2") || form.starts_with("gguf-iq3");
  };
  for (const Arguments& form : forms) {
    if (form[1].starts_with("gguf") && !is_searched(form[1])) try_form(model, form);
  }
  // No quantizer makes the tables of bitsandbytes, and only one architecture has gpt-oss's stacks; these read and write like
  // the others. What takes a long search (exl3, I-quants of 2 and 3 bits) has tests of its own.
  for (const Arguments& form : forms) {
    const bool expected = !form[1].starts_with("bitsandbytes") && !form[1].ends_with("marlin") &&
                          form[1] != "gpt-oss" && !is_searched(form[1]);
    EXPECT_TRUE(taken.contains(form[1]) || !expected) << form[1] << " was taken by no scheme";
  }
}

TEST_F(Hash, WritesOnceAndNamesWhatDiffers) {
  const std::string model = copy_bundled_model(path("m"));
  const auto without = hash(model, {"--check"});
  EXPECT_EQ(without.status, 2);
  expect_part(without.err, "w4q hash --write makes it");
  run({"hash", model, "--write"});
  run({"hash", model, "--check"});
  run({"hash", model, "--write"});
  flip(model + "/model.safetensors", 10);
  const auto checked = hash(model, {"--check", "--json"});
  EXPECT_EQ(checked.status, 1);
  ASSERT_EQ(checked.json()["differences"].size(), 1u);
  expect_part(checked.json()["differences"][0], "does not hold the bytes that were written");
  const auto refused = hash(model, {"--write"});
  EXPECT_EQ(refused.status, 2);
  expect_part(refused.err, "is not what was written");
  run({"verify", model}, 1);
  run({"hash", model, "--write", "--overwrite"});
  run({"verify", model});
}

/// What was damaged goes no further.
TEST_F(Hash, NothingIsMadeOfWhatIsNotAsItWasWritten) {
  quantize("q", {"--scheme", "int4-g32-f16-asym"});
  flip(path("q") + "/model.safetensors", 10);
  const std::string model = copy_bundled_model(path("m"));
  run({"hash", model, "--write"});
  flip(model + "/model.safetensors", 10);
  run({"repack", bundled_model(), "-o", path("m.gguf"), "--to", "gguf"});
  flip(path("m.gguf"), 1000);
  const Arguments ways[] = {
      {"repack", path("q"), "--target", "sm89"}, {"repack", path("q"), "--to", "gptq-v2"},
      {"repack", path("q"), "--to", "gguf-f16"}, {"repack", model, "--to", "gguf"},
      {"quantize", model, "--k", "3"},           {"quantize", model, "--fold-rotations", "--keep", "*"}};
  for (Arguments way : ways) {
    way.insert(way.end(), {"-o", path("out"), "--quiet"});
    const auto result = run_w4q(way);
    EXPECT_EQ(result.status, 3) << join(way, " ");
    expect_part(result.err, "is not what was written");
    EXPECT_FALSE(fs::exists(path("out")) || fs::exists(path("out.") + digests)) << join(way, " ");
  }
}

TEST_F(Hash, OverwriteKeepsWhatTheUserChanged) {
  const Arguments again{"quantize", bundled_model(), "-o", path("q"), "--k", "3", "--overwrite"};
  quantize("q", {"--k", "3"});
  run(again);
  flip(path("q") + "/model.safetensors", 10);
  const std::string before = folder_digest(path("q"));
  auto refused = run_w4q(again);
  EXPECT_EQ(refused.status, 2);
  expect_part(refused.err, "was changed since w4q wrote it, so it is not replaced");
  expect_part(refused.err, "does not hold the bytes that were written");
  EXPECT_EQ(folder_digest(path("q")), before);
  run({"hash", path("q"), "--write", "--overwrite"});
  run(again);
  io::Json config = io::read_json(path("q/config.json"));
  config["rope_theta"] = 5;
  io::write_file(path("q/config.json"), config.dump(2), true);
  refused = run_w4q(again);
  EXPECT_EQ(refused.status, 2);
  expect_part(refused.err, "config.json: rope_theta is 5, written was ");
  // An output of a version that wrote no digests is replaced as ever.
  fs::remove(path("q/") + digests);
  run(again);
}

TEST_F(Hash, OfGgufFilesStandBeside) {
  run({"repack", bundled_model(), "-o", path("m.gguf"), "--to", "gguf"});
  const std::string beside = path("m.gguf.") + digests;
  const std::string first = io::read_file(beside);
  run({"repack", bundled_model(), "-o", path("m.gguf"), "--to", "gguf-q8_0", "--overwrite"});
  EXPECT_NE(io::read_file(beside), first);
  run({"hash", path("m.gguf"), "--check"});
  flip(path("m.gguf"), 1000);
  const auto checked = hash(path("m.gguf"), {"--check"});
  EXPECT_EQ(checked.status, 1);
  expect_part(checked.out, "does not hold the bytes that were written");
}

}  // namespace
}  // namespace w4q::test
