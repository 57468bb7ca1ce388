#include "kernels/small_float/tile_scales.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "formats/scale_codec.h"
#include "formats/scale_range.h"
#include "formats/small_float.h"
#include "repack/layout_float_fragment.h"

namespace w4q::kernels {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using Map = repack::FloatFragmentMap;

constexpr int fp8_block = 128;

bool has_tiles(const formats::Scheme& scheme) noexcept { return scheme.bits == 8 && scheme.block != 32; }

/// A row of a stack as the row of its own weight.
struct Source {
  const PackedWeight* weight;
  int64_t row;
};

Source source_of(std::span<const PackedWeight* const> weights, int64_t rows_in_turn, int64_t row) {
  if (rows_in_turn > 0) {
    const auto count = std::ssize(weights);
    const int64_t turn = row / rows_in_turn;
    return {weights[static_cast<size_t>(turn % count)], turn / count * rows_in_turn + row % rows_in_turn};
  }
  for (const auto* weight : weights) {
    if (row < weight->n) return {weight, row};
    row -= weight->n;
  }
  return {weights.back(), weights.back()->n - 1};  // of the padding
}

/// What a row's weights have in common.
float output_factor(const Source& source) {
  const formats::Scheme& scheme = source.weight->scheme;
  const auto& scales = source.weight->plane(PlaneRole::scales);
  if (scheme.scale == formats::ScaleType::e4m3) {
    return formats::scale_with_factor(1.0f, formats::tensor_factor(*source.weight), scheme.divisor);
  }
  if (scheme.block == formats::whole_tensor) return formats::load_scale(scales, 0);
  if (scheme.block == formats::whole_row) return formats::load_scale(scales, static_cast<size_t>(source.row));
  return 1;
}

float tile_scale(const Source& source, int64_t column) {
  if (source.weight->scheme.block != fp8_block) return 1;
  const int64_t across = (source.weight->k + fp8_block - 1) / fp8_block;
  return formats::load_scale(source.weight->plane(PlaneRole::scales),
                             static_cast<size_t>(source.row / fp8_block * across + column / fp8_block));
}

}  // namespace

FloatScales float_scales(std::span<const PackedWeight* const> weights, int64_t rows_in_turn) {
  const PackedWeight& first = *weights.front();
  const int64_t n = std::accumulate(weights.begin(), weights.end(), int64_t{0},
                                    [](int64_t sum, const PackedWeight* weight) { return sum + weight->n; });
  FloatScales result;
  result.largest = 0;
  for (int64_t row = 0; row < n; ++row) result.outputs.push_back(output_factor(source_of(weights, rows_in_turn, row)));
  if (std::ranges::all_of(result.outputs, [](float factor) { return factor == 1; })) result.outputs.clear();
  if (!has_tiles(first.scheme)) {
    for (const auto* weight : weights) {
      result.largest = std::max(result.largest,
                                formats::scale_range(weight->plane(PlaneRole::scales), weight->scheme.scale).largest);
    }
    return result;
  }
  const Map map(n, first.k);
  for (int64_t row = 0; row < n; row += Map::tile_rows) {
    const Source halves[2] = {source_of(weights, rows_in_turn, row), source_of(weights, rows_in_turn, row + 8)};
    for (int64_t column = 0; column < first.k; column += Map::tile_cols) {
      for (const Source& half : halves) {
        result.tile_pairs.push_back(tile_scale(half, column));
        result.largest = std::max(result.largest, result.tile_pairs.back());
      }
    }
  }
  return result;
}

}  // namespace w4q::kernels
