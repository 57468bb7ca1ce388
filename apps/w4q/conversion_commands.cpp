#include "conversion_commands.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "checkpoint/dialect/dialect.h"
#include "core/error.h"
#include "core/text.h"
#include "gguf_commands.h"
#include "pipeline/convert_model.h"
#include "pipeline/decode_model.h"
#include "pipeline/gguf_export.h"
#include "pipeline/gguf_import.h"
#include "pipeline/gguf_targets.h"
#include "pipeline/mxfp4_import.h"
#include "pipeline/turboquant.h"

namespace w4q::app {
namespace {

const JsonSchema& schema_of(const pipeline::ConvertReport&) { return schema::convert; }
const JsonSchema& schema_of(const pipeline::ConversionReport&) { return schema::conversion; }

template <class Request, class Plan, class Run>
int convert_with(const CommonOptions& common, const OutputOptions& output, const Request& request, const Plan& plan,
                 const Run& run) {
  const auto report = output.dry_run ? plan(request) : run(request);
  print(common, schema_of(report), pipeline::to_text(report, detail(common)), pipeline::to_json(report));
  return 0;
}

/// `make`, whose report gets these notes too.
template <class Make>
auto noted(const Make& make, const std::vector<std::string>& notes) {
  return [&make, &notes](const auto& request) {
    auto report = make(request);
    add_served(notes, report.notes);
    return report;
  };
}

int from_gguf(const CommonOptions& common, const OutputOptions& output, const Conversion& conversion) {
  const pipeline::GgufImportRequest request{.input = conversion.input,
                                            .output = output.output,
                                            .to = conversion.to,
                                            .tokenizer = conversion.tokenizer,
                                            .write = write_options(output),
                                            .overwrite = output.overwrite,
                                            .sharing = sharing(output)};
  return convert_with(common, output, request, pipeline::plan_gguf_import, pipeline::import_gguf);
}

int to_gguf(const CommonOptions& common, const OutputOptions& output, const Conversion& conversion) {
  const pipeline::GgufExportRequest request{.input = conversion.input,
                                            .output = output.output,
                                            .to = conversion.to,
                                            .tokenizer = conversion.tokenizer,
                                            .overwrite = output.overwrite};
  std::vector<std::string> notes = conversion.notes;
  if (!conversion.serving.empty()) {
    std::ranges::move(notes_of(require_served(conversion.serving, conversion.to, pipeline::planned_headers(request))),
                      std::back_inserter(notes));
  }
  return convert_with(common, output, request, noted(pipeline::plan_gguf_export, notes),
                      noted(pipeline::export_gguf, notes));
}

pipeline::ConvertRequest convert_request(const OutputOptions& output, const Conversion& conversion, bool allow_lossy) {
  return {.input = conversion.input,
          .output = output.output,
          .to = conversion.to,
          .allow_lossy = allow_lossy,
          .no_act_order = conversion.no_act_order,
          .activations = conversion.activations,
          .write = write_options(output),
          .overwrite = output.overwrite,
          .sharing = sharing(output)};
}

/// The headers of what a request makes, by the dialect that it is asked for.
auto headers_in_dialects(pipeline::ConvertRequest request) {
  return [request = std::move(request)](const std::string& to) {
    pipeline::ConvertRequest other = request;
    other.to = to;
    return pipeline::planned_headers(other);
  };
}

/// `convert`: export_turboquant or import_turboquant.
template <auto convert>
int turboquant(const CommonOptions& common, const OutputOptions& output, const Conversion& conversion) {
  const pipeline::ConvertRequest request = convert_request(output, conversion, false);
  const auto report = convert(request, output.dry_run);
  print(common, schema_of(report), pipeline::to_text(report, detail(common)), pipeline::to_json(report));
  return 0;
}

int to_dialect(const CommonOptions& common, const OutputOptions& output, const Conversion& conversion) {
  if (pipeline::is_turboquant(conversion.input)) {
    if (conversion.to == "w4q") return turboquant<pipeline::import_turboquant>(common, output, conversion);
    throw Error(ErrorCode::unsupported,
                concat("--to ", printable(conversion.to), ": TurboQuant's codes fit no other dialect"))
        .hint("--to w4q first");
  }
  const pipeline::ConvertRequest request = convert_request(output, conversion, conversion.allow_lossy);
  std::vector<std::string> notes = conversion.notes;
  if (!conversion.serving.empty()) {
    std::ranges::move(notes_of(require_served(conversion.serving, conversion.to, headers_in_dialects(request))),
                      std::back_inserter(notes));
  }
  return convert_with(common, output, request, noted(pipeline::plan_convert, notes),
                      noted(pipeline::convert_model, notes));
}

int decode(const CommonOptions& common, const OutputOptions& output, const Conversion& conversion) {
  const pipeline::DecodeRequest request{.input = conversion.input,
                                        .output = output.output,
                                        .to = conversion.to,
                                        .write = write_options(output),
                                        .overwrite = output.overwrite,
                                        .sharing = sharing(output)};
  return convert_with(common, output, request, pipeline::plan_decode, pipeline::decode_model);
}

using Kind = ConversionRow::Kind;

/// Options that would be ignored without a word.
void refuse_unused(const ConversionRow& row, const OutputOptions& output, const Conversion& conversion) {
  const auto refuse = [&](bool used, const char* option, const char* why) {
    if (used) return;
    throw Error(ErrorCode::bad_argument, concat(option, " means nothing to --to ", row.to))
        .detail(why)
        .hint(concat("leave out ", option));
  };
  const OutputOptions usual;
  const bool to_file = row.kind == Kind::to_gguf, gguf = to_file || row.kind == Kind::from_gguf;
  refuse(!to_file || output.shard_bytes == usual.shard_bytes, "--shard-size", "a GGUF file is one file");
  refuse(!to_file || !output.compress, "--compress", "a GGUF file is written as it is");
  refuse(!gguf || !output.copy_all, "--copy-all", "nothing stands beside a GGUF file");
  refuse(row.kind == Kind::dialect || to_file || conversion.serving.empty(), "--for",
         "it is asked of dialects' folders and GGUF files; verify --for asks any");
  refuse(row.kind == Kind::dialect || !conversion.no_act_order, "--no-act-order", "it is about dialects' groups");
  refuse(row.kind == Kind::dialect || conversion.activations.empty(), "--activation-scales",
         "it belongs to dialects that tell programs how to quantize activations");
  refuse(gguf || conversion.tokenizer, "--no-tokenizer", "the tokenizer's files are copied, not converted");
  refuse(row.kind == Kind::dialect || !conversion.allow_lossy, "--allow-lossy",
         gguf                       ? "gguf-q8_0 and its like round anew by themselves"
         : row.kind == Kind::decode ? "what 16 bits cannot hold is rounded and counted; hf-f32 holds all"
                                    : "it holds rotated schemes only");
}

/// Into a folder of safetensors. A GGUF file, and what TurboQuant has, one process writes, or reads.
bool shares(const ConversionRow& row, const Conversion& conversion) {
  return row.kind != Kind::to_gguf && row.kind != Kind::turboquant && !pipeline::is_turboquant(conversion.input);
}

std::string description_of_dialect(const std::string& name) {
  const auto* row = checkpoint::find_dialect(name);
  return row == nullptr ? "w4q's own planes, canonical layout" : std::string(row->description);
}

}  // namespace

int from_mxfp4(const CommonOptions& common, const OutputOptions& output, const std::string& input,
               const std::string& target, const std::string& layout) {
  const pipeline::Mxfp4Request request{.input = input,
                                       .output = output.output,
                                       .target = target,
                                       .layout = layout,
                                       .write = write_options(output),
                                       .overwrite = output.overwrite,
                                       .sharing = sharing(output)};
  return convert_with(common, output, request, pipeline::plan_mxfp4, pipeline::import_mxfp4);
}

std::vector<ConversionRow> conversion_table() {
  std::vector<ConversionRow> rows;
  for (const auto& name : pipeline::convert_targets()) {
    rows.push_back({name, Kind::dialect, description_of_dialect(name), to_dialect});
  }
  rows.push_back({std::string(pipeline::turboquant_name), Kind::turboquant,
                  "TurboQuant's checkpoint of rotated schemes (from one: --to w4q)",
                  turboquant<pipeline::export_turboquant>});
  for (const auto& name : pipeline::decode_targets()) {
    rows.push_back({name, Kind::decode, "the decoded weights, in 16 or 32 bits", decode});
  }
  for (const auto& target : pipeline::gguf_targets()) {
    rows.push_back({std::string(target.name), Kind::to_gguf, concat("a GGUF file: ", target.description), to_gguf});
  }
  for (const auto& name : pipeline::gguf_import_targets())
    rows.push_back({name, Kind::from_gguf, "a folder", from_gguf});
  return rows;
}

std::string served_target(const OutputOptions& output, const Conversion& conversion) {
  if (names_gguf(conversion.input)) {
    throw Error(ErrorCode::bad_argument, "--for of a GGUF file belongs to --to")
        .hint("--to hf16 decodes it; w4q verify FILE.gguf --for asks the file");
  }
  if (wants_file(conversion.serving)) return "gguf";
  return served_dialect(conversion.serving,
                        headers_in_dialects(convert_request(output, conversion, conversion.allow_lossy)));
}

int convert(const CommonOptions& common, const OutputOptions& output, const Conversion& conversion) {
  const bool gguf = names_gguf(conversion.input);
  std::vector<std::string> names;
  for (const auto& row : conversion_table()) {
    if ((row.kind == Kind::from_gguf) != gguf) continue;
    if (row.to == conversion.to) {
      refuse_unused(row, output, conversion);
      if (!shares(row, conversion)) {
        require_one_process("--to " + row.to);
        refuse_resume(output, "--to " + row.to);
      }
      return row.run(common, output, conversion);
    }
    names.push_back(row.to);
  }
  throw Error(ErrorCode::bad_argument, concat("--to ", printable(conversion.to), ": ",
                                              gguf ? "a GGUF file" : "a checkpoint folder", " cannot become this"))
      .detail(concat("from ", gguf ? "a GGUF file: " : "a folder: ", join(names)));
}

}  // namespace w4q::app
