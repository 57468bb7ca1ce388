#include "quantize/rtn.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "quantize/feedback.h"
#include "quantize/integer_simd.h"
#include "quantize/source_matrix.h"
#ifdef W4Q_HAVE_CUDA
#include "quantize/rtn_cuda.h"
#endif

namespace w4q::quantize {
namespace {

using formats::IntegerScale;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

/// Act order needs to know which inputs matter, which rounding does not ask.
bool accepts(const Scheme& scheme) {
  return scheme.family == formats::SchemeFamily::integer && !scheme.act_order && formats::is_integer_bits(scheme.bits);
}

void check_scheme(const Scheme& scheme) {
  if (accepts(scheme)) return;
  throw Error(ErrorCode::bad_argument, concat("rtn cannot quantize to ", to_string(scheme)))
      .detail("expected an integer scheme without act order")
      .hint("`w4q list` shows the schemes");
}

void check_options(const Scheme& scheme, const QuantizeOptions& options) {
  constexpr std::string_view refusal = "rtn has no ", hint = "it belongs to --method kbit";
  const auto refuse = [&](std::string_view what) {
    throw Error(ErrorCode::bad_argument, concat(refusal, what)).hint(hint);
  };
  if (options.bnb_compatible) refuse("bitsandbytes-compatible mode");
  if (!options.table.empty() || options.codebook != QuantizeOptions{}.codebook) refuse("codebook");
  check_steps(options.steps, scheme, refusal, hint);
}

/// Quantizes rows of one matrix into the planes of one weight.
class RtnEncoder {
 public:
  RtnEncoder(const TensorView& weight, Clip clip, PackedWeight& packed)
      : weight_(weight),
        clip_(clip),
        packed_(packed),
        groups_(formats::integer_groups(packed.scheme, packed.k)),
        group_(formats::integer_group_size(packed.scheme, packed.k)),
        scales_(packed.plane(PlaneRole::scales)),
        zeros_(packed.scheme.asymmetric ? packed.plane(PlaneRole::zeros).bytes.as<uint8_t>() : std::span<uint8_t>{}) {}

  QuantizeStats encode() {
    QuantizeStats sum;
    int64_t bad_row = packed_.n;
    std::mutex mutex;
    parallel_for(packed_.n, row_grain(packed_.k), [&](int64_t begin, int64_t end) {
      std::vector<float> values(static_cast<size_t>(packed_.k));
      std::vector<uint8_t> codes(static_cast<size_t>(packed_.k));
      QuantizeStats stats;
      int64_t bad = packed_.n;
      for (int64_t row = begin; row < end; ++row) {
        widen(row_bytes(weight_, row), weight_.dtype, values);
        if (!encode_row(row, values, codes, stats)) bad = std::min(bad, row);
      }
      const std::lock_guard lock(mutex);
      add(stats, sum);
      bad_row = std::min(bad_row, bad);
    });
    if (bad_row < packed_.n) refuse_non_finite(weight_.name, weight_.dtype, row_bytes(weight_, bad_row), bad_row);
    return sum;
  }

 private:
  /// False when a value is not finite.
  bool encode_row(int64_t row, std::span<const float> values, std::span<uint8_t> codes, QuantizeStats& stats) {
    const Scheme& scheme = packed_.scheme;
    for (int64_t group = 0; group < groups_; ++group) {
      const auto first = static_cast<size_t>(group * group_);
      const auto part = values.subspan(first, std::min(static_cast<size_t>(group_), values.size() - first));
      const Range range = group_range(part);
      if (!range.finite) return false;
      const IntegerScale scale = rtn_scale(scheme, part, range.low, range.high, clip_);
      group_codes(part, scale.value, scale.zero, scheme.bits, codes.data() + first);
      store(static_cast<size_t>(row * groups_ + group), scale);
      ++stats.blocks;
      stats.zero_blocks += range.low == range.high ? 1 : 0;
      stats.saturated_scales += scale.saturated ? 1 : 0;
      stats.subnormal_scales += scale.value < formats::scale_codec(scheme.scale).smallest_normal ? 1 : 0;
    }
    formats::integer_write_codes(packed_, row, codes);
    return true;
  }

  void store(size_t index, const IntegerScale& scale) {
    formats::put_scale(scales_, index, scale.bits);
    if (!zeros_.empty()) zeros_[index] = static_cast<uint8_t>(scale.zero);
  }

  const TensorView& weight_;
  Clip clip_;
  PackedWeight& packed_;
  int64_t groups_;
  int64_t group_;
  formats::Plane& scales_;
  std::span<uint8_t> zeros_;
};

QuantizeResult run(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  check_scheme(scheme);
  check_options(scheme, options);
  check_weight(weight);
  if (options.feeds_back()) return quantize_with_feedback(weight, scheme, options);
  QuantizeResult result{formats::allocate_integer(scheme, weight.shape[0], weight.shape[1]), {}};
  result.stats = RtnEncoder(weight, options.clip(), result.weight).encode();
  return result;
}

#ifdef W4Q_HAVE_CUDA
QuantizeResult run_cuda(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options,
                        device::Context& gpu) {
  if (options.feeds_back()) return run(weight, scheme, options);
  check_scheme(scheme);
  check_options(scheme, options);
  check_weight(weight);
  QuantizeResult result{formats::allocate_integer(scheme, weight.shape[0], weight.shape[1]), {}};
  result.stats = rtn_encode_cuda(weight, options.clip(), result.weight, gpu);
  return result;
}
#else
constexpr decltype(QuantizerRow::run_cuda) run_cuda = nullptr;
#endif

}  // namespace

void add(const QuantizeStats& part, QuantizeStats& sum) noexcept {
  sum.blocks += part.blocks;
  sum.zero_blocks += part.zero_blocks;
  sum.saturated_scales += part.saturated_scales;
  sum.subnormal_scales += part.subnormal_scales;
}

IntegerScale rtn_scale(const Scheme& scheme, std::span<const float> values, float low, float high, Clip clip) {
  IntegerScale best = formats::integer_scale(scheme, low, high);
  if (clip == Clip::min_max || low == high) return best;
  double least = group_error(values, best.value, best.zero, scheme.bits);
  for (int step = 1; step < clip_steps; ++step) {
    const float share = clip_share(step);
    const IntegerScale scale = formats::integer_scale(scheme, low * share, high * share);
    const double error = group_error(values, scale.value, scale.zero, scheme.bits);
    if (!(error < least)) continue;
    least = error;
    best = scale;
  }
  return best;
}

void fake_quantize(const Scheme& scheme, MatrixView<float> weights, Clip clip) {
  check_scheme(scheme);
  if (weights.cols == 0) return;
  const int64_t group = formats::integer_group_size(scheme, weights.cols);
  parallel_for(weights.rows, row_grain(weights.cols), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < weights.cols; col += group) {
        const std::span<float> part(weights.row(row) + col, static_cast<size_t>(std::min(group, weights.cols - col)));
        const Range range = group_range(part);
        const IntegerScale scale = rtn_scale(scheme, part, range.low, range.high, clip);
        group_round(part, scale.value, scale.zero, scheme.bits);
      }
    }
  });
}

QuantizerRow rtn_quantizer() {
  return {.name = "rtn",
          .description = "rounds to the nearest integer step, no calibration; --clip mse searches each group's range",
          .accepts = accepts,
          .run = run,
          .run_cuda = run_cuda};
}

}  // namespace w4q::quantize
