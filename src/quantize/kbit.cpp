#include "quantize/kbit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "core/error.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/scheme_registry.h"
#include "quantize/feedback.h"
#include "quantize/kbit_encoder.h"
#include "quantize/kbit_search.h"
#ifdef W4Q_HAVE_CUDA
#include "quantize/kbit_cuda.h"
#include "quantize/kbit_search_cuda.h"
#endif

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::kbit_blocks;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

void check_bnb(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  const auto refuse = [&](std::string_view what, std::string_view why) {
    throw Error(ErrorCode::unsupported, concat(printable(weight.name), ": bitsandbytes' format has no ", what))
        .detail(why)
        .hint("leave out --bnb-compatible");
  };
  if (scheme.scale != ScaleType::e4m4) refuse("f16 scales", concat("expected E4M4 scales, got ", to_string(scheme)));
  if (!options.table.empty()) refuse("other tables", "expected its own table, got one from a file");
  if (options.searches()) refuse("searched scales or learned tables", "it has one way to choose them");
  if (weight.shape[1] % kbit_block != 0) {
    refuse("ragged rows", concat("its blocks of 32 run across rows of ", weight.shape[1],
                                 " inputs; nearest: ", kbit_blocks(weight.shape[1]) * kbit_block));
  }
}

bool accepts(const Scheme& scheme) {
  const std::vector<Scheme> known = formats::scheme_row(formats::SchemeFamily::kbit).schemes();
  return std::ranges::find(known, scheme) != known.end();
}

/// The decoded scale divides: codes are chosen after rounding the scale, so the two roundings do not add up.
struct DecodedScale {
  float table_max;
  ScaleType type;
  formats::StoredScale operator()(float absmax) const noexcept {
    return formats::store_scale(absmax / table_max, type);
  }
};

QuantizeResult quantize_nearest(const TensorView& weight, const Scheme& scheme, std::span<const float> table,
                                const BlockMaxima& maxima) {
  const int exponent = formats::kbit_range_exponent(maxima.smallest, maxima.largest, scheme.scale);
  const std::vector<float> codebook = formats::kbit_scaled_codebook(table, exponent);
  std::vector<float> midpoints(codebook.size() - 1);
  formats::kbit_midpoints(codebook, midpoints);
  QuantizeResult result{allocate_canonical(weight, scheme, codebook), {}};
  const KbitSearch search(midpoints);
  const DecodedScale rule{formats::table_max(codebook), scheme.scale};
  result.stats = KbitEncoder(weight, maxima, search, rule, result.weight).encode();
  result.stats.range_exponent = exponent;
  return result;
}

QuantizeResult run(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  check_kbit_scheme(scheme);
  check_kbit_options(scheme, options);
  check_weight(weight);
  if (options.bnb_compatible) {
    check_bnb(weight, scheme, options);
    return quantize_bnb(weight, scheme, find_block_maxima(weight));
  }
  if (options.feeds_back()) return quantize_with_feedback(weight, scheme, options);
  if (options.searches()) return quantize_searched(weight, scheme, options);
  const std::vector<float> table = chosen_table(scheme, options);
  return quantize_nearest(weight, scheme, table, find_block_maxima(weight));
}

#ifdef W4Q_HAVE_CUDA
/// Feedback through a factor on the CPU stays there.
QuantizeResult run_cuda(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options,
                        device::Context& gpu) {
  if (!options.searches()) return quantize_kbit_cuda(weight, scheme, options, gpu);
  if (options.feeds_back() || options.bnb_compatible) return run(weight, scheme, options);
  check_kbit_scheme(scheme);
  check_kbit_options(scheme, options);
  check_weight(weight);
  return quantize_searched_cuda(weight, scheme, options, gpu);
}
#else
constexpr decltype(QuantizerRow::run_cuda) run_cuda = nullptr;
#endif

}  // namespace

void check_kbit_scheme(const Scheme& scheme) {
  if (accepts(scheme)) return;
  throw Error(ErrorCode::bad_argument, concat("kbit cannot quantize to ", to_string(scheme)))
      .hint("`w4q list` shows the schemes");
}

void check_kbit_options(const Scheme& scheme, const QuantizeOptions& options) {
  check_steps(options.steps, scheme, "kbit searches no ", "--clip belongs to integer methods");
}

std::vector<float> chosen_table(const Scheme& scheme, const QuantizeOptions& options) {
  if (options.table.empty()) {
    return formats::codebook(options.codebook.empty() ? "nf" : options.codebook, scheme.bits);
  }
  formats::check_codebook(options.table, scheme.bits, "the given table");
  if (formats::table_max(options.table) != 1.0f) {
    throw Error(ErrorCode::bad_argument, "the given table is not scaled to a largest magnitude of 1")
        .detail(concat("got ", formats::table_max(options.table)));
  }
  return options.table;
}

BlockMaxima find_block_maxima(const TensorView& weight) {
  const int64_t n = weight.shape[0];
  const int64_t blocks = kbit_blocks(weight.shape[1]);
  BlockMaxima maxima;
  maxima.absmax.resize(static_cast<size_t>(n * blocks));
  float smallest = std::numeric_limits<float>::infinity();
  int64_t bad_row = n;
  std::mutex mutex;
  parallel_for(n, row_grain(weight.shape[1]), [&](int64_t begin, int64_t end) {
    float low = std::numeric_limits<float>::infinity();
    float high = 0;
    int64_t bad = n;
    for (int64_t row = begin; row < end; ++row) {
      const auto absmax =
          std::span(maxima.absmax).subspan(static_cast<size_t>(row * blocks), static_cast<size_t>(blocks));
      block_absmax(row_bytes(weight, row), weight.dtype, absmax);
      for (float value : absmax) {
        if (!std::isfinite(value)) bad = std::min(bad, row);
        if (value != 0) low = std::min(low, value);
        high = std::max(high, value);
      }
    }
    const std::lock_guard lock(mutex);
    smallest = std::min(smallest, low);
    maxima.largest = std::max(maxima.largest, high);
    bad_row = std::min(bad_row, bad);
  });
  if (bad_row < n) refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, bad_row), bad_row);
  maxima.smallest = maxima.largest == 0 ? 0 : smallest;
  return maxima;
}

PackedWeight allocate_canonical(const TensorView& weight, const Scheme& scheme, std::span<const float> codebook) {
  const int64_t n = weight.shape[0];
  const int64_t k = weight.shape[1];
  PackedWeight packed = formats::allocate_canonical(scheme, n, k);
  std::ranges::copy(codebook, packed.plane(PlaneRole::codebook).bytes.as<float>().begin());
  return packed;
}

QuantizerRow kbit_quantizer() {
  return {.name = "kbit",
          .description = "rounds to the nearest entry of a table of 4 to 32 values, no calibration",
          .accepts = accepts,
          .run = run,
          .run_cuda = run_cuda};
}

}  // namespace w4q::quantize
