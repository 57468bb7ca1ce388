#include "model/self_text.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "core/text.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/linear/linear.h"
#include "kernels/sampling/logits.h"
#include "model/decoder.h"
#include "model/generate.h"

namespace w4q::model {
namespace {

constexpr int64_t most_at_once = 64;
/// Keys and values of the sequences that are written side by side take at most so much, where more than one is.
constexpr int64_t most_bytes = int64_t{2} << 30;

/// Keys and values, or states, of one sequence.
int64_t sequence_bytes(const ModelConfig& config, const SelfText& request) {
  int64_t bytes = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    if (config.has_delta_net(layer)) {
      bytes += (config.delta.history_size() + config.delta.state_size()) * int64_t{sizeof(float)};
      continue;
    }
    const AttentionConfig attention = config.attention_of(layer);
    if (!attention.keys_of) {
      bytes += 2 * attention.kv_heads * attention.head_dim * request.length * int64_t{sizeof(float)};
    }
  }
  return bytes;
}

/// By the model and the length alone: how many rows a product has changes the order of its sums.
int64_t sequences_at_once(const ModelConfig& config, const SelfText& request) {
  return std::clamp<int64_t>(most_bytes / std::max<int64_t>(sequence_bytes(config, request), 1), 1, most_at_once);
}

/// Sequences `first` … of all, side by side.
class Writer {
 public:
  Writer(const Model& model, const SelfText& request, int64_t first, int64_t count)
      : model_(model), config_(model.config()), request_(request), first_(first), count_(count), runner_(config_) {
    for (int64_t i = 0; i < count; ++i) memories_.emplace_back(config_, request.length);
    for (int64_t i = 0; i < count; ++i) {
      given_.emplace_back(config_, request, first + i);
      last_.push_back(given_.back().first());
    }
  }

  void run(std::span<int32_t> ids, const std::function<void()>& on_step) {
    for (int64_t position = 0; position < request_.length; ++position) {
      for (int64_t i = 0; i < count_; ++i) {
        ids[static_cast<size_t>(i * request_.length + position)] = last_[static_cast<size_t>(i)];
      }
      if (position + 1 < request_.length) step(position);
      if (on_step) on_step();
    }
  }

 private:
  void step(int64_t position) {
    const auto x = hidden_.matrix(count_, config_.hidden_size);
    runner_.set_step(position, count_);
    begin_hidden(model_, last_, runner_, layer_embeddings_, x);
    std::vector<LayerMemory> memories(static_cast<size_t>(count_));
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      for (size_t i = 0; i < memories.size(); ++i) memories[i] = memories_[i].layer(layer);
      runner_.run(model_.layers()[static_cast<size_t>(layer)], memories, x);
    }
    kernels::rms_norm(x, model_.final_norm(), static_cast<float>(config_.rms_norm_eps), x);
    const auto logits = logits_.matrix(count_, config_.vocab_size);
    kernels::linear(model_.head(), x, logits);
    finish_logits(config_, logits);
    draw(position, logits);
  }

  /// At temperature 1, without an order of the vocabulary.
  int32_t drawn(std::span<const float> row, uint64_t number) const {
    const double largest = row[static_cast<size_t>(kernels::argmax(row))];
    double total = 0;
    for (const float logit : row) total += std::exp(double{logit} - largest);
    double left = random_uniform(request_.seed, number) * total;
    for (size_t id = 0; id < row.size(); ++id) {
      left -= std::exp(double{row[id]} - largest);
      if (left < 0) return static_cast<int32_t>(id);
    }
    return static_cast<int32_t>(kernels::argmax(row));
  }

  void draw(int64_t position, MatrixView<float> logits) {
    parallel_for(count_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        int32_t& last = last_[static_cast<size_t>(i)];
        const std::span<const float> row(logits.row(i), static_cast<size_t>(logits.cols));
        if (!std::isfinite(row[static_cast<size_t>(kernels::argmax(row))])) refuse_logits(position);
        const auto given = given_[static_cast<size_t>(i)].behind(last);
        last = given ? *given : drawn(row, static_cast<uint64_t>((first_ + i) * request_.length + position));
      }
    });
  }

  const Model& model_;
  const ModelConfig& config_;
  const SelfText& request_;
  const int64_t first_, count_;
  LayerDecoder runner_;
  std::vector<LayerMemories> memories_;
  std::vector<int32_t> last_;
  std::vector<GivenTokens> given_;
  Floats hidden_, layer_embeddings_, logits_;
};

}  // namespace

void check_self_text(const ModelConfig& config, const SelfText& request) {
  if (request.sequences < 1 || request.length < 2) {
    throw Error(ErrorCode::bad_argument,
                concat("a model cannot write ", request.sequences, " sequences of ", request.length, " tokens"));
  }
  const auto most = most_positions(config);
  if (!most || request.length <= *most) return;
  throw Error(ErrorCode::bad_argument,
              concat("sequences of ", request.length, " tokens go beyond the model's ", *most, " positions"))
      .hint(concat("--length ", *most));
}

int32_t GivenTokens::first() { return request_.talks(sequence_) ? *next() : first_token(config_, request_, sequence_); }

std::optional<int32_t> GivenTokens::next() {
  const auto& part = answers_ ? request_.answer : request_.opening;
  was_given_ = at_ < part.size();
  return was_given_ ? std::optional(part[at_++]) : std::nullopt;
}

std::optional<int32_t> GivenTokens::behind(int32_t last) {
  if (!request_.talks(sequence_)) {
    const auto& bos = config_.bos_token;
    const bool anew = ends_sequence(config_, last) && bos && last != *bos;
    return anew ? std::optional(static_cast<int32_t>(*bos)) : std::nullopt;
  }
  const bool was_given = was_given_;
  if (const auto token = next()) return token;
  if (was_given || !ends_sequence(config_, last)) return std::nullopt;
  answers_ = !answers_ && !request_.answer.empty();
  // The end of a user's words that the template writes stands there already.
  at_ = answers_ && request_.answer.front() == last ? 1 : 0;
  return next();
}

int32_t first_token(const ModelConfig& config, const SelfText& request, int64_t sequence) {
  // What an architecture assumes may lie behind a small vocabulary.
  const auto known = [&](int64_t id) { return id >= 0 && id < config.known_ids(); };
  if (config.bos_token && known(*config.bos_token)) return static_cast<int32_t>(*config.bos_token);
  if (!config.eos_tokens.empty() && known(config.eos_tokens.front())) {
    return static_cast<int32_t>(config.eos_tokens.front());
  }
  const uint64_t any = random_bits(request.seed ^ 0x9E3779B97F4A7C15U, static_cast<uint64_t>(sequence));
  return static_cast<int32_t>(any % static_cast<uint64_t>(config.vocab_size));
}

int64_t self_text_memory(const ModelConfig& config, const SelfText& request) {
  const int64_t at_once = std::min(request.sequences, sequences_at_once(config, request));
  return at_once *
         (sequence_bytes(config, request) + int64_t{sizeof(float)} * (config.vocab_size + 16 * config.hidden_size));
}

int64_t steps_of(const ModelConfig& config, const SelfText& request) {
  const int64_t at_once = sequences_at_once(config, request);
  return (request.sequences + at_once - 1) / at_once * request.length;
}

std::vector<int32_t> write_text(const Model& model, const SelfText& request, const std::function<void()>& on_step) {
  check_self_text(model.config(), request);
  const int64_t at_once = sequences_at_once(model.config(), request);
  std::vector<int32_t> ids(static_cast<size_t>(request.sequences * request.length));
  for (int64_t first = 0; first < request.sequences; first += at_once) {
    const int64_t count = std::min(at_once, request.sequences - first);
    Writer(model, request, first, count)
        .run(std::span(ids).subspan(static_cast<size_t>(first * request.length),
                                    static_cast<size_t>(count * request.length)),
             on_step);
  }
  return ids;
}

}  // namespace w4q::model
