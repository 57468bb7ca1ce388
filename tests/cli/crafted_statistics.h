// Calibration statistics whose sums come out the same on every machine. What text gives does not: the products of
// matrices are those of oneDNN or Eigen, whose order of adding depends on the instruction set (docs/numbers.md, E2).
#pragma once

#include <filesystem>

namespace w4q::test {

/// Gram matrices in which every value is zero or a power of two, so that products with them are exact, and a sum has so
/// few terms that it is rounded once, whatever adds them in whatever order.
enum class Correlation {
  pairs,  ///< channel c goes with channel c + k/2, which stands in another block: sums of at most two terms
  none,   ///< channels of a block of 128 are as loud as each other, so that rotating a block changes nothing
};

/// Writes statistics of `model`, of version 1 with sensitivities. Names, widths and the model's digest are those that
/// `w4q calibrate` writes.
void write_crafted_statistics(const std::filesystem::path& model, Correlation correlation,
                              const std::filesystem::path& file);

}  // namespace w4q::test
