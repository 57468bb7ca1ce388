// Bits for each tensor by the size of the whole, on the small model.
#include "pipeline/allocate.h"

#include <cmath>
#include <functional>
#include <map>
#include <memory>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "io/checkpoint_writer.h"
#include "io/files.h"
#include "io/json.h"
#include "io/output.h"
#include "pipeline/calibrate_model.h"
#include "pipeline/recipe_file.h"
#include "pipeline/sensitivity.h"
#include "pipeline/statistics_file.h"
#include "support.h"

namespace w4q::pipeline {
namespace {

using test::expect_error;

class Allocate : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    set_progress_enabled(false);
    set_threads(1);  // little work at a time
    folder_ = std::make_unique<test::TemporaryFolder>();
    CalibrateRequest calibrate;
    calibrate.model = model();
    calibrate.output = statistics();
    calibrate.text = {.text = {}, .ids = model() / "own/selfgen.ids.u16", .samples = 4, .length = 64};
    calibrate.sensitivity = true;
    calibrate_model(calibrate);
  }
  static void TearDownTestSuite() {
    folder_.reset();
    set_threads(0);
  }

  static std::filesystem::path model() { return test::testdata() / "w4q-llama-tiny"; }
  static std::filesystem::path statistics() { return *folder_ / "s.safetensors"; }
  static std::filesystem::path path(const std::string& name) { return *folder_ / name; }

  static QuantizeRequest request(double bits_per_weight) {
    QuantizeRequest result;
    result.model = model();
    result.scheme = formats::parse_scheme("kbit4-b32-e4m4");
    result.keep = {"*.layers.[123].*"};  // one layer says it all
    result.calibrated.emplace();
    result.calibrated->statistics = statistics();
    result.options.steps = {{quantize::StepKind::search_scales}};
    result.allocation = {bits_per_weight, 0, {}};
    return result;
  }

  static inline std::unique_ptr<test::TemporaryFolder> folder_;
};

TEST_F(Allocate, SensitivitiesPredictTheDivergenceOfUniformWidths) {
  const auto config = model::read_config(model());
  const auto file = StatisticsFile::open(statistics(), config);
  ASSERT_TRUE(file.origin().sensitivity);
  const auto values = file.load_sensitivities();
  ASSERT_EQ(values.size(), 7u * 4u);
  for (const auto& [name, value] : values) EXPECT_TRUE(value > 0 && std::isfinite(value)) << name;
  // Outputs of queries and keys pass through a softmax; those of values do not.
  EXPECT_GT(values.at("model.layers.0.self_attn.v_proj"), 10 * values.at("model.layers.0.self_attn.q_proj"));
}

TEST_F(Allocate, SensitivitiesOfVersionOneAreRead) {
  const auto config = model::read_config(model());
  const auto now = io::Checkpoint::open(statistics());
  EXPECT_EQ(now.metadata().at("version"), "3");
  const auto values = StatisticsFile::open(statistics(), config).load_sensitivities();
  std::vector<double> table;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& linear : model::layer_plan(config, layer).linears()) table.push_back(values.at(linear.name));
  }
  std::vector<io::PlannedTensor> plan{{"sensitivity", DType::f64, {4, 7}}};
  for (const auto& [name, info] : now.tensors()) {
    if (!name.ends_with(".sensitivity") && name != "windows") plan.push_back({name, info.dtype, info.shape});
  }
  auto metadata = now.metadata();
  metadata["version"] = "1";
  std::filesystem::create_directory(path("old"));
  io::CheckpointWriter writer(path("old"), plan, {.metadata = metadata});
  writer.write("sensitivity", bytes_of(table));
  for (const auto& [name, info] : now.tensors()) {
    if (!name.ends_with(".sensitivity") && name != "windows") writer.write(name, now.load(name)->bytes);
  }
  writer.finish();
  const auto file = StatisticsFile::open(path("old") / "model.safetensors", config);
  EXPECT_EQ(file.load_sensitivities(), values);
}

/// The model with the values of layer 1 times `factor`.
model::OpenedModel with_values_times(const std::filesystem::path& folder, float factor) {
  auto opened = model::open_model(folder);
  const auto source = std::make_shared<const io::Checkpoint>(opened.folder.tensors);
  const std::string name = "model.layers.1.self_attn.v_proj.weight";
  const auto& info = source->at(name);
  auto make = [source, name, factor] {
    const auto loaded = source->load(name);
    Buffer values(static_cast<size_t>(element_count(loaded->shape)) * sizeof(float));
    widen(loaded->bytes, loaded->dtype, values.as<float>());
    for (float& value : values.as<float>()) value *= factor;
    return values;
  };
  std::map<std::string, io::DerivedTensor, std::less<>> tensors;
  tensors.emplace(name, io::DerivedTensor{DType::f32, info.dtype, info.shape, std::move(make)});
  opened.folder.tensors = io::Checkpoint::derive(source, std::move(tensors), "values times a factor");
  return opened;
}

TEST_F(Allocate, SensitivitiesOfIdleLinearsAreNotNegative) {
  const auto opened = with_values_times(model(), 1e-5f);
  const auto windows =
      read_windows(opened, {.text = {}, .ids = model() / "own/selfgen.ids.u16", .samples = 2, .length = 64});
  // Nothing of this layer's attention matters, so that KL is what sums in fp32 leave.
  const auto values = measure_sensitivities(opened, windows);
  for (const auto& [name, value] : values) EXPECT_TRUE(value >= 0 && std::isfinite(value)) << name << " " << value;
  EXPECT_GT(values.begin()->second, 0);
}

TEST_F(Allocate, StaysBelowTheTargetAndBeatsUniformWidths) {
  const auto plan = plan_quantize(request(3.5));
  ASSERT_TRUE(plan.allocation);
  const auto& report = *plan.allocation;
  EXPECT_LE(report.chosen.bits_per_weight, 3.5);
  EXPECT_GT(report.chosen.bits_per_weight, 3.4);
  ASSERT_EQ(report.uniform.size(), 4u);
  const auto &three = report.uniform[1], &four = report.uniform[2];
  const double line = three.divergence + (four.divergence - three.divergence) *
                                             (report.chosen.bits_per_weight - three.bits_per_weight) /
                                             (four.bits_per_weight - three.bits_per_weight);
  EXPECT_LT(report.chosen.divergence, line);
  for (size_t i = 1; i < report.frontier.size(); ++i) {
    EXPECT_GT(report.frontier[i].bits_per_weight, report.frontier[i - 1].bits_per_weight);
    EXPECT_LT(report.frontier[i].divergence, report.frontier[i - 1].divergence);
  }
  EXPECT_NEAR(plan.packed_bits_per_weight(), report.chosen.bits_per_weight, 1e-9);
}

TEST_F(Allocate, ARecipeGivesTheSameModelAgain) {
  auto wanted = request(3.5);
  wanted.output = path("a");
  wanted.allocation->save_recipe = path("r.json");
  set_threads(2);
  const auto report = quantize_model(wanted);
  set_threads(1);
  EXPECT_EQ(report.tensors.size(), 7u);
  auto again = request(3.5);
  again.allocation.reset();
  again.keep.clear();
  again.recipe = read_recipe(path("r.json"));
  again.output = path("b");
  quantize_model(again);
  EXPECT_EQ(io::read_file(path("a") / "model.safetensors"), io::read_file(path("b") / "model.safetensors"));
}

TEST_F(Allocate, SizesAreThoseOfTheWholeOutput) {
  auto wanted = request(0);
  const int64_t four = plan_quantize([&] {
                         auto uniform = wanted;
                         uniform.allocation.reset();
                         return uniform;
                       }())
                           .bytes_after();
  wanted.allocation->bytes = four;
  const auto plan = plan_quantize(wanted);
  EXPECT_LE(plan.bytes_after(), four);
  EXPECT_GT(plan.bytes_after(), four - four / 100);
}

TEST_F(Allocate, AGenerousTargetKeepsSixteenBits) {
  const auto plan = plan_quantize(request(12));
  EXPECT_GT(plan.allocation->chosen.tensors.at(16), 0);
  EXPECT_LE(plan.allocation->chosen.bits_per_weight, 12);
}

TEST_F(Allocate, WorksWithoutSensitivitiesAndOnIntegers) {
  CalibrateRequest calibrate;
  calibrate.model = model();
  calibrate.output = path("plain.safetensors");
  calibrate.merge = {statistics()};
  calibrate_model(calibrate);
  auto wanted = request(4.5);
  wanted.method = "rtn";
  wanted.options.steps = {{quantize::StepKind::feedback}};
  wanted.scheme = formats::parse_scheme("int4-g128-f16-asym");
  wanted.calibrated->statistics = path("plain.safetensors");
  const auto plan = plan_quantize(wanted);
  EXPECT_FALSE(plan.allocation->measured);
  EXPECT_FALSE(plan.allocation->mix);
  EXPECT_NE(to_text(plan).find("keep no text"), std::string::npos);
  EXPECT_LE(plan.allocation->chosen.bits_per_weight, 4.5);
  EXPECT_EQ(plan.allocation->uniform.size(), 7u);
}

TEST_F(Allocate, TellsWhatWasMeasured) {
  const auto report = *plan_quantize(request(3.05)).allocation;
  ASSERT_TRUE(report.mix);
  const MixReport& mix = *report.mix;
  EXPECT_EQ(mix.windows, 4);
  EXPECT_EQ(mix.length, 64);
  EXPECT_LE(mix.divergence, mix.neighbour_divergence);
  EXPECT_EQ(mix.neighbour, mix.divergence == mix.neighbour_divergence);
  EXPECT_LE(mix.exchanges_taken, mix.exchanges_tried);
  EXPECT_EQ(mix.base_bits, 3);
  ASSERT_EQ(mix.linears.size(), 7u);
  for (const auto& linear : mix.linears) {
    EXPECT_TRUE(linear.divergences.contains(linear.bits)) << linear.name;
    EXPECT_DOUBLE_EQ(linear.divergences.at(3), mix.base_divergence) << linear.name;
    EXPECT_GT(linear.divergences.at(2), mix.base_divergence) << linear.name;
  }
  EXPECT_NE(to_text(report).find("exchanges"), std::string::npos);
  EXPECT_EQ(to_json(report)["mix"]["linears"].size(), 7u);
}

/// The words of an architecture that nobody knows.
std::filesystem::path unknown(const std::filesystem::path& model, const std::filesystem::path& folder) {
  std::filesystem::create_directory(folder);
  std::filesystem::copy_file(model / "model.safetensors", folder / "model.safetensors");
  auto config = io::read_json(model / "config.json");
  config["model_type"] = "nobody";
  config["architectures"] = {"NobodyForCausalLM"};
  io::write_file(folder / "config.json", config.dump(), false, {});
  return folder;
}

TEST_F(Allocate, UnknownArchitecturesGoByErrorsOfWeights) {
  auto wanted = request(3.5);
  wanted.model = unknown(model(), path("nobody"));
  wanted.calibrated.reset();
  const auto plan = plan_quantize(wanted);
  ASSERT_TRUE(plan.allocation);
  EXPECT_FALSE(plan.allocation->mix);
  EXPECT_FALSE(plan.allocation->measured);
  EXPECT_GT(plan.allocation->chosen.bits_per_weight, 3.4);
  EXPECT_LE(plan.allocation->chosen.bits_per_weight, 3.5);
  EXPECT_NE(to_text(plan).find("summed errors"), std::string::npos);
  wanted.output = path("of nobody");
  EXPECT_EQ(quantize_model(wanted).tensors.size(), 7u);
}

std::vector<std::string> widths(const char* scheme) {
  std::vector<std::string> names;
  for (const auto& width : widths_of(formats::parse_scheme(scheme))) names.push_back(formats::to_string(width));
  return names;
}

TEST_F(Allocate, WidthsAreSchemesThatExist) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(widths("nvfp4"), (Names{"nvfp4", "fp8-channel"}));
  EXPECT_EQ(widths("mxfp4"), (Names{"mxfp4", "mxfp8"}));
  EXPECT_EQ(widths("fp8-block128"), (Names{"fp8-block128"}));
  EXPECT_EQ(widths("nf4"), (Names{"lut4-b64-f32"}));
  for (const char* scheme : {"kbit3-b32-e4m4", "int4-g64-f16-asym", "rotated3-d128", "trellis3-w16", "exl3-3"}) {
    EXPECT_GE(widths(scheme).size(), 2u) << scheme;
    for (const auto& width : widths(scheme)) EXPECT_EQ(formats::to_string(formats::parse_scheme(width)), width);
  }
}

TEST_F(Allocate, FloatsAreMixedWithLargerOnes) {
  auto wanted = request(5.5);
  wanted.method = "float", wanted.scheme = formats::parse_scheme("nvfp4");
  const auto plan = plan_quantize(wanted);
  const auto& tensors = plan.allocation->chosen.tensors;
  EXPECT_LE(plan.allocation->chosen.bits_per_weight, 5.5);
  EXPECT_GT(tensors.at(4), 0);
  EXPECT_GT(tensors.at(8), 0);
}

TEST_F(Allocate, OnlyWidthsThatAreLeftAreChosen) {
  auto wanted = request(4.5);
  wanted.allocation->widths = {3, 4};
  const auto chosen = plan_quantize(wanted).allocation->chosen;
  EXPECT_LE(chosen.bits_per_weight, 4.5);
  for (const auto& [bits, count] : chosen.tensors) EXPECT_TRUE(bits == 3 || bits == 4 || bits == 16) << bits;
  wanted.allocation = {0, 6'000'000, {}};
  const auto room = plan_quantize(wanted).allocation->chosen.bits_per_weight;
  wanted.allocation->dialect_bytes = 20'000;
  EXPECT_LT(plan_quantize(wanted).allocation->chosen.bits_per_weight, room);
}

TEST_F(Allocate, CostsOfAllPresetsBesideTextThatOneStepReads) {
  auto wanted = request(3.5);
  wanted.preset = "best";
  wanted.options.steps = quantize::preset_steps("best", wanted.scheme);
  wanted.calibrated->text = {.text = {}, .ids = model() / "own/selfgen.ids.u16", .samples = 4, .length = 64};
  const auto plan = plan_quantize(wanted);
  EXPECT_EQ(plan.presets.size(), quantize::preset_names().size());
  EXPECT_NE(to_text(plan).find("without the steps that go over the text anew"), std::string::npos);
}

TEST_F(Allocate, MistakesAreExplained) {
  auto wanted = request(2.0);
  expect_error(ErrorCode::bad_argument, {"smallest widths", "2.25"}, [&] { plan_quantize(wanted); });
  wanted.calibrated.reset();
  expect_error(ErrorCode::bad_argument, {"calibration", "--stats"}, [&] { plan_quantize(wanted); });
}

}  // namespace
}  // namespace w4q::pipeline
