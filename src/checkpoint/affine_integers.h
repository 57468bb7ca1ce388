// Integers of few bits that no dialect holds, read as the weights that they stand for: MLX's groups with a scale and an
// offset each, with its groups of small floats, and ModelOpt's INT4 of AWQ. docs/dialects.md has the tensors.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>

#include "io/checkpoint.h"
#include "io/json.h"

namespace w4q::checkpoint {

/// Whether a quantization_config is mlx-lm's: bits and group_size without a quant_method.
bool states_mlx(const io::Json& quantization);
/// Whether it is ModelOpt's INT4 of AWQ, "W4A16_AWQ".
bool states_int4_awq(const io::Json& quantization);

struct AffineMatrices {
  /// F32 matrices "….weight", kept as BF16; and what is stored as it is and read otherwise: of mlx-lm's delta nets
  /// convolutions [channels, taps, 1] as [channels, 1, taps], and with them norms, which it stores as 1 + w, as w.
  std::map<std::string, io::DerivedTensor, std::less<>> derived;
  std::set<std::string, std::less<>> hidden;  ///< tensors that they are made of
  int fewest_bits = 8;                        ///< of a code
  size_t matrices = 0;                        ///< that were made of codes
};

/// All of them that a checkpoint holds. MLX: X.weight U32 [n, k·b/32], a dense stream of codes a row, X.scales and
/// X.biases [n, k/g]: code · scale + bias in fp32; of its modes mxfp4, mxfp8 and nvfp4 scales are U8 and there are no
/// offsets; of stacks [experts, …] the experts are "X.0.weight" … or, of "X.switch_mlp.Y", "X.experts.0.Y.weight" ….
/// ModelOpt: X.weight U8 [n/2, k], two outputs a byte, the
/// even one in the low half, X.weight_scale [n, k/g], X.pre_quant_scale [k]: code · scale · what its input is multiplied by.
/// Throws bad_file for tensors of another shape or type than these need.
AffineMatrices read_affine_integers(const std::shared_ptr<const io::Checkpoint>& tensors, const io::Json& config,
                                    const io::Json& quantization);

}  // namespace w4q::checkpoint
