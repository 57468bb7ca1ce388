#include "formats/dialect/bitsandbytes.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/lut.h"
#include "formats/table/nested_scales.h"

namespace w4q::formats {
namespace {

struct PlaneName {
  PlaneRole role;
  std::string_view suffix;
};
constexpr PlaneName copied_planes[] = {{PlaneRole::scales, ".weight.absmax"},
                                       {PlaneRole::codebook, ".weight.quant_map"},
                                       {PlaneRole::nested_scales, ".weight.nested_absmax"},
                                       {PlaneRole::nested_codebook, ".weight.nested_quant_map"}};

constexpr int64_t grain = int64_t{1} << 20;

/// Bytes with their nibbles exchanged.
void swap_nibbles(std::span<const std::byte> from, std::byte* to) {
  parallel_for(static_cast<int64_t>(from.size()), grain, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      to[i] = (from[i] << 4) | (from[i] >> 4);
    }
  });
}

/// As Python writes a float: the fewest digits that read back the same, with a point or an exponent.
std::string python_float(double value) {
  char text[32];
  const double magnitude = value < 0 ? -value : value;
  const auto form = magnitude != 0 && (magnitude < 1e-4 || magnitude >= 1e16) ? std::chars_format::scientific
                                                                              : std::chars_format::fixed;
  const auto [end, error] = std::to_chars(text, text + sizeof text, value, form);
  ensure(error == std::errc{}, "python_float: no room");
  std::string result(text, end);
  if (result.find_first_of(".en") == std::string::npos) result += ".0";
  return result;
}

Scheme scheme_of(const BitsandbytesState& state) {
  return {SchemeFamily::lut, lut_bits, state.block, state.nested ? ScaleType::nested : ScaleType::f32};
}

}  // namespace

std::string to_json_text(const BitsandbytesState& state) {
  std::string text = concat(R"({"quant_type": ")", state.type, R"(", "blocksize": )", state.block, R"(, "dtype": ")",
                            state.dtype, R"(", "shape": [)", state.n, ", ", state.k, "]");
  if (state.nested) {
    text += concat(R"(, "nested_blocksize": )", nested_block, R"(, "nested_dtype": "float32", "nested_offset": )",
                   python_float(static_cast<double>(state.nested_offset)));
  }
  return text + "}";
}

std::string_view bitsandbytes_type(const PackedWeight& canonical) {
  const auto table = canonical.plane(PlaneRole::codebook).bytes.as<float>();
  // The sign of a zero is lost in some files.
  const auto same = [&](const std::array<float, lut_entries>& known) { return std::ranges::equal(table, known); };
  return same(nf4_table()) ? "nf4" : same(fp4_table()) ? "fp4" : "";
}

std::vector<StoredSpec> bitsandbytes_specs(const Scheme& scheme, int64_t n, int64_t k) {
  std::vector<StoredSpec> specs = {{".weight", DType::u8, {(n * k + 1) / 2, 1}}};
  for (const PlaneSpec& plane : scheme_row(SchemeFamily::lut).planes(scheme, n, k)) {
    for (const auto& [role, suffix] : copied_planes) {
      if (plane.role == role) specs.push_back({std::string(suffix), plane.dtype, plane.shape});
    }
  }
  return specs;
}

PackedWeight decode_bitsandbytes(const BitsandbytesState& state, std::span<const StoredTensor> tensors) {
  const Scheme scheme = scheme_of(state);
  PackedWeight weight = allocate_canonical(scheme, state.n, state.k);
  auto& codes = weight.plane(PlaneRole::codes).bytes;
  swap_nibbles(stored(tensors, ".weight").bytes.bytes(), codes.data());
  if (state.n * state.k % 2 != 0) codes.data()[state.n * state.k / 2] &= std::byte{0x0F};
  for (const auto& [role, suffix] : copied_planes) {
    const StoredTensor* tensor = find_stored(tensors, suffix);
    if (tensor != nullptr) std::ranges::copy(tensor->bytes.bytes(), weight.plane(role).bytes.data());
  }
  if (state.nested) weight.plane(PlaneRole::nested_offset).bytes.as<float>()[0] = state.nested_offset;
  return weight;
}

std::vector<StoredTensor> encode_bitsandbytes(const PackedWeight& canonical, std::string_view dtype) {
  std::vector<StoredTensor> tensors;
  for (StoredSpec& spec : bitsandbytes_specs(canonical.scheme, canonical.n, canonical.k)) {
    tensors.push_back(allocate_stored(std::move(spec)));
    StoredTensor& tensor = tensors.back();
    for (const auto& [role, suffix] : copied_planes) {
      if (tensor.spec.suffix == suffix) std::ranges::copy(canonical.plane(role).bytes.bytes(), tensor.bytes.data());
    }
  }
  Buffer& bytes = tensors.front().bytes;
  swap_nibbles(canonical.plane(PlaneRole::codes).bytes.bytes().first(bytes.size()), bytes.data());
  const std::string_view type = bitsandbytes_type(canonical);
  // Odd: bitsandbytes pads with the code of zero, which stands for 0.0 in both of its tables.
  if (canonical.n * canonical.k % 2 != 0 && type == "nf4") bytes.bytes().back() |= std::byte{7};
  const bool nested = canonical.scheme.scale == ScaleType::nested;
  const std::string text =
      to_json_text({std::string(type), canonical.scheme.block, std::string(dtype), canonical.n, canonical.k, nested,
                    nested ? canonical.plane(PlaneRole::nested_offset).bytes.as<float>()[0] : 0.0f});
  tensors.push_back(
      allocate_stored({concat(bitsandbytes_state, type), DType::u8, {static_cast<int64_t>(text.size())}}));
  std::ranges::copy(std::as_bytes(std::span(text)), tensors.back().bytes.data());
  return tensors;
}

}  // namespace w4q::formats
