#include "checkpoint/dialect/integer.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"
#include "repack/layout_registry.h"

namespace w4q::checkpoint {
namespace {

using formats::Scheme;

bool contains(std::span<const int> list, int value) { return std::ranges::find(list, value) != list.end(); }

std::string list_text(std::span<const int> list) {
  std::vector<std::string> names;
  for (const int value : list) names.push_back(value == formats::whole_row ? "whole rows" : std::to_string(value));
  return join(names);
}

/// Why a matrix of this size has no place, whatever its scheme; empty: it has.
std::string refuse_size(const PackedLinearInfo& info, const IntegerLimits& limits) {
  if (info.n % limits.n_multiple != 0) {
    return concat("its outputs come in multiples of ", limits.n_multiple, ", this linear has ", info.n);
  }
  if (info.k % limits.k_multiple != 0) {
    return concat("its inputs come in multiples of ", limits.k_multiple, ", this linear has ", info.k);
  }
  return {};
}

/// The least width that the dialect has and that holds `bits`; its widest where none does.
int nearest_bits(std::span<const int> list, int bits) {
  const auto found = std::ranges::find_if(list, [&](int width) { return width >= bits; });
  return found == list.end() ? list.back() : *found;
}

/// The group for rounding anew: the least that the dialect has and that is as large, else the last.
int nearest_group(std::span<const int> list, int group) {
  const auto found = std::ranges::find_if(list, [&](int size) { return size != formats::whole_row && size >= group; });
  return group == formats::whole_row || found == list.end() ? list.back() : *found;
}

bool has_type(std::span<const formats::ScaleType> types, formats::ScaleType type) {
  return std::ranges::find(types, type) != types.end();
}

/// Whether the linear is stored as AWQ or GPTQ have it, under either's names.
bool comes_from_words(const PackedLinearInfo& info) {
  return info.dialect != nullptr && (info.dialect->name.starts_with("awq") || info.dialect->name.starts_with("gptq"));
}

}  // namespace

formats::ScaleType integer_scale_type(const io::Checkpoint& checkpoint, const std::string& scales) {
  const DType dtype = checkpoint.at(scales).dtype;
  for (const auto type : detail::every_scale) {
    if (formats::scale_codec(type).dtype == dtype) return type;
  }
  throw Error(ErrorCode::bad_file, concat(printable(scales), ": scales of type ", dtype_name(dtype)))
      .detail("expected F16, BF16 or F32");
}

DialectFit fit_integer(const PackedLinearInfo& info, const IntegerLimits& limits) {
  if (auto why = refuse_size(info, limits); !why.empty()) return {std::nullopt, std::move(why)};
  Scheme scheme = info.passes.front().scheme;
  std::string loses;
  if (scheme.family != formats::SchemeFamily::integer) {
    loses = "its codes are entries of a table, the dialect has integer steps";
    const int group = info.k % 128 == 0 ? 128 : formats::whole_row;
    scheme = {formats::SchemeFamily::integer, scheme.bits, group, limits.scales.front(), limits.asymmetric, false};
  }
  if (!contains(limits.bits, scheme.bits)) {
    if (loses.empty()) loses = concat("codes of ", scheme.bits, " bits: it has ", list_text(limits.bits));
    scheme.bits = nearest_bits(limits.bits, scheme.bits);
  }
  if (!limits.groups.empty() && !contains(limits.groups, scheme.block)) {
    if (loses.empty())
      loses = concat("groups of ", list_text({&scheme.block, 1}), ": it has ", list_text(limits.groups));
    scheme.block = nearest_group(limits.groups, scheme.block);
  }
  if (limits.whole_groups && scheme.block != formats::whole_row && info.k % scheme.block != 0) {
    return {std::nullopt, concat("groups of ", scheme.block, " do not divide the ", info.k, " inputs evenly")};
  }
  const bool kept = loses.empty() && comes_from_words(info) && has_type(limits.kept_scales, scheme.scale);
  if (!kept && !has_type(limits.scales, scheme.scale)) scheme.scale = limits.scales.front();
  if (!limits.act_order) scheme.act_order = false;
  if (!limits.symmetric) scheme.asymmetric = true;
  if (!limits.asymmetric) scheme.asymmetric = false;
  return {scheme, std::move(loses)};
}

std::string refuse_large_zero(const formats::PackedWeight& canonical) {
  if (!canonical.scheme.asymmetric) return {};
  const int largest = (1 << canonical.scheme.bits) - 1;
  const auto zeros = canonical.plane(formats::PlaneRole::zeros).bytes.as<uint8_t>();
  const auto bad = std::ranges::find_if(zeros, [&](uint8_t zero) { return zero > largest; });
  if (bad == zeros.end()) return {};
  const int64_t groups = formats::integer_groups(canonical.scheme, canonical.k), index = bad - zeros.begin();
  return concat("row ", index / groups, ", group ", index % groups, " has the zero point ", +*bad, ", the largest is ",
                largest);
}

std::vector<std::string> linears_with(const io::Checkpoint& checkpoint, std::string_view suffix) {
  std::vector<std::string> names;
  for (const auto& [name, info] : checkpoint.tensors()) {
    if (name.size() > suffix.size() && name.ends_with(suffix)) {
      names.push_back(name.substr(0, name.size() - suffix.size()));
    }
  }
  return names;
}

PackedLinearInfo dialect_linear(std::string name, const Scheme& scheme, int64_t n, int64_t k, DType source_dtype,
                                std::span<const formats::StoredSpec> specs) {
  PackedLinearInfo info{std::move(name), n, k, source_dtype, {{scheme, std::string(formats::canonical_layout)}}};
  for (const auto& spec : specs) info.stored.push_back({info.name + spec.suffix, spec.dtype, spec.shape});
  return info;
}

void check_stored(const io::Checkpoint& checkpoint, const PackedLinearInfo& info, std::string_view what) {
  for (const auto& wanted : info.stored) {
    const io::TensorInfo& found = checkpoint.at(wanted.name);
    if (found.dtype == wanted.dtype && found.shape == wanted.shape) continue;
    throw Error(ErrorCode::bad_file, concat(printable(wanted.name), ": wrong type or shape"))
        .detail(concat("expected ", dtype_name(wanted.dtype), " ", shape_text(wanted.shape), " by ", what, " with ",
                       info.n, " outputs and ", info.k, " inputs, found ", dtype_name(found.dtype), " ",
                       shape_text(found.shape), " in ", checkpoint.file_of(wanted.name)));
  }
}

const Shape& matrix_shape(const io::Checkpoint& checkpoint, const std::string& name) {
  const io::TensorInfo& info = checkpoint.at(name);
  if (info.shape.size() == 2 && info.shape[0] > 0 && info.shape[1] > 0 && info.shape[0] <= formats::max_dimension &&
      info.shape[1] <= formats::max_dimension) {
    return info.shape;
  }
  throw Error(ErrorCode::bad_file, concat(printable(name), ": expected a matrix, found ", shape_text(info.shape)))
      .detail("in " + checkpoint.file_of(name));
}

formats::PackedWeight unpack_stored(std::string_view layout, const Scheme& scheme, const PackedLinearInfo& info,
                                    std::vector<formats::StoredTensor> tensors,
                                    std::span<const formats::PlaneRole> roles) {
  formats::PackedWeight packed{scheme, std::string(layout), info.n, info.k, {}};
  for (size_t i = 0; i < roles.size(); ++i) {
    packed.planes.push_back({{roles[i], tensors[i].spec.dtype, tensors[i].spec.shape}, std::move(tensors[i].bytes)});
  }
  return repack::layout_row(layout).unpack(packed, info.name);
}

std::vector<formats::StoredTensor> pack_stored(std::string_view layout, const formats::PackedWeight& canonical,
                                               std::vector<formats::StoredSpec> specs,
                                               std::span<const formats::PlaneRole> roles) {
  formats::PackedWeight packed = repack::layout_row(layout).pack(canonical);
  std::vector<formats::StoredTensor> result;
  for (size_t i = 0; i < roles.size(); ++i) {
    auto& plane = packed.plane(roles[i]);
    ensure(plane.spec.dtype == specs[i].dtype && plane.spec.shape == specs[i].shape, "pack_stored: another plane");
    result.push_back({std::move(specs[i]), std::move(plane.bytes)});
  }
  return result;
}

bool has_symmetric_zeros(const formats::PackedWeight& canonical) {
  const auto zeros = canonical.plane(formats::PlaneRole::zeros).bytes.as<uint8_t>();
  const int zero = formats::integer_symmetric_zero(canonical.scheme.bits);
  return std::ranges::all_of(zeros, [zero](uint8_t value) { return value == zero; });
}

formats::PackedWeight without_zeros(formats::PackedWeight canonical, std::string_view name) {
  if (!has_symmetric_zeros(canonical)) {
    throw Error(ErrorCode::bad_file, concat(printable(name), ": has zero points of its own"))
        .detail(concat("expected ", formats::integer_symmetric_zero(canonical.scheme.bits), " everywhere"));
  }
  std::erase_if(canonical.planes, [](const auto& plane) { return plane.spec.role == formats::PlaneRole::zeros; });
  canonical.scheme.asymmetric = false;
  return canonical;
}

}  // namespace w4q::checkpoint
