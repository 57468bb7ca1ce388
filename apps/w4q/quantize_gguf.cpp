#include "quantize_gguf.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "core/text.h"
#include "pipeline/gguf_export.h"
#include "pipeline/gguf_targets.h"

namespace w4q::app {
namespace {

/// What has a meaning for GGUF blocks. Everything else decides on schemes of w4q's own.
constexpr std::array<std::string_view, 23> meant{
    "model",       "--output",      "--to",      "--quality", "--calib",      "--calib-ids",
    "--chat",      "--chat-date",   "--samples", "--length",  "--calib-seed", "--stats",
    "--damping",   "--max-memory",  "--device",  "--dry-run", "--for",        "--even-if-refused",
    "--overwrite", "--target-size", "--threads", "--json",    "--quiet"};

std::string name_of(const CLI::Option& option) {
  return option.get_lnames().empty() ? option.get_name() : "--" + option.get_lnames().front();
}

void refuse_others(const CLI::App& command, const std::string& to) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = name_of(*option);
    if (option->count() == 0 || std::ranges::find(meant, name) != meant.end() || name == "--verbose") continue;
    throw Error(ErrorCode::bad_argument, concat(name, " means nothing to --to ", to))
        .detail(
            "blocks of GGUF have scales and codes of their own; what is packed, and to which types, the target says")
        .hint(concat("leave out ", name));
  }
}

/// Where activations come from; nothing where weights are to count alike.
std::optional<pipeline::GgufCalibrationRequest> calibration(const QualityArguments& quality,
                                                            const QuantizeGguf& wanted) {
  pipeline::CalibrationText text = calibration_text(quality.calibration);
  const bool fast = quality.quality == "fast", given = !text.empty() || !quality.statistics.empty();
  if (!given && wanted.bytes == 0 && (quality.quality.empty() || fast)) {
    const std::string option = given_decoding_option(quality.calibration);
    if (!option.empty()) throw without_text(option, "nothing is decoded", "--calib");
    return std::nullopt;
  }
  if (!given) text.self = true;
  pipeline::GgufCalibrationRequest request;
  request.source = {.text = std::move(text),
                    .statistics = quality.statistics,
                    .max_memory = static_cast<int64_t>(quality.calibration.max_memory)};
  if (quality.statistics.empty()) request.source.gpu = device::open_device(wanted.device);
  request.feedback = !fast;
  request.damping = quality.damping;
  return request;
}

}  // namespace

bool names_gguf_target(const std::string& to) {
  return std::ranges::any_of(pipeline::gguf_targets(), [&](const auto& target) { return target.name == to; });
}

int quantize_gguf(const CLI::App& command, const CommonOptions& common, const OutputOptions& output,
                  const QualityArguments& quality, const QuantizeGguf& wanted) {
  refuse_others(command, wanted.to);
  require_one_process("--to " + wanted.to);
  refuse_resume(output, "a GGUF file");
  const bool sized = wanted.bytes > 0;
  if (sized && wanted.to != "gguf") {
    throw Error(ErrorCode::bad_argument, concat("--target-size chooses types by itself, and --to ", wanted.to, " too"))
        .hint("--to gguf");
  }
  if (!sized && !pipeline::gguf_target(wanted.to).quantizes) {
    throw Error(ErrorCode::bad_argument, concat("--to ", wanted.to, " quantizes nothing"))
        .hint(concat("w4q repack ", wanted.model, " -o FILE.gguf --to ", wanted.to,
                     "; to one of fewer bits with --target-size, or to gguf-q4_k_m"));
  }
  const pipeline::GgufExportRequest request{.input = wanted.model,
                                            .output = output.output,
                                            .to = wanted.to,
                                            .calibration = calibration(quality, wanted),
                                            .bytes = wanted.bytes,
                                            .overwrite = output.overwrite};
  std::vector<std::string> notes = wanted.notes;
  if (quality.quality == "best" || quality.quality == "max") {
    notes.push_back(concat("--quality ", quality.quality, " has the steps of good for blocks of GGUF"));
  }
  if (!wanted.serving.empty()) {
    // Types that are yet to be chosen are K-quants, as those of this mix.
    pipeline::GgufExportRequest asked = request;
    if (sized) asked.to = "gguf-q4_k_m";
    std::ranges::move(notes_of(require_served(wanted.serving, wanted.to, pipeline::planned_headers(asked))),
                      std::back_inserter(notes));
  }
  auto report = output.dry_run ? pipeline::plan_gguf_export(request) : pipeline::export_gguf(request);
  report.notes.insert(report.notes.end(), notes.begin(), notes.end());
  print(common, schema::conversion, pipeline::to_text(report, detail(common)), pipeline::to_json(report));
  return 0;
}

}  // namespace w4q::app
