#include "core/text.h"
#include "formats/scheme_registry.h"
#include "quantize/quantizer_registry.h"
#include "quantize/steps.h"

namespace w4q::quantize {
namespace {

using formats::Scheme;
using formats::SchemeFamily;
using Words = std::vector<std::string>;

constexpr int64_t rotation_blocks[] = {32, 64, 128, 256};

bool anything(const Scheme&, std::string*) { return true; }

bool lacks(std::string_view what, std::string* why) {
  if (why != nullptr) *why = what;
  return false;
}

bool has_table(const Scheme& scheme) { return formats::scheme_row(scheme.family).table != nullptr; }

bool has_tables_to_learn(const Scheme& scheme, std::string* why) {
  if (scheme.family == SchemeFamily::kbit) return true;
  return lacks(has_table(scheme) ? "learned tables" : "searched scales or learned tables", why);
}

bool has_scales_to_search(const Scheme& scheme, std::string* why) {
  return has_table(scheme) || lacks("searched scales or learned tables", why);
}

bool has_ranges_to_clip(const Scheme& scheme, std::string* why) {
  return scheme.family == SchemeFamily::integer || lacks("range to clip", why);
}

bool has_norms(const Scheme& scheme, std::string* why) {
  return scheme.family == SchemeFamily::rotated || formats::shares_bits(scheme) || lacks("norms", why);
}

/// Tiles of EXL3 stand between rotations of both sides: no row of theirs is one of the weight.
bool has_rows_by_themselves(const Scheme& scheme, std::string* why) {
  return scheme.family != SchemeFamily::exl3 || lacks("rows that are rounded by themselves", why);
}

void describe_fold(const Step& step, const QuantizeOptions&, Words& words) {
  words.push_back(concat("rotations folded, seed ", step.seed.value_or(0)));
}

void describe_awq(const Step&, const QuantizeOptions& options, Words& words) {
  words.emplace_back("awq scales");
  if (options.steps.awq_clips()) words.emplace_back("awq clips");
}

void describe_rotate(const Step& step, const QuantizeOptions& options, Words& words) {
  words.push_back(
      concat(step.folded ? "down_proj's inputs rotated, " : "inputs rotated, ", to_string(options.rotation())));
}

void describe_learning(const Step&, const QuantizeOptions& options, Words& words) {
  const std::string start = options.codebook.empty() ? "nf" : options.codebook;
  words.push_back(concat("table learned from ", options.table.empty() ? start : "a file"));
}

void describe_feedback(const Step& step, const QuantizeOptions&, Words& words) {
  words.push_back(concat("feedback, damping ", step.damping));
}

constexpr StepRow registered[] = {
    {.kind = StepKind::fold,
     .name = "fold",
     .option = "--fold-rotations",
     .help = "First fold rotations into the weights, so that no channel is louder than others: the model computes the "
             "same, and needs nothing at run time",
     .of_model = true,
     .accepts = anything,
     .describe = describe_fold},
    {.kind = StepKind::awq,
     .name = "awq",
     .option = "--awq",
     .help = "Search AWQ's scales of input channels as a first step",
     .method = "scales and clips searched on calibration activations, then rounding",
     .needs_statistics = true,
     .accepts = anything,
     .describe = describe_awq},
    {.kind = StepKind::rotate,
     .name = "rotate",
     .option = "--rotate",
     .help = "Round in a basis of the inputs that a Hadamard matrix of this size turns; 0: not",
     .blocks = rotation_blocks,
     .accepts = anything,
     .describe = describe_rotate},
    {.kind = StepKind::learn_table,
     .name = "lloyd",
     .of_quantizer = true,
     .searches = true,
     .accepts = has_tables_to_learn,
     .describe = describe_learning},
    {.kind = StepKind::search_scales,
     .name = "search",
     .of_quantizer = true,
     .searches = true,
     .accepts = has_scales_to_search,
     .describe = [](const Step&, const QuantizeOptions&, Words& words) { words.emplace_back("scales searched"); }},
    {.kind = StepKind::clip,
     .name = "clip",
     .of_quantizer = true,
     .accepts = has_ranges_to_clip,
     .describe = [](const Step&, const QuantizeOptions&, Words& words) { words.emplace_back("ranges searched"); }},
    {.kind = StepKind::asymmetric,
     .name = "asym",
     .option = "--asym",
     .help = "Round towards what makes up for the layers quantized before; reads the calibration text once more",
     .needs_statistics = true,
     .needs_text = true,
     .accepts = anything,
     .describe = [](const Step&, const QuantizeOptions&,
                    Words& words) { words.emplace_back("targets for quantized inputs"); }},
    {.kind = StepKind::feedback,
     .name = "feedback",
     .option = "--feedback",
     .help = "Feed rounding errors back along k (GPTQ's order); needs calibration",
     .needs_statistics = true,
     .accepts = anything,
     .describe = describe_feedback},
    {.kind = StepKind::feedback_outputs,
     .name = "feedback2",
     .option = "--feedback2",
     .help = "Feed them back along n too, by gradients of the loss on the calibration text",
     .needs_statistics = true,
     .needs_text = true,
     .needs_gradients = true,
     .with = StepKind::feedback,
     .accepts = has_rows_by_themselves,
     .describe = [](const Step&, const QuantizeOptions&,
                    Words& words) { words.emplace_back("on both sides, by gradients"); }},
    {.kind = StepKind::sweeps,
     .name = "sweeps",
     .option = "--sweeps",
     .help = "Go on from feedback by coordinate descent: blocks with new scales twice, then single codes; rings of "
             "trellises twice",
     .needs_statistics = true,
     .behind = StepKind::feedback,
     .accepts = has_rows_by_themselves,
     .describe = [](const Step&, const QuantizeOptions&,
                    Words& words) { words.emplace_back("sweeps over blocks and codes"); }},
    {.kind = StepKind::fit_norms,
     .name = "norms",
     .option = "--calibrate-norms",
     .help =
         "Rotated, trellis and exl3: scales by least squares of the outputs, once codes are chosen; needs calibration",
     .needs_statistics = true,
     .accepts = has_norms,
     .describe = [](const Step&, const QuantizeOptions&,
                    Words& words) { words.emplace_back("norms by least squares"); }},
    {.kind = StepKind::distill_norms,
     .name = "distill",
     .option = "--distill",
     .help = "At last move the weights of the model's norms until it predicts more like the 16-bit model on the "
             "calibration text, by gradients",
     .needs_statistics = true,
     .needs_text = true,
     .needs_gradients = true,
     .accepts = anything,
     .describe = [](const Step&, const QuantizeOptions&,
                    Words& words) { words.emplace_back("the model's norms by distillation"); }},
};

}  // namespace

std::span<const StepRow> step_registry() noexcept { return registered; }

}  // namespace w4q::quantize
