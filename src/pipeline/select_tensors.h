// Decides, tensor by tensor, what quantize_model packs and with which scheme.
#pragma once

#include "model/opened.h"
#include "pipeline/plan.h"
#include "pipeline/quantize_model.h"

namespace w4q::pipeline {

/// One TensorPlan per tensor of the checkpoint: the architecture's parameters in model order, then whatever else the
/// files hold. Notes say what a user might not expect (unknown tensors carried along, a tied head). Throws bad_file for
/// a missing or misshapen parameter, bad_argument for a recipe rule or --keep that matches nothing, or a rule for a
/// tensor that cannot be packed.
Plan select_tensors(const model::OpenedModel& source, const QuantizeRequest& request);

}  // namespace w4q::pipeline
