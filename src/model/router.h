// Which experts of a mixture a token goes through, and with which shares.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/views.h"
#include "model/config.h"

namespace w4q::model {

/// Row r goes through experts[r · chosen …], each with its share.
struct Routing {
  std::vector<int32_t> experts;
  std::vector<float> shares;
};

/// `logits` [m × experts]. `correction`: added to the scores for the choice alone, or empty; `expert_scale`: multiplies
/// the shares, or empty. Of equal scores the first expert is chosen. Throws internal when the shapes do not fit.
Routing route(const MixtureConfig& mixture, MatrixView<const float> logits, std::span<const float> correction,
              std::span<const float> expert_scale);

/// The way back: from the gradient of a loss by the shares of `routing`, which route() made of `logits`, to that by the
/// logits. The choice itself has none.
void route_gradient(const MixtureConfig& mixture, MatrixView<const float> logits, const Routing& routing,
                    std::span<const float> expert_scale, std::span<const float> by_shares, MatrixView<float> by_logits);

}  // namespace w4q::model
