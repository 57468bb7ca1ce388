// Trellises from weights in GPU memory: the rings of quantize/trellis.h (class E0), and of error feedback
// (docs/trellis.md, "On the GPU").
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/packed.h"
#include "quantize/error_factor_cuda.h"
#include "quantize/gram_cuda.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// formats::trellis_rms of the rows of a weight [n, k] in GPU memory, finite.
std::vector<double> trellis_sizes_cuda(CudaWork& work, const float* weight, int64_t n, int64_t k);

/// A weight [n, k] in GPU memory, and planes whose u and scales stand.
struct TrellisCudaWeight {
  const float* values = nullptr;
  formats::PackedWeight* packed = nullptr;
};

/// Fills the codes of a weight, each column by itself.
void trellis_codes_cuda(CudaWork& work, const TrellisCudaWeight& weight);

/// Weights of one scheme that read one input, and its factor.
struct TrellisCudaInput {
  std::vector<TrellisCudaWeight> weights;
  const ErrorFactorCuda* factor = nullptr;
};
/// Fills codes with errors fed back along k: decisions inside a block of columns are those of the CPU, but targets are
/// added up in another order. Inputs go side by side, since a column of one does not fill a GPU.
void trellis_feedback_cuda(CudaWork& work, std::span<const TrellisCudaInput> inputs);
/// Bytes of GPU memory that this takes beside weights and factors, for `rows` rows in all.
int64_t trellis_feedback_bytes(int64_t rows, int64_t k) noexcept;

/// calibrate_norms() for `packed`, made from `weight` [n, k] in GPU memory; sums are added up in another order. Returns the
/// rows that changed.
int64_t fit_trellis_scales_cuda(CudaWork& work, const float* weight, const GramCuda& gram, double damping,
                                formats::PackedWeight& packed);

/// difference [n, k] = original − decoded · rows; `rows` [n] may be null for ones. All but `packed` in GPU memory.
void trellis_difference_cuda(CudaWork& work, const formats::PackedWeight& packed, const float* original,
                             const float* rows, float* difference);

/// QuantizerRow::run_cuda, of a weight and options that have been checked, without feedback.
QuantizeResult quantize_trellis_cuda(const TensorView& weight, const formats::Scheme& scheme, device::Context& gpu);

}  // namespace w4q::quantize
