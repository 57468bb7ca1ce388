#include "quantize/rounding.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/integer.h"
#include "formats/scheme_registry.h"
#include "quantize/rtn.h"
#include "quantize/small_float.h"

namespace w4q::quantize {
namespace {

using formats::Scheme;
using formats::SchemeFamily;

/// By way of the quantizer and the reference decoder: right for every scheme, and slow.
void round_by_packing(const Scheme& scheme, const QuantizeOptions& options, MatrixView<float> weights) {
  std::vector<float> values(static_cast<size_t>(weights.rows * weights.cols));
  for (int64_t r = 0; r < weights.rows; ++r) {
    std::copy_n(weights.row(r), weights.cols, values.begin() + r * weights.cols);
  }
  const TensorView view{"weights", DType::f32, {weights.rows, weights.cols}, bytes_of(values)};
  const auto packed = rounding_quantizer(scheme).run(view, scheme, options).weight;
  const auto decode_row = formats::scheme_row(scheme.family).decode_row;
  for (int64_t r = 0; r < weights.rows; ++r) {
    decode_row(packed, r, {weights.row(r), static_cast<size_t>(weights.cols)});
  }
}

}  // namespace

const QuantizerRow& rounding_quantizer(const Scheme& scheme) {
  switch (scheme.family) {
    case SchemeFamily::kbit:
      return quantizer_row("kbit");
    case SchemeFamily::integer:
      return quantizer_row("rtn");
    case SchemeFamily::rotated:
      return quantizer_row("rotated");
    case SchemeFamily::trellis:
      return quantizer_row("trellis");
    case SchemeFamily::exl3:
      return quantizer_row("exl3");
    case SchemeFamily::small_float:
      return quantizer_row("float");
    case SchemeFamily::lut:
      return quantizer_row("lut");
  }
  throw Error(ErrorCode::internal, "rounding_quantizer: a family without one");
}

Rounding rounding_of(const Scheme& scheme, int64_t k, const QuantizeOptions& options) {
  if (formats::shares_bits(scheme)) {
    const int bits = std::clamp(scheme.bits, formats::table_min_bits, formats::table_max_bits);
    const Scheme scalar{SchemeFamily::rotated, bits, formats::whole_row, formats::ScaleType::f16};
    return {[scalar](MatrixView<float> weights) { round_by_packing(scalar, {}, weights); }, k, true};
  }
  if (scheme.family == SchemeFamily::integer && !scheme.act_order) {
    const auto clip = options.clip();
    return {[scheme, clip](MatrixView<float> weights) { fake_quantize(scheme, weights, clip); },
            formats::integer_group_size(scheme, k), !scheme.asymmetric};
  }
  if (scheme.family == SchemeFamily::small_float) {
    return {[scheme](MatrixView<float> weights) { round_small_floats(scheme, weights); }, float_block(scheme, k), true};
  }
  return {[scheme, options](MatrixView<float> weights) { round_by_packing(scheme, options, weights); },
          scheme.block == formats::whole_row ? k : scheme.block, true};
}

}  // namespace w4q::quantize
