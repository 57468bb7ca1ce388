#include "formats/integer_recast.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"

namespace w4q::formats {
namespace {

constexpr int64_t grain = 1 << 14;

size_t count_of(const PackedWeight& weight, PlaneRole role) {
  return static_cast<size_t>(element_count(weight.plane(role).spec.shape));
}

std::string place_text(const PackedWeight& weight, int64_t index) {
  const int64_t groups = integer_groups(weight.scheme, weight.k);
  return concat("row ", index / groups, ", group ", index % groups);
}

/// Index of the first difference of two arrays of the same length, −1 where there is none.
template <class T>
int64_t first_difference(std::span<const T> a, std::span<const T> b) {
  const auto [at, ignored] = std::ranges::mismatch(a, b);
  return at == a.end() ? -1 : at - a.begin();
}

std::vector<float> wide_scales(const PackedWeight& weight) {
  const Plane& scales = weight.plane(PlaneRole::scales);
  std::vector<float> values(count_of(weight, PlaneRole::scales));
  widen(scales.bytes.bytes(), scales.spec.dtype, values);
  return values;
}

Buffer narrow_scales(std::span<const float> values, DType dtype) {
  Buffer bytes(values.size() * static_cast<size_t>(dtype_bits(dtype)) / 8);
  narrow(values, dtype, bytes.bytes());
  return bytes;
}

std::string scale_loss(const PackedWeight& weight, const Scheme& scheme) {
  const DType from = scale_codec(weight.scheme.scale).dtype, to = scale_codec(scheme.scale).dtype;
  if (from == to || to == DType::f32) return {};
  const auto values = wide_scales(weight);
  std::vector<float> back(values.size());
  widen(narrow_scales(values, to).bytes(), to, back);
  const int64_t at = first_difference<float>(values, back);
  if (at < 0) return {};
  return concat("the scale ", values[static_cast<size_t>(at)], " at ", place_text(weight, at), " is no ",
                dtype_name(to), ", the nearest is ", back[static_cast<size_t>(at)]);
}

std::string zero_loss(const PackedWeight& weight, const Scheme& scheme) {
  if (!weight.scheme.asymmetric || scheme.asymmetric) return {};
  const auto zeros = weight.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const int zero = integer_symmetric_zero(scheme.bits);
  const auto bad = std::ranges::find_if(zeros, [zero](uint8_t value) { return value != zero; });
  if (bad == zeros.end()) return {};
  return concat("it has no zero points: ", place_text(weight, bad - zeros.begin()), " has ", +*bad, ", expected ", zero,
                " everywhere");
}

std::string order_loss(const PackedWeight& weight, const Scheme& scheme) {
  if (!weight.scheme.act_order || scheme.act_order) return {};
  const auto index = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  const int64_t size = integer_group_size(scheme, weight.k);
  for (int64_t col = 0; col < weight.k; ++col) {
    const int32_t group = index[static_cast<size_t>(col)];
    if (group == col / size) continue;
    return concat("act-order: it has no group_index, and input ", col, " belongs to group ", group, " instead of ",
                  col / size);
  }
  return {};
}

/// A plane of `canonical` as `scheme` has it.
Buffer recast_plane(const PackedWeight& canonical, const Scheme& scheme, const PlaneSpec& spec) {
  const Scheme& from = canonical.scheme;
  if (spec.role == PlaneRole::scales && scheme.scale != from.scale) {
    return narrow_scales(wide_scales(canonical), spec.dtype);
  }
  if (spec.role == PlaneRole::zeros && !from.asymmetric) {
    Buffer zeros(static_cast<size_t>(byte_count(spec.dtype, spec.shape)));
    std::ranges::fill(zeros.as<uint8_t>(), static_cast<uint8_t>(integer_symmetric_zero(scheme.bits)));
    return zeros;
  }
  if (spec.role == PlaneRole::group_index && !from.act_order) {
    Buffer index(static_cast<size_t>(byte_count(spec.dtype, spec.shape)));
    const int64_t size = integer_group_size(scheme, canonical.k);
    for (int64_t col = 0; col < canonical.k; ++col) {
      index.as<int32_t>()[static_cast<size_t>(col)] = static_cast<int32_t>(col / size);
    }
    return index;
  }
  return canonical.plane(spec.role).bytes.clone();
}

/// Counts equal codes; whole planes first, since they are equal but for a bug.
int64_t equal_codes(const PackedWeight& a, const PackedWeight& b) {
  if (same_bytes(a.plane(PlaneRole::codes).bytes.bytes(), b.plane(PlaneRole::codes).bytes.bytes())) return a.n * a.k;
  std::atomic<int64_t> equal = 0;
  parallel_for(a.n, std::max<int64_t>(1, grain / a.k), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> x(static_cast<size_t>(a.k)), y(x.size());
    int64_t count = 0;
    for (int64_t row = begin; row < end; ++row) {
      integer_read_codes(a, row, x);
      integer_read_codes(b, row, y);
      for (size_t col = 0; col < x.size(); ++col) count += x[col] == y[col];
    }
    equal += count;
  });
  return equal;
}

/// Equal zero points of two weights with the same groups, whether their schemes store them or not.
int64_t equal_zeros(const PackedWeight& a, const PackedWeight& b) {
  std::vector<uint8_t> x(static_cast<size_t>(integer_groups(a.scheme, a.k))), y(x.size());
  int64_t equal = 0;
  for (int64_t row = 0; row < a.n; ++row) {
    integer_read_zeros(a, row, x);
    integer_read_zeros(b, row, y);
    for (size_t group = 0; group < x.size(); ++group) equal += x[group] == y[group];
  }
  return equal;
}

/// Equal scales, bit by bit where both are stored in one type.
int64_t equal_scales(const PackedWeight& a, const PackedWeight& b) {
  const Plane &p = a.plane(PlaneRole::scales), &q = b.plane(PlaneRole::scales);
  if (p.spec.dtype == q.spec.dtype && same_bytes(p.bytes.bytes(), q.bytes.bytes())) {
    return static_cast<int64_t>(count_of(a, PlaneRole::scales));
  }
  const auto x = wide_scales(a), y = wide_scales(b);
  int64_t equal = 0;
  for (size_t i = 0; i < x.size(); ++i) equal += std::bit_cast<uint32_t>(x[i]) == std::bit_cast<uint32_t>(y[i]);
  return equal;
}

bool equal_groups(const PackedWeight& a, const PackedWeight& b) {
  if (!a.scheme.act_order && !b.scheme.act_order) return true;
  const auto index = [](const PackedWeight& weight) {
    if (weight.scheme.act_order) return weight.clone();
    Scheme scheme = weight.scheme;
    scheme.act_order = true;
    return allocate_integer(scheme, weight.n, weight.k);
  };
  const PackedWeight x = index(a), y = index(b);
  return same_bytes(x.plane(PlaneRole::group_index).bytes.bytes(), y.plane(PlaneRole::group_index).bytes.bytes());
}

}  // namespace

RecastProof& RecastProof::operator+=(const RecastProof& other) noexcept {
  codes += other.codes, codes_equal += other.codes_equal;
  zeros += other.zeros, zeros_equal += other.zeros_equal;
  scales += other.scales, scales_equal += other.scales_equal;
  groups_equal = groups_equal && other.groups_equal;
  return *this;
}

std::string integer_recast_loss(const PackedWeight& canonical, const Scheme& scheme) {
  const Scheme& from = canonical.scheme;
  if (from.family != SchemeFamily::integer || scheme.family != SchemeFamily::integer) {
    return "its codes are not integer steps";
  }
  if (from.bits != scheme.bits) return concat("codes of ", from.bits, " bits");
  if (integer_group_size(from, canonical.k) != integer_group_size(scheme, canonical.k) &&
      integer_groups(from, canonical.k) + integer_groups(scheme, canonical.k) > 2) {
    return concat("groups of ", from.block);
  }
  for (auto* loss : {order_loss, zero_loss, scale_loss}) {
    if (auto why = loss(canonical, scheme); !why.empty()) return why;
  }
  return {};
}

PackedWeight integer_recast(const PackedWeight& canonical, const Scheme& scheme, std::string_view name) {
  if (auto why = integer_recast_loss(canonical, scheme); !why.empty()) {
    throw Error(ErrorCode::unsupported, concat(printable(name), " cannot be said as ", to_string(scheme))).detail(why);
  }
  PackedWeight result{scheme, std::string(canonical_layout), canonical.n, canonical.k, {}};
  for (const PlaneSpec& spec : integer_planes(scheme, canonical.n, canonical.k)) {
    result.planes.push_back({spec, recast_plane(canonical, scheme, spec)});
  }
  return result;
}

RecastProof integer_compare(const PackedWeight& a, const PackedWeight& b) {
  RecastProof proof;
  proof.codes = a.n * a.k;
  proof.scales = proof.zeros = static_cast<int64_t>(count_of(a, PlaneRole::scales));
  if (a.scheme.bits != b.scheme.bits || a.n != b.n || a.k != b.k ||
      count_of(a, PlaneRole::scales) != count_of(b, PlaneRole::scales)) {
    return proof;
  }
  proof.codes_equal = equal_codes(a, b);
  proof.scales_equal = equal_scales(a, b);
  proof.zeros_equal = equal_zeros(a, b);
  proof.groups_equal = equal_groups(a, b);
  return proof;
}

}  // namespace w4q::formats
