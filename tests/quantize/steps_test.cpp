#include "quantize/steps.h"

#include "quantize/rounding.h"
#include "support.h"

namespace w4q::quantize {
namespace {

TEST(Steps, PrintAndParse) {
  for (const char* text : {"awq → rotate128 → lloyd+search → feedback", "rotate32 → search", "lloyd", "clip",
                           "awq → feedback", "search → feedback → norms", "search → feedback → sweeps → norms", "fold",
                           "fold → awq → rotate128 → lloyd+search → feedback", "none"}) {
    EXPECT_EQ(to_string(parse_steps(text)), text);
  }
  EXPECT_EQ(parse_steps(" awq->rotate64 , search "),
            (Steps{{StepKind::awq}, {StepKind::rotate, 64}, {StepKind::search_scales}}));
}

TEST(Steps, MistakesNameTheStep) {
  const auto refused = [](const char* text, std::initializer_list<std::string_view> parts) {
    test::expect_error(ErrorCode::bad_argument, parts, [&] { parse_steps(text); });
  };
  refused("", {"no such step"});
  refused("awq → polish", {"polish", "no such step", "rotate128"});
  refused("feedback → awq", {"awq", "too late"});
  refused("awq → awq", {"twice"});
  refused("awq → fold", {"fold", "too late"});
  refused("rotate96", {"rotate96", "32, 64"});
  refused("rotate", {"rotate"});
  refused("search → sweeps", {"sweeps", "feedback", "missing", "--feedback"});
  refused("sweeps → feedback", {"feedback", "too late"});
}

TEST(Steps, StandInTheirOrderAndOnce) {
  Steps steps{{StepKind::feedback}, {.kind = StepKind::fold, .seed = 3}};
  steps.add({.kind = StepKind::rotate, .block = 64});
  steps.add({.kind = StepKind::feedback, .damping = 0.5});
  EXPECT_EQ(to_string(steps), "fold → rotate64 → feedback");
  EXPECT_EQ(steps.find(StepKind::feedback)->damping, 0.5);
  EXPECT_EQ(steps.fold_seed(), 3u);
  steps.remove(StepKind::fold);
  EXPECT_EQ(steps.fold_seed(), std::nullopt);
  EXPECT_EQ(to_string(steps.without(&StepRow::needs_statistics)), "rotate64");
  EXPECT_EQ(to_string(Steps{{StepKind::rotate, formats::whole_row}}), "none");
}

TEST(Steps, AwqClipsWhereNothingElseChoosesRanges) {
  EXPECT_TRUE(parse_steps("awq → clip").awq_clips());
  for (const char* text : {"none", "clip", "awq → search", "awq → lloyd", "awq → feedback"}) {
    EXPECT_FALSE(parse_steps(text).awq_clips()) << text;
  }
  EXPECT_FALSE((Steps{{.kind = StepKind::awq, .clip = false}}).awq_clips());
}

/// Rows stand in the order of their kinds, and a quantizer takes the steps that its row says its schemes accept.
TEST(Steps, RowsSayWhatQuantizersTake) {
  const std::vector<float> values(64, 0.5f);
  const TensorView view{"w", DType::f32, {1, 64}, bytes_of(values)};
  auto kind = static_cast<int>(StepKind::fold);
  for (const StepRow& row : step_registry()) {
    EXPECT_EQ(static_cast<int>(row.kind), kind++) << row.name;
    EXPECT_EQ(&step_row(row.kind), &row);
    for (const char* name : {"kbit3-b32-e4m4", "int4-g32-f16", "rotated3-d32"}) {
      const auto scheme = formats::parse_scheme(name);
      QuantizeOptions options;
      options.steps = {{row.kind}};
      std::string why;
      if (row.accepts(scheme, &why) || !row.of_quantizer) {
        EXPECT_NO_THROW(rounding_quantizer(scheme).run(view, scheme, options)) << row.name << " " << name;
      } else {
        test::expect_error(ErrorCode::bad_argument, {why},
                           [&] { rounding_quantizer(scheme).run(view, scheme, options); });
      }
    }
  }
}

TEST(Steps, PresetsAreStepsThatTheSchemeAccepts) {
  for (const char* scheme : {"kbit3-b32-e4m4", "int4-g128-f16", "rotated4-d128"}) {
    const auto parsed = formats::parse_scheme(scheme);
    for (const auto& name : preset_names()) {
      for (const Step& step : preset_steps(name, parsed)) {
        EXPECT_TRUE(step_row(step.kind).accepts(parsed, nullptr)) << name << " " << scheme;
      }
    }
  }
  EXPECT_EQ(to_string(preset_steps("best", formats::parse_scheme("kbit3-b32-e4m4"))),
            "awq → rotate128 → lloyd+search → asym → feedback → sweeps → distill");
}

}  // namespace
}  // namespace w4q::quantize
