// What the report says of one part of a quantization, as it travels between ranks and stands in the journal.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "io/json.h"
#include "pipeline/calibrated_layer.h"
#include "pipeline/quantize_model.h"

namespace w4q::pipeline {

/// Of a tensor, or of a calibrated layer.
struct QuantizeRecord {
  std::vector<QuantizedTensor> tensors;
  std::vector<GroupReport> groups;
  std::set<std::string, std::less<>> rescaled;
  std::vector<std::string> notes;
  ExpertCounts experts;
};

/// Numbers come back as they were, but for infinite ones, which come back as NaN.
io::Json to_json(const QuantizeRecord& record);
QuantizeRecord quantize_record(const io::Json& json);

}  // namespace w4q::pipeline
