// What a packed weight must reach on the base's weight it was made of: the error of rounding these very weights to
// nearest, by the scheme's own definition, with room for searches, clips and fed back errors (docs/verify.md).
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "checkpoint/folder.h"
#include "formats/packed.h"
#include "kernels/linear/linear.h"
#include "model/weight_error.h"
#include "verify/weights/factors.h"
#include "verify/weights/gains.h"

namespace w4q::verify {

/// Noise over that of rounding to nearest: the most that a sound weight has, and a sound row. Measured over every step,
/// also with next to no damping: 4.1 and 33 with 4 bits and more, 6.5 and 42 with 2, all by feedback. With less than 4
/// bits a row of another weight is no farther away than that, so that only the whole is held against a limit.
inline constexpr double most_noise = 10, most_noise_of_few_bits = 20, most_row_noise = 100;
/// The base's weight in the candidate's units: row r times rows[r], column c times cols[c]; empty: as it is.
struct Units {
  std::vector<float> rows = {}, cols = {};
  bool measured = false;  ///< from packed rows, and thus known to their noise alone
  /// 1 where the factor of a column is known within wide bounds only: its codes say nothing by themselves. Empty: nowhere.
  std::vector<uint8_t> unsure = {};

  /// `values` ← a row of the base's weight, in these units.
  void apply(int64_t row, std::span<float> values) const;
};

/// Some rows of a weight, held against the same rows of the base rounded to nearest.
struct RoundedRow {
  int64_t row = 0;
  bool suspect = false;  ///< taken because its error is among the largest
  double signal = 0;     ///< Σ w²
  double noise = 0;      ///< Σ (w − ŵ)²
  double product = 0;    ///< Σ w · ŵ
  double chance = 0;     ///< Σ (w − ŵ)² ŵ²: of factors, where few inputs hold most of a row
  double rounded_noise = 0, rounded_product = 0;  ///< the same of rounding to nearest
  int64_t off = 0;                                ///< codes that are not the nearest under the stored scales
  int64_t unlike = 0;                             ///< values that are not those of rounding to nearest
  int64_t first_off = -1, first_unlike = -1;      ///< the columns of the first
};

struct WeightLimit {
  std::vector<RoundedRow> rows;
  double signal = 0, noise = 0, product = 0, rounded_noise = 0, rounded_product = 0;  ///< of rows that are no suspects
  int bits = 0;                                                                       ///< of all passes
  int64_t values = 0;                                                                 ///< of all rows
  bool measured = false;  ///< Units::measured: nothing is said of single codes
  bool folded = false;    ///< the base's weight was brought into other units
  bool turned = false;    ///< codes stand behind a rotation of inputs: none of these is quiet enough to be given up
  Moves moves = {};       ///< of a weight that was moved before it was rounded
  Gains gains = {};       ///< of rows; of columns nothing where units were measured
  double usual = 0;       ///< Σ (w − ŵ)² / Σ w² of rounding normal weights to as many bits: no less is asked for

  double sqnr() const noexcept;   ///< found, dB
  double floor() const noexcept;  ///< the least, dB
  double most() const noexcept { return bits < 4 ? most_noise_of_few_bits : most_noise; }
  double held() const noexcept { return signal > 0 ? product / signal : 1; }  ///< of the base's
  double gain() const noexcept;  ///< over that of rounding; 1 where there is nothing to compare
  double margin() const noexcept { return sqnr() - floor(); }
  bool holds() const noexcept;
  /// The row that is farthest below what it must reach; null: all reach it.
  const RoundedRow* worst_row() const noexcept;
  /// How far the factors that rows would have to be multiplied by to come nearest to the base's differ from row to row,
  /// beyond chance: a standard deviation, by quartiles.
  double row_spread() const noexcept;
  /// Of all rows: RoundedRow::off, RoundedRow::unlike. A few where scales were folded are none.
  int64_t count(int64_t RoundedRow::*what) const noexcept;
};

/// The few rows whose error is largest beside what they hold.
std::vector<int64_t> loudest_errors(std::span<const model::WeightError> rows);

/// Rounds rows of `base`, spread evenly, and of large weights `suspects`. Nothing where the base's weights cannot be rounded so,
/// or are not finite. `moved`: was_moved(). On one thread.
std::optional<WeightLimit> limit_of(const kernels::LinearWeight& base, const kernels::LinearWeight& candidate,
                                    const Units& units, const std::vector<int64_t>& suspects, bool moved);

/// Whether a folder says that this linear was moved before it was rounded: none of its experts were.
bool was_moved(const checkpoint::Folder& folder, std::string_view module);

}  // namespace w4q::verify
