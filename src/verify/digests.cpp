#include "checkpoint/digests.h"

#include <algorithm>
#include <iterator>

#include "core/error.h"
#include "core/text.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

namespace fs = std::filesystem;

Check check_candidate(const CheckOptions& options, const checkpoint::Digests& written,
                      const checkpoint::Digests& found) {
  Check check{"digests", true, {}, checkpoint::differences(written, found)};
  check.passed = check.faults.empty();
  check.detail = check.passed ? concat(found.tensors.size(), " tensors, config.json and ", found.files.size(),
                                       " other files are what was written; fingerprint ", found.fingerprint().text())
                              : concat(check.faults.size(),
                                       " differences from what was written: restore the files or make them again, or "
                                       "accept them: w4q hash ",
                                       printable(options.model.native()), " --write --overwrite");
  return check;
}

/// Whether digests are about these files, as far as their headers tell.
bool agree(const io::TensorDigests& digests, const io::Checkpoint& files) {
  return std::ranges::equal(digests, files.tensors(), [](const auto& digest, const auto& tensor) {
    return digest.first == tensor.first && digest.second.type == dtype_name(tensor.second.dtype) &&
           digest.second.shape == tensor.second.shape;
  });
}

/// Those that were written beside it or, where there are none, of what is read.
io::TensorDigests digests_of_base(const fs::path& base) {
  const auto files = io::Checkpoint::open(base);
  try {
    const auto written = checkpoint::read_digests(base);
    if (written && agree(written->tensors, files)) return written->tensors;
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): then its tensors say
  }
  return files.digests();
}

Check check_base(const std::vector<io::TensorDigests>& bases, const io::TensorDigests& found) {
  Check check{"base", true, concat("is what it was made from, by ", found.size(), " digests"), {}};
  std::vector<std::vector<std::string>> faults;
  for (const auto& base : bases) faults.push_back(checkpoint::base_differences(base, found));
  check.faults = std::move(*std::ranges::min_element(faults, {}, &std::vector<std::string>::size));
  check.passed = check.faults.empty();
  if (!check.passed) {
    check.detail = concat("is not what it was made from: ", check.faults.size(),
                          " tensors differ; give --base the model that was quantized");
  }
  return check;
}

void run_digests(CheckContext& context, Findings& findings) {
  const CheckOptions& options = context.options();
  checkpoint::require_folder(options.model);
  std::optional<checkpoint::Digests> written;
  try {
    written = checkpoint::read_digests(options.model);
  } catch (const Error& error) {
    return findings.checks.add(
        {"digests", false, "what was written beside the weights cannot be read", {error.what()}});
  }
  if (!written) return;
  const checkpoint::Folder& folder = context.headers();
  const auto found = checkpoint::digests_of(options.model, folder.tensors, folder.config);
  findings.json["fingerprint"] = found.fingerprint().text();
  findings.checks.add(check_candidate(options, *written, found));
  if (!options.has_base() || written->bases.empty()) return;
  findings.checks.add(check_base(written->bases, digests_of_base(options.base)));
}

}  // namespace

CheckRow digests_check() {
  return {.name = "digests",
          .help =
              "tensors, config.json and tokenizer are those that were written, and the base is the one they were "
              "made from",
          .aside = true,
          .run = run_digests};
}

}  // namespace w4q::verify
