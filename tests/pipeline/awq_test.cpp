// AWQ through the library: folding changes nothing, searches do what they say, and what comes out is a model.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/rng.h"
#include "core/text.h"
#include "io/checkpoint_writer.h"
#include "io/files.h"
#include "model/model.h"
#include "model/reference_logits.h"
#include "model/turn_weight.h"
#include "pipeline/calibrate_model.h"
#include "pipeline/calibrated_cost.h"
#include "pipeline/quantize_model.h"
#include "pipeline/repack_model.h"
#include "support.h"

namespace w4q::pipeline {
namespace {

using Kind = ScaleTarget::Kind;
using test::expect_error;

const SchemeOf all_packed = [](std::string_view) { return std::optional(formats::Scheme{}); };

/// Scales between 1/32 and 32 for every channel, equal where channels share a producer.
std::vector<std::vector<float>> random_scales(const model::ModelConfig& config, int64_t layer,
                                              const ScaleTargets& targets) {
  const auto groups = model::input_groups(config, layer);
  std::vector<std::vector<float>> result(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto shared = shared_channels(groups[g], targets[g]);
    for (int64_t c = 0; c < groups[g].width; ++c) {
      const auto channel = static_cast<uint64_t>(shared.empty() ? c : shared[static_cast<size_t>(c)]);
      const uint64_t seed = 100 + static_cast<uint64_t>(layer) * 4 + g;
      result[g].push_back(static_cast<float>(std::exp2(10 * random_uniform(seed, channel) - 5)));
    }
  }
  return result;
}

/// Collects the tensors of a checkpoint that is written in one go.
class TensorBag {
 public:
  void add(const std::string& name, DType dtype, const Shape& shape, std::span<const std::byte> bytes) {
    plan_.push_back({name, dtype, shape});
    bytes_.push_back(Buffer::copy_of(bytes));
  }
  void write(const std::filesystem::path& folder) const {
    io::CheckpointWriter writer(folder, plan_, {});
    for (size_t i = 0; i < plan_.size(); ++i) writer.write(plan_[i].name, bytes_[i].bytes());
    writer.finish();
  }

 private:
  std::vector<io::PlannedTensor> plan_;
  std::vector<Buffer> bytes_;
};

/// The model with random scales folded in and nothing rounded but norms and biases, to their own type.
void write_folded(const std::filesystem::path& source, const std::filesystem::path& folder) {
  const auto checkpoint = io::Checkpoint::open(source);
  const auto config = model::read_config(source);
  TensorBag bag;
  std::set<std::string, std::less<>> done;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto targets = scale_targets(config, layer, all_packed, true);
    const auto folded = fold_scales(checkpoint, config, layer, targets, random_scales(config, layer, targets));
    for (const auto& [name, bytes] : folded.tensors) {
      bag.add(name, checkpoint.at(name).dtype, checkpoint.at(name).shape, bytes.bytes());
      done.insert(name);
    }
    const auto groups = model::input_groups(config, layer);
    for (size_t g = 0; g < groups.size(); ++g) {
      for (const auto& name : groups[g].names()) {
        auto weight = load_values(checkpoint, name + ".weight");
        model::multiply_columns(weight.matrix(), folded.columns[g]);
        if (const auto rows = folded.rows.find(name); rows != folded.rows.end())
          model::divide_rows(weight.matrix(), rows->second);
        EXPECT_TRUE(folded.rescaled.contains(weight.name));
        bag.add(weight.name, DType::f32, weight.shape, bytes_of(weight.values));
        done.insert(weight.name);
      }
    }
  }
  for (const auto& [name, info] : checkpoint.tensors()) {
    if (!done.contains(name)) bag.add(name, info.dtype, info.shape, checkpoint.load(name)->bytes);
  }
  bag.write(folder);
  io::copy_companions(source, folder, {});
}

std::vector<float> logits_of(const std::filesystem::path& folder, std::span<const int32_t> ids) {
  const auto model = model::Model::open(folder);
  model::Decoder decoder(model, static_cast<int64_t>(ids.size()));
  const auto hidden = decoder.forward(ids);
  std::vector<float> logits(ids.size() * static_cast<size_t>(model.config().vocab_size));
  decoder.logits(hidden, {logits.data(), hidden.rows, model.config().vocab_size});
  return logits;
}

/// KL(softmax(a) ‖ softmax(b)) in fp64.
double divergence(std::span<const float> a, std::span<const float> b) {
  double sum_a = 0, sum_b = 0, kl = 0;
  for (size_t i = 0; i < a.size(); ++i) sum_a += std::exp(double{a[i]}), sum_b += std::exp(double{b[i]});
  for (size_t i = 0; i < a.size(); ++i) {
    kl += std::exp(double{a[i]}) / sum_a * ((double{a[i]} - std::log(sum_a)) - (double{b[i]} - std::log(sum_b)));
  }
  return kl;
}

class Folding : public ::testing::TestWithParam<const char*> {};

/// Folding multiplies each weight by numbers that the norm, the bias and the rows before divide out again: one or two
/// roundings to fp32 per weight, as many as taking sums in another order. The bounds are those of the decoder's tests
/// for that; KL(p ‖ q) is at most the square of the largest change of a logit.
TEST_P(Folding, KeepsTheLogits) {
  test::TemporaryFolder folder;
  const auto source = test::testdata() / GetParam();
  const bool trained = std::string_view(GetParam()).ends_with("tiny");
  const auto reference = source / (trained ? "own/reference.safetensors" : "reference.safetensors");
  const auto ids = test::ReferenceLogits(reference).ids();
  write_folded(source, folder.path());
  const auto before = logits_of(source, ids), after = logits_of(folder.path(), ids);
  const double bound = trained ? 1e-4 : 1e-5;
  EXPECT_LT(test::largest_difference(before, after), bound);
  const size_t vocab = before.size() / ids.size();
  for (size_t row = 0; row < ids.size(); ++row) {
    const std::span a(before.data() + row * vocab, vocab), b(after.data() + row * vocab, vocab);
    EXPECT_LT(divergence(a, b), bound * bound);
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, Folding,
                         ::testing::Values("w4q-llama-tiny", "arch/llama-yarn", "arch/mistral-window",
                                           "arch/qwen2-window", "arch/qwen3-dynamic"));

TEST(ScaleTargets, FollowTheGraphAndWhatIsPacked) {
  const auto config = model::read_config(test::testdata() / "w4q-llama-tiny");
  const auto kinds = [&](const char* kept, bool store) {
    const SchemeOf scheme_of = [&](std::string_view module) {
      return module.ends_with(kept) ? std::nullopt : std::optional(formats::Scheme{});
    };
    std::vector<Kind> result;
    for (const auto& target : scale_targets(config, 1, scheme_of, store)) result.push_back(target.kind);
    return result;
  };
  using Kinds = std::vector<Kind>;
  EXPECT_EQ(kinds("nothing", true), (Kinds{Kind::norm, Kind::linear, Kind::norm, Kind::linear}));
  EXPECT_EQ(kinds("q_proj", true), (Kinds{Kind::input_scale, Kind::linear, Kind::norm, Kind::linear}));
  EXPECT_EQ(kinds("v_proj", true), (Kinds{Kind::input_scale, Kind::input_scale, Kind::norm, Kind::linear}));
  EXPECT_EQ(kinds("up_proj", true), (Kinds{Kind::norm, Kind::linear, Kind::input_scale, Kind::input_scale}));
  EXPECT_EQ(kinds("up_proj", false), (Kinds{Kind::norm, Kind::linear, Kind::none, Kind::none}));
  EXPECT_EQ(kinds("proj", true), (Kinds{Kind::none, Kind::none, Kind::none, Kind::none}));
  EXPECT_EQ(scale_targets(config, 1, all_packed, true)[1].producer, "model.layers.1.self_attn.v_proj");
}

TEST(ScaleTargets, QueryHeadsOfOneValueHeadShareScales) {
  const auto config = model::read_config(test::testdata() / "w4q-llama-tiny");  // 4 query heads, 2 value heads of 64
  const auto groups = model::input_groups(config, 1);
  const auto shared = shared_channels(groups[1], {Kind::linear, "v"});
  ASSERT_EQ(shared.size(), 256u);
  EXPECT_EQ(shared[3], 3);
  EXPECT_EQ(shared[64 + 3], 3);
  EXPECT_EQ(shared[128 + 3], 64 + 3);
  EXPECT_EQ(shared[192 + 3], 64 + 3);
  EXPECT_TRUE(shared_channels(groups[1], {Kind::input_scale, {}}).empty());
  EXPECT_TRUE(shared_channels(groups[3], {Kind::linear, "up"}).empty());
}

class QuantizeAwq : public ::testing::Test {
 protected:
  void SetUp() override { set_progress_enabled(false); }

  static std::filesystem::path model() { return test::testdata() / "w4q-llama-tiny"; }

  QuantizeRequest request(const std::string& name, const char* scheme = "int3-g128-f16-asym") const {
    QuantizeRequest result;
    result.model = model();
    result.output = folder_ / name;
    result.method = "awq";
    result.scheme = formats::parse_scheme(scheme);
    result.options.steps = {{quantize::StepKind::awq}};
    result.calibrated.emplace();
    result.calibrated->text.ids = model() / "own/selfgen.ids.u16";
    result.calibrated->text.samples = 8;
    result.calibrated->text.length = 128;
    return result;
  }
  std::string weights(const std::string& name) const { return io::read_file(folder_ / name / "model.safetensors"); }

  test::TemporaryFolder folder_;
};

TEST_F(QuantizeAwq, EveryStepLessensTheErrorOfTheOutputs) {
  const auto report = quantize_model(request("q"));
  ASSERT_EQ(report.groups.size(), 16u);
  for (const auto& group : report.groups) {
    EXPECT_LE(group.scaled_error, group.plain_error) << group.name;
    EXPECT_LE(group.packed_error, group.scaled_error) << group.name;
    EXPECT_LT(group.packed_error, 0.1 * group.output) << group.name;
  }
  EXPECT_EQ(report.tensors.size(), 28u);
}

/// The report's errors are of effective weights: for what is not folded, of what the decoder decodes.
TEST_F(QuantizeAwq, WhatDoesNotFoldIsStoredAndApplied) {
  auto wanted = request("q");
  wanted.keep = {"*.up_proj", "*.v_proj"};
  const auto report = quantize_model(wanted);
  const auto opened = model::Model::open(wanted.output), base = model::Model::open(model());
  const auto info = *opened.folder().quantization.find("model.layers.2.mlp.down_proj");
  EXPECT_TRUE(info.input_scale);
  EXPECT_TRUE(opened.folder().quantization.rescaled.empty());
  for (const auto& tensor : report.tensors) {
    if (tensor.name != "model.layers.2.mlp.down_proj.weight") continue;
    const auto error = model::compare_weights(base.layers()[2].linear(model::Role::down),
                                              opened.layers()[2].linear(model::Role::down));
    // The report multiplies by the reciprocal where the decoder divides: one rounding to fp32 each.
    EXPECT_NEAR(error.noise, tensor.error.noise, 1e-4 * error.noise);
    EXPECT_EQ(error.signal, tensor.error.signal);
  }
  // Headers come on top of the tensors.
  EXPECT_GT(report.file_bytes, report.plan.bytes_after());
  EXPECT_LT(report.file_bytes, report.plan.bytes_after() + 30'000);
  wanted.output = folder_ / "plain";
  wanted.options.steps.add({.kind = quantize::StepKind::awq, .input_scales = false});
  quantize_model(wanted);
  EXPECT_FALSE(
      model::Model::open(wanted.output).folder().quantization.find("model.layers.2.mlp.down_proj")->input_scale);
}

TEST_F(QuantizeAwq, BytesDependNeitherOnThreadsNorOnWhereStatisticsComeFrom) {
  const auto first_layer = [&](const char* name) {
    auto result = request(name);
    result.keep = {"*.layers.[123].*"};  // the searches of one layer say it all
    return result;
  };
  set_threads(1);
  quantize_model(first_layer("one"));
  set_threads(3);
  quantize_model(first_layer("three"));
  set_threads(0);
  EXPECT_EQ(weights("one"), weights("three"));
  auto spilled = first_layer("spilled");
  const auto opened = model::open_model(model());
  constexpr int64_t window_bytes = 128 * 256 * 4;
  spilled.calibrated->max_memory =
      calibration_memory(opened, 128, true) + calibrated_memory(opened, all_packed, {}) + 2 * window_bytes;
  const auto report = quantize_model(spilled);
  EXPECT_EQ(weights("one"), weights("spilled"));
  EXPECT_EQ(std::ranges::count_if(report.plan.notes,
                                  [](const auto& note) { return note.find("6 windows") != std::string::npos; }),
            1)
      << join(report.plan.notes, "\n");
  // A file keeps Gram sums in fp32, by way of which the means are made without one, too.
  CalibrateRequest calibrate;
  calibrate.model = model();
  calibrate.output = folder_ / "s.safetensors";
  calibrate.text = request("x").calibrated->text;
  calibrate_model(calibrate);
  auto reused = first_layer("reused");
  reused.calibrated->text = {};
  reused.calibrated->statistics = calibrate.output;
  const auto from_file = quantize_model(reused);
  ASSERT_EQ(from_file.groups.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(report.groups[i].point.alpha, from_file.groups[i].point.alpha);
  EXPECT_EQ(weights("one"), weights("reused"));
}

TEST_F(QuantizeAwq, OtherSchemesAndTheWayThroughALayout) {
  auto wanted = request("q", "kbit3-b32-e4m4");
  wanted.keep = {"*.up_proj"};
  wanted.embeddings = true;
  wanted.calibrated->text.samples = 2;
  const auto report = quantize_model(wanted);
  for (const auto& group : report.groups) EXPECT_LE(group.packed_error, group.plain_error) << group.name;
  RepackRequest there, back;
  there.input = wanted.output;
  there.output = folder_ / "tile";
  there.layout = "kbit-tile";
  repack_model(there);
  back.input = there.output;
  back.output = folder_ / "back";
  back.layout = "canonical";
  repack_model(back);
  EXPECT_EQ(weights("q"), weights("back"));
  EXPECT_EQ(io::read_file(folder_ / "q/config.json"), io::read_file(folder_ / "back/config.json"));
}

TEST_F(QuantizeAwq, RefusesWhatMakesNoSense) {
  auto none = request("q");
  none.calibrated->text = {};
  expect_error(ErrorCode::bad_argument, {"awq", "--calib", "--stats"}, [&] { quantize_model(none); });
  auto both = request("q");
  both.calibrated->statistics = folder_ / "s.safetensors";
  expect_error(ErrorCode::bad_argument, {"one of the two"}, [&] { quantize_model(both); });
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

/// Gemma 4's last layers are stored with keys and values that they do not read, which are carried along behind all layers.
TEST_F(QuantizeAwq, WhatLayersHaveAndDoNotReadIsCarriedAlong) {
  W4Q_NEEDS_SHARED_DATA();
  auto wanted = request("q");
  wanted.model = test::shared_data() / "families/gemma4";
  wanted.scheme = formats::parse_scheme("int4-g32-f16-asym");
  std::string ids;
  for (int i = 0; i < 64; ++i) ids += {static_cast<char>(3 + i * 37 % 200), 0};
  std::ofstream(folder_ / "ids.u16", std::ios::binary) << ids;
  wanted.calibrated->text.ids = folder_ / "ids.u16";
  wanted.calibrated->text.samples = 2;
  wanted.calibrated->text.length = 32;
  quantize_model(wanted);
  const std::string name = "model.language_model.layers.2.self_attn.k_proj.weight";
  const auto from = io::Checkpoint::open(wanted.model), to = io::Checkpoint::open(wanted.output);
  const auto before = from.load(name), after = to.load(name);
  EXPECT_TRUE(std::ranges::equal(before.view().bytes, after.view().bytes));
}

/// A hostile input scale would put infinities into the decoded weights.
TEST_F(QuantizeAwq, DamagedInputScaleIsNamed) {
  auto wanted = request("q");
  wanted.keep = {"*.up_proj"};
  wanted.calibrated->text.samples = 1;
  quantize_model(wanted);
  const std::string good = weights("q"), name = "model.layers.0.mlp.down_proj.input_scale";
  const auto header = io::parse_safetensors(std::as_bytes(std::span(good)), good.size(), "q");
  for (const float bad : {0.0f, -1.0f, INFINITY, NAN, 1e-40f}) {
    std::string content = good;
    for (const auto& tensor : header.tensors) {
      if (tensor.name == name) std::memcpy(content.data() + header.data_begin + tensor.begin + 8, &bad, 4);
    }
    std::ofstream(folder_ / "q/model.safetensors", std::ios::binary) << content;
    expect_error(ErrorCode::bad_file, {name, "[2]", "positive"}, [&] { model::Model::open(folder_ / "q"); });
  }
}

}  // namespace
}  // namespace w4q::pipeline
