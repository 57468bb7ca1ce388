// w4q hash FOLDER [--write | --check]
#include <memory>

#include "checkpoint/digests.h"
#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "io/lost_pages.h"

namespace w4q::app {
namespace {

struct HashOptions {
  CommonOptions common;
  std::string path;
  bool write = false, check = false, overwrite = false;
};

io::Json to_json(const checkpoint::Digests& found) {
  nlohmann::json tensors = nlohmann::json::object();
  for (const auto& [name, tensor] : found.tensors) {
    tensors[name] = {{"type", tensor.type}, {"shape", tensor.shape}, {"digest", tensor.digest.text()}};
  }
  io::Json files = io::Json::object();
  for (const auto& [name, digest] : found.files) files[name] = digest.text();
  return {{"fingerprint", found.fingerprint().text()},
          {"tensors_fingerprint", checkpoint::fingerprint(found.tensors).text()},
          {"tensors", tensors},
          {"files", files}};
}

std::string to_text(const checkpoint::Digests& found) {
  return concat("fingerprint ", found.fingerprint().text(), "\n  of ", found.tensors.size(),
                " tensors: ", checkpoint::fingerprint(found.tensors).text(),
                found.config.is_null() ? "" : ", and their config", "\n");
}

int check(const HashOptions& options, const checkpoint::Digests& found) {
  const auto written = checkpoint::read_digests(options.path);
  if (!written) {
    throw Error(ErrorCode::bad_argument,
                concat(printable(checkpoint::digests_path(options.path).native()), ": is not there to compare with"))
        .hint("w4q hash --write makes it");
  }
  const auto faults = checkpoint::differences(*written, found);
  std::string text = to_text(found);
  for (const auto& fault : faults) text += fault + "\n";
  text += faults.empty() ? "as it was written\n" : concat(faults.size(), " differences from what was written\n");
  io::Json json = to_json(found);
  json["written_fingerprint"] = written->fingerprint().text();
  json["differences"] = faults;
  print(options.common, schema::hash, text, json);
  return faults.empty() ? 0 : describe(ErrorCode::verification_failed).exit_status;
}

/// What stands there already is replaced where nothing has changed since, and where that is asked for.
void write(const HashOptions& options, checkpoint::Digests& found) {
  std::optional<checkpoint::Digests> written;
  try {
    written = checkpoint::read_digests(options.path);
  } catch (const Error&) {
    if (!options.overwrite) throw;
  }
  if (written) found.bases = written->bases;
  const auto faults = written ? checkpoint::differences(*written, found) : std::vector<std::string>{};
  if (!faults.empty() && !options.overwrite) {
    throw Error(ErrorCode::bad_argument, concat(printable(options.path), ": is not what was written"))
        .detail(concat(faults.front(), faults.size() > 1 ? concat("; and ", faults.size() - 1, " more") : ""))
        .hint("--overwrite accepts it as it is now; --check names all that differs");
  }
  checkpoint::write_digests(options.path, found, true);
}

int run(const HashOptions& options) {
  apply(options.common);
  checkpoint::Digests found = checkpoint::open_digests(options.path);
  if (const auto changed = io::changed_input()) throw *changed;
  if (options.check) return check(options, found);
  if (options.write) write(options, found);
  print(options.common, schema::hash, to_text(found), to_json(found));
  return 0;
}

}  // namespace

void setup_hash(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("hash", "One fingerprint of a checkpoint, whatever its shards and compression");
  auto options = std::make_shared<HashOptions>();
  command->add_option("path", options->path, "Folder of a checkpoint, or one .safetensors or .gguf file")->required();
  auto* check = command->add_flag("--check", options->check, "Compare with the digests beside it; name what differs");
  auto* write = command->add_flag("--write", options->write, "Put the digests beside it, for verify and --check");
  command->add_flag("--overwrite", options->overwrite, "With --write: also where it is not what was written before")
      ->needs(write);
  write->excludes(check);
  add_common(*command, options->common);
  set_examples(*command, {{"hash OUT", "one fingerprint, whatever the shards and their compression"},
                          {"hash OUT --check", "names every tensor that is not what was written; exit status 1"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
