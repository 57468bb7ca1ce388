// Weights as points of GGUF's lattices: the scale of each part and the point of each group, of least weighted error.
#pragma once

#include <array>
#include <vector>

#include "formats/gguf_lattice.h"

namespace w4q::quantize {

/// Works on one block at a time; not for several threads.
class LatticeSearch {
 public:
  explicit LatticeSearch(const formats::GgufLattice& lattice);

  /// Chooses what a block says of `values` [256], finite, so that Σ importance · (x − x̂)² is small. `importance` [256] is
  /// positive. The same bytes whatever the instructions are.
  const formats::LatticeBlock& run(const float* values, const float* importance);
  /// What that decodes to, [256].
  void decode(float* values) const;

 private:
  using Lanes = std::array<float, formats::lattice_scales>;
  struct Choice {
    double error = 0;  ///< beyond Σ importance · x²
    formats::LatticeBlock block;
  };

  void take_magnitudes(const float* values, const float* importance);
  void sum_points(const float* importance);
  double best_points(int part, const Lanes& scales, bool all, int& lane);
  void keep_nearest(int part);
  float refined(int part, int lane, float scale) const;
  float free_scale();
  Choice under(float d);
  float fitted(const Choice& choice) const;
  Choice searched(float d);
  void take_nearest_of_all(Choice& choice);

  const formats::GgufLattice& lattice_;
  size_t points_;
  std::vector<float> levels_;        // [width][points]
  std::vector<float> cross_, self_;  // [groups][points]: Σ v·|x|·level, Σ v·level²
  std::array<float, formats::lattice_block> magnitudes_{};
  std::array<std::array<uint16_t, formats::lattice_scales>, 64> nearest_{};  // of each group, under each scale
  std::array<std::vector<uint16_t>, 64> likely_;  // of each group: the nearest ones under free scales
  formats::LatticeBlock block_;
};

}  // namespace w4q::quantize
