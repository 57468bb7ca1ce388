#include "formats/gguf_parts.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "core/rng.h"
#include "formats/gguf_blocks.h"
#include "support.h"

namespace w4q::formats {
namespace {

std::vector<std::byte> random_block(const GgufForm& form, uint64_t seed) {
  std::vector<std::byte> block(static_cast<size_t>(describe(form.type).block_bytes));
  for (size_t i = 0; i < block.size(); ++i) block[i] = static_cast<std::byte>(random_bits(seed, i) & 0xFF);
  return block;
}

/// Any bytes: what is read decodes to what the definition says, bit by bit, and is stored to the same bytes.
TEST(GgufParts, AreWhatTheDefinitionDecodesAndWhatIsStored) {
  for (const GgufForm& form : gguf_forms()) {
    SCOPED_TRACE(ggml_type_name(form.type));
    for (uint64_t seed = 0; seed < 64; ++seed) {
      const auto block = random_block(form, seed);
      std::vector<uint8_t> levels(static_cast<size_t>(form.block));
      const GgufScales scales = read_gguf_block(form, block, levels);
      std::vector<float> values(levels.size());
      gguf_decode(form.type, block, values);
      for (size_t i = 0; i < values.size(); ++i) {
        const size_t part = i / static_cast<size_t>(form.part);
        const float step = scales.d * static_cast<float>(scales.scales[part]);
        const float offset = form.has_offset() ? scales.d_minimum * static_cast<float>(scales.minimums[part]) : 0.0f;
        const float expected = step * form.level(levels[i]) - offset;
        if (!std::isfinite(expected)) continue;
        ASSERT_EQ(values[i], expected) << i;
      }
      // NaNs lose their payload, and MXFP4 has two zeros and a largest exponent that no float has.
      if (!std::isfinite(scales.d) || !std::isfinite(scales.d_minimum) || form.unit == GgufUnit::e8m0_half) continue;
      std::vector<std::byte> again(block.size());
      store_gguf_block(form, scales, levels, again);
      ASSERT_EQ(block, again);
    }
  }
}

TEST(GgufParts, OtherSizesAndLatticesAreBugs) {
  const GgufForm& form = *find_gguf_form(GgmlType::q4_k);
  std::vector<uint8_t> levels(256);
  EXPECT_ANY_THROW(read_gguf_block(form, std::vector<std::byte>(143), levels));
  EXPECT_ANY_THROW(read_gguf_block(*find_gguf_form(GgmlType::iq3_s), std::vector<std::byte>(110), levels));
}

}  // namespace
}  // namespace w4q::formats
