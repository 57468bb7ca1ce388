// kbit beyond round-to-nearest, without error feedback: the scale of every block by least squared error, and a table
// learned for the tensor (docs/quality.md). The search serves the groups of the rotated family too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "quantize/kbit.h"
#include "quantize/kbit_panel.h"
#include "quantize/table_learning.h"

namespace w4q::quantize {

/// The importance of each input channel, mean 1, or ones: what squared errors are weighted by.
std::vector<float> channel_importance(const QuantizeOptions& options, int64_t k);

/// The exponent of the table's factor, with room for scales below the rule of absmax.
int searched_range_exponent(const BlockMaxima& maxima, formats::ScaleType type) noexcept;

/// What the options share among weights, or searched_range_exponent().
int table_exponent(const BlockMaxima& maxima, formats::ScaleType type, const QuantizeOptions& options) noexcept;

/// Weights of a row of k that share a scale.
int64_t scale_block(const formats::Scheme& scheme, int64_t k) noexcept;

/// Scales by the rule that the options ask for.
PanelScales choose_scales(const PanelBlock& block, const KbitLevels& levels, formats::ScaleType type, Scales rule);

/// Of a weight [n, k] every so manyth row takes part in learning.
int64_t learning_stride(int64_t n, int64_t k) noexcept;

/// A table learned by weighted Lloyd iterations from `start`: codes and scales for the table, then each entry to the
/// weighted mean of what it stands for, until nothing is gained; `start` itself where that lessens the error by no more
/// than the share `worthwhile`. Tensors of many weights are represented by at most
/// 2^17 of them, rows spread evenly. Sums in fp64 in a fixed order. Largest magnitude 1, gaps as check_codebook wants.
std::vector<float> learn_table(const TensorView& weight, const formats::Scheme& scheme, std::span<const float> start,
                               const BlockMaxima& maxima, std::span<const float> importance, Scales rule,
                               double worthwhile = 0);

/// What linears have in common that kernels stack: q, k and v, gate and up.
struct SharedTable {
  std::vector<float> table;
  float factor = 0;  ///< a power of two; 0: nothing is shared
};

/// A table that weights of one scheme with the same inputs learn together, each entry moving to the mean of what it
/// stands for in all of them, and its factor. `maxima` are the extremes of all their blocks. Otherwise as final_table.
SharedTable learn_shared_table(std::span<const TensorView> weights, const formats::Scheme& scheme,
                               const BlockMaxima& maxima, std::span<const float> importance,
                               const QuantizeOptions& options);
/// The same of weights that only `sums` knows.
SharedTable learn_shared_table(const formats::Scheme& scheme, const BlockMaxima& maxima, const QuantizeOptions& options,
                               const SumEntries& sums);

/// Room above the largest block for targets that inputs from quantized layers move away from the weights.
constexpr float room_for_targets = 1.25f;

/// The extremes of blocks of both.
void join_extremes(BlockMaxima& all, float smallest, float largest) noexcept;

/// The table that the options ask for: chosen, then learned if so, unless it is shared. Without calibration a learned
/// table must be clearly better to be taken.
std::vector<float> final_table(const TensorView& weight, const formats::Scheme& scheme, const BlockMaxima& maxima,
                               std::span<const float> importance, const QuantizeOptions& options);
/// The same of a weight that only `sums` knows.
std::vector<float> final_table(const formats::Scheme& scheme, const BlockMaxima& maxima, const QuantizeOptions& options,
                               const SumEntries& sums);

/// Writes the codes of one block of one panel, and its scales, into the planes; `rows` of the panel exist.
void store_panel(formats::PackedWeight& packed, int64_t first_row, int64_t rows, int64_t block,
                 const PanelScales& scales, const PanelCodes& codes);

/// Fills planes whose codebook stands, block by block: its scales by the rule, the codes nearest for them. `levels` are
/// the table as it decodes.
void encode_searched(const TensorView& weight, std::span<const float> importance, const KbitLevels& levels, Scales rule,
                     formats::PackedWeight& packed);

/// Scales searched, or the table learned, or both.
QuantizeResult quantize_searched(const TensorView& weight, const formats::Scheme& scheme,
                                 const QuantizeOptions& options);

/// Counts of the blocks of a weight that stands.
QuantizeStats block_stats(const formats::PackedWeight& packed, const BlockMaxima& maxima, int range_exponent);

}  // namespace w4q::quantize
