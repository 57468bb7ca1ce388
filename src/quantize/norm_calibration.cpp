#include "quantize/norm_calibration.h"

#include <Eigen/Cholesky>
#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "formats/kbit.h"
#include "formats/trellis.h"
#include "kernels/linear/gemm.h"
#include "quantize/exl3.h"
#include "quantize/rotated.h"

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::PackedWeight;
using formats::PlaneRole;
using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;

/// Unknowns of all systems that a task holds: 32 MiB of fp64.
constexpr int64_t task_values = int64_t{1} << 22;
constexpr int64_t most_rows = 64;

/// The normal equations of one row: error(norms) = normsᵀ·products·norms − 2·targetᵀ·norms + what no norm changes.
struct System {
  Matrix products;
  Vector target;
};

class NormCalibration {
 public:
  NormCalibration(PackedWeight& packed, MatrixView<const float> weight, MatrixView<const float> gram, double damping)
      : packed_(packed),
        weight_(weight),
        gram_(gram),
        damping_(damping),
        trellis_(packed.scheme.family == formats::SchemeFamily::trellis),
        group_(trellis_ ? packed.k : formats::rotated_group(packed.scheme, packed.k)),
        groups_(trellis_ ? 1 : formats::rotated_groups(packed.scheme, packed.k)) {
    const auto table = packed.plane(PlaneRole::codebook).bytes.as<float>();
    unit_ = table[0];
    if (!trellis_) levels_ = RotatedLevels(table, group_).levels;
  }

  int64_t run() {
    const int64_t task = std::clamp<int64_t>(task_values / (groups_ * groups_), 1, most_rows);
    std::atomic<int64_t> changed = 0;
    parallel_for(packed_.n, task, [&](int64_t begin, int64_t end) {
      std::vector<System> systems = set_up(begin, end);
      for (int64_t row = begin; row < end; ++row) changed += solve(row, systems[static_cast<size_t>(row - begin)]);
    });
    return changed;
  }

 private:
  /// The levels of a row's codes.
  void row_levels(int64_t row, float* out) const {
    if (trellis_) return trellis_row_levels(row, out);
    const auto bits = static_cast<size_t>(packed_.scheme.bits);
    const auto words = packed_.plane(PlaneRole::codes).bytes.as<uint32_t>();
    const auto first = static_cast<size_t>(row * formats::kbit_blocks(packed_.k)) * bits;
    for (int64_t col = 0; col < packed_.k; ++col) {
      uint32_t code = 0;
      for (size_t bit = 0; bit < bits; ++bit) {
        code |= (words[first + static_cast<size_t>(col / kbit_block) * bits + bit] >> col % kbit_block & 1u) << bit;
      }
      out[col] = levels_[code];
    }
  }

  void trellis_row_levels(int64_t row, float* out) const {
    const formats::Scheme& scheme = packed_.scheme;
    for (int64_t col = 0; col < packed_.k; ++col) {
      const auto ring = formats::trellis_ring(std::as_const(packed_), row / formats::trellis_rows, col);
      const auto at = static_cast<int>(row % formats::trellis_rows);
      const uint32_t window = formats::trellis_window(ring, scheme.bits, scheme.window, at);
      out[col] = static_cast<float>(formats::trellis_level(window)) * unit_;
    }
  }

  /// A norm as the scheme stores it: its bits and its value.
  formats::StoredScale store(double norm) const {
    if (!trellis_) return formats::rotated_scale(norm, packed_.scheme.scale);
    const auto stored = formats::trellis_store_scale(norm, unit_);
    return {stored.bits, stored.value, stored.saturated};
  }

  std::vector<System> set_up(int64_t begin, int64_t end) const {
    const int64_t rows = end - begin, k = packed_.k;
    std::vector<float> levels(static_cast<size_t>(rows * k)), products(levels.size());
    for (int64_t r = 0; r < rows; ++r) row_levels(begin + r, levels.data() + r * k);
    std::vector<System> systems(static_cast<size_t>(rows), {Matrix(groups_, groups_), Vector(groups_)});
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t first = g * group_, size = std::min(group_, k - first);
      kernels::gemm_nn({levels.data() + first, rows, size, k}, {gram_.row(first), size, k, gram_.stride},
                       {products.data(), rows, k});
      for (int64_t r = 0; r < rows; ++r) {
        add_group(g, levels.data() + r * k, products.data() + r * k, weight_.row(begin + r),
                  systems[static_cast<size_t>(r)]);
      }
    }
    return systems;
  }

  /// What group `g` has to do with each group, and with the weights: `products` is its levels times the Gram matrix.
  void add_group(int64_t g, const float* levels, const float* products, const float* weights, System& system) const {
    double target = 0;
    for (int64_t h = 0; h < groups_; ++h) {
      double product = 0;
      for (int64_t i = h * group_; i < std::min((h + 1) * group_, packed_.k); ++i) {
        product += double{levels[i]} * double{products[i]};
        target += double{weights[i]} * double{products[i]};
      }
      system.products(g, h) = product;
    }
    system.target(g) = target;
  }

  /// True when the row's norms are others now.
  bool solve(int64_t row, System& system) const {
    formats::Plane& plane = packed_.plane(PlaneRole::scales);
    const auto first = static_cast<size_t>(row * groups_);
    Vector norms(groups_);
    for (int64_t g = 0; g < groups_; ++g) {
      norms(g) = double{formats::load_scale(plane, first + static_cast<size_t>(g))};
    }
    const Matrix symmetric = (system.products + system.products.transpose()) / 2;
    const Vector slope = system.target - symmetric * norms;
    Matrix damped = symmetric;
    damped.diagonal() *= 1 + damping_;
    // A group of nothing but zeros decides nothing.
    for (int64_t g = 0; g < groups_; ++g) damped(g, g) = damped(g, g) > 0 ? damped(g, g) : 1;
    const Eigen::LLT<Matrix> cholesky(damped);
    if (cholesky.info() != Eigen::Success) return false;
    const Vector wanted = norms + cholesky.solve(slope);
    std::vector<formats::StoredScale> stored(static_cast<size_t>(groups_));
    Vector change(groups_);
    for (int64_t g = 0; g < groups_; ++g) {
      const bool usable = wanted(g) > 0 && norms(g) > 0;
      stored[static_cast<size_t>(g)] = store(usable ? wanted(g) : norms(g));
      change(g) = double{stored[static_cast<size_t>(g)].value} - norms(g);
    }
    if (!(change.dot(symmetric * change) - 2 * change.dot(slope) < 0)) return false;
    for (int64_t g = 0; g < groups_; ++g) {
      formats::put_scale(plane, first + static_cast<size_t>(g), stored[static_cast<size_t>(g)].bits);
    }
    return true;
  }

  PackedWeight& packed_;
  MatrixView<const float> weight_, gram_;
  double damping_;
  bool trellis_;
  int64_t group_, groups_;
  std::vector<float> levels_;  // of codes
  float unit_ = 0;             // of a trellis's levels
};

}  // namespace

int64_t calibrate_norms(PackedWeight& packed, MatrixView<const float> weight, MatrixView<const float> gram,
                        double damping) {
  const auto family = packed.scheme.family;
  if (family == formats::SchemeFamily::exl3) return fit_exl3_outputs(packed, weight, gram);
  ensure(family == formats::SchemeFamily::rotated || family == formats::SchemeFamily::trellis,
         "calibrate_norms: the weight has no norms");
  ensure(packed.layout == formats::canonical_layout, "calibrate_norms: the layout is not canonical");
  ensure(weight.rows == packed.n && weight.cols == packed.k && gram.rows == packed.k && gram.cols == packed.k,
         "calibrate_norms: shapes differ");
  return NormCalibration(packed, weight, gram, damping).run();
}

}  // namespace w4q::quantize
