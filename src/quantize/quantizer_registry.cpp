#include "quantize/quantizer_registry.h"

#include "core/error.h"
#include "core/text.h"
#include "quantize/exl3.h"
#include "quantize/kbit.h"
#include "quantize/lut.h"
#include "quantize/rotated.h"
#include "quantize/rtn.h"
#include "quantize/small_float.h"
#include "quantize/trellis.h"

namespace w4q::quantize {

formats::Rotation QuantizeOptions::rotation() const noexcept {
  const Step* rotate = steps.find(StepKind::rotate);
  return rotate == nullptr ? formats::Rotation{} : formats::Rotation{rotate->block, rotate->seed};
}

std::span<const QuantizerRow> quantizer_registry() noexcept {
  static const QuantizerRow rows[] = {kbit_quantizer(),    rtn_quantizer(),  rotated_quantizer(),
                                      trellis_quantizer(), exl3_quantizer(), small_float_quantizer(),
                                      lut_quantizer()};
  return rows;
}

const QuantizerRow& quantizer_row(std::string_view name) {
  std::vector<std::string> names;
  for (const QuantizerRow& row : quantizer_registry()) {
    if (row.name == name) return row;
    names.emplace_back(row.name);
  }
  throw Error(ErrorCode::bad_argument, concat("unknown method \"", printable(name), "\""))
      .detail("known: " + join(names));
}

}  // namespace w4q::quantize
