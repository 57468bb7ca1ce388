#include <algorithm>
#include <vector>

#include "checkpoint/dialect/dialect.h"
#include "checkpoint/dialect/rows.h"
#include "core/error.h"
#include "core/text.h"

namespace w4q::checkpoint {

std::span<const DialectRow> dialect_registry() {
  // A checkpoint is taken by the first row that detects it.
  static const std::vector<DialectRow> rows = {awq_gemm_row(),
                                               awq_gemv_row(),
                                               awq_gemv_fast_row(),
                                               awq_marlin_row(),
                                               gptq_v1_row(),
                                               gptq_v2_row(),
                                               compressed_tensors_padded_row(),
                                               compressed_tensors_row(),
                                               marlin_dialect_row(),
                                               bitsandbytes_nf4_row(),
                                               bitsandbytes_fp4_row()};
  return rows;
}

const DialectRow* find_dialect(std::string_view name) noexcept {
  const auto rows = dialect_registry();
  const auto found = std::ranges::find(rows, name, &DialectRow::name);
  return found == rows.end() ? nullptr : &*found;
}

const DialectRow& detect_dialect(const DialectSource& source) {
  std::vector<std::string> names;
  for (const DialectRow& row : dialect_registry()) {
    if (row.detect(source)) return row;
    names.emplace_back(row.name);
  }
  const auto method = source.config.value("quant_method", io::Json("(none)")).dump();
  throw Error(ErrorCode::unsupported,
              concat(source.place, ": quant_method ", printable(method), " is no known dialect"))
      .detail("known: w4q, " + join(names))
      .hint("start from the 16-bit checkpoint");
}

}  // namespace w4q::checkpoint
