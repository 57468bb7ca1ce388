#include "quantize/source_matrix.h"

#include <cmath>
#include <vector>

#include "core/convert.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/packed.h"

namespace w4q::quantize {

void check_weight(const TensorView& weight) {
  const std::string name = printable(weight.name);
  if (!is_weight_dtype(weight.dtype)) {
    throw Error(ErrorCode::unsupported, concat(name, ": cannot quantize ", dtype_name(weight.dtype)))
        .detail("expected F32, F16 or BF16");
  }
  if (weight.shape.size() != 2) {
    throw Error(ErrorCode::unsupported, concat(name, ": cannot quantize shape ", shape_text(weight.shape)))
        .detail("expected a matrix [outputs, inputs]");
  }
  formats::check_dimensions(weight.shape[0], weight.shape[1], weight.name);
  const int64_t expected = weight.shape[0] * weight.shape[1] * (dtype_bits(weight.dtype) / 8);
  if (static_cast<int64_t>(weight.bytes.size()) != expected) {
    throw Error(ErrorCode::bad_argument, concat(name, ": wrong number of bytes"))
        .detail(concat("expected ", expected, ", got ", weight.bytes.size()));
  }
}

void refuse_non_finite(std::string_view name, DType dtype, std::span<const std::byte> bytes, int64_t row) {
  std::vector<float> values(bytes.size() * 8 / static_cast<size_t>(dtype_bits(dtype)));
  widen(bytes, dtype, values);
  const auto bad = std::ranges::find_if(values, [](float value) { return !std::isfinite(value); });
  ensure(bad != values.end(), "refuse_non_finite: all values are finite");
  throw Error(ErrorCode::bad_file, concat(printable(name), ": ", std::isnan(*bad) ? "NaN" : "infinity", " at row ", row,
                                          ", column ", bad - values.begin()))
      .hint("keep this tensor at 16 bit (--keep), or repair the checkpoint");
}

}  // namespace w4q::quantize
