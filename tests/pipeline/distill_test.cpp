// Norms by distillation: what they bring, what stays, and what verify says of it.
#include "pipeline/distill.h"

#include <gtest/gtest.h>

#include <fstream>

#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"
#include "io/files.h"
#include "model/architecture.h"
#include "pipeline/quantize_model.h"
#include "small_model.h"
#include "support.h"
#include "verify/ladder.h"

namespace w4q::pipeline {
namespace {

using test::expect_error;

class Distill : public ::testing::Test {
 protected:
  void SetUp() override { set_progress_enabled(false); }

  static std::filesystem::path model() { return test::testdata() / "w4q-llama-tiny"; }

  QuantizeRequest request(const std::string& name, const char* steps) const {
    QuantizeRequest result;
    result.model = model();
    result.output = folder_ / name;
    result.scheme = formats::parse_scheme("kbit2-b32-e4m4");
    result.method = "kbit";
    result.keep = {"*.layers.[123].*"};  // one layer says it all
    result.calibrated.emplace();
    result.calibrated->text.ids = model() / "own/selfgen.ids.u16";
    result.calibrated->text.samples = 16;
    result.calibrated->text.length = 64;
    result.options.steps = quantize::parse_steps(steps);
    return result;
  }

  /// A small random one whose layers have embeddings of their own, and text for it.
  void without_way_back(QuantizeRequest& wanted) const {
    const auto rows = model::architectures();
    const auto row = std::ranges::find(rows, "gemma4_text", [](const auto* listed) { return listed->model_type; });
    wanted.model = folder_ / "gemma";
    test::write_small_model(**row, wanted.model);
    std::vector<uint16_t> ids;
    for (int i = 0; i < 400; ++i) ids.push_back(static_cast<uint16_t>((i * 37 + i * i * 11 + 5) % 160));
    wanted.calibrated->text.ids = folder_ / "ids.u16";
    std::ofstream(wanted.calibrated->text.ids, std::ios::binary).write(reinterpret_cast<const char*>(ids.data()), 800);
  }

  test::TemporaryFolder folder_;
};

/// Nothing but norms changes, they are named, and verify takes them with and without scales of AWQ in them.
TEST_F(Distill, MovesNormsAlone) {
  for (const char* steps : {"search", "awq → search"}) {
    const std::string with = concat(steps, " → distill");
    quantize_model(request("plain", steps));
    auto wanted = request("distilled", with.c_str());
    wanted.options.steps.find(quantize::StepKind::distill_norms)->rounds = 8;
    const auto report = quantize_model(wanted);
    const auto notes = join(report.plan.notes, "\n");
    EXPECT_NE(notes.find("9 norms distilled in 8 steps"), std::string::npos) << notes;
    const auto plain = model::open_model(folder_ / "plain"), distilled = model::open_model(folder_ / "distilled");
    EXPECT_EQ(distilled.folder.tuned.size(), 9u);
    for (const auto& [name, info] : plain.folder.tensors.tensors()) {
      const auto a = plain.folder.tensors.load(name), b = distilled.folder.tensors.load(name);
      EXPECT_EQ(std::ranges::equal(a->bytes, b->bytes), !distilled.folder.tuned.contains(name)) << name;
    }
    verify::CheckOptions options;
    options.model = folder_ / "distilled";
    options.base = model();
    verify::CheckContext context(std::move(options));
    const auto findings = verify::climb(context);
    for (const auto& check : findings.checks.checks()) {
      EXPECT_TRUE(check.passed) << steps << ": " << check.name << ": " << join(check.faults, "\n");
    }
    std::filesystem::remove_all(folder_ / "plain");
    std::filesystem::remove_all(folder_ / "distilled");
  }
}

/// By itself, with few steps.
class DistilledNormsOf : public Distill {
 protected:
  void SetUp() override {
    Distill::SetUp();
    quantize_model(request("q", "search"));
    base_.emplace(model::open_model(model()));
    quantized_.emplace(model::open_model(folder_ / "q"));
  }

  DistilledNorms run(int64_t samples, DistillOptions options = {}) {
    CalibrationText text;
    text.ids = model() / "own/selfgen.ids.u16";
    text.samples = samples;
    text.length = 64;
    options.length = 48;
    if (options.spill_at.empty()) options.spill_at = folder_ / "spill";
    return distill_norms(*base_, *quantized_, read_windows(*base_, text), options);
  }

  std::optional<model::OpenedModel> base_, quantized_;
};

TEST_F(DistilledNormsOf, AreTheSameForAnyThreadsAndMemory) {
  set_threads(1);
  const auto one = run(9, {.steps = 6});
  set_threads(3);
  const int64_t least = distill_memory(*base_, 0, 0, 48, {.max_memory = 1});
  const auto three = run(9, {.steps = 6, .max_memory = least});
  set_threads(0);
  EXPECT_EQ(one.weights, three.weights);
  EXPECT_EQ(one.before, three.before);
  EXPECT_EQ(one.after, three.after);
  EXPECT_EQ(one.held_out, 1);
  EXPECT_LT(one.after, one.before);
  EXPECT_NE(run(9, {.steps = 6, .seed = 1}).weights, one.weights);
  expect_error(ErrorCode::bad_argument, {"--max-memory", "distillation"},
               [&] { run(9, {.steps = 6, .max_memory = least - 1}); });
  require_distill_memory(*base_, 48, {.max_memory = least});
  expect_error(ErrorCode::bad_argument, {"--max-memory", "distillation"},
               [&] { require_distill_memory(*base_, 48, {.max_memory = least - 1}); });
}

/// Nothing to learn from, or too much of it: what does not help is said not to.
TEST_F(DistilledNormsOf, MustHelpOnTextThatWasKeptOut) {
  const auto alone = run(1);
  EXPECT_EQ(alone.held_out, 1);
  EXPECT_TRUE(alone.weights.empty());
  EXPECT_FALSE(alone.helps());
  EXPECT_FALSE(run(9, {.steps = 4, .rate = 2}).helps());
}

TEST_F(Distill, IsRefusedWhereItCannotBe) {
  auto wanted = request("q", "search → distill");
  wanted.options.steps.add({quantize::StepKind::fold});
  expect_error(ErrorCode::bad_argument, {"distill", "fold"}, [&] { quantize_model(wanted); });
  wanted = request("q", "search → distill");
  without_way_back(wanted);
  expect_error(ErrorCode::unsupported, {"distill", "embeddings of its own"}, [&] { quantize_model(wanted); });
  EXPECT_FALSE(io::path_exists(folder_ / "q"));
}

/// A preset does what the model has a way for, and says what it leaves out.
TEST_F(Distill, APresetLeavesOutWhatHasNoWayBack) {
  auto wanted = request("q", "search");
  without_way_back(wanted);
  wanted.preset = "max";
  wanted.scheme = formats::parse_scheme("int4-g32-f16");
  wanted.method = "rtn";
  wanted.calibrated->text.samples = 2;
  wanted.options.steps = quantize::preset_steps("max", wanted.scheme);
  wanted.options.steps.remove(quantize::StepKind::awq);
  const auto report = quantize_model(wanted);
  EXPECT_NE(join(report.plan.notes, "\n").find("without feedback2, distill: layer 0 has embeddings of its own"),
            std::string::npos);
  EXPECT_FALSE(report.tensors.empty());
}

}  // namespace
}  // namespace w4q::pipeline
