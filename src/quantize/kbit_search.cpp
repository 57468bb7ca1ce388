#include "quantize/kbit_search.h"

#include <algorithm>
#include <cmath>

#include "core/convert.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "formats/codebook.h"
#include "formats/rotated.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

constexpr int64_t learning_weights = 1 << 17;
/// Without activations every weight counts alike, and what a table gains among the many small weights it loses among
/// the few large ones, which carry more of the output: a gain in squared error below this share costs the model more
/// than it brings (docs/quality.md).
constexpr double least_blind_gain = 0.06;

/// Sixteen rows of a matrix in fp32, and their blocks as panels.
class PanelRows {
 public:
  PanelRows(const TensorView& weight, std::span<const float> importance, int64_t width)
      : weight_(weight),
        importance_(importance),
        width_(width),
        values_(static_cast<size_t>(panel_rows * weight.shape[1])),
        target_(static_cast<size_t>(panel_rows * width)) {}

  int64_t blocks() const noexcept { return (weight_.shape[1] + width_ - 1) / width_; }

  /// Rows first, first + stride …; those from `end` on count as zeros.
  void load(int64_t first, int64_t stride, int64_t end) {
    const auto k = static_cast<size_t>(weight_.shape[1]);
    for (int64_t r = 0; r < panel_rows; ++r) {
      const auto row = std::span(values_).subspan(static_cast<size_t>(r) * k, k);
      if (first + r * stride < end) {
        widen(row_bytes(weight_, first + r * stride), weight_.dtype, row);
      } else {
        std::ranges::fill(row, 0.0f);
      }
    }
  }

  /// Valid until the next call.
  PanelBlock block(int64_t index) {
    const int64_t k = weight_.shape[1];
    const auto columns = static_cast<int>(std::min(width_, k - index * width_));
    for (int64_t r = 0; r < panel_rows; ++r) {
      const float* row = values_.data() + r * k + index * width_;
      for (int c = 0; c < columns; ++c) target_[static_cast<size_t>(c * panel_rows + r)] = row[c];
    }
    return {.target = target_.data(), .importance = importance_.data() + index * width_, .columns = columns};
  }

 private:
  const TensorView& weight_;
  std::span<const float> importance_;
  int64_t width_;
  std::vector<float> values_, target_;
};

void add_block(const PanelBlock& block, const PanelScales& scales, const PanelCodes& codes, EntrySums& sums) {
  for (int c = 0; c < block.columns; ++c) {
    const double importance = block.importance[c];
    for (size_t r = 0; r < panel_rows; ++r) {
      const double scale = scales.values[r];
      if (scale == 0) continue;
      const size_t at = static_cast<size_t>(c) * panel_rows + r;
      const double target = block.target[at];
      const double miss = target - static_cast<double>(codes.rounded[at]);
      sums.weighted[codes.codes[at]] += importance * scale * target;
      sums.weights[codes.codes[at]] += importance * scale * scale;
      sums.error += importance * miss * miss;
      sums.power += importance * target * target;
    }
  }
}

/// Sums over a sample of rows of weights that have the same inputs.
class SampleSums {
 public:
  SampleSums(std::span<const TensorView> weights, ScaleType type, std::span<const float> importance, Scales rule)
      : weights_(weights), type_(type), importance_(importance), rule_(rule) {}

  EntrySums operator()(std::span<const float> codebook) const {
    const KbitLevels levels(codebook);
    EntrySums total;
    for (const TensorView& weight : weights_) {
      const int64_t stride = learning_stride(weight.shape[0], weight.shape[1]);
      const int64_t rows = (weight.shape[0] + stride - 1) / stride;
      std::vector<EntrySums> panels(static_cast<size_t>((rows + panel_rows - 1) / panel_rows));
      parallel_for(std::ssize(panels), 1, [&](int64_t panel, int64_t) {
        panels[static_cast<size_t>(panel)] = of_panel(weight, panel * panel_rows * stride, stride, levels);
      });
      total.add_weight(panels, std::ssize(weights_));
    }
    return total;
  }

 private:
  EntrySums of_panel(const TensorView& weight, int64_t first, int64_t stride, const KbitLevels& levels) const {
    EntrySums sums;
    PanelRows rows(weight, importance_, kbit_block);
    rows.load(first, stride, weight.shape[0]);
    PanelCodes codes;
    for (int64_t b = 0; b < rows.blocks(); ++b) {
      const PanelBlock block = rows.block(b);
      const PanelScales scales = choose_scales(block, levels, type_, rule_);
      panel_codes(block, levels, scales, codes);
      add_block(block, scales, codes, sums);
    }
    return sums;
  }

  std::span<const TensorView> weights_;
  ScaleType type_;
  std::span<const float> importance_;
  Scales rule_;
};

/// Of the error that a table must save: without activations it must be clearly better.
double least_share(const QuantizeOptions& options) { return options.input == nullptr ? least_blind_gain : 0; }

}  // namespace

std::vector<float> channel_importance(const QuantizeOptions& options, int64_t k) {
  std::vector<float> result(static_cast<size_t>(k), 1.0f);
  if (options.input == nullptr) return result;
  const auto squares = options.input->mean_squares;
  ensure(static_cast<int64_t>(squares.size()) == k, "channel_importance: shapes do not fit");
  double mean = 0;
  for (const float value : squares) mean += static_cast<double>(value) / static_cast<double>(k);
  if (!(mean > 0)) return result;
  // A channel that the calibration text never used may be used by other text.
  constexpr double least = 1e-6;
  for (size_t c = 0; c < result.size(); ++c)
    result[c] = static_cast<float>(std::max(static_cast<double>(squares[c]) / mean, least));
  return result;
}

int searched_range_exponent(const BlockMaxima& maxima, ScaleType type) noexcept {
  return formats::kbit_range_exponent(maxima.smallest / 4, maxima.largest, type);
}

int64_t scale_block(const Scheme& scheme, int64_t k) noexcept {
  return scheme.family == formats::SchemeFamily::rotated ? formats::rotated_group(scheme, k) : kbit_block;
}

int table_exponent(const BlockMaxima& maxima, ScaleType type, const QuantizeOptions& options) noexcept {
  return options.tensor_factor > 0 ? std::ilogb(options.tensor_factor) : searched_range_exponent(maxima, type);
}

void join_extremes(BlockMaxima& all, float smallest, float largest) noexcept {
  if (smallest > 0) all.smallest = all.smallest > 0 ? std::min(all.smallest, smallest) : smallest;
  all.largest = std::max(all.largest, largest);
}

PanelScales choose_scales(const PanelBlock& block, const KbitLevels& levels, ScaleType type, Scales rule) {
  return rule == Scales::search ? searched_scales(block, levels, type) : absmax_scales(block, levels, type);
}

int64_t learning_stride(int64_t n, int64_t k) noexcept {
  const int64_t rows = std::min(n, std::max<int64_t>(learning_weights / k, panel_rows));
  return std::max<int64_t>(1, n / std::max<int64_t>(1, rows));
}

std::vector<float> learn_table(const TensorView& weight, const Scheme& scheme, std::span<const float> start,
                               const BlockMaxima& maxima, std::span<const float> importance, Scales rule,
                               double worthwhile) {
  return learned_table(start, searched_range_exponent(maxima, scheme.scale), worthwhile,
                       SampleSums({&weight, 1}, scheme.scale, importance, rule));
}

SharedTable learn_shared_table(const Scheme& scheme, const BlockMaxima& maxima, const QuantizeOptions& options,
                               const SumEntries& sums) {
  const int exponent = searched_range_exponent(maxima, scheme.scale);
  return {learned_table(chosen_table(scheme, options), exponent, least_share(options), sums),
          std::ldexp(1.0f, exponent)};
}

SharedTable learn_shared_table(std::span<const TensorView> weights, const Scheme& scheme, const BlockMaxima& maxima,
                               std::span<const float> importance, const QuantizeOptions& options) {
  return learn_shared_table(scheme, maxima, options, SampleSums(weights, scheme.scale, importance, options.scales()));
}

std::vector<float> final_table(const Scheme& scheme, const BlockMaxima& maxima, const QuantizeOptions& options,
                               const SumEntries& sums) {
  std::vector<float> table = chosen_table(scheme, options);
  if (!options.learns_table() || options.tensor_factor > 0) return table;
  return learned_table(table, searched_range_exponent(maxima, scheme.scale), least_share(options), sums);
}

std::vector<float> final_table(const TensorView& weight, const Scheme& scheme, const BlockMaxima& maxima,
                               std::span<const float> importance, const QuantizeOptions& options) {
  return final_table(scheme, maxima, options, SampleSums({&weight, 1}, scheme.scale, importance, options.scales()));
}

void store_panel(PackedWeight& packed, int64_t first_row, int64_t rows, int64_t block, const PanelScales& scales,
                 const PanelCodes& codes) {
  const int64_t width = scale_block(packed.scheme, packed.k);
  const int64_t scales_per_row = (packed.k + width - 1) / width, words_per_row = formats::kbit_blocks(packed.k);
  const auto bits = static_cast<size_t>(packed.scheme.bits);
  const auto words = packed.plane(PlaneRole::codes).bytes.as<uint32_t>();
  formats::Plane& stored = packed.plane(PlaneRole::scales);
  const int64_t first = block * width, end = std::min(first + width, packed.k);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = first_row + r;
    for (int64_t begin = first; begin < end; begin += kbit_block) {
      std::array<uint32_t, 5> planes{};
      for (int64_t c = begin; c < std::min(begin + kbit_block, end); ++c) {
        const uint32_t code = codes.codes[static_cast<size_t>((c - first) * panel_rows + r)];
        for (size_t bit = 0; bit < bits; ++bit) planes[bit] |= (code >> bit & 1u) << (c - begin);
      }
      const auto word = (row * words_per_row + begin / kbit_block) * static_cast<int64_t>(bits);
      std::copy_n(planes.begin(), bits, words.begin() + word);
    }
    const auto index = static_cast<size_t>(row * scales_per_row + block);
    const auto lane = static_cast<size_t>(r);
    formats::put_scale(stored, index, scales.bits[lane]);
  }
}

void encode_searched(const TensorView& weight, std::span<const float> importance, const KbitLevels& levels, Scales rule,
                     PackedWeight& packed) {
  const int64_t n = weight.shape[0];
  parallel_for((n + panel_rows - 1) / panel_rows, 1, [&](int64_t panel, int64_t) {
    check_interrupt();
    PanelRows rows(weight, importance, scale_block(packed.scheme, packed.k));
    const int64_t first = panel * panel_rows;
    rows.load(first, 1, n);
    PanelCodes codes;
    for (int64_t b = 0; b < rows.blocks(); ++b) {
      const PanelBlock block = rows.block(b);
      const PanelScales scales = choose_scales(block, levels, packed.scheme.scale, rule);
      panel_codes(block, levels, scales, codes);
      store_panel(packed, first, std::min<int64_t>(panel_rows, n - first), b, scales, codes);
    }
  });
}

QuantizeStats block_stats(const PackedWeight& packed, const BlockMaxima& maxima, int range_exponent) {
  const bool e4m4 = packed.scheme.scale == ScaleType::e4m4;
  const Buffer& stored = packed.plane(PlaneRole::scales).bytes;
  QuantizeStats stats;
  stats.blocks = static_cast<int64_t>(maxima.absmax.size());
  stats.range_exponent = range_exponent;
  for (size_t i = 0; i < maxima.absmax.size(); ++i) {
    const uint16_t bits = e4m4 ? stored.as<const uint8_t>()[i] : stored.as<const uint16_t>()[i];
    stats.zero_blocks += maxima.absmax[i] == 0 ? 1 : 0;
    stats.subnormal_scales += maxima.absmax[i] != 0 && bits < (e4m4 ? 0x10 : 0x0400) ? 1 : 0;
  }
  return stats;
}

QuantizeResult quantize_searched(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  const BlockMaxima maxima = find_block_maxima(weight);
  const auto importance = channel_importance(options, weight.shape[1]);
  const auto table = final_table(weight, scheme, maxima, importance, options);
  const int exponent = table_exponent(maxima, scheme.scale, options);
  const auto codebook = formats::kbit_scaled_codebook(table, exponent);
  QuantizeResult result{allocate_canonical(weight, scheme, codebook), {}};
  encode_searched(weight, importance, KbitLevels(codebook), options.scales(), result.weight);
  result.stats = block_stats(result.weight, maxima, exponent);
  return result;
}

}  // namespace w4q::quantize
