// A number of each tensor as a heat map: layers across, kinds of tensors down.
#pragma once

#include <string>
#include <vector>

#include "report/plot.h"

namespace w4q::report {

struct TensorValue {
  std::string name;
  double value = 0;  ///< not finite: none
};

/// What a cell says of the tensors that it stands for: one, or all experts of a layer.
struct CellWords {
  std::string what;                        ///< "relative error"
  bool mean = false;                       ///< of these tensors; otherwise the largest
  std::string (*text)(double value) = {};  ///< in the cell
  std::string (*full)(double value) = {};  ///< where it is pointed at
};

/// Bits a weight.
extern const CellWords bits_in_cells;

/// A map for each model, all with the same rows, columns and colours. None where no tensor has a number.
std::vector<HeatMap> layer_maps(const std::vector<std::vector<TensorValue>>& models, const CellWords& words);

}  // namespace w4q::report
