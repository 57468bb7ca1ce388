// NVFP4's factor of the tensor is one for all linears that read one input: servers fuse q, k and v, gate and up, and
// take the largest or the first of what the file holds.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "model/opened.h"
#include "pipeline/scale_folding.h"

namespace w4q::pipeline {

/// Whether linears of the scheme have such a factor.
bool has_tensor_factor(const formats::Scheme& scheme) noexcept;

/// Factors of linears that are rounded as they stand in the checkpoint.
class SharedFactors {
 public:
  /// `model` must outlive this. `scheme_of` gives the schemes of the linears that are packed.
  SharedFactors(const model::OpenedModel& model, const SchemeOf& scheme_of);

  /// What QuantizeOptions::tensor_factor should be for a module: that of all linears which share its input; 0 for one
  /// that shares it with none. Reads the weights of all of them when the first is asked for.
  /// By any thread.
  float of(std::string_view module);

 private:
  /// Of an architecture that is not known, what servers fuse by its names.
  void group_by_names(const SchemeOf& scheme_of);

  struct Group {
    std::vector<std::string> names;
    std::mutex mutex;  ///< guards what follows
    float factor = 0;
  };
  const model::OpenedModel& model_;
  std::map<std::string, std::shared_ptr<Group>, std::less<>> groups_;
};

}  // namespace w4q::pipeline
