// Writes the weight files of a checkpoint into a folder, byte-identical to the reference writer.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/digest.h"
#include "io/safetensors.h"

namespace w4q::io {

class Checkpoint;

struct WriteOptions {
  int64_t max_shard_bytes = 5'000'000'000;  ///< of tensor data; a larger tensor gets a shard of its own
  bool compress = false;                    ///< write .safetensors.zst in seekable frames
  int compression_level = 3;
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  bool copy_all = false;     ///< for whoever fills the folder: sub-folders and other weights travel along
  uint64_t other_bytes = 0;  ///< of what comes beside the weights, for which the disk must have room too
};

/// Who makes the weight files that a CheckpointWriter writes to.
enum class ShardFiles {
  create,  ///< it does: there are none yet
  join,    ///< another writer of the same plan has made them
  mend,    ///< a run that was ended has: what is gone of them, or was compressed already, is made anew
  part,    ///< as create, but some of the tensors only come here: the disk need not have room for all
};

/// True for the names of the files below and of compressed ones.
bool is_written_weight_file(std::string_view name) noexcept;

/// plan → write every tensor once, in any order → finish. One file is model.safetensors; several are
/// model-00001-of-0000N.safetensors with model.safetensors.index.json. Tensors are dealt to shards in plan order. Those
/// of the sidecar are a set of such files by themselves, in its folder.
class CheckpointWriter {
 public:
  /// `folder` exists and is ours alone (OutputFolder::staging()). Throws bad_argument for a bad plan, bad_file when
  /// the disk has no room for the planned bytes.
  /// What mended files hold is for holds() to say, tensor by tensor.
  CheckpointWriter(std::filesystem::path folder, std::vector<PlannedTensor> plan, WriteOptions options,
                   ShardFiles files = ShardFiles::create);
  ~CheckpointWriter();

  /// Writes one tensor. `bytes` has the planned size. Thread-safe for different names. Throws bad_file (disk full…).
  void write(std::string_view name, std::span<const std::byte> bytes);
  /// Writes a part of a tensor at `offset` bytes from its start, so that a large one need not be whole in memory.
  void write_part(std::string_view name, int64_t offset, std::span<const std::byte> bytes);

  /// Writes the tensor of this name of `from` as it is stored there, a piece at a time; each goes to `see`, too.
  void copy(const Checkpoint& from, std::string_view name,
            const std::function<void(int64_t offset, std::span<const std::byte> bytes)>& see = {});

  /// Other bytes of the same size for a tensor that is written.
  void replace(std::string_view name, std::span<const std::byte> bytes);
  /// What is written so far, before finish(): what is not holds zeros. It sees what replace() changes.
  Checkpoint written();

  /// Of a tensor all of which is written.
  TensorDigest digest(std::string_view name) const;
  /// Whether the files hold this tensor, which another writer wrote.
  bool holds(std::string_view name, const TensorDigest& digest) const;
  /// What the files hold of a tensor, in pieces from the first to the last.
  void read(std::string_view name, const std::function<void(std::span<const std::byte> piece)>& see) const;
  /// Counts a tensor as written, which another writer did.
  void adopt(std::string_view name, const TensorDigest& digest);
  /// Brings to the disk what this writer wrote, in place of finish(), where another one finishes.
  void sync();

  /// Checks that every planned byte was written, writes the index, compresses, and syncs the files to disk.
  void finish();

  /// Of every tensor of the finished files, as they were written.
  TensorDigests digests() const;
  /// Sizes of the finished files.
  int64_t file_bytes() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::io
