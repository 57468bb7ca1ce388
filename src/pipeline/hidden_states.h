// The hidden states of all calibration windows between two layers: in memory as far as that goes, in files beyond.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "core/views.h"
#include "io/system.h"

namespace w4q::io {
class Partial;
}

namespace w4q::pipeline {

/// `count` matrices [rows, cols] in fp32, worked on one at a time.
class HiddenStates {
 public:
  /// Keeps as many as fit into `max_bytes` in memory and spills the others into files in a hidden folder beside `beside`,
  /// which goes with this object.
  HiddenStates(int64_t count, int64_t rows, int64_t cols, int64_t max_bytes, std::filesystem::path beside);
  ~HiddenStates();

  /// Matrix `index` to read and change, valid until the next call of get, place or put. What a matrix holds before its first
  /// put is undefined.
  MatrixView<float> get(int64_t index);
  /// The same for a matrix that will be written over as a whole.
  MatrixView<float> place(int64_t index);
  /// Keeps what the view of the last get(index) or place(index) holds now. Throws bad_file when the disk is full.
  void put(int64_t index);
  /// Gives back the memory, or the space on the disk, of a matrix that nobody asks for again.
  void drop(int64_t index);

  int64_t spilled() const noexcept { return count_ - in_memory_; }

 private:
  /// A file that holds a share of every spilled matrix, one behind the other.
  struct Stripe {
    std::filesystem::path path;
    io::FileDescriptor file;
  };

  bool on_disk(int64_t index) const { return index >= in_memory_; }
  /// Where the shares of a matrix begin, in bytes.
  uint64_t offset(int64_t index) const { return static_cast<uint64_t>((index - in_memory_) * share_); }
  /// The bytes of the spilled matrix being worked on that a stripe holds.
  std::span<std::byte> share(int64_t stripe) const;

  int64_t count_, rows_, cols_;
  int64_t in_memory_;
  int64_t share_;  ///< bytes of a matrix in each stripe; the last ones may hold less
  std::vector<std::unique_ptr<float[]>> memory_;
  std::unique_ptr<float[]> window_;  // the spilled matrix being worked on
  std::vector<bool> written_;        // of the spilled ones
  std::unique_ptr<io::Partial> folder_;
  std::vector<Stripe> stripes_;
};

}  // namespace w4q::pipeline
