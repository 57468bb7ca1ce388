#include "verify/perplexity.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "verify/window_scorer.h"

namespace w4q::verify {
namespace {

using kernels::LogitComparison;
using model::Model;

/// One window of the text: which ids the model sees, and from which on they are scored.
struct Window {
  std::vector<int32_t> inputs;
  int64_t first_scored = 1;  ///< index into `inputs`
};

std::vector<int64_t> window_starts(int64_t ids, int64_t span, int64_t stride, int64_t limit) {
  std::vector<int64_t> starts;
  for (int64_t start = 0; start + span <= ids; start += stride) {
    if (limit > 0 && static_cast<int64_t>(starts.size()) == limit) break;
    starts.push_back(start);
  }
  return starts;
}

/// Sums over the scored tokens of one window.
struct WindowSums {
  int64_t scored = 0;
  double nll = 0;
  double base_nll = 0;
  double kl = 0;
  double kl_max = 0;
  int64_t same_top1 = 0;
  int64_t top5 = 0;
  std::vector<float> kls = {};  ///< of every token

  void add(const LogitComparison& token) {
    ++scored;
    nll += token.nll_b;
    base_nll += token.nll_a;
    kl += token.kl;
    kl_max = std::max(kl_max, token.kl);
    same_top1 += token.same_top1 ? 1 : 0;
    top5 += token.top5_overlap;
    kls.push_back(static_cast<float>(token.kl));
  }
};

template <class Value>
void append(std::string& bytes, const Value* values, size_t count) {
  bytes.append(reinterpret_cast<const char*>(values), count * sizeof(Value));
}

template <class Value>
void take(std::string_view& bytes, Value* values, size_t count) {
  std::memcpy(values, bytes.data(), count * sizeof(Value));
  bytes.remove_prefix(count * sizeof(Value));
}

/// As it travels between ranks, which are all of one kind.
void append(std::string& bytes, const WindowSums& sums) {
  const int64_t counts[] = {sums.scored, sums.same_top1, sums.top5, static_cast<int64_t>(sums.kls.size())};
  const double values[] = {sums.nll, sums.base_nll, sums.kl, sums.kl_max};
  append(bytes, counts, std::size(counts));
  append(bytes, values, std::size(values));
  append(bytes, sums.kls.data(), sums.kls.size());
}

WindowSums take(std::string_view& bytes) {
  std::array<int64_t, 4> counts{};
  std::array<double, 4> values{};
  take(bytes, counts.data(), counts.size());
  take(bytes, values.data(), values.size());
  WindowSums sums{.scored = counts[0],
                  .nll = values[0],
                  .base_nll = values[1],
                  .kl = values[2],
                  .kl_max = values[3],
                  .same_top1 = counts[1],
                  .top5 = counts[2]};
  sums.kls.resize(static_cast<size_t>(counts[3]));
  take(bytes, sums.kls.data(), sums.kls.size());
  return sums;
}

WindowSums sum_up(const std::vector<LogitComparison>& tokens) {
  WindowSums sums;
  for (const auto& token : tokens) sums.add(token);
  if (sums.scored > 0) return sums;
  // A model that computes NaN has no perplexity; the report says so instead of hiding it in a maximum.
  sums.scored = 1;
  sums.nll = sums.base_nll = sums.kl = std::numeric_limits<double>::quiet_NaN();
  sums.kls.push_back(std::numeric_limits<float>::quiet_NaN());
  return sums;
}

/// Number `share` of sorted values, the nearest rank.
float at_share(const std::vector<float>& sorted, double share) {
  const auto count = static_cast<double>(sorted.size());
  const double rank = std::clamp(std::ceil(share * count), 1.0, count);
  return sorted[static_cast<size_t>(rank) - 1];
}

PerplexityReport::AgainstBase against_base(const std::vector<WindowSums>& windows) {
  PerplexityReport::AgainstBase result;
  result.nll = estimate(windows, [](const auto& w) { return w.base_nll; });
  result.nll_difference = estimate(windows, [](const auto& w) { return w.nll - w.base_nll; });
  result.kl = estimate(windows, [](const auto& w) { return w.kl; });
  std::vector<std::vector<float>> kls;
  for (const auto& window : windows) {
    result.kl_max = std::max(result.kl_max, window.kl_max);
    kls.push_back(window.kls);
  }
  result.kl_quantiles = kl_quantiles(kls);
  result.top1_changed = estimate(windows, [](const auto& w) { return static_cast<double>(w.scored - w.same_top1); });
  result.same_top1 = estimate(windows, [](const auto& w) { return static_cast<double>(w.same_top1); }).mean;
  result.top5_overlap = estimate(windows, [](const auto& w) { return static_cast<double>(w.top5) / 5; }).mean;
  return result;
}

using Candidates = std::span<const Model* const>;

void check_same_vocabulary(const model::ModelConfig& expected, const model::ModelConfig& found) {
  if (found.vocab_size == expected.vocab_size) return;
  throw Error(ErrorCode::mismatch, "the models have different vocabularies")
      .detail(concat("expected ", expected.vocab_size, " tokens as in the model beside it, found ", found.vocab_size));
}

void check_options(Candidates candidates, std::span<const BaseModel> bases, int64_t ids,
                   const PerplexityOptions& options) {
  const auto& config = candidates.front()->config();
  const auto refuse = [](std::string what, std::string_view hint) {
    throw Error(ErrorCode::bad_argument, std::move(what)).hint(hint);
  };
  const int64_t span = options.context - (options.bos ? 1 : 0);
  if (options.context < 2) refuse("a context of fewer than 2 tokens scores nothing", "--ctx 512");
  if (options.stride < 0 || options.stride > span) {
    refuse(concat("a stride of ", options.stride, " would leave out tokens between windows of ", span),
           "--stride at most --ctx");
  }
  if (ids < span)
    refuse(concat("the text has ", ids, " tokens, one window needs ", span), "use a longer text or a smaller --ctx");
  if (options.bos && !config.bos_token) refuse("the model's config names no BOS token", "leave --bos out");
  for (const auto& base : bases) check_same_vocabulary(base.model->config(), config);
  for (const auto* candidate : candidates) {
    check_same_vocabulary(config, candidate->config());
    const auto bos = candidate->config().bos_token;
    if (!options.bos || bos == config.bos_token) continue;
    throw Error(ErrorCode::mismatch, "the models' configs name different BOS tokens")
        .detail(concat("expected ", *config.bos_token, " as in the first, found ", bos ? concat(*bos) : "none"))
        .hint("leave --bos out");
  }
}

Window make_window(std::span<const int32_t> ids, int64_t start, int64_t span, int64_t scored,
                   const PerplexityOptions& options, const model::ModelConfig& config) {
  Window window;
  window.inputs.reserve(static_cast<size_t>(span) + 1);
  if (options.bos) window.inputs.push_back(static_cast<int32_t>(*config.bos_token));
  for (int64_t i = 0; i < span; ++i) window.inputs.push_back(ids[static_cast<size_t>(start + i)]);
  window.first_scored = std::max<int64_t>(1, static_cast<int64_t>(window.inputs.size()) - scored);
  return window;
}

}  // namespace

std::vector<KlQuantile> kl_quantiles(const std::vector<std::vector<float>>& windows) {
  struct Below {
    int64_t scored, below;
  };
  std::vector<float> sorted;
  for (const auto& window : windows) sorted.insert(sorted.end(), window.begin(), window.end());
  if (sorted.empty()) return {};
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const bool known = std::ranges::none_of(sorted, [](float kl) { return std::isnan(kl); });
  if (known) std::ranges::sort(sorted);
  std::vector<KlQuantile> result;
  for (const double share : kl_shares) {
    if (!known) {
      result.push_back({share, nan, nan, nan});
      continue;
    }
    // How well the share below it is known, window by window, says between which shares the true one lies.
    const float kl = at_share(sorted, share);
    std::vector<Below> counts;
    for (const auto& window : windows) {
      counts.push_back({static_cast<int64_t>(window.size()),
                        std::ranges::count_if(window, [&](float value) { return value <= kl; })});
    }
    const double error = estimate(counts, [](const Below& window) { return static_cast<double>(window.below); }).error;
    const bool several = std::isfinite(error);
    result.push_back({share, kl, several ? at_share(sorted, share - confidence * error) : nan,
                      several ? at_share(sorted, share + confidence * error) : nan});
  }
  return result;
}

double PerplexityReport::perplexity() const noexcept { return std::exp(nll.mean); }
double PerplexityReport::perplexity_error() const noexcept { return perplexity() * nll.error; }
double PerplexityReport::base_perplexity() const noexcept { return base ? std::exp(base->nll.mean) : 0; }
double PerplexityReport::ratio() const noexcept { return base ? std::exp(base->nll_difference.mean) : 0; }
double PerplexityReport::ratio_error() const noexcept { return base ? ratio() * base->nll_difference.error : 0; }

namespace {

WindowScorer make_scorer(Candidates candidates, std::span<const BaseModel> bases, const PerplexityOptions& options) {
  if (options.gpu == nullptr) {
    return cpu_window_scorer(candidates, bases, options.context, options.int8_activations, options.stage());
  }
  return cuda_window_scorer(*options.gpu, candidates, bases, options.context, options.kv, options.residual_bytes,
                            options.int8_activations, options.stage());
}

PerplexityReport make_report(const std::vector<WindowSums>& windows, bool has_base) {
  PerplexityReport report;
  report.windows = static_cast<int64_t>(windows.size());
  for (const auto& window : windows) report.scored += window.scored;
  report.nll = estimate(windows, [](const auto& w) { return w.nll; });
  if (has_base) report.base = against_base(windows);
  for (const auto& window : windows) {
    report.per_window.push_back(
        {window.scored, window.nll, window.base_nll, window.kl, has_base ? window.scored - window.same_top1 : 0});
  }
  return report;
}

/// Where the GPU has no room for all of them.
std::vector<PerplexityReport> measure_one_by_one(Candidates candidates, std::span<const BaseModel> bases,
                                                 std::span<const int32_t> ids, const PerplexityOptions& options) {
  std::vector<PerplexityReport> reports;
  for (const auto& candidate : candidates) {
    for (auto& report : measure_perplexities({&candidate, 1}, bases, ids, options)) {
      reports.push_back(std::move(report));
    }
  }
  return reports;
}

}  // namespace

std::vector<PerplexityReport> measure_perplexities(Candidates candidates, std::span<const BaseModel> bases,
                                                   std::span<const int32_t> ids, const PerplexityOptions& options) {
  check_options(candidates, bases, static_cast<int64_t>(ids.size()), options);
  const Stopwatch watch;
  const int64_t span = options.context - (options.bos ? 1 : 0);
  const int64_t stride = options.stride == 0 ? span : options.stride;
  const auto starts = window_starts(static_cast<int64_t>(ids.size()), span, stride, options.max_windows);
  WindowScorer scorer;
  try {
    scorer = make_scorer(candidates, bases, options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::device || candidates.size() == 1 || options.ranks->size() > 1) throw;
    return measure_one_by_one(candidates, bases, ids, options);
  }
  const model::LayerStage stage = options.stage();
  const auto groups = static_cast<size_t>(stage.groups()), own = static_cast<size_t>(stage.group());
  Progress progress("perplexity", static_cast<int64_t>((starts.size() + groups - 1) / groups) * span, "tokens");
  const size_t pairs = candidates.size() * std::max<size_t>(1, bases.size());
  std::string sums;  // of the windows of this group of ranks, one in `groups`, at its last stage
  for (size_t i = own; i < starts.size(); i += groups) {
    const int64_t start = starts[i];
    // The first window scores all it can; a later one only what no earlier one has scored.
    const int64_t scored = start == 0 ? span : stride;
    const Window window = make_window(ids, start, span, scored, options, candidates.front()->config());
    const auto scores = scorer(window.inputs, window.first_scored);
    for (size_t pair = 0; pair < pairs && stage.last(); ++pair) append(sums, sum_up(scores[pair]));
    progress.advance(span);
  }
  // In the order of the windows, so that nothing depends on who scored them.
  const auto all = options.ranks->gather_everywhere(std::move(sums));
  std::vector<std::string_view> rest(all.begin(), all.end());
  std::vector<std::vector<WindowSums>> windows(pairs);
  for (size_t i = 0; i < starts.size(); ++i) {
    for (auto& each : windows)
      each.push_back(take(rest[static_cast<size_t>(stage.last_rank(static_cast<int>(i % groups)))]));
  }
  std::vector<PerplexityReport> reports;
  for (const auto& each : windows) reports.push_back(make_report(each, !bases.empty()));
  const double seconds = watch.seconds();
  for (auto& report : reports) report.seconds = seconds;
  return reports;
}

PerplexityReport measure_perplexity(const Model& candidate, const Model* base, std::span<const int32_t> ids,
                                    const PerplexityOptions& options) {
  const BaseModel one{base, options.base_kv.value_or(kernels::KvChoice{})};
  const Model* const alone = &candidate;
  return std::move(measure_perplexities({&alone, 1}, {&one, base != nullptr ? 1u : 0u}, ids, options).front());
}

std::string quantile_name(const KlQuantile& quantile) {
  if (quantile.share == 0.5) return "median KL (95 % interval)";
  return concat("KL that ", 100 * quantile.share, " % of tokens do not exceed");
}

std::string quantile_text(const KlQuantile& quantile) {
  const std::string text = fixed(quantile.kl, 5);
  if (std::isnan(quantile.low)) return text;
  return concat(text, " (", fixed(quantile.low, 5), " … ", fixed(quantile.high, 5), ")");
}

std::string to_text(const PerplexityReport& report) {
  const auto with_error = [](double value, double error, int digits) {
    return std::isnan(error) ? fixed(value, digits) : fixed(value, digits) + " ± " + fixed(error, digits);
  };
  TextTable table({"measure", "value"});
  table.row({"perplexity", with_error(report.perplexity(), report.perplexity_error(), 4)});
  if (report.base) {
    const auto& base = *report.base;
    table.row({"base perplexity", with_error(report.base_perplexity(), report.base_perplexity() * base.nll.error, 4)});
    table.row({"ratio", with_error(report.ratio(), report.ratio_error(), 4)});
    table.row({"KL to base, nats per token", with_error(base.kl.mean, base.kl.error, 5)});
    for (const auto& quantile : base.kl_quantiles) table.row({quantile_name(quantile), quantile_text(quantile)});
    table.row({"largest KL of one token", fixed(base.kl_max, 4)});
    table.row({"same most likely token, %", with_error(100 * base.same_top1, 100 * base.top1_changed.error, 2)});
    table.row({"overlap of the five most likely, %", fixed(100 * base.top5_overlap, 2)});
  }
  table.row({"windows", concat(report.windows)});
  table.row({"scored tokens", concat(report.scored)});
  table.row({"seconds", fixed(report.seconds, 1)});
  return table.str();
}

/// Means over the scored tokens of each.
io::Json windows_json(const PerplexityReport& report) {
  io::Json windows = io::Json::array();
  for (const WindowScore& window : report.per_window) {
    const auto scored = static_cast<double>(window.scored);
    windows.push_back({{"scored_tokens", window.scored}, {"perplexity", std::exp(window.nll / scored)}});
    if (!report.base) continue;
    windows.back()["base_perplexity"] = std::exp(window.base_nll / scored);
    windows.back()["kl"] = window.kl / scored;
  }
  return windows;
}

io::Json to_json(const PerplexityReport& report) {
  io::Json json = {{"perplexity", report.perplexity()},
                   {"perplexity_error", report.perplexity_error()},
                   {"nll", report.nll.mean},
                   {"nll_error", report.nll.error},
                   {"windows", report.windows},
                   {"scored_tokens", report.scored},
                   {"seconds", report.seconds},
                   {"per_window", windows_json(report)}};
  if (!report.base) return json;
  const auto& base = *report.base;
  json["base"] = {{"perplexity", report.base_perplexity()},
                  {"nll", base.nll.mean},
                  {"ratio", report.ratio()},
                  {"ratio_error", report.ratio_error()},
                  {"kl", base.kl.mean},
                  {"kl_error", base.kl.error},
                  {"kl_max", base.kl_max},
                  {"same_top1", base.same_top1},
                  {"top1_changed", base.top1_changed.mean},
                  {"top1_changed_error", base.top1_changed.error},
                  {"top5_overlap", base.top5_overlap}};
  io::Json quantiles = io::Json::array();
  for (const auto& [share, kl, low, high] : base.kl_quantiles) {
    quantiles.push_back({{"share", share}, {"kl", kl}, {"low", low}, {"high", high}});
  }
  json["base"]["kl_quantiles"] = std::move(quantiles);
  return json;
}

}  // namespace w4q::verify
