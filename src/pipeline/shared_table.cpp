#include "pipeline/shared_table.h"

namespace w4q::pipeline {

std::map<std::string, std::vector<size_t>> linears_that_share_tables(std::span<const formats::Scheme> schemes,
                                                                     const quantize::Steps& steps) {
  std::map<std::string, std::vector<size_t>> result;
  if (!steps.has(quantize::StepKind::learn_table)) return result;
  for (size_t i = 0; i < schemes.size(); ++i) {
    if (schemes[i].family == formats::SchemeFamily::kbit) result[to_string(schemes[i])].push_back(i);
  }
  std::erase_if(result, [](const auto& entry) { return entry.second.size() < 2; });
  return result;
}

quantize::QuantizeOptions with_shared_table(quantize::QuantizeOptions options, const SharedTables& tables,
                                            const formats::Scheme& scheme) {
  const auto found = tables.find(to_string(scheme));
  if (found == tables.end()) return options;
  options.table = found->second.table;
  options.tensor_factor = found->second.factor;
  return options;
}

}  // namespace w4q::pipeline
