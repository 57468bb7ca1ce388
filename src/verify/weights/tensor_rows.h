// Rows and values of matrices, whatever holds them: what stands twice, ends in nothing, or has values as no other of its
// role. Every rule is about bytes, and looks at a part of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "verify/report.h"

namespace w4q::verify {

/// What a part of a tensor says. Of matrices [n, k], and stacks [.., n, k] as matrices of all their rows, lines are rows as
/// they are stored.
struct TensorLines {
  const io::TensorInfo* info = nullptr;
  std::string role;   ///< the name without numbers
  int64_t lines = 0;  ///< 0: it is no matrix
  size_t line_bytes = 0;
  std::vector<uint64_t> keys;             ///< of each line, by some of its words; 0: these are all zero
  int64_t head = 0, tail = 0;             ///< lines of zeros at the beginning and the end, where no other is one
  int64_t repeated = 0, first_again = 0;  ///< lines that are one before them, the first of these, and the one it is
  int64_t again_of = 0;
  int64_t at_one_distance = 0;        ///< of those that are one before them: as many lines behind it, the most alike
  bool halves_repeat = false;         ///< the second half of every line is the first one
  bool second_half_is_first = false;  ///< of the lines
  size_t zero_columns = 0;            ///< bytes that are zero at the end of every line that has others
  double negative = 0.5;              ///< share of those values that are not zero; of floats and signed codes
  double at_end = 0;                  ///< share of those that are as large as the largest
  size_t kinds = 0;                   ///< different values, up to many_kinds; of floats
  double spread = 0, swapped = 0;  ///< of log2 of magnitudes: as stored, and with the bytes of each in the other order
  int stuck_lane = -1, stuck_bit = -1;            ///< of 16 bits: a bit that one in 64 values always has, or never
  size_t addresses_begin = 0, addresses_end = 0;  ///< bytes that are a program's addresses
  size_t lost_begin = 0, lost_end = 0;            ///< bytes of the only stretch of zeros
};

/// More different values than codes of four bits with one scale have.
inline constexpr size_t many_kinds = 64;

TensorLines tensor_lines(const io::Checkpoint& tensors, const io::TensorInfo& info);

Check check_rows(const checkpoint::Folder& headers);

}  // namespace w4q::verify
