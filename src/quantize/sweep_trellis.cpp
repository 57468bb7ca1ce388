#include "quantize/sweep_trellis.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "core/convert.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "kernels/linear/gemm.h"
#include "quantize/feedback_rows.h"
#include "quantize/source_matrix.h"
#include "quantize/sweep_blocks.h"
#include "quantize/trellis.h"
#include "quantize/trellis_simd.h"
#include "quantize/trellis_strip.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::trellis_rows;

/// Strips whose rings of a column are searched at a time, as if none of the others moved.
constexpr size_t strips_together = 8;

/// A strip of rows on its way through sweeps. Its pull is (W − Ŵ)·H.
class SweptStrip {
 public:
  SweptStrip(const TensorView& weight, const DampedGram& gram, PackedWeight& packed, int64_t index)
      : gram_(gram),
        packed_(packed),
        strip_(packed, index),
        k_(packed.k),
        values_(static_cast<size_t>(strip_.rows() * k_)),
        residuals_(values_.size()) {
    for (int64_t r = 0; r < rows(); ++r) {
      widen(row_bytes(weight, first() + r), weight.dtype,
            std::span(residuals_).subspan(static_cast<size_t>(r * k_), static_cast<size_t>(k_)));
    }
    for (int64_t column = 0; column < k_; ++column) {
      const StripValues own = strip_.values(ring(column));
      for (int64_t r = 0; r < rows(); ++r) {
        values_[at(r, column)] = own[static_cast<size_t>(r)];
        residuals_[at(r, column)] -= own[static_cast<size_t>(r)];
      }
    }
  }

  int64_t first() const noexcept { return strip_.first(); }
  int64_t rows() const noexcept { return strip_.rows(); }
  void weigh(const StripValues& importance) { strip_.weigh(importance); }

  /// At the columns from `first` on that `pulls` [rows, …] has.
  void pull(int64_t first, MatrixView<float> pulls) const {
    kernels::gemm_nt({residuals_.data(), rows(), k_}, {gram_.gram.row(first), pulls.cols, k_, gram_.gram.stride},
                     pulls);
    for (int64_t r = 0; r < rows(); ++r) {
      for (int64_t c = 0; c < pulls.cols; ++c) pulls.row(r)[c] += gram_.ridge * residuals_[at(r, first + c)];
    }
  }

  /// The ring that is nearest to what a column has now and `moves`, with the state in front of row `seam` kept.
  TrellisRing nearest(formats::TrellisSearch& search, int64_t column, const StripValues& moves, int seam) const {
    StripValues targets{};
    for (int64_t r = 0; r < rows(); ++r) {
      targets[static_cast<size_t>(r)] = values_[at(r, column)] + moves[static_cast<size_t>(r)];
    }
    return strip_.nearest(search, targets, ring(column), seam < rows() ? seam : 0);
  }

  /// By what a ring would move the column.
  StripValues moves(const TrellisRing& ring, int64_t column) const {
    StripValues result{};
    for (int64_t r = 0; r < rows(); ++r) {
      result[static_cast<size_t>(r)] = ring.values[static_cast<size_t>(r)] - values_[at(r, column)];
    }
    return result;
  }

  void take(const TrellisRing& ring, int64_t column) {
    for (int64_t r = 0; r < rows(); ++r) {
      float& value = values_[at(r, column)];
      residuals_[at(r, column)] += value - ring.values[static_cast<size_t>(r)];
      value = ring.values[static_cast<size_t>(r)];
    }
    strip_.store(ring, column, packed_);
  }

 private:
  size_t at(int64_t row, int64_t column) const { return static_cast<size_t>(row * k_ + column); }
  std::span<const uint32_t> ring(int64_t column) const {
    return formats::trellis_ring(std::as_const(packed_), strip_.index(), column);
  }

  const DampedGram& gram_;
  PackedWeight& packed_;
  RingStrip strip_;
  int64_t k_;
  std::vector<float> values_, residuals_;
};

/// What all strips have in common.
struct RingSweep {
  const DampedGram& gram;
  const formats::Scheme& scheme;
  std::vector<float> levels;
  ColumnOrder order;

  formats::TrellisSearch search() const { return trellis_search(scheme, levels); }

  /// body(columns of a unit, the first of them as they stand, where rings keep their state), the loudest unit first.
  template <class Body>
  void each_unit(const Body& body) const {
    for (const int seam : ring_seams) {
      for (size_t u = 0; u + 1 < order.starts.size(); ++u) {
        check_interrupt();
        const auto begin = static_cast<size_t>(order.starts[u]), end = static_cast<size_t>(order.starts[u + 1]);
        const auto columns = std::span(order.columns).subspan(begin, end - begin);
        body(columns, columns.front() / sweep_code_unit * sweep_code_unit, seam);
      }
    }
  }
};

/// A strip by itself: H_jj·|d|² − 2·pull·d is what a move of column j by d costs.
class LoneStrip {
 public:
  LoneStrip(const RingSweep& sweep, SweptStrip& strip) : sweep_(sweep), strip_(strip), search_(sweep.search()) {
    StripValues alike{};
    alike.fill(1);
    strip_.weigh(alike);
  }

  void run() {
    std::vector<float> memory(static_cast<size_t>(strip_.rows() * sweep_code_unit));
    sweep_.each_unit([&](std::span<const int32_t> columns, int64_t first, int seam) {
      const MatrixView<float> pulls(memory.data(), strip_.rows(), std::ssize(columns));
      strip_.pull(first, pulls);
      for (const int32_t column : columns) {
        if (sweep_.gram.at(column, column) > 0) decide(column, first, seam, pulls);
      }
    });
  }

 private:
  void decide(int64_t column, int64_t first, int seam, MatrixView<float> pulls) {
    const float curvature = sweep_.gram.at(column, column);
    StripValues wanted{};
    for (int64_t r = 0; r < pulls.rows; ++r) {
      wanted[static_cast<size_t>(r)] = pulls.row(r)[column - first] / curvature;
    }
    const TrellisRing ring = strip_.nearest(search_, column, wanted, seam);
    const StripValues moves = strip_.moves(ring, column);
    double gain = 0, size = 0;
    for (int64_t r = 0; r < pulls.rows; ++r) {
      const double move = moves[static_cast<size_t>(r)];
      gain += 2 * double{pulls.row(r)[column - first]} * move;
      size += move * move;
    }
    if (!(double{curvature} * size < certain_share * gain)) return;
    strip_.take(ring, column);
    const float* const coupled = sweep_.gram.gram.row(column) + first;
    for (int64_t r = 0; r < pulls.rows; ++r) {
      const float move = moves[static_cast<size_t>(r)];
      for (int64_t c = 0; c < pulls.cols; ++c) pulls.row(r)[c] -= move * coupled[c];
      pulls.row(r)[column - first] -= move * sweep_.gram.ridge;
    }
  }

  const RingSweep& sweep_;
  SweptStrip& strip_;
  formats::TrellisSearch search_;
};

/// All strips, which pull at one another: with g = H_O·(W − Ŵ)·H a move of column j of a strip by d costs
/// H_jj·dᵀ·H_O·d − 2·g·d, and least where d = H_O⁻¹·g / H_jj, H_O at the strip's rows.
class CoupledStrips {
 public:
  CoupledStrips(const RingSweep& sweep, const DampedGram& outputs, std::vector<std::unique_ptr<SweptStrip>>& strips,
                std::string_view name)
      : sweep_(sweep),
        outputs_(outputs),
        n_(outputs.gram.rows),
        pulls_(static_cast<size_t>(n_ * sweep_code_unit)),
        mixed_(pulls_.size()) {
    for (auto& strip : strips) {
      StripValues importance{};
      for (int64_t r = 0; r < strip->rows(); ++r) {
        importance[static_cast<size_t>(r)] = outputs.at(strip->first() + r, strip->first() + r);
      }
      strip->weigh(importance);
      members_.push_back({*strip, WholeBlock(outputs, strip->first(), strip->rows(), name)});
    }
    while (searches_.size() < std::min(strips_together, members_.size())) searches_.push_back(sweep.search());
  }

  void run() {
    sweep_.each_unit([&](std::span<const int32_t> columns, int64_t first, int seam) {
      width_ = std::ssize(columns);
      each([&](Member& member) { member.strip.pull(first, rows_of(pulls_, member)); });
      each([&](Member& member) { mix(member); });
      for (const int32_t column : columns) {
        if (!(sweep_.gram.at(column, column) > 0)) continue;
        for (size_t from = 0; from < members_.size(); from += strips_together) decide(from, column, first, seam);
      }
    });
  }

 private:
  struct Member {
    SweptStrip& strip;
    WholeBlock costs;
  };

  template <class Body>
  void each(const Body& body) {
    parallel_for(std::ssize(members_), 1, [&](int64_t m, int64_t) { body(members_[static_cast<size_t>(m)]); });
  }
  MatrixView<float> rows_of(std::vector<float>& all, const Member& member) const {
    return {all.data() + member.strip.first() * width_, member.strip.rows(), width_};
  }

  /// g of a strip.
  void mix(const Member& member) {
    const int64_t first = member.strip.first();
    const auto own = rows_of(pulls_, member), result = rows_of(mixed_, member);
    kernels::gemm_nn({outputs_.gram.row(first), result.rows, n_, outputs_.gram.stride}, {pulls_.data(), n_, width_},
                     result);
    for (int64_t r = 0; r < result.rows; ++r) {
      for (int64_t c = 0; c < width_; ++c) result.row(r)[c] += outputs_.ridge * own.row(r)[c];
    }
  }

  /// Strips are searched as if none of the others moved, and taken one after the other where the error falls.
  void decide(size_t from, int64_t column, int64_t first, int seam) {
    const size_t to = std::min(members_.size(), from + strips_together);
    std::array<TrellisRing, strips_together> found;
    parallel_for(static_cast<int64_t>(to - from), 1, [&](int64_t i, int64_t) {
      const auto at = static_cast<size_t>(i);
      const Member& member = members_[from + at];
      const StripValues wanted = wanted_moves(member, column, first);
      found[at] = member.strip.nearest(searches_[at], column, wanted, seam);
    });
    for (size_t m = from; m < to; ++m) settle(members_[m], found[m - from], column, first);
  }

  StripValues wanted_moves(const Member& member, int64_t column, int64_t first) {
    const auto pulls = rows_of(mixed_, member);
    const float curvature = sweep_.gram.at(column, column);
    const auto row = [&](int64_t position) { return member.costs.column(position) - member.strip.first(); };
    StripValues solved{}, wanted{};
    for (int64_t p = 0; p < pulls.rows; ++p) {
      solved[static_cast<size_t>(p)] = pulls.row(row(p))[column - first] / curvature;
    }
    member.costs.solve({solved.data(), pulls.rows, 1});
    for (int64_t p = 0; p < pulls.rows; ++p) wanted[static_cast<size_t>(row(p))] = solved[static_cast<size_t>(p)];
    return wanted;
  }

  void settle(Member& member, const TrellisRing& ring, int64_t column, int64_t first) {
    const StripValues moves = member.strip.moves(ring, column);
    const auto moved = std::span(moves).first(static_cast<size_t>(member.strip.rows()));
    const auto pulls = rows_of(mixed_, member);
    double gain = 0;
    for (int64_t r = 0; r < pulls.rows; ++r) {
      gain += 2 * double{pulls.row(r)[column - first]} * double{moved[static_cast<size_t>(r)]};
    }
    const double curvature = sweep_.gram.at(column, column);
    if (!(curvature * member.costs.curvature(moved) < certain_share * gain)) return;
    member.strip.take(ring, column);
    follow(member, moved, column, first);
  }

  /// What a column of a strip has moved by leaves all strips' g.
  void follow(const Member& member, std::span<const float> moved, int64_t column, int64_t first) {
    parallel_for(n_, trellis_rows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* const costs = outputs_.gram.row(row) + member.strip.first();
        float sum = 0;
        for (size_t r = 0; r < moved.size(); ++r) sum += costs[r] * moved[r];
        const int64_t own = row - member.strip.first();
        if (own >= 0 && own < std::ssize(moved)) sum += outputs_.ridge * moved[static_cast<size_t>(own)];
        float* const pulls = mixed_.data() + row * width_;
        for (int64_t c = 0; c < width_; ++c) pulls[c] -= sum * sweep_.gram.at(column, first + c);
      }
    });
  }

  const RingSweep& sweep_;
  const DampedGram& outputs_;
  int64_t n_, width_ = 0;             // of the unit
  std::vector<float> pulls_, mixed_;  // of all rows: (W − Ŵ)·H, and g
  std::vector<Member> members_;
  std::vector<formats::TrellisSearch> searches_;
};

}  // namespace

void sweep_trellis(const TensorView& weight, const CalibratedInput& input, PackedWeight& packed) {
  const DampedGram gram =
      damped_gram(input.gram, *input.feedback, packed.k, weight.name, "the Gram matrix of its inputs");
  const RingSweep sweep{.gram = gram,
                        .scheme = packed.scheme,
                        .levels = trellis_fast_levels(packed.scheme.bits, packed.scheme.window),
                        .order = column_order(gram.diagonal(), sweep_code_unit)};
  const bool coupled = couples_rows(input);
  std::vector<std::unique_ptr<SweptStrip>> strips(static_cast<size_t>(formats::trellis_strips(packed.n)));
  parallel_for(std::ssize(strips), 1, [&](int64_t s, int64_t) {
    auto strip = std::make_unique<SweptStrip>(weight, gram, packed, s);
    if (!coupled) return LoneStrip(sweep, *strip).run();
    strips[static_cast<size_t>(s)] = std::move(strip);
  });
  if (!coupled) return;
  const DampedGram outputs =
      damped_gram(input.output_gram, *input.outputs, packed.n, weight.name, "what errors of its outputs cost");
  CoupledStrips(sweep, outputs, strips, weight.name).run();
}

}  // namespace w4q::quantize
