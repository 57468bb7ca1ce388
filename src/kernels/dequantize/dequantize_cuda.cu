#include "kernels/dequantize/dequantize_cuda.h"

#include "core/error.h"
#include "core/text.h"
#include "core/with_bits.h"
#include "device/alignment.h"
#include "device/check.h"
#include "formats/kbit.h"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/dequantize/fragment.cuh"
#include "kernels/dequantize/planes.cuh"
#include "repack/layout_kbit_tile.h"

namespace w4q::kernels {
namespace {

using formats::ScaleType;
using namespace dequantizing;

constexpr std::string_view tile_layout = "kbit-tile";
constexpr std::string_view fragment_layout = "kbit-fragment";

template <class Arguments>
void launch_blocks(void (*kernel)(Arguments), size_t table_bytes, int64_t thread_blocks, const Arguments& arguments,
                   const device::Stream& stream) {
  // Fits 32 bits: a thread block has at least 16 rows, and codes that fill the GPU's memory make fewer than 2^31.
  const LaunchShape shape{dim3(static_cast<unsigned>(thread_blocks)), block_threads, table_bytes};
  launch(kernel, shape, stream, "dequantize", arguments);
}

template <class T, class Map>
void launch_planes(const Map& map, const PackedDeviceWeight& weight, const OutputRows& out,
                   const device::Stream& stream) {
  const int64_t blocks = formats::kbit_blocks(weight.k);
  const PlaneArguments<Map> arguments{
      map, weight.codes, weight.scales, weight.codebook, weight.scheme.scale == ScaleType::e4m4, blocks, out};
  const int64_t tasks = (weight.n + block_warps - 1) / block_warps * ((blocks + warp_blocks - 1) / warp_blocks);
  with_table_bits(weight.scheme.bits, [&]<int bits>() {
    launch_blocks(dequantize_planes<T, bits, Map>, PlaneIndex<bits>::Table::bytes, tasks, arguments, stream);
  });
}

template <class T>
void launch_fragments(const PackedDeviceWeight& weight, const OutputRows& out, const device::Stream& stream) {
  const FragmentArguments arguments{FragmentMap(weight.n, weight.k), weight.codes, weight.scales, weight.codebook, out};
  const int64_t tasks = (arguments.map.tiles() + block_warps - 1) / block_warps;
  with_table_bits(weight.scheme.bits, [&]<int bits>() {
    const auto kernel = weight.scheme.scale == ScaleType::e4m4 ? dequantize_fragments<T, bits, uint8_t>
                                                               : dequantize_fragments<T, bits, uint16_t>;
    launch_blocks(kernel, FragmentIndex<bits>::Table::bytes, tasks, arguments, stream);
  });
}

template <class T>
void launch_layout(const PackedDeviceWeight& weight, const OutputRows& out, const device::Stream& stream) {
  if (weight.layout == formats::canonical_layout) {
    launch_planes<T>(CanonicalMap{formats::kbit_blocks(weight.k)}, weight, out, stream);
  } else if (weight.layout == tile_layout) {
    launch_planes<T>(repack::KbitTileMap(weight.n, weight.k), weight, out, stream);
  } else {
    launch_fragments<T>(weight, out, stream);
  }
}

void check_arguments(const PackedDeviceWeight& weight, const DeviceRows& out) {
  const auto refuse = [](ErrorCode code, std::string_view what) {
    throw Error(code, concat("dequantize on the GPU: ", what));
  };
  formats::check_dimensions(weight.n, weight.k, "dequantize on the GPU");
  if (weight.scheme.family != formats::SchemeFamily::kbit || weight.scheme.bits < 2 || weight.scheme.bits > 5 ||
      weight.scheme.block != formats::kbit_block) {
    refuse(ErrorCode::unsupported, concat("scheme ", to_string(weight.scheme)));
  }
  if (weight.layout != formats::canonical_layout && weight.layout != tile_layout && weight.layout != fragment_layout) {
    throw Error(ErrorCode::unsupported,
                concat("dequantize on the GPU: layout ", printable(weight.layout), " has no decoder"))
        .detail("known: canonical, kbit-tile, kbit-fragment");
  }
  if (!is_weight_dtype(out.dtype)) refuse(ErrorCode::unsupported, concat("to ", dtype_name(out.dtype)));
  if (out.stride < weight.k) refuse(ErrorCode::bad_argument, "the row stride is less than a row");
  if (weight.codes == nullptr || weight.scales == nullptr || weight.codebook == nullptr || out.data == nullptr) {
    refuse(ErrorCode::bad_argument, "a null pointer");
  }
  const bool fragments = weight.layout == fragment_layout;
  const int scale_bytes = fragments ? 16 : weight.scheme.scale == ScaleType::e4m4 ? 1 : 2;
  if (!device::aligned(weight.codes, fragments ? 16 : 4) || !device::aligned(weight.codebook, 4) ||
      !device::aligned(weight.scales, scale_bytes) || !device::aligned(out.data, dtype_bits(out.dtype) / 8)) {
    refuse(ErrorCode::bad_argument, "a pointer is not aligned as its layout needs it");
  }
}

}  // namespace

void dequantize_cuda(const PackedDeviceWeight& weight, const DeviceRows& rows, const device::Stream& stream) {
  check_arguments(weight, rows);
  const int element = dtype_bits(rows.dtype) / 8;
  const bool vectors = device::aligned(rows.data, 16) && (rows.stride * element % 16 == 0 || weight.n == 1);
  const OutputRows out{rows.data, weight.n, weight.k, rows.stride, vectors};
  if (rows.dtype == DType::f32) {
    launch_layout<float>(weight, out, stream);
  } else if (rows.dtype == DType::f16) {
    launch_layout<__half>(weight, out, stream);
  } else {
    launch_layout<__nv_bfloat16>(weight, out, stream);
  }
  device::check_launch("dequantize", concat(to_string(weight.scheme), ", ", weight.n, " × ", weight.k));
}

}  // namespace w4q::kernels
