// Folded rotations with everything else: quantizing, calibration, verification, other programs' formats.
#include <algorithm>
#include <cmath>

#include "core/progress.h"
#include "core/text.h"
#include "dialect_samples.h"
#include "io/files.h"
#include "model/decoder.h"
#include "model/fold_rotations.h"
#include "model/model.h"
#include "pipeline/calibrate_model.h"
#include "pipeline/convert_model.h"
#include "pipeline/gguf_export.h"
#include "pipeline/gguf_import.h"
#include "pipeline/quantize_model.h"
#include "pipeline/repack_model.h"
#include "support.h"
#include "verify/conventions/detective.h"
#include "verify/structure.h"
#include "verify/weights/weights.h"

namespace w4q::pipeline {
namespace {

using quantize::StepKind;

namespace fs = std::filesystem;
using test::expect_error;

class Fold : public ::testing::Test {
 protected:
  void SetUp() override { set_progress_enabled(false); }

  static fs::path model() { return test::testdata() / "w4q-llama-tiny"; }

  QuantizeRequest request(const std::string& name, const char* scheme) const {
    QuantizeRequest result;
    result.model = model();
    result.output = folder_ / name;
    result.scheme = formats::parse_scheme(scheme);
    result.method = std::string(scheme).starts_with("kbit") ? "kbit" : "rtn";
    result.options.steps = {{.kind = StepKind::fold, .seed = 3}};
    return result;
  }

  static CalibratedRequest calibrated() {
    CalibratedRequest result;
    result.text = text();
    return result;
  }
  static CalibrationText text() {
    CalibrationText result;
    result.ids = model() / "own/selfgen.ids.u16";
    result.samples = 4;
    result.length = 128;
    return result;
  }

  /// Verification against the model that nothing was folded into.
  static double sqnr(const fs::path& folder) {
    const auto candidate = model::open_model(folder);
    const auto base = model::fold_like(model::open_model(model()), candidate.folded);
    const auto structure = verify::check_structure(candidate, &base);
    EXPECT_TRUE(structure.passed) << structure.detail << "\n" << join(structure.faults, "\n");
    EXPECT_TRUE(verify::check_codes(candidate.folder).passed);
    EXPECT_TRUE(verify::check_finite(candidate).passed);
    return verify::compare_with_base(candidate, base).total.sqnr();
  }

  static std::vector<float> logits(const fs::path& folder) {
    const auto opened = model::Model::open(folder);
    std::vector<int32_t> ids(64);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 37 % 1000);
    model::Decoder decoder(opened, 64);
    std::vector<float> result(64 * 1024);
    decoder.logits(decoder.forward(ids), {result.data(), 64, 1024});
    return result;
  }
  /// Root of the mean square of the difference of logits, over that of the logits.
  static double difference(const std::vector<float>& a, const std::vector<float>& b) {
    double error = 0, power = 0;
    for (size_t i = 0; i < a.size(); ++i) error += std::pow(a[i] - b[i], 2), power += std::pow(a[i], 2);
    return std::sqrt(error / power);
  }

  std::string bytes(const std::string& name) const { return io::read_file(folder_ / name / "model.safetensors"); }

  test::TemporaryFolder folder_;
};

TEST_F(Fold, WithNothingPackedTheModelIsTheSameButForRounding) {
  auto wanted = request("folded", "kbit4-b32-e4m4");
  wanted.keep = {"*"};
  quantize_model(wanted);
  // bf16 keeps 8 bits of 28 matrices and two tables. Measured 0.0037.
  EXPECT_LT(difference(logits(model()), logits(wanted.output)), 0.008);
  const io::Json config = io::read_json(wanted.output / "config.json");
  EXPECT_FALSE(config.contains("quantization_config"));
  EXPECT_EQ(config["tie_word_embeddings"], false);
  EXPECT_EQ(config["folded_rotations"]["residual"], "hadamard256-s3");
  EXPECT_EQ(config["folded_rotations"]["heads"], "hadamard-row-s3");
  sqnr(wanted.output);
  // It is ours to replace, and a model like any other, but not to be folded twice.
  wanted.overwrite = true;
  quantize_model(wanted);
  auto again = request("again", "kbit4-b32-e4m4");
  again.model = wanted.output;
  expect_error(ErrorCode::bad_argument, {"folded into this model already", "hadamard256-s3"},
               [&] { quantize_model(again); });
  again.options.steps = {};
  EXPECT_GT(quantize_model(again).total.sqnr(), 20);
  EXPECT_GT(sqnr(again.output), 20);
}

TEST_F(Fold, PackedWeightsAreThoseOfTheFoldedBase) {
  for (const char* scheme : {"kbit3-b32-e4m4", "int4-g128-f16-asym", "rotated4-d128"}) {
    SCOPED_TRACE(scheme);
    auto wanted = request(scheme, scheme);
    if (std::string(scheme).starts_with("rotated")) wanted.method = "rotated";
    const auto report = quantize_model(wanted);
    EXPECT_NEAR(sqnr(wanted.output), report.total.sqnr(), 1e-6);
    EXPECT_EQ(report.plan.steps.front(), "rotations folded, seed 3");
    // Without the fold they have nothing in common with the base's.
    const auto candidate = model::open_model(wanted.output);
    const auto base = model::open_model(model());
    EXPECT_FALSE(verify::check_structure(candidate, &base).passed);
    EXPECT_LT(verify::compare_with_base(candidate, base).total.sqnr(), 0);
    const auto& up = *candidate.folder.quantization.find("model.layers.0.mlp.up_proj");
    EXPECT_EQ(up.source_dtype, DType::bf16);
    // The rotation of a rotated scheme belongs to it.
    EXPECT_EQ(up.passes[0].rotation.block, wanted.method == "rotated" ? 128 : 1);
  }
}

TEST_F(Fold, EveryStepComposes) {
  for (const char* scheme : {"kbit3-b32-e4m4", "int4-g128-f16-asym"}) {
    SCOPED_TRACE(scheme);
    auto wanted = request(scheme, scheme);
    wanted.options.steps.add({{StepKind::awq}, {StepKind::feedback}});
    wanted.calibrated = calibrated();
    wanted.calibrated->text.samples = 180;  // of few tokens the error on these alone is not what counts
    wanted.lm_head = wanted.embeddings = true;
    wanted.keep = {"*.layers.[123].*"};  // one layer says it all
    if (wanted.method == "kbit") {
      wanted.options.steps.add({{StepKind::rotate, 128, 3}, {StepKind::learn_table}, {StepKind::search_scales}});
    }
    const auto report = quantize_model(wanted);
    for (const auto& tensor : report.tensors) {
      const OutputError output = tensor.output.value_or(OutputError{1, 1, 0});  // of head and table nothing is known
      EXPECT_LT(output.packed, 0.8 * output.plain) << tensor.name;
    }
    EXPECT_NEAR(sqnr(wanted.output), report.total.sqnr(), 0.05);
  }
}

/// What is folded needs no rotation at run time; what could not be takes one.
TEST_F(Fold, OnlyDownTakesTheRotationAtRunTime) {
  for (const bool calibrates : {false, true}) {
    auto wanted = request(calibrates ? "calibrated" : "plain", "kbit3-b32-e4m4");
    wanted.options.steps.add({StepKind::rotate, 128, 3});
    if (calibrates) {
      wanted.options.steps.add({StepKind::feedback});
      wanted.calibrated = calibrated();
    }
    const auto report = quantize_model(wanted);
    EXPECT_EQ(std::ranges::count(report.plan.steps, "down_proj's inputs rotated, hadamard128-s3"), 1);
    const auto quantization = model::open_model(wanted.output).folder.quantization;
    for (const auto& [name, info] : quantization.linears) {
      EXPECT_EQ(info.passes[0].rotation.identity(), !name.ends_with("down_proj")) << name;
    }
    EXPECT_NEAR(sqnr(wanted.output), report.total.sqnr(), 1e-3);
  }
}

TEST_F(Fold, StatisticsKnowTheirFold) {
  CalibrateRequest calibrate;
  calibrate.model = model();
  calibrate.output = folder_ / "s.safetensors";
  calibrate.text = text();
  calibrate.fold = 3;
  calibrate_model(calibrate);
  auto wanted = request("stats", "kbit3-b32-e4m4");
  wanted.options.steps.add({StepKind::feedback});
  wanted.calibrated = calibrated();
  auto now = wanted;
  now.output = folder_ / "now";
  quantize_model(now);
  wanted.calibrated->text = {};
  wanted.calibrated->statistics = calibrate.output;
  quantize_model(wanted);
  EXPECT_EQ(bytes("stats"), bytes("now"));
  for (const std::optional<uint64_t> other : {std::optional<uint64_t>(), std::optional<uint64_t>(4)}) {
    wanted.options.steps.remove(StepKind::fold);
    if (other) wanted.options.steps.add({.kind = StepKind::fold, .seed = *other});
    wanted.overwrite = true;
    expect_error(ErrorCode::mismatch, {"s.safetensors"}, [&] { quantize_model(wanted); });
  }
}

TEST_F(Fold, BitsAreChosenInTheFoldedBasis) {
  auto wanted = request("q", "kbit4-b32-e4m4");
  wanted.calibrated = calibrated();
  wanted.keep = {"*.layers.[123].*"};
  wanted.allocation = AllocationTarget{.bits_per_weight = 3.5, .bytes = 0, .save_recipe = folder_ / "r.json"};
  const auto report = quantize_model(wanted);
  EXPECT_LE(report.plan.allocation->chosen.bits_per_weight, 3.5);
  EXPECT_EQ(io::read_json(folder_ / "r.json")["steps"], "fold");
  EXPECT_GT(sqnr(wanted.output), 12);
}

TEST_F(Fold, RepacksAndComesBack) {
  quantize_model(request("q", "kbit3-b32-e4m4"));
  const auto repack = [&](const char* from, const char* to, const char* layout) {
    RepackRequest wanted;
    wanted.input = folder_ / from;
    wanted.output = folder_ / to;
    wanted.layout = layout;
    repack_model(wanted);
  };
  repack("q", "gpu", "kbit-fragment");
  sqnr(folder_ / "gpu");
  EXPECT_EQ(logits(folder_ / "gpu"), logits(folder_ / "q"));
  repack("gpu", "back", "canonical");
  EXPECT_EQ(bytes("back"), bytes("q"));
}

/// Other programs' checkpoints of a folded model: the same logits, and audited against the model as it was.
TEST_F(Fold, OtherProgramsReadIt) {
  auto wanted = request("q", "int4-g128-f16");
  wanted.keep = {"*.k_proj", "*.v_proj", "*.layers.[23].*"};  // Marlin's tiles have 256 outputs; two layers say it all
  quantize_model(wanted);
  const auto expected = logits(folder_ / "q");
  wanted.output = folder_ / "plain";
  wanted.options.steps = {};
  quantize_model(wanted);
  const auto base = logits(model());
  // Measured 1.21: rounding to nearest gains nothing on a model without outliers (docs/notes/quality.md).
  EXPECT_LT(difference(base, expected), 1.5 * difference(base, logits(wanted.output)));
  for (const auto& dialect : convert_targets()) {
    if (dialect == "w4q" || !test::keeps_codes(dialect, wanted.scheme, 256, 256)) continue;
    SCOPED_TRACE(dialect);
    convert_model({.input = folder_ / "q", .output = folder_ / dialect, .to = dialect});
    EXPECT_EQ(logits(folder_ / dialect), expected);
    const auto candidate = model::open_model(folder_ / dialect);
    const auto plain = model::fold_like(model::open_model(model()), candidate.folded);
    const auto audit = verify::check_conventions(candidate.folder, &plain.folder.tensors);
    EXPECT_TRUE(audit.passed) << join(audit.faults, "\n");
    const auto weights = verify::compare_with_base(candidate, plain);
    EXPECT_GT(weights.total.sqnr(), 15);
    convert_model({.input = folder_ / dialect, .output = folder_ / "back", .to = "w4q", .overwrite = true});
    EXPECT_EQ(bytes("back"), bytes("q"));
  }
}

TEST_F(Fold, GgufReadsItToo) {
  quantize_model(request("q", "int4-g32-f16"));
  export_gguf({.input = folder_ / "q", .output = folder_ / "m.gguf"});
  GgufImportRequest import;
  import.input = folder_ / "m.gguf";
  import.output = folder_ / "back";
  import.to = "w4q";
  import_gguf(import);
  EXPECT_EQ(logits(folder_ / "back"), logits(folder_ / "q"));
}

}  // namespace
}  // namespace w4q::pipeline
