// IST-DASLab's Marlin checkpoints, which AutoGPTQ writes as checkpoint_format "marlin": the words of layout marlin.
#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/dialect/rows.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::StoredSpec;
using formats::StoredTensor;

constexpr std::array roles{PlaneRole::codes, PlaneRole::scales};
constexpr const IntegerLimits& limits = marlin_limits;

std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  return {{".B", DType::i32, {k / marlin_tile_inputs, 2 * n}},
          {".s", DType::f16, {formats::integer_groups(scheme, k), n}}};
}

bool detect(const DialectSource& source) {
  const std::string method = config_text(source, {"quant_method"}, "gptq");
  if (method != "gptq" && method != "marlin") return false;
  const auto names = linears_with(source.checkpoint, ".B");
  return !names.empty() && source.checkpoint.contains(names.front() + ".s");
}

QuantizationConfig read(const DialectSource& source) {
  if (const int64_t bits = config_integer(source, {"bits", "w_bit"}, 4, 1, 64); bits != 4) {
    throw Error(ErrorCode::unsupported, concat(source.place, ": Marlin with ", bits, " bits"))
        .detail("its words hold 4-bit codes");
  }
  const Scheme scheme{formats::SchemeFamily::integer, 4, config_group(source, {"group_size", "q_group_size"}),
                      formats::ScaleType::f16};
  QuantizationConfig result;
  for (const auto& name : linears_with(source.checkpoint, ".B")) {
    const Shape& shape = matrix_shape(source.checkpoint, name + ".B");
    const int64_t n = shape[1] / 2, k = shape[0] * marlin_tile_inputs;
    formats::check_dimensions(n, k, name);
    if (n % limits.n_multiple != 0 || k % limits.k_multiple != 0) {
      throw Error(ErrorCode::bad_file, concat(printable(name), ".B: does not fill Marlin's tiles"))
          .detail(concat("outputs in multiples of 256 and inputs of 128, found ", n, " and ", k));
    }
    PackedLinearInfo info = dialect_linear(name, scheme, n, k, source.source_dtype, tensors(scheme, n, k));
    check_stored(source.checkpoint, info, concat("Marlin with group_size ", group_size_of(scheme)));
    result.linears.emplace(name, std::move(info));
  }
  return result;
}

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> stored) {
  return unpack_stored("marlin", info.passes.front().scheme, info, std::move(stored), roles);
}

DialectFit fit(const PackedLinearInfo& info) { return fit_integer(info, limits); }

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  return pack_stored("marlin", canonical, tensors(canonical.scheme, canonical.n, canonical.k), roles);
}

io::Json describe(const std::vector<DialectLinear>& linears, const std::vector<std::string>&) {
  const int group = linears.front().scheme.block;
  const auto other =
      std::ranges::find_if(linears, [&](const DialectLinear& linear) { return linear.scheme.block != group; });
  if (other != linears.end()) {
    throw Error(ErrorCode::unsupported, concat(printable(other->name), ": Marlin has one group_size for all linears"))
        .detail(concat(group_size_of(other->scheme), " here, ", group_size_of(linears.front().scheme), " in ",
                       printable(linears.front().name)))
        .hint("a compressed-tensors dialect can say it; w4q list --dialects");
  }
  const bool head = std::ranges::any_of(linears, [](const auto& linear) { return linear.name == "lm_head"; });
  return {{"quant_method", "gptq"},
          {"bits", 4},
          {"group_size", group_size_of(linears.front().scheme)},
          {"desc_act", false},
          {"sym", true},
          {"lm_head", head},
          {"checkpoint_format", "marlin"},
          {"is_marlin_format", true}};
}

}  // namespace

DialectRow marlin_dialect_row() {
  return {.name = "marlin",
          .description = "IST-DASLab's Marlin, AutoGPTQ's checkpoint_format marlin",
          .holds =
              "4 bits without zero points, f16 scales, groups of 128 or whole rows, outputs in multiples of 256, "
              "inputs of 128; no act-order",
          .detect = detect,
          .read = read,
          .decode = decode,
          .fit = fit,
          .tensors = tensors,
          .encode = encode,
          .describe = describe};
}

}  // namespace w4q::checkpoint
