// What AutoAWQ's versions share: config.json, and which linears a checkpoint has.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/dialect/dialect.h"

namespace w4q::checkpoint {

struct AwqSizes {
  int64_t n = 0;
  int64_t k = 0;
};

/// How one version stores a linear.
struct AwqVersion {
  /// From the shape of qweight.
  AwqSizes (*sizes)(const Shape& qweight);
  std::vector<formats::StoredSpec> (*tensors)(const formats::Scheme&, int64_t n, int64_t k);
  /// True when every zero point of the linear is 8; its tensors have the planned types and shapes. Null: there are
  /// none.
  bool (*is_symmetric)(const io::Checkpoint&, const PackedLinearInfo&);
  /// Types that its scales may have.
  std::span<const formats::ScaleType> scales;
};

/// "gemm", "gemv", "gemv_fast" or "marlin", by the types and shapes of the first linear; empty where the config is not
/// AWQ's. What the config says is only believed where shapes leave both open.
std::string awq_version(const DialectSource& source);

/// DialectRow::read. Schemes are symmetric where all zero points of the checkpoint are 8.
QuantizationConfig read_awq(const DialectSource& source, const AwqVersion& version);

/// DialectRow::describe. All linears must have one group size.
io::Json describe_awq(std::string_view version, const std::vector<DialectLinear>& linears,
                      std::vector<std::string> kept);

}  // namespace w4q::checkpoint
