// A model that several ranks hold together, each a stretch of its layers, computes what one process does: every bit, for
// every architecture.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "../small_model.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "model/decoder.h"
#include "model/generate.h"
#include "support.h"
#include "thread_ranks.h"

namespace w4q::model {
namespace {

int64_t bytes_of_range(const std::vector<int64_t>& bytes, const LayerRange& range) {
  return std::accumulate(bytes.begin() + range.first, bytes.begin() + range.end, int64_t{0});
}

/// The least that the largest of `parts` stretches from layer `first` on can have.
int64_t least_largest(const std::vector<int64_t>& bytes, int64_t first, int parts) {
  const auto layers = static_cast<int64_t>(bytes.size());
  if (parts == 1) return bytes_of_range(bytes, {first, layers});
  int64_t best = INT64_MAX;
  for (int64_t end = first + 1; end <= layers - parts + 1; ++end) {
    best = std::min(best, std::max(bytes_of_range(bytes, {first, end}), least_largest(bytes, end, parts - 1)));
  }
  return best;
}

TEST(CutLayers, TheLargestPartIsAsSmallAsCanBe) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::vector<int64_t> bytes(1 + random_bits(seed, 0) % 9);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<int64_t>(random_bits(seed, 1 + i) % 100);
    for (int parts = 1; parts <= static_cast<int>(bytes.size()); ++parts) {
      const auto cut = cut_layers(bytes, parts);
      ASSERT_EQ(cut.size(), static_cast<size_t>(parts));
      int64_t at = 0, largest = 0;
      for (const auto& range : cut) {
        ASSERT_EQ(range.first, at);
        ASSERT_GT(range.end, at);
        at = range.end;
        largest = std::max(largest, bytes_of_range(bytes, range));
      }
      ASSERT_EQ(at, static_cast<int64_t>(bytes.size()));
      ASSERT_EQ(largest, least_largest(bytes, 0, parts)) << "seed " << seed << ", " << parts << " parts";
    }
  }
}

class LayerStages : public ::testing::TestWithParam<const ArchitectureRow*> {
 protected:
  void SetUp() override {
    set_threads(1);
    test::write_small_model(*GetParam(), folder_.path() / "m");
  }
  void TearDown() override { set_threads(0); }

  OpenedModel opened() const { return open_model(folder_.path() / "m"); }

  /// Some tokens at once, and then one by one, as a prompt and what follows it.
  static std::vector<float> logits_of(const Model& model, const LayerStage& stage, size_t ids) {
    Decoder decoder(model, static_cast<int64_t>(ids));
    std::vector<int32_t> text(ids);
    for (size_t i = 0; i < ids; ++i) text[i] = static_cast<int32_t>(random_bits(3, i) % 160);
    std::vector<float> result;
    for (size_t at = 0, count = ids - 2; at < ids; at += count, count = 1) {
      const auto hidden = decoder.forward(std::span(text).subspan(at, count), stage);
      if (!stage.last()) continue;
      std::vector<float> logits(count * 160);
      decoder.logits(hidden, {logits.data(), static_cast<int64_t>(count), 160});
      result.insert(result.end(), logits.begin(), logits.end());
    }
    return result;
  }

  test::TemporaryFolder folder_;
};

TEST_P(LayerStages, LogitsAndTokensAreThoseOfOneProcess) {
  const Model whole = Model::of(opened());
  const auto expected = logits_of(whole, {}, 12);
  const std::vector<int32_t> prompt{5, 80, 3};
  const auto tokens = generate(whole, prompt, 6, {.temperature = 0.7, .seed = 9}, {});
  const auto& config = whole.config();
  const bool apart = config.layer_embedding_size == 0 && std::ranges::none_of(config.attention, [](const auto& layer) {
                       return layer.keys_of.has_value();
                     });
  if (!apart) {
    test::expect_error(ErrorCode::unsupported, {"several ranks cannot hold", "--split-layers"},
                       [&] { split_layers(opened(), 2); });
    return;
  }
  for (const int split : {2, 3}) {
    test::run_as_ranks(split, [&](ranks::Ranks& ranks) {
      const LayerStage stage(ranks, split);
      const Model part = Model::of(opened(), Planes::canonical, stage);
      EXPECT_LT(part.config().layers, whole.config().layers);
      EXPECT_EQ(part.layers().size(), static_cast<size_t>(part.config().layers));
      EXPECT_EQ(part.embeddings().n > 0, stage.first() || (stage.last() && whole.config().tied_embeddings));
      EXPECT_EQ(part.final_norm().empty(), !stage.last());
      const auto found = logits_of(part, stage, 12);
      EXPECT_TRUE(!stage.last() || found == expected);
      EXPECT_EQ(generate(part, prompt, 6, {.temperature = 0.7, .seed = 9}, {}, false, stage), tokens);
    });
  }
}

TEST(LayerStage, FewerLayersThanRanksAreRefused) {
  const test::TemporaryFolder folder;
  test::write_small_model(architecture_row("llama"), folder.path() / "m");
  test::expect_error(ErrorCode::bad_argument,
                     {"a model of 4 layers cannot be held by 5 ranks", "--split-layers 4 at most"},
                     [&] { split_layers(open_model(folder.path() / "m"), 5); });
}

TEST(LayerStage, GroupsOfRanksHoldTheModelOnceEach) {
  test::run_as_ranks(6, [](ranks::Ranks& ranks) {
    const LayerStage stage(ranks, 3);
    EXPECT_EQ(stage.group(), ranks.rank() / 3);
    EXPECT_EQ(stage.groups(), 2);
    EXPECT_EQ(stage.index(), ranks.rank() % 3);
    EXPECT_EQ(stage.first(), ranks.rank() % 3 == 0);
    EXPECT_EQ(stage.last(), ranks.rank() == stage.last_rank(stage.group()));
    EXPECT_EQ(stage.share(stage.last() ? 40 + stage.group() : -1), 40 + stage.group());
  });
}

INSTANTIATE_TEST_SUITE_P(Architectures, LayerStages,
                         ::testing::ValuesIn(architectures().begin(), architectures().end()),
                         [](const auto& row) { return test::row_name(row.param); });

}  // namespace
}  // namespace w4q::model
