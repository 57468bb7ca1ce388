#include "layout_drawing.h"

#include <algorithm>
#include <set>
#include <vector>

#include "core/error.h"
#include "core/text.h"

namespace w4q::app {
namespace {

using repack::LayoutRow;

/// Rows worth showing: the first few, those around every power of two that may be a tile edge, and the last.
std::vector<int64_t> sample_positions(int64_t count, int64_t step) {
  std::set<int64_t> positions{0, step, 2 * step, 3 * step, count - 1};
  for (const int64_t edge : {16 * step, 64 * step, 128 * step, 256 * step}) {
    positions.insert(edge - step);
    positions.insert(edge);
  }
  std::vector<int64_t> result;
  for (const int64_t position : positions) {
    if (position >= 0 && position < count) result.push_back(position);
  }
  return result;
}

/// Columns that share a scale.
int64_t block_columns(const formats::Scheme& scheme, int64_t k) {
  return scheme.block == formats::whole_row ? k : scheme.block;
}

std::string block_map(const LayoutRow& layout, const formats::Scheme& scheme, int64_t n, int64_t k, io::Json& json) {
  auto columns = sample_positions(k, block_columns(scheme, k));
  constexpr size_t most_columns = 8;
  if (columns.size() > most_columns) columns.resize(most_columns);
  std::vector<std::string> header{"row \\ col"};
  for (const int64_t col : columns) header.push_back(concat(col));
  TextTable table(std::move(header));
  for (const int64_t row : sample_positions(n, 1)) {
    std::vector<std::string> cells{concat(row)};
    for (const int64_t col : columns) {
      const auto place = layout.place(scheme, n, k, row, col, 0);
      cells.push_back(concat(place.word, "/", place.scale));
      json.push_back({{"row", row}, {"col", col}, {"word", place.word}, {"bit", place.bit}, {"scale", place.scale}});
    }
    table.row(std::move(cells));
  }
  return table.str();
}

std::string block_bits(const LayoutRow& layout, const formats::Scheme& scheme, int64_t n, int64_t k) {
  constexpr int64_t most_lanes = 32;
  const int64_t lanes = std::min({block_columns(scheme, k), k, most_lanes});
  std::string text;
  for (int bit = 0; bit < scheme.bits; ++bit) {
    text += concat("bit ", bit, " of the codes:");
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const auto place = layout.place(scheme, n, k, 0, lane, bit);
      text += concat(" ", place.word, ":", place.bit);
    }
    text += "\n";
  }
  return text;
}

}  // namespace

LayoutDrawing draw_layout(const LayoutRow& layout, const formats::Scheme& scheme, int64_t n, int64_t k) {
  std::string why;
  if (!layout.accepts(scheme, n, k, &why))
    throw Error(ErrorCode::unsupported, concat("layout ", layout.name, ": ", why));
  LayoutDrawing drawing{{},
                        {{"layout", layout.name}, {"description", layout.description}, {"places", io::Json::array()}}};
  drawing.text = concat("layout ", layout.name, ": ", layout.description, "\n");
  for (const auto& plane : layout.planes(scheme, n, k)) {
    drawing.text +=
        concat("  ", formats::to_string(plane.role), " ", dtype_name(plane.dtype), " ", shape_text(plane.shape), "\n");
  }
  drawing.text += "\nfirst word of a block / index of its scale, by the block's row and first column\n";
  drawing.text += block_map(layout, scheme, n, k, drawing.json["places"]);
  drawing.text += "\nword:bit of the weights 0, 1, 2 … of row 0's first block\n";
  drawing.text += block_bits(layout, scheme, n, k);
  return drawing;
}

}  // namespace w4q::app
