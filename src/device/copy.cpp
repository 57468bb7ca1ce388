#include "device/copy.h"

#include <array>

#include "device/check.h"

namespace w4q::device {
namespace {

cudaMemcpyKind kind_of(Way way) {
  constexpr std::array kinds{cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice};
  return kinds[static_cast<size_t>(way)];
}

}  // namespace

void copy(Way way, void* to, const void* from, size_t bytes, const Stream& stream, std::string_view doing) {
  check(cudaMemcpyAsync(to, from, bytes, kind_of(way), stream.get()), doing);
}

void copy_rows(Way way, Rows to, ConstRows from, size_t bytes, size_t count, const Stream& stream,
               std::string_view doing) {
  check(cudaMemcpy2DAsync(to.data, to.stride, from.data, from.stride, bytes, count, kind_of(way), stream.get()), doing);
}

void fill(void* data, int value, size_t bytes, const Stream& stream, std::string_view doing) {
  check(cudaMemsetAsync(data, value, bytes, stream.get()), doing);
}

}  // namespace w4q::device
