#include <algorithm>

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "core/with_bits.h"
#include "formats/trellis.h"
#include "repack/layout_trellis_fragment.h"
#include "repack/map_pass.h"
#include "repack/rows.h"
#ifdef W4Q_HAVE_CUDA
#include "repack/trellis_pass_cuda.h"
#endif

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::PlaneSpec;
using formats::Scheme;

constexpr std::string_view layout_name = "trellis-fragment";

bool accepts(const Scheme& scheme, int64_t n, int64_t k, std::string* why) {
  return accepts_any_size(scheme.family == formats::SchemeFamily::trellis, "trellis schemes", n, k, why);
}

std::vector<PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  std::vector<PlaneSpec> specs = accepted_planes(layout_name, accepts, scheme, n, k);
  const TrellisFragmentMap map(n, k);
  for (PlaneSpec& spec : specs) {
    if (spec.role == PlaneRole::codes) spec.shape = {map.row_groups, map.col_groups, 2 * scheme.bits, map.lanes, 4};
  }
  return specs;
}

/// Where a square stands in both layouts: its two rings, null where there are none, and its two lanes.
template <class Word, int bits>
struct SquarePlace {
  Word *first = nullptr, *second = nullptr;
  Word* tile = nullptr;
  int lane, word;

  Word& even(int w) const { return tile[TrellisFragmentMap::word_at(lane, word + w)]; }
  Word& odd(int w) const { return tile[TrellisFragmentMap::word_at(lane + 4, word + w)]; }
};

/// Calls use(place, column) for the squares of a weight, in parallel over its tiles.
template <int bits, class Ring, class Use>
void for_each_square(const PackedWeight& weight, Ring* rings, auto* words, const Use& use) {
  const TrellisFragmentMap map(weight.n, weight.k);
  const int64_t k = weight.k;
  parallel_for(map.tiles(), 4, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      for (int square = 0; square < 128; ++square) {  // four times 32 rows × 32 pairs of columns
        const int rows = square / 32, pair = square % 32;
        const int64_t column = tile % map.col_groups * map.tile_cols + 2 * pair;
        const auto ring = [&](int64_t at) {
          return at < k ? rings + (tile / map.col_groups * k + at) * (4 * bits) + bits * rows : nullptr;
        };
        use(
            SquarePlace<std::remove_pointer_t<decltype(words)>, bits>{
                .tile = words + tile * map.tile_words(bits), .lane = 8 * rows + pair / 8, .word = bits * (pair % 8)},
            ring(column), ring(column + 1), column);
      }
    }
  });
}

PackedWeight pack(const PackedWeight& canonical) {
  const auto& [scheme, layout, n, k, ignored] = canonical;
  const auto specs = planes(scheme, n, k);
  check_layout(canonical, formats::canonical_layout, formats::scheme_row(scheme.family).planes(scheme, n, k), "pack");
  PackedWeight packed = formats::allocate_planes(scheme, layout_name, n, k, specs);
  const auto* rings = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>().data();
  auto* words = packed.plane(PlaneRole::codes).bytes.as<uint32_t>().data();
  with_bits<2, 3, 4>(scheme.bits, [&]<int bits>() {
    for_each_square<bits>(canonical, rings, words, [](const auto& to, const auto* first, const auto* second, int64_t) {
      TrellisSquare<bits> square{};
      if (first != nullptr) std::copy_n(first, bits, square.first);
      if (second != nullptr) std::copy_n(second, bits, square.second);
      square.to_lanes();
      for (int w = 0; w < bits; ++w) to.even(w) = square.even[w], to.odd(w) = square.odd[w];
    });
  });
  for (const PlaneRole role : {PlaneRole::scales, PlaneRole::codebook}) {
    packed.plane(role).bytes = canonical.plane(role).bytes.clone();
  }
  return packed;
}

PackedWeight unpack(const PackedWeight& packed, std::string_view name) {
  const auto& [scheme, layout, n, k, ignored] = packed;
  check_layout(packed, layout_name, planes(scheme, n, k), name);
  PackedWeight canonical = formats::allocate_canonical(scheme, n, k);
  auto* rings = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>().data();
  const auto* words = packed.plane(PlaneRole::codes).bytes.as<uint32_t>().data();
  with_bits<2, 3, 4>(scheme.bits, [&]<int bits>() {
    for_each_square<bits>(packed, rings, words, [&](const auto& from, auto* first, auto* second, int64_t column) {
      TrellisSquare<bits> square{};
      for (int w = 0; w < bits; ++w) square.even[w] = from.even(w), square.odd[w] = from.odd(w);
      square.to_rings();
      const auto put = [&](const uint32_t(&ring)[bits], uint32_t* to, int64_t at) {
        if (to != nullptr) {
          std::copy_n(ring, bits, to);
        } else if (std::ranges::any_of(ring, [](uint32_t word) { return word != 0; })) {
          throw Error(ErrorCode::bad_file, concat(printable(name), ": plane codes has padding that is not zero"))
              .detail(concat("layout ", layout_name, ", column ", at, "; the weight has ", k));
        }
      };
      put(square.first, first, column);
      put(square.second, second, column + 1);
    });
  });
  for (const PlaneRole role : {PlaneRole::scales, PlaneRole::codebook}) {
    canonical.plane(role).bytes = packed.plane(role).bytes.clone();
  }
  return canonical;
}

LayoutRow::BitPlace place(const Scheme& scheme, int64_t n, int64_t k, int64_t row, int64_t col, int bit) {
  const auto at = TrellisFragmentMap(n, k).symbol_bit(scheme.bits, row, col, bit);
  return {at.word, at.bit, row};
}

#ifdef W4Q_HAVE_CUDA
constexpr auto pack_gpu = pack_trellis_on_gpu;
constexpr auto unpack_gpu = unpack_trellis_on_gpu;
#else
constexpr decltype(LayoutRow::pack_cuda) pack_gpu = nullptr;
constexpr decltype(LayoutRow::unpack_cuda) unpack_gpu = nullptr;
#endif

}  // namespace

LayoutRow trellis_fragment_row() {
  return {.name = layout_name,
          .description = "runs of 16 rows of a ring a lane, for w4q's kernels of trellises",
          .reason = "what the GPU reads as it is stored; words hold whole windows, a product of one is an mma register",
          .sms = {80, 89, 90},
          .accepts = accepts,
          .planes = planes,
          .pack = pack,
          .unpack = unpack,
          .place = place,
          .pack_cuda = pack_gpu,
          .unpack_cuda = unpack_gpu};
}

}  // namespace w4q::repack
