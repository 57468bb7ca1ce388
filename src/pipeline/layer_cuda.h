// The linears of one decoder layer on the GPU, group by group: what calibrated_layer.h does there. The steps are those
// of quantize/group_cuda.h, without CUDA in the header.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/views.h"
#include "quantize/asymmetric.h"
#include "quantize/awq.h"
#include "quantize/kbit_search.h"
#include "quantize/quantizer_registry.h"
#include "quantize/statistics.h"

namespace w4q::quantize {
struct CudaWork;
}

namespace w4q::pipeline {

class LayerCuda {
 public:
  /// Whether the GPU has a way for a scheme under these options.
  static bool takes(const formats::Scheme& scheme, const quantize::QuantizeOptions& options);

  /// Group g belongs to lane g mod `lanes`: groups of several lanes may be worked on at the same time, a thread for each
  /// lane, all but follow() and round_together().
  explicit LayerCuda(std::shared_ptr<quantize::CudaWork> work, size_t lanes = 1);
  ~LayerCuda();

  /// Group `group`: linears that read this input. A Gram matrix that stands on the GPU is used up. Throws device when
  /// the memory does not suffice.
  void add_group(size_t group, const quantize::InputStatistics& statistics);
  /// As GroupCuda::follow, with matrices that stand on the GPU.
  void follow(size_t group, const quantize::InputPair& pair);
  struct Measured {
    double power = 0, plain = 0;
  };
  /// As GroupCuda::add.
  Measured add(size_t group, const TensorView& weight, const formats::Scheme& scheme,
               const quantize::QuantizeOptions& options);
  quantize::AwqScales search(size_t group, const quantize::AwqInput& input, double plain_error,
                             const formats::InputRotation* rotation);
  void rotate(size_t group, const formats::InputRotation& rotation);
  void scale(size_t group, std::span<const float> scales);

  /// As GroupCuda::learn_table; `divisors` stand beside `linears`, empty ones for ones.
  quantize::SharedTable learn_table(size_t group, std::span<const size_t> linears,
                                    std::span<const std::span<const float>> divisors,
                                    const quantize::QuantizeOptions& options);

  /// Linears of a group; `divisors` stand beside them, empty ones for ones.
  struct Part {
    size_t group = 0;
    std::vector<size_t> linears = {};
    std::vector<std::span<const float>> divisors = {};
  };
  /// So many at most: those of a layer without experts.
  static constexpr size_t parts_together = 8;
  /// As GroupCuda::round_together.
  void round_together(std::span<const Part> parts, const quantize::QuantizeOptions& options);

  struct Packed {
    quantize::QuantizeResult result;
    double error = 0;
    double damping = 0;  ///< that feedback needed
  };
  /// As GroupCuda::pack.
  Packed pack(size_t group, size_t linear, const quantize::QuantizeOptions& options, std::span<const float> divisors,
              std::span<const float> output_costs);
  /// Gives back the memory of a group.
  void drop(size_t group);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::pipeline
