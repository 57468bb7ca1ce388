// The linears that read one input, with its Gram matrix, on the GPU: what calibration does with them from the search of
// scales to packed planes (pipeline/calibrated_layer.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quantize/awq_cuda.h"
#include "quantize/error_factor_cuda.h"
#include "quantize/gram_cuda.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

class GroupCuda {
 public:
  /// Integers without act order and kbit.
  static bool takes(const formats::Scheme& scheme) noexcept { return awq_cuda_accepts(scheme); }

  GroupCuda(CudaWork& work, std::shared_ptr<GramCuda> gram) : work_(work), gram_(std::move(gram)) {}

  /// What is known of a linear before anything is chosen: the mean square of its outputs, and of their error when each
  /// weight is rounded by itself as `options` say.
  struct Measured {
    double power = 0, plain = 0;
  };
  /// Adds a linear of a scheme that takes() accepts. Throws as upload_weight.
  Measured add(const TensorView& weight, const formats::Scheme& scheme, const QuantizeOptions& options);
  /// search_scales over all linears, which are rounded in the basis of `rotation` if there is one; `plain_error` is the
  /// sum of those measured.
  AwqScales search(const AwqInput& input, double plain_error, const formats::InputRotation* rotation = nullptr);
  /// Multiplies the weights' columns and divides the inputs by `scales` from now on.
  void scale(std::span<const float> scales);
  /// Inputs are rotated from now on, and weights stand in that basis. After scale().
  void rotate(const formats::InputRotation& rotation);

  struct Packed {
    QuantizeResult result;
    double error = 0;  ///< of the outputs
  };
  /// Packs linear `index`, in the order in which they were added; each once. Its rows are divided by `rows` at last;
  /// empty: ones. `options.input` is not looked at: the Gram matrix says what it would.
  Packed pack(size_t index, QuantizeOptions options, std::span<const float> rows);
  /// The damping that the factor for linear `index` needed; 0 when there is none.
  double damping(size_t index) const;

 private:
  struct Linear {
    std::string name;
    device::DeviceBuffer weight;
    int64_t n = 0, k = 0;
    formats::Scheme scheme;
    Clip clip = Clip::min_max;
    std::vector<float> table;
  };

  AwqCudaLinear view(Linear& linear) const;
  const ErrorFactorCuda* factor(const Linear& linear, const Steps& steps);

  CudaWork& work_;
  std::shared_ptr<GramCuda> gram_;
  std::vector<Linear> linears_;
  std::map<int64_t, ErrorFactorCuda> factors_;  ///< by block
};

}  // namespace w4q::quantize
