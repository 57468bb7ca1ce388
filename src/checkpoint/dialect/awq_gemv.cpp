// AutoAWQ's checkpoints of the versions "gemv" and "gemv_fast": formats/dialect/awq_gemv.h.
#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/dialect/awq_config.h"
#include "checkpoint/dialect/integer.h"
#include "checkpoint/dialect/rows.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/dialect/awq_gemv.h"
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

/// tokenizer::Words of an output's zero points. Throws unsupported for groups that the layouts do not have.
int64_t zero_words(const Scheme& scheme, int64_t k) {
  const int64_t size = formats::integer_group_size(scheme, k);
  if (const int64_t words = formats::awq_gemv_words(size, k); words > 0) return words;
  throw Error(ErrorCode::unsupported, concat("AWQ gemv and gemv_fast have no groups of ", size))
      .detail("expected 32, 64, or 128 and more");
}

DialectFit fit_gemv(const PackedLinearInfo& info, const IntegerLimits& limits) {
  DialectFit fit = fit_integer(info, limits);
  if (!fit.scheme) return fit;
  const int64_t size = formats::integer_group_size(*fit.scheme, info.k);
  if (formats::awq_gemv_words(size, info.k) > 0) return fit;
  if (fit.loses.empty()) fit.loses = concat("groups of ", size, ": it has 32, 64, and 128 or more");
  fit.scheme->block = size > 64 ? 64 : 32;
  if (info.k % fit.scheme->block != 0) fit.scheme.reset();
  return fit;
}

/// A zeroed canonical weight with zero points, whatever the linear's scheme.
PackedWeight allocate(const PackedLinearInfo& info) {
  Scheme scheme = info.passes.front().scheme;
  scheme.asymmetric = true;
  return formats::allocate_integer(scheme, info.n, info.k);
}

PackedWeight finish(PackedWeight canonical, const PackedLinearInfo& info) {
  const bool symmetric = !info.passes.front().scheme.asymmetric;
  return symmetric ? without_zeros(std::move(canonical), info.name) : std::move(canonical);
}

std::vector<StoredTensor> allocate_tensors(std::vector<StoredSpec> specs) {
  std::vector<StoredTensor> result;
  for (auto& spec : specs) result.push_back(formats::allocate_stored(std::move(spec)));
  return result;
}

namespace gemv {

constexpr int64_t fields = formats::awq_gemv_fields;
constexpr std::array kept{formats::ScaleType::f16, formats::ScaleType::bf16};
constexpr IntegerLimits limits{.bits = widths,
                               .scales = scale_types,
                               .symmetric = false,
                               .k_multiple = fields,
                               .whole_groups = true,
                               .kept_scales = kept};

std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  const int64_t words = zero_words(scheme, k);
  return {{".qweight", DType::i32, {n, k / fields}},
          {".qzeros", DType::i32, {n, words}},
          {".scales", formats::scale_codec(scheme.scale).dtype, {n, words * fields}}};
}

/// Zero points of 8, and none behind the last group.
bool is_symmetric(const io::Checkpoint& checkpoint, const PackedLinearInfo& info) {
  constexpr uint32_t eights = 0x88888888;
  const int64_t words = zero_words(info.passes.front().scheme, info.k);
  const int64_t groups = formats::integer_groups(info.passes.front().scheme, info.k);
  const Buffer bytes = Buffer::copy_of(checkpoint.load(info.name + ".qzeros")->bytes);
  const auto zeros = bytes.as<uint32_t>();
  for (size_t i = 0; i < zeros.size(); ++i) {
    const int64_t used = std::clamp<int64_t>(groups - static_cast<int64_t>(i) % words * fields, 0, fields);
    const uint32_t mask = used == 0 ? 0 : ~0u >> (32 - 4 * used);
    if ((zeros[i] & mask) != (eights & mask)) return false;
  }
  return true;
}

constexpr AwqVersion version{.sizes =
                                 [](const Shape& qweight) {
                                   return AwqSizes{qweight[0], qweight[1] * fields};
                                 },
                             .tensors = tensors,
                             .is_symmetric = is_symmetric,
                             .scales = kept};

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> stored) {
  PackedWeight canonical = allocate(info);
  canonical.plane(PlaneRole::codes).bytes = std::move(stored[0].bytes);
  formats::awq_gemv_unpack_groups(stored[1].bytes.as<uint32_t>(), stored[2].bytes.as<uint16_t>(),
                                  zero_words(canonical.scheme, info.k), canonical, info.name);
  return finish(std::move(canonical), info);
}

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  auto result = allocate_tensors(tensors(canonical.scheme, canonical.n, canonical.k));
  result[0].bytes = canonical.plane(PlaneRole::codes).bytes.clone();
  formats::awq_gemv_pack_groups(canonical, zero_words(canonical.scheme, canonical.k), result[1].bytes.as<uint32_t>(),
                                result[2].bytes.as<uint16_t>());
  return result;
}

}  // namespace gemv

namespace fast {

constexpr int64_t rows = formats::awq_gemv_fast_outputs;
constexpr IntegerLimits limits{.bits = widths,
                               .scales = scale_types,
                               .symmetric = false,
                               .n_multiple = 8,
                               .k_multiple = formats::awq_gemv_fast_inputs,
                               .whole_groups = true};

std::vector<StoredSpec> tensors(const Scheme& scheme, int64_t n, int64_t k) {
  const int64_t lines = 8 * zero_words(scheme, k);
  return {{".qweight", DType::i16, {n / rows, k}},
          {".qzeros", DType::f16, {lines, n}},
          {".scales", DType::f16, {lines, n}}};
}

bool is_symmetric(const io::Checkpoint& checkpoint, const PackedLinearInfo& info) {
  constexpr int symmetric_zero = 8;
  const Buffer offsets = Buffer::copy_of(checkpoint.load(info.name + ".qzeros")->bytes);
  const Buffer scales = Buffer::copy_of(checkpoint.load(info.name + ".scales")->bytes);
  const int64_t groups = formats::integer_groups(info.passes.front().scheme, info.k);
  for (size_t i = 0; i < static_cast<size_t>(groups * info.n); ++i) {
    if (formats::awq_fast_zero(scales.as<uint16_t>()[i], offsets.as<uint16_t>()[i]) != symmetric_zero) return false;
  }
  return true;
}

constexpr AwqVersion version{.sizes =
                                 [](const Shape& qweight) {
                                   return AwqSizes{qweight[0] * rows, qweight[1]};
                                 },
                             .tensors = tensors,
                             .is_symmetric = is_symmetric,
                             .scales = scale_types};

PackedWeight decode(const PackedLinearInfo& info, std::vector<StoredTensor> stored) {
  if (info.k % formats::awq_gemv_fast_inputs != 0) {
    throw Error(ErrorCode::bad_file, concat(printable(info.name), ".qweight: ", info.k, " inputs"))
        .detail("AWQ gemv_fast has inputs in multiples of 64");
  }
  PackedWeight canonical = allocate(info);
  formats::awq_fast_unpack_codes(stored[0].bytes.as<uint16_t>(), info.n, info.k,
                                 canonical.plane(PlaneRole::codes).bytes.as<uint32_t>());
  formats::awq_fast_unpack_groups(stored[2].bytes.as<uint16_t>(), stored[1].bytes.as<uint16_t>(),
                                  zero_words(canonical.scheme, info.k), canonical, info.name);
  return finish(std::move(canonical), info);
}

std::vector<StoredTensor> encode(const PackedWeight& canonical) {
  auto result = allocate_tensors(tensors(canonical.scheme, canonical.n, canonical.k));
  formats::awq_fast_pack_codes(canonical.plane(PlaneRole::codes).bytes.as<uint32_t>(), canonical.n, canonical.k,
                               result[0].bytes.as<uint16_t>());
  formats::awq_fast_pack_groups(canonical, zero_words(canonical.scheme, canonical.k), result[2].bytes.as<uint16_t>(),
                                result[1].bytes.as<uint16_t>());
  return result;
}

std::string refuses(const PackedWeight& canonical) {
  auto why = refuse_large_zero(canonical);
  return why.empty() ? formats::awq_fast_refuse_zero(canonical) : why;
}

}  // namespace fast
}  // namespace

DialectRow awq_gemv_row() {
  return {.name = "awq-gemv",
          .description = "AutoAWQ, version gemv: outputs in rows",
          .holds =
              "4 bits, zero points, f16 scales, even groups of 32, 64, 128 and more, inputs in multiples of 8; no "
              "act-order",
          .detect = [](const DialectSource& source) { return awq_version(source) == "gemv"; },
          .read = [](const DialectSource& source) { return read_awq(source, gemv::version); },
          .decode = gemv::decode,
          .fit = [](const PackedLinearInfo& info) { return fit_gemv(info, gemv::limits); },
          .tensors = gemv::tensors,
          .encode = gemv::encode,
          .describe = [](const std::vector<DialectLinear>& linears,
                         const std::vector<std::string>& kept) { return describe_awq("gemv", linears, kept); },
          .refuses = refuse_large_zero};
}

DialectRow awq_gemv_fast_row() {
  return {.name = "awq-gemv-fast",
          .description = "AutoAWQ, version gemv_fast, and llm-awq: zero points as products with their scales",
          .holds = "as awq-gemv, inputs in multiples of 64, outputs of 8; a product scale · zero that f16 holds",
          .detect = [](const DialectSource& source) { return awq_version(source) == "gemv_fast"; },
          .read = [](const DialectSource& source) { return read_awq(source, fast::version); },
          .decode = fast::decode,
          .fit = [](const PackedLinearInfo& info) { return fit_gemv(info, fast::limits); },
          .tensors = fast::tensors,
          .encode = fast::encode,
          .describe = [](const std::vector<DialectLinear>& linears,
                         const std::vector<std::string>& kept) { return describe_awq("gemv_fast", linears, kept); },
          .refuses = fast::refuses};
}

}  // namespace w4q::checkpoint
