#include "verify/kv_compare.h"

#include "core/text.h"

namespace w4q::verify {

std::vector<KvRow> compare_caches(const model::Model& model, std::span<const int32_t> ids,
                                  const PerplexityOptions& options) {
  const auto& config = model.config();
  std::vector<KvRow> rows;
  for (const auto type : {kernels::KvType::fp8, kernels::KvType::q4}) {
    PerplexityOptions how = options;
    how.device = device::Device::cuda;
    how.kv = type;
    how.base_kv = kernels::KvType::f16;
    KvRow row{type, 0, measure_perplexity(model, &model, ids, how)};
    row.bytes_per_token = 2 * config.layers * config.kv_heads *
                          kernels::kv_head_page_bytes(type, kernels::kv_padded_dim(config.head_dim)) /
                          kernels::kv_page_tokens;
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string to_text(const std::vector<KvRow>& rows) {
  TextTable table({"KV cache", "bytes a token", "perplexity", "ratio to f16", "KL to f16", "same top-1, %"});
  for (const auto& row : rows) {
    const auto& quality = row.quality;
    table.row({std::string(kernels::to_string(row.type)), concat(row.bytes_per_token), fixed(quality.perplexity(), 4),
               fixed(quality.ratio(), 5), fixed(quality.base->kl.mean, 6), fixed(100 * quality.base->same_top1, 2)});
  }
  return table.str();
}

io::Json to_json(const std::vector<KvRow>& rows) {
  io::Json json = io::Json::array();
  for (const auto& row : rows) {
    json.push_back({{"kv", kernels::to_string(row.type)},
                    {"bytes_per_token", row.bytes_per_token},
                    {"quality", to_json(row.quality)}});
  }
  return json;
}

}  // namespace w4q::verify
