// Settings of known families that few published models have, against what transformers 5.23 computes of the same folders
// (fp32, eager attention, one run over all ids): small models as tests/small_model.h writes them, and some of their logits.
#include <gtest/gtest.h>

#include <array>

#include "reference_logits.h"
#include "small_model.h"
#include "support.h"

namespace w4q::model {
namespace {

constexpr double setting_tolerance = 1e-4;  ///< what the families' reference promises; 2.9e-5 was measured
constexpr int64_t settings_length = 40;

struct FamilySetting {
  const char* type;
  const char* changes;          ///< JSON, in the place of what the small model has
  std::array<float, 6> logits;  ///< of ids 1 and 100 at the first, at a middle and at the last position
};

const FamilySetting family_settings[] = {
    {"gemma2",
     R"({"partial_rotary_factor": 0.5})",
     {0.3004397f, -1.129456f, 1.003123f, 0.3719163f, -1.2024f, 0.5040745f}},
    {"gemma3_text",
     R"({"rope_local_base_freq": 30000, "rope_parameters": {"full_attention": {"rope_type": "linear",
      "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}})",
     {2.157117f, -0.1427409f, 0.5647376f, 1.171905f, -0.05870385f, 0.549687f}},
    {"gemma4_text",
     R"({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0,
      "rope_theta": 1000000}, "sliding_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000,
      "original_max_position_embeddings": 16, "truncate": false}}})",
     {-0.9944865f, 0.2406698f, 0.7548359f, 0.6470489f, -1.127116f, 0.09128891f}},
    {"gpt_oss", R"({"swiglu_alpha": 1.2})", {-1.078489f, -2.471322f, -1.168849f, -1.374721f, -0.1397305f, -1.03922f}},
    {"minimax_m2",
     R"({"rotary_dim": 8, "partial_rotary_factor": 0.5})",
     {1.320683f, -0.2281866f, -0.5196705f, -0.4941803f, -1.000471f, -0.4458476f}},
    {"ministral3",
     R"({"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention", "full_attention",
      "full_attention"]})",
     {-0.7880476f, -0.4248106f, -0.9649176f, 0.9308415f, -0.388492f, 0.998777f}},
    {"mixtral",
     R"({"sliding_window": 6, "layer_types": ["full_attention", "full_attention", "full_attention",
      "full_attention"]})",
     {-0.3863677f, -1.731892f, -0.5543143f, 2.027289f, 0.08553836f, -0.9081153f}},
    {"olmo3",
     R"({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0, "truncate": false,
      "original_max_position_embeddings": 16}, "sliding_attention": null}})",
     {0.4031712f, 0.8507476f, 0.6242544f, -0.4644128f, -0.4556124f, -0.3421013f}},
    {"qwen3_5_text",
     R"({"hidden_act": "gelu"})",
     {1.377442f, -1.169299f, -0.9581791f, 1.376807f, 0.6688798f, 0.7881253f}},
    {"qwen3_moe",
     R"({"partial_rotary_factor": 0.25, "mlp_only_layers": [1, 9]})",
     {-0.2797774f, 2.656874f, 0.4204083f, 1.655683f, -0.8761966f, 0.7636054f}},
    {"smollm3",
     R"({"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "full_attention",
      "sliding_attention"], "pad_token_id": 0})",
     {-0.7998381f, 0.3493326f, 1.207132f, -1.534149f, 0.1598031f, -0.590318f}},
};

TEST(FamilySettings, DecodeAsTheReference) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < settings_length; ++i) ids.push_back((i * 37 + i * i * 11 + 5) % 160);
  for (const FamilySetting& setting : family_settings) {
    const test::TemporaryFolder folder;
    test::write_small_model(architecture_row(setting.type), folder / "m", io::parse_json(setting.changes, "changes"));
    const Model model = Model::open(folder / "m");
    const auto logits = test::decode(model, ids, {1 << 20});
    std::vector<float> found;
    for (const int64_t position : {int64_t{0}, settings_length / 2, settings_length - 1}) {
      for (const int64_t id : {1, 100}) {
        found.push_back(logits[static_cast<size_t>(position * model.config().vocab_size + id)]);
      }
    }
    const std::vector<float> expected(setting.logits.begin(), setting.logits.end());
    EXPECT_LT(test::largest_difference(found, expected), setting_tolerance) << setting.type << " " << setting.changes;
  }
}

}  // namespace
}  // namespace w4q::model
