// Norms and kept tensors against the others of the model: what no training leaves.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "model/opened.h"

namespace w4q::verify {

/// Logarithms of the sizes of the columns that read a norm's channels [channels], by the norm's tensor: scales that are
/// folded into the one are folded out of the other, so that the product alone says how large a norm is. Empty: what reads
/// it was not measured.
using ReaderColumns = std::map<std::string, std::vector<double>, std::less<>>;

struct NormReport {
  std::vector<std::string> faults, warnings;
};

/// One line each: norms that are zero, negative or ones as no other of the model is, that have a run of zeros, or sizes
/// that no norm has; and tables whose values are of such sizes. What sound models have, too, is a warning.
NormReport check_norms(const model::OpenedModel& model, const ReaderColumns& readers);

/// "model.layers.3.mlp.gate.weight" → "model.layers.mlp.gate.weight": the same in every layer and expert.
std::string role_of(std::string_view name);

}  // namespace w4q::verify
