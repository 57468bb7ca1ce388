// A folder of safetensors as far as its headers, whatever model it holds: the one thing that reading, repacking,
// converting, verifying and decoding start from. model/opened.h adds what an architecture says of it.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "checkpoint/packed_checkpoint.h"
#include "io/checkpoint.h"
#include "io/json.h"

namespace w4q::checkpoint {

/// The keys of Folder::tuned and Folder::has_moved_targets.
inline constexpr std::string_view tuned_norms_key = "tuned_norms";
inline constexpr std::string_view moved_targets_key = "targets_for_quantized_inputs";

struct Folder {
  std::filesystem::path path;
  io::Json config = {};  ///< config.json
  io::Checkpoint tensors;
  QuantizationConfig quantization = {};  ///< without linears for a 16-bit checkpoint
  /// Weights of norms that were tuned behind the quantization, "….weight": no scale explains how they differ from the
  /// base's. A list in config.json, which goes with it into every dialect.
  std::set<std::string, std::less<>> tuned = {};
  /// Linears, but for experts, were moved before they were rounded, so that they make up for the layers quantized before them
  /// (docs/quality.md). Said by config.json in every dialect, too.
  bool has_moved_targets = false;
  bool small_floats = false;  ///< some matrices are what stored small floats stand for (low_precision.h)
  bool few_bits = false;      ///< … or codes of 3 bits and less
  bool text_alone = false;  ///< its program reads text models alone: it leaves towers and layers for further tokens out

  std::filesystem::path config_path() const { return path / "config.json"; }
};

/// config.json of a folder, with quantization_config at its top, where models that are wrapped may have it in their
/// text_config, and the first files of compressed-tensors under another name. Throws as read_json.
io::Json read_config_file(const std::filesystem::path& folder);

/// What the producer of a config.json computed in, and stored before anything was packed: its dtype or torch_dtype, the
/// first that names a type. Older files say "float16", some "torch.float16".
std::optional<DType> stated_dtype(const io::Json& config);

/// Throws bad_file unless `folder` is one, and says what to give in place of a file.
void require_folder(const std::filesystem::path& folder);

/// What is made of small floats that other programs stored.
enum class FloatForm {
  decoded,  ///< matrices of the weights that they stand for (low_precision.h)
  packed,   ///< packed linears, where a dialect has them
  either,   ///< the same, but decoded where the dialect cannot say one of them
};

/// config.json and the headers of the weights, with what stands inputs first turned (turned_stacks.h), before anything is read
/// of packed linears. Throws bad_file, naming file and tensor.
Folder open_headers(const std::filesystem::path& folder, bool residual = true);

/// Opens config.json and the headers of the weights, without residual passes unless `residual`, and reads what they say
/// of packed linears. Throws bad_file or unsupported, naming file and key or tensor.
Folder open_folder(const std::filesystem::path& folder, bool residual = true, FloatForm floats = FloatForm::decoded);
/// The same of one that holds packed linears. Throws bad_argument, with `quantizer` as the command that packs, where
/// there are none.
Folder open_packed_folder(const std::filesystem::path& folder, std::string_view quantizer = "w4q quantize");

/// What a checkpoint says of its quantization before any tensor is looked at.
struct StatedQuantization {
  io::Json json;
  std::string place;     ///< where it stood, for messages: "MODEL/config.json: quantization_config"
  bool foreign = false;  ///< another program's
};

/// The object quantization_config of `config` or, where that has none, a file beside the weights that stands in for it.
std::optional<StatedQuantization> stated_quantization(const io::Json& config, const std::filesystem::path& folder);

/// Throws unsupported where compressed-tensors' transform_config turns inputs, outputs or what attention reads while the model
/// runs: the weights without that are another model's. What is folded into weights alone is none of the reader's business.
void refuse_transforms_at_run_time(const StatedQuantization& stated);

/// Whether compressed-tensors' transform_config says that weights were turned before they were packed: SpinQuant's rotations,
/// with norms multiplied into what reads them.
bool turns_weights(const StatedQuantization& stated);

/// Whether FloatForm::either reads a folder that states this as packed linears of a dialect.
bool has_packed_floats(const Folder& headers, const StatedQuantization& stated);

/// `folder` with what it states read in any dialect, which shapes and types tell too. Throws as open_folder.
Folder read_quantization(Folder folder, FloatForm floats = FloatForm::decoded);

}  // namespace w4q::checkpoint
