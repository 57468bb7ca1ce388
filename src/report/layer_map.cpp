#include "report/layer_map.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "core/text.h"
#include "model/kinds.h"
#include "report/html.h"

namespace w4q::report {
namespace {

constexpr size_t layers_shown = 128;

std::optional<int64_t> layer_of(std::string_view name) {
  for (size_t begin = 0; begin < name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    int64_t layer = 0;
    const auto [last, error] = std::from_chars(name.data() + begin, name.data() + end, layer);
    if (error == std::errc() && last == name.data() + end) return layer;
    begin = end + 1;
  }
  return std::nullopt;
}

struct Cell {
  double sum = 0, most = 0;
  int64_t count = 0;
  std::string name;  ///< of the tensor with the most

  void add(const TensorValue& tensor) {
    sum += tensor.value;
    ++count;
    if (count > 1 && !(tensor.value >= most)) return;
    most = tensor.value;
    name = tensor.name;
  }
};

using Cells = std::map<std::pair<std::string, int64_t>, Cell>;

Cells cells_of(const std::vector<TensorValue>& tensors) {
  Cells cells;
  for (const auto& tensor : tensors) {
    if (!std::isfinite(tensor.value)) continue;
    cells[{model::kind_of(tensor.name), layer_of(tensor.name).value_or(-1)}].add(tensor);
  }
  return cells;
}

/// The kinds of all models in the order in which they come first, and their layers.
struct Grid {
  std::vector<std::string> kinds;
  std::set<int64_t> layers;
};

Grid grid_of(const std::vector<std::vector<TensorValue>>& models) {
  Grid grid;
  for (const auto& tensors : models) {
    for (const auto& tensor : tensors) {
      const std::string kind = model::kind_of(tensor.name);
      if (std::ranges::find(grid.kinds, kind) == grid.kinds.end() && grid.kinds.size() < kinds_shown) {
        grid.kinds.push_back(kind);
      }
      if (grid.layers.size() < layers_shown) grid.layers.insert(layer_of(tensor.name).value_or(-1));
    }
  }
  return grid;
}

HeatMap::Cell heat_cell(const Cells& cells, const std::string& kind, int64_t layer, const CellWords& words) {
  const auto found = cells.find({kind, layer});
  if (found == cells.end()) return {std::numeric_limits<double>::quiet_NaN(), {}, {}};
  const Cell& cell = found->second;
  const double value = words.mean ? cell.sum / static_cast<double>(cell.count) : cell.most;
  const std::string of = words.mean ? ", the mean of " : ", the worst of ";
  return {value, words.text(value),
          concat(name_of(cell.name), ": ", words.what, " ", words.full(value),
                 cell.count > 1 ? concat(of, cell.count) : "")};
}

HeatMap map_of(const Cells& cells, const Grid& grid, const CellWords& words) {
  HeatMap map;
  for (const auto& kind : grid.kinds) map.rows.push_back(name_of(kind));
  for (const int64_t layer : grid.layers) map.columns.push_back(layer < 0 ? "–" : concat(layer));
  for (const auto& kind : grid.kinds) {
    auto& row = map.cells.emplace_back();
    for (const int64_t layer : grid.layers) row.push_back(heat_cell(cells, kind, layer, words));
  }
  return map;
}

/// All maps in the same colours, which nearly equal numbers share.
void set_colours(std::vector<HeatMap>& maps) {
  constexpr double least_range = 1.5;
  double least = std::numeric_limits<double>::infinity(), most = 0;
  for (const auto& map : maps) {
    for (const auto& row : map.cells) {
      for (const auto& cell : row) {
        if (cell.value > 0) least = std::min(least, cell.value);
        if (cell.value > 0) most = std::max(most, cell.value);
      }
    }
  }
  most = std::max(most, least * least_range);
  for (auto& map : maps) {
    map.least = least;
    map.most = most;
  }
}

}  // namespace

const CellWords bits_in_cells{"bits a weight", true, [](double bits) { return fixed(bits, bits < 10 ? 2 : 1); },
                              [](double bits) { return fixed(bits, 4); }};

std::vector<HeatMap> layer_maps(const std::vector<std::vector<TensorValue>>& models, const CellWords& words) {
  const Grid grid = grid_of(models);
  std::vector<HeatMap> maps;
  if (grid.kinds.empty()) return maps;
  for (const auto& tensors : models) maps.push_back(map_of(cells_of(tensors), grid, words));
  set_colours(maps);
  return maps;
}

}  // namespace w4q::report
