#include "model/kinds.h"

#include <gtest/gtest.h>

namespace w4q::model {
namespace {

struct Row {
  std::string name;
  double quality;
};

TEST(Kinds, AreNamedByWhatATensorIsInItsLayer) {
  for (const auto& [name, kind] : std::vector<std::pair<const char*, const char*>>{
           {"model.layers.0.self_attn.q_proj.weight", "q_proj"},
           {"model.layers.31.mlp.down_proj", "down_proj"},
           {"model.layers.3.mlp.experts.7.down_proj.weight", "experts.down_proj"},
           {"model.layers.3.mlp.experts.gate_up_proj", "experts.gate_up_proj"},
           {"model.layers.3.mlp.shared_expert.up_proj", "shared_expert.up_proj"},
           {"model.layers.3.block_sparse_moe.experts.0.w1", "experts.w1"},
           {"model.embed_tokens.weight", "embed_tokens"},
           {"lm_head.weight", "lm_head"},
           {"blk.0.ffn_up.weight", "ffn_up"}}) {
    EXPECT_EQ(kind_of(name), kind);
  }
}

TEST(Kinds, GroupRowsInTheOrderInWhichTheyCome) {
  const std::vector<Row> rows{{"l.0.up", 1}, {"l.0.down", 2}, {"l.1.up", 3}};
  const auto kinds = by_kind(rows);
  ASSERT_EQ(kinds.size(), 2u);
  EXPECT_EQ(kinds[0].name, "up");
  ASSERT_EQ(kinds[0].rows.size(), 2u);
  EXPECT_EQ(kinds[0].rows[1]->quality, 3);
  EXPECT_EQ(kinds[1].name, "down");
}

TEST(Kinds, TheWorstFiveAreNamedUnlessAllAre) {
  std::vector<Row> rows;
  for (int i = 0; i < 8; ++i) rows.push_back({std::to_string(i), static_cast<double>((i * 3) % 8)});
  const auto quality = [](const Row& row) { return row.quality; };
  const auto worst = named_rows(rows, Detail::kinds, quality);
  ASSERT_EQ(worst.size(), worst_shown);
  for (size_t i = 0; i < worst.size(); ++i) EXPECT_EQ(worst[i]->quality, static_cast<double>(i));
  const auto all = named_rows(rows, Detail::tensors, quality);
  ASSERT_EQ(all.size(), rows.size());
  EXPECT_EQ(all.front()->name, "0") << "in their own order";
  rows.resize(worst_shown);
  EXPECT_EQ(named_rows(rows, Detail::kinds, quality).front()->name, "0");
}

TEST(Kinds, ErrorsAreThoseOfAllAndOfTheWorst) {
  KindError error;
  error.add({.signal = 100, .noise = 1, .max_error = 0.5});    // 20 dB
  error.add({.signal = 100, .noise = 10, .max_error = 0.25});  // 10 dB
  // 10·log10(200 / 11) dB and √(11 / 200) together; √(10 / 100) of the worse one.
  EXPECT_EQ(error.cells(), (std::vector<std::string>{"12.60", "10.00", "0.23452", "0.31623", "0.500000"}));
  EXPECT_EQ(error.cells().size(), KindError::head().size());
}

TEST(Kinds, ManyWordsAreCounted) {
  EXPECT_EQ(words_text({"a", "b", "c"}), "a, b, c");
  EXPECT_EQ(words_text({"a", "b", "c", "d"}), "a, b, … 4 in all");
}

}  // namespace
}  // namespace w4q::model
