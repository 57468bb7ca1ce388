// TurboQuant's own config file.
#pragma once

#include <cstdint>
#include <string_view>

#include "checkpoint/dialect/dialect.h"
#include "io/json.h"

namespace w4q::pipeline {

using checkpoint::turboquant_config_file;
inline constexpr std::string_view turboquant_kept_file = "non_quantized.safetensors";

struct TurboQuantConfig {
  /// Which seed a pass of a linear has. Its own loader knows the first two only.
  enum class Seeds { different, shared, alternating, per_layer };
  int bits = 4;
  int group = 128;  ///< or formats::whole_row
  uint64_t seed = 42;
  int residual_bits = 0;  ///< 0: one pass
  uint64_t residual_seed = 1042;
  Seeds seeds = Seeds::different;
  bool half_norms = false;
  bool skip_lm_head = false;

  /// The seed of pass `pass` of the linear that is number `index` in model order.
  uint64_t pass_seed(size_t pass, uint64_t index) const noexcept;
};

/// Steps of the seed from linear to linear with Seeds::per_layer.
inline constexpr uint64_t turboquant_seed_step = 10007;

/// Throws bad_file for what is malformed, unsupported for rotations other than Hadamard, entropy coding, factored norms
/// and embedding quantization.
TurboQuantConfig parse_turboquant_config(const io::Json& json, std::string_view source);
io::Json to_json(const TurboQuantConfig& config);

}  // namespace w4q::pipeline
