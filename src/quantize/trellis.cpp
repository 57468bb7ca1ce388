#include "quantize/trellis.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/convert.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/scale_codec.h"
#include "formats/trellis.h"
#include "quantize/feedback.h"
#include "quantize/source_matrix.h"
#include "quantize/trellis_simd.h"
#ifdef W4Q_HAVE_CUDA
#include "quantize/trellis_cuda.h"
#endif

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::trellis_rows;
using formats::TrellisColumn;

/// Columns of a task.
constexpr int64_t task_columns = 64;

bool accepts(const Scheme& scheme) {
  return scheme.family == formats::SchemeFamily::trellis && scheme.bits >= formats::trellis_min_bits &&
         scheme.bits <= formats::trellis_max_bits;
}

void check_options(const Scheme& scheme, const QuantizeOptions& options) {
  if (!accepts(scheme)) {
    throw Error(ErrorCode::bad_argument, concat("trellis cannot quantize to ", to_string(scheme)))
        .detail("expected a scheme such as trellis3-w14")
        .hint("`w4q list` shows the schemes");
  }
  constexpr std::string_view refusal = "trellis has no ", hint = "it belongs to another --method";
  const auto refuse = [&](std::string_view what) {
    throw Error(ErrorCode::bad_argument, concat(refusal, what)).hint(hint);
  };
  if (options.bnb_compatible) refuse("bitsandbytes-compatible mode");
  if (!options.table.empty() || !options.codebook.empty()) refuse("codebook: its levels are computed");
  check_steps(options.steps, scheme, refusal, hint);
}

/// Codes of some columns of a strip, each weight by itself.
class StripEncoder {
 public:
  StripEncoder(const TensorView& weight, int64_t strip, PackedWeight& packed)
      : weight_(weight), strip_(strip), first_(strip * trellis_rows), packed_(packed) {
    column_.rows = static_cast<int>(std::min<int64_t>(trellis_rows, packed.n - first_));
    for (int row = 0; row < column_.rows; ++row) {
      const auto at = static_cast<size_t>(row);
      steps_[at] = formats::trellis_load_scale(packed, first_ + row).step;
      column_.counts[at] = steps_[at] > 0;
    }
  }

  void encode(formats::TrellisSearch& search, int64_t begin, int64_t end) {
    const int64_t width = end - begin;
    const auto size = static_cast<size_t>(dtype_bits(weight_.dtype) / 8);
    std::vector<float> values(static_cast<size_t>(column_.rows * width));
    for (int row = 0; row < column_.rows; ++row) {
      const auto bytes = row_bytes(weight_, first_ + row)
                             .subspan(static_cast<size_t>(begin) * size, static_cast<size_t>(width) * size);
      widen(bytes, weight_.dtype,
            std::span(values).subspan(static_cast<size_t>(row * width), static_cast<size_t>(width)));
    }
    for (int64_t col = 0; col < width; ++col) {
      check_interrupt();
      for (size_t row = 0; row < static_cast<size_t>(column_.rows); ++row) {
        if (!column_.counts[row]) continue;
        column_.targets[row] = values[row * static_cast<size_t>(width) + static_cast<size_t>(col)] / steps_[row];
      }
      formats::trellis_put(search(column_), packed_.scheme.bits, formats::trellis_ring(packed_, strip_, begin + col));
    }
  }

 private:
  const TensorView& weight_;
  int64_t strip_, first_;
  PackedWeight& packed_;
  TrellisColumn column_;
  std::array<float, trellis_rows> steps_{};
};

void encode(const TensorView& weight, PackedWeight& packed) {
  const Scheme& scheme = packed.scheme;
  const auto levels = trellis_fast_levels(scheme.bits, scheme.window);
  const int64_t parts = (packed.k + task_columns - 1) / task_columns;
  parallel_for(formats::trellis_strips(packed.n) * parts, 1, [&](int64_t task, int64_t) {
    auto search = trellis_search(scheme, levels);
    const int64_t begin = task % parts * task_columns;
    StripEncoder(weight, task / parts, packed).encode(search, begin, std::min(packed.k, begin + task_columns));
  });
}

QuantizeResult run(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  check_options(scheme, options);
  if (options.feeds_back()) return quantize_with_feedback(weight, scheme, options);
  check_weight(weight);
  QuantizeResult result{allocate_trellis(weight, scheme), {}};
  encode(weight, result.weight);
  result.stats = trellis_stats(result.weight);
  return result;
}

#ifdef W4Q_HAVE_CUDA
/// Feedback through a factor on the CPU stays there.
QuantizeResult run_cuda(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options,
                        device::Context& gpu) {
  check_options(scheme, options);
  if (options.feeds_back()) return run(weight, scheme, options);
  check_weight(weight);
  return quantize_trellis_cuda(weight, scheme, gpu);
}
#else
constexpr decltype(QuantizerRow::run_cuda) run_cuda = nullptr;
#endif

}  // namespace

formats::TrellisSearch trellis_search(const Scheme& scheme, std::span<const float> fast_levels) {
  return {scheme.bits, scheme.window, trellis_fast_step, fast_levels};
}

PackedWeight allocate_trellis(const TensorView& weight, const Scheme& scheme) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  std::vector<double> sizes(static_cast<size_t>(n));
  parallel_for(n, row_grain(k), [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(k));
    for (int64_t row = begin; row < end; ++row) {
      widen(row_bytes(weight, row), weight.dtype, values);
      sizes[static_cast<size_t>(row)] = formats::trellis_rms(values);
    }
  });
  for (size_t row = 0; row < sizes.size(); ++row) {
    if (std::isfinite(sizes[row])) continue;
    const auto bad = static_cast<int64_t>(row);
    refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, bad), bad);
  }
  return allocate_trellis(scheme, n, k, sizes);
}

PackedWeight allocate_trellis(const Scheme& scheme, int64_t n, int64_t k, std::span<const double> sizes) {
  double smallest = std::numeric_limits<double>::infinity(), largest = 0;
  for (const double size : sizes) {
    if (size > 0) smallest = std::min(smallest, size);
    largest = std::max(largest, size);
  }
  PackedWeight packed = formats::allocate_canonical(scheme, n, k);
  float& unit = packed.plane(PlaneRole::codebook).bytes.as<float>()[0];
  unit = std::ldexp(1.0f, formats::trellis_exponent(scheme, smallest, largest));
  for (size_t row = 0; row < sizes.size(); ++row) {
    formats::put_scale(packed.plane(PlaneRole::scales), row, formats::trellis_scale(scheme, sizes[row], unit).bits);
  }
  return packed;
}

QuantizeStats trellis_stats(const PackedWeight& packed) {
  const float unit = packed.plane(PlaneRole::codebook).bytes.as<float>()[0];
  const formats::ScaleCodec& codec = formats::scale_codec(formats::ScaleType::f16);
  const float largest = formats::trellis_store_scale(std::numeric_limits<double>::max(), unit).value;
  QuantizeStats stats;
  stats.range_exponent = std::ilogb(unit) - formats::trellis_usual_exponent;
  stats.blocks = packed.n;
  for (int64_t row = 0; row < packed.n; ++row) {
    const float scale = formats::trellis_load_scale(packed, row).value;
    stats.zero_blocks += scale == 0 ? 1 : 0;
    stats.saturated_scales += scale == largest ? 1 : 0;
    stats.subnormal_scales += scale != 0 && scale < codec.smallest_normal ? 1 : 0;
  }
  return stats;
}

QuantizerRow trellis_quantizer() {
  return {
      .name = "trellis",
      .description = "rings of the least squared error, by Viterbi's algorithm; best behind --rotate and --feedback",
      .accepts = accepts,
      .run = run,
      .run_cuda = run_cuda};
}

}  // namespace w4q::quantize
