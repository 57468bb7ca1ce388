#include "pipeline/calibrate_model.h"

#include <optional>

#include "core/error.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "io/lost_pages.h"
#include "io/output.h"
#include "model/opened.h"
#include "pipeline/calibration_cuda.h"
#include "pipeline/mix_meter.h"
#include "pipeline/shared_walk.h"
#include "pipeline/statistics_file.h"

namespace w4q::pipeline {
namespace {

std::vector<StatisticsFile> open_all(const CalibrateRequest& request, const model::ModelConfig& config,
                                     StatisticsOrigin& origin) {
  std::vector<StatisticsFile> files;
  for (const auto& path : request.merge) {
    files.push_back(StatisticsFile::open(path, config));
    files.back().check_model(origin.model);
    if (files.back().origin().gram != origin.gram) {
      throw Error(ErrorCode::mismatch, concat(path.string(), ": ", origin.gram ? "has no" : "has", " Gram matrices"))
          .hint(origin.gram ? "--diagonal merges without them" : "leave out --diagonal");
    }
    origin.tokens += files.back().origin().tokens;
    for (const auto& text : files.back().origin().texts) origin.texts.push_back(text);
    const std::string& products = files.back().origin().products;
    if (!products.empty() && origin.products.find(products) == std::string::npos) {
      origin.products += (origin.products.empty() ? "" : "; ") + products;
    }
  }
  return files;
}

/// The sums of every source of one layer, in the order the sources were given.
LayerStatistics gather(SharedWalk* walk, const std::vector<StatisticsFile>& files, const model::ModelConfig& config,
                       int64_t layer) {
  std::optional<LayerStatistics> sum;
  if (walk != nullptr) sum = walk->next(layer);
  const auto groups = model::input_groups(config, layer);
  for (const auto& file : files) {
    auto more = file.load(layer);
    if (!sum) {
      sum = std::move(more);
      continue;
    }
    for (size_t i = 0; i < groups.size(); ++i) quantize::merge((*sum)[i], more[i], groups[i].name());
  }
  return std::move(*sum);
}

/// Those of the text that is decoded now, or else of the first file that has some.
Sensitivities sensitivities(const CalibrationWindows* windows, const std::vector<StatisticsFile>& files,
                            const model::OpenedModel& model) {
  if (windows != nullptr) {
    Progress progress("sensitivity", sensitivity_runs(model.config), "runs");
    return measure_sensitivities(model, *windows, [&] { progress.advance(1); });
  }
  for (const auto& file : files) {
    if (file.origin().sensitivity) return file.load_sensitivities();
  }
  throw Error(ErrorCode::bad_argument, "none of the files to merge has sensitivities")
      .hint("give --text or --ids too, or leave out --sensitivity");
}

/// Those of the text that is decoded now, or else of the first file that has some.
CalibrationWindows kept_windows(const CalibrationWindows* windows, const std::vector<StatisticsFile>& files) {
  if (windows != nullptr) return mix_windows(*windows);
  for (const auto& file : files) {
    if (file.origin().window_samples > 0) return file.load_windows();
  }
  return {};
}

void note_repeated_texts(const StatisticsOrigin& origin, std::vector<std::string>& notes) {
  for (size_t i = 0; i < origin.texts.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (origin.texts[i] == origin.texts[j]) notes.push_back(concat("text ", origin.texts[i], " counts twice"));
    }
  }
}

}  // namespace

CalibrateReport calibrate_model(const CalibrateRequest& request) {
  return calibrate_model(request, model::open_plain_model(request.model, request.fold));
}

CalibrateReport calibrate_model(const CalibrateRequest& request, const model::OpenedModel& model) {
  const Stopwatch watch;
  const auto& config = model.config;
  model::require_decoder(config, "calibration");
  std::vector<std::filesystem::path> inputs{request.model, request.text.text, request.text.ids, request.text.chat.path};
  inputs.insert(inputs.end(), request.merge.begin(), request.merge.end());
  if (request.ranks->first()) io::check_writable(request.output, request.overwrite, inputs);
  const CalibrationText text = fitted(request.text, config);
  const bool decodes = !text.empty();
  if (!decodes && request.merge.empty()) {
    throw Error(ErrorCode::bad_argument, "nothing to calibrate with")
        .hint("--text FILE, --ids FILE, --chat FILE or --merge FILE");
  }
  CalibrateReport report;
  report.layers = config.layers;
  StatisticsOrigin origin;
  origin.model = model_identity(model.folder.tensors);
  origin.gram = request.options.gram;
  origin.sensitivity = request.sensitivity;
  auto& ranks = *request.ranks;
  std::optional<SharedWalk> walk;
  std::optional<Progress> progress;
  std::optional<CalibrationWindows> probe, kept;
  if (decodes) {
    origin.products = products_on(gpu_of(request.options.gpu));
    ranks.require_same("what they multiply with", origin.products);
    const auto windows = read_windows(ranks, model, text, gpu_of(request.options.gpu));
    if (text.self) report.notes.push_back(describe_self(text));
    report.samples = windows.samples;
    if (windows.samples < text.samples) {
      report.notes.push_back(concat("the text has ", windows.samples, " windows of ", windows.length, " tokens only"));
    }
    origin.tokens = windows.samples * windows.length;
    origin.texts.push_back(windows.hash);
    if (request.sensitivity) probe = sensitivity_windows(windows);
    kept = mix_windows(windows);
    progress.emplace("calibrate", (windows.samples + ranks.size() - 1) / ranks.size() * config.layers, "windows");
    auto options = request.options;
    options.spill_at = request.output;
    options.travelling_memory = travelling_memory(config, options, ranks.size());
    options.on_window = [&progress] { progress->advance(1); };
    walk.emplace(ranks, model, windows, options, std::vector<int>(static_cast<size_t>(config.layers)), 1);
    if (const auto* own = walk->calibration()) report.spilled = own->spilled();
  }
  if (!request.ranks->first()) {
    if (walk) walk->finish();
    io::refuse_changed_inputs();
    ranks.barrier();
    return report;
  }
  const auto files = open_all(request, config, origin);
  note_repeated_texts(origin, report.notes);
  CalibrationWindows tokens;
  if (request.sensitivity || request.windows) tokens = kept_windows(kept ? &*kept : nullptr, files);
  origin.window_samples = tokens.samples;
  origin.window_length = tokens.length;
  StatisticsWriter writer(request.output, config, origin, request.overwrite, inputs);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    writer.write(layer, gather(walk ? &*walk : nullptr, files, config, layer));
  }
  if (walk) walk->finish();
  walk.reset();
  progress.reset();
  if (request.sensitivity) writer.write(sensitivities(probe ? &*probe : nullptr, files, model));
  if (tokens.samples > 0) writer.write(tokens);
  ranks.barrier();  // the others have read all that they read
  report.file_bytes = writer.finish();
  report.tokens = origin.tokens;
  report.seconds = watch.seconds();
  return report;
}

std::string to_text(const CalibrateReport& report) {
  std::string text = concat("statistics of ", report.tokens, " tokens in ", report.layers, " layers; ",
                            human_bytes(report.file_bytes), " in ", human_seconds(report.seconds), "\n");
  if (report.spilled > 0) text += concat(report.spilled, " of ", report.samples, " windows lay on disk\n");
  for (const auto& note : report.notes) text += "note: " + note + "\n";
  return text;
}

io::Json to_json(const CalibrateReport& report) {
  return {{"tokens", report.tokens},
          {"samples", report.samples},
          {"layers", report.layers},
          {"spilled_windows", report.spilled},
          {"file_bytes", report.file_bytes},
          {"seconds", report.seconds},
          {"notes", report.notes}};
}

}  // namespace w4q::pipeline
