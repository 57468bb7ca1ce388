// What a checkpoint was when it was written, in a file beside its weights: the digest of every tensor, its config.json,
// the digests of the files that give it its meaning, and those of the models it was made from (docs/checkpoint.md).
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/folder.h"
#include "io/checkpoint.h"
#include "io/digest.h"
#include "io/gguf.h"
#include "io/json.h"

namespace w4q::checkpoint {

/// Its name in a folder. Beside a single FILE it is FILE with a dot and this.
inline constexpr std::string_view digests_file = "w4q_digests.json";
std::filesystem::path digests_path(const std::filesystem::path& checkpoint);

struct Digests {
  io::TensorDigests tensors;                         ///< of all passes
  std::set<std::string, std::less<>> residual = {};  ///< names of those that lie in the folder of residual passes
  io::Json config = {};                              ///< config.json; of a GGUF file its metadata; null: none
  std::map<std::string, io::Digest, std::less<>> files = {};  ///< tokenizer and others, by relative name
  std::vector<io::TensorDigests> bases = {};  ///< models it was made from, the nearest first, as they were read

  /// One digest of the tensors by name and of the config: whatever the shards, their order and their compression.
  io::Digest fingerprint() const;
};

io::Digest fingerprint(const io::TensorDigests& tensors, const io::Json& config = {});

/// As it is now: reads every tensor that was not read yet. A single weight file has no config and no other files.
Digests digests_of(const std::filesystem::path& path, const io::Checkpoint& tensors, const io::Json& config);
Digests digests_of(const io::GgufFile& file);
/// Metadata of a GGUF file as `config`; of what is long its digest.
io::Json digest_metadata(const io::GgufMetadata& metadata);
/// Whatever it is: a folder, a weight file or a GGUF file. Throws what opening it throws.
Digests open_digests(const std::filesystem::path& path);

/// What was written beside the checkpoint `path`; nothing where there is no such file. Throws bad_file for one that is
/// malformed, too large or no file, unsupported for a newer version.
std::optional<Digests> read_digests(const std::filesystem::path& path);
/// The same for what comes of it only: nothing, too, where it cannot be read.
std::vector<io::TensorDigests> bases_of(const std::filesystem::path& path);
/// What an output made of `source` was made from: `source` itself if it is not packed, and what that was made from.
std::vector<io::TensorDigests> bases_through(const Folder& source);
std::string digests_text(const Digests& digests);
void write_digests(const std::filesystem::path& path, const Digests& digests, bool overwrite = false);
/// Writes it into a folder that holds all but this file; `written` are the digests of its tensors.
void record_digests(const std::filesystem::path& folder, io::TensorDigests written,
                    std::vector<io::TensorDigests> bases);

/// Whatever is read of `tensors` from now on must be what was written beside `path`, if that is known.
void check_digests(const std::filesystem::path& path, const io::Checkpoint& tensors);

/// What `found` has that was not written, one line each, with the name first. Residual tensors may be missing all
/// together.
std::vector<std::string> differences(const Digests& written, const Digests& found);
/// The same of a model that something was made from. A tensor under another name is the same tensor.
std::vector<std::string> base_differences(const io::TensorDigests& expected, const io::TensorDigests& found);

}  // namespace w4q::checkpoint
