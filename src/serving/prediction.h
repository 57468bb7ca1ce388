// Whether programs load a checkpoint, by its headers and config.json alone (docs/serving.md).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"
#include "serving/rules.h"

namespace w4q::serving {

struct Prediction {
  Program program;
  std::vector<int> tensor_parallel;  ///< numbers of GPUs over which it can be spread; empty: the program asks for none
  std::vector<Finding> findings;

  bool loads() const;  ///< nothing refuses it
  bool right() const;  ///< where it is loaded, nothing else is computed
};

/// Asks all rules that the program has.
Prediction predict(const StoredModel& model, Program program);

/// What the note below says of scales.
inline constexpr std::string_view rounded_mark = "F16 beside torch_dtype bfloat16";
/// What rounded_scales() means to the programs that load the format, whichever is asked for; empty: nothing.
std::string rounded_scales_note(const StoredModel& model);

/// One line: "vllm 0.33.0: loads; tensor parallel 1, 2, 4, 8".
std::string verdict(const Prediction& prediction);
/// One line without names of more than five tensors.
std::string to_text(const Finding& finding);
/// verdict() and its findings, indented.
std::string to_text(const Prediction& prediction);
io::Json to_json(const Prediction& prediction);

}  // namespace w4q::serving
