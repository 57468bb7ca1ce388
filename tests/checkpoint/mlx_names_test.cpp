// What mlx-lm calls tensors, and what the models do.
#include "checkpoint/mlx_names.h"

#include <gtest/gtest.h>

namespace w4q::checkpoint {
namespace {

TEST(MlxNames, ExpertsOfStacks) {
  EXPECT_EQ(mlx_expert("a.mlp.switch_mlp.gate_proj", 3), "a.mlp.experts.3.gate_proj");
  EXPECT_EQ(mlx_expert("a.block_sparse_moe.switch_mlp.down_proj", 0), "a.block_sparse_moe.experts.0.w2");
  EXPECT_EQ(mlx_expert("a.feed_forward.experts.up_proj", 1), "a.feed_forward.experts.1.up_proj");
  EXPECT_EQ(mlx_expert("a.stack", 1), "a.stack.1");
  EXPECT_EQ(mlx_expert("stack", 1), "stack.1");
}

TEST(MlxNames, TextModelsOfThoseThatSee) {
  const std::string layer = "language_model.model.layers.0.q.weight", head = "language_model.lm_head.scales";
  const auto of = [](const char* type, const char* name) {
    return io::Json{{"model_type", type}, {"architectures", {name}}};
  };
  const auto sees = of("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
             reads = of("qwen3_5", "Qwen3_5ForCausalLM");
  const auto other = of("mistral3", "Mistral3ForConditionalGeneration");
  EXPECT_EQ(name_behind_mlx(sees, layer), "model.language_model.layers.0.q.weight");
  EXPECT_EQ(name_behind_mlx(sees, head), "lm_head.scales");
  EXPECT_EQ(name_behind_mlx(sees, "vision_tower.x"), "vision_tower.x");
  EXPECT_EQ(name_behind_mlx(reads, layer), "model.layers.0.q.weight");
  EXPECT_EQ(name_behind_mlx(other, layer), layer);
  for (const io::Json& odd : {io::Json::object(), io::Json{{"model_type", 3}}}) {
    EXPECT_EQ(name_behind_mlx(odd, head), head);
  }
}

}  // namespace
}  // namespace w4q::checkpoint
