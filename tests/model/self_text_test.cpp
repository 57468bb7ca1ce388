#include "model/self_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "model/architecture.h"
#include "model/decoder.h"
#include "model/generate.h"
#include "reference_logits.h"
#include "small_model.h"
#include "support.h"

namespace w4q::model {
namespace {

class SelfTexts : public testing::TestWithParam<const ArchitectureRow*> {
 protected:
  void SetUp() override { test::write_small_model(*GetParam(), folder_.path() / "m"); }
  test::TemporaryFolder folder_;
};

/// Sequences that are written side by side are drawn from what each by itself decodes to.
TEST_P(SelfTexts, AreDrawnFromTheModelsDistribution) {
  const Model model = Model::open(folder_.path() / "m");
  const SelfText request{.sequences = 5, .length = 20, .seed = 7};
  const auto ids = write_text(model, request);
  ASSERT_EQ(ids.size(), 100U);
  const auto vocab = static_cast<size_t>(model.config().vocab_size);
  for (size_t sequence = 0; sequence < 5; ++sequence) {
    const std::vector<int32_t> own(ids.begin() + static_cast<std::ptrdiff_t>(20 * sequence),
                                   ids.begin() + static_cast<std::ptrdiff_t>(20 * sequence + 20));
    EXPECT_EQ(own.front(), first_token(model.config(), request, static_cast<int64_t>(sequence)));
    const auto logits = test::decode(model, own, {1});
    for (size_t at = 0; at + 1 < own.size(); ++at) {
      const auto& config = model.config();
      if (config.bos_token && own[at] != *config.bos_token && ends_sequence(config, own[at])) {
        EXPECT_EQ(own[at + 1], *config.bos_token);
        continue;
      }
      const auto row = std::span(logits).subspan(at * vocab, vocab);
      const double largest = *std::ranges::max_element(row);
      double total = 0, before = 0, through = 0;
      for (size_t id = 0; id < vocab; ++id) {
        const double weight = std::exp(double{row[id]} - largest);
        total += weight;
        if (static_cast<int32_t>(id) < own[at + 1]) before += weight;
        if (static_cast<int32_t>(id) <= own[at + 1]) through += weight;
      }
      const double drawn = random_uniform(7, 20 * sequence + at);
      // Products of five rows add up in another order than those of one: 2e-4 of logits (families_test.cpp).
      EXPECT_GE(drawn, before / total - 1e-3) << sequence << " " << at;
      EXPECT_LE(drawn, through / total + 1e-3) << sequence << " " << at;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Decoder, SelfTexts, testing::ValuesIn(architectures().begin(), architectures().end()),
                         [](const auto& param) { return test::row_name(param.param); });

TEST(SelfText, IsTheSameForAnyThreadsAndGoesOnBehindAnEnd) {
  const Model model = Model::open(test::testdata() / "w4q-mixture-tiny");
  const SelfText request{.sequences = 3, .length = 300, .seed = 1};
  set_threads(1);
  const auto alone = write_text(model, request);
  set_threads(3);
  const auto together = write_text(model, request);
  set_threads(0);
  EXPECT_EQ(alone, together);
  const SelfText other{.sequences = 3, .length = 300, .seed = 2};
  EXPECT_NE(write_text(model, other), alone);
  int ends = 0;
  for (size_t i = 0; i + 1 < alone.size(); ++i) {
    if (alone[i] != 1023 || i % 300 == 299) continue;
    ++ends;
    EXPECT_EQ(alone[i + 1], 1022) << i;
  }
  EXPECT_GE(ends, 1);
}

/// Every second sequence is one: words behind its opening, an answer behind their end, and another one behind that. The
/// others are what they are without.
TEST(SelfText, ConversationsGoByTheirTemplate) {
  const Model model = Model::open(test::testdata() / "w4q-mixture-tiny");
  constexpr int32_t bos = 1022, end = 1023;
  const SelfText plain{.sequences = 4, .length = 300, .seed = 1};
  SelfText request = plain;
  request.opening = {bos, 5, 6}, request.answer = {end, 7, 8, end};
  const auto ids = write_text(model, request), without = write_text(model, plain);
  const auto sequence = [](const std::vector<int32_t>& of, int64_t i) {
    return std::vector<int32_t>(of.begin() + 300 * i, of.begin() + 300 * (i + 1));
  };
  size_t answers = 0;
  for (int64_t i = 0; i < 4; ++i) {
    const auto own = sequence(ids, i);
    if (i % 2 == 0) {
      EXPECT_EQ(own, sequence(without, i));
      continue;
    }
    EXPECT_TRUE(std::ranges::equal(request.opening, std::span(own).first(3)));
    bool speaks_user = true;
    for (size_t at = 3; at + 4 < own.size(); ++at) {
      if (own[at] != end) continue;
      if (speaks_user) {
        EXPECT_TRUE(std::ranges::equal(request.answer, std::span(own).subspan(at, 4))) << at;
        ++answers, at += 3;
      } else {
        EXPECT_TRUE(std::ranges::equal(request.opening, std::span(own).subspan(at + 1, 3))) << at;
        at += 3;
      }
      speaks_user = !speaks_user;
    }
  }
  EXPECT_GE(answers, 1u);
}

/// An end that the template writes is not written twice, and one that it wrote itself ends nothing.
TEST(SelfText, TurnsFollowOneAnother) {
  const Model model = Model::open(test::testdata() / "w4q-mixture-tiny");
  constexpr int32_t end = 1023;
  const SelfText request{.opening = {1022, 5}, .answer = {end, 7, end}};
  GivenTokens given(model.config(), request, 1);
  EXPECT_EQ(given.first(), 1022);
  EXPECT_TRUE(given.begins());
  EXPECT_EQ(given.behind(1022), 5);
  EXPECT_EQ(given.behind(5), std::nullopt);
  EXPECT_EQ(given.behind(40), std::nullopt);
  EXPECT_EQ(given.behind(end), 7);
  EXPECT_FALSE(given.begins());
  EXPECT_EQ(given.behind(7), end);
  EXPECT_EQ(given.behind(end), std::nullopt);
  EXPECT_EQ(given.behind(40), std::nullopt);
  EXPECT_EQ(given.behind(end), 1022);
  EXPECT_TRUE(given.begins());
}

TEST(SelfText, RefusesWhatCannotBeWritten) {
  const Model model = Model::open(test::testdata() / "w4q-mixture-tiny");
  test::expect_error(ErrorCode::bad_argument, {"2000 tokens", "1024 positions"},
                     [&] { write_text(model, {.sequences = 1, .length = 2000}); });
  test::expect_error(ErrorCode::bad_argument, {"0 sequences"},
                     [&] { write_text(model, {.sequences = 0, .length = 20}); });
}

}  // namespace
}  // namespace w4q::model
