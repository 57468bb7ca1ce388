#include "quantize/lut.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/bit_stream.h"
#include "formats/codebook.h"
#include "formats/lut.h"
#include "formats/table/nested_scales.h"
#include "formats/table/table_format.h"
#include "quantize/feedback_float.h"
#include "quantize/kbit_search.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;

constexpr std::string_view default_table = "nf4";
constexpr std::string_view descending_table = "fp4";  ///< bit 3 of its codes is the sign

bool accepts(const Scheme& scheme) { return scheme.family == formats::SchemeFamily::lut; }

std::vector<float> chosen_lut(const QuantizeOptions& options) {
  if (!options.table.empty()) {
    formats::check_codebook(options.table, formats::lut_bits, "the given table");
    return options.table;
  }
  if (options.codebook.empty() || options.codebook == default_table) {
    return {formats::nf4_table().begin(), formats::nf4_table().end()};
  }
  if (options.codebook == descending_table) return {formats::fp4_table().begin(), formats::fp4_table().end()};
  return formats::codebook(options.codebook, formats::lut_bits);
}

/// The blocks of a weight taken flat, in parallel: body(first block, the values of some blocks).
template <class Body>
void each_run(const TensorView& weight, int block, const Body& body) {
  const int64_t count = weight.shape[0] * weight.shape[1], blocks = (count + block - 1) / block;
  const int64_t bytes = dtype_bits(weight.dtype) / 8;
  parallel_for(blocks, row_grain(block), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * block, size = std::min(end * block, count) - first;
    std::vector<float> values(static_cast<size_t>(size));
    widen(weight.bytes.subspan(static_cast<size_t>(first * bytes), static_cast<size_t>(size * bytes)), weight.dtype,
          values);
    body(begin, std::span<const float>(values));
  });
}

/// Values of one block, by its index from the first.
std::span<const float> block_of_run(std::span<const float> values, size_t index, int block) {
  const auto size = static_cast<size_t>(block);
  return values.subspan(index * size, std::min(size, values.size() - index * size));
}

std::vector<float> block_maxima(const TensorView& weight, int block) {
  const int64_t count = weight.shape[0] * weight.shape[1];
  std::vector<float> maxima(static_cast<size_t>((count + block - 1) / block));
  std::atomic<int64_t> bad = count;  // the first block with a NaN or infinity, times its size
  each_run(weight, block, [&](int64_t first, std::span<const float> values) {
    for (size_t b = 0; b * static_cast<size_t>(block) < values.size(); ++b) {
      const auto part = block_of_run(values, b, block);
      maxima[static_cast<size_t>(first) + b] = formats::table_max(part);
      const auto wrong = std::ranges::find_if_not(part, [](float x) { return std::isfinite(x); });
      if (wrong == part.end()) continue;
      const int64_t at = (first + static_cast<int64_t>(b)) * block + (wrong - part.begin());
      for (int64_t seen = bad; at < seen && !bad.compare_exchange_weak(seen, at);) {
      }
    }
  });
  if (bad < count) {
    const int64_t row = bad / weight.shape[1];
    refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, row), row);
  }
  return maxima;
}

/// The f32 scale with the least error for each block; rows are whole blocks.
std::vector<float> searched_maxima(const TensorView& weight, int block, const KbitLevels& levels,
                                   std::span<const float> importance) {
  const int64_t n = weight.shape[0], k = weight.shape[1], blocks = k / block;
  std::vector<float> scales(static_cast<size_t>(n * blocks));
  parallel_for((n + panel_rows - 1) / panel_rows, 1, [&](int64_t panel, int64_t) {
    const int64_t first = panel * panel_rows, rows = std::min<int64_t>(panel_rows, n - first);
    std::vector<float> values(static_cast<size_t>(panel_rows * k)), target(static_cast<size_t>(panel_rows * block));
    for (int64_t r = 0; r < rows; ++r) {
      widen(row_bytes(weight, first + r), weight.dtype,
            std::span(values).subspan(static_cast<size_t>(r * k), static_cast<size_t>(k)));
    }
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t r = 0; r < panel_rows; ++r) {
        for (int64_t c = 0; c < block; ++c) {
          target[static_cast<size_t>(c * panel_rows + r)] = values[static_cast<size_t>(r * k + b * block + c)];
        }
      }
      const PanelBlock some{
          .target = target.data(), .importance = importance.data() + b * block, .columns = static_cast<int>(block)};
      const PanelScales found = searched_scales(some, levels, formats::ScaleType::f32);
      for (int64_t r = 0; r < rows; ++r) {
        scales[static_cast<size_t>((first + r) * blocks + b)] = found.values[static_cast<size_t>(r)];
      }
    }
  });
  return scales;
}

/// Codes under the scales that stand in the planes: the nearest for the weight times the scale's reciprocal, rounded.
void encode_nearest(const TensorView& weight, PackedWeight& packed) {
  const int block = packed.scheme.block;
  const formats::NearestEntry nearest(packed.plane(PlaneRole::codebook).bytes.as<float>());
  const auto words = packed.plane(PlaneRole::codes).bytes.as<uint32_t>();
  each_run(weight, block, [&](int64_t first, std::span<const float> values) {
    std::vector<uint8_t> codes(values.size());
    for (size_t b = 0; b * static_cast<size_t>(block) < values.size(); ++b) {
      const auto part = block_of_run(values, b, block);
      const float scale = formats::scale_at(packed, first + static_cast<int64_t>(b));
      const float reciprocal = 1.0f / scale;
      const bool multiplies = std::isfinite(reciprocal);
      uint8_t* const to = codes.data() + b * static_cast<size_t>(block);
      for (size_t i = 0; i < part.size(); ++i) {
        const float x = scale == 0 ? 0.0f : multiplies ? part[i] * reciprocal : part[i] / scale;
        to[i] = static_cast<uint8_t>(nearest(x));
      }
    }
    const auto begin = static_cast<size_t>(first * block * formats::lut_bits / 32);  // blocks are whole words
    const auto size = static_cast<size_t>(formats::dense_words(std::ssize(codes), formats::lut_bits));
    formats::dense_pack(codes, formats::lut_bits, words.subspan(begin, size));
  });
}

QuantizeResult run(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  check_weight(weight);
  check_lut(weight, scheme, options);
  if (options.feeds_back()) return float_feedback(weight, scheme, options);
  QuantizeResult result = allocate_lut(weight, scheme, options);
  encode_nearest(weight, result.weight);
  return result;
}

}  // namespace

void check_lut(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  constexpr std::string_view refusal = "lut has no ", hint = "it belongs to other methods";
  if (!accepts(scheme)) {
    throw Error(ErrorCode::bad_argument, concat("lut cannot quantize to ", formats::to_string(scheme)))
        .hint("`w4q list` shows the schemes");
  }
  if (options.bnb_compatible) {
    throw Error(ErrorCode::bad_argument, concat(refusal, "bitsandbytes-compatible mode: its plain bytes are those"))
        .hint("leave out --bnb-compatible");
  }
  check_steps(options.steps, scheme, refusal, hint);
  if (!options.searches()) return;
  if (options.codebook == descending_table) {
    throw Error(ErrorCode::bad_argument,
                concat(refusal, "searched scales or feedback for fp4, whose table does not ", "ascend"))
        .hint("leave out --quality, --scales and --feedback, or --codebook fp4");
  }
  if (weight.shape[1] % scheme.block == 0) return;
  throw Error(ErrorCode::unsupported, concat(printable(weight.name), ": ", formats::to_string(scheme),
                                             " has blocks across rows of ", weight.shape[1], " inputs"))
      .detail(concat("expected a multiple of ", scheme.block, " for searched scales and feedback"))
      .hint("choose smaller blocks, or plain rounding for this linear");
}

QuantizeResult allocate_lut(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  const std::vector<float> table = chosen_lut(options);
  QuantizeResult result{formats::allocate_canonical(scheme, weight.shape[0], weight.shape[1]), {}};
  PackedWeight& packed = result.weight;
  std::ranges::copy(table, packed.plane(PlaneRole::codebook).bytes.as<float>().begin());
  std::vector<float> scales = block_maxima(weight, scheme.block);
  result.stats.blocks = std::ssize(scales);
  result.stats.zero_blocks = std::ranges::count(scales, 0.0f);
  const bool nested = scheme.scale == formats::ScaleType::nested;
  if (options.feeds_back() && !nested) return result;  // which chooses them
  if (options.scales() == Scales::search) {
    scales = searched_maxima(weight, scheme.block, KbitLevels(table), channel_importance(options, weight.shape[1]));
  }
  if (nested) {
    formats::store_nested(scales, packed);
  } else {
    std::ranges::copy(scales, packed.plane(PlaneRole::scales).bytes.as<float>().begin());
  }
  return result;
}

QuantizerRow lut_quantizer() {
  return {.name = "lut",
          .description = "rounds to bitsandbytes' NF4 or FP4, block maxima plain or nested; scales searched if asked",
          .accepts = accepts,
          .run = run,
          .run_cuda = nullptr};
}

}  // namespace w4q::quantize
