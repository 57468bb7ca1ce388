// What calibrated packing takes, foretold from the sizes of a model and the speed of this machine.
#pragma once

#include <cstdint>

#include "model/opened.h"
#include "pipeline/calibrated_model.h"

namespace w4q::pipeline {

/// Bytes that one layer takes beside its statistics: the largest group in fp32 twice over, its Gram matrix and factor,
/// and what is packed.
int64_t calibrated_memory(const model::OpenedModel& model, const SchemeOf& scheme_of, const quantize::Steps& steps);

/// Multiplications a second of matrix products on all threads, measured now.
double measured_product_rate();

/// What a run will take, from the sizes of the model and the speed of matrix products.
struct CalibratedCost {
  int64_t memory = 0;  ///< bytes
  double seconds = 0;
};
CalibratedCost calibrated_cost(const CalibratedRequest& request, const model::OpenedModel& model,
                               const SchemeOf& scheme_of, const quantize::Steps& steps, double rate);

}  // namespace w4q::pipeline
