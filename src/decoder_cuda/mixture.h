// Experts of a mixture in GPU memory, and the way of rows through them. A single row takes its experts in one launch, chosen
// on the GPU, where their weights stand one below the other in a layout whose kernel routes; otherwise the host reads
// which rows each expert takes, and one launch multiplies all of them where a kernel does that and no expert has enough for a
// GPU by itself.
#pragma once

#include <optional>
#include <vector>

#include "decoder_cuda/linear.h"
#include "device/buffer.h"
#include "kernels/elementwise/elementwise_cuda.h"
#include "kernels/elementwise/gates_cuda.h"
#include "kernels/mixture/mixture_cuda.h"
#include "model/model.h"

namespace w4q::decoder_cuda {

struct CudaMixture {
  std::vector<CudaLinear> inputs, outputs;            ///< each expert's: gates and ups, downs
  std::optional<CudaLinear> all_inputs, all_outputs;  ///< of all one below the other, where they stand so
  /// The shared part stands behind the experts as one more of them, to which a single row always goes.
  bool joined = false;
  std::vector<CudaLinear> shared;  ///< its inputs and outputs then, until the block takes them
  kernels::GateColumns columns = kernels::GateColumns::halves;
  const float* router_bias = nullptr;
  const float* correction = nullptr;
  const float* expert_scale = nullptr;
  std::vector<device::DeviceBuffer> memory;

  int64_t inner() const noexcept { return outputs.front().k; }
  /// Whether a single row needs no host.
  bool routes() const noexcept;
  /// Whether the last product of such a row adds up what its experts make of it.
  bool adds_up() const noexcept;
  /// Whether the sorted rows of a prompt need one launch for all experts.
  bool multiplies_groups(const device::Properties& gpu) const;
};

/// Whether the experts, the router and the shared part of a mixture do not all read the same.
bool reads_several_norms(const model::Block& plan);

/// Whether the product of a single row's experts chooses them.
bool chooses_by_product(const model::Block& plan);

/// Whether the shared part of a mixture has the shape of an expert, and is added as they are.
bool shared_is_an_expert(const model::Block& plan);

/// Throws as upload_linears.
CudaMixture upload_mixture(const model::Block& plan, const model::LayerWeights& weights, UploadRing& ring);
/// The same of weights that are there; `joined`: the last is the shared part.
CudaMixture mixture_of(const model::Block& plan, CudaLinear all_inputs, CudaLinear all_outputs, bool joined,
                       const device::Properties& gpu);

/// What a mixture needs while rows are on their way.
class MixtureScratch {
 public:
  /// Of the widest of `mixtures` for up to `rows` rows. `multiplier` and `stream` outlive it.
  MixtureScratch(const model::ModelConfig& config, std::span<const CudaMixture* const> mixtures, int64_t rows,
                 CudaMultiplier& multiplier, const device::Stream& stream);

  using Observe = std::function<void(const CudaLinear& linear, const __half* input, int64_t rows)>;
  /// Of one row that needs no host.
  struct Step {
    InputNorm norm;                        ///< completes the input and the logits
    kernels::PendingSum* later = nullptr;  ///< gets the sum that is left to do; null: none may be
    const NextNorm* next = nullptr;        ///< of a mixture that adds up: what it leaves behind the sum
    const float* parts = nullptr;          ///< of the logits (RouteArgs); null: they are there
  };
  /// residual += Σ shares · experts(x): `logits` [rows × experts], `stride` apart, are the router's. `observe` sees the
  /// input of each expert's products.
  void run(const model::Block& plan, const CudaMixture& mixture, float* logits, int64_t stride, const __half* x,
           int64_t rows, float* residual, const Observe& observe, const Step& step);

 private:
  void run_one(const kernels::Gating& gating, const CudaMixture& mixture, const __half* x, float* residual,
               const kernels::RouteArgs& choice, const Step& step);
  /// Rows first … first + rows − 1, not too many at once.
  void run_by_host(const model::Block& plan, const CudaMixture& mixture, const __half* x, int64_t first, int64_t rows,
                   float* residual, const Observe& observe);
  /// Sorted rows cut into groups, in GPU memory; none: experts are multiplied one by one.
  struct Groups {
    int count = 0, most_rows = 0;
  };
  Groups make_groups(std::span<const size_t> begins);
  /// Products of sorted rows with one side of the experts, f32, or f16 where gates and ups make `swiglu`.
  struct Side {
    const std::optional<CudaLinear>& all;
    const std::vector<CudaLinear>& each;
    const __half* input;
    void* output;
    bool swiglu = false;
  };
  void multiply_sorted(const Side& side, std::span<const size_t> begins, const Groups& groups, const Observe& observe);
  /// Which rows each expert takes; returns where each one's begin among all that are taken.
  std::vector<size_t> sort_by_expert(int64_t experts, int64_t first, int64_t rows);

  const device::Stream& stream_;
  CudaMultiplier& multiplier_;
  int64_t hidden_ = 0, places_ = 0;
  device::DeviceBuffer places_on_gpu_, shares_, taken_rows_, slots_, gathered_, both_, gated_, products_, groups_;
  device::PinnedBuffer staged_places_, staged_rows_, staged_slots_, staged_groups_;
};

}  // namespace w4q::decoder_cuda
