// AutoAWQ's checkpoints of version "gemm": the words of layout awq, a zero point for every group.
#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"
#include "model/dialect_awq_config.h"
#include "model/dialect_integer.h"
#include "model/dialect_rows.h"
#include "repack/layout_registry.h"

namespace w4q::model {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::StoredSpec;
using formats::StoredTensor;

constexpr std::string_view layout = "awq";
constexpr int64_t fields = 8;  // codes of a word
constexpr std::array widths{4};
constexpr std::array scale_types{formats::ScaleType::f16};
constexpr IntegerLimits limits{
    .bits = widths, .scales = scale_types, .symmetric = false, .n_multiple = fields, .whole_groups = true};

std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  const int64_t groups = formats::integer_groups(scheme, k);
  return {{".qweight", DType::i32, {k, n / fields}},
          {".qzeros", DType::i32, {groups, n / fields}},
          {".scales", DType::f16, {groups, n}}};
}

bool detect(const DialectSource& source) { return awq_version(source) == "gemm"; }

bool is_symmetric(const io::Checkpoint& checkpoint, const PackedLinearInfo& info) {
  constexpr uint32_t eights = 0x88888888;
  const Buffer zeros = Buffer::copy_of(checkpoint.load(info.name + ".qzeros")->bytes);
  return std::ranges::all_of(zeros.as<uint32_t>(), [](uint32_t word) { return word == eights; });
}

QuantizationConfig read(const DialectSource& source) {
  return read_awq(source, {.tensors = tensors, .is_symmetric = is_symmetric, .sizes = [](const Shape& qweight) {
                             return AwqSizes{qweight[1] * fields, qweight[0]};
                           }});
}

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> stored) {
  Scheme scheme = info.passes.front().scheme;
  const bool symmetric = !scheme.asymmetric;
  scheme.asymmetric = true;
  PackedWeight packed{scheme, std::string(layout), info.n, info.k, {}};
  constexpr std::array roles{PlaneRole::codes, PlaneRole::zeros, PlaneRole::scales};
  for (size_t i = 0; i < roles.size(); ++i) {
    packed.planes.push_back({{roles[i], stored[i].spec.dtype, stored[i].spec.shape}, std::move(stored[i].bytes)});
  }
  PackedWeight canonical = repack::layout_row(layout).unpack(packed, info.name);
  return symmetric ? without_zeros(std::move(canonical), info.name) : std::move(canonical);
}

DialectFit fit(const PackedLinearInfo& info) { return fit_integer(info, limits); }

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  PackedWeight packed = repack::layout_row(layout).pack(canonical);
  const auto take = [&](std::string suffix, PlaneRole role) {
    auto& plane = packed.plane(role);
    return StoredTensor{{std::move(suffix), plane.spec.dtype, plane.spec.shape}, std::move(plane.bytes)};
  };
  std::vector<StoredTensor> result;
  result.push_back(take(".qweight", PlaneRole::codes));
  result.push_back(take(".qzeros", PlaneRole::zeros));
  result.push_back(take(".scales", PlaneRole::scales));
  return result;
}

io::Json describe(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  return describe_awq("gemm", linears, kept);
}

std::string refuses(const PackedWeight& canonical) { return refuse_large_zero(canonical); }

}  // namespace

DialectRow awq_gemm_row() {
  return {.name = "awq-gemm",
          .description = "AutoAWQ, version gemm: what most AWQ checkpoints are",
          .holds = "4 bits, zero points, f16 scales, even groups, outputs in multiples of 8; no act-order",
          .detect = detect,
          .read = read,
          .decode = decode,
          .fit = fit,
          .tensors = tensors,
          .encode = encode,
          .describe = describe,
          .refuses = refuses};
}

}  // namespace w4q::model
