// bitsandbytes' rule for kbit, byte for byte (docs/kbit.md).
#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>

#include "core/convert.h"
#include "core/parallel.h"
#include "formats/codebook.h"
#include "formats/e4m4.h"
#include "formats/kbit.h"
#include "quantize/kbit.h"

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::PlaneRole;

constexpr size_t max_codes = 32;

/// The entry at the least distance |x − c| in fp32, the lower one of two equals. Distances on one side of x grow with
/// the index's distance, so the two neighbours of x decide.
uint32_t nearest_entry(float x, std::span<const float> table) noexcept {
  size_t not_above = 0;
  for (float entry : table) not_above += entry <= x ? 1 : 0;
  if (not_above == 0) return 0;
  if (not_above == table.size()) return static_cast<uint32_t>(table.size() - 1);
  const float below = std::abs(x - table[not_above - 1]);
  const float above = std::abs(x - table[not_above]);
  return static_cast<uint32_t>(above < below ? not_above : not_above - 1);
}

void encode_block(const float* values, float absmax, std::span<const float> table, std::span<uint32_t> words) noexcept {
  const float divisor = std::max(absmax, 1e-8f);
  std::ranges::fill(words, 0u);
  for (size_t lane = 0; lane < kbit_block; ++lane) {
    const uint32_t code = nearest_entry(values[lane] / divisor, table);
    for (size_t bit = 0; bit < words.size(); ++bit) words[bit] |= ((code >> bit) & 1) << lane;
  }
}

}  // namespace

QuantizeResult quantize_bnb(const TensorView& weight, const formats::Scheme& scheme, const BlockMaxima& maxima) {
  const int64_t n = weight.shape[0];
  const int64_t k = weight.shape[1];
  const auto bits = static_cast<size_t>(scheme.bits);
  const std::vector<float> table = formats::codebook("nf-quantile", scheme.bits);
  QuantizeResult result;
  result.weight = formats::allocate_planes(scheme, formats::canonical_layout, n, k, formats::kbit_planes(scheme, n, k));
  std::ranges::copy(table, result.weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  const auto words = result.weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto scales = result.weight.plane(PlaneRole::scales).bytes.as<uint8_t>();

  const auto row_blocks = static_cast<size_t>(formats::kbit_blocks(k));
  const size_t row_bytes = weight.bytes.size() / static_cast<size_t>(n);
  parallel_for(n, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(k));
    for (auto row = static_cast<size_t>(begin); row < static_cast<size_t>(end); ++row) {
      widen(weight.bytes.subspan(row * row_bytes, row_bytes), weight.dtype, values);
      for (size_t i = 0; i < row_blocks; ++i) {
        const size_t block = row * row_blocks + i;
        scales[block] = formats::e4m4_encode_bnb(maxima.absmax[block]);
        encode_block(values.data() + i * kbit_block, maxima.absmax[block], table, words.subspan(block * bits, bits));
      }
    }
  });
  result.stats.blocks = static_cast<int64_t>(maxima.absmax.size());
  for (float absmax : maxima.absmax) {
    result.stats.zero_blocks += absmax == 0 ? 1 : 0;
    result.stats.saturated_scales += absmax > formats::e4m4_max ? 1 : 0;
    result.stats.subnormal_scales += absmax != 0 && absmax < formats::e4m4_min_normal ? 1 : 0;
  }
  return result;
}

}  // namespace w4q::quantize
