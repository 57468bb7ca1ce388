// Keys that only some architectures have, with values that no model has.
#include <gtest/gtest.h>

#include <set>

#include "model/architecture.h"
#include "small_model.h"
#include "support.h"

namespace w4q::model {
namespace {

/// Numbers of every small config, one after the other absurd: each is refused by name, or makes a model of other sizes.
TEST(FamilyConfigs, AbsurdNumbersAreRefusedOrRead) {
  const std::set<std::string> free = {"bos_token_id", "eos_token_id"};
  for (const auto* row : architectures()) {
    const io::Json config = test::small_config(*row);
    EXPECT_NO_THROW(parse_config(config, "config.json")) << row->model_type;
    for (const auto& [key, value] : config.items()) {
      if (!value.is_number() || free.contains(key)) continue;
      for (const io::Json& absurd : {io::Json(-1), io::Json(int64_t{1} << 31), io::Json(1e300), io::Json("8"),
                                     io::Json::array(), io::Json(int64_t{1} << 62)}) {
        io::Json changed = config;
        changed[key] = absurd;
        try {
          parse_config(changed, "config.json");
        } catch (const Error& error) {
          EXPECT_TRUE(error.code() == ErrorCode::bad_file || error.code() == ErrorCode::unsupported)
              << row->model_type << " " << key << " " << absurd << ": " << error.what();
        }
      }
    }
  }
}

TEST(FamilyConfigs, ListsOfLayersMustFit) {
  for (const char* type : {"qwen3_5_text", "gpt_oss", "gemma2", "gemma4_text", "olmo3"}) {
    io::Json config = test::small_config(architecture_row(type));
    config["layer_types"] = {"full_attention"};
    test::expect_error(ErrorCode::bad_file, {"layer_types"}, [&] { parse_config(config, "config.json"); });
    config["layer_types"] = {"full_attention", "full_attention", "full_attention", "mamba"};
    test::expect_error(ErrorCode::unsupported, {"layer_types", "mamba"}, [&] { parse_config(config, "config.json"); });
  }
}

TEST(FamilyConfigs, MixturesMustFit) {
  io::Json config = test::small_config(architecture_row("qwen3_moe"));
  config["num_experts_per_tok"] = 5;
  test::expect_error(ErrorCode::bad_file, {"num_experts_per_tok", "4 experts"}, [&] { parse_config(config, "c"); });
  config = test::small_config(architecture_row("glm4_moe"));
  config["n_group"] = 3;
  test::expect_error(ErrorCode::bad_file, {"n_group"}, [&] { parse_config(config, "c"); });
  config = test::small_config(architecture_row("qwen3_5_text"));
  config["linear_num_value_heads"] = 3;
  test::expect_error(ErrorCode::bad_file, {"linear_num_value_heads"}, [&] { parse_config(config, "c"); });
}

/// The same model by itself and as the text of one that sees.
TEST(FamilyConfigs, WrappedModelsAreReadAsTheirText) {
  size_t wrapped = 0;
  for (const auto* row : architectures()) {
    for (const std::string_view wrapper : row->wrappers) {
      if (wrapper.empty()) continue;
      const io::Json text = test::small_config(*row);
      const io::Json outer = {
          {"architectures", {std::string(wrapper)}}, {"model_type", "outer"}, {"text_config", text}};
      const auto inner = parse_config(text, "config.json"), found = parse_config(outer, "config.json");
      EXPECT_EQ(found.architecture, row);
      EXPECT_EQ(found.architecture_name, wrapper);
      EXPECT_EQ(found.hidden_size, inner.hidden_size);
      EXPECT_EQ(found.rope, inner.rope);
      ++wrapped;
    }
  }
  EXPECT_GE(wrapped, 8u);
  test::expect_error(ErrorCode::unsupported, {"Qwen3_5ForConditionalGeneration", "llama"}, [] {
    parse_config({{"architectures", {"Qwen3_5ForConditionalGeneration"}},
                  {"text_config", test::small_config(architecture_row("llama"))}},
                 "config.json");
  });
}

}  // namespace
}  // namespace w4q::model
