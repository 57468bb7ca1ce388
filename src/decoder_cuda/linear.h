// Linear layers in GPU memory, and how a decoder multiplies them.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "decoder_cuda/offload.h"
#include "decoder_cuda/ring.h"
#include "device/buffer.h"
#include "kernels/linear/device_linear.h"
#include "kernels/linear/linear.h"

namespace w4q::decoder_cuda {

/// Outputs first … first + n − 1 of a CudaLinear, and the launches that make them.
struct CudaProduct {
  int64_t first = 0;
  kernels::DeviceLinear linear;
  kernels::LaunchPlan plan;
  std::optional<kernels::LaunchPlan> int8_plan;  ///< with activations rounded to int8, where its kernels can
  std::string scheme;                            ///< as it is in the file: "rotated4-d128-e4m4"; "f16"
  std::vector<std::shared_ptr<const OffloadedPass>> offloaded;  ///< one for each pass, null where it is resident

  int64_t n() const noexcept { return linear.n(); }
  /// The plan of a call, which may ask for int8 activations.
  const kernels::LaunchPlan& plan_for(bool int8) const noexcept { return int8 && int8_plan ? *int8_plan : plan; }
  bool packed() const noexcept { return linear.passes.front().layout != kernels::f16_rows; }
};

/// Linear layers that read the same input, their outputs side by side.
struct CudaLinear {
  std::vector<std::string> names;  ///< module paths in the order of their outputs
  int64_t n = 0;                   ///< all outputs together
  int64_t k = 0;
  std::vector<CudaProduct> products;
  int64_t bytes = 0;                         ///< that one product with all of it reads
  std::vector<std::string> widened;          ///< packed layers without a kernel, which were decoded to f16
  std::vector<device::DeviceBuffer> memory;  ///< behind the pointers

  /// How gate and up stand, where the linear is both in one product.
  kernels::GateOrder gates() const noexcept;
  /// Outputs first … first + n − 1 as rows of f16; null where they are not, or do not stand below one another.
  std::byte* dense_rows(int64_t first, int64_t count) noexcept;
};

/// Rows of f16 in GPU memory.
kernels::DevicePass dense_pass(const device::DeviceBuffer& rows, int64_t n, int64_t k);

inline bool is_dense(const kernels::LinearWeight& weight) {
  return std::holds_alternative<kernels::LinearWeight::Dense>(weight.matrix);
}
/// Whether two layers of the same inputs can share a launch.
bool alike(const device::Properties& gpu, const kernels::LinearWeight& a, const kernels::LinearWeight& b);

/// Plans the launches of a product whose passes are in place.
void plan_product(CudaProduct& product, const device::Properties& gpu);

/// Brings layers to the GPU. Neighbours of one kind share a launch. 16-bit weights become f16: exact but for magnitudes
/// below 2^-14, which keep 2^-25 absolute. Throws unsupported, naming the layer, for weights beyond ±65504 or not
/// finite, device when the memory does not suffice. With `offload`, residual passes of rotated layers stay in host
/// memory. Packed layers in the layout that a kernel reads go up as they stand (docs/checkpoint.md); others in another
/// layout are brought to the canonical one and packed anew. Throws bad_file for stored planes that are damaged.
/// With a ring, copies and conversions are queued, and what they find is said by UploadRing::finish(), which the layers
/// wait for.
CudaLinear upload_linears(std::span<const kernels::LinearWeight* const> layers, UploadRing& ring, bool offload = false);
CudaLinear upload_linears(std::span<const kernels::LinearWeight* const> layers, const device::Stream& stream,
                          bool offload = false);

/// Gate and up, which read the same input. Where a kernel of one row may apply silu itself, their rows take turns.
CudaLinear upload_gated(const kernels::LinearWeight& gate, const kernels::LinearWeight& up, UploadRing& ring,
                        bool offload = false);

/// Whether the kernels of one row can do what lies between products (kernels/frame/linear_fusion.h).
bool fuses(const CudaLinear& linear);

/// Residual passes in host memory, in the order in which a step needs them.
std::vector<const OffloadedPass*> offloaded_passes(std::span<const CudaLinear* const> linears);
/// Brings those to GPU memory that are worth it within `budget` bytes (choose_resident). Waits.
void keep_resident(std::span<CudaLinear* const> linears, int64_t budget, const device::Stream& stream);

/// Rows of f16 as upload_linears makes them.
device::DeviceBuffer upload_rows(const kernels::LinearWeight& weight, UploadRing& ring);

/// What a product of one row takes over from the norm before it, and from the one behind it
/// (kernels/frame/linear_fusion.h).
struct InputNorm {
  float* state = nullptr;  ///< null: the input is complete
  float eps = 0;
};
struct NextNorm {
  const float* weight = nullptr;
  const float* last = nullptr;  ///< the states before and behind
  float* state = nullptr;
  __half* x = nullptr;  ///< the next product's input
  float eps = 0;
};

/// What a product leaves for the norm behind it.
kernels::LinearFusion leaving(const NextNorm& next);

/// Multiplies CudaLinears; holds the scratch that they need. One stream, one call at a time.
class CudaMultiplier {
 public:
  /// `most_rows` activation rows at a time, of any of `linears`, in the order of a step. `int8_activations`: they may
  /// be asked for.
  CudaMultiplier(std::span<const CudaLinear* const> linears, int64_t most_rows, const device::Stream& stream,
                 bool int8_activations = false);

  /// Whether launches may begin while the one before still runs.
  void set_overlap(bool overlap) noexcept { overlap_ = overlap; }
  bool overlap() const noexcept { return overlap_; }
  /// Whether products of a step stand beside such as take some of many weights (LinearCall).
  void set_beside_routed(bool on) noexcept { beside_routed_ = on; }
  /// Whether products of layers, not of the head, round their inputs to int8 where they can.
  void set_int8_activations(bool on) noexcept { int8_ = on; }

  /// Of passes that come from host memory; null where there are none.
  CudaOffload* offload() noexcept { return offload_ ? &*offload_ : nullptr; }

  /// y[rows × n] = x · Wᵀ + b. One row, of layers that fuse: `norm` completes the input, here and below.
  void multiply(const CudaLinear& linear, const __half* x, int64_t rows, float* y, InputNorm norm = {});
  /// residual += x · Wᵀ + b. One row, of a layer that fuses: also leaves `next`, and `tail` of a layer that leaves_tail().
  void multiply_residual(const CudaLinear& linear, const __half* x, int64_t rows, float* residual,
                         const NextNorm* next = nullptr, const kernels::TailProduct& tail = {});
  /// Whether such a product can leave parts of what `tail` makes of the next one's input, rows of f16.
  bool leaves_tail(const CudaLinear& linear, const CudaLinear& tail) const;
  /// out[rows × n/2] = silu(gate) · up; `both` [rows × n] is scratch.
  void multiply_gated(const CudaLinear& linear, const __half* x, int64_t rows, __half* both, __half* out,
                      InputNorm norm = {});
  /// Of one row, some of the weights of `linear` (kernels::routes).
  void multiply_routed(const CudaLinear& linear, const kernels::RoutedCall& call);
  /// Many rows through the weights of a linear, each through its own.
  void multiply_groups(const CudaLinear& linear, const kernels::GroupedCall& call);
  /// out[rows × n] = x · Wᵀ + b, of the head.
  void multiply_logits(const CudaLinear& head, const __half* x, int64_t rows, float* out, InputNorm norm = {});

 private:
  /// Where products go.
  struct Output {
    void* y;
    int64_t stride;     ///< elements from row to row
    bool fp32 = false;  ///< y is f32, else f16
    bool add = false;   ///< y += instead of y =, f32 only
  };
  void multiply_product(const CudaProduct& product, const __half* x, int64_t rows, const Output& out,
                        const kernels::LinearFusion& fusion);
  void multiply_all(const CudaLinear& linear, const __half* x, int64_t rows, const Output& out,
                    const kernels::LinearFusion& fusion);
  kernels::PassSource passes_of(const CudaProduct& product);

  const device::Stream& stream_;
  bool overlap_ = true;
  bool beside_routed_ = false;
  bool int8_ = false;
  device::DeviceBuffer semaphores_, scratch_;  ///< kernels::Workspace
  kernels::Workspace workspace_;
  std::optional<CudaOffload> offload_;
  std::unordered_map<const OffloadedPass*, size_t> offload_index_;
  std::unordered_map<const CudaProduct*, kernels::L2Prefetch> next_;  ///< what the product behind one reads
};

}  // namespace w4q::decoder_cuda
