// What a run of several ranks asks of each of them (docs/scale.md).
#pragma once

#include "model/opened.h"
#include "pipeline/quantize_model.h"

namespace w4q::pipeline {

/// Of a plan whose costs are known, over so many ranks on machines like this one. Bytes per second are those at which this
/// machine reads the model now.
RanksPlan plan_ranks(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan, int ranks);

}  // namespace w4q::pipeline
