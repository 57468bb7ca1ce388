// Whole checkpoints through the library, where the command line tests do not reach.
#include "pipeline/quantize_model.h"

#include <fstream>
#include <set>

#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"
#include "io/files.h"
#include "model/model.h"
#include "pipeline/repack_model.h"
#include "repack/layout_registry.h"
#include "support.h"

namespace w4q::pipeline {
namespace {

class QuantizeModel : public ::testing::Test {
 protected:
  void SetUp() override { set_progress_enabled(false); }

  QuantizeRequest request(const std::string& name) const {
    QuantizeRequest result;
    result.model = test::testdata() / "w4q-llama-tiny";
    result.output = folder_ / name;
    return result;
  }

  /// Two bytes in the place of value `at` of a tensor.
  struct Damage {
    uint64_t at;
    const char* bytes;
  };

  /// A copy of the bundled model with `damage_of(name)` done to its tensors.
  template <class DamageOf>
  std::filesystem::path damaged(const DamageOf& damage_of) const {
    std::filesystem::copy(test::testdata() / "w4q-llama-tiny", folder_ / "m", std::filesystem::copy_options::recursive);
    const auto path = folder_ / "m/model.safetensors";
    const std::string file = io::read_file(path);
    const auto header = io::parse_safetensors(std::as_bytes(std::span(file)), file.size(), path.native());
    std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
    for (const auto& tensor : header.tensors) {
      const std::optional<Damage> damage = damage_of(tensor.name);
      if (!damage) continue;
      stream.seekp(static_cast<std::streamoff>(header.data_begin + tensor.begin + 2 * damage->at));
      stream.write(damage->bytes, 2);
    }
    return folder_ / "m";
  }

  test::TemporaryFolder folder_;
};

TEST_F(QuantizeModel, ReportCountsEveryBlockOfEveryTensor) {
  const auto report = quantize_model(request("q"));
  int64_t blocks = 0;
  for (const auto& tensor : report.tensors) blocks += tensor.stats.blocks;
  // 4 layers of 256·256 + 2·128·256 + 256·256 + 3·768·256 weights, 32 to a block
  EXPECT_EQ(blocks, 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 768 * 256) / 32);
  EXPECT_TRUE(report.warnings().empty());
  EXPECT_EQ(report.plan.bytes_before(), 3'410'176 * 2);
}

TEST_F(QuantizeModel, PlanAndReportAgreeOnSizes) {
  auto wanted = request("q");
  wanted.scheme.bits = 3;
  const auto plan = plan_quantize(wanted);
  EXPECT_FALSE(std::filesystem::exists(wanted.output));
  const auto report = quantize_model(wanted);
  EXPECT_EQ(plan.bytes_after(), report.plan.bytes_after());
  // Headers come on top of the tensors: some hundred bytes per plane.
  EXPECT_GT(report.file_bytes, plan.bytes_after());
  EXPECT_LT(report.file_bytes, plan.bytes_after() + 30'000);
}

TEST_F(QuantizeModel, EveryLayoutOpensAsAModelAndComesBack) {
  auto wanted = request("q");
  wanted.embeddings = true;
  quantize_model(wanted);
  const auto canonical = model::Model::open(wanted.output);
  for (const auto& layout : repack::layout_registry()) {
    std::string why;
    if (!layout.accepts(wanted.scheme, 256, 256, &why)) continue;  // a layout of another family
    RepackRequest repack;
    repack.input = wanted.output;
    repack.output = folder_ / std::string(layout.name);
    repack.layout = layout.name;
    EXPECT_EQ(repack_model(repack).proven, 29) << layout.name;
    const auto opened = model::Model::open(repack.output);
    const auto same = [](const kernels::LinearWeight& a, const kernels::LinearWeight& b) {
      using Packed = std::shared_ptr<const formats::PackedLinear>;
      return formats::bytes_equal(std::get<Packed>(a.matrix)->passes[0], std::get<Packed>(b.matrix)->passes[0]);
    };
    EXPECT_TRUE(same(opened.embeddings(), canonical.embeddings())) << layout.name;
    EXPECT_TRUE(same(opened.layers()[3].linear(model::Role::down), canonical.layers()[3].linear(model::Role::down)))
        << layout.name;
  }
}

/// Servers take one factor for q, k and v, and one for gate and up: rounded as they are, and scaled before by AWQ.
TEST_F(QuantizeModel, FusedLinearsShareTheirFactor) {
  for (const char* steps : {"none", "awq → search → feedback"}) {
    auto wanted = request(steps);
    wanted.scheme = formats::parse_scheme("nvfp4");
    wanted.method = "float";
    wanted.options.steps = quantize::parse_steps(steps);
    if (wanted.options.steps.has(quantize::StepKind::awq)) {
      wanted.calibrated.emplace();
      wanted.calibrated->text.ids = wanted.model / "own/selfgen.ids.u16";
      wanted.calibrated->text.samples = 4;
      wanted.calibrated->text.length = 128;
    }
    quantize_model(wanted);
    const auto tensors = io::Checkpoint::open(wanted.output);
    const auto factor = [&](int layer, const char* linear) {
      const auto loaded = tensors.load(concat("model.layers.", layer, ".", linear, ".0.tensor_scale"));
      return Buffer::copy_of(loaded->bytes).as<const float>()[0];
    };
    std::set<float> factors;
    for (int layer = 0; layer < 4; ++layer) {
      EXPECT_EQ(factor(layer, "self_attn.q_proj"), factor(layer, "self_attn.k_proj"));
      EXPECT_EQ(factor(layer, "self_attn.q_proj"), factor(layer, "self_attn.v_proj"));
      EXPECT_EQ(factor(layer, "mlp.gate_proj"), factor(layer, "mlp.up_proj"));
      for (const char* linear : {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"}) {
        factors.insert(factor(layer, linear));
      }
    }
    EXPECT_GT(factors.size(), 1u) << "all linears have one factor: nothing is shown";
  }
}

/// Small tensors go side by side, one thread to each.
TEST_F(QuantizeModel, BytesAndReportDoNotDependOnThreads) {
  for (const auto& [method, scheme] : {std::pair{"kbit", "kbit4-b32-e4m4"}, std::pair{"float", "nvfp4"}}) {
    std::vector<QuantizeReport> reports;
    for (const int count : {1, 5}) {
      set_threads(count);
      auto wanted = request(concat(scheme, count));
      wanted.method = method;
      wanted.scheme = formats::parse_scheme(scheme);
      reports.push_back(quantize_model(wanted));
    }
    set_threads(0);
    for (const char* file : {"model.safetensors", "w4q_digests.json", "config.json"}) {
      EXPECT_EQ(io::read_file(folder_ / concat(scheme, 1) / file), io::read_file(folder_ / concat(scheme, 5) / file));
    }
    ASSERT_EQ(reports[0].tensors.size(), 28u);
    for (size_t i = 0; i < reports[0].tensors.size(); ++i) {
      EXPECT_EQ(reports[0].tensors[i].name, reports[1].tensors[i].name);
      EXPECT_EQ(reports[0].tensors[i].error.noise, reports[1].tensors[i].error.noise);
    }
  }
}

TEST_F(QuantizeModel, OfSeveralBadTensorsTheFirstIsNamed) {
  auto wanted = request("q");
  wanted.model = damaged([](std::string_view name) {
    return name.ends_with("down_proj.weight") ? std::optional<Damage>({0, "\xC0\x7F"}) : std::nullopt;
  });
  for (const int count : {1, 5}) {
    set_threads(count);
    test::expect_error(ErrorCode::bad_file, {"model.layers.0.mlp.down_proj.weight", "row 0"},
                       [&] { quantize_model(wanted); });
  }
  set_threads(0);
}

/// Their bytes stay what they are; an infinity may be meant.
TEST_F(QuantizeModel, KeptValuesThatAreNoNumbersAreNoted) {
  auto wanted = request("q");
  wanted.model = damaged([](std::string_view name) {
    if (name == "model.norm.weight") return std::optional<Damage>({17, "\xC0\x7F"});
    if (name == "model.layers.1.input_layernorm.weight") return std::optional<Damage>({3, "\x80\xFF"});
    return std::optional<Damage>();
  });
  const auto report = quantize_model(wanted);
  std::vector<std::string> found;
  std::ranges::copy_if(report.plan.notes, std::back_inserter(found),
                       [](const std::string& note) { return note.find("is NaN") != std::string::npos; });
  ASSERT_EQ(found.size(), 1);
  EXPECT_TRUE(found[0].starts_with("model.norm.weight: value 17 is NaN, kept as it is")) << found[0];
}

/// Plans count what stands side by side.
TEST_F(QuantizeModel, MoreThreadsTakeMoreMemory) {
  set_threads(1);
  const auto one = plan_quantize(request("q")).tensor_memory;
  set_threads(8);
  const auto eight = plan_quantize(request("q")).tensor_memory;
  set_threads(0);
  EXPECT_EQ(eight - base_memory, 8 * (one - base_memory));
}

TEST_F(QuantizeModel, ForeignQuantizationIsRefused) {
  std::filesystem::copy(test::testdata() / "w4q-llama-tiny", folder_ / "m", std::filesystem::copy_options::recursive);
  auto config = io::read_json(folder_ / "m/config.json");
  config["quantization_config"] = {{"quant_method", "awq"}, {"bits", 4}};
  std::ofstream(folder_ / "m/config.json") << config.dump();
  auto wanted = request("q");
  wanted.model = folder_ / "m";
  test::expect_error(ErrorCode::bad_argument, {"is quantized already", "awq", "16-bit checkpoint"},
                     [&] { quantize_model(wanted); });
}

}  // namespace
}  // namespace w4q::pipeline
