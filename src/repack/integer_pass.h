// The passes between the canonical planes of integer schemes and another layout, driven by the layout's map
// (integer_map.h). Codes move as code_movers.h says; scales, zeros and the check of padding follow the map element by
// element.
#pragma once

#include <algorithm>
#include <string_view>

#include "core/parallel.h"
#include "formats/integer.h"
#include "repack/code_movers.h"
#include "repack/integer_map.h"

namespace w4q::repack {

/// Throws unsupported naming the group whose zero is 2^bits, which no packed zero can hold.
void check_zeros_fit(const formats::PackedWeight& canonical, std::string_view layout);
/// Throws bad_file naming `name`: a bit of the padding of `packed` is not zero.
[[noreturn]] void refuse_integer_padding(const formats::PackedWeight& packed, std::string_view name,
                                         formats::PlaneRole role, int64_t row, int64_t col);

namespace detail {

inline bool test(std::span<const uint32_t> words, BitAt at) noexcept {
  return ((words[static_cast<size_t>(at.word)] >> at.bit) & 1u) != 0;
}

template <class Map>
void pack_codes(const Map& map, const formats::PackedWeight& canonical, formats::PackedWeight& packed) {
  const auto from = canonical.plane(formats::PlaneRole::codes).bytes.as<uint32_t>();
  const auto to = packed.plane(formats::PlaneRole::codes).bytes.as<uint32_t>();
  CodeMovers<Map>::with(map, canonical, [=](const auto& mover) { mover.pack(from, to); });
}

template <class Map>
void unpack_codes(const Map& map, const formats::PackedWeight& packed, formats::PackedWeight& canonical) {
  const auto from = packed.plane(formats::PlaneRole::codes).bytes.as<uint32_t>();
  const auto to = canonical.plane(formats::PlaneRole::codes).bytes.as<uint32_t>();
  CodeMovers<Map>::with(map, packed, [=](const auto& mover) { mover.unpack(from, to); });
}

/// Calls move(canonical index, index) for every scale, in parallel.
template <class Map, class Move>
void for_each_scale(const Map& map, const formats::PackedWeight& weight, const Move& move) {
  const int64_t groups = formats::integer_groups(weight.scheme, weight.k);
  parallel_for(weight.n, 256, [&](int64_t begin, int64_t end) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t row = begin; row < end; ++row) move(row * groups + group, map.scale(row, group));
    }
  });
}

template <class T>
auto copy_elements(const formats::Plane& from, formats::Plane& to, bool to_canonical) {
  return [source = from.bytes.as<T>(), target = to.bytes.template as<T>(), to_canonical](int64_t at, int64_t place) {
    const int64_t read = to_canonical ? place : at;
    const int64_t write = to_canonical ? at : place;
    target[static_cast<size_t>(write)] = source[static_cast<size_t>(read)];
  };
}

template <class Map>
void move_scales(const Map& map, const formats::PackedWeight& from, formats::PackedWeight& to) {
  const bool to_canonical = to.layout == formats::canonical_layout;
  const formats::Plane& source = from.plane(formats::PlaneRole::scales);
  formats::Plane& target = to.plane(formats::PlaneRole::scales);
  if (dtype_bits(source.spec.dtype) == 16) {
    for_each_scale(map, from, copy_elements<uint16_t>(source, target, to_canonical));
  } else {
    for_each_scale(map, from, copy_elements<uint32_t>(source, target, to_canonical));
  }
}

/// Calls move(canonical index, row, group); a group's zeros share words, so groups are what runs in parallel.
template <class Move>
void for_each_zero(const formats::PackedWeight& weight, const Move& move) {
  const int64_t groups = formats::integer_groups(weight.scheme, weight.k);
  constexpr int64_t grain = 1 << 16;
  parallel_for(groups, std::max<int64_t>(1, grain / weight.n), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      for (int64_t row = 0; row < weight.n; ++row) move(static_cast<size_t>(row * groups + group), row, group);
    }
  });
}

template <class Map>
void pack_zeros(const Map& map, const formats::PackedWeight& canonical, formats::PackedWeight& packed) {
  const auto from = canonical.plane(formats::PlaneRole::zeros).bytes.as<uint8_t>();
  const auto to = packed.plane(formats::PlaneRole::zeros).bytes.as<uint32_t>();
  for_each_zero(canonical, [&](size_t at, int64_t row, int64_t group) {
    for (int bit = 0; bit < canonical.scheme.bits; ++bit) {
      const BitAt place = map.zero_bit(row, group, bit);
      to[static_cast<size_t>(place.word)] |= ((uint32_t{from[at]} >> bit) & 1u) << place.bit;
    }
  });
}

template <class Map>
void unpack_zeros(const Map& map, const formats::PackedWeight& packed, formats::PackedWeight& canonical) {
  const auto from = packed.plane(formats::PlaneRole::zeros).bytes.as<uint32_t>();
  const auto to = canonical.plane(formats::PlaneRole::zeros).bytes.as<uint8_t>();
  for_each_zero(packed, [&](size_t at, int64_t row, int64_t group) {
    int zero = 0;
    for (int bit = 0; bit < packed.scheme.bits; ++bit) {
      zero |= static_cast<int>(test(from, map.zero_bit(row, group, bit))) << bit;
    }
    to[at] = static_cast<uint8_t>(zero);
  });
}

template <class Map>
void check_integer_padding(const Map& map, const formats::PackedWeight& packed, std::string_view name) {
  using formats::PlaneRole;
  const auto codes = packed.plane(PlaneRole::codes).bytes.template as<uint32_t>();
  for (int64_t row = 0; row < map.padded_rows; ++row) {
    for (int64_t col = row < packed.n ? packed.k : 0; col < map.padded_cols; ++col) {
      for (int bit = 0; bit < packed.scheme.bits; ++bit) {
        if (test(codes, map.code_bit(row, col, bit))) refuse_integer_padding(packed, name, PlaneRole::codes, row, col);
      }
    }
  }
  const auto& scales = packed.plane(PlaneRole::scales);
  const auto width = static_cast<size_t>(dtype_bits(scales.spec.dtype) / 8);
  const int64_t groups = formats::integer_groups(packed.scheme, packed.k);
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t row = packed.n; row < map.padded_rows; ++row) {
      const auto bytes = scales.bytes.bytes().subspan(static_cast<size_t>(map.scale(row, group)) * width, width);
      if (std::ranges::any_of(bytes, [](std::byte byte) { return byte != std::byte{0}; })) {
        refuse_integer_padding(packed, name, PlaneRole::scales, row, group);
      }
    }
    if constexpr (requires { map.zero_bit(group, group, 0); }) {
      if (!packed.scheme.asymmetric) continue;
      const auto zeros = packed.plane(PlaneRole::zeros).bytes.template as<uint32_t>();
      for (int64_t row = packed.n; row < zero_rows(map); ++row) {
        for (int bit = 0; bit < packed.scheme.bits; ++bit) {
          if (test(zeros, map.zero_bit(row, group, bit))) {
            refuse_integer_padding(packed, name, PlaneRole::zeros, row, group);
          }
        }
      }
    }
  }
}

inline void copy_group_index(const formats::PackedWeight& from, formats::PackedWeight& to) {
  if (!from.scheme.act_order) return;
  to.plane(formats::PlaneRole::group_index).bytes = from.plane(formats::PlaneRole::group_index).bytes.clone();
}

}  // namespace detail

/// canonical, with the planes that the scheme demands → `layout` with the planes `specs`.
template <class Map>
formats::PackedWeight pack_integer(const Map& map, const formats::PackedWeight& canonical, std::string_view layout,
                                   std::span<const formats::PlaneSpec> specs) {
  formats::PackedWeight packed = formats::allocate_planes(canonical.scheme, layout, canonical.n, canonical.k, specs);
  detail::pack_codes(map, canonical, packed);
  detail::move_scales(map, canonical, packed);
  if constexpr (requires { map.zero_bit(int64_t{}, int64_t{}, 0); }) {
    if (canonical.scheme.asymmetric) {
      check_zeros_fit(canonical, layout);
      detail::pack_zeros(map, canonical, packed);
    }
  }
  detail::copy_group_index(canonical, packed);
  return packed;
}

/// The inverse. Throws bad_file naming `name` when padding is not zero.
template <class Map>
formats::PackedWeight unpack_integer(const Map& map, const formats::PackedWeight& packed, std::string_view name) {
  detail::check_integer_padding(map, packed, name);
  formats::PackedWeight canonical =
      formats::allocate_planes(packed.scheme, formats::canonical_layout, packed.n, packed.k,
                               formats::integer_planes(packed.scheme, packed.n, packed.k));
  detail::unpack_codes(map, packed, canonical);
  detail::move_scales(map, packed, canonical);
  if constexpr (requires { map.zero_bit(int64_t{}, int64_t{}, 0); }) {
    if (packed.scheme.asymmetric) detail::unpack_zeros(map, packed, canonical);
  }
  detail::copy_group_index(packed, canonical);
  return canonical;
}

}  // namespace w4q::repack
