#include "quantize/gguf.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/convert.h"
#include "core/error.h"
#include "core/measure.h"
#include "core/parallel.h"
#include "core/text.h"
#include "quantize/error_factor.h"
#include "quantize/feedback_rows.h"
#include "quantize/gguf_exact.h"
#include "quantize/gguf_lattice.h"
#include "quantize/gguf_panel.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {
namespace {

using formats::GgufForm;

/// Channels that calibration never saw still have weights to be kept.
constexpr float least_importance = 1e-4f;
/// Columns that are rounded at once while errors move them one after the other.
constexpr int64_t coupled_columns = 32;

void check_values(const TensorView& weight, float largest) {
  const auto k = static_cast<size_t>(weight.shape[1]);
  parallel_for(weight.shape[0], row_grain(weight.shape[1]), [&](int64_t begin, int64_t end) {
    std::vector<float> values(k);
    for (int64_t row = begin; row < end; ++row) {
      widen(row_bytes(weight, row), weight.dtype, values);
      if (all_within(values, largest)) continue;
      for (size_t col = 0; col < k; ++col) {
        if (!std::isfinite(values[col])) refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, row), row);
        if (std::abs(values[col]) <= largest) continue;
        throw Error(ErrorCode::unsupported,
                    concat(printable(weight.name), ": a value is too large for the type to write"))
            .detail(concat("row ", row, ", column ", col, ": ", values[col], "; the largest is ", largest))
            .hint("choose a type with a wider range: BF16 or F32");
      }
    }
  });
}

/// Weights of errors with mean 1.
std::vector<float> relative(std::span<const float> importance, int64_t k) {
  std::vector<float> result(static_cast<size_t>(k), 1.0f);
  if (importance.empty()) return result;
  const double sum = std::accumulate(importance.begin(), importance.end(), 0.0);
  if (!(sum > 0)) return result;
  for (size_t c = 0; c < result.size(); ++c) {
    const auto share = static_cast<float>(importance[c] * static_cast<double>(k) / sum);
    result[c] = std::max(share, least_importance);
  }
  return result;
}

/// Rows of a panel whose values such blocks hold already, as those of a file that was decoded, keep them.
void keep_exact(const GgufForm& form, const float* values, int64_t count, GgufPanelScales& scales) {
  std::array<float, formats::widest_gguf_block> row{};
  const auto block = static_cast<size_t>(form.block);
  const auto part = static_cast<size_t>(form.part);
  for (int64_t r = 0; form.nests() && r < count; ++r) {
    const auto gather = [&](size_t begin, size_t end) {
      for (size_t c = begin; c < end; ++c) row[c] = values[c * panel_rows + static_cast<size_t>(r)];
    };
    gather(0, part);
    if (!may_be_exact(form, std::span(row).first(part))) continue;
    gather(part, block);
    const auto exact = exact_gguf_scales(form, std::span(row).first(block));
    if (exact) scales.set_row(form, static_cast<int>(r), *exact);
  }
}

/// Blocks go where they belong: row by row.
class Blocks {
 public:
  Blocks(const GgufForm& form, int64_t n, int64_t k)
      : form_(form),
        block_bytes_(static_cast<size_t>(describe(form.type).block_bytes)),
        row_bytes_(static_cast<size_t>(k / form.block) * block_bytes_),
        bytes_(static_cast<size_t>(n) * row_bytes_) {}

  void store(int64_t row, int64_t block, formats::GgufScales scales, std::span<uint8_t> levels) {
    settle_gguf_block(form_, scales, levels);
    const size_t at = static_cast<size_t>(row) * row_bytes_ + static_cast<size_t>(block) * block_bytes_;
    formats::store_gguf_block(form_, scales, levels, bytes_.bytes().subspan(at, block_bytes_));
  }
  void store(int64_t row, int64_t block, const formats::GgufLattice& lattice, const formats::LatticeBlock& said) {
    const size_t at = static_cast<size_t>(row) * row_bytes_ + static_cast<size_t>(block) * block_bytes_;
    formats::store_lattice_block(lattice, said, bytes_.bytes().subspan(at, block_bytes_));
  }
  Buffer take() { return std::move(bytes_); }

 private:
  const GgufForm& form_;
  size_t block_bytes_, row_bytes_;
  Buffer bytes_;
};

/// Sixteen rows, each weight rounded by itself.
class PlainPanel {
 public:
  PlainPanel(const TensorView& weight, const GgufForm& form, std::span<const float> importance)
      : weight_(weight),
        form_(form),
        importance_(importance),
        rows_(static_cast<size_t>(panel_rows * weight.shape[1])) {
    for (int c = 0; c < form.block; ++c) parts_[static_cast<size_t>(c)] = static_cast<uint8_t>(c / form.part);
  }

  void run(int64_t first, int64_t count, Blocks& out) {
    const int64_t k = weight_.shape[1];
    for (int64_t r = 0; r < count; ++r) {
      widen(row_bytes(weight_, first + r), weight_.dtype,
            std::span(rows_).subspan(static_cast<size_t>(r * k), static_cast<size_t>(k)));
    }
    for (int64_t block = 0; block < k / form_.block; ++block) run_block(first, count, block, out);
  }

 private:
  void run_block(int64_t first, int64_t count, int64_t block, Blocks& out) {
    const int64_t k = weight_.shape[1], begin = block * form_.block;
    for (int64_t r = 0; r < panel_rows; ++r) {
      const float* row = rows_.data() + std::min(r, count - 1) * k + begin;
      for (int64_t c = 0; c < form_.block; ++c) values_[static_cast<size_t>(c * panel_rows + r)] = row[c];
    }
    search_gguf_scales(form_, values_.data(), importance_.data() + begin, scales_);
    keep_exact(form_, values_.data(), count, scales_);
    round_gguf_columns(form_, scales_, {form_.block, parts_.data(), values_.data(), values_.data(), nullptr, 0},
                       levels_.data(), errors_.data());
    for (int64_t r = 0; r < count; ++r) {
      std::array<uint8_t, formats::widest_gguf_block> row{};
      for (int64_t c = 0; c < form_.block; ++c) {
        row[static_cast<size_t>(c)] = levels_[static_cast<size_t>(c * panel_rows + r)];
      }
      out.store(first + r, block, scales_.row(form_, static_cast<int>(r)),
                std::span(row).first(static_cast<size_t>(form_.block)));
    }
  }

  static constexpr size_t panel_values = formats::widest_gguf_block * panel_rows;

  const TensorView& weight_;
  const GgufForm& form_;
  std::span<const float> importance_;
  std::vector<float> rows_;
  std::array<uint8_t, formats::widest_gguf_block> parts_{};
  alignas(64) std::array<float, panel_values> values_{}, errors_{};
  std::array<uint8_t, panel_values> levels_{};
  GgufPanelScales scales_;
};

/// A block at a time: scales from the weights as errors have moved them, then codes, column by column.
class GgufFeedback final : public BlockFeedback {
 public:
  GgufFeedback(const ErrorFactor& factor, const GgufForm& form, Blocks& out)
      : factor_(factor), form_(form), out_(out) {}

  void round(FeedbackRows& rows, RowRange part, size_t block) const override {
    const int64_t begin = factor_.block_starts()[block];
    const MatrixView<float> targets = rows.targets(part, begin, factor_.block_starts()[block + 1]);
    for (int64_t r = 0; r < part.count; r += panel_rows) {
      const int64_t count = std::min<int64_t>(panel_rows, part.count - r);
      panel(rows, {part.first + r, count}, {targets.row(r), count, targets.cols, targets.stride}, begin);
    }
  }

 private:
  struct Work {
    alignas(64) std::array<float, formats::widest_gguf_block * panel_rows> values{};
    alignas(64) std::array<float, coupled_columns * panel_rows> targets{}, weights{}, errors{};
    std::array<float, formats::widest_gguf_block> importance{};
    std::array<uint8_t, coupled_columns * panel_rows> levels{};
    std::array<uint8_t, coupled_columns> parts{};
    std::array<std::array<uint8_t, formats::widest_gguf_block>, panel_rows> codes{};
    GgufPanelScales scales;
  };

  int64_t column(int64_t position) const { return factor_.order()[static_cast<size_t>(position)]; }

  void panel(FeedbackRows& rows, RowRange part, MatrixView<float> targets, int64_t begin) const {
    const auto work = std::make_unique<Work>();
    const int64_t block = column(begin) / form_.block, first = block * form_.block;
    for (int64_t c = 0; c < form_.block; ++c) {
      const auto at = static_cast<size_t>(column(begin + c) - first);
      work->importance[at] = std::max(factor_.pivots()[static_cast<size_t>(begin + c)], least_importance);
      for (int64_t r = 0; r < panel_rows; ++r) {
        work->values[at * panel_rows + static_cast<size_t>(r)] = targets.row(std::min(r, part.count - 1))[c];
      }
    }
    search_gguf_scales(form_, work->values.data(), work->importance.data(), work->scales);
    keep_exact(form_, work->values.data(), part.count, work->scales);
    for (int64_t c = 0; c < form_.block; c += coupled_columns) {
      const MatrixView<float> some(targets.data + c, targets.rows, coupled_columns, targets.stride);
      rows.move(part, some, begin, begin + c, begin + c);
      columns(rows, part, some, {begin + c, first}, *work);
    }
    for (int64_t r = 0; r < part.count; ++r) {
      out_.store(rows.index(part.first + r), block, work->scales.row(form_, static_cast<int>(r)),
                 std::span(work->codes[static_cast<size_t>(r)]).first(static_cast<size_t>(form_.block)));
    }
  }

  struct Place {
    int64_t position, first;  ///< of the columns, and the first column of the block
  };

  void columns(FeedbackRows& rows, RowRange part, MatrixView<const float> targets, Place place, Work& work) const {
    for (int64_t c = 0; c < coupled_columns; ++c) {
      work.parts[static_cast<size_t>(c)] =
          static_cast<uint8_t>((column(place.position + c) - place.first) / form_.part);
      for (int64_t r = 0; r < panel_rows; ++r) {
        const int64_t row = std::min(r, part.count - 1);
        const auto at = static_cast<size_t>(c * panel_rows + r);
        work.targets[at] = targets.row(row)[c];
        work.weights[at] = rows.weights(part.first + row)[place.position + c];
      }
    }
    const auto coupling = factor_.coupling();
    round_gguf_columns(form_, work.scales,
                       {static_cast<int>(coupled_columns), work.parts.data(), work.targets.data(), work.weights.data(),
                        coupling.row(place.position) + place.position, coupling.stride},
                       work.levels.data(), work.errors.data());
    for (int64_t r = 0; r < part.count; ++r) {
      float* errors = rows.errors(part.first + r) + place.position;
      for (int64_t c = 0; c < coupled_columns; ++c) {
        const auto at = static_cast<size_t>(c * panel_rows + r);
        errors[c] = work.errors[at];
        work.codes[static_cast<size_t>(r)][static_cast<size_t>(column(place.position + c) - place.first)] =
            work.levels[at];
      }
    }
  }

  const ErrorFactor& factor_;
  const GgufForm& form_;
  Blocks& out_;
};

/// Points of a lattice, without feedback.
void lattice_rows(const TensorView& weight, const formats::GgufLattice& lattice, std::span<const float> importance,
                  Blocks& out) {
  const int64_t k = weight.shape[1];
  parallel_for(weight.shape[0], 1, [&](int64_t begin, int64_t end) {
    LatticeSearch search(lattice);
    std::vector<float> row(static_cast<size_t>(k));
    for (int64_t r = begin; r < end; ++r) {
      widen(row_bytes(weight, r), weight.dtype, row);
      for (int64_t c = 0; c < k; c += formats::lattice_block) {
        out.store(r, c / formats::lattice_block, lattice, search.run(row.data() + c, importance.data() + c));
      }
    }
  });
}

}  // namespace

Buffer gguf_blocks(const TensorView& weight, const formats::GgufForm& form, const CalibratedInput* input) {
  check_weight(weight);
  const int64_t n = weight.shape[0], k = weight.shape[1];
  ensure(k % form.block == 0, "gguf_blocks: rows that are no whole blocks");
  check_values(weight, form.largest);
  Blocks blocks(form, n, k);
  const auto importance = relative(input == nullptr ? std::span<const float>{} : input->mean_squares, k);
  if (form.lattice) {
    lattice_rows(weight, *formats::find_gguf_lattice(form.type), importance, blocks);
    return blocks.take();
  }
  if (input != nullptr && input->feedback != nullptr) {
    ensure(input->feedback->width() == k && input->feedback->block() == form.block, "gguf_blocks: another factor");
    run_feedback(weight, {.mean_squares = {}, .feedback = input->feedback},
                 GgufFeedback(*input->feedback, form, blocks));
    return blocks.take();
  }
  parallel_for(n, panel_rows, [&](int64_t begin, int64_t end) {
    const auto panel = std::make_unique<PlainPanel>(weight, form, importance);
    panel->run(begin, end - begin, blocks);
  });
  return blocks.take();
}

}  // namespace w4q::quantize
