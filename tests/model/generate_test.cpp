#include "model/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "io/json.h"
#include "model/reference_logits.h"
#include "support.h"

namespace w4q::model {
namespace {

using test::expect_error;

class Generate : public testing::Test {
 protected:
  const std::filesystem::path folder = test::testdata() / "w4q-llama-tiny";
  const Model model = Model::open(folder);
  const std::vector<int32_t> prompt = {1022, 297, 82};
};

TEST_F(Generate, GreedyContinuesAsTheReference) {
  const auto prompt_ids = test::ReferenceLogits(folder / "own" / "reference.safetensors").ids();
  const auto json = io::read_json(folder / "own" / "reference.json");
  const auto tokens = generate(model, prompt_ids, 64, {}, {});
  EXPECT_EQ(tokens, json.at("greedy_64").get<std::vector<int32_t>>());
}

TEST_F(Generate, SampledIsDeterministicInTheSeed) {
  const SamplingOptions options{.temperature = 1, .top_k = 50, .top_p = 0.95, .seed = 5};
  SamplingOptions other = options;
  other.seed = 6;
  const auto tokens = generate(model, prompt, 40, options, {});
  EXPECT_EQ(tokens, generate(model, prompt, 40, options, {}));
  EXPECT_NE(tokens, generate(model, prompt, 40, other, {}));
}

TEST_F(Generate, StopsWhenTheCallerSaysSo) {
  std::vector<int32_t> seen;
  const auto tokens = generate(model, prompt, 40, {}, [&](int32_t token) {
    seen.push_back(token);
    return seen.size() < 3;
  });
  EXPECT_EQ(tokens.size(), 3u);
  EXPECT_EQ(tokens, seen);
}

TEST_F(Generate, StopsBehindAnEndOfSequenceToken) {
  const auto greedy = generate(model, prompt, 10, {}, {});
  // The same model with another end: the first token that the greedy run has not had before.
  size_t last = 3;
  while (std::find(greedy.begin(), greedy.begin() + static_cast<std::ptrdiff_t>(last), greedy[last]) !=
         greedy.begin() + static_cast<std::ptrdiff_t>(last)) {
    ASSERT_LT(++last, greedy.size());
  }
  const test::TemporaryFolder other;
  for (const char* file : {"config.json", "model.safetensors"}) {
    std::filesystem::create_symlink(folder / file, other / file);
  }
  std::ofstream(other / "generation_config.json") << R"({"eos_token_id": [1023, )" << greedy[last] << "]}";
  const auto tokens = generate(Model::open(other.path()), prompt, 10, {}, {});
  EXPECT_EQ(tokens, std::vector<int32_t>(greedy.begin(), greedy.begin() + static_cast<std::ptrdiff_t>(last) + 1));
}

TEST_F(Generate, RefusesWhatMakesNoSense) {
  expect_error(ErrorCode::bad_argument, {"prompt"}, [&] { generate(model, {}, 4, {}, {}); });
  expect_error(ErrorCode::bad_argument, {"-1"}, [&] { generate(model, prompt, -1, {}, {}); });
  expect_error(ErrorCode::bad_argument, {"top-p"}, [&] { generate(model, prompt, 4, {.top_p = 2}, {}); });
  EXPECT_TRUE(generate(model, prompt, 0, {}, {}).empty());
}

/// Refused before a cache is made for it: 2^61 tokens would not fit.
TEST_F(Generate, RefusesMoreTokensThanTheModelHasPositions) {
  const std::vector<int32_t> longest(1023, 82), full(1024, 82);
  EXPECT_EQ(generate(model, longest, 1, {}, {}).size(), 1u);
  expect_error(ErrorCode::bad_argument, {"1024 positions", "1 new tokens fit"},
               [&] { generate(model, longest, 2, {}, {}); });
  expect_error(ErrorCode::bad_argument, {"1021 new tokens fit"},
               [&] { generate(model, prompt, int64_t{1} << 61, {}, {}); });
  expect_error(ErrorCode::bad_argument, {"fewer than 1024"}, [&] { generate(model, full, 1, {}, {}); });
}

}  // namespace
}  // namespace w4q::model
