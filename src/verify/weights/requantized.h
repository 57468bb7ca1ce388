// Tensors that a folder stands for and no longer holds bit by bit, of small floats or decoded from a GGUF file, against the
// base's: rounding leaves most of a tensor's energy where it was, another tensor's values do not (docs/verify.md).
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "model/opened.h"
#include "verify/weights/rescaled.h"

namespace w4q::verify {

class RequantizedTensors {
 public:
  /// Both outlive it.
  RequantizedTensors(const model::OpenedModel& candidate, const model::OpenedModel& base);

  struct Finding {
    bool same = false;       ///< the base's values, as a model in 16 bit holds them
    std::string fault = {};  ///< what is wrong; empty: nothing
  };
  /// Of a tensor that both hold in types of weights and in one shape. Where programs fold scales into norms and rows before
  /// a weight of small floats, these are undone.
  Finding look_at(const std::string& name);

  /// Norms of a folder of small floats that are not the base's and whose factors nothing behind them carries.
  std::vector<std::string> faults_of_norms() const;

 private:
  /// Sums over all values, and the row of which rounding leaves least.
  struct Noise {
    double signal = 0, noise = 0, worst = 0;
    int64_t worst_row = 0;

    void add_row(int64_t row, double row_signal, double row_noise) noexcept;
  };

  static Noise noise_of(const TensorView& ours, const TensorView& theirs);
  /// Behind the scales that were folded into it.
  Noise noise_of_folded(const std::string& module);
  std::string fault_of(const Noise& noise, bool matrix) const;
  /// Whether biases are the base's with the factors of the rows that they are added to.
  bool is_folded_bias(const std::string& name);
  /// Whether the norm before a linear is another one than the base's.
  bool reads_other_norm(const model::LinearPlace& place) const;

  const model::OpenedModel& candidate_;
  const model::OpenedModel& base_;
  RescaledWeights weights_;
  std::set<std::string> read_norms_;  ///< those that linears read, by parameter
};

}  // namespace w4q::verify
