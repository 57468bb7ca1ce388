// Rotated and residual checkpoints, whole: quantized, opened with and without their residual, repacked.
#include <filesystem>

#include "core/progress.h"
#include "model/model.h"
#include "pipeline/quantize_model.h"
#include "pipeline/recipe_file.h"
#include "pipeline/repack_model.h"
#include "support.h"
#include "verify/structure.h"
#include "verify/weights/weights.h"

namespace w4q::pipeline {
namespace {

using quantize::StepKind;

namespace fs = std::filesystem;
using Packed = std::shared_ptr<const formats::PackedLinear>;

class Rotated : public ::testing::Test {
 protected:
  void SetUp() override { set_progress_enabled(false); }

  QuantizeRequest request(const std::string& name, std::string_view schemes) const {
    QuantizeRequest result;
    result.model = test::testdata() / "w4q-llama-tiny";
    result.output = folder_ / name;
    result.method = "rotated";
    result.residual = formats::parse_schemes(schemes);
    result.scheme = result.residual.front();
    result.residual.erase(result.residual.begin());
    return result;
  }

  static double sqnr(const fs::path& folder, bool residual = true) {
    const auto candidate = model::open_model(folder, residual);
    const auto base = model::open_model(test::testdata() / "w4q-llama-tiny");
    EXPECT_TRUE(verify::check_structure(candidate, &base).passed);
    EXPECT_TRUE(verify::check_codes(candidate.folder).passed);
    return verify::compare_with_base(candidate, base).total.sqnr();
  }

  static const formats::PackedLinear& down(const model::Model& model) {
    return *std::get<Packed>(model.layers()[2].linear(model::Role::down).matrix);
  }

  test::TemporaryFolder folder_;
};

TEST_F(Rotated, TheBaseStandsAloneAndTheResidualComesOnTop) {
  auto wanted = request("q", "rotated4-d128+rotated2-d128");
  wanted.rotation.shared = false;
  wanted.embeddings = true;
  const auto report = quantize_model(wanted);
  EXPECT_NEAR(report.plan.packed_bits_per_weight(), 6.26, 0.03);
  const double both = sqnr(wanted.output);
  EXPECT_NEAR(both, report.total.sqnr(), 1e-6);
  EXPECT_GT(both, 28);
  EXPECT_NEAR(sqnr(wanted.output, false), 20.2, 0.5);

  const auto whole = model::Model::open(wanted.output);
  EXPECT_TRUE(whole.folder().quantization.notes.empty());
  EXPECT_EQ(down(whole).passes.size(), 2u);
  EXPECT_EQ(down(whole).rotations[1].rotation(), (formats::Rotation{128, 1042}));
  // A user who was given the base alone.
  fs::remove_all(wanted.output / "residual");
  const auto base = model::Model::open(wanted.output);
  EXPECT_EQ(base.folder().quantization.notes.size(), 1u);
  EXPECT_EQ(down(base).passes.size(), 1u);
  EXPECT_TRUE(formats::bytes_equal(down(base).passes[0], down(whole).passes[0]));
  EXPECT_NEAR(sqnr(wanted.output), 20.2, 0.5);
}

TEST_F(Rotated, AHalfPresentResidualIsAnError) {
  auto wanted = request("q", "rotated3-d64+rotated2-d64");
  wanted.keep = {"*.mlp.*"};
  quantize_model(wanted);
  auto other = request("other", "rotated3-d64+rotated2-d64");
  other.keep = {"*.mlp.*", "model.layers.3.*"};
  quantize_model(other);
  fs::remove_all(wanted.output / "residual");
  fs::copy(other.output / "residual", wanted.output / "residual");
  test::expect_error(ErrorCode::bad_file, {"model.layers.3.self_attn", ".1.codes"},
                     [&] { model::Model::open(wanted.output); });
}

TEST_F(Rotated, RepackingKeepsPassesAndRotations) {
  auto wanted = request("q", "rotated3-row+rotated2-d32-e4m4");
  quantize_model(wanted);
  RepackRequest repack;
  repack.input = wanted.output;
  repack.output = folder_ / "again";
  repack.layout = "canonical";
  EXPECT_EQ(repack_model(repack).proven, 2 * 28);
  const auto before = model::Model::open(wanted.output), after = model::Model::open(repack.output);
  for (size_t pass = 0; pass < 2; ++pass) {
    EXPECT_TRUE(formats::bytes_equal(down(before).passes[pass], down(after).passes[pass]));
    EXPECT_EQ(down(before).rotations[pass].rotation(), down(after).rotations[pass].rotation());
  }
}

/// With calibration the first pass is the same whether others follow or not, later ones lessen what is left, and norms
/// by least squares lessen the error of the outputs further, or leave it.
TEST_F(Rotated, CalibrationGoesThroughAllPasses) {
  const auto calibrated = [&](const std::string& name, std::string_view schemes, bool norms, bool shared) {
    auto wanted = request(name, schemes);
    wanted.keep = {"*.layers.[123].*"};
    wanted.rotation.shared = shared;
    wanted.options.steps = {{StepKind::rotate, 128, 42}, {StepKind::feedback}};
    if (norms) wanted.options.steps.add({StepKind::fit_norms});
    wanted.calibrated.emplace();
    wanted.calibrated->text.ids = wanted.model / "own/selfgen.ids.u16";
    wanted.calibrated->text.samples = 8;
    wanted.calibrated->text.length = 128;
    const auto report = quantize_model(wanted);
    double error = 0;
    for (const auto& tensor : report.tensors) error += tensor.output ? tensor.output->packed : 0;
    EXPECT_NEAR(sqnr(wanted.output), report.total.sqnr(), 1e-6);
    return error;
  };
  const double one = calibrated("one", "rotated4-d128", false, true);
  EXPECT_LT(calibrated("norms", "rotated4-d128", true, true), one);
  const double shared = calibrated("shared", "rotated4-d128+rotated2-d128", true, true);
  const double own = calibrated("own", "rotated4-d128+rotated2-d128", true, false);
  EXPECT_LT(shared, one / 4);
  EXPECT_LT(own, one / 4);
  const auto model = model::Model::open(folder_ / "own"), base = model::Model::open(folder_ / "norms");
  const auto& two = *std::get<Packed>(model.layers()[0].linear(model::Role::down).matrix);
  EXPECT_TRUE(formats::bytes_equal(two.passes[0],
                                   std::get<Packed>(base.layers()[0].linear(model::Role::down).matrix)->passes[0]));
  EXPECT_EQ(two.rotations[1].rotation(), (formats::Rotation{128, 1042}));
}

TEST_F(Rotated, TheTableOfEmbeddingsMayHaveASchemeOfItsOwn) {
  auto wanted = request("q", "rotated4-d128");
  wanted.embeddings = true;
  wanted.table = formats::parse_scheme("int4-g32-f16");
  wanted.options.steps = {{StepKind::search_scales}};
  const auto report = quantize_model(wanted);
  EXPECT_EQ(report.tensors.front().scheme, "int4-g32-f16");
  EXPECT_GT(sqnr(wanted.output), 19);
}

TEST_F(Rotated, RecipesNameSeveralPasses) {
  auto wanted = request("q", "rotated4-d128");
  wanted.recipe =
      parse_recipe(io::parse_json(R"({"rules": [{"match": "*.down_proj", "scheme": "rotated4-d128+kbit3-b32-e4m4"},
                                   {"match": "*.up_proj", "scheme": "int8-g128-f16"}]})",
                                  "r"),
                   "r");
  quantize_model(wanted);
  const auto opened = model::Model::open(wanted.output);
  EXPECT_EQ(down(opened).passes.size(), 2u);
  EXPECT_EQ(down(opened).rotations[1].rotation(), down(opened).rotations[0].rotation());
  const auto& up = *std::get<Packed>(opened.layers()[2].linear(model::Role::up).matrix);
  EXPECT_EQ(up.passes.size(), 1u);
  EXPECT_TRUE(up.rotations.empty());
}

}  // namespace
}  // namespace w4q::pipeline
