// Learned tables of kbit are one for all linears of a scheme that read one input: kernels stack q, k and v, gate and up
// where they have one table, and multiply them in one launch (docs/quality.md).
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "formats/scheme.h"
#include "quantize/kbit_search.h"

namespace w4q::pipeline {

/// By the name of the scheme.
using SharedTables = std::map<std::string, quantize::SharedTable>;

/// Of linears that read one input, by their schemes: the numbers of those that learn a table together. None stands alone.
std::map<std::string, std::vector<size_t>> linears_that_share_tables(std::span<const formats::Scheme> schemes,
                                                                     const quantize::Steps& steps);

/// Options for a linear of the scheme.
quantize::QuantizeOptions with_shared_table(quantize::QuantizeOptions options, const SharedTables& tables,
                                            const formats::Scheme& scheme);

}  // namespace w4q::pipeline
