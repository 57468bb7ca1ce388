// Small floats of 4 and 8 bits: kbit's warpgroup kernel with other codes and scales.
#include "kernels/small_float/launch.cuh"
#include "kernels/wgmma/decode_kbit.cuh"
#include "kernels/wgmma/launch.cuh"

namespace w4q::kernels::wgmma {
namespace {

/// Bytes of E8M0 for blocks of 32, where kbit has E4M4's. Weights meet them rounded to f16.
struct E8m0Bytes {
  static constexpr int most_bytes = static_cast<int>(repack::KbitFragmentMap::tile_scales);
  static constexpr bool in_rows = false;
  static constexpr bool of_sixteen = false;
  float factor;  ///< brings the largest of the weight inside f16

  __host__ __device__ static constexpr int bytes() { return most_bytes; }

  struct Lane {
    float factor;
    int at;

    __device__ Lane(const E8m0Bytes& scales, int lane, int row_tile)
        : factor(scales.factor), at(lane / 4 * 16 + row_tile * 2) {}
    __device__ int offset() const { return at; }
    __device__ static void load(const char* from, uint32_t (&both)[2]) {
      both[0] = *reinterpret_cast<const uint16_t*>(from);
      both[1] = *reinterpret_cast<const uint16_t*>(from + 8);
    }
    /// A byte is the exponent of an f32.
    __device__ uint32_t pair(uint32_t both, int half) const {
      const float value = __uint_as_float(half == 0 ? (both & 0xFFu) << 23 : (both & 0xFF00u) << 15) * factor;
      return device::HalfType::pack(value, value);
    }
  };
};

/// Bytes of E4M3 for blocks of 16: those of a lane's eight columns of 32 stand in the first or second half of a row's.
struct E4m3Bytes {
  static constexpr int most_bytes = 2 * static_cast<int>(repack::KbitFragmentMap::tile_scales);
  static constexpr bool in_rows = false;
  static constexpr bool of_sixteen = true;

  __host__ __device__ static constexpr int bytes() { return most_bytes; }

  struct Lane {
    int at;

    __device__ Lane(const E4m3Bytes&, int lane, int row_tile) : at(lane / 4 * 32 + lane % 4 / 2 * 16 + row_tile * 2) {}
    __device__ int offset() const { return at; }
    __device__ static void load(const char* from, uint32_t (&both)[2]) { E8m0Bytes::Lane::load(from, both); }
    /// A byte shifted into an f16 reads value / 256, exactly.
    __device__ static uint32_t pair(uint32_t both, int half) {
      return __byte_perm(both, 0, half == 0 ? 0x4040 : 0x4141) << 7;
    }
  };
};

/// Two f32 for a tile, of rows g and of rows g + 8. Copies begin at multiples of 16 bytes, so at every other tile, and
/// bring those of four tiles, since boxes stand 128 bytes apart.
struct TileFloats {
  static constexpr int most_bytes = 32;
  static constexpr bool in_rows = true;
  static constexpr bool of_sixteen = false;
  static constexpr int tile_words = 2;
  __device__ static int first_word(int tile) { return tile / 2 * 4; }
  __device__ static int place(int tile) { return tile % 2 * 8; }
  float factor;  ///< brings the largest of the weight inside f16

  __host__ __device__ static constexpr int bytes() { return most_bytes; }

  struct Lane {
    float factor;

    __device__ Lane(const TileFloats& scales, int, int) : factor(scales.factor) {}
    __device__ static int offset() { return 0; }
    __device__ void load(const char* from, uint32_t (&both)[2]) const {
      const float2 halves = *reinterpret_cast<const float2*>(from);
      both[0] = both[1] = device::HalfType::pack(halves.x * factor, halves.y * factor);
    }
    __device__ static uint32_t pair(uint32_t both, int half) {
      return __byte_perm(both, 0, half == 0 ? 0x1010 : 0x3232);
    }
  };
};

template <int bits, class Scales>
void launch_blocks(const frame::Launch& launch, const Scales& scales, void* arranged, const device::Stream& stream,
                   std::string_view shape) {
  with_rows<32>(layer_of(launch), [&]<int rows>(const Layer& part) {
    using Weights = KbitWeights<bits, device::HalfType, job_outputs(rows), Scales>;
    const auto source = kbit_source<Weights>(launch, scales);
    launch_rows<Weights, rows>(source, part, arranged, stream, shape);
  });
}

}  // namespace

void launch_float(const frame::Launch& launch, const formats::Scheme& scheme, void* arranged,
                  const device::Stream& stream, std::string_view shape) {
  if (small_float::has_tiles(scheme)) {
    return launch_blocks<8>(launch, TileFloats{launch.scale_factor}, arranged, stream, shape);
  }
  if (scheme.bits == 8) return launch_blocks<8>(launch, E8m0Bytes{launch.scale_factor}, arranged, stream, shape);
  if (scheme.scale == formats::ScaleType::e4m3) return launch_blocks<4>(launch, E4m3Bytes{}, arranged, stream, shape);
  launch_blocks<4>(launch, E8m0Bytes{launch.scale_factor}, arranged, stream, shape);
}

}  // namespace w4q::kernels::wgmma
