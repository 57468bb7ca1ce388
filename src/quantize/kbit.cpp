#include "quantize/kbit.h"

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
#include "quantize/kbit_simd.h"

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::kbit_blocks;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

/// Blocks that are widened and encoded together: 16 KiB of fp32, which stay in the first-level cache.
constexpr int64_t chunk_blocks = 128;
/// Weights of a parallel task, about: enough to hide its start.
constexpr int64_t task_weights = 1 << 16;

int64_t row_grain(int64_t k) noexcept { return std::max<int64_t>(1, task_weights / k); }

std::span<const std::byte> row_bytes(const TensorView& weight, int64_t row) {
  const auto bytes = static_cast<size_t>(weight.shape[1] * dtype_bits(weight.dtype) / 8);
  return weight.bytes.subspan(static_cast<size_t>(row) * bytes, bytes);
}

void check_weight(const TensorView& weight) {
  const std::string name = printable(weight.name);
  if (!is_weight_dtype(weight.dtype)) {
    throw Error(ErrorCode::unsupported, concat(name, ": cannot quantize ", dtype_name(weight.dtype)))
        .detail("expected F32, F16 or BF16");
  }
  if (weight.shape.size() != 2) {
    throw Error(ErrorCode::unsupported, concat(name, ": cannot quantize shape ", shape_text(weight.shape)))
        .detail("expected a matrix [outputs, inputs]");
  }
  formats::check_dimensions(weight.shape[0], weight.shape[1], weight.name);
  const int64_t expected = byte_count(weight.dtype, weight.shape);
  if (static_cast<int64_t>(weight.bytes.size()) != expected) {
    throw Error(ErrorCode::bad_argument, concat(name, ": wrong number of bytes"))
        .detail(concat("expected ", expected, ", got ", weight.bytes.size()));
  }
}

void check_scheme(const Scheme& scheme) {
  const std::vector<Scheme> known = formats::scheme_row(formats::SchemeFamily::kbit).schemes();
  if (std::ranges::find(known, scheme) != known.end()) return;
  throw Error(ErrorCode::bad_argument, concat("kbit cannot quantize to ", to_string(scheme)))
      .hint("`w4q list` shows the schemes");
}

void check_bnb(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  const auto refuse = [&](std::string_view what, std::string_view why) {
    throw Error(ErrorCode::unsupported, concat(printable(weight.name), ": bitsandbytes' format has no ", what))
        .detail(why)
        .hint("leave out --bnb-compatible");
  };
  if (scheme.scale != ScaleType::e4m4) refuse("f16 scales", concat("expected E4M4 scales, got ", to_string(scheme)));
  if (!options.table.empty()) refuse("other tables", "expected its own table, got one from a file");
  if (weight.shape[1] % kbit_block != 0) {
    refuse("ragged rows", concat("its blocks of 32 run across rows of ", weight.shape[1],
                                 " inputs; nearest: ", kbit_blocks(weight.shape[1]) * kbit_block));
  }
}

[[noreturn]] void refuse_non_finite(const TensorView& weight, int64_t row) {
  std::vector<float> values(static_cast<size_t>(weight.shape[1]));
  widen(row_bytes(weight, row), weight.dtype, values);
  const auto bad = std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
  throw Error(ErrorCode::bad_file, concat(printable(weight.name), ": ", std::isnan(*bad) ? "NaN" : "infinity",
                                          " at row ", row, ", column ", bad - values.begin()))
      .hint("keep this tensor at 16 bit (--keep), or repair the checkpoint");
}

/// The table as it will be stored, without the factor.
std::vector<float> chosen_table(const Scheme& scheme, const QuantizeOptions& options) {
  if (options.table.empty()) return formats::codebook(options.codebook, scheme.bits);
  formats::check_codebook(options.table, scheme.bits, "the given table");
  if (formats::kbit_table_max(options.table) != 1.0f) {
    throw Error(ErrorCode::bad_argument, "the given table is not scaled to a largest magnitude of 1")
        .detail(concat("got ", formats::kbit_table_max(options.table)));
  }
  return options.table;
}

/// Encodes rows of one weight. `scales` and `words` are the planes.
class RowEncoder {
 public:
  RowEncoder(const TensorView& weight, const BlockMaxima& maxima, std::span<const float> codebook, PackedWeight& packed)
      : weight_(weight),
        maxima_(maxima),
        search_(codebook),
        table_max_(formats::kbit_table_max(codebook)),
        scale_type_(packed.scheme.scale),
        blocks_(kbit_blocks(packed.k)),
        words_(packed.plane(PlaneRole::codes).bytes.as<uint32_t>()),
        scale_bytes_(packed.plane(PlaneRole::scales).bytes.bytes()) {}

  QuantizeStats encode_row(int64_t row) const {
    QuantizeStats stats;
    for (int64_t block = 0; block < blocks_; block += chunk_blocks) {
      encode_chunk(row, block, std::min(chunk_blocks, blocks_ - block), stats);
    }
    const int64_t k = weight_.shape[1];
    const uint32_t mask = formats::kbit_lane_mask(k, blocks_ - 1);
    for (uint32_t& word : block_words((row + 1) * blocks_ - 1, 1)) word &= mask;
    return stats;
  }

 private:
  std::span<uint32_t> block_words(int64_t first, int64_t count) const {
    const auto bits = static_cast<size_t>(search_.bits);
    return words_.subspan(static_cast<size_t>(first) * bits, static_cast<size_t>(count) * bits);
  }

  void encode_chunk(int64_t row, int64_t block, int64_t count, QuantizeStats& stats) const {
    alignas(64) float values[chunk_blocks * kbit_block];
    float scales[chunk_blocks];
    const int64_t first = row * blocks_ + block;
    for (int64_t i = 0; i < count; ++i) scales[i] = encode_scale(first + i, stats);
    const int64_t size = std::min(count * kbit_block, weight_.shape[1] - block * kbit_block);
    const auto element = static_cast<size_t>(dtype_bits(weight_.dtype) / 8);
    widen(row_bytes(weight_, row).subspan(static_cast<size_t>(block) * kbit_block * element), weight_.dtype,
          {values, static_cast<size_t>(size)});
    std::fill(values + size, values + count * kbit_block, 0.0f);
    encode_blocks(search_, {values, static_cast<size_t>(count * kbit_block)}, {scales, static_cast<size_t>(count)},
                  block_words(first, count));
  }

  /// Stores the scale of a block, returns its decoded value.
  float encode_scale(int64_t index, QuantizeStats& stats) const {
    const float absmax = maxima_.absmax[static_cast<size_t>(index)];
    const formats::EncodedScale scale = formats::kbit_encode_scale(absmax, table_max_, scale_type_);
    if (scale_type_ == ScaleType::e4m4) {
      scale_bytes_[static_cast<size_t>(index)] = static_cast<std::byte>(scale.bits);
    } else {
      std::memcpy(scale_bytes_.data() + 2 * index, &scale.bits, sizeof scale.bits);
    }
    stats.zero_blocks += absmax == 0 ? 1 : 0;
    stats.saturated_scales += scale.saturated ? 1 : 0;
    stats.subnormal_scales += absmax != 0 && scale.value < formats::kbit_scale_min_normal(scale_type_) ? 1 : 0;
    return scale.value;
  }

  const TensorView& weight_;
  const BlockMaxima& maxima_;
  KbitSearch search_;
  float table_max_;
  ScaleType scale_type_;
  int64_t blocks_;
  std::span<uint32_t> words_;
  std::span<std::byte> scale_bytes_;
};

void add(QuantizeStats& sum, const QuantizeStats& part) noexcept {
  sum.zero_blocks += part.zero_blocks;
  sum.saturated_scales += part.saturated_scales;
  sum.subnormal_scales += part.subnormal_scales;
}

QuantizeResult quantize_nearest(const TensorView& weight, const Scheme& scheme, std::span<const float> table,
                                const BlockMaxima& maxima) {
  const int64_t n = weight.shape[0];
  const int64_t k = weight.shape[1];
  QuantizeResult result;
  result.stats.blocks = n * kbit_blocks(k);
  result.stats.range_exponent = formats::kbit_range_exponent(maxima.smallest, maxima.largest, scheme.scale);
  const std::vector<float> codebook = formats::kbit_scaled_codebook(table, result.stats.range_exponent);
  result.weight = formats::allocate_planes(scheme, formats::canonical_layout, n, k, formats::kbit_planes(scheme, n, k));
  std::ranges::copy(codebook, result.weight.plane(PlaneRole::codebook).bytes.as<float>().begin());

  const RowEncoder encoder(weight, maxima, codebook, result.weight);
  std::mutex mutex;
  parallel_for(n, row_grain(k), [&](int64_t begin, int64_t end) {
    QuantizeStats stats;
    for (int64_t row = begin; row < end; ++row) add(stats, encoder.encode_row(row));
    const std::lock_guard lock(mutex);
    add(result.stats, stats);
  });
  return result;
}

QuantizeResult run(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  check_scheme(scheme);
  check_weight(weight);
  if (options.bnb_compatible) {
    check_bnb(weight, scheme, options);
    return quantize_bnb(weight, scheme, find_block_maxima(weight));
  }
  const std::vector<float> table = chosen_table(scheme, options);
  return quantize_nearest(weight, scheme, table, find_block_maxima(weight));
}

}  // namespace

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
  if (bad_row < n) refuse_non_finite(weight, bad_row);
  maxima.smallest = maxima.largest == 0 ? 0 : smallest;
  return maxima;
}

QuantizerRow kbit_quantizer() {
  return {.name = "kbit",
          .description = "rounds to the nearest entry of a table of 4 to 32 values, no calibration",
          .needs_statistics = false,
          .run = run};
}

}  // namespace w4q::quantize
