// w4q inspect OUT [--tensor NAME] [--layout NAME] [--digests]
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>

#include "checkpoint/dialect/dialect.h"
#include "checkpoint/digests.h"
#include "checkpoint/folder.h"
#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "gguf_commands.h"
#include "layout_drawing.h"
#include "packed_summary.h"
#include "pipeline/turboquant.h"
#include "repack/layout_registry.h"

namespace w4q::app {
namespace {

struct InspectOptions {
  CommonOptions common;
  std::string path;
  std::string tensor;
  std::string layout;
  bool digests = false;
};

/// A single file has no config, and that of TurboQuant's checkpoints does not speak of their tensors.
checkpoint::Folder open_source(const std::filesystem::path& path) {
  const bool folder = std::filesystem::exists(path / "config.json") && !pipeline::is_turboquant(path);
  return folder ? checkpoint::open_folder(path)
                : checkpoint::Folder{.path = path, .tensors = io::Checkpoint::open(path)};
}

std::string pass_text(const checkpoint::PackedLinearInfo& info, size_t pass) {
  const std::string where = info.dialect == nullptr ? info.passes[pass].layout : std::string(info.dialect->name);
  const auto& [scheme, layout, rotation] = info.passes[pass];
  std::string text = formats::to_string(scheme) + " in " + where;
  if (!rotation.identity()) text += ", input " + to_string(rotation);
  return text;
}

/// Of every tensor as it is read now; empty where that is not asked for.
io::TensorDigests digests_of(const InspectOptions& options, const checkpoint::Folder& source) {
  return options.digests ? source.tensors.digests() : io::TensorDigests{};
}

/// As it is now or, where that is not asked for, as it was written; empty where nobody wrote it down.
std::string fingerprint_of(const InspectOptions& options, const checkpoint::Folder& source,
                           const io::TensorDigests& digests) {
  if (options.digests) return checkpoint::fingerprint(digests, source.config).text();
  const auto written = checkpoint::read_digests(source.path);
  return written ? written->fingerprint().text() : "";
}

/// The pass whose plane has this name; tensors that belong to all of them go with the first.
size_t pass_of(const checkpoint::PackedLinearInfo& info, std::string_view name) {
  for (size_t pass = 1; pass < info.passes.size(); ++pass) {
    if (name.starts_with(concat(info.name, ".", pass, "."))) return pass;
  }
  return 0;
}

std::string digest_of(const checkpoint::Folder& source, const std::string& name) {
  return io::hash_tensor(source.tensors.load(name).view()).digest.text();
}

double bits_per_weight(const checkpoint::PackedLinearInfo& info) {
  return 8.0 * static_cast<double>(checkpoint::stored_bytes(info)) /
         (static_cast<double>(info.n) * static_cast<double>(info.k));
}

// ---- the whole checkpoint -------------------------------------------------------------------------------------------

int show_checkpoint(const InspectOptions& options, const checkpoint::Folder& source) {
  const io::TensorDigests digests = digests_of(options, source);
  const std::string fingerprint = fingerprint_of(options, source, digests);
  std::vector<std::string> header{"tensor", "type", "shape", "bytes", "belongs to"};
  if (options.digests) header.emplace_back("digest");
  TextTable table(header);
  io::Json tensors = io::Json::array();
  std::map<std::string, std::string> owner;
  double packed_bits = 0;
  double packed_weights = 0;
  for (const auto& [name, info] : source.quantization.linears) {
    for (const auto& plane : checkpoint::planned_planes(info)) {
      owner[plane.name] = pass_text(info, pass_of(info, plane.name));
    }
    packed_bits += 8.0 * static_cast<double>(checkpoint::stored_bytes(info));
    packed_weights += static_cast<double>(info.n) * static_cast<double>(info.k);
  }
  for (const auto& [name, info] : source.tensors.tensors()) {
    const auto found = owner.find(name);
    const std::string belongs = found == owner.end() ? "" : found->second;
    std::vector<std::string> row{printable(name), std::string(dtype_name(info.dtype)), shape_text(info.shape),
                                 concat(info.size()), belongs};
    if (options.digests) row.push_back(digests.at(name).digest.text());
    table.row(std::move(row));
    tensors.push_back({{"name", name},
                       {"dtype", dtype_name(info.dtype)},
                       {"shape", info.shape},
                       {"bytes", info.size()},
                       {"file", source.tensors.file_of(name)},
                       {"belongs_to", belongs}});
    if (options.digests) tensors.back()["digest"] = digests.at(name).digest.text();
  }
  const double bits = packed_weights == 0 ? 0 : packed_bits / packed_weights;
  std::string text = table.str();
  text += concat("\n", tensors.size(), " tensors, ", human_bytes(source.tensors.total_bytes()), " in files of ",
                 human_bytes(source.tensors.file_bytes()), "\n");
  if (packed_weights > 0) {
    text += concat(source.quantization.linears.size(), " packed weights at ", fixed(bits, 3), " bits per weight\n");
  }
  if (!fingerprint.empty()) {
    text += concat("fingerprint ", fingerprint, options.digests ? "" : ", as it was written", "\n");
  }
  std::vector<std::string> notes = source.quantization.notes;
  notes.insert(notes.end(), source.tensors.warnings().begin(), source.tensors.warnings().end());
  for (const auto& note : notes) text += "note: " + note + "\n";
  print(options.common, schema::inspect, text,
        {{"tensors", std::move(tensors)},
         {"metadata", source.tensors.metadata()},
         {"tensor_bytes", source.tensors.total_bytes()},
         {"file_bytes", source.tensors.file_bytes()},
         {"fingerprint", fingerprint.empty() ? io::Json() : io::Json(fingerprint)},
         {"packed_weights", source.quantization.linears.size()},
         {"packed_bits_per_weight", bits},
         {"warnings", notes}});
  return 0;
}

// ---- one packed weight ----------------------------------------------------------------------------------------------

int show_packed(const InspectOptions& options, const checkpoint::Folder& source,
                const checkpoint::PackedLinearInfo& info) {
  TextTable planes({"plane", "type", "shape", "bytes", "digest"});
  io::Json json = {{"name", info.name}, {"n", info.n}, {"k", info.k}, {"bits_per_weight", bits_per_weight(info)}};
  for (const auto& plane : checkpoint::planned_planes(info)) {
    const std::string digest = digest_of(source, plane.name);
    planes.row(
        {plane.name, std::string(dtype_name(plane.dtype)), shape_text(plane.shape), concat(plane.size()), digest});
    json["planes"].push_back(
        {{"name", plane.name}, {"dtype", dtype_name(plane.dtype)}, {"shape", plane.shape}, {"digest", digest}});
  }
  std::string text =
      concat(printable(info.name), ": ", info.n, " outputs × ", info.k, " inputs, ", fixed(bits_per_weight(info), 3),
             " bits per weight, was ", dtype_name(info.source_dtype), "\n", planes.str());
  const auto linear = checkpoint::load_canonical(source.tensors, info);
  for (size_t pass = 0; pass < linear.passes.size(); ++pass) {
    const auto shown = summarize(linear.passes[pass]);
    text += concat("\npass ", pass, ": ", pass_text(info, pass), "\n", shown.text);
    json["passes"].push_back(shown.json);
    json["passes"].back()["layout"] = info.passes[pass].layout;
  }
  const std::string layout = options.layout.empty() ? info.passes.front().layout : options.layout;
  const auto drawing = draw_layout(repack::layout_row(layout), info.passes.front().scheme, info.n, info.k);
  if (!options.layout.empty()) text += "\n" + drawing.text;
  json["layout_drawing"] = drawing.json;
  print(options.common, schema::inspect_packed, text, json);
  return 0;
}

int show_plain(const InspectOptions& options, const checkpoint::Folder& source) {
  const auto& info = source.tensors.at(options.tensor);
  const std::string digest = digest_of(source, info.name);
  print(options.common, schema::inspect_tensor,
        concat(printable(info.name), ": ", dtype_name(info.dtype), " ", shape_text(info.shape), ", ", info.size(),
               " bytes at ", info.begin, " of the data in ", source.tensors.file_of(info.name), "\ndigest ", digest,
               "\n"),
        {{"name", info.name},
         {"dtype", dtype_name(info.dtype)},
         {"shape", info.shape},
         {"bytes", info.size()},
         {"file", source.tensors.file_of(info.name)},
         {"digest", digest}});
  return 0;
}

/// A packed linear by its own name, its weight's name, or the name of one of its planes.
const checkpoint::PackedLinearInfo* find_packed(const checkpoint::Folder& source, const std::string& name) {
  for (const auto& [linear, info] : source.quantization.linears) {
    if (name == linear || name == linear + ".weight") return &info;
    for (const auto& plane : checkpoint::planned_planes(info)) {
      if (plane.name == name) return &info;
    }
  }
  return nullptr;
}

int run(const InspectOptions& options) {
  apply(options.common);
  if (names_gguf(options.path)) {
    if (!options.layout.empty()) throw Error(ErrorCode::bad_argument, "--layout: GGUF files have no layouts of w4q");
    if (options.digests) {
      throw Error(ErrorCode::bad_argument, "--digests is about safetensors").hint("w4q hash FILE.gguf --json");
    }
    return inspect_gguf(options.common, options.path, options.tensor);
  }
  const auto source = open_source(options.path);
  if (!options.tensor.empty()) {
    const auto* info = find_packed(source, options.tensor);
    if (info != nullptr) return show_packed(options, source, *info);
    source.tensors.at(options.tensor);  // or there is no such tensor
    if (options.layout.empty()) return show_plain(options, source);
    throw Error(ErrorCode::bad_argument, "--layout: " + printable(options.tensor) + " is not packed")
        .hint("w4q inspect FOLDER lists what is");
  }
  if (options.layout.empty()) return show_checkpoint(options, source);
  if (source.quantization.linears.empty()) {
    throw Error(ErrorCode::bad_argument, options.path + ": no packed weight to draw").hint("w4q quantize makes one");
  }
  return show_packed(options, source, source.quantization.linears.begin()->second);
}

}  // namespace

void setup_inspect(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("inspect", "Show what a checkpoint holds and where a layout puts the bits");
  auto options = std::make_shared<InspectOptions>();
  command->add_option("path", options->path, "Folder of a checkpoint, or one .safetensors or .gguf file")->required();
  command->add_option("--tensor", options->tensor, "One tensor, packed weight or plane");
  command->add_option("--layout", options->layout, "Draw where this layout puts the weights");
  command->add_flag("--digests", options->digests, "Read all tensors, and show their digests");
  add_common(*command, options->common);
  set_examples(*command, {{"inspect OUT", "every tensor, its size, and to which packed weight it belongs"},
                          {"inspect OUT --tensor model.layers.0.mlp.up_proj --layout kbit-fragment",
                           "one weight: planes, scales, codes, and where a layout puts them"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
