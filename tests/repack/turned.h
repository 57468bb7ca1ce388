// Two weights and the one in which their rows take turns, for tests.
#pragma once

#include <cstring>

#include "core/rng.h"
#include "formats/scheme_registry.h"
#include "repack/layout_registry.h"
#include "repack/turn_rows.h"

namespace w4q::test {

/// Canonical planes of random bytes, but for what has a meaning: zero points that every layout holds.
inline formats::PackedWeight random_planes(const formats::Scheme& scheme, int64_t n, int64_t k, uint64_t seed) {
  formats::PackedWeight weight = formats::allocate_canonical(scheme, n, k);
  for (auto& plane : weight.planes) {
    const uint32_t below = plane.spec.role == formats::PlaneRole::zeros ? 1u << scheme.bits : 256;
    for (size_t i = 0; i < plane.bytes.size(); ++i) {
      plane.bytes.data()[i] = static_cast<std::byte>(random_bits(seed, i) % below);
    }
  }
  return weight;
}

/// Eight rows of each in turn.
inline formats::PackedWeight in_turn(const formats::PackedWeight& first, const formats::PackedWeight& second) {
  formats::PackedWeight both = formats::allocate_canonical(first.scheme, 2 * first.n, first.k);
  for (size_t i = 0; i < both.planes.size(); ++i) {
    formats::Plane& plane = both.planes[i];
    const auto role = plane.spec.role;
    if (role != formats::PlaneRole::codes && role != formats::PlaneRole::scales && role != formats::PlaneRole::zeros) {
      plane.bytes = first.planes[i].bytes.clone();
      continue;
    }
    const size_t row_bytes = plane.bytes.size() / static_cast<size_t>(both.n);
    for (int64_t row = 0; row < both.n; ++row) {
      const auto& source = repack::turned_to_second(row) ? second : first;
      std::memcpy(plane.bytes.data() + static_cast<size_t>(row) * row_bytes,
                  source.planes[i].bytes.data() + static_cast<size_t>(repack::turned_from(row)) * row_bytes, row_bytes);
    }
  }
  return both;
}

}  // namespace w4q::test
