// The linears that read one input, with its Gram matrix, on the GPU: what calibration does with them from the search of
// scales to packed planes (pipeline/calibrated_layer.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quantize/asymmetric_cuda.h"
#include "quantize/awq_cuda.h"
#include "quantize/error_factor_cuda.h"
#include "quantize/gram_cuda.h"
#include "quantize/kbit_search.h"
#include "quantize/quantizer_registry.h"
#include "quantize/sweep_blocks_cuda.h"
#include "quantize/trellis_cuda.h"

namespace w4q::quantize {

class GroupCuda {
 public:
  /// Integers without act order, kbit and trellises.
  static bool takes(const formats::Scheme& scheme) noexcept { return awq_cuda_accepts(scheme); }
  /// Of these, what errors are fed back along both sides for: blocks of at most 256.
  static bool takes_both_sides(const formats::Scheme& scheme) noexcept;

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

  /// From now on the inputs are those behind quantized layers, and weights follow them (asymmetric.h): `gram` and
  /// `drift` are those of the inputs before scale() and rotate(), which come after this.
  void follow(std::shared_ptr<GramCuda> gram, DriftCuda drift);

  /// A linear by its number, and what its rows are divided by at last; empty: ones.
  struct Member {
    size_t index = 0;
    std::span<const float> divisors;
  };
  /// A table that kbit's linears of one scheme learn together, none of which is packed yet.
  SharedTable learn_table(std::span<const Member> members, QuantizeOptions options);

  /// Groups with some of their linears.
  struct Part {
    GroupCuda* group = nullptr;
    std::vector<Member> members;
  };
  /// Rounds linears that gain by going side by side, trellises with feedback, where memory suffices; pack() of them comes
  /// later, with the same divisors and options.
  static void round_together(std::span<const Part> parts, const QuantizeOptions& options);

  struct Packed {
    QuantizeResult result;
    double error = 0;  ///< of the outputs
  };
  struct Rows {
    std::span<const float> divisors;  ///< what they are divided by at last; empty: ones
    std::span<const float>
        costs;  ///< for feedback on both sides, Σ g·gᵀ of the outputs: the upper triangle; empty: along k alone
  };
  /// What packing needs beside a linear itself, for as many linears as may then be packed at once, each with work of its
  /// own. Not needed otherwise.
  void prepare(std::span<const size_t> linears, const QuantizeOptions& options);
  /// What packing a linear takes of GPU memory at most, generously, beside what prepare() made.
  int64_t packing_bytes(size_t index, const Rows& rows) const;
  /// Packs linear `index`, in the order in which they were added; each once. `options.input` is not looked at: the Gram matrix says what it would.
  Packed pack(size_t index, QuantizeOptions options, const Rows& rows) { return pack(work_, index, options, rows); }
  /// The same on another stream, once everything that was queued before is done.
  Packed pack(CudaWork& work, size_t index, QuantizeOptions options, const Rows& rows);
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
    device::DeviceBuffer kept = {};                     ///< the weight before rows were divided; empty: they were not
    std::optional<formats::PackedWeight> rounded = {};  ///< by round_together()

    const float* original() const { return (kept.size() > 0 ? kept : weight).as<float>(); }
  };

  AwqCudaLinear view(Linear& linear) const;
  void follow_inputs(CudaWork& work, Linear& linear, const Steps& steps);
  void divide_rows(CudaWork& work, Linear& linear, std::span<const float> divisors);
  /// A trellis as it is to be rounded, and planes with its scales.
  TrellisCudaWeight ready(CudaWork& work, const Member& member, const Steps& steps);
  Packed pack_trellis(CudaWork& work, size_t index, const QuantizeOptions& options, const Rows& rows);
  FeedbackCuda feedback(const Linear& linear, const Steps& steps);
  const ErrorFactorCuda& factor(const Linear& linear, double damping);

  CudaWork& work_;
  std::shared_ptr<GramCuda> gram_;
  std::optional<DriftCuda> drift_;
  std::vector<Linear> linears_;
  std::map<int64_t, ErrorFactorCuda> factors_;  ///< by block, as …
  std::map<int64_t, SweepBlocksCuda> sweeps_;   ///< … these
};

}  // namespace w4q::quantize
