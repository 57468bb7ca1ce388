// Quantizes a whole checkpoint: one tensor in memory at a time, the output complete or absent.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "device/context.h"
#include "formats/scheme.h"
#include "io/checkpoint_writer.h"
#include "io/json.h"
#include "model/kinds.h"
#include "model/weight_error.h"
#include "pipeline/calibrated_model.h"
#include "pipeline/plan.h"
#include "pipeline/sharing.h"
#include "quantize/passes.h"
#include "quantize/quantizer_registry.h"
#include "quantize/recipe.h"

namespace w4q::pipeline {

/// Bits chosen for each linear of the layers instead of one scheme for all (allocate.h); exactly one size is given.
struct AllocationTarget {
  double bits_per_weight = 0;         ///< over all linears that a width is chosen for, those that stay in 16 bit too
  int64_t bytes = 0;                  ///< of all tensors of the output
  std::filesystem::path save_recipe;  ///< where to write what was chosen; empty: nowhere
  bool tied = false;                  ///< one width for what servers load as one (checkpoint/fused.h)
  std::vector<int> widths = {};       ///< bits that may be chosen, beside 16; empty: all of the family
  int64_t dialect_bytes = 0;          ///< how much larger than a checkpoint of w4q's own the output becomes
};

struct QuantizeRequest {
  std::filesystem::path model;  ///< a Hugging Face folder in 16 or 32 bit
  std::filesystem::path output;
  std::string method = "kbit";
  formats::Scheme scheme;                      ///< for everything that is packed, unless a recipe says otherwise
  std::vector<formats::Scheme> residual;       ///< further passes, each of what those before it left over
  quantize::RotationChoice rotation;           ///< for passes of rotated schemes
  std::optional<quantize::Recipe> recipe;      ///< decides alone which modules are packed, and how
  bool fused_alike = false;                    ///< a recipe is refused whose schemes differ in what servers load as one
  std::optional<AllocationTarget> allocation;  ///< needs `calibrated`; widths instead of those of the schemes
  std::vector<std::string> keep;               ///< globs of modules that stay in 16 bit, whatever else is said
  bool lm_head = false;                        ///< pack the head too
  bool embeddings = false;                     ///< pack the embedding table too …
  std::optional<formats::Scheme> table;        ///< … to this scheme, if it has one of its own
  quantize::QuantizeOptions options;
  std::optional<CalibratedRequest> calibrated;  ///< where calibration activations come from, for steps that want them
  std::shared_ptr<device::Context> gpu = {};    ///< where to quantize, with the same bytes; null: on the CPU
  io::WriteOptions write;
  std::string preset = {};  ///< the one that the steps come from: plans tell what each of them costs
  std::vector<std::filesystem::path> read_files;  ///< where parts of this request were read from: recipe, codebook
  bool overwrite = false;
  Sharing sharing = {};             ///< with other ranks, and with a run that was ended
  int planned_ranks = 0;            ///< plan_quantize says how so many would share it; 0: not asked
  bool planned_conversion = false;  ///< … and what they pack is read and written once more, for a dialect
};

/// Everything that a request reads, which no output of it may replace.
std::vector<std::filesystem::path> inputs_of(const QuantizeRequest& request);

/// What happened to one packed tensor.
struct QuantizedTensor {
  std::string name;
  std::string scheme;  ///< of all passes
  quantize::QuantizeStats stats;
  model::WeightError error;
  std::optional<OutputError> output;  ///< with calibration
  double seconds = 0;                 ///< of quantizing, without reading and writing
};

struct QuantizeReport {
  Plan plan;
  std::vector<QuantizedTensor> tensors;
  std::vector<GroupReport> groups;  ///< with calibration: what was done to the outputs
  model::WeightError total;
  int64_t file_bytes = 0;
  double seconds = 0;

  std::vector<std::string> warnings() const;
};

/// What is done beyond rounding each weight by itself, in order, in words.
std::vector<std::string> steps_of(const QuantizeRequest& request);

/// What quantize_model would do; writes nothing, but with an allocation the recipe that was asked for: bits are chosen
/// as quantize_model would choose them. Throws as it would for anything that can be seen without the weights.
Plan plan_quantize(const QuantizeRequest& request);

/// Throws bad_file naming tensor and place (NaN, missing or misshapen parameter, disk full …), unsupported,
/// bad_argument.
QuantizeReport quantize_model(const QuantizeRequest& request);

std::string to_text(const QuantizeReport& report, model::Detail detail = model::Detail::kinds);
io::Json to_json(const QuantizeReport& report);

}  // namespace w4q::pipeline
