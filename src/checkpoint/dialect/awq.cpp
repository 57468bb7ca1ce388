// AutoAWQ's checkpoints of the versions "gemm" and "marlin": tensors that are planes of the layouts awq and marlin.
#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/dialect/awq_config.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/dialect/rows.h"
#include "formats/integer.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::StoredSpec;
using formats::StoredTensor;

constexpr std::array widths{4};
constexpr std::array scale_types{formats::ScaleType::f16};

namespace gemm {

constexpr int64_t fields = 8;  // codes of a word
constexpr std::array roles{PlaneRole::codes, PlaneRole::zeros, PlaneRole::scales};
constexpr IntegerLimits limits{.bits = widths,
                               .scales = scale_types,
                               .symmetric = false,
                               .n_multiple = fields,
                               .whole_groups = true,
                               .kept_scales = detail::every_scale};

std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  const int64_t groups = formats::integer_groups(scheme, k);
  return {{".qweight", DType::i32, {k, n / fields}},
          {".qzeros", DType::i32, {groups, n / fields}},
          {".scales", formats::scale_codec(scheme.scale).dtype, {groups, n}}};
}

bool is_symmetric(const io::Checkpoint& checkpoint, const PackedLinearInfo& info) {
  constexpr uint32_t eights = 0x88888888;
  const Buffer zeros = Buffer::copy_of(checkpoint.load(info.name + ".qzeros")->bytes);
  return std::ranges::all_of(zeros.as<uint32_t>(), [](uint32_t word) { return word == eights; });
}

constexpr AwqVersion version{.sizes =
                                 [](const Shape& qweight) {
                                   return AwqSizes{qweight[1] * fields, qweight[0]};
                                 },
                             .tensors = tensors,
                             .is_symmetric = is_symmetric,
                             .scales = detail::every_scale};

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> stored) {
  Scheme scheme = info.passes.front().scheme;
  const bool symmetric = !std::exchange(scheme.asymmetric, true);
  PackedWeight canonical = unpack_stored("awq", scheme, info, std::move(stored), roles);
  return symmetric ? without_zeros(std::move(canonical), info.name) : std::move(canonical);
}

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  return pack_stored("awq", canonical, tensors(canonical.scheme, canonical.n, canonical.k), roles);
}

}  // namespace gemm

namespace marlin {

constexpr std::array roles{PlaneRole::codes, PlaneRole::scales};
constexpr std::array half_types{formats::ScaleType::f16, formats::ScaleType::bf16};
constexpr IntegerLimits limits = [] {
  IntegerLimits result = marlin_limits;
  result.kept_scales = half_types;
  return result;
}();

std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  return {{".qweight", DType::i32, {k / marlin_tile_inputs, 2 * n}},
          {".scales", formats::scale_codec(scheme.scale).dtype, {formats::integer_groups(scheme, k), n}}};
}

constexpr AwqVersion version{.sizes =
                                 [](const Shape& qweight) {
                                   return AwqSizes{qweight[1] / 2, qweight[0] * marlin_tile_inputs};
                                 },
                             .tensors = tensors,
                             .is_symmetric = nullptr,
                             .scales = half_types};

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> stored) {
  return unpack_stored("marlin", info.passes.front().scheme, info, std::move(stored), roles);
}

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  return pack_stored("marlin", canonical, tensors(canonical.scheme, canonical.n, canonical.k), roles);
}

}  // namespace marlin
}  // namespace

DialectRow awq_gemm_row() {
  return {.name = "awq-gemm",
          .description = "AutoAWQ, version gemm: what most AWQ checkpoints are",
          .holds = "4 bits, zero points, f16 scales, even groups, outputs in multiples of 8; no act-order",
          .detect = [](const DialectSource& source) { return awq_version(source) == "gemm"; },
          .read = [](const DialectSource& source) { return read_awq(source, gemm::version); },
          .decode = gemm::decode,
          .fit = [](const PackedLinearInfo& info) { return fit_integer(info, gemm::limits); },
          .tensors = gemm::tensors,
          .encode = gemm::encode,
          .describe = [](const std::vector<DialectLinear>& linears,
                         const std::vector<std::string>& kept) { return describe_awq("gemm", linears, kept); },
          .refuses = refuse_large_zero};
}

DialectRow awq_marlin_row() {
  return {.name = "awq-marlin",
          .description = "AutoAWQ, version marlin: Marlin's words under AWQ's names",
          .holds =
              "4 bits without zero points, f16 scales, groups of 128 or whole rows, outputs in multiples of 256, "
              "inputs of 128; no act-order",
          .detect = [](const DialectSource& source) { return awq_version(source) == "marlin"; },
          .read = [](const DialectSource& source) { return read_awq(source, marlin::version); },
          .decode = marlin::decode,
          .fit = [](const PackedLinearInfo& info) { return fit_integer(info, marlin::limits); },
          .tensors = marlin::tensors,
          .encode = marlin::encode,
          .describe = [](const std::vector<DialectLinear>& linears,
                         const std::vector<std::string>& kept) { return describe_awq("marlin", linears, kept); }};
}

}  // namespace w4q::checkpoint
