#include "formats/scheme_registry.h"

#include "core/error.h"
#include "formats/kbit.h"

namespace w4q::formats {

std::span<const SchemeRow> scheme_registry() noexcept {
  static const SchemeRow rows[] = {kbit_row()};
  return rows;
}

const SchemeRow& scheme_row(SchemeFamily family) noexcept {
  const std::span<const SchemeRow> rows = scheme_registry();
  for (const SchemeRow& row : rows) {
    if (row.family == family) return row;
  }
  return rows.front();
}

}  // namespace w4q::formats
