// Tables of a model's tensors that stay short however many there are: a line for each kind of linear (q_proj, down_proj,
// experts.down_proj …), and the worst by name.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/weight_error.h"

namespace w4q::model {

/// How much of its tensors a report names.
enum class Detail {
  kinds,    ///< kinds of them, and the worst
  tensors,  ///< every one
};

/// What a tensor is whatever its layer and its number: "model.layers.3.mlp.experts.7.down_proj.weight" →
/// "experts.down_proj"; "blk.0.ffn_up.weight" → "ffn_up".
std::string kind_of(std::string_view name);

/// How many tensors a table names where it does not name all.
inline constexpr size_t worst_shown = 5;

/// Whether a table of `count` tensors names every one: it is asked for that, or would hardly be shorter.
inline bool names_all(Detail detail, size_t count) { return detail == Detail::tensors || count <= worst_shown; }

/// Rows of one kind.
template <class Row>
struct Kind {
  std::string name;
  std::vector<const Row*> rows;
};

/// The kinds of `rows` by their `name`, in the order in which each comes first. `rows` must outlive them.
template <class Row>
std::vector<Kind<Row>> by_kind(const std::vector<Row>& rows) {
  std::vector<Kind<Row>> kinds;
  for (const Row& row : rows) {
    const std::string name = kind_of(row.name);
    auto found = std::ranges::find(kinds, name, &Kind<Row>::name);
    if (found == kinds.end()) found = kinds.insert(found, {name, {}});
    found->rows.push_back(&row);
  }
  return kinds;
}

/// The rows that a table names, those with the least `quality` first unless it names all.
template <class Row, class Quality>
std::vector<const Row*> named_rows(const std::vector<Row>& rows, Detail detail, const Quality& quality) {
  std::vector<const Row*> named;
  for (const Row& row : rows) named.push_back(&row);
  if (names_all(detail, rows.size())) return named;
  const auto worse = [&](const Row* a, const Row* b) { return quality(*a) < quality(*b); };
  std::ranges::partial_sort(named, named.begin() + worst_shown, worse);
  named.resize(worst_shown);
  return named;
}

/// Different words of rows of a kind: "kbit3-b32-e4m4", "a, b, … 5 in all".
std::string words_text(const std::set<std::string>& words);

/// Errors of the weights of a kind.
class KindError {
 public:
  void add(const WeightError& error);

  static std::vector<std::string> head();  ///< of the cells
  std::vector<std::string> cells() const;  ///< SQNR of all and of the worst, the same of the relative error, max error

 private:
  WeightError total_;
  double worst_sqnr_ = std::numeric_limits<double>::infinity(), worst_relative_ = 0;
};

}  // namespace w4q::model
