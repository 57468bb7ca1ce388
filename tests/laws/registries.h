// What the laws run over: every row of every registry. A new scheme, layout or quantizer is found by itself.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/ggml_type.h"
#include "formats/codebook.h"
#include "formats/lut.h"
#include "formats/rotated.h"
#include "formats/scheme_registry.h"
#include "formats/small_float.h"
#include "kbit_samples.h"
#include "repack/layout_registry.h"

namespace w4q::test {

inline std::vector<formats::Scheme> every_scheme() {
  std::vector<formats::Scheme> all;
  for (const auto& row : formats::scheme_registry()) {
    const auto schemes = row.schemes();
    all.insert(all.end(), schemes.begin(), schemes.end());
  }
  return all;
}

using SchemeAndLayout = std::pair<formats::Scheme, std::string>;

inline std::vector<SchemeAndLayout> every_scheme_and_layout() {
  std::vector<SchemeAndLayout> all;
  for (const formats::Scheme& scheme : every_scheme()) {
    for (const auto& layout : repack::layout_registry()) {
      if (layout.accepts(scheme, 256, 256, nullptr)) all.emplace_back(scheme, layout.name);
    }
  }
  return all;
}

/// Of tensors in GGUF files.
inline std::vector<const GgmlTypeRow*> every_gguf_type() {
  constexpr uint32_t numbers = 256;  // far above those that ggml has given
  std::vector<const GgmlTypeRow*> all;
  for (uint32_t number = 0; number < numbers; ++number) {
    if (const auto* row = find_ggml_type(number)) all.push_back(row);
  }
  return all;
}

/// Test names hold letters and digits only.
inline std::string test_name(std::string text) {
  for (char& c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return text;
}

/// n × k: single elements, ragged in both directions, whole tiles, one more and one less than a tile.
inline constexpr std::pair<int64_t, int64_t> sizes[] = {{1, 1},    {1, 31},   {3, 32},   {2, 33},   {5, 95},
                                                        {128, 64}, {127, 63}, {129, 65}, {256, 96}, {130, 200}};

/// Those of a scheme's laws. A tile of EXL3 takes a search over 2^16 states for each of 256 weights, and what pads its
/// blocks of 128 cannot be seen from outside: one block.
inline std::span<const std::pair<int64_t, int64_t>> sizes_of(const formats::Scheme& scheme) {
  static constexpr std::pair<int64_t, int64_t> block[] = {{128, 128}};
  if (scheme.family == formats::SchemeFamily::exl3) return block;
  return sizes;
}

/// Whether a law asks it of a scheme: of EXL3, whose definition takes long, weights with outliers, and nothing at all of
/// the narrowest.
inline bool asks(const formats::Scheme& scheme, std::string_view distribution) {
  return scheme.family != formats::SchemeFamily::exl3 || distribution == "heavy tail" ||
         (distribution == "zero" && scheme.bits == 2);
}

/// Types of weights that a law asks of a scheme.
inline std::span<const DType> types_of(const formats::Scheme& scheme) {
  static constexpr DType types[] = {DType::bf16, DType::f32, DType::f16};
  return std::span(types).first(scheme.family == formats::SchemeFamily::exl3 ? 1 : 3);
}

/// The table that a scheme's tests use; empty for families without one.
inline std::vector<float> table_of(const formats::Scheme& scheme) {
  switch (scheme.family) {
    case formats::SchemeFamily::kbit:
      return formats::codebook("nf", scheme.bits);
    case formats::SchemeFamily::lut:
      return {formats::fp4_table().begin(), formats::fp4_table().end()};
    case formats::SchemeFamily::rotated:
      return {formats::normal_codebook(scheme.bits).begin(), formats::normal_codebook(scheme.bits).end()};
    case formats::SchemeFamily::small_float:
      return {formats::small_float_table(scheme.bits).begin(), formats::small_float_table(scheme.bits).end()};
    case formats::SchemeFamily::integer:
    case formats::SchemeFamily::trellis:
    case formats::SchemeFamily::exl3:
      return {};
  }
  return {};
}

/// By the definition. Of trellises, whose definition searches for long, laws ask for the same again and again: those made
/// before are kept.
inline formats::PackedWeight encoded(const formats::Scheme& scheme, std::span<const float> values, int64_t n,
                                     int64_t k) {
  const auto encode = [&] { return formats::scheme_row(scheme.family).encode(scheme, values, n, k, table_of(scheme)); };
  if (scheme.family != formats::SchemeFamily::trellis && scheme.family != formats::SchemeFamily::exl3) return encode();
  using Asked = std::tuple<std::string, int64_t, int64_t, std::vector<float>>;
  thread_local std::map<Asked, formats::PackedWeight> made;
  Asked asked{to_string(scheme), n, k, {values.begin(), values.end()}};
  auto found = made.find(asked);
  if (found == made.end()) found = made.emplace(std::move(asked), encode()).first;
  return found->second.clone();
}

/// The scale that weight (row, col) is multiplied by: an index that weights share when they share a scale.
inline int64_t scale_index(const formats::PackedWeight& canonical, int64_t row, int64_t col) {
  const formats::Scheme& scheme = canonical.scheme;
  if (scheme.act_order) {
    const auto index = canonical.plane(formats::PlaneRole::group_index).bytes.as<int32_t>();
    col = index[static_cast<size_t>(col)] * int64_t{scheme.block};
  }
  return formats::scheme_row(scheme.family).place(scheme, canonical.n, canonical.k, row, col, 0).scale;
}

}  // namespace w4q::test
