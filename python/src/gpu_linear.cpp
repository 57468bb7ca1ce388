#include "gpu_linear.h"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "checkpoint.h"
#include "decoder_cuda/linear.h"
#include "decoder_cuda/ring.h"
#include "device/context.h"
#include "device/stream.h"

namespace w4q::python {
namespace {

namespace nb = nanobind;

/// Scratch of the products of one stream, one behind the other. It only grows, and what is freed is freed once the GPU is
/// done with it.
class StreamScratch {
 public:
  kernels::Workspace of(const kernels::WorkspaceSizes& sizes, const device::Stream& stream) {
    if (sizes_.semaphores < sizes.semaphores || sizes_.scratch < sizes.scratch) {
      sizes_.include(sizes);
      semaphores_ = device::DeviceBuffer(stream.context(), sizes_.semaphores);
      semaphores_.fill(0, stream);
      scratch_ = device::DeviceBuffer(stream.context(), sizes_.scratch);
    }
    return {semaphores_.data(), scratch_.data(), sizes_};
  }

 private:
  kernels::WorkspaceSizes sizes_{0, 0};
  device::DeviceBuffer semaphores_, scratch_;
};

/// A GPU of this process. It is never given back: torch's streams and memory live as long.
struct Gpu {
  explicit Gpu(int ordinal) : context(ordinal), uploads(context) {}

  decoder_cuda::CudaLinear upload(const kernels::LinearWeight& weight) {
    const kernels::LinearWeight* const layers[] = {&weight};
    const std::lock_guard lock(uploading);
    if (!ring) ring.emplace(uploads);
    try {
      decoder_cuda::CudaLinear linear = decoder_cuda::upload_linears(layers, *ring);
      ring->finish();
      return linear;
    } catch (...) {
      ring.reset();  // it would look at what is left of this weight
      throw;
    }
  }

  device::Context context;
  device::Stream uploads;
  std::optional<decoder_cuda::UploadRing> ring;  ///< for all linears: its memory takes longer to get than one of them
  std::mutex uploading;
  std::mutex mutex;
  std::map<cudaStream_t, StreamScratch> scratch;

  static Gpu& of(int ordinal) {
    static std::mutex mutex;
    static auto* const gpus = new std::map<int, std::unique_ptr<Gpu>>;
    const std::lock_guard lock(mutex);
    auto& gpu = (*gpus)[ordinal];
    if (gpu == nullptr) gpu = std::make_unique<Gpu>(ordinal);
    return *gpu;
  }
};

class GpuLinear {
 public:
  /// Throws device where the memory does not suffice, unsupported and bad_file as upload_linears.
  GpuLinear(const PackedLinear& linear, int ordinal) : gpu_(Gpu::of(ordinal)) { linear_ = gpu_.upload(linear.load()); }

  GpuLinear(const GpuLinear&) = delete;
  GpuLinear& operator=(const GpuLinear&) = delete;

  int64_t bytes() const noexcept { return linear_.bytes; }
  /// True where no kernel reads what is packed, so that it stands in GPU memory as f16.
  bool widened() const noexcept { return !linear_.widened.empty(); }

  /// y[rows × n] = x[rows × k] · Wᵀ on `stream`: x f16, y f16 or f32, rows one behind the other, both aligned to 16 bytes.
  void multiply(uintptr_t x, int64_t rows, uintptr_t y, bool fp32, uintptr_t stream) {
    const device::Scope here(gpu_.context);
    const device::Stream theirs(gpu_.context, reinterpret_cast<cudaStream_t>(stream));
    const std::lock_guard lock(gpu_.mutex);
    const kernels::Workspace workspace =
        gpu_.scratch[reinterpret_cast<cudaStream_t>(stream)].of(sizes_of(rows), theirs);
    for (const auto& product : linear_.products) {
      kernels::LinearCall call;
      call.m = rows;
      call.x = reinterpret_cast<const void*>(x);
      call.ldx = linear_.k;
      call.y = reinterpret_cast<std::byte*>(y) + product.first * (fp32 ? 4 : 2);
      call.ldy = linear_.n;
      call.fp32 = fp32;
      kernels::multiply(product.linear, product.plan, call, workspace, theirs);
    }
  }

 private:
  /// Of calls of up to so many rows, by powers of two.
  kernels::WorkspaceSizes sizes_of(int64_t rows) {
    const auto most = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
    if (most > most_rows_) {
      most_rows_ = most;
      sizes_ = {256, 256};
      for (const auto& product : linear_.products) {
        sizes_.include(kernels::workspace_sizes(gpu_.context.properties(), product.linear, product.plan, most));
      }
    }
    return sizes_;
  }

  Gpu& gpu_;
  decoder_cuda::CudaLinear linear_;
  int64_t most_rows_ = 0;
  kernels::WorkspaceSizes sizes_{0, 0};
};

}  // namespace

void add_gpu_linear(nb::module_& module) {
  module.attr("has_cuda") = true;
  nb::class_<GpuLinear>(module, "GpuLinear")
      .def(nb::init<const PackedLinear&, int>(), nb::arg("linear"), nb::arg("gpu"),
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("nbytes", &GpuLinear::bytes)
      .def_prop_ro("widened", &GpuLinear::widened)
      .def("_multiply", &GpuLinear::multiply, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace w4q::python
