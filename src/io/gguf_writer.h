// Writes a GGUF file in one pass from front to back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "io/digest.h"
#include "io/gguf.h"
#include "io/output.h"

namespace w4q::io {

/// Plan → append the data of every tensor in plan order, in as many parts as one likes → commit. The same plan and data
/// give the same bytes.
class GgufWriter {
 public:
  /// Throws as layout_gguf and OutputFile do, and bad_file when the disk has no room.
  GgufWriter(const std::filesystem::path& target, std::vector<PlannedGgufTensor> tensors, GgufMetadata metadata,
             bool overwrite, const std::vector<std::filesystem::path>& inputs);

  const GgufHeader& header() const noexcept { return header_; }
  /// Appends a part of the data of `name`, which is the first tensor that is not complete yet.
  void append(std::string_view name, std::span<const std::byte> part);
  /// Of the tensors that are complete.
  const TensorDigests& digests() const noexcept { return digests_; }
  /// Checks that every planned byte was written, syncs, and renames the file into its place.
  void commit();

 private:
  void skip_finished_tensors();

  GgufHeader header_;
  OutputFile file_;
  size_t tensor_ = 0;     ///< the one being written
  uint64_t written_ = 0;  ///< of its bytes
  TensorHasher hasher_;
  TensorDigests digests_;
};

}  // namespace w4q::io
