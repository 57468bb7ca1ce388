#include "quantize/block_rounding.h"

#include <algorithm>
#include <vector>

#include "formats/integer.h"
#include "formats/kbit.h"
#include "formats/rotated.h"
#include "formats/scheme_registry.h"
#include "quantize/feedback.h"
#include "quantize/integer_trial.h"
#include "quantize/kbit_panel.h"
#include "quantize/rtn.h"
#include "quantize/small_float.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;

static_assert(widest_whole_block <= widest_coupled && widest_whole_block <= widest_trial);

/// kbit, the rotated family and lut: levels times a scale, sixteen rows at a time.
class TableBlocks : public BlockRounding {
 public:
  TableBlocks(PackedWeight& packed, Scales rule)
      : TableBlocks(
            packed, rule,
            KbitLevels(formats::table_levels(formats::scheme_row(packed.scheme.family).table(packed.scheme), packed))) {
  }

 protected:
  TableBlocks(PackedWeight& packed, Scales rule, const KbitLevels& levels)
      : rule_(rule),
        packed_(packed),
        format_(formats::scheme_row(packed.scheme.family).table(packed.scheme)),
        block_(feedback_block(packed.scheme, packed.k)),
        blocks_((packed.k + block_ - 1) / block_),
        levels_(levels) {}

 public:
  int64_t block() const noexcept override { return block_; }
  bool keeps_scales() const noexcept override { return packed_.scheme.scale == formats::ScaleType::nested; }

  void read(int64_t row, std::span<uint8_t> codes, std::span<BlockScale> scales) const override {
    formats::table_read_codes(format_, packed_, row, codes);
    for (int64_t b = 0; b < blocks_; ++b) {
      scales[static_cast<size_t>(b)] = {.value = formats::scale_at(packed_, row * blocks_ + b)};
    }
  }

  void write_codes(int64_t row, std::span<const uint8_t> codes) override {
    formats::table_write_codes(format_, packed_, row, codes);
  }

  void write_scale(int64_t row, int64_t block, const BlockScale& scale) override {
    formats::put_scale(packed_.plane(PlaneRole::scales), static_cast<size_t>(row * blocks_ + block), scale.bits);
  }

  float value(uint8_t code, const BlockScale& scale) const noexcept override {
    return levels_.levels[code] * scale.value;
  }

  uint8_t nearest(float x, const BlockScale& scale) const noexcept override {
    const auto midpoints = std::span(levels_.midpoints).first((size_t{1} << levels_.bits) - 1);
    return static_cast<uint8_t>(formats::kbit_code(scale.value == 0 ? 0.0f : x / scale.value, midpoints));
  }

  void round(const ErrorFactor& factor, MatrixView<const float> targets, std::span<BlockScale> scales,
             std::span<uint8_t> codes) const override {
    std::vector<float> panel(static_cast<size_t>(targets.cols * panel_rows));
    for (int64_t first = 0; first < targets.rows; first += panel_rows) {
      round_panel(factor, targets, first, panel, scales, codes);
    }
  }

 private:
  void round_panel(const ErrorFactor& factor, MatrixView<const float> targets, int64_t first, std::span<float> panel,
                   std::span<BlockScale> scales, std::span<uint8_t> codes) const {
    const int64_t count = std::min<int64_t>(panel_rows, targets.rows - first);
    if (count < panel_rows) std::ranges::fill(panel, 0.0f);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t c = 0; c < targets.cols; ++c) {
        panel[static_cast<size_t>(c * panel_rows + r)] = targets.row(first + r)[c];
      }
    }
    const PanelBlock block{.target = panel.data(),
                           .weights = panel.data(),
                           .importance = factor.pivots().data(),
                           .coupling = factor.coupling().data,
                           .coupling_stride = factor.coupling().stride,
                           .columns = static_cast<int>(targets.cols)};
    const PanelScales chosen = choose(block, targets, first, count);
    PanelCodes found;
    panel_codes(block, levels_, chosen, found);
    for (int64_t r = 0; r < count; ++r) {
      const auto lane = static_cast<size_t>(r);
      scales[static_cast<size_t>(first + r)] = {.value = chosen.values[lane], .bits = chosen.bits[lane]};
      for (int64_t c = 0; c < targets.cols; ++c) {
        codes[static_cast<size_t>((first + r) * targets.cols + c)] =
            found.codes[static_cast<size_t>(c * panel_rows + r)];
      }
    }
  }

  PanelScales choose(const PanelBlock& block, MatrixView<const float> targets, int64_t first, int64_t count) const {
    if (rule_ == Scales::search) return searched_scales(block, levels_, packed_.scheme.scale);
    if (format_.rule != formats::ScaleRule::group_norm) return absmax_scales(block, levels_, packed_.scheme.scale);
    const auto codebook = packed_.plane(PlaneRole::codebook).bytes.as<const float>();
    const double gain = formats::rotated_gain(codebook, packed_.scheme.bits);
    PanelScales result;
    for (int64_t r = 0; r < count; ++r) {
      const std::span values(targets.row(first + r), static_cast<size_t>(targets.cols));
      const auto norm = formats::rotated_scale(formats::rotated_norm(values, block_) / gain, packed_.scheme.scale);
      result.bits[static_cast<size_t>(r)] = norm.bits;
      result.values[static_cast<size_t>(r)] = norm.value;
    }
    return result;
  }

  Scales rule_;

 protected:
  PackedWeight& packed_;
  formats::TableFormat format_;
  int64_t block_, blocks_;
  KbitLevels levels_;
};

/// Small floats: scales carry the tensor's factor, and some stand for several rows.
class FloatBlocks final : public TableBlocks {
 public:
  FloatBlocks(PackedWeight& packed, Scales rule)
      : TableBlocks(packed, rule, KbitLevels::small_floats(packed.scheme.bits, float_factor(packed))) {
    block_ = float_block(packed.scheme, packed.k);
    blocks_ = (packed.k + block_ - 1) / block_;
  }

  bool keeps_scales() const noexcept override { return formats::shares_rows(packed_.scheme); }

  void read(int64_t row, std::span<uint8_t> codes, std::span<BlockScale> scales) const override {
    formats::table_read_codes(format_, packed_, row, codes);
    for (int64_t b = 0; b < blocks_; ++b) {
      const int64_t index = formats::table_place(format_, packed_.k, row, b * block_, 0).scale;
      scales[static_cast<size_t>(b)] = {.value = formats::full_scale_at(format_, packed_, index)};
    }
  }

  float value(uint8_t code, const BlockScale& scale) const noexcept override {
    return levels_.level(code) * scale.value;
  }

  uint8_t nearest(float x, const BlockScale& scale) const noexcept override {
    return formats::small_float_code(x / scale.value + 0.0f, levels_.bits);
  }
};

/// Integers: row by row.
class IntegerBlocks final : public BlockRounding {
 public:
  IntegerBlocks(PackedWeight& packed, Clip clip)
      : packed_(packed),
        clip_(clip),
        block_(formats::integer_group_size(packed.scheme, packed.k)),
        blocks_(formats::integer_groups(packed.scheme, packed.k)) {}

  int64_t block() const noexcept override { return block_; }

  void read(int64_t row, std::span<uint8_t> codes, std::span<BlockScale> scales) const override {
    std::vector<float> values(static_cast<size_t>(blocks_));
    std::vector<uint8_t> zeros(values.size());
    formats::integer_read_codes(packed_, row, codes);
    formats::integer_read_scales(packed_, row, values);
    formats::integer_read_zeros(packed_, row, zeros);
    for (size_t b = 0; b < values.size(); ++b) scales[b] = {.value = values[b], .zero = zeros[b]};
  }

  void write_codes(int64_t row, std::span<const uint8_t> codes) override {
    formats::integer_write_codes(packed_, row, codes);
  }

  void write_scale(int64_t row, int64_t block, const BlockScale& scale) override {
    const auto index = static_cast<size_t>(row * blocks_ + block);
    formats::put_scale(packed_.plane(PlaneRole::scales), index, scale.bits);
    if (!packed_.scheme.asymmetric) return;
    packed_.plane(PlaneRole::zeros).bytes.as<uint8_t>()[index] = static_cast<uint8_t>(scale.zero);
  }

  float value(uint8_t code, const BlockScale& scale) const noexcept override {
    return static_cast<float>(static_cast<int>(code) - scale.zero) * scale.value;
  }

  uint8_t nearest(float x, const BlockScale& scale) const noexcept override {
    return formats::integer_code(x, scale.value, scale.zero, packed_.scheme.bits);
  }

  void round(const ErrorFactor& factor, MatrixView<const float> targets, std::span<BlockScale> scales,
             std::span<uint8_t> codes) const override {
    const formats::Scheme& scheme = packed_.scheme;
    GroupTrial trial(factor, 0, targets.cols);
    for (int64_t r = 0; r < targets.rows; ++r) {
      const float* row = targets.row(r);
      const std::span values(row, static_cast<size_t>(targets.cols));
      const Range range = group_range(values);
      const auto scale = clip_ == Clip::mse ? trial.best(scheme, values, row, range)
                                            : formats::integer_scale(scheme, range.low, range.high);
      trial.round(scheme.bits, values, row, scale, codes.data() + r * targets.cols);
      scales[static_cast<size_t>(r)] = {.value = scale.value, .zero = scale.zero, .bits = scale.bits};
    }
  }

 private:
  PackedWeight& packed_;
  Clip clip_;
  int64_t block_, blocks_;
};

}  // namespace

std::unique_ptr<BlockRounding> block_rounding(PackedWeight& packed, const QuantizeOptions& options) {
  if (packed.scheme.family == formats::SchemeFamily::integer) {
    return std::make_unique<IntegerBlocks>(packed, options.clip());
  }
  if (packed.scheme.family == formats::SchemeFamily::small_float) {
    return std::make_unique<FloatBlocks>(packed, options.scales());
  }
  return std::make_unique<TableBlocks>(packed, options.scales());
}

}  // namespace w4q::quantize
