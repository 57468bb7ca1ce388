// The law of ranks: however many share the work, the bytes are those of one process. Over the registries: every scheme's
// family, every layout and every dialect, each way. The ranks are threads here; equal_test.cpp starts processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>

#include "../cli/program.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "dialect_samples.h"
#include "formats/scheme_registry.h"
#include "io/files.h"
#include "made_checkpoint.h"
#include "model/architecture.h"
#include "pipeline/convert_model.h"
#include "pipeline/decode_model.h"
#include "pipeline/gguf_export.h"
#include "pipeline/gguf_import.h"
#include "pipeline/mxfp4_import.h"
#include "pipeline/quantize_model.h"
#include "pipeline/repack_model.h"
#include "quantize/rounding.h"
#include "repack/layout_registry.h"
#include "small_model.h"
#include "thread_ranks.h"

namespace w4q::test {
namespace {

using formats::Scheme;
using formats::SchemeFamily;

constexpr int numbers_of_ranks[] = {2, 3, 5};
constexpr int64_t width = 256;  ///< of all linears, which every dialect's tiles divide
/// Smaller than the linears: several files, another number of them than of ranks.
constexpr int64_t shard_bytes = 200'000;

class RanksLaw : public ::testing::Test {
 protected:
  RanksLaw() {
    set_progress_enabled(false);
    set_threads(1);
  }
  ~RanksLaw() override { set_threads(0); }

  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder;
    write_model("model", width);
    write_model("narrow", width / 2);
  }
  static void TearDownTestSuite() { delete folder_; }

  static std::filesystem::path path(const std::string& name) { return *folder_ / name; }

  /// Two layers of linears in 16 bit.
  static void write_model(const std::string& name, int64_t size) {
    MadeCheckpoint made;
    MadeWriter writer(made, Storage::bf16);
    for (const char* layer : {"model.layers.0.", "model.layers.1."}) {
      for (const char* linear : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                                 "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
        writer.dense(std::string(layer) + linear + ".weight", {size, size});
      }
      for (const char* norm : {"input_layernorm", "post_attention_layernorm"}) {
        writer.dense(std::string(layer) + norm + ".weight", {size});
      }
    }
    writer.dense("model.norm.weight", {size});
    writer.dense("model.embed_tokens.weight", {64, size});
    made.config = {{"architectures", {"LlamaForCausalLM"}},
                   {"model_type", "llama"},
                   {"hidden_size", size},
                   {"intermediate_size", size},
                   {"num_hidden_layers", 2},
                   {"num_attention_heads", size / 64},
                   {"num_key_value_heads", size / 64},
                   {"head_dim", 64},
                   {"vocab_size", 64},
                   {"hidden_act", "silu"},
                   {"rms_norm_eps", 1e-5},
                   {"rope_theta", 10000.0},
                   {"tie_word_embeddings", true},
                   {"max_position_embeddings", 64},
                   {"torch_dtype", "bfloat16"}};
    made.write(path(name));
  }

  /// What `make(folder, sharing)` writes: by itself, and by each number of ranks. Returns the folder that stays.
  template <class Make>
  static std::filesystem::path expect_equal(const std::string& name, const Make& make) {
    const auto alone = path(name);
    make(alone, pipeline::Sharing{});
    const std::string expected = folder_digest(alone);
    for (const int size : numbers_of_ranks) {
      const auto shared = path(name + "-by" + std::to_string(size));
      run_as_ranks(size, [&](ranks::Ranks& ranks) {
        make(shared, pipeline::Sharing{.ranks = &ranks, .resume = false, .command = {}});
      });
      EXPECT_EQ(folder_digest(shared), expected) << name << " by " << size << " ranks";
      std::filesystem::remove_all(shared);
    }
    return alone;
  }

  static pipeline::QuantizeRequest request_of(const Scheme& scheme) {
    pipeline::QuantizeRequest request;
    request.model = path("model");
    request.method = quantize::rounding_quantizer(scheme).name;
    request.scheme = scheme;
    request.rotation.seed = 5;
    request.write.max_shard_bytes = shard_bytes;
    // Its search goes over 2^16 states for each weight: one small linear of each layer.
    if (scheme.family != SchemeFamily::exl3) return request;
    request.model = path("narrow");
    request.keep = {"*.q_proj", "*.k_proj", "*.o_proj", "*.gate_proj", "*.up_proj", "*.down_proj"};
    return request;
  }

  static std::filesystem::path quantized(const Scheme& scheme, const std::string& codebook = {}) {
    const std::string name = formats::to_string(scheme) + codebook;
    if (std::filesystem::exists(path(name))) return path(name);
    return expect_equal(name, [&](const auto& to, const auto& sharing) {
      auto request = request_of(scheme);
      if (!codebook.empty()) request.options.codebook = codebook;
      request.output = to;
      request.sharing = sharing;
      pipeline::quantize_model(request);
    });
  }

  static std::filesystem::path converted(const std::filesystem::path& from, const std::string& to) {
    return expect_equal(from.filename().string() + "-" + to, [&](const auto& output, const auto& sharing) {
      pipeline::convert_model(
          {.input = from, .output = output, .to = to, .write = {.max_shard_bytes = shard_bytes}, .sharing = sharing});
    });
  }

  static inline TemporaryFolder* folder_ = nullptr;
};

/// The first scheme of a family that `suits`, of few bits; nothing: there is none.
template <class Suits>
std::optional<Scheme> first_scheme(const Suits& suits) {
  for (const auto& row : formats::scheme_registry()) {
    for (const Scheme& scheme : row.schemes()) {
      if (quantize::rounding_quantizer(scheme).accepts(scheme) && suits(scheme)) return scheme;
    }
  }
  return std::nullopt;
}

checkpoint::PackedLinearInfo linear_of(const Scheme& scheme) {
  return {"w", width, width, DType::bf16, {{scheme, std::string(formats::canonical_layout)}}};
}

TEST_F(RanksLaw, EveryFamilyOfSchemesIsQuantizedToTheSameBytes) {
  for (const auto& row : formats::scheme_registry()) {
    const auto scheme = first_scheme([&](const Scheme& each) { return each.family == row.family; });
    ASSERT_TRUE(scheme.has_value());
    quantized(*scheme);
  }
}

TEST_F(RanksLaw, EveryLayoutIsRepackedToTheSameBytes) {
  for (const auto& row : repack::layout_registry()) {
    SCOPED_TRACE(row.name);
    const auto scheme = first_scheme([&](const Scheme& each) {
      return each.family != SchemeFamily::exl3 && row.accepts(each, width, width, nullptr);
    });
    if (!scheme) continue;
    const auto from = quantized(*scheme);
    const auto there = expect_equal(std::string(row.name), [&](const auto& to, const auto& sharing) {
      pipeline::repack_model({.input = from,
                              .output = to,
                              .target = {},
                              .layout = std::string(row.name),
                              .write = {.max_shard_bytes = shard_bytes},
                              .sharing = sharing});
    });
    const auto back = expect_equal(std::string(row.name) + "-back", [&](const auto& to, const auto& sharing) {
      pipeline::repack_model({.input = there,
                              .output = to,
                              .target = {},
                              .layout = std::string(formats::canonical_layout),
                              .write = {.max_shard_bytes = shard_bytes},
                              .sharing = sharing});
    });
    // Tensor by tensor: files hold them in another order.
    EXPECT_EQ(io::read_file(back / "w4q_digests.json"), io::read_file(from / "w4q_digests.json"));
  }
}

TEST_F(RanksLaw, StacksOfExpertsAreWrittenToTheSameBytes) {
  write_small_model(model::architecture_row("gpt_oss"), path("mixture"));
  const auto packed = expect_equal("experts", [&](const auto& to, const auto& sharing) {
    auto request = request_of(formats::parse_scheme("mxfp4"));
    request.model = path("mixture");
    request.keep = {"*.self_attn.*"};
    request.output = to;
    request.sharing = sharing;
    pipeline::quantize_model(request);
  });
  converted(converted(packed, "gpt-oss"), "w4q");
}

TEST_F(RanksLaw, EveryDialectIsWrittenAndReadToTheSameBytes) {
  for (const auto& row : checkpoint::dialect_registry()) {
    if (!row.stacks.empty()) continue;
    SCOPED_TRACE(row.name);
    const auto scheme = first_scheme([&](const Scheme& each) {
      const auto fit = row.fit(linear_of(each));
      return fit.scheme && fit.loses.empty();
    });
    ASSERT_TRUE(scheme.has_value());
    const auto from = quantized(*scheme, row.name == "bitsandbytes-fp4" ? "fp4" : "");
    const auto there = converted(from, std::string(row.name));
    converted(there, "w4q");
  }
}

/// What is read: MXFP4 as gpt-oss has it, to be quantized, repacked and decoded.
TEST_F(RanksLaw, SmallFloatsAreReadToTheSameBytes) {
  write_small_model(model::architecture_row("gpt_oss"), path("read"));
  auto first = request_of(formats::parse_scheme("mxfp4"));
  first.model = path("read");
  first.output = path("read-mxfp4");
  first.keep = {"*.self_attn.*"};
  pipeline::quantize_model(first);
  pipeline::convert_model({.input = first.output, .output = path("oss"), .to = "gpt-oss"});
  ASSERT_TRUE(pipeline::is_mxfp4(path("oss")));
  expect_equal("oss-kbit", [&](const auto& to, const auto& sharing) {
    auto request = request_of(formats::parse_scheme("kbit3-b32-e4m4"));
    request.model = path("oss");
    request.output = to;
    request.sharing = sharing;
    pipeline::quantize_model(request);
  });
  expect_equal("oss-canonical", [&](const auto& to, const auto& sharing) {
    pipeline::import_mxfp4({.input = path("oss"),
                            .output = to,
                            .target = {},
                            .layout = {},
                            .write = {.max_shard_bytes = shard_bytes},
                            .sharing = sharing});
  });
  for (const auto& target : pipeline::decode_targets()) {
    std::set<std::string> reports;
    expect_equal("oss-" + target, [&](const auto& to, const auto& sharing) {
      auto report = pipeline::decode_model({.input = path("oss"),
                                            .output = to,
                                            .to = target,
                                            .write = {.max_shard_bytes = shard_bytes},
                                            .sharing = sharing});
      report.seconds = 0;
      if (sharing.ranks->first()) reports.insert(pipeline::to_json(report).dump());
    });
    EXPECT_EQ(reports.size(), 1u);
  }
}

/// Of matrices that are rounded, and of a mixture, whose stacks are one rank's each.
TEST_F(RanksLaw, GgufFilesAreReadToTheSameBytes) {
  write_small_model(model::architecture_row("qwen3_moe"), path("stacks"));
  for (const std::string name : {"model", "stacks"}) {
    const auto file = path(name + ".gguf");
    pipeline::export_gguf(
        {.input = path(name), .output = file, .to = name == "model" ? "gguf-q8_0" : "gguf-f32", .tokenizer = false});
    for (const auto& target : pipeline::gguf_import_targets()) {
      SCOPED_TRACE(name + " to " + target);
      std::set<std::string> reports;
      expect_equal(name + "-from-gguf-" + target, [&](const auto& to, const auto& sharing) {
        auto report = pipeline::import_gguf({.input = file,
                                             .output = to,
                                             .to = target,
                                             .tokenizer = false,
                                             .write = {.max_shard_bytes = shard_bytes},
                                             .sharing = sharing});
        report.seconds = 0;
        if (sharing.ranks->first()) reports.insert(pipeline::to_json(report).dump());
      });
      EXPECT_EQ(reports.size(), 1u);
    }
  }
}

}  // namespace
}  // namespace w4q::test
