#include "verify/weights/streams.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "core/parallel.h"
#include "core/text.h"
#include "formats/exl3.h"
#include "formats/packed.h"
#include "formats/scheme_registry.h"
#include "formats/trellis.h"
#include "verify/weights/factors.h"

namespace w4q::verify {
namespace {

using formats::PackedLinear;
using formats::PackedWeight;

/// Each stream's weights where its codes stand: rings of 128 rows of one input, tiles of 16 × 16.
struct Streams {
  int64_t rows = 1, cols = 1;     ///< of one stream
  int64_t height = 0, width = 0;  ///< how many
  std::vector<Factor> sums;       ///< height × width
  /// Σ (w − ŵ)² without the largest few: a weight beyond all levels, and what stands beside it in its stream, are no other
  /// codes.
  std::vector<double> noise;

  Streams(int64_t rows_of_one, int64_t cols_of_one, int64_t n, int64_t k)
      : rows(rows_of_one),
        cols(cols_of_one),
        height((n + rows - 1) / rows),
        width((k + cols - 1) / cols),
        sums(static_cast<size_t>(height * width)),
        noise(sums.size()) {}

  size_t index(int64_t row, int64_t col) const { return static_cast<size_t>(row * width + col); }
  const Factor& of(int64_t row, int64_t col) const { return sums[index(row, col)]; }

  /// `wanted` and `found`: values of stream (row, col), in any order.
  void put(int64_t row, int64_t col, std::span<const float> wanted, std::span<const float> found) {
    constexpr size_t set_aside = 6;
    Factor& sum = sums[index(row, col)];
    std::vector<double> errors(wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      sum.add(wanted[i], found[i]);
      errors[i] = (double{wanted[i]} - found[i]) * (double{wanted[i]} - found[i]);
    }
    if (errors.size() <= set_aside) return;
    const auto aside = errors.end() - set_aside;
    std::ranges::nth_element(errors, aside);
    noise[index(row, col)] = std::accumulate(errors.begin(), aside, 0.0);
  }
};

std::vector<float> wanted_rows(const kernels::LinearWeight& weight, const Units& units, int64_t begin, int64_t end) {
  std::vector<float> values(static_cast<size_t>((end - begin) * weight.k));
  kernels::decode_rows(weight, begin, end, {values.data(), end - begin, weight.k});
  for (int64_t row = begin; row < end; ++row) {
    units.apply(
        row, std::span(values).subspan(static_cast<size_t>((row - begin) * weight.k), static_cast<size_t>(weight.k)));
  }
  return values;
}

Streams rings_of(const kernels::LinearWeight& base, const PackedLinear& packed, const Units& units) {
  const PackedWeight& weight = packed.passes.front();
  const auto& definition = formats::scheme_row(weight.scheme.family);
  const auto k = static_cast<size_t>(weight.k);
  Streams streams(formats::trellis_rows, 1, weight.n, weight.k);
  parallel_for(streams.height, 1, [&](int64_t strip, int64_t) {
    const int64_t begin = strip * formats::trellis_rows, end = std::min(begin + formats::trellis_rows, weight.n);
    auto wanted = wanted_rows(base, units, begin, end);
    std::vector<float> found(wanted.size()), values(static_cast<size_t>(end - begin)), decoded(values.size());
    for (int64_t row = begin; row < end; ++row) {
      const auto turned = std::span(wanted).subspan(static_cast<size_t>(row - begin) * k, k);
      for (size_t c = 0; c < k && !packed.input_scale.empty(); ++c) turned[c] *= packed.input_scale[c];
      if (!packed.rotations.empty()) packed.rotations.front().rotate(turned);
      definition.decode_row(weight, row, std::span(found).subspan(static_cast<size_t>(row - begin) * k, k));
    }
    for (size_t c = 0; c < k; ++c) {
      for (size_t r = 0; r < values.size(); ++r) values[r] = wanted[r * k + c], decoded[r] = found[r * k + c];
      streams.put(strip, static_cast<int64_t>(c), values, decoded);
    }
  });
  return streams;
}

/// Tiles of a block of 128 × 128 inner values, [inputs, outputs], beside their targets [outputs, inputs].
void put_tiles(std::span<const float> inner, MatrixView<const float> targets, int64_t row, int64_t col,
               Streams& streams) {
  constexpr int64_t tile = formats::exl3_tile, block = formats::exl3_block;
  std::vector<float> wanted(static_cast<size_t>(tile * tile)), found(wanted.size());
  for (int64_t i = 0; i < (block / tile) * (block / tile); ++i) {
    const int64_t out = i / (block / tile) * tile, in = i % (block / tile) * tile;
    for (int64_t t = 0; t < tile * tile; ++t) {
      const int64_t r = out + t / tile, c = in + t % tile;
      wanted[static_cast<size_t>(t)] = targets.row(row + r)[col + c];
      found[static_cast<size_t>(t)] = inner[static_cast<size_t>(c * block + r)];
    }
    streams.put((row + out) / tile, (col + in) / tile, wanted, found);
  }
}

Streams tiles_of(const kernels::LinearWeight& base, const PackedWeight& weight, const Units& units) {
  constexpr int64_t block = formats::exl3_block;
  const int64_t n = formats::exl3_padded(weight.n), k = formats::exl3_padded(weight.k);
  const auto wanted = wanted_rows(base, units, 0, weight.n);
  const auto targets = formats::exl3_inner_targets(weight, {wanted.data(), weight.n, weight.k});
  Streams streams(formats::exl3_tile, formats::exl3_tile, n, k);
  parallel_for(n / block * (k / block), 1, [&](int64_t place, int64_t) {
    const int64_t out = place / (k / block), in = place % (k / block);
    std::vector<float> inner(static_cast<size_t>(block * block));
    formats::exl3_inner_block(weight, in, out, inner);
    put_tiles(inner, {targets.data(), n, k}, out * block, in * block, streams);
  });
  return streams;
}

/// Whether streams that lie in a line hold other weights than the base's.
bool holds_others(const Factor& line, double least) {
  return line.squares > 0 && line.values >= 2 * formats::exl3_tile && line.is_lost(1, most_gain, least);
}

std::string place_of_streams(const Streams& streams, int64_t row, int64_t col) {
  const auto range = [](const char* what, int64_t first, int64_t count) {
    return count == 1 ? concat(what, " ", first) : concat(what, "s ", first, " to ", first + count - 1);
  };
  if (row < 0) return range("input", col * streams.cols, streams.cols);
  if (col < 0) return range("output", row * streams.rows, streams.rows);
  return concat(range("output", row * streams.rows, streams.rows), ", ",
                range("input", col * streams.cols, streams.cols));
}

std::optional<std::string> lost_line_of(const Streams& streams, double least) {
  std::vector<Factor> inputs(static_cast<size_t>(streams.width)), outputs(static_cast<size_t>(streams.height));
  for (int64_t row = 0; row < streams.height; ++row) {
    for (int64_t col = 0; col < streams.width; ++col) {
      inputs[static_cast<size_t>(col)].add(streams.of(row, col)),
          outputs[static_cast<size_t>(row)].add(streams.of(row, col));
    }
  }
  const auto text = [&](int64_t row, int64_t col, const Factor& line) {
    return concat(place_of_streams(streams, row, col), " behind the rotations hold ", fixed(line.value(), 2),
                  " of the base's: their codes are others'");
  };
  for (const auto* lines : {&inputs, &outputs}) {
    const auto lost = std::ranges::find_if(*lines, [&](const Factor& line) { return holds_others(line, least); });
    if (lost == lines->end()) continue;
    const auto at = lost - lines->begin();
    return lines == &inputs ? text(-1, at, *lost) : text(at, -1, *lost);
  }
  return std::nullopt;
}

/// What all but a twentieth stay below; 0: there are too few of them to say.
double upper_end(std::vector<double> values) {
  constexpr size_t fewest = 40;  // two of them may be wrong
  if (values.size() < fewest) return 0;
  const auto place = values.begin() + static_cast<std::ptrdiff_t>(values.size() * 19 / 20);
  std::ranges::nth_element(values, place);
  return *place;
}

/// Of each stream, over what it holds or, of a quiet one, what they hold in the mean: a step is as large there.
std::vector<double> relative_noise(const Streams& streams) {
  Factor all;
  for (const Factor& each : streams.sums) all.add(each);
  const double mean = all.squares / static_cast<double>(streams.sums.size());
  std::vector<double> noise(streams.sums.size());
  for (size_t i = 0; i < noise.size() && mean > 0; ++i)
    noise[i] = streams.noise[i] / std::max(streams.sums[i].squares, mean);
  return noise;
}

/// A stream whose noise is several times what nearly all others have, of the weight and of its row and column: fed back errors
/// are larger where the inputs ask for less, but then in all of a column.
std::optional<std::string> loud_stream_of(const Streams& streams) {
  // A word of other codes misses more; of many bits nothing else is as large as a tail that is cut off.
  constexpr double least = 0.02;
  constexpr double most_times = 2.5;  // measured of sound weights: 1.34, trellis3-w10 by all steps of `best`
  const auto noise = relative_noise(streams);
  const double usual = upper_end(noise);
  if (usual == 0) return std::nullopt;
  std::vector<double> of_columns(static_cast<size_t>(streams.width));
  for (int64_t col = 0; col < streams.width; ++col) {
    std::vector<double> column;
    for (int64_t row = 0; row < streams.height; ++row) column.push_back(noise[streams.index(row, col)]);
    of_columns[static_cast<size_t>(col)] = upper_end(std::move(column));
  }
  for (int64_t row = 0; row < streams.height; ++row) {
    const auto line =
        std::span(noise).subspan(static_cast<size_t>(row * streams.width), static_cast<size_t>(streams.width));
    const double of_row = upper_end({line.begin(), line.end()});
    for (size_t col = 0; col < line.size(); ++col) {
      if (line[col] <= least || line[col] <= most_times * std::max({usual, of_row, of_columns[col]})) continue;
      return concat("the codes of ", place_of_streams(streams, row, static_cast<int64_t>(col)), " miss ",
                    fixed(100 * line[col], 0), " % of what the base has there, nearly all others at most ",
                    fixed(100 * usual, 1), " %");
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> stream_fault_of(const kernels::LinearWeight& base, const kernels::LinearWeight& candidate,
                                           const Units& units, bool moved) {
  const auto* packed = std::get_if<std::shared_ptr<const PackedLinear>>(&candidate.matrix);
  if (packed == nullptr || (*packed)->passes.size() != 1 || units.measured || !units.unsure.empty())
    return std::nullopt;
  const PackedWeight& weight = (*packed)->passes.front();
  const bool tiles = weight.scheme.family == formats::SchemeFamily::exl3;
  if (!tiles && (*packed)->rotations.empty()) return std::nullopt;  // loud inputs may be beyond all levels
  const Streams streams = tiles ? tiles_of(base, weight, units) : rings_of(base, **packed, units);
  auto lost = lost_line_of(streams, moved ? moves_of(weight.scheme.bits).least_of_line : least_gain);
  return lost ? lost : loud_stream_of(streams);
}

}  // namespace w4q::verify
