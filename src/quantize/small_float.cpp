#include "quantize/small_float.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/table/table_format.h"
#include "quantize/feedback_float.h"
#include "quantize/kbit_search.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;
using formats::TableFormat;

bool accepts(const Scheme& scheme) { return scheme.family == formats::SchemeFamily::small_float; }

TableFormat format_of(const Scheme& scheme) { return formats::scheme_row(scheme.family).table(scheme); }

/// A row in fp32 with the place of its scales.
struct FloatRow {
  std::span<const float> values;
  int64_t first_scale = 0;  ///< in the plane
};

/// Every row of a weight, in parallel: body(index, row).
template <class Body>
void each_row(const TensorView& weight, const Scheme& scheme, const Body& body) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  const TableFormat format = format_of(scheme);
  parallel_for(n, row_grain(k), [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(k));
    for (int64_t row = begin; row < end; ++row) {
      widen(row_bytes(weight, row), weight.dtype, values);
      body(row, FloatRow{values, formats::table_place(format, k, row, 0, 0).scale});
    }
  });
}

/// The nearest value of E4M3, ties to even, at most 448.
float nearest_e4m3(float x) noexcept {
  const float magnitude = std::min(std::abs(x), 448.0f);
  const uint32_t exponent = std::bit_cast<uint32_t>(magnitude) & 0x7F800000u;
  const float step = std::max(std::bit_cast<float>(exponent) * 0x1p-3f, 0x1p-9f);
  constexpr float to_integer = 0x1p23f;
  return std::copysign((magnitude / step + to_integer - to_integer) * step, x);
}

float nearest_float(float x, int bits) noexcept {
  return bits == 8 ? nearest_e4m3(x) : formats::small_float_table(bits)[formats::small_float_code(x, bits)];
}

/// Codes under scales that stand in the planes.
void encode_nearest(const TensorView& weight, PackedWeight& packed) {
  const TableFormat format = format_of(packed.scheme);
  const int64_t block = float_block(packed.scheme, packed.k);
  each_row(weight, packed.scheme, [&](int64_t row, const FloatRow& source) {
    std::vector<uint8_t> codes(source.values.size());
    for (int64_t begin = 0; begin < packed.k; begin += block) {
      const float scale = formats::full_scale_at(format, packed, source.first_scale + begin / block);
      const auto end = static_cast<size_t>(std::min(begin + block, packed.k));
      for (auto at = static_cast<size_t>(begin); at < end; ++at) {
        codes[at] = formats::small_float_code(source.values[at] / scale, packed.scheme.bits);
      }
    }
    formats::table_write_codes(format, packed, row, codes);
  });
}

void store_plain_scales(const FloatMaxima& maxima, PackedWeight& packed) {
  const float factor = float_factor(packed);
  formats::Plane& scales = packed.plane(PlaneRole::scales);
  for (size_t i = 0; i < maxima.absmax.size(); ++i) {
    formats::put_scale(scales, i, formats::small_float_scale(packed.scheme, maxima.absmax[i], factor).bits);
  }
}

/// Scales that rows have for themselves, and the codes under them, sixteen rows at a time.
class PanelEncoder {
 public:
  PanelEncoder(const TensorView& weight, std::span<const float> importance, PackedWeight& packed)
      : weight_(weight),
        importance_(importance),
        packed_(packed),
        format_(format_of(packed.scheme)),
        levels_(KbitLevels::small_floats(packed.scheme.bits, float_factor(packed))),
        block_(float_block(packed.scheme, packed.k)),
        blocks_((packed.k + block_ - 1) / block_) {}

  void encode() {
    parallel_for((packed_.n + panel_rows - 1) / panel_rows, 1, [&](int64_t panel, int64_t) {
      encode(panel * panel_rows, std::min<int64_t>(panel_rows, packed_.n - panel * panel_rows));
    });
  }

 private:
  void encode(int64_t first, int64_t rows) {
    const int64_t k = packed_.k;
    std::vector<float> values(static_cast<size_t>(panel_rows * k)), target(static_cast<size_t>(panel_rows * block_));
    std::vector<uint8_t> codes(values.size());
    for (int64_t r = 0; r < rows; ++r) {
      widen(row_bytes(weight_, first + r), weight_.dtype,
            std::span(values).subspan(static_cast<size_t>(r * k), static_cast<size_t>(k)));
    }
    PanelCodes found;
    for (int64_t b = 0; b < blocks_; ++b) {
      const int64_t begin = b * block_, columns = std::min(block_, k - begin);
      for (int64_t r = 0; r < panel_rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          target[static_cast<size_t>(c * panel_rows + r)] = values[static_cast<size_t>(r * k + begin + c)];
        }
      }
      const PanelBlock block{
          .target = target.data(), .importance = importance_.data() + begin, .columns = static_cast<int>(columns)};
      const PanelScales scales = searched_scales(block, levels_, packed_.scheme.scale);
      panel_codes(block, levels_, scales, found);
      for (int64_t r = 0; r < rows; ++r) {
        formats::put_scale(packed_.plane(PlaneRole::scales), static_cast<size_t>((first + r) * blocks_ + b),
                           scales.bits[static_cast<size_t>(r)]);
        for (int64_t c = 0; c < columns; ++c) {
          codes[static_cast<size_t>(r * k + begin + c)] = found.codes[static_cast<size_t>(c * panel_rows + r)];
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      formats::table_write_codes(format_, packed_, first + r,
                                 std::span(codes).subspan(static_cast<size_t>(r * k), static_cast<size_t>(k)));
    }
  }

  const TensorView& weight_;
  std::span<const float> importance_;
  PackedWeight& packed_;
  TableFormat format_;
  KbitLevels levels_;
  int64_t block_, blocks_;
};

/// Scales that are tried for blocks of many rows: eighths of an octave around that of their maximum; powers of two.
constexpr int shared_steps = 8;

std::vector<formats::StoredScale> shared_candidates(const Scheme& scheme, float absmax) {
  const auto rule = formats::small_float_scale(scheme, absmax, 1.0f);
  std::vector<formats::StoredScale> result{rule};
  if (absmax == 0) return result;
  const bool powers = scheme.scale == ScaleType::e8m0;
  for (int step = powers ? -1 : -shared_steps; step <= (powers ? 2 : shared_steps); ++step) {
    const float factor = powers ? std::ldexp(1.0f, step) : std::exp2(static_cast<float>(step) / shared_steps);
    if (step != 0) result.push_back(formats::positive_scale(rule.value * factor, scheme.scale));
  }
  return result;
}

QuantizeResult run(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  check_small_float(scheme, options);
  check_weight(weight);
  if (options.feeds_back()) return float_feedback(weight, scheme, options);
  const FloatMaxima maxima = find_float_maxima(weight, scheme);
  QuantizeResult result{allocate_small_float(weight, scheme, maxima, options), {}};
  const bool searches = options.scales() == Scales::search;
  const auto importance = channel_importance(options, weight.shape[1]);
  if (searches && !formats::shares_rows(scheme)) {
    PanelEncoder(weight, importance, result.weight).encode();
  } else {
    if (searches) {
      choose_shared_scales(weight, maxima, importance, options.scales(), result.weight);
    } else {
      store_plain_scales(maxima, result.weight);
    }
    encode_nearest(weight, result.weight);
  }
  result.stats = float_stats(result.weight, maxima);
  return result;
}

}  // namespace

void check_small_float(const Scheme& scheme, const QuantizeOptions& options) {
  constexpr std::string_view refusal = "float has no ", hint = "it belongs to other methods";
  const auto refuse = [&](std::string_view what) {
    throw Error(ErrorCode::bad_argument, concat(refusal, what)).hint(hint);
  };
  if (!accepts(scheme)) {
    throw Error(ErrorCode::bad_argument, concat("float cannot quantize to ", formats::to_string(scheme)))
        .hint("`w4q list` shows the schemes");
  }
  if (options.bnb_compatible) refuse("bitsandbytes-compatible mode");
  if (!options.table.empty() || !options.codebook.empty()) refuse("codebook");
  check_steps(options.steps, scheme, refusal, hint);
}

int64_t float_block(const Scheme& scheme, int64_t k) noexcept { return scheme.block <= 0 ? k : scheme.block; }

FloatMaxima find_float_maxima(const TensorView& weight, const Scheme& scheme) {
  const int64_t n = weight.shape[0], k = weight.shape[1], block = float_block(scheme, k);
  const int64_t blocks = (k + block - 1) / block;
  std::vector<float> rows(static_cast<size_t>(n * blocks));
  int64_t bad_row = n;
  std::mutex mutex;
  each_row(weight, scheme, [&](int64_t row, const FloatRow& source) {
    bool finite = true;
    for (int64_t b = 0; b < blocks; ++b) {
      const auto first = static_cast<size_t>(b * block);
      const auto part =
          source.values.subspan(first, std::min(static_cast<size_t>(block), source.values.size() - first));
      finite = finite && std::ranges::all_of(part, [](float value) { return std::isfinite(value); });
      rows[static_cast<size_t>(row * blocks + b)] = formats::table_max(part);
    }
    if (finite) return;
    const std::lock_guard lock(mutex);
    bad_row = std::min(bad_row, row);
  });
  if (bad_row < n) refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, bad_row), bad_row);
  FloatMaxima maxima{{}, formats::table_max(rows)};
  if (!formats::shares_rows(scheme)) {
    maxima.absmax = std::move(rows);
    return maxima;
  }
  const TableFormat format = format_of(scheme);
  maxima.absmax.resize(static_cast<size_t>((formats::scale_row(format, n - 1) + 1) * blocks));
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t b = 0; b < blocks; ++b) {
      float& largest = maxima.absmax[static_cast<size_t>(formats::scale_row(format, row) * blocks + b)];
      largest = std::max(largest, rows[static_cast<size_t>(row * blocks + b)]);
    }
  }
  return maxima;
}

PackedWeight allocate_small_float(const TensorView& weight, const Scheme& scheme, const FloatMaxima& maxima,
                                  const QuantizeOptions& options) {
  PackedWeight packed = formats::allocate_canonical(scheme, weight.shape[0], weight.shape[1]);
  std::ranges::copy(formats::small_float_table(scheme.bits),
                    packed.plane(PlaneRole::codebook).bytes.as<float>().begin());
  if (scheme.scale != ScaleType::e4m3) return packed;
  const float factor = options.tensor_factor != 0 ? options.tensor_factor : formats::small_float_factor(maxima.largest);
  packed.plane(PlaneRole::tensor_scale).bytes.as<float>()[0] = scheme.divisor ? 1 / factor : factor;
  return packed;
}

float float_factor(const PackedWeight& packed) {
  const float stored = formats::tensor_factor(packed);
  return packed.scheme.divisor ? 1 / stored : stored;
}

void choose_shared_scales(const TensorView& weight, const FloatMaxima& maxima, std::span<const float> importance,
                          Scales rule, PackedWeight& packed) {
  if (rule == Scales::absmax) return store_plain_scales(maxima, packed);
  const int64_t n = packed.n, k = packed.k, block = float_block(packed.scheme, k), blocks = (k + block - 1) / block;
  std::vector<std::vector<formats::StoredScale>> candidates;
  for (const float absmax : maxima.absmax) candidates.push_back(shared_candidates(packed.scheme, absmax));
  constexpr size_t most = 2 * shared_steps + 1;
  using Errors = std::array<double, most>;
  std::vector<Errors> rows(static_cast<size_t>(n * blocks));  // added up in order
  each_row(weight, packed.scheme, [&](int64_t row, const FloatRow& source) {
    for (int64_t col = 0; col < k; ++col) {
      Errors& errors = rows[static_cast<size_t>(row * blocks + col / block)];
      const auto& tried = candidates[static_cast<size_t>(source.first_scale + col / block)];
      const float value = source.values[static_cast<size_t>(col)];
      for (size_t i = 0; i < tried.size(); ++i) {
        const double miss =
            static_cast<double>(value) -
            static_cast<double>(nearest_float(value / tried[i].value, packed.scheme.bits) * tried[i].value);
        errors[i] += miss * miss * static_cast<double>(importance[static_cast<size_t>(col)]);
      }
    }
  });
  const TableFormat format = format_of(packed.scheme);
  std::vector<Errors> sums(candidates.size());
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t b = 0; b < blocks; ++b) {
      Errors& sum = sums[static_cast<size_t>(formats::scale_row(format, row) * blocks + b)];
      for (size_t i = 0; i < most; ++i) sum[i] += rows[static_cast<size_t>(row * blocks + b)][i];
    }
  }
  for (size_t i = 0; i < candidates.size(); ++i) {
    const auto end = sums[i].begin() + static_cast<std::ptrdiff_t>(candidates[i].size());
    const auto best = static_cast<size_t>(std::min_element(sums[i].begin(), end) - sums[i].begin());
    formats::put_scale(packed.plane(PlaneRole::scales), i, candidates[i][best].bits);
  }
}

QuantizeStats float_stats(const PackedWeight& packed, const FloatMaxima& maxima) {
  const formats::ScaleCodec& codec = formats::scale_codec(packed.scheme.scale);
  QuantizeStats stats;
  stats.blocks = std::ssize(maxima.absmax);
  for (size_t i = 0; i < maxima.absmax.size(); ++i) {
    const float scale = formats::load_scale(packed.plane(PlaneRole::scales), i);
    stats.zero_blocks += maxima.absmax[i] == 0 ? 1 : 0;
    stats.saturated_scales += scale == codec.largest ? 1 : 0;
    stats.subnormal_scales += scale < codec.smallest_normal ? 1 : 0;
  }
  return stats;
}

void round_small_floats(const Scheme& scheme, MatrixView<float> weights) {
  if (weights.rows == 0 || weights.cols == 0) return;
  const int64_t block = float_block(scheme, weights.cols);
  const int64_t rows = scheme.block == formats::whole_tensor ? weights.rows : formats::shares_rows(scheme) ? block : 1;
  const auto absmax = [&](int64_t first, int64_t last, int64_t from, int64_t to) {
    float largest = 0;
    for (int64_t r = first; r < last; ++r) {
      largest = std::max(largest, formats::table_max({weights.row(r) + from, static_cast<size_t>(to - from)}));
    }
    return largest;
  };
  const float whole = scheme.scale == ScaleType::e4m3 ? absmax(0, weights.rows, 0, weights.cols) : 0;
  const float factor = formats::small_float_factor(whole);
  parallel_for((weights.rows + rows - 1) / rows, 1, [&](int64_t part, int64_t) {
    const int64_t first = part * rows, last = std::min(first + rows, weights.rows);
    for (int64_t from = 0; from < weights.cols; from += block) {
      const int64_t to = std::min(from + block, weights.cols);
      const float scale = formats::small_float_scale(scheme, absmax(first, last, from, to), factor).value * factor;
      for (int64_t r = first; r < last; ++r) {
        float* const row = weights.row(r);
        for (int64_t c = from; c < to; ++c) row[c] = nearest_float(row[c] / scale, scheme.bits) * scale;
      }
    }
  });
}

QuantizerRow small_float_quantizer() {
  return {.name = "float",
          .description = "rounds to NVFP4, MXFP4, MXFP8 or FP8; scales from each block's maximum, or searched",
          .accepts = accepts,
          .run = run,
          .run_cuda = nullptr};
}

}  // namespace w4q::quantize
