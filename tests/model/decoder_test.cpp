#include "model/decoder.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "core/parallel.h"
#include "model/reference_logits.h"
#include "support.h"

namespace w4q::model {
namespace {

using test::decode;
using test::expect_error;
using test::largest_difference;
using test::ReferenceLogits;
using test::values_of;

const std::vector<size_t> at_once = {1 << 20};

/// What every checkpoint must reach against the fp32 forward pass of the reference implementation.
constexpr double reference_tolerance = 1e-4;
/// Chunks and steps against one prefill. Sums are taken in another order: each logit moves by some roundings of
/// activations below 10, 1e-6 each. Measured: 2e-6 on the small checkpoints, 3.5e-5 on the trained ones.
constexpr double small_order_tolerance = 1e-5, trained_order_tolerance = 1e-4;

// ---- checkpoints that travel with the repository -------------------------------------------------------------------

class SmallCheckpoints : public testing::TestWithParam<const char*> {
 protected:
  const std::filesystem::path folder = test::testdata() / "arch" / GetParam();
};

TEST_P(SmallCheckpoints, ReproduceTheReference) {
  const Model model = Model::open(folder);
  const ReferenceLogits reference(folder / "reference.safetensors");
  std::set<int64_t> seen;
  Observer observer;
  observer.hidden = [&](int64_t index, MatrixView<const float> hidden) {
    seen.insert(index);
    EXPECT_LT(largest_difference(values_of(hidden), reference.hidden(index)), reference_tolerance) << index;
  };
  EXPECT_LT(largest_difference(decode(model, reference.ids(), at_once, &observer), reference.logits()),
            reference_tolerance);
  EXPECT_EQ(static_cast<int64_t>(seen.size()), model.config().layers + 1);
}

TEST_P(SmallCheckpoints, GiveTheSameInAnyChunks) {
  const Model model = Model::open(folder);
  const ReferenceLogits reference(folder / "reference.safetensors");
  // Under dynamic scaling the length so far decides once it exceeds the model's positions.
  const bool dynamic = model.config().rope.type == RopeType::dynamic;
  auto ids = reference.ids();
  if (dynamic) ids.resize(static_cast<size_t>(model.config().max_positions));
  const auto whole = decode(model, ids, at_once);
  EXPECT_LT(largest_difference(decode(model, ids, {1}), whole), small_order_tolerance);
  EXPECT_LT(largest_difference(decode(model, ids, {3, 20, 1, 1, 9}), whole), small_order_tolerance);
}

INSTANTIATE_TEST_SUITE_P(Decoder, SmallCheckpoints,
                         testing::Values("llama-yarn", "mistral-window", "qwen2-window", "qwen3-dynamic"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

class TinyModel : public testing::Test {
 protected:
  const Model model = Model::open(test::testdata() / "w4q-llama-tiny");
  const ReferenceLogits reference{test::testdata() / "w4q-llama-tiny" / "own" / "reference.safetensors"};
};

TEST_F(TinyModel, ReproducesLogitsAndHiddenStates) {
  Observer observer;
  observer.hidden = [&](int64_t index, MatrixView<const float> hidden) {
    EXPECT_LT(largest_difference(values_of(hidden), reference.hidden(index)), reference_tolerance) << index;
  };
  EXPECT_LT(largest_difference(decode(model, reference.ids(), at_once, &observer), reference.logits()),
            reference_tolerance);
}

TEST_F(TinyModel, GivesTheSameInAnyChunks) {
  const auto whole = decode(model, reference.ids(), at_once);
  EXPECT_LT(largest_difference(decode(model, reference.ids(), {1}), whole), trained_order_tolerance);
  EXPECT_LT(largest_difference(decode(model, reference.ids(), {5, 40, 1}), whole), trained_order_tolerance);
}

TEST_F(TinyModel, DoesNotDependOnTheThreadCount) {
  set_threads(1);
  const auto one = decode(model, reference.ids(), at_once);
  set_threads(3);
  const auto three = decode(model, reference.ids(), at_once);
  set_threads(0);
  EXPECT_EQ(one, three);
}

TEST_F(TinyModel, ShowsTheInputOfEveryLinear) {
  std::map<std::string, int64_t> widths;
  Observer observer;
  int64_t calls = 0;
  observer.linear_input = [&](std::span<const std::string_view> names, MatrixView<const float> input) {
    ++calls;
    EXPECT_EQ(input.rows, 64);
    for (const auto name : names) EXPECT_TRUE(widths.emplace(name, input.cols).second) << name;
  };
  decode(model, reference.ids(), at_once, &observer);
  std::map<std::string, int64_t> expected;
  for (const auto& parameter : parameters(model.config())) {
    if (!parameter.linear || parameter.name == "model.embed_tokens.weight") continue;
    expected[parameter.name.substr(0, parameter.name.size() - std::string_view(".weight").size())] = parameter.shape[1];
  }
  EXPECT_EQ(widths, expected);
  EXPECT_EQ(calls, 4 * model.config().layers);  // q k v together, o, gate and up together, down
}

TEST_F(TinyModel, StartsAgainAfterReset) {
  Decoder decoder(model, 64);
  const auto first = values_of(decoder.forward(reference.ids()));
  EXPECT_EQ(decoder.position(), 64);
  decoder.reset();
  EXPECT_EQ(decoder.position(), 0);
  EXPECT_EQ(values_of(decoder.forward(reference.ids())), first);
}

TEST_F(TinyModel, RefusesWhatDoesNotFit) {
  Decoder decoder(model, 4);
  const std::vector<int32_t> outside = {1, 1024}, negative = {-1}, five = {1, 2, 3, 4, 5};
  expect_error(ErrorCode::bad_argument, {"1024", "1023"}, [&] { decoder.forward(outside); });
  expect_error(ErrorCode::bad_argument, {"-1"}, [&] { decoder.forward(negative); });
  expect_error(ErrorCode::bad_argument, {"5 tokens", "4 positions"}, [&] { decoder.forward(five); });
  expect_error(ErrorCode::bad_argument, {"no tokens"}, [&] { decoder.forward({}); });
  EXPECT_EQ(decoder.position(), 0) << "a refused call changes nothing";
  expect_error(ErrorCode::bad_argument, {"context"}, [&] { Decoder(model, 0); });
  expect_error(ErrorCode::bad_argument, {"context"}, [&] { Decoder(model, INT64_MAX); });
}

// ---- checkpoints that stand beside the repository ------------------------------------------------------------------

TEST(SharedCheckpoints, TrainedModels) {
  W4Q_NEEDS_SHARED_DATA();
  for (const char* name : {"w4q-llama-tiny", "w4q-llama-30m"}) {
    const auto folder = test::shared_data() / "models" / name;
    const Model model = Model::open(folder);
    const ReferenceLogits reference(folder / "ref" / "reference.safetensors");
    Observer observer;
    observer.hidden = [&](int64_t index, MatrixView<const float> hidden) {
      // Hidden states of the larger model reach 700 in single channels; the bound is for values of 10 and below.
      const auto expected = reference.hidden(index);
      const float largest = *std::ranges::max_element(expected, {}, [](float x) { return std::abs(x); });
      EXPECT_LT(largest_difference(values_of(hidden), expected),
                reference_tolerance * std::max(1.0, std::abs(largest) / 10.0))
          << name << " " << index;
    };
    const auto logits = decode(model, reference.ids(), at_once, &observer);
    EXPECT_LT(largest_difference(logits, reference.logits()), reference_tolerance) << name;
    EXPECT_LT(largest_difference(decode(model, reference.ids(), {1}), logits), trained_order_tolerance) << name;
  }
}

TEST(SharedCheckpoints, Architectures) {
  W4Q_NEEDS_SHARED_DATA();
  for (const char* name :
       {"llama-plain", "llama-f16-bias", "llama-rope-llama3", "mistral-window", "qwen2-bias", "qwen3-qknorm"}) {
    const auto folder = test::shared_data() / "arch" / name;
    const Model model = Model::open(folder);
    const ReferenceLogits reference(folder / "reference.safetensors");
    const auto logits = decode(model, reference.ids(), at_once);
    EXPECT_LT(largest_difference(logits, reference.logits()), reference_tolerance) << name;
  }
}

}  // namespace
}  // namespace w4q::model
