// What sweeps on the GPU ask of a Gram matrix that stands there: the order of blocks and of single codes, and for each
// block that is rounded as a whole its factor and its inverse. Linears that read one input share it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "quantize/error_factor_cuda.h"
#include "quantize/gram_cuda.h"
#include "quantize/sweep_blocks.h"

namespace w4q::quantize {

/// Columns [first, first + count) of a weight, and the columns in the order in which their codes are decided.
struct SweepUnitCuda {
  int64_t first = 0;
  int count = 0;
  /// In GPU memory; of blocks alone: H⁻¹ and H [count, count] as columns stand, and the factor of H by positions.
  const float *inverse = nullptr, *products = nullptr, *coupling = nullptr, *pivots = nullptr;
  const int32_t* order = nullptr;  ///< from `first`, [count], in GPU memory
};

class SweepBlocksCuda {
 public:
  /// `damping` is what the factor of the feedback took. `gram` must outlive this, and stay as it is.
  SweepBlocksCuda(CudaWork& work, const GramCuda& gram, int64_t block, double damping, std::string_view name);

  const GramCuda& gram() const noexcept { return gram_; }
  /// What damping adds to the diagonal.
  float ridge() const noexcept { return ridge_; }
  /// In the order of the sweeps; none where blocks are too wide.
  std::span<const SweepUnitCuda> blocks() const noexcept { return blocks_; }
  std::span<const SweepUnitCuda> codes() const noexcept { return codes_; }

 private:
  void add_codes(CudaWork& work, std::span<const float> diagonal);
  void add_blocks(CudaWork& work, std::span<const float> diagonal, int64_t block, std::string_view name);
  std::vector<float> square(const CudaWork& work, int64_t first, int64_t count) const;

  const GramCuda& gram_;
  float ridge_ = 0;
  std::vector<SweepUnitCuda> blocks_, codes_;
  device::DeviceBuffer floats_, block_orders_, code_orders_;
};

/// Of outputs whose errors cost as Σ g·gᵀ says.
struct OutputCostsCuda {
  const float* gram = nullptr;  ///< [n, n] in GPU memory
  float ridge = 0;              ///< on its diagonal
};

/// How errors of a weight are fed back along k; null: they are not, and it is not swept.
struct FeedbackCuda {
  const ErrorFactorCuda* factor = nullptr;
  const SweepBlocksCuda* sweeps = nullptr;  ///< of the same Gram matrix and block
  const ErrorFactorCuda* across = nullptr;  ///< along n too: of what errors of outputs cost, in blocks of one
  OutputCostsCuda outputs = {};             ///< what that was made from: sweeps want it
};

}  // namespace w4q::quantize
