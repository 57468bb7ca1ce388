// The table of dialects: how other people's checkpoints name, shape and describe packed linears. A row is plain
// functions between their tensors and canonical planes; the codecs themselves are in formats/dialect/ and in the
// layouts of repack/ (docs/dialects.md).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/packed_checkpoint.h"
#include "formats/dialect/stored_tensor.h"
#include "formats/packed.h"
#include "io/checkpoint.h"
#include "io/json.h"

namespace w4q::checkpoint {

/// What there is to read of a checkpoint before its weights.
struct DialectSource {
  const io::Json& config;  ///< the object quantization_config, or the file that stands in for it
  std::string place;       ///< where it stood, for messages: "MODEL/config.json: quantization_config"
  const io::Checkpoint& checkpoint;
  DType source_dtype = DType::f16;  ///< of the model before it was packed
};

/// How a dialect can hold a linear.
struct DialectFit {
  /// The scheme that it would have there. With an empty `loses` the meaning is the same and only values decide (scale
  /// types, zeros that are all alike, a group_index in order); otherwise the weights would be rounded anew. Nothing:
  /// the dialect has no place for it.
  std::optional<formats::Scheme> scheme;
  std::string loses;  ///< why the codes cannot be kept, or why there is no place
};

/// A linear that a dialect's config has to describe.
struct DialectLinear {
  std::string name;
  formats::Scheme scheme;  ///< from fit()
  bool symmetric = true;   ///< all zero points are the symmetric one, whether the dialect stores them or not
  int64_t n = 0, k = 0;
  formats::Rotation rotation = {};  ///< of its inputs; of a dialect that can say it
};

/// How programs are told to quantize what runs through the model: each scale from a largest magnitude that was measured.
/// The names are ends of tensors' names; all are F32.
struct ActivationForm {
  std::string_view float4,
      float8;                     ///< inputs of NVFP4 linears, and of those of FP8 with one scale; empty: of no linear
  bool float4_divides = false;    ///< float4 holds 448 · 6 / largest instead of largest / (448 · 6)
  std::string_view keys, values;  ///< behind the path of an attention: largest / 448
  Shape shape = {};               ///< of each: one value
  /// Says it in the object quantization_config.
  void (*state)(io::Json& quantization, bool inputs, bool cache) = nullptr;
};

/// A tensor that holds those of several linears, the experts of a mixture: the tensor "T.3" + `part` of a linear "T.3" is
/// number 3 along the first dimension of "T" + `whole`.
struct StackedTensor {
  std::string_view part, whole;
};

struct DialectRow {
  std::string_view name;         ///< "awq-gemm"
  std::string_view description;  ///< one line for `w4q list --dialects`
  std::string_view holds;        ///< what fits: widths, groups, sizes, types
  /// True when this is a checkpoint of the dialect: by its config, and by shapes and types where those say more.
  bool (*detect)(const DialectSource&);
  /// Its linears, each with `stored` filled. Throws bad_file or unsupported naming the tensor.
  QuantizationConfig (*read)(const DialectSource&);
  /// The tensors of a linear, checked against `stored`, as canonical planes; what SchemeRow::validate checks need not
  /// hold yet. Throws bad_file naming info.name.
  formats::PackedWeight (*decode)(const PackedLinearInfo& info, std::vector<formats::StoredTensor> tensors);
  /// Whether and how a linear of one pass without input scale can be written.
  DialectFit (*fit)(const PackedLinearInfo& info);
  /// The tensors of a linear with a scheme from fit().
  std::vector<formats::StoredSpec> (*tensors)(const formats::Scheme&, int64_t n, int64_t k);
  /// Canonical planes → tensors, in the order of tensors().
  std::vector<formats::StoredTensor> (*encode)(const formats::PackedWeight& canonical);
  /// The object quantization_config for these linears; `kept` are the linear layers that stay in 16 bit. Throws
  /// unsupported when it cannot say what is needed.
  io::Json (*describe)(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept);
  /// A file beside the weights that repeats it; empty: none.
  std::string_view config_file = {};
  /// What that file says more, of all tensors of the checkpoint; null: nothing.
  io::Json (*list_tensors)(io::Json quantization, const std::vector<io::PlannedTensor>& tensors) = nullptr;
  /// Biases of packed linears are F16, with zeros up to a multiple of this; 0: they stay as they are.
  int64_t bias_multiple = 0;
  /// Ends of the names of tensors that say how activations are quantized: left out of conversions.
  std::span<const std::string_view> activations = {};
  /// How it states them; null: it cannot.
  const ActivationForm* activation_form = nullptr;
  /// Whether readers of a scheme from fit() want a scale of its inputs; null: none does.
  bool (*needs_inputs)(const formats::Scheme&) = nullptr;
  /// The first value of a weight with a scheme from fit() that has no place, with row, group and what would be lost;
  /// empty: all have. Null: all always have.
  std::string (*refuses)(const formats::PackedWeight& canonical) = nullptr;
  /// Changes such values as little as possible, so that refuses() has nothing left.
  void (*bend)(formats::PackedWeight& canonical) = nullptr;
  /// Its tensors, where files have those of several linears in one (stacks.h): then nothing but experts is packed.
  std::span<const StackedTensor> stacks = {};
  /// Why its readers would not rotate a linear's inputs as it wants; empty: they do. Null: they never rotate.
  std::string (*refuses_rotation)(const PackedLinearInfo& info) = nullptr;
  /// Globs of linears of layers that its readers have in 16 bit: `quantize --to` keeps them.
  std::span<const std::string_view> keeps = {};
};

std::span<const DialectRow> dialect_registry();
/// By name; nullptr when there is none.
const DialectRow* find_dialect(std::string_view name) noexcept;

/// The first row that detects the checkpoint. Throws unsupported and lists what there is.
const DialectRow& detect_dialect(const DialectSource& source);

/// Names of those that stand for quantization_config, in old checkpoints and beside config.json: a converted folder must
/// not carry them along.
inline constexpr std::string_view side_config_files[] = {"quantize_config.json", "quant_config.json",
                                                         "quantization_config.json", "hf_quant_config.json"};
/// Marks TurboQuant's checkpoints, which have tensors and files of their own and are no row of the table.
inline constexpr std::string_view turboquant_config_file = "turboquant_config.json";

}  // namespace w4q::checkpoint
