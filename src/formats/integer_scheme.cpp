// The registry row of the integer family: names, the plain definition of encoding and decoding, error bounds.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>

#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"

namespace w4q::formats {
namespace {

constexpr std::string_view form = "int{2,3,4,5,6,7,8}-{g<inputs>,row}-{f16,bf16,f32}[-asym][-actorder]";
constexpr ScaleType scale_types[] = {ScaleType::f16, ScaleType::bf16, ScaleType::f32};

Scheme make(int bits, int block, ScaleType scale, bool asymmetric = false, bool act_order = false) {
  return {SchemeFamily::integer, bits, block, scale, asymmetric, act_order};
}

/// Every width, scale type and flag, and the groups that other people's checkpoints have.
std::vector<Scheme> representative_schemes() {
  using enum ScaleType;
  return {make(4, 128, f16),
          make(4, 128, f16, true),
          make(4, 128, f16, false, true),
          make(4, 128, f16, true, true),
          make(4, 128, bf16),
          make(4, 128, bf16, true),
          make(4, 64, f16, true),
          make(4, 32, f16),
          make(4, 32, f32, true),
          make(4, 48, f32, false, true),
          make(4, whole_row, f16),
          make(4, whole_row, f16, true),
          make(8, 128, f16),
          make(8, 32, f16),
          make(8, 64, f16, true, true),
          make(8, whole_row, bf16),
          make(8, whole_row, bf16, true),
          make(7, 32, f16, true),
          make(6, 64, bf16),
          make(5, 128, f16),
          make(5, whole_row, f32, true),
          make(3, 128, f16),
          make(3, 64, f16, true),
          make(3, 32, bf16, true, true),
          make(3, whole_row, bf16),
          make(2, 64, f16, true),
          make(2, 32, bf16),
          make(2, 64, f32, true, true)};
}

std::string print(const Scheme& scheme) {
  const std::string group = scheme.block == whole_row ? "row" : concat("g", scheme.block);
  return concat("int", scheme.bits, "-", group, "-", to_string(scheme.scale), scheme.asymmetric ? "-asym" : "",
                scheme.act_order ? "-actorder" : "");
}

bool take(std::string_view& text, std::string_view prefix) noexcept {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

/// A number without sign, leading zeros or rest that is not digits.
std::optional<int> take_number(std::string_view& text) noexcept {
  int value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || value < 1 || text.front() == '0') return std::nullopt;
  text.remove_prefix(static_cast<size_t>(stop - text.data()));
  return value;
}

std::optional<int> take_group(std::string_view& text) noexcept {
  if (take(text, "-row")) return whole_row;
  if (!take(text, "-g")) return std::nullopt;
  const auto size = take_number(text);
  return size && *size <= max_dimension ? size : std::nullopt;
}

std::optional<Scheme> parse(std::string_view text) {
  if (!take(text, "int")) return std::nullopt;
  const auto bits = take_number(text);
  if (!bits || !is_integer_bits(*bits)) return std::nullopt;
  const auto group = take_group(text);
  if (!group) return std::nullopt;
  const auto scale =
      std::ranges::find_if(scale_types, [&](ScaleType type) { return take(text, concat("-", to_string(type))); });
  if (scale == std::end(scale_types)) return std::nullopt;
  const bool asymmetric = take(text, "-asym");
  const bool act_order = take(text, "-actorder");
  // A whole row is one group, in whatever order.
  if (!text.empty() || (act_order && *group == whole_row)) return std::nullopt;
  return make(*bits, *group, *scale, asymmetric, act_order);
}

/// Scale and zero of every input of a row, by its group.
class GroupReader {
 public:
  explicit GroupReader(const PackedWeight& weight)
      : scheme_(weight.scheme),
        size_(integer_group_size(scheme_, weight.k)),
        groups_(integer_groups(scheme_, weight.k)),
        scales_(weight.plane(PlaneRole::scales)),
        zeros_(scheme_.asymmetric ? weight.plane(PlaneRole::zeros).bytes.as<uint8_t>() : std::span<const uint8_t>{}),
        index_(scheme_.act_order ? weight.plane(PlaneRole::group_index).bytes.as<int32_t>()
                                 : std::span<const int32_t>{}) {}

  int64_t groups() const noexcept { return groups_; }
  int64_t group_of(int64_t col) const noexcept {
    return index_.empty() ? col / size_ : index_[static_cast<size_t>(col)];
  }
  /// The first input behind `col` that may belong to another group.
  int64_t run_end(int64_t col) const noexcept { return index_.empty() ? (col / size_ + 1) * size_ : col + 1; }
  float scale(int64_t row, int64_t group) const noexcept {
    return load_scale(scales_, static_cast<size_t>(row * groups_ + group));
  }
  int zero(int64_t row, int64_t group) const noexcept {
    return zeros_.empty() ? integer_symmetric_zero(scheme_.bits) : zeros_[static_cast<size_t>(row * groups_ + group)];
  }

 private:
  Scheme scheme_;
  int64_t size_;
  int64_t groups_;
  const Plane& scales_;
  std::span<const uint8_t> zeros_;
  std::span<const int32_t> index_;
};

/// Without statistics no input matters more than another: the reference encoder deals inputs out to the groups.
void deal_groups(PackedWeight& weight) {
  const int64_t groups = integer_groups(weight.scheme, weight.k);
  const auto index = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  for (size_t col = 0; col < index.size(); ++col) {
    index[col] = static_cast<int32_t>(static_cast<int64_t>(col) % groups);
  }
}

void recode(PackedWeight& weight, std::span<const float> values) {
  check_values(values, weight.n, weight.k);
  const GroupReader groups(weight);
  std::vector<uint8_t> codes(static_cast<size_t>(weight.k));
  for (int64_t row = 0; row < weight.n; ++row) {
    for (int64_t col = 0; col < weight.k; ++col) {
      const int64_t group = groups.group_of(col);
      const float scale = groups.scale(row, group);
      const int zero = groups.zero(row, group);
      // A group whose scale is zero decodes to zeros whatever its codes are.
      const float x = scale == 0 ? 0.0f : values[static_cast<size_t>(row * weight.k + col)];
      codes[static_cast<size_t>(col)] = integer_code(x, scale == 0 ? 1.0f : scale, zero, weight.scheme.bits);
    }
    integer_write_codes(weight, row, codes);
  }
}

PackedWeight encode(const Scheme& scheme, std::span<const float> values, int64_t n, int64_t k,
                    std::span<const float> codebook) {
  check_values(values, n, k);
  if (!codebook.empty()) throw Error(ErrorCode::bad_argument, concat("encode: ", print(scheme), " has no codebook"));
  PackedWeight weight = allocate_integer(scheme, n, k);
  if (scheme.act_order) deal_groups(weight);
  const GroupReader groups(weight);
  std::vector<float> low(static_cast<size_t>(groups.groups()));
  std::vector<float> high(low.size());
  for (int64_t row = 0; row < n; ++row) {
    std::ranges::fill(low, 0.0f);
    std::ranges::fill(high, 0.0f);
    for (int64_t col = 0; col < k; ++col) {
      const auto group = static_cast<size_t>(groups.group_of(col));
      low[group] = std::min(low[group], values[static_cast<size_t>(row * k + col)]);
      high[group] = std::max(high[group], values[static_cast<size_t>(row * k + col)]);
    }
    for (size_t group = 0; group < low.size(); ++group) {
      const IntegerScale scale = integer_scale(scheme, low[group], high[group]);
      const size_t index = static_cast<size_t>(row) * low.size() + group;
      put_scale(weight.plane(PlaneRole::scales), index, scale.bits);
      if (scheme.asymmetric) {
        weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()[index] = static_cast<uint8_t>(scale.zero);
      }
    }
  }
  recode(weight, values);
  return weight;
}

void decode_row(const PackedWeight& canonical, int64_t row, std::span<float> out) {
  ensure(canonical.layout == canonical_layout, "decode_row: not the canonical layout");
  ensure(row >= 0 && row < canonical.n && static_cast<int64_t>(out.size()) == canonical.k, "decode_row: wrong row");
  const GroupReader groups(canonical);
  const int bits = canonical.scheme.bits;
  const auto row_words = static_cast<size_t>(dense_words(canonical.k, bits));
  const auto words =
      canonical.plane(PlaneRole::codes).bytes.as<uint32_t>().subspan(static_cast<size_t>(row) * row_words, row_words);
  constexpr int64_t piece = 256;  // codes that end with a word, whatever their width
  std::array<uint8_t, piece> codes;
  for (int64_t begin = 0; begin < canonical.k; begin += piece) {
    const int64_t end = std::min(begin + piece, canonical.k);
    const auto count = static_cast<size_t>(end - begin);
    dense_unpack(
        words.subspan(static_cast<size_t>(begin * bits / 32), static_cast<size_t>(dense_words(end - begin, bits))),
        bits, std::span(codes).first(count));
    for (int64_t col = begin; col < end;) {
      const int64_t group = groups.group_of(col);
      const float scale = groups.scale(row, group);
      const int zero = groups.zero(row, group);
      for (const int64_t last = std::min(groups.run_end(col), end); col < last; ++col) {
        out[static_cast<size_t>(col)] = static_cast<float>(codes[static_cast<size_t>(col - begin)] - zero) * scale;
      }
    }
  }
}

/// Half a step for rounding a value or, asymmetric, a zero; what the rounding of the scale takes off the ends of the
/// range; the quotient's and the product's own rounding. A saturated scale may cut off any value.
double error_bound(const Scheme& scheme, double absmax, std::span<const float>) {
  const int steps = (1 << scheme.bits) - 1;
  const ScaleCodec& codec = scale_codec(scheme.scale);
  const double roundoff = codec.roundoff, smallest = codec.decode(1);
  const double exact = 2 * absmax / steps;
  const double step = exact * (1 + roundoff) + smallest;
  const double bound = 0.5 * step + 2 * absmax * (roundoff + 0x1p-22) + (steps + 1) * smallest;
  return exact > static_cast<double>(integer_scale_max(scheme)) ? absmax + bound : bound;
}

double bits_per_weight(const Scheme& scheme, int64_t n, int64_t k) {
  return bits_per_weight_of_planes(integer_planes(scheme, n, k), n, k);
}

BitPlace place(const Scheme& scheme, int64_t, int64_t k, int64_t row, int64_t col, int bit) {
  const int64_t stream_bit = col * scheme.bits + bit;
  return {row * dense_words(k, scheme.bits) + stream_bit / 32, static_cast<int>(stream_bit % 32),
          row * integer_groups(scheme, k) + col / integer_group_size(scheme, k)};
}

}  // namespace

SchemeRow integer_row() {
  return {.family = SchemeFamily::integer,
          .name = "int",
          .description = "integers times a scale per group, as AWQ, GPTQ and compressed-tensors have them",
          .form = form,
          .schemes = representative_schemes,
          .print = print,
          .parse = parse,
          .table = nullptr,
          .planes = integer_planes,
          .validate = integer_validate,
          .largest_scale = integer_largest_scale,
          .decode_row = decode_row,
          .encode = encode,
          .recode = recode,
          .error_bound = error_bound,
          .bits_per_weight = bits_per_weight,
          .place = place};
}

}  // namespace w4q::formats
