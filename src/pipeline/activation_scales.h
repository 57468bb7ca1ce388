// The largest magnitudes of what programs quantize while they run: the inputs of linears, and the keys and values of the
// cache. Seen as the packed model decodes a text, so that they are those of the model that will run (docs/floats.md).
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/dialect/dialect.h"
#include "model/config.h"
#include "pipeline/calibrate.h"

namespace w4q::pipeline {

/// What is asked for.
struct ActivationRequest {
  CalibrationText text;
  bool inputs = false;  ///< scales of the inputs of linears
  bool cache = false;   ///< scales of keys and values

  bool empty() const noexcept { return !inputs && !cache; }
};

struct ActivationMaxima {
  struct Cache {
    float keys = 0, values = 0;
  };
  std::map<std::string, float, std::less<>> inputs;  ///< by linear. Of experts that saw no row: the layer's largest
  std::map<std::string, Cache, std::less<>> caches;  ///< by attention: "model.layers.0.self_attn"
};

/// The attentions of a model that keep keys and values of their own, a head's as k_proj and v_proj make them.
std::vector<std::string> cached_attentions(const model::ModelConfig& config);

inline constexpr std::string_view who_has_scales =
    "compressed-tensors-float and modelopt have both, compressed-tensors of integers those of the cache; leave out "
    "what "
    "it has not";
/// Why a dialect, null for w4q's own, cannot say what is asked for; empty: it can.
std::string activation_obstacle(const checkpoint::DialectRow* dialect, const ActivationRequest& wanted);
/// Throws unsupported where scales of the cache are asked for and no attention of the model in a folder has one of keys
/// and values.
void require_cache(const std::filesystem::path& model, const ActivationRequest& wanted);

/// Decodes windows of the text on the CPU. Throws as model::Model::open and read_windows.
ActivationMaxima measure_activations(const std::filesystem::path& folder, const CalibrationText& text);

}  // namespace w4q::pipeline
