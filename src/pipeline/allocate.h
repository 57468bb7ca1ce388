// Bits for each linear so that the whole model keeps as much of its quality as a given size allows: the error that its
// outputs have at every width, times how much that matters, in an exact knapsack (docs/quality.md).
#pragma once

#include <memory>
#include <vector>

#include "formats/scheme.h"
#include "model/opened.h"
#include "pipeline/quantize_model.h"

namespace w4q::pipeline {

class SharedPartial;

/// What a run with an AllocationTarget becomes once bits are chosen.
struct Allocated {
  Allocated();
  ~Allocated();
  Allocated(Allocated&&) noexcept;

  QuantizeRequest request;  ///< with a recipe that names every module, and statistics in a file
  AllocationReport report;
  std::unique_ptr<SharedPartial> statistics;  ///< the hidden folder of that file, where it was made for this run
};

/// The schemes that a tensor can have instead of `scheme`: every width of the same family, ascending. Floats of 4 bits have
/// FP8 beside them, whose scales are of the same kind for MXFP4, else of channels.
std::vector<formats::Scheme> widths_of(const formats::Scheme& scheme);

/// Measures and chooses: quantizes every layer once for each width, and writes nothing that lasts but the recipe that
/// was asked for. The ranks of the request share what is measured, and all choose the same. Linears of the layers that the request would pack take part; what else it would pack stays as it is.
/// Throws bad_argument without calibration, or for a target below what the smallest widths give.
Allocated allocate(const model::OpenedModel& source, const QuantizeRequest& request);

}  // namespace w4q::pipeline
