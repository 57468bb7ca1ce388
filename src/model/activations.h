// Functions of single activations, as the decoder and its gradient compute them.
#pragma once

#include <cmath>

namespace w4q::model {

inline float logistic(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace w4q::model
