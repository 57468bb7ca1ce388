// What the values of one integer weight say about the conventions it was written by.
#pragma once

#include <string>
#include <vector>

#include "core/views.h"
#include "formats/packed.h"
#include "verify/conventions/sample.h"

namespace w4q::verify {

/// How a dialect's words can be misread.
struct WordHabits {
  bool along_outputs = false;  ///< eight outputs share a word (AWQ); otherwise eight inputs
  bool even_first = false;     ///< the fields of a word stand in AWQ's order
  bool may_spill = false;      ///< the usual packer does not clamp: a 16 lands in the next field
};

/// Faults of a canonical weight that passed validation, by its values alone: zero points off by one, codes or scales in
/// another order, a spilled 16. One line each, without the tensor's name.
std::vector<std::string> value_faults(const formats::PackedWeight& canonical, const WeightSample& sample,
                                      const WordHabits& habits);

/// The same by comparison with the 16-bit weight. Inputs may have been scaled: every column is fitted first.
std::vector<std::string> base_faults(const formats::PackedWeight& canonical, const WeightSample& sample,
                                     const WordHabits& habits, const TensorView& base);

/// Columns of a weight against those of others with the same input: another order of the fields that fits far better
/// than the plain one, or empty.
std::string profile_fault(std::span<const double> energy, std::span<const double> siblings, int bits);

}  // namespace w4q::verify
