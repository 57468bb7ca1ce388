// The registry row of a layout of integer schemes, made from its map and what it takes.
#pragma once

#include "core/error.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "repack/integer_pass.h"
#include "repack/integer_pass_cuda.h"
#include "repack/layout_registry.h"
#include "repack/map_pass.h"

namespace w4q::repack {

/// A row for `Layout`, which has
///
///   Map                                             the map (integer_map.h)
///   name, description, reason, sms, sorts_inputs    as in LayoutRow
///   refuse(scheme)                                  why it does not take a scheme of integers; empty: it does
///   code_shape(map, scheme)                         shape of the codes plane; scales are [groups, outputs],
///                                                   zeros [groups, words]
template <class Layout>
struct IntegerLayout {
  using Map = typename Layout::Map;
  using Scheme = formats::Scheme;
  using PackedWeight = formats::PackedWeight;

  static bool accepts(const Scheme& scheme, int64_t n, int64_t k, std::string* why) {
    const auto refuse = [&](std::string reason) {
      if (why != nullptr) *why = std::move(reason);
      return false;
    };
    if (scheme.family != formats::SchemeFamily::integer) return refuse("it holds integer schemes only");
    if (n < 1 || k < 1 || n > formats::max_dimension || k > formats::max_dimension) {
      return refuse("n and k must be in 1 … 2^30");
    }
    std::string reason = Layout::refuse(scheme);
    return reason.empty() || refuse(std::move(reason));
  }

  static Map map(const Scheme& scheme, int64_t n, int64_t k) {
    return Map(scheme.bits, n, k, formats::integer_groups(scheme, k));
  }

  static std::vector<formats::PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
    std::string why;
    if (!accepts(scheme, n, k, &why)) {
      throw Error(ErrorCode::unsupported, concat("layout ", Layout::name, ": ", why))
          .detail(concat("got ", to_string(scheme), " with n = ", n, ", k = ", k));
    }
    std::vector<formats::PlaneSpec> specs = formats::integer_planes(scheme, n, k);
    const Map places = map(scheme, n, k);
    for (formats::PlaneSpec& spec : specs) {
      if (spec.role == formats::PlaneRole::codes) spec.shape = Layout::code_shape(places, scheme);
      if (spec.role == formats::PlaneRole::scales) spec.shape = {spec.shape[1], places.padded_rows};
      if (spec.role == formats::PlaneRole::zeros) {
        spec = {spec.role, DType::i32, {spec.shape[1], zero_rows(places) * scheme.bits / 32}};
      }
    }
    return specs;
  }

  static PackedWeight pack(const PackedWeight& canonical) {
    const auto& [scheme, layout, n, k, ignored] = canonical;
    const auto specs = planes(scheme, n, k);
    check_layout(canonical, formats::canonical_layout, formats::integer_planes(scheme, n, k), "pack");
    return pack_integer(map(scheme, n, k), canonical, Layout::name, specs);
  }

  static PackedWeight unpack(const PackedWeight& packed, std::string_view name) {
    const auto& [scheme, layout, n, k, ignored] = packed;
    check_layout(packed, Layout::name, planes(scheme, n, k), name);
    return unpack_integer(map(scheme, n, k), packed, name);
  }

#ifdef W4Q_HAVE_CUDA
  static PackedWeight pack_cuda(const PackedWeight& canonical, device::Context& gpu) {
    const auto& [scheme, layout, n, k, ignored] = canonical;
    const auto specs = planes(scheme, n, k);
    check_layout(canonical, formats::canonical_layout, formats::integer_planes(scheme, n, k), "pack");
    if (scheme.asymmetric) check_zeros_fit(canonical, Layout::name);
    PackedWeight packed = formats::allocate_planes(scheme, Layout::name, n, k, specs);
    move_integer_on_gpu(map(scheme, n, k), canonical, packed, gpu);
    detail::copy_group_index(canonical, packed);
    return packed;
  }

  static PackedWeight unpack_cuda(const PackedWeight& packed, std::string_view name, device::Context& gpu) {
    const auto& [scheme, layout, n, k, ignored] = packed;
    check_layout(packed, Layout::name, planes(scheme, n, k), name);
    const Map places = map(scheme, n, k);
    detail::check_integer_padding(places, packed, name);
    PackedWeight canonical =
        formats::allocate_planes(scheme, formats::canonical_layout, n, k, formats::integer_planes(scheme, n, k));
    // The order of inputs with act order comes from the group indices.
    detail::copy_group_index(packed, canonical);
    move_integer_on_gpu(places, packed, canonical, gpu);
    return canonical;
  }
#else
  static constexpr decltype(LayoutRow::pack_cuda) pack_cuda = nullptr;
  static constexpr decltype(LayoutRow::unpack_cuda) unpack_cuda = nullptr;
#endif

  static LayoutRow::BitPlace place(const Scheme& scheme, int64_t n, int64_t k, int64_t row, int64_t col, int bit) {
    const Map places = map(scheme, n, k);
    const BitAt at = places.code_bit(row, col, bit);
    return {at.word, at.bit, places.scale(row, col / formats::integer_group_size(scheme, k))};
  }

  static LayoutRow::ZeroPlace zero_place(const Scheme& scheme, int64_t n, int64_t k, int64_t row, int64_t group,
                                         int bit) {
    const BitAt at = map(scheme, n, k).zero_bit(row, group, bit);
    return {at.word, at.bit};
  }

  static LayoutRow row() {
    LayoutRow result{.name = Layout::name,
                     .description = Layout::description,
                     .reason = Layout::reason,
                     .sms = {std::begin(Layout::sms), std::end(Layout::sms)},
                     .accepts = accepts,
                     .planes = planes,
                     .pack = pack,
                     .unpack = unpack,
                     .place = place,
                     .sorts_inputs = Layout::sorts_inputs,
                     .pack_cuda = pack_cuda,
                     .unpack_cuda = unpack_cuda};
    if constexpr (requires(const Map& places) { places.zero_bit(int64_t{}, int64_t{}, 0); }) {
      result.zero_place = zero_place;
    }
    return result;
  }
};

}  // namespace w4q::repack
