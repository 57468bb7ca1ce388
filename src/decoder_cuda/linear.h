// Linear layers in GPU memory, and how they are multiplied: packed weights by the kernel that reads them, 16-bit ones
// by a one-row kernel of our own or cuBLAS.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decoder_cuda/offload.h"
#include "decoder_cuda/ring.h"
#include "device/buffer.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/packed_linear.h"
#include "kernels/rotated/linear.h"

namespace w4q::decoder_cuda {

/// Outputs first … first + n − 1 of a CudaLinear. Either `dense`, `packed` or `rotated`; one launch but where passes of
/// the last do not fit together or come from host memory.
struct CudaProduct {
  int64_t first = 0;
  int64_t n = 0;
  const __half* dense = nullptr;  ///< [n × k]
  std::optional<kernels::DevicePass> packed;
  const float* bias = nullptr;         ///< [n], or null
  const float* input_scale = nullptr;  ///< [k] that divides the input, or null
  formats::Scheme scheme;              ///< of a packed one, and of the first pass of a rotated one
  std::vector<kernels::DevicePass> rotated;
  std::vector<std::shared_ptr<const OffloadedPass>> offloaded;  ///< one for each of `rotated`, null where it is here
};

/// Linear layers that read the same input, their outputs side by side.
struct CudaLinear {
  std::vector<std::string> names;  ///< module paths in the order of their outputs
  int64_t n = 0;                   ///< all outputs together
  int64_t k = 0;
  std::vector<CudaProduct> products;
  int64_t bytes = 0;                         ///< that one product with all of it reads
  bool gate_up_turns = false;                ///< gate and up: kernels::gate_up_turn outputs of each in turn
  std::vector<std::string> widened;          ///< packed layers without a kernel, which were decoded to f16
  std::vector<device::DeviceBuffer> memory;  ///< behind the pointers
};

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
bool fuses(const CudaLinear& linear, const device::Properties& gpu);

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

/// Whether a product can round its input to int8 (kernels/linear/int8_rows.h).
bool takes_int8(const CudaProduct& product) noexcept;

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
  /// Whether products of layers, not of the head, round their inputs to int8 where they can (takes_int8).
  void set_int8_activations(bool on) noexcept { int8_ = on; }

  /// Of passes that come from host memory; null where there are none.
  CudaOffload* offload() noexcept { return offload_ ? &*offload_ : nullptr; }

  /// y[rows × n] = x · Wᵀ + b. One row, of layers that fuse: `norm` completes the input, here and below.
  void multiply(const CudaLinear& linear, const __half* x, int64_t rows, float* y, InputNorm norm = {});
  /// residual += x · Wᵀ + b. One row, of a layer that fuses: also leaves `next`.
  void multiply_residual(const CudaLinear& linear, const __half* x, int64_t rows, float* residual,
                         const NextNorm* next = nullptr);
  /// out[rows × n/2] = silu(gate) · up; `both` [rows × n] is scratch.
  void multiply_gated(const CudaLinear& linear, const __half* x, int64_t rows, __half* both, __half* out,
                      InputNorm norm = {});
  /// out[rows × n] = x · Wᵀ + b, of the head.
  void multiply_logits(const CudaLinear& head, const __half* x, int64_t rows, float* out, InputNorm norm = {});

 private:
  /// Where products go.
  struct Output {
    void* y;
    int64_t stride;     ///< elements from row to row
    bool fp32 = false;  ///< y is f32, else f16
    bool add = false;   ///< y += instead of y =, f32 only
    Output of(const CudaProduct& product) const;
  };
  /// Whether the kernel of so many rows makes silu(gate) · up of the products of gates and ups in turn.
  bool gates(const CudaProduct& product, int64_t k, int64_t rows) const;
  const __half* scaled(const CudaProduct& product, int64_t k, const __half* x, int64_t rows);
  void multiply_into(const CudaLinear& linear, const __half* x, int64_t rows, const Output& out,
                     const kernels::LinearFusion& fusion);
  void multiply_packed(const CudaProduct& product, int64_t k, const __half* x, int64_t rows, const Output& out,
                       const kernels::LinearFusion& fusion);
  void multiply_rotated(const CudaProduct& product, const __half* x, int64_t rows, const Output& out,
                        const kernels::LinearFusion& fusion);
  void multiply_dense(const CudaProduct& product, int64_t k, const __half* x, int64_t rows, const Output& out);
  void multiply_wide(const CudaProduct& product, int64_t k, const __half* x, int64_t rows, const Output& out);

  /// What the product behind `product` reads, in the order of the linears.
  kernels::L2Prefetch behind(const CudaProduct& product) const;

  const device::Stream& stream_;
  bool overlap_ = true;
  bool int8_ = false;
  device::DeviceBuffer words_;  ///< of kernels that keep it zero between launches
  device::DeviceBuffer wide_;   ///< of kernels that do not
  device::DeviceBuffer cublas_;
  device::DeviceBuffer scaled_;  ///< an input after its scale
  std::optional<CudaOffload> offload_;
  std::map<const OffloadedPass*, size_t> offload_index_;
  std::map<const CudaProduct*, kernels::L2Prefetch> next_;
};

}  // namespace w4q::decoder_cuda
