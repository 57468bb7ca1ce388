#include "formats/dialect/turboquant.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "formats/kbit.h"
#include "formats/rotated.h"

namespace w4q::formats {
namespace {

constexpr int nibble_bits = 4;

/// The bit planes of one row.
std::span<const uint32_t> row_words(const PackedWeight& weight, int64_t row) {
  const auto words = static_cast<size_t>(kbit_blocks(weight.k) * weight.scheme.bits);
  return weight.plane(PlaneRole::codes).bytes.as<uint32_t>().subspan(static_cast<size_t>(row) * words, words);
}

}  // namespace

std::string turboquant_loss(const Scheme& scheme, int64_t k) {
  if (scheme.family != SchemeFamily::rotated) return "it holds rotated schemes only";
  if (scheme.bits > nibble_bits) return "codes are nibbles: 4 bits at most";
  if (k % rotated_group(scheme, k) != 0) return "its reader gives ragged groups a wrong norm";
  return {};
}

Shape turboquant_indices_shape(int64_t n, int64_t k) { return {n, (k + 1) / 2}; }

Shape turboquant_norms_shape(const Scheme& scheme, int64_t n, int64_t k) {
  const int64_t groups = rotated_groups(scheme, k);
  return groups == 1 ? Shape{n} : Shape{n, groups};
}

PackedWeight decode_turboquant(const Scheme& scheme, int64_t n, int64_t k, std::span<const std::byte> indices,
                               std::span<const std::byte> norms, std::span<const float> codebook,
                               std::string_view name) {
  PackedWeight weight = allocate_canonical(scheme, n, k);
  ensure(weight.plane(PlaneRole::scales).bytes.size() == norms.size() &&
             weight.plane(PlaneRole::codebook).bytes.as<float>().size() == codebook.size(),
         "decode_turboquant: sizes differ");
  std::ranges::copy(norms, weight.plane(PlaneRole::scales).bytes.data());
  std::ranges::copy(codebook, weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  const auto bits = static_cast<size_t>(scheme.bits);
  const auto row_bytes = static_cast<size_t>((k + 1) / 2);
  for (int64_t row = 0; row < n; ++row) {
    const auto words = row_words(weight, row);
    auto* target = const_cast<uint32_t*>(words.data());
    for (int64_t col = 0; col < k; ++col) {
      const auto byte =
          std::to_integer<uint32_t>(indices[static_cast<size_t>(row) * row_bytes + static_cast<size_t>(col / 2)]);
      const uint32_t code = byte >> (col % 2 * nibble_bits) & 15u;
      if (code >> bits != 0) {
        throw Error(ErrorCode::bad_file, concat(printable(name), ": index ", code, " at row ", row, ", column ", col))
            .detail(concat("the codebook has ", codebook.size(), " entries"));
      }
      for (size_t bit = 0; bit < bits; ++bit) {
        target[static_cast<size_t>(col / kbit_block) * bits + bit] |= (code >> bit & 1u) << col % kbit_block;
      }
    }
  }
  return weight;
}

Buffer turboquant_indices(const PackedWeight& canonical) {
  const auto bits = static_cast<size_t>(canonical.scheme.bits);
  const auto row_bytes = static_cast<size_t>((canonical.k + 1) / 2);
  Buffer result(static_cast<size_t>(canonical.n) * row_bytes);
  for (int64_t row = 0; row < canonical.n; ++row) {
    const auto words = row_words(canonical, row);
    for (int64_t col = 0; col < canonical.k; ++col) {
      uint32_t code = 0;
      for (size_t bit = 0; bit < bits; ++bit) {
        code |= (words[static_cast<size_t>(col / kbit_block) * bits + bit] >> col % kbit_block & 1u) << bit;
      }
      result.data()[static_cast<size_t>(row) * row_bytes + static_cast<size_t>(col / 2)] |=
          static_cast<std::byte>(code << (col % 2 * nibble_bits));
    }
  }
  return result;
}

Buffer turboquant_norms(const PackedWeight& canonical, DType dtype) {
  const Plane& norms = canonical.plane(PlaneRole::scales);
  if (norms.spec.dtype == dtype) return norms.bytes.clone();
  ensure(dtype == DType::f32, "turboquant_norms: norms can only be widened to f32");
  Buffer widened(static_cast<size_t>(element_count(norms.spec.shape)) * sizeof(float));
  const std::span<float> values = widened.as<float>();
  load_scales(norms, 0, values);
  return widened;
}

}  // namespace w4q::formats
