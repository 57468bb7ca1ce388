// What a short text says of trained models without a base: tensors that stand in each other's place, in another order or
// are too loud, which nothing in the file itself contradicts; and sound ones, of which it says nothing.
#include <gmock/gmock.h>

#include <algorithm>

#include "made_checkpoint.h"
#include "packed_model.h"

namespace w4q::verify {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string of_layer_named(int layer, const char* name) { return concat("model.layers.", layer, ".", name, ".weight"); }

class Behaviour : public ::testing::Test {
 protected:
  std::span<uint16_t> values(int layer, const char* name) {
    return made_.values<uint16_t>(of_layer_named(layer, name));
  }

  /// What this rung says of the model as it was made.
  std::vector<std::string> faults() {
    const auto path = folder_ / "made";
    made_.write(path);
    for (const char* file : {"tokenizer.json", "tokenizer_config.json"}) {
      std::filesystem::copy_file(test::bundled_model() / file, path / file);
    }
    return faults_of(path);
  }
  static std::vector<std::string> faults_of(const std::filesystem::path& path) {
    CheckContext context(test::check_options(path));
    const Findings findings = climb(context);
    seen_ = findings.json.contains("behaviour");
    std::vector<std::string> faults;
    for (const Check& check : findings.checks.checks()) {
      if (check.name == "behaviour") faults = check.faults;
    }
    return faults;
  }

  const test::TemporaryFolder folder_;
  test::MadeCheckpoint made_ = test::MadeCheckpoint::of(test::bundled_model());
  static inline bool seen_ = false;
};

TEST_F(Behaviour, SoundModelsSayNothing) {
  EXPECT_THAT(faults(), IsEmpty());
  EXPECT_TRUE(seen_);
  for (const char* name : {"w4q-mixture-tiny", "w4q-hybrid-tiny"}) {
    EXPECT_THAT(faults_of(test::testdata() / name), IsEmpty()) << name;
    EXPECT_TRUE(seen_) << name;
  }
  for (const int bits : {2, 4}) {
    const test::TemporaryFolder packed;
    EXPECT_THAT(faults_of(test::quantized_model(packed, bits)), IsEmpty()) << bits;
  }
}

TEST_F(Behaviour, SignsOfOneMatrix) {
  for (uint16_t& value : values(2, "mlp.down_proj")) value ^= 0x8000U;
  EXPECT_THAT(faults(), Contains(HasSubstr("with all signs turned, it seems")));
}

TEST_F(Behaviour, RowsRolled) {
  const auto down = values(2, "mlp.down_proj");
  std::ranges::rotate(down, down.end() - static_cast<std::ptrdiff_t>(down.size() / 256));
  EXPECT_THAT(faults(), Contains(HasSubstr("layers.2.mlp.down_proj: rows one place")));
}

/// Few weights of a model that knows nothing: no reading is better than others.
TEST_F(Behaviour, WhatKnowsNothingSaysNothing) {
  const auto table = made_.values<uint16_t>("model.embed_tokens.weight");
  for (size_t i = 0; i < table.size(); ++i)
    table[i] = static_cast<uint16_t>(table[i] ^ (i * 2654435761U >> 16 & 0x8000U));
  EXPECT_THAT(faults(), IsEmpty());
}

}  // namespace
}  // namespace w4q::verify
