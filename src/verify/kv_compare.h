// What the types of the KV cache cost: perplexity and KL of the same model against its f16 cache.
#pragma once

#include <string>
#include <vector>

#include "verify/perplexity.h"

namespace w4q::verify {

struct KvRow {
  kernels::KvChoice kv;
  int64_t bytes_per_token = 0;  ///< keys and values of all layers
  PerplexityReport quality;     ///< against the f16 cache
};

/// Every type but f16, on the GPU of the options; with a finite `delta` fp4r that skips pages, too. Errors as
/// measure_perplexity.
std::vector<KvRow> compare_caches(const model::Model& model, std::span<const int32_t> ids,
                                  const PerplexityOptions& options, float delta = INFINITY);

std::string to_text(const std::vector<KvRow>& rows);
io::Json to_json(const std::vector<KvRow>& rows);

}  // namespace w4q::verify
