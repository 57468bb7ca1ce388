#include "verify/kv_compare.h"

#include "core/text.h"
#include "verify/rungs.h"

namespace w4q::verify {

std::vector<KvRow> compare_caches(const model::Model& model, std::span<const int32_t> ids,
                                  const PerplexityOptions& options, float delta) {
  using kernels::KvChoice;
  using kernels::KvType;
  const auto& config = model.config();
  std::vector<KvChoice> choices = {KvType::fp8, KvType::q4, KvType::q4h, KvType::fp4r};
  const KvChoice pruned{KvType::fp4r, delta};
  if (pruned.prunes()) choices.push_back(pruned);
  std::vector<KvRow> rows;
  for (const KvChoice& kv : choices) {
    PerplexityOptions how = options;
    how.kv = kv;
    how.base_kv = KvChoice{};
    KvRow row{kv, 0, measure_perplexity(model, &model, ids, how)};
    const int dim = kernels::kv_padded_dim(config.head_dim);
    row.bytes_per_token = config.layers * config.kv_heads *
                          (kernels::kv_head_page_bytes(kv.type, dim) + kernels::kv_value_page_bytes(kv.type, dim)) /
                          kernels::kv_page_tokens;
    rows.push_back(std::move(row));
  }
  return rows;
}

namespace {

std::string name_of(const kernels::KvChoice& kv) {
  const std::string name(kernels::to_string(kv.type));
  return kv.prunes() ? concat(name, ", delta ", fixed(kv.delta, 2)) : name;
}

}  // namespace

std::string to_text(const std::vector<KvRow>& rows) {
  TextTable table({"KV cache", "bytes a token", "perplexity", "ratio to f16", "KL to f16", "same top-1, %"});
  for (const auto& row : rows) {
    const auto& quality = row.quality;
    table.row({name_of(row.kv), concat(row.bytes_per_token), fixed(quality.perplexity(), 4), fixed(quality.ratio(), 5),
               fixed(quality.base->kl.mean, 6), fixed(100 * quality.base->same_top1, 2)});
  }
  return table.str();
}

io::Json to_json(const std::vector<KvRow>& rows) {
  io::Json json = io::Json::array();
  for (const auto& row : rows) {
    json.push_back(
        {{"kv", name_of(row.kv)}, {"bytes_per_token", row.bytes_per_token}, {"quality", to_json(row.quality)}});
  }
  return json;
}

CheckRow kv_compare_check() {
  return {.name = "kv-compare",
          .option = "--kv-compare",
          .help = "Compare the types of the KV cache on the text of --ppl or --ids",
          .needs = {.text = true, .gpu = true},
          .run = [](CheckContext& context, Findings& findings) {
            const CheckOptions& options = context.options();
            PerplexityOptions how = options.windows;
            how.gpu = options.gpu;
            const auto rows =
                compare_caches(context.model(model::Planes::stored), context.ids(), how, options.compared_delta);
            findings.add("kv", to_text(rows), to_json(rows));
          }};
}

}  // namespace w4q::verify
