// Perplexity by full decode, and the distance to the base model in the same pass.
//
// Definition (docs/verify.md): the ids are cut into windows of `context` tokens; in every window each token but the
// first is scored with the context inside the window; ppl = exp(mean negative log-likelihood). A trailing partial
// window is dropped. Log-softmax in fp32 or better, sums in fp64.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/context.h"
#include "io/json.h"
#include "kernels/attention/kv_page.h"
#include "model/model.h"
#include "ranks/ranks.h"
#include "verify/estimate.h"

namespace w4q::verify {

struct PerplexityOptions {
  int64_t context = 512;
  int64_t stride = 0;  ///< distance of window starts; 0: `context`. Smaller: only the last `stride` tokens are scored
  bool bos = false;    ///< each window is one BOS and context − 1 ids, all of them scored
  int64_t max_windows = 0;                        ///< 0: all
  std::shared_ptr<device::Context> gpu = {};      ///< where to decode; null: on the CPU
  kernels::KvChoice kv = {};                      ///< of the cache on the GPU
  std::optional<kernels::KvChoice> base_kv = {};  ///< of the base's; nothing: f16
  std::optional<int64_t> residual_bytes = {};     ///< CudaModel::upload, of the candidate
  bool int8_activations = false;                  ///< of the candidate (model/int8_activations.h)
  ranks::Ranks* ranks = &ranks::world();          ///< share the windows; the report is the same at each
  int split_layers = 1;                           ///< so many of them hold each model together (layer_stage.h)

  /// The part of each model that has to be here.
  model::LayerStage stage() const { return {*ranks, split_layers}; }
};

/// Sums over the scored tokens of one window.
struct WindowScore {
  int64_t scored = 0;
  double nll = 0;
  double base_nll = 0;  ///< with a base
  double kl = 0;
  int64_t top1_changed = 0;  ///< tokens whose most likely next token is another
};

/// The KL below which a share of the tokens lies.
struct KlQuantile {
  double share = 0;  ///< 0.99
  double kl = 0;     ///< the smallest that this share does not exceed
  double low = 0;    ///< of a 95 % interval, which knows that tokens of one window are not independent; NaN for a
  double high = 0;   ///< single window
};
/// Those that are told.
inline constexpr double kl_shares[] = {0.5, 0.9, 0.95, 0.99, 0.999};

/// Quantiles over the tokens of all windows, whatever their sizes; nothing where there are no tokens, NaN where one is.
std::vector<KlQuantile> kl_quantiles(const std::vector<std::vector<float>>& windows);

struct PerplexityReport {
  int64_t windows = 0;
  int64_t scored = 0;                   ///< tokens
  Estimate nll;                         ///< nats per token
  double seconds = 0;                   ///< of the pass, in which other models may have been measured too
  std::vector<WindowScore> per_window;  ///< in order: for comparing two models window by window

  struct AgainstBase {
    Estimate nll;
    Estimate nll_difference;  ///< candidate − base, paired window by window
    Estimate kl;              ///< KL(base ‖ candidate), nats per token
    double kl_max = 0;        ///< of one token
    std::vector<KlQuantile> kl_quantiles = {};
    Estimate top1_changed = {};  ///< share of tokens whose most likely next token is another
    double same_top1 = 0;        ///< share of tokens with the same most likely next token
    double top5_overlap = 0;     ///< mean share of the base's five most likely tokens among the candidate's
  };
  std::optional<AgainstBase> base;

  double perplexity() const noexcept;
  double perplexity_error() const noexcept;
  double base_perplexity() const noexcept;
  /// Candidate's perplexity over the base's.
  double ratio() const noexcept;
  double ratio_error() const noexcept;
};

/// A model to compare with, which may be a candidate itself, and its cache on the GPU.
struct BaseModel {
  const model::Model* model = nullptr;
  kernels::KvChoice kv = {};
};

/// Decodes `ids` with each of `candidates` and, in lock step, with each of `bases`: reports for each candidate, in
/// their order, one for each base or one alone where there are none. On a GPU that has no room for all, one candidate
/// after the other. Throws bad_argument when there are too few ids for one window, or when the options make no sense;
/// mismatch when vocabularies differ, or BOS tokens where they are asked for; device where the GPU was asked for and
/// fails; unsupported for a model that has no products with int8 activations.
std::vector<PerplexityReport> measure_perplexities(std::span<const model::Model* const> candidates,
                                                   std::span<const BaseModel> bases, std::span<const int32_t> ids,
                                                   const PerplexityOptions& options);
/// The same with one candidate and one base, or with none where it is null.
PerplexityReport measure_perplexity(const model::Model& candidate, const model::Model* base,
                                    std::span<const int32_t> ids, const PerplexityOptions& options);

/// "median KL (95 % interval)" and "0.00231 (0.00210 … 0.00255)".
std::string quantile_name(const KlQuantile& quantile);
std::string quantile_text(const KlQuantile& quantile);

std::string to_text(const PerplexityReport& report);
io::Json to_json(const PerplexityReport& report);

}  // namespace w4q::verify
