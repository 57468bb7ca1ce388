// Tensors that a folder stands for and no longer holds bit by bit, of small floats or decoded from a GGUF file, against the
// base's: rounding leaves most of a tensor's energy where it was, another tensor's values do not (docs/verify.md).
#pragma once

#include <cstdint>
#include <map>
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

  /// Programs fold scales into weights that they round, and of an architecture that is known it can be undone.
  bool may_be_folded() const noexcept;
  /// Whether both hold a tensor in types of weights and in one shape.
  bool both_hold(const std::string& name) const;
  void look_around(int64_t layer, const model::InputGroup& group);
  static Noise noise_of(const TensorView& ours, const TensorView& theirs);
  /// Behind the scales that were folded into it.
  Noise noise_of_folded(const std::string& module);
  std::string fault_of(const Noise& noise, bool matrix) const;
  /// Of a matrix, of which `fault` is said as it is stored, with what was folded into it undone.
  std::string fault_behind_folds(const std::string& name, std::string fault);
  /// Likewise of biases, which have the factors of the rows that they are added to.
  std::string fault_of_bias(const std::string& name, std::string fault);

  const model::OpenedModel& candidate_;
  const model::OpenedModel& base_;
  RescaledWeights weights_;
  std::map<std::string, float> offsets_;  ///< of norms, by parameter
  std::set<std::string> other_norms_;     ///< that linears read and that are not the base's
  std::set<int64_t> broken_;  ///< layers in which something is missing or misshaped: nothing is undone there
};

}  // namespace w4q::verify
