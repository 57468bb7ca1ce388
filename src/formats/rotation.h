// The randomized Hadamard rotation R of a linear layer's input: y = Σ_p W_p · R_p(x ⊘ s) + b (docs/rotated.md).
//
// The k inputs are cut into blocks of d, a power of two; R negates some of a block's inputs, as a seed decides, and
// multiplies it by the Walsh–Hadamard matrix H_d / √d in its natural order. R is orthogonal: R⁻¹ = Rᵀ applies H_d / √d
// and then the signs. What remains behind the last whole block is cut into descending powers of two, each a block of
// its own; a single last input stays as it is.
//
// Signs of the block that starts at input g: MT19937 seeded with the low 32 bits of seed + g, one draw for each input,
// an odd draw for plus and an even one for minus. A rotation without a seed has no signs: all are plus.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/scheme.h"

namespace w4q::formats {

/// Which rotation; prints and parses as "hadamard128-s42", "hadamard-row-s42", without signs
/// "hadamard128-plus", or "none".
struct Rotation {
  int64_t block = 1;                 ///< d: a power of two up to 2^20, whole_row, or 1: no rotation
  std::optional<uint64_t> seed = 0;  ///< of the signs; nothing: all are plus

  bool identity() const noexcept { return block == 1; }
  bool operator==(const Rotation&) const = default;
};

inline constexpr int64_t max_rotation_block = int64_t{1} << 20;

std::string to_string(const Rotation& rotation);
/// The inverse. Throws unsupported for anything else.
Rotation parse_rotation(std::string_view text);

/// The width of the block that starts at input `start` of k.
int64_t rotation_width(int64_t block, int64_t k, int64_t start) noexcept;

/// values ← H · values, without a factor. The size is a power of two. Sums are fp32, butterflies at distances 1, 2, 4 …
/// in this order: the same bits wherever it is done so.
void hadamard(std::span<float> values) noexcept;

/// A rotation made ready for rows of k inputs.
class InputRotation {
 public:
  /// Throws unsupported for a block that is no power of two or too large.
  InputRotation(const Rotation& rotation, int64_t k);

  const Rotation& rotation() const noexcept { return rotation_; }
  int64_t k() const noexcept { return static_cast<int64_t>(factors_.size()); }
  /// Per input ±1/√width of its block: what the input is multiplied by before the butterflies of rotate(), and after
  /// those of restore().
  std::span<const float> factors() const noexcept { return factors_; }

  /// row ← R · row, k values.
  void rotate(std::span<float> row) const noexcept;
  /// row ← Rᵀ · row: undoes rotate().
  void restore(std::span<float> row) const noexcept;

 private:
  void butterflies(std::span<float> row) const noexcept;

  Rotation rotation_;
  std::vector<float> factors_;
};

}  // namespace w4q::formats
