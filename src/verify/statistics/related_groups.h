// Which weights share channels, layer by layer: what one writes and another reads, and what reads the same. As the
// architecture says or, where it is not known, as names do.
#pragma once

#include <vector>

#include "model/layer_plan.h"
#include "model/opened.h"

namespace w4q::verify {

/// Of each layer, those of mixtures too.
using LayerGroups = std::vector<std::vector<model::InputGroup>>;

/// Reads headers alone. Of an architecture that is not known, linears of the text model's layers that bear usual names:
/// q_proj, k_proj, v_proj, o_proj, and gate_proj, up_proj, down_proj or w1, w3, w2, of an expert too.
LayerGroups related_groups(const model::OpenedModel& model);

}  // namespace w4q::verify
