#include "verify/structure.h"

#include <fstream>

#include "io/files.h"
#include "packed_model.h"

namespace w4q::verify {
namespace {

using test::bundled_model;

/// A quantized model whose weight file can be written anew with changes.
class Structure : public ::testing::Test {
 protected:
  void SetUp() override { path_ = test::quantized_model(folder_, 3); }

  void rewrite(const test::Change& change) const { test::rewrite(path_, change); }

  Check structure(bool with_base = true) const {
    const auto candidate = model::open_model(path_);
    if (!with_base) return check_structure(candidate, nullptr);
    const auto base = model::open_model(bundled_model());
    return check_structure(candidate, &base);
  }

  static void expect_fault(const Check& check, std::string_view part) {
    EXPECT_FALSE(check.passed);
    bool found = false;
    for (const auto& fault : check.faults) found = found || fault.find(part) != std::string::npos;
    EXPECT_TRUE(found) << "no fault has \"" << part
                       << "\"; first: " << (check.faults.empty() ? "none" : check.faults.front());
  }

  test::TemporaryFolder folder_;
  std::filesystem::path path_;
};

TEST_F(Structure, AQuantizedModelPasses) {
  EXPECT_TRUE(structure().passed);
  EXPECT_TRUE(structure(false).passed);
  EXPECT_TRUE(check_codes(checkpoint::open_folder(path_)).passed);
  EXPECT_TRUE(check_finite(model::open_model(path_)).passed);
}

TEST_F(Structure, MissingPlane) {
  rewrite([](auto& tensor, auto&) { return tensor.name != "model.layers.1.mlp.up_proj.0.scales"; });
  expect_fault(structure(false), "model.layers.1.mlp.up_proj.0.scales is missing");
}

TEST_F(Structure, MissingNorm) {
  rewrite([](auto& tensor, auto&) { return tensor.name != "model.norm.weight"; });
  expect_fault(structure(), "model.norm.weight is missing");
}

TEST_F(Structure, ExtraTensor) {
  rewrite([](auto& tensor, auto&) {
    if (tensor.name == "model.norm.weight") tensor.name = "model.norm2.weight";
    return true;
  });
  expect_fault(structure(false), "model.norm2.weight is extra");
}

TEST_F(Structure, WrongSizeOfAPlane) {
  rewrite([](auto& tensor, auto& bytes) {
    if (tensor.name == "model.layers.0.self_attn.q_proj.0.scales") {
      tensor.shape[0] -= 1;
      bytes.resize(static_cast<size_t>(tensor.size()));
    }
    return true;
  });
  expect_fault(structure(false), "model.layers.0.self_attn.q_proj.0.scales has shape");
}

TEST_F(Structure, AKeptTensorThatChangedIsSeenWithTheBaseOnly) {
  rewrite([](auto& tensor, auto& bytes) {
    if (tensor.name == "model.layers.0.input_layernorm.weight") bytes[7] ^= std::byte{1};
    return true;
  });
  EXPECT_TRUE(structure(false).passed);
  expect_fault(structure(), "its bytes differ");
}

TEST_F(Structure, AnotherConfigIsNotTheBase) {
  auto config = io::read_json(path_ / "config.json");
  config["rope_theta"] = 10000.0;
  std::ofstream(path_ / "config.json") << config.dump();
  expect_fault(structure(), "config.json differs");
}

/// Another version of transformers writes what the file left out, but computes no other model.
TEST_F(Structure, AConfigWrittenAnewComputesTheSame) {
  auto config = io::read_json(path_ / "config.json");
  const auto write = [&] { std::ofstream(path_ / "config.json") << config.dump(); };
  config["transformers_version"] = "5.0.0";
  config["output_attentions"] = false;
  write();
  EXPECT_TRUE(structure().passed);
  for (const auto& [key, value] :
       {std::pair<const char*, io::Json>{"rope_theta", 20000.0}, {"hidden_act", "gelu"}, {"rms_norm_eps", 1e-4}}) {
    const io::Json before = config.value(key, io::Json());
    config[key] = value;
    write();
    EXPECT_FALSE(structure().passed) << key;
    config[key] = before;
  }
}

TEST_F(Structure, ADamagedCodebookFailsTheCodes) {
  rewrite([](auto& tensor, auto& bytes) {
    if (tensor.name == "model.layers.2.mlp.gate_proj.0.codebook") std::fill(bytes.begin(), bytes.end(), std::byte{0});
    return true;
  });
  EXPECT_TRUE(structure(false).passed);
  expect_fault(check_codes(checkpoint::open_folder(path_)), "model.layers.2.mlp.gate_proj");
}

TEST_F(Structure, AShardOfWhichNothingIsReadIsNamed) {
  std::filesystem::copy_file(path_ / "model.safetensors", path_ / "model-00002-of-00002.safetensors");
  expect_fault(structure(false), "model-00002-of-00002.safetensors is a stale shard");
  // What is no shard is somebody's own.
  std::filesystem::rename(path_ / "model-00002-of-00002.safetensors", path_ / "notes.safetensors");
  EXPECT_TRUE(structure(false).passed);
}

TEST_F(Structure, AnEpsThatNoModelHasIsNamed) {
  auto config = io::read_json(path_ / "config.json");
  config["rms_norm_eps"] = 1e-2;
  std::ofstream(path_ / "config.json") << config.dump();
  expect_fault(structure(false), "rms_norm_eps of 0.01");
}

TEST_F(Structure, AnExponentThatHasTurnedIsFound) {
  rewrite([](auto& tensor, auto& bytes) {
    if (tensor.name == "model.embed_tokens.weight") bytes[2 * 7 + 1] ^= std::byte{0x40};
    return true;
  });
  expect_fault(check_finite(model::open_model(path_)), "model.embed_tokens.weight: element 7 is of size");
}

TEST_F(Structure, NaNInAKeptTensorIsFound) {
  rewrite([](auto& tensor, auto& bytes) {
    if (tensor.name == "model.norm.weight") bytes[2 * 5] = std::byte{0xC0}, bytes[2 * 5 + 1] = std::byte{0x7F};
    return true;
  });
  expect_fault(check_finite(model::open_model(path_)), "model.norm.weight: NaN or infinity at element 5");
}

}  // namespace
}  // namespace w4q::verify
