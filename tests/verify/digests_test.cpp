// What stands beside the weights names everything that is not as it was written.
#include "checkpoint/digests.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>

#include "core/text.h"
#include "io/files.h"
#include "packed_model.h"

namespace w4q::verify {
namespace {

namespace fs = std::filesystem;
using test::check_options;

const std::string gate = "model.layers.2.mlp.gate_proj.0.", up = "model.layers.2.mlp.up_proj.0.";

class DigestsRung : public ::testing::Test {
 protected:
  void SetUp() override { model_ = test::quantized_model(folder_, 3); }

  Findings climb(const fs::path& base = {}) const {
    CheckContext context(check_options(model_, base));
    return verify::climb(context);
  }
  Check check(const std::string& name, const fs::path& base = {}) const {
    const Findings findings = climb(base);
    for (const Check& each : findings.checks.checks()) {
      if (each.name == name) return each;
    }
    ADD_FAILURE() << "no check is called " << name;
    return {};
  }
  /// One of the faults, and the only one unless `count`, has all parts.
  void expect_fault(std::initializer_list<std::string> parts, size_t count = 1) const {
    const Check digests = check("digests");
    EXPECT_FALSE(digests.passed);
    EXPECT_EQ(digests.faults.size(), count) << join(digests.faults, "\n");
    const bool named = std::ranges::any_of(digests.faults, [&](const std::string& fault) {
      return std::ranges::all_of(parts, [&](const auto& part) { return fault.find(part) != std::string::npos; });
    });
    EXPECT_TRUE(named) << join(parts, ", ") << " not in\n" << join(digests.faults, "\n");
  }
  void change_config(const std::function<void(io::Json&)>& change) const {
    io::Json config = io::read_json(model_ / "config.json");
    change(config);
    io::write_file(model_ / "config.json", config.dump(2), true);
  }

  test::TemporaryFolder folder_;
  fs::path model_;
};

TEST_F(DigestsRung, WhatWasWrittenPasses) {
  const Findings findings = climb(test::bundled_model());
  EXPECT_TRUE(findings.checks.passed()) << findings.text;
  EXPECT_EQ(findings.checks.checks()[0].name, "digests");
  EXPECT_EQ(findings.checks.checks()[1].name, "base");
  EXPECT_EQ(findings.json["fingerprint"].get<std::string>().size(), 32u);
}

TEST_F(DigestsRung, WithoutThemNothingIsSaid) {
  fs::remove(model_ / checkpoint::digests_file);
  EXPECT_EQ(climb().checks.checks()[0].name, "structure");
}

TEST_F(DigestsRung, NamesEveryBit) {
  for (const std::string& name :
       {gate + "codes", gate + "scales", gate + "codebook", std::string("model.norm.weight")}) {
    const auto flip = [&] {
      test::rewrite(model_, [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
        if (tensor.name == name) bytes[bytes.size() / 2] ^= std::byte{4};
        return true;
      });
    };
    flip();
    expect_fault({name + " does not hold the bytes that were written: expected ", ", got "});
    flip();
    EXPECT_TRUE(check("digests").passed);
  }
}

TEST_F(DigestsRung, NamesWhatStandsInAnothersPlace) {
  std::map<std::string, std::vector<std::byte>> held;
  test::rewrite(model_, [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
    held[tensor.name] = bytes;
    return true;
  });
  test::rewrite(model_, [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
    if (tensor.name == gate + "codes") bytes = held.at(up + "codes");
    if (tensor.name == up + "codes") bytes = held.at(gate + "codes");
    return true;
  });
  expect_fault({gate + "codes holds what was written as " + up + "codes"}, 2);
  expect_fault({up + "codes holds what was written as " + gate + "codes"}, 2);
}

TEST_F(DigestsRung, NamesMissingExtraAndMisshapenTensors) {
  test::rewrite(model_, [&](io::PlannedTensor& tensor, std::vector<std::byte>&) {
    if (tensor.name == gate + "scales") return false;
    if (tensor.name == "model.norm.weight") tensor.dtype = DType::f16;
    if (tensor.name == up + "scales") std::swap(tensor.shape[0], tensor.shape[1]);
    if (tensor.name == "model.layers.0.input_layernorm.weight") tensor.name = "other";
    return true;
  });
  expect_fault({gate + "scales is missing"}, 5);
  expect_fault({"model.norm.weight is F16", "written was BF16"}, 5);
  expect_fault({up + "scales is U8 [", "written was U8 ["}, 5);
  expect_fault({"model.layers.0.input_layernorm.weight is missing"}, 5);
  expect_fault({"other is extra: it holds what was written as model.layers.0.input_layernorm.weight"}, 5);
}

TEST_F(DigestsRung, NamesKeysOfConfig) {
  change_config([](io::Json& config) {
    config["rope_theta"] = 12345;
    config.erase("rms_norm_eps");
    config["quantization_config"]["linears"]["model.layers.0.mlp.up_proj"]["dtype"] = "F16";
    config["new"] = {{"a", 1}};
  });
  expect_fault({"config.json: rope_theta is 12345, written was 500000.0"}, 4);
  expect_fault({"config.json: rms_norm_eps is missing, written was 1e-"}, 4);
  expect_fault({"config.json: quantization_config.linears.model.layers.0.mlp.up_proj.dtype is \"F16\""}, 4);
  expect_fault({"config.json: new is {\"a\":1}, written was nothing"}, 4);
}

TEST_F(DigestsRung, OrderAndSpacingOfConfigMeanNothing) {
  const nlohmann::json sorted = io::read_json(model_ / "config.json");
  io::write_file(model_ / "config.json", sorted.dump(), true);
  EXPECT_TRUE(climb().checks.passed()) << climb().text;
}

TEST_F(DigestsRung, NamesOtherFiles) {
  std::ofstream(model_ / "tokenizer.json", std::ios::app) << " ";
  fs::remove(model_ / "generation_config.json");
  std::ofstream(model_ / "chat_template.jinja") << "{{ messages }}";
  std::ofstream(model_ / "README.md") << "means nothing";
  expect_fault({"tokenizer.json is not the file that was written: expected "}, 3);
  expect_fault({"generation_config.json is missing"}, 3);
  expect_fault({"chat_template.jinja is extra"}, 3);
}

/// Nothing is read of it here, but other programs load every weight file that they find.
TEST_F(DigestsRung, NamesAStaleWeightFile) {
  fs::copy(model_ / "model.safetensors", model_ / "model-00001-of-00002.safetensors");
  expect_fault({"model-00001-of-00002.safetensors is extra"}, 1);
  auto accepted = checkpoint::open_digests(model_);
  checkpoint::write_digests(model_, accepted, true);
  EXPECT_TRUE(check("digests").passed);
}

/// It does not end the climb: how bad it is, the rungs behind it say.
TEST_F(DigestsRung, TheOthersAreClimbedAllTheSame) {
  test::rewrite(model_, [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
    if (tensor.name == gate + "codes") bytes[0] ^= std::byte{1};
    return true;
  });
  const Findings findings = climb(test::bundled_model());
  EXPECT_FALSE(findings.checks.passed());
  EXPECT_TRUE(findings.json.contains("weights")) << findings.text;
}

/// What it names stays named where a later rung cannot even begin.
TEST_F(DigestsRung, IsToldThoughNothingElseCanGoOn) {
  change_config([](io::Json& config) { config["num_hidden_layers"] = "many"; });
  expect_fault({"config.json: num_hidden_layers is \"many\", written was 4"});
}

TEST_F(DigestsRung, TheBaseIsTheOneItWasMadeFrom) {
  const fs::path base = folder_ / "base";
  fs::copy(test::bundled_model(), base, fs::copy_options::recursive);
  EXPECT_TRUE(check("base", base).passed);
  // In other files it is the same.
  test::rewrite(base, [](auto&, auto&) { return true; });
  EXPECT_TRUE(check("base", base).passed);
  const std::string name = "model.layers.1.self_attn.q_proj.weight";
  test::rewrite(base, [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
    if (tensor.name == name) bytes[100] ^= std::byte{1};
    return true;
  });
  const Check changed = check("base", base);
  EXPECT_FALSE(changed.passed);
  ASSERT_EQ(changed.faults.size(), 1u);
  EXPECT_TRUE(changed.faults[0].starts_with(name + " does not hold the bytes")) << changed.faults[0];
  EXPECT_TRUE(check("digests", base).passed);
}

/// They are taken as they stand beside the base, if they are about its tensors; else it is read.
TEST_F(DigestsRung, DigestsOfTheBaseSaveReadingIt) {
  const fs::path base = folder_ / "base";
  fs::copy(test::bundled_model(), base, fs::copy_options::recursive);
  auto digests = checkpoint::open_digests(base);
  digests.tensors.at("model.norm.weight").digest.low ^= 1;
  checkpoint::write_digests(base, digests);
  const Check changed = check("base", base);
  ASSERT_EQ(changed.faults.size(), 1u);
  EXPECT_TRUE(changed.faults[0].starts_with("model.norm.weight ")) << changed.faults[0];
  digests.tensors.erase("model.norm.weight");
  checkpoint::write_digests(base, digests, true);
  EXPECT_TRUE(check("base", base).passed);
}

/// Malformed, huge, of another version, another folder's: one finding each.
TEST_F(DigestsRung, HostileFilesAreFindings) {
  const fs::path file = model_ / checkpoint::digests_file;
  const std::string good = io::read_file(file);
  const std::string head = R"({"format": "w4q digests", "format_version": 1, "hash": "", "files": {}, "config": {})";
  const std::pair<std::string, const char*> bad[] = {
      {"", "w4q_digests.json"},
      {"[]", "is none of w4q's"},
      {"{\"format\": 3}", "is none of w4q's"},
      {R"({"format": "w4q digests", "format_version": 2})", "format_version 2"},
      {R"({"format": "w4q digests", "format_version": "1"})", "format_version \"1\""},
      {R"({"format": "w4q digests", "format": "w4q digests", "format_version": 1})", "format"},
      {head + "}", "has no object \"tensors\""},
      {head + R"(, "tensors": []})", "has no object \"tensors\""},
      {head + R"(, "tensors": {"a": 1}})", "a has no digest"},
      {head + R"(, "tensors": {"a": "F32 [1] 0"}})", "a has no digest"},
      {head + R"(, "tensors": {}, "bases": {}})", "bases is no list"},
      {head + R"(, "tensors": {}, "bases": [1]})", "an object is expected"},
      {std::string(200, '['), "w4q_digests.json"},
      {good.substr(0, good.size() / 2), "w4q_digests.json"},
  };
  for (const auto& [text, part] : bad) {
    io::write_file(file, text, true);
    expect_fault({part});
  }
  fs::remove(file);
  fs::create_directory(file);
  expect_fault({"is no file"});
  fs::remove(file);
  fs::create_symlink("nowhere", file);
  expect_fault({"is no file"});
  fs::remove(file);
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  expect_fault({"is no file"});
}

TEST_F(DigestsRung, AnotherFoldersFileNamesWhatDiffers) {
  test::TemporaryFolder other;
  const fs::path model = test::quantized_model(other, 4);
  fs::copy_file(model / checkpoint::digests_file, model_ / checkpoint::digests_file,
                fs::copy_options::overwrite_existing);
  const Check digests = check("digests");
  EXPECT_FALSE(digests.passed);
  EXPECT_GT(digests.faults.size(), 28u);
}

}  // namespace
}  // namespace w4q::verify
