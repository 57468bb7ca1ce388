// The hidden states of all calibration windows between two layers: in memory as far as that goes, in compressed files
// beyond.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "core/views.h"

namespace w4q::io {
class Partial;
}

namespace w4q::pipeline {

/// `count` matrices [rows, cols] in fp32, worked on one at a time.
class HiddenStates {
 public:
  /// Keeps as many as fit into `max_bytes` in memory and spills the others into zstd files in a hidden folder beside
  /// `beside`, which goes with this object.
  HiddenStates(int64_t count, int64_t rows, int64_t cols, int64_t max_bytes, std::filesystem::path beside);
  ~HiddenStates();

  /// Matrix `index` to read and change, valid until the next call of get, place or put. What a matrix holds before its first
  /// put is undefined.
  MatrixView<float> get(int64_t index);
  /// The same for a matrix that will be written over as a whole.
  MatrixView<float> place(int64_t index);
  /// Keeps what the view of the last get(index) or place(index) holds now. Throws bad_file when the disk is full.
  void put(int64_t index);
  /// Gives back the memory of a matrix that nobody asks for again.
  void drop(int64_t index);

  int64_t spilled() const noexcept { return count_ - in_memory_; }

 private:
  std::filesystem::path file(int64_t index) const;

  int64_t count_, rows_, cols_;
  int64_t in_memory_;
  std::vector<std::unique_ptr<float[]>> memory_;
  std::unique_ptr<float[]> window_;  // the spilled matrix being worked on
  std::unique_ptr<io::Partial> folder_;
};

}  // namespace w4q::pipeline
