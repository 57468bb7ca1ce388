#include "repack/layout_registry.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "core/text.h"
#include "repack/rows.h"

namespace w4q::repack {
namespace {

std::string target_name(int sm) { return concat("sm", sm); }

bool serves(const LayoutRow& row, std::string_view target) {
  return std::ranges::any_of(row.sms, [&](int sm) { return target_name(sm) == target; });
}

}  // namespace

std::span<const LayoutRow> layout_registry() {
  static const std::vector<LayoutRow> rows = {
      canonical_row(),        kbit_fragment_row(),  kbit_tile_row(),   marlin_row(), rotated_fragment_row(),
      trellis_fragment_row(), float_fragment_row(), interleaved_row(), awq_row(),    gptq_row()};
  return rows;
}

const LayoutRow& layout_row(std::string_view name) {
  std::vector<std::string> names;
  for (const LayoutRow& row : layout_registry()) {
    if (row.name == name) return row;
    names.emplace_back(row.name);
  }
  throw Error(ErrorCode::bad_argument, concat("unknown layout \"", printable(name), "\""))
      .detail("known: " + join(names));
}

const LayoutRow& layout_for_target(std::string_view target, const formats::Scheme& scheme, int64_t n, int64_t k) {
  bool known = false;
  std::string reasons;
  for (const LayoutRow& row : layout_registry()) {
    if (!serves(row, target)) continue;
    known = true;
    std::string why;
    if (row.accepts(scheme, n, k, &why)) return row;
    reasons += concat(reasons.empty() ? "" : "; ", row.name, ": ", why);
  }
  if (!known) {
    throw Error(ErrorCode::bad_argument, concat("unknown target \"", printable(target), "\""))
        .detail("known: " + join(known_targets()));
  }
  throw Error(ErrorCode::unsupported,
              concat("no layout for ", target, " holds ", to_string(scheme), " with n = ", n, ", k = ", k))
      .detail(reasons)
      .hint("--layout canonical accepts every scheme and size");
}

std::vector<std::string> known_targets() {
  std::set<int> sms;
  for (const LayoutRow& row : layout_registry()) sms.insert(row.sms.begin(), row.sms.end());
  std::vector<std::string> names;
  std::ranges::transform(sms, std::back_inserter(names), target_name);
  return names;
}

}  // namespace w4q::repack
