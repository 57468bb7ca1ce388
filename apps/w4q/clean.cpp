// w4q clean FOLDER
#include <memory>

#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "io/partial.h"
#include "io/system.h"

namespace w4q::app {
namespace {

struct CleanOptions {
  CommonOptions common;
  std::string folder;
  bool dry_run = false;
};

int run(const CleanOptions& options) {
  apply(options.common);
  if (!io::is_folder(options.folder)) {
    throw Error(ErrorCode::bad_file, printable(options.folder) + ": is no folder")
        .hint("give the folder that outputs were written into");
  }
  io::Json leftovers = io::Json::array();
  std::string text;
  int64_t removed = 0, living = 0, kept = 0, bytes = 0;
  for (const auto& found : io::find_partials(options.folder)) {
    const bool goes = !found.living && (options.dry_run || io::remove_partial(found.path));
    const char* state = found.living ? "in use" : !goes ? "cannot be removed" : options.dry_run ? "left" : "removed";
    text += concat(state, "  ", io::shown(found.path), "  ", human_bytes(static_cast<int64_t>(found.bytes)), "\n");
    leftovers.push_back({{"path", found.path.native()}, {"bytes", found.bytes}, {"state", state}});
    (found.living ? living : goes ? removed : kept) += 1;
    if (goes) bytes += static_cast<int64_t>(found.bytes);
  }
  text += concat(removed, options.dry_run ? " leftovers of killed runs, " : " leftovers of killed runs removed, ",
                 human_bytes(bytes), living > 0 ? concat("; ", living, " belong to runs that are alive") : "", "\n");
  print(options.common, schema::clean, text,
        {{"leftovers", std::move(leftovers)},
         {"dry_run", options.dry_run},
         {"removed", options.dry_run ? 0 : removed},
         {"bytes", bytes}});
  return kept == 0 ? 0 : describe(ErrorCode::bad_file).exit_status;
}

}  // namespace

void setup_clean(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("clean", "Remove what killed runs of w4q left in a folder");
  auto options = std::make_shared<CleanOptions>();
  command->add_option("folder", options->folder, "Folder that outputs were written into")->required();
  command->add_flag("--dry-run", options->dry_run, "Name what would be removed and remove nothing");
  add_common(*command, options->common);
  set_examples(*command, {{"clean FOLDER --dry-run", "what killed runs left there; without --dry-run it goes"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
