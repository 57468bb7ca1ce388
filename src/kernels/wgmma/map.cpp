#include "kernels/wgmma/map.h"

#include <array>

#include "device/check.h"
#include "device/loaded_library.h"

namespace w4q::kernels::wgmma {
namespace {

/// The driver's function, found through the runtime: programs are not linked with the driver.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static void* const found = device::driver_function("cuTensorMapEncodeTiled");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
}

}  // namespace

CUtensorMap map_boxes(const void* data, CUtensorMapDataType type, std::initializer_list<Dimension> dimensions,
                      bool swizzled) {
  constexpr size_t most = 4;
  std::array<cuuint64_t, most> sizes{};
  std::array<cuuint64_t, most - 1> strides{};
  std::array<cuuint32_t, most> box{};
  constexpr std::array<cuuint32_t, most> steps = {1, 1, 1, 1};
  size_t rank = 0;
  for (const Dimension& dimension : dimensions) {
    sizes[rank] = static_cast<cuuint64_t>(dimension.size);
    box[rank] = static_cast<cuuint32_t>(dimension.box);
    if (rank > 0) strides[rank - 1] = static_cast<cuuint64_t>(dimension.stride_bytes);
    ++rank;
  }
  CUtensorMap map{};
  CUresult made = CUDA_ERROR_NOT_SUPPORTED;
  if (encoder() != nullptr) {
    made = encoder()(&map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), sizes.data(), strides.data(),
                     box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                     swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }
  device::check(static_cast<cudaError_t>(made), "mapping an array for the copy engine");
  return map;
}

}  // namespace w4q::kernels::wgmma
