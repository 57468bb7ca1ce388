#include "quantize/rotated.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "quantize/feedback.h"
#include "quantize/kbit_search.h"
#include "quantize/kbit_simd.h"
#include "quantize/rtn.h"
#include "quantize/source_matrix.h"
#ifdef W4Q_HAVE_CUDA
#include "quantize/rotated_cuda.h"
#endif

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

bool accepts(const Scheme& scheme) { return scheme.family == formats::SchemeFamily::rotated; }

/// The norm of every group of a matrix.
struct Norms {
  std::vector<double> values;  ///< n × groups
  double smallest = 0;         ///< of those that are not zero
  double largest = 0;
};

Norms find_norms(const TensorView& weight, int64_t group) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  const int64_t groups = (k + group - 1) / group;
  Norms norms{std::vector<double>(static_cast<size_t>(n * groups)), std::numeric_limits<double>::infinity(), 0};
  int64_t bad_row = n;
  std::mutex mutex;
  parallel_for(n, row_grain(k), [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(k));
    double low = std::numeric_limits<double>::infinity(), high = 0;
    int64_t bad = n;
    for (int64_t row = begin; row < end; ++row) {
      widen(row_bytes(weight, row), weight.dtype, values);
      for (int64_t g = 0; g < groups; ++g) {
        const auto part = std::span<const float>(values).subspan(static_cast<size_t>(g * group),
                                                                 static_cast<size_t>(std::min(group, k - g * group)));
        const double norm = formats::rotated_norm(part, group);
        norms.values[static_cast<size_t>(row * groups + g)] = norm;
        if (!std::isfinite(norm)) bad = std::min(bad, row);
        if (norm != 0) low = std::min(low, norm);
        high = std::max(high, norm);
      }
    }
    const std::lock_guard lock(mutex);
    norms.smallest = std::min(norms.smallest, low);
    norms.largest = std::max(norms.largest, high);
    bad_row = std::min(bad_row, bad);
  });
  if (bad_row < n) refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, bad_row), bad_row);
  if (norms.largest == 0) norms.smallest = 0;
  return norms;
}

#ifdef W4Q_HAVE_CUDA
/// The same of norms that are known.
Norms summarize(std::vector<double> values, int64_t groups, const TensorView& weight) {
  Norms norms{std::move(values), std::numeric_limits<double>::infinity(), 0};
  for (size_t i = 0; i < norms.values.size(); ++i) {
    const double norm = norms.values[i];
    if (!std::isfinite(norm)) {
      const int64_t row = static_cast<int64_t>(i) / groups;
      refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, row), row);
    }
    if (norm != 0) norms.smallest = std::min(norms.smallest, norm);
    norms.largest = std::max(norms.largest, norm);
  }
  if (norms.largest == 0) norms.smallest = 0;
  return norms;
}
#endif

/// Writes norms and codes of one matrix into the planes of one weight.
class RotatedEncoder {
 public:
  RotatedEncoder(const TensorView& weight, const Norms& norms, PackedWeight& packed)
      : weight_(weight),
        norms_(norms),
        packed_(packed),
        group_(formats::rotated_group(packed.scheme, packed.k)),
        groups_(formats::rotated_groups(packed.scheme, packed.k)),
        gain_(formats::rotated_gain(codebook(), packed.scheme.bits)),
        search_(RotatedLevels(codebook(), group_).midpoints) {}

  void encode() {
    parallel_for(packed_.n, row_grain(packed_.k), [&](int64_t begin, int64_t end) {
      const auto blocks = static_cast<size_t>(formats::kbit_blocks(packed_.k));
      std::vector<float> values(blocks * kbit_block), divisors(blocks);
      for (int64_t row = begin; row < end; ++row) encode_row(row, values, divisors);
    });
  }

  /// Stores the norm of a group; returns what its values are divided by.
  float encode_norm(size_t index) {
    const auto stored = formats::rotated_scale(norms_.values[index] / gain_, packed_.scheme.scale);
    formats::put_scale(packed_.plane(PlaneRole::scales), index, stored.bits);
    return stored.value;
  }

 private:
  std::span<const float> codebook() const { return packed_.plane(PlaneRole::codebook).bytes.as<float>(); }

  /// `values` and what they are divided by, block for block, are scratch.
  void encode_row(int64_t row, std::span<float> values, std::span<float> divisors) {
    const auto k = static_cast<size_t>(packed_.k);
    widen(row_bytes(weight_, row), weight_.dtype, values.first(k));
    std::ranges::fill(values.subspan(k), 0.0f);
    for (int64_t g = 0; g < groups_; ++g) {
      const auto first = static_cast<size_t>(g * group_);
      const size_t size = std::min(static_cast<size_t>(group_), k - first);
      const float norm = encode_norm(static_cast<size_t>(row * groups_ + g));
      std::ranges::fill(divisors.subspan(first / kbit_block, (size + kbit_block - 1) / kbit_block), norm);
    }
    const size_t words = divisors.size() * static_cast<size_t>(packed_.scheme.bits);
    const auto codes =
        packed_.plane(PlaneRole::codes).bytes.as<uint32_t>().subspan(static_cast<size_t>(row) * words, words);
    encode_blocks(search_, values, divisors, codes);
    const uint32_t mask = formats::kbit_lane_mask(packed_.k, static_cast<int64_t>(divisors.size()) - 1);
    for (uint32_t& word : codes.last(static_cast<size_t>(packed_.scheme.bits))) word &= mask;
  }

  const TensorView& weight_;
  const Norms& norms_;
  PackedWeight& packed_;
  int64_t group_;
  int64_t groups_;
  double gain_;
  KbitSearch search_;
};

int exponent_of(const Norms& norms, std::span<const float> table, const Scheme& scheme) {
  const double gain = formats::rotated_gain(table, scheme.bits);
  return rotated_range_exponent(norms.smallest / gain, norms.largest / gain, scheme.scale);
}

QuantizeResult run(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  check_rotated(scheme, options);
  if (options.feeds_back()) return quantize_with_feedback(weight, scheme, options);
  check_weight(weight);
  const int64_t n = weight.shape[0], k = weight.shape[1], group = formats::rotated_group(scheme, k);
  const Norms norms = find_norms(weight, group);
  const auto table = rotated_table(scheme, options);
  const int exponent = exponent_of(norms, table, scheme);
  PackedWeight packed = allocate_rotated(scheme, n, k, table, exponent);
  if (options.scales() == Scales::search) {
    const RotatedLevels levels(packed.plane(PlaneRole::codebook).bytes.as<float>(), group);
    encode_searched(weight, channel_importance(options, k), KbitLevels(levels.levels), options.scales(), packed);
  } else {
    RotatedEncoder(weight, norms, packed).encode();
  }
  const QuantizeStats stats = rotated_stats(packed, exponent);
  return {std::move(packed), stats};
}

#ifdef W4Q_HAVE_CUDA
/// Searched norms have no way on the GPU.
QuantizeResult run_cuda(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options,
                        device::Context& gpu) {
  if (options.searches()) return run(weight, scheme, options);
  check_rotated(scheme, options);
  check_weight(weight);
  const int64_t group = formats::rotated_group(scheme, weight.shape[1]);
  const int64_t groups = formats::rotated_groups(scheme, weight.shape[1]);
  const Norms norms = summarize(rotated_norms_cuda(weight, group, gpu), groups, weight);
  const auto table = rotated_table(scheme, options);
  const int exponent = exponent_of(norms, table, scheme);
  PackedWeight packed = allocate_rotated(scheme, weight.shape[0], weight.shape[1], table, exponent);
  RotatedEncoder encoder(weight, norms, packed);
  std::vector<float> divisors(norms.values.size());
  for (size_t i = 0; i < divisors.size(); ++i) divisors[i] = encoder.encode_norm(i);
  const std::span<const float> codebook = packed.plane(PlaneRole::codebook).bytes.as<float>();
  rotated_codes_cuda(weight, divisors, RotatedLevels(codebook, group).midpoints, packed, gpu);
  const QuantizeStats stats = rotated_stats(packed, exponent);
  return {std::move(packed), stats};
}
#else
constexpr decltype(QuantizerRow::run_cuda) run_cuda = nullptr;
#endif

}  // namespace

RotatedLevels::RotatedLevels(std::span<const float> codebook, int64_t group)
    : levels(codebook.size()), midpoints(codebook.size() - 1) {
  formats::rotated_levels(codebook, group, levels);
  formats::kbit_midpoints(levels, midpoints);
}

void check_rotated(const Scheme& scheme, const QuantizeOptions& options) {
  if (!accepts(scheme)) {
    throw Error(ErrorCode::bad_argument, concat("rotated cannot quantize to ", to_string(scheme)))
        .detail("expected a scheme such as rotated4-d128")
        .hint("`w4q list` shows the schemes");
  }
  constexpr std::string_view refusal = "rotated has no ", hint = "it belongs to another --method";
  if (options.bnb_compatible) {
    throw Error(ErrorCode::bad_argument, concat(refusal, "bitsandbytes-compatible mode")).hint(hint);
  }
  check_steps(options.steps, scheme, refusal, hint);
}

std::vector<float> rotated_table(const Scheme& scheme, const QuantizeOptions& options) {
  if (options.table.empty() && (options.codebook.empty() || options.codebook == "normal")) {
    const auto levels = formats::normal_codebook(scheme.bits);
    return {levels.begin(), levels.end()};
  }
  if (options.table.empty()) return formats::codebook(options.codebook, scheme.bits);
  formats::check_codebook(options.table, scheme.bits, "the given table");
  return options.table;
}

PackedWeight allocate_rotated(const Scheme& scheme, int64_t n, int64_t k, std::span<const float> table,
                              int range_exponent) {
  PackedWeight packed = formats::allocate_canonical(scheme, n, k);
  const auto codebook = formats::kbit_scaled_codebook(table, range_exponent);
  std::ranges::copy(codebook, packed.plane(PlaneRole::codebook).bytes.as<float>().begin());
  return packed;
}

QuantizeStats rotated_stats(const PackedWeight& packed, int range_exponent) {
  const formats::Plane& norms = packed.plane(PlaneRole::scales);
  const formats::ScaleCodec& codec = formats::scale_codec(packed.scheme.scale);
  QuantizeStats stats;
  stats.range_exponent = range_exponent;
  stats.blocks = element_count(norms.spec.shape);
  for (size_t i = 0; i < static_cast<size_t>(stats.blocks); ++i) {
    const float norm = formats::load_scale(norms, i);
    stats.zero_blocks += norm == 0 ? 1 : 0;
    stats.saturated_scales += norm == codec.largest ? 1 : 0;
    stats.subnormal_scales += norm != 0 && norm < codec.smallest_normal ? 1 : 0;
  }
  return stats;
}

int rotated_range_exponent(double smallest, double largest, ScaleType type) noexcept {
  if (type == ScaleType::f32 || largest == 0) return 0;
  constexpr double most = std::numeric_limits<float>::max();
  return formats::kbit_range_exponent(static_cast<float>(std::min(smallest, most)),
                                      static_cast<float>(std::min(largest, most)), type);
}

QuantizerRow rotated_quantizer() {
  return {.name = "rotated",
          .description = "rotates the input of every linear, then rounds to the levels of N(0, 1); no calibration",
          .accepts = accepts,
          .run = run,
          .run_cuda = run_cuda};
}

}  // namespace w4q::quantize
