#include "repack/integer_pass_cuda.h"

#include <optional>
#include <vector>

#include "core/text.h"
#include "device/buffer.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "device/stream.h"
#include "formats/integer.h"
#include "repack/code_movers.h"
#include "repack/layout_awq.h"
#include "repack/layout_gptq.h"
#include "repack/layout_interleaved.h"
#include "repack/layout_marlin.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;

using device::element_blocks;
using device::element_threads;

/// The sizes that the kernels need, and the order of inputs with act order (null: as they stand).
struct Sizes {
  int64_t n, k, groups, row_words;
  const int32_t* order;  ///< packing: input at a place; unpacking: place of an input
};

/// Whole words: a block has 32 outputs by 8 words of each, so that both sides use all of every 32 bytes.
template <class Map, bool to_canonical>
__global__ void __launch_bounds__(element_threads)
    move_words_kernel(Map map, Sizes sizes, const uint32_t* from, uint32_t* to) {
  const int64_t strips = (sizes.row_words + 7) / 8;
  const int64_t row = blockIdx.x / strips * 32 + threadIdx.x % 32;
  const int64_t word = blockIdx.x % strips * 8 + threadIdx.x / 32;
  if (row >= sizes.n || word >= sizes.row_words) return;
  const int64_t at = row * sizes.row_words + word;
  const int64_t place = map.word(row, word);
  if constexpr (to_canonical) {
    to[at] = from[place];
  } else {
    to[place] = from[at];
  }
}

/// Where the words of a tile stand, and for every field of them which code of the tile it holds: read off the map.
struct TileTable {
  const int64_t* word;   ///< from the word of the tile's first code
  const uint16_t* code;  ///< [word][field]: row · tile_cols + column
};

/// Packed words from canonical ones. A block makes the words of 256 outputs × 64 inputs, so that the canonical words it
/// gathers from stay in the L1 cache.
template <class Map, int bits>
__global__ void __launch_bounds__(element_threads)
    pack_tiles_kernel(Map map, Sizes sizes, TileTable table, const uint32_t* from, uint32_t* to) {
  constexpr int fields = 32 / bits;
  constexpr int tile_words = static_cast<int>(Map::tile_rows * Map::tile_cols) / fields;
  constexpr int row_tiles = static_cast<int>(256 / Map::tile_rows);
  constexpr int col_tiles = static_cast<int>(64 / Map::tile_cols);
  const int64_t strips = (map.padded_rows + 255) / 256;
  const int64_t first_row = blockIdx.x % strips * 256;
  const int64_t first_col = blockIdx.x / strips * 64;
  for (int i = threadIdx.x; i < row_tiles * col_tiles * tile_words; i += element_threads) {
    const int64_t row = first_row + i / tile_words % row_tiles * Map::tile_rows;
    const int64_t col = first_col + i / tile_words / row_tiles * Map::tile_cols;
    if (row >= map.padded_rows || col >= map.padded_cols) continue;
    const int w = i % tile_words;
    uint32_t packed = 0;
#pragma unroll
    for (int field = 0; field < fields; ++field) {
      const int code = table.code[w * fields + field];
      const int64_t r = row + code / Map::tile_cols;
      const int64_t place = col + code % Map::tile_cols;
      if (r >= sizes.n || place >= sizes.k) continue;
      const int64_t input = sizes.order == nullptr ? place : sizes.order[place];
      const uint32_t word = __ldg(from + r * sizes.row_words + input / fields);
      packed |= (word >> (input % fields * bits) & ((1u << bits) - 1)) << (field * bits);
    }
    to[map.code_bit(row, col, 0).word + table.word[w]] = packed;
  }
}

/// Canonical words from packed ones: a block makes 8 words of 32 outputs.
template <class Map, int bits>
__global__ void __launch_bounds__(element_threads)
    unpack_tiles_kernel(Map map, Sizes sizes, const uint32_t* from, uint32_t* to) {
  constexpr int fields = 32 / bits;
  const int64_t strips = (sizes.row_words + 7) / 8;
  const int64_t row = blockIdx.x / strips * 32 + threadIdx.x / 8;
  const int64_t word = blockIdx.x % strips * 8 + threadIdx.x % 8;
  if (row >= sizes.n || word >= sizes.row_words) return;
  uint32_t canonical = 0;
#pragma unroll
  for (int field = 0; field < fields; ++field) {
    const int64_t input = word * fields + field;
    if (input >= sizes.k) continue;
    const BitAt at = map.code_bit(row, sizes.order == nullptr ? input : sizes.order[input], 0);
    canonical |= (__ldg(from + at.word) >> at.bit & ((1u << bits) - 1)) << (field * bits);
  }
  to[row * sizes.row_words + word] = canonical;
}

/// A thread per scale, outputs first.
template <class Map, class T, bool to_canonical>
__global__ void __launch_bounds__(element_threads) move_scales_kernel(Map map, Sizes sizes, const T* from, T* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * element_threads + threadIdx.x;
  if (i >= sizes.n * sizes.groups) return;
  const int64_t row = i % sizes.n;
  const int64_t group = i / sizes.n;
  const int64_t at = row * sizes.groups + group;
  const int64_t place = map.scale(row, group);
  if constexpr (to_canonical) {
    to[at] = from[place];
  } else {
    to[place] = from[at];
  }
}

/// A thread per zero. Zeros of one word come from several threads, so packing sets their bits one by one in a plane of
/// zeros: the order does not matter.
template <class Map, bool to_canonical>
__global__ void __launch_bounds__(element_threads)
    move_zeros_kernel(Map map, Sizes sizes, int bits, const void* from, void* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * element_threads + threadIdx.x;
  if (i >= sizes.n * sizes.groups) return;
  const int64_t row = i % sizes.n;
  const int64_t group = i / sizes.n;
  const int64_t at = row * sizes.groups + group;
  uint32_t zero = to_canonical ? 0 : static_cast<const uint8_t*>(from)[at];
  for (int bit = 0; bit < bits; ++bit) {
    const BitAt place = map.zero_bit(row, group, bit);
    if constexpr (to_canonical) {
      zero |= (static_cast<const uint32_t*>(from)[place.word] >> place.bit & 1u) << bit;
    } else if ((zero >> bit & 1u) != 0) {
      atomicOr(static_cast<uint32_t*>(to) + place.word, 1u << place.bit);
    }
  }
  if constexpr (to_canonical) static_cast<uint8_t*>(to)[at] = static_cast<uint8_t>(zero);
}

/// One weight on its way through the GPU.
template <class Map, bool to_canonical>
class Move {
 public:
  Move(const Map& map, const PackedWeight& from, PackedWeight& to, device::Context& gpu)
      : map_(map), from_(from), to_(to), stream_(gpu) {
    sizes_ = {from.n, from.k, formats::integer_groups(from.scheme, from.k),
              formats::dense_words(from.k, from.scheme.bits), nullptr};
    std::vector<int32_t> order = inputs_by_group(from);
    if (order.empty()) return;
    if (to_canonical) order = inverse(order);
    order_.emplace(device::DeviceBuffer::copy_of(bytes_of(order), stream_));
    stream_.synchronize();
    sizes_.order = order_->as<int32_t>();
  }

  void run() {
    through(PlaneRole::codes, [&](const void* from, void* to) { move_codes(from, to); });
    through(PlaneRole::scales, [&](const void* from, void* to) { move_scales(from, to); });
    if (from_.scheme.asymmetric) {
      through(PlaneRole::zeros, [&](const void* from, void* to) { move_zeros(from, to); });
    }
  }

 private:
  static std::vector<int32_t> inverse(const std::vector<int32_t>& order) {
    std::vector<int32_t> places(order.size());
    for (size_t i = 0; i < order.size(); ++i) places[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
    return places;
  }

  template <class Launch>
  void through(PlaneRole role, const Launch& launch) {
    const auto source = device::DeviceBuffer::copy_of(from_.plane(role).bytes.bytes(), stream_);
    const auto target_bytes = to_.plane(role).bytes.bytes();
    device::DeviceBuffer target(stream_.context(), target_bytes.size());
    target.fill(0, stream_);
    launch(source.data(), target.data());
    device::check_launch("move_integer", concat(from_.n, " × ", from_.k, " to ", to_.layout));
    target.download(target_bytes, stream_);
    stream_.synchronize();
  }

  void move_codes(const void* from, void* to) {
    const auto* source = static_cast<const uint32_t*>(from);
    auto* target = static_cast<uint32_t*>(to);
    const auto grid = static_cast<unsigned>((sizes_.n + 31) / 32 * ((sizes_.row_words + 7) / 8));
    if constexpr (requires { map_.word(int64_t{}, int64_t{}); }) {
      move_words_kernel<Map, to_canonical><<<grid, element_threads, 0, stream_.get()>>>(map_, sizes_, source, target);
    } else if (from_.scheme.bits == 4) {
      move_tiles<4>(grid, source, target);
    } else if constexpr (std::is_same_v<Map, MarlinMap>) {
      move_tiles<8>(grid, source, target);
    }
  }

  template <int bits>
  void move_tiles(unsigned grid, const uint32_t* source, uint32_t* target) {
    if constexpr (to_canonical) {
      unpack_tiles_kernel<Map, bits><<<grid, element_threads, 0, stream_.get()>>>(map_, sizes_, source, target);
    } else {
      const detail::TileFields<Map, bits> fields(map_, Map::tile_cols);
      std::vector<uint16_t> codes;
      for (const auto& word : fields.code) codes.insert(codes.end(), word.begin(), word.end());
      words_ = device::DeviceBuffer::copy_of(std::as_bytes(std::span(fields.word)), stream_);
      codes_ = device::DeviceBuffer::copy_of(bytes_of(codes), stream_);
      stream_.synchronize();
      const auto areas = static_cast<unsigned>((map_.padded_rows + 255) / 256 * ((map_.padded_cols + 63) / 64));
      pack_tiles_kernel<Map, bits><<<areas, element_threads, 0, stream_.get()>>>(
          map_, sizes_, {words_.as<int64_t>(), codes_.as<uint16_t>()}, source, target);
    }
  }

  void move_scales(const void* from, void* to) {
    const unsigned grid = element_blocks(sizes_.n * sizes_.groups);
    if (dtype_bits(from_.plane(PlaneRole::scales).spec.dtype) == 16) {
      move_scales_kernel<Map, uint16_t, to_canonical><<<grid, element_threads, 0, stream_.get()>>>(
          map_, sizes_, static_cast<const uint16_t*>(from), static_cast<uint16_t*>(to));
    } else {
      move_scales_kernel<Map, uint32_t, to_canonical><<<grid, element_threads, 0, stream_.get()>>>(
          map_, sizes_, static_cast<const uint32_t*>(from), static_cast<uint32_t*>(to));
    }
  }

  void move_zeros(const void* from, void* to) {
    if constexpr (requires { map_.zero_bit(int64_t{}, int64_t{}, 0); }) {
      move_zeros_kernel<Map, to_canonical>
          <<<element_blocks(sizes_.n * sizes_.groups), element_threads, 0, stream_.get()>>>(
              map_, sizes_, from_.scheme.bits, from, to);
    }
  }

  const Map& map_;
  const PackedWeight& from_;
  PackedWeight& to_;
  Sizes sizes_{};
  device::Stream stream_;
  std::optional<device::DeviceBuffer> order_;
  device::DeviceBuffer words_, codes_;
};

}  // namespace

template <class Map>
void move_integer_on_gpu(const Map& map, const PackedWeight& from, PackedWeight& to, device::Context& gpu) {
  if (to.layout == formats::canonical_layout) return Move<Map, true>(map, from, to, gpu).run();
  Move<Map, false>(map, from, to, gpu).run();
}

template void move_integer_on_gpu(const AwqMap&, const PackedWeight&, PackedWeight&, device::Context&);
template void move_integer_on_gpu(const GptqMap&, const PackedWeight&, PackedWeight&, device::Context&);
template void move_integer_on_gpu(const InterleavedMap&, const PackedWeight&, PackedWeight&, device::Context&);
template void move_integer_on_gpu(const MarlinMap&, const PackedWeight&, PackedWeight&, device::Context&);

}  // namespace w4q::repack
