// How packed linears stand in a checkpoint of w4q: tensor names `<linear>.<pass>.<role>` and `quantization_config` in
// config.json (docs/checkpoint.md). Linears of other people's checkpoints (dialect.h) are loaded by the same functions.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "formats/packed.h"
#include "io/checkpoint.h"
#include "io/json.h"

namespace w4q::checkpoint {

struct DialectRow;

/// The newest that is read. Checkpoints without rotations are written as version 1.
inline constexpr int packed_format_version = 2;

struct PackedPass {
  formats::Scheme scheme;
  std::string layout;
  formats::Rotation rotation = {};  ///< of the input of this pass
};

/// What config.json says of one packed linear.
struct PackedLinearInfo {
  std::string name;  ///< module path without ".weight"
  int64_t n = 0;
  int64_t k = 0;
  DType source_dtype = DType::bf16;
  std::vector<PackedPass> passes;       ///< the first can do alone: without the sidecar it is all that is read
  bool input_scale = false;             ///< the tensor "<name>.input_scale" divides the input
  const DialectRow* dialect = nullptr;  ///< whose tensors hold it, decoded to the canonical layout; null: w4q's planes
  std::vector<io::PlannedTensor> stored = {};  ///< with a dialect: those tensors, as they must be
};

/// config.json's quantization_config. `linears` is empty for a 16-bit checkpoint.
struct QuantizationConfig {
  std::string method;  ///< the quantizer that made it, "kbit"
  std::map<std::string, PackedLinearInfo, std::less<>> linears;
  /// Parameters whose values are not those of the base model, because scales were folded into them: names as in
  /// model::Parameter. The model as a whole computes the same but for the rounding of packed weights.
  std::set<std::string, std::less<>> rescaled;
  const DialectRow* dialect = nullptr;  ///< whose checkpoint it is; null: w4q's
  std::vector<std::string> notes = {};  ///< accepted oddities of a dialect's checkpoint, to be shown once

  const PackedLinearInfo* find(std::string_view linear) const;
};

/// Reads it; an absent key gives an empty config. Throws unsupported for another quant_method or a newer
/// format_version, bad_file for anything malformed.
QuantizationConfig parse_quantization_config(const io::Json& config, std::string_view source);
/// Puts it into `config` (replacing what is there).
void write_quantization_config(const QuantizationConfig& quantization, io::Json& config);

/// "model.layers.0.mlp.up_proj" + 0 + codes → "model.layers.0.mlp.up_proj.0.codes".
std::string plane_name(std::string_view linear, size_t pass, formats::PlaneRole role);
/// "model.layers.0.mlp.down_proj" → "model.layers.0.mlp.down_proj.input_scale".
std::string input_scale_name(std::string_view linear);
/// The tensors that a linear must have, in its stored layout: its planes, and its input scale where it has one; those
/// of its dialect. Those of all passes but the first lie in the sidecar.
std::vector<io::PlannedTensor> planned_planes(const PackedLinearInfo& info);
/// The sum of their bytes.
int64_t stored_bytes(const PackedLinearInfo& info);

/// Loads a linear in its stored layout, from a dialect in the canonical one, and checks types and shapes. Its planes
/// are views of the checkpoint, which must outlive them. Throws bad_file naming the tensor.
formats::PackedLinear load_packed(const io::Checkpoint& checkpoint, const PackedLinearInfo& info);
/// The same in the canonical layout, every plane validated (padding, codebook, scales).
formats::PackedLinear load_canonical(const io::Checkpoint& checkpoint, const PackedLinearInfo& info);
/// What load_canonical makes of what load_packed gives.
formats::PackedLinear to_canonical(const formats::PackedLinear& packed);

}  // namespace w4q::checkpoint
