// What the commands that write a checkpoint share: when a folder may be replaced, and how config.json travels.
#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/digests.h"
#include "checkpoint/packed_checkpoint.h"
#include "core/stopwatch.h"
#include "io/checkpoint_writer.h"
#include "io/json.h"
#include "io/output.h"

namespace w4q::pipeline {

/// A key of config.json, or of its quantization_config, with the value "w4q": it marks a folder that w4q made out of
/// another format, or for a dialect.
inline constexpr std::string_view conversion_mark = "converted_by";

/// A key of w4q's quantization_config: what multiplied while calibration text was decoded, since the bytes depend on it.
inline constexpr std::string_view products_mark = "calibrated_with";

/// Says of a folder whether an output made from `input` may replace it, for io::OutputFolder: true for an empty one and
/// for one that w4q wrote. Throws bad_argument naming them when there are files in it that w4q did not write: neither
/// weights nor configs nor what it would carry along from `input` again; and when its digests say that it was changed.
std::function<bool(const std::filesystem::path& folder)> former_outputs(const std::filesystem::path& input);

/// `write` with room on the disk for what carry_companions copies out of the folder `from`.
io::WriteOptions with_companions(io::WriteOptions write, const std::filesystem::path& from);

/// Copies what travels with the weights (io::list_companions) from `from` to `to` and writes `config` as config.json.
/// Left out are the files that repeat an old quantization_config. Returns a line for each file that stays behind.
std::vector<std::string> carry_companions(const std::filesystem::path& from, const std::filesystem::path& to,
                                          const io::Json& config, const io::WriteOptions& write);
/// The same with the new quantization_config, which keeps the products_mark of the old one.
std::vector<std::string> carry_companions(const std::filesystem::path& from, const std::filesystem::path& to,
                                          io::Json config, const checkpoint::QuantizationConfig& quantization,
                                          const io::WriteOptions& write);

/// Adds them to what a report says of its run.
template <class Report>
void add_notes(Report& report, std::vector<std::string> notes) {
  if constexpr (requires { report.plan.notes; }) {
    std::ranges::move(notes, std::back_inserter(report.plan.notes));
  } else {
    std::ranges::move(notes, std::back_inserter(report.notes));
  }
}

/// How a run ends that wrote a checkpoint: its weights, what `companions(folder)` puts beside them and notes, the digests
/// of all that and of the models `bases` that it was made from, the folder in its place, and what the report says of that.
template <class Report, class Companions>
Report finished(Report report, io::CheckpointWriter& writer, io::OutputFolder& output, const Stopwatch& watch,
                std::vector<io::TensorDigests> bases, const Companions& companions) {
  writer.finish();
  add_notes(report, companions(output.staging()));
  checkpoint::record_digests(output.staging(), writer.digests(), std::move(bases));
  output.commit();
  if constexpr (requires { report.done; }) report.done = true;
  report.file_bytes = writer.file_bytes();
  report.seconds = watch.seconds();
  return report;
}

}  // namespace w4q::pipeline
