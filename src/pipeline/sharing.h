// Who works on an output with whom: other ranks, and runs before and after this one.
#pragma once

#include <string>

#include "ranks/ranks.h"

namespace w4q::pipeline {

/// Who works on an output, and whether it may have been begun before.
struct Sharing {
  ranks::Ranks* ranks = &ranks::world();
  /// Ranks that do not see the output's folder work on their own disks, and the first one puts the parts together.
  bool local_disks = false;
  bool resume = false;  ///< take up what a run left that was ended, and leave there what this one finishes
  /// What is done, in words that are the same for a run that takes it up: of other words nothing is.
  std::string command = {};
  /// What multiplies, where its last bits decide what is written; nothing is taken up that another did. Empty: none decide.
  std::string products = {};
};

}  // namespace w4q::pipeline
