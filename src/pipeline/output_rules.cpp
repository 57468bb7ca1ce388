#include "pipeline/output_rules.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/dialect/dialect.h"
#include "core/error.h"
#include "core/text.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "io/files.h"
#include "io/output.h"
#include "io/system.h"
#include "pipeline/turboquant_config.h"

namespace w4q::pipeline {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view quantization_key = "quantization_config";

bool is_marked(const io::Json& json) { return json.is_object() && json.value(conversion_mark, io::Json()) == "w4q"; }

/// By its config.json, something that w4q wrote.
bool has_config_of_w4q(const fs::path& folder) {
  try {
    const io::Json config = io::read_json(folder / "config.json");
    if (is_marked(config)) return true;
    if (config.is_object() && config.contains("quantization_config") && is_marked(config["quantization_config"])) {
      return true;
    }
    return !checkpoint::parse_quantization_config(config, "config.json").linears.empty();
  } catch (const Error&) {
    return false;
  }
}

/// Configs that w4q writes or derives, and what the import of a GGUF file makes of its metadata.
constexpr std::string_view own_files[] = {
    "config.json",    "generation_config.json", turboquant_config_file, checkpoint::digests_file,
    "tokenizer.json", "tokenizer_config.json",  turboquant_kept_file};

bool is_written(const fs::path& relative) {
  const std::string name = relative.filename().native();
  const bool on_top = !relative.has_parent_path();
  if ((on_top || relative.parent_path() == io::sidecar_folder) && io::is_written_weight_file(name)) return true;
  return on_top &&
         (std::ranges::count(own_files, name) > 0 || std::ranges::count(checkpoint::side_config_files, name) > 0);
}

/// Relative names, sorted, of what lies in `folder` and did not come there by w4q; w4q makes no links, and folders only
/// to hold files.
std::vector<std::string> foreign_files(const fs::path& folder, const std::vector<std::string>& companions) {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const auto type = entry.symlink_status().type();
    if (type == fs::file_type::directory) continue;
    const fs::path relative = entry.path().lexically_relative(folder);
    const bool ours = is_written(relative) || std::ranges::binary_search(companions, relative.native());
    if (type != fs::file_type::regular || !ours) names.push_back(relative.native());
  }
  std::ranges::sort(names);
  return names;
}

Error foreign_error(const fs::path& folder, std::vector<std::string> names) {
  constexpr size_t listed = 5;
  const size_t more = names.size() - std::min(names.size(), listed);
  names.resize(names.size() - more);
  for (auto& name : names) name = io::shown(name);
  return Error(ErrorCode::bad_argument,
               concat(io::shown(folder), ": holds files that w4q would not write again, so it is not replaced"))
      .detail(concat(join(names), more > 0 ? concat(" and ", more, " more") : ""))
      .hint("move them elsewhere, or choose another name");
}

/// What a user did to an output of w4q is the user's. Outputs of versions without digests are taken as they are.
void refuse_changed(const fs::path& folder) {
  std::vector<std::string> faults;
  try {
    const auto written = checkpoint::read_digests(folder);
    if (!written) return;
    faults = checkpoint::differences(*written, checkpoint::open_digests(folder));
  } catch (const Error& error) {
    faults.push_back(error.summary());
  }
  if (faults.empty()) return;
  throw Error(ErrorCode::bad_argument,
              concat(io::shown(folder), ": was changed since w4q wrote it, so it is not replaced"))
      .detail(concat(faults.front(), faults.size() > 1 ? concat("; and ", faults.size() - 1, " more") : ""))
      .hint("choose another name, or remove the folder yourself; w4q hash --check names all that differs");
}

bool may_be_replaced(const fs::path& folder, const fs::path& input) {
  if (fs::is_empty(folder)) return true;
  if (!has_config_of_w4q(folder)) return false;
  std::vector<std::string> companions;
  if (io::is_folder(input)) companions = io::list_companions(input, {}, true).names;
  std::ranges::sort(companions);
  auto foreign = foreign_files(folder, companions);
  if (!foreign.empty()) throw foreign_error(folder, std::move(foreign));
  return true;
}

/// Of every file below `folder` name, size and time: as long as they are the same its bytes are not read again.
std::string file_states(const fs::path& folder) {
  std::vector<std::string> states;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    states.push_back(
        concat(entry.path().native(), " ", entry.file_size(), " ", entry.last_write_time().time_since_epoch().count()));
  }
  std::ranges::sort(states);
  return join(states, "\n");
}

/// What is written anew.
std::vector<std::string> left_behind() {
  std::vector<std::string> names{"config.json", std::string(checkpoint::digests_file)};
  names.insert(names.end(), std::begin(checkpoint::side_config_files), std::end(checkpoint::side_config_files));
  return names;
}

}  // namespace

std::function<bool(const fs::path&)> former_outputs(const fs::path& input) {
  return [input, seen = std::make_shared<std::string>()](const fs::path& folder) {
    try {
      if (!may_be_replaced(folder, input)) return false;
      std::string states = file_states(folder);
      if (states != *seen) refuse_changed(folder);
      *seen = std::move(states);
      return true;
    } catch (const fs::filesystem_error& error) {
      throw io::system_error(error.path1(), "cannot list", error.code().value());
    }
  };
}

io::WriteOptions with_companions(io::WriteOptions write, const fs::path& from) {
  write.other_bytes = io::list_companions(from, left_behind(), write.copy_all).bytes;
  return write;
}

std::vector<std::string> carry_companions(const fs::path& from, const fs::path& to, const io::Json& config,
                                          const io::WriteOptions& write) {
  auto companions = io::copy_companions(from, to, left_behind(), write.copy_all);
  io::write_file(to / "config.json", config.dump(2) + "\n", false);
  return std::move(companions.left_out);
}

std::vector<std::string> carry_companions(const fs::path& from, const fs::path& to, io::Json config,
                                          const checkpoint::QuantizationConfig& quantization,
                                          const io::WriteOptions& write) {
  const std::string key(quantization_key), mark(products_mark);
  const io::Json before = config.is_object() ? config.value(key, io::Json()) : io::Json();
  checkpoint::write_quantization_config(quantization, config);
  if (before.is_object() && before.contains(mark)) config[key][mark] = before[mark];
  return carry_companions(from, to, config, write);
}

}  // namespace w4q::pipeline
