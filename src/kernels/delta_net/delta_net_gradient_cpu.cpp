#include "kernels/delta_net/delta_net_gradient.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"

namespace w4q::kernels {
namespace {

constexpr float normalizing_eps = 1e-6f;
/// Channels of a convolution that are worth waking a thread for.
constexpr int64_t convolved_channels = 256;
/// Positions whose states exist together.
constexpr int64_t stretch = 32;

/// One key head with the value heads that share it, and where its values stand.
class HeadGradient {
 public:
  HeadGradient(const DeltaShape& shape, int64_t key_head, MatrixView<const float> mixed)
      : shape_(shape),
        width_(shape.value_dim),
        query_at_(key_head * shape.key_dim),
        key_at_(shape.keys() + query_at_),
        mixed_(mixed),
        queries_(static_cast<size_t>(mixed.rows * shape.key_dim)),
        keys_(queries_.size()),
        by_queries_(queries_.size()),
        by_keys_(queries_.size()),
        states_(static_cast<size_t>((stretch + 1) * shape.key_dim * width_)),
        begun_(static_cast<size_t>((mixed.rows + stretch - 1) / stretch * shape.key_dim * width_)),
        by_state_(static_cast<size_t>(shape.key_dim * width_)),
        seen_(static_cast<size_t>(width_)),
        by_change_(seen_.size()) {
    for (int64_t r = 0; r < mixed.rows; ++r) {
      normalize(mixed.row(r) + query_at_, query_scale(), query(r));
      normalize(mixed.row(r) + key_at_, 1.0f, key(r));
    }
  }

  /// One of the value heads; gradients by queries and keys add up.
  void run(int64_t head, MatrixView<const float> beta, MatrixView<const float> log_decay,
           MatrixView<const float> gradient, const DeltaGradients& by) {
    head_ = head;
    beta_ = beta;
    log_decay_ = log_decay;
    begin_stretches();
    std::ranges::fill(by_state_, 0.0f);
    for (int64_t first = (mixed_.rows - 1) / stretch * stretch; first >= 0; first -= stretch) {
      const int64_t last = std::min(first + stretch, mixed_.rows);
      std::copy_n(begun(first), size(), state(0));
      for (int64_t r = first; r < last; ++r) {
        std::copy_n(state(r - first), size(), state(r - first + 1));
        advance(r, state(r - first + 1));
      }
      for (int64_t r = last; r-- > first;) {
        go_back(r, state(r - first), state(r - first + 1), gradient.row(r) + head * width_, by);
      }
    }
  }

  /// Once all value heads are through.
  void finish(const DeltaGradients& by) {
    for (int64_t r = 0; r < mixed_.rows; ++r) {
      normalize_back(mixed_.row(r) + query_at_, query_scale(), by_query(r), by.mixed.row(r) + query_at_);
      normalize_back(mixed_.row(r) + key_at_, 1.0f, by_key(r), by.mixed.row(r) + key_at_);
    }
  }

 private:
  int64_t size() const { return shape_.key_dim * width_; }
  float query_scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.key_dim)); }
  float* query(int64_t r) { return queries_.data() + r * shape_.key_dim; }
  float* key(int64_t r) { return keys_.data() + r * shape_.key_dim; }
  float* by_query(int64_t r) { return by_queries_.data() + r * shape_.key_dim; }
  float* by_key(int64_t r) { return by_keys_.data() + r * shape_.key_dim; }
  float* state(int64_t index) { return states_.data() + index * size(); }
  float* begun(int64_t r) { return begun_.data() + r / stretch * size(); }
  const float* value(int64_t r) const { return mixed_.row(r) + value_at(); }
  int64_t value_at() const { return 2 * shape_.keys() + head_ * width_; }

  void normalize(const float* x, float factor, float* y) const {
    float sum = 0;
    for (int64_t i = 0; i < shape_.key_dim; ++i) sum += x[i] * x[i];
    const float scale = factor / std::sqrt(sum + normalizing_eps);
    for (int64_t i = 0; i < shape_.key_dim; ++i) y[i] = x[i] * scale;
  }

  void normalize_back(const float* x, float factor, const float* gradient, float* by) const {
    double sum = double{normalizing_eps}, product = 0;
    for (int64_t i = 0; i < shape_.key_dim; ++i) {
      sum += double{x[i]} * double{x[i]};
      product += double{x[i]} * double{gradient[i]};
    }
    const auto scale = static_cast<float>(double{factor} / std::sqrt(sum));
    const auto share = static_cast<float>(product / sum);
    for (int64_t i = 0; i < shape_.key_dim; ++i) by[i] = scale * (gradient[i] - share * x[i]);
  }

  /// The state moves from before position r to behind it; seen_ is what is added along the key.
  void advance(int64_t r, float* state) {
    const float decay = std::exp(log_decay_.row(r)[head_]), beta = beta_.row(r)[head_];
    std::ranges::fill(seen_, 0.0f);
    for (int64_t i = 0; i < shape_.key_dim; ++i) {
      float* const row = state + i * width_;
      for (int64_t j = 0; j < width_; ++j) {
        row[j] *= decay;
        seen_[static_cast<size_t>(j)] += row[j] * key(r)[i];
      }
    }
    for (int64_t j = 0; j < width_; ++j) {
      seen_[static_cast<size_t>(j)] = (value(r)[j] - seen_[static_cast<size_t>(j)]) * beta;
    }
    for (int64_t i = 0; i < shape_.key_dim; ++i) {
      for (int64_t j = 0; j < width_; ++j) state[i * width_ + j] += key(r)[i] * seen_[static_cast<size_t>(j)];
    }
  }

  void begin_stretches() {
    std::fill_n(state(0), size(), 0.0f);
    for (int64_t r = 0; r < mixed_.rows; ++r) {
      if (r % stretch == 0) std::copy_n(state(0), size(), begun(r));
      advance(r, state(0));
    }
  }

  /// With P = e^g S, change = β (v − Pᵀ k) and S' = P + k ⊗ change: from by S', out included, to by S and the rest.
  void go_back(int64_t r, const float* before, const float* behind, const float* by_out, const DeltaGradients& by) {
    const float decay = std::exp(log_decay_.row(r)[head_]), beta = beta_.row(r)[head_];
    std::ranges::fill(seen_, 0.0f);
    std::ranges::fill(by_change_, 0.0f);
    for (int64_t i = 0; i < shape_.key_dim; ++i) {
      float* const row = by_state_.data() + i * width_;
      float sum = 0;
      for (int64_t j = 0; j < width_; ++j) {
        sum += behind[i * width_ + j] * by_out[j];
        row[j] += query(r)[i] * by_out[j];
        by_change_[static_cast<size_t>(j)] += row[j] * key(r)[i];
        seen_[static_cast<size_t>(j)] += decay * before[i * width_ + j] * key(r)[i];
      }
      by_query(r)[i] += sum;
    }
    double by_beta = 0;
    float* const by_value = by.mixed.row(r) + value_at();
    for (int64_t j = 0; j < width_; ++j) {
      const float missing = value(r)[j] - seen_[static_cast<size_t>(j)], gradient = by_change_[static_cast<size_t>(j)];
      by_beta += double{gradient} * double{missing};
      by_value[j] = beta * gradient;
      seen_[static_cast<size_t>(j)] = beta * missing;  // the change itself
    }
    by.beta.row(r)[head_] = static_cast<float>(by_beta);
    double by_decay = 0;
    for (int64_t i = 0; i < shape_.key_dim; ++i) {
      float* const row = by_state_.data() + i * width_;
      const float* const from = before + i * width_;
      float along = 0, by_seen = 0, kept = 0;
      for (int64_t j = 0; j < width_; ++j) {
        along += row[j] * seen_[static_cast<size_t>(j)];
        by_seen += decay * from[j] * by_value[j];
        row[j] -= key(r)[i] * by_value[j];
        kept += row[j] * from[j];
        row[j] *= decay;
      }
      by_key(r)[i] += along - by_seen;
      by_decay += double{kept};
    }
    by.log_decay.row(r)[head_] = static_cast<float>(by_decay * double{decay});
  }

  const DeltaShape& shape_;
  const int64_t width_, query_at_, key_at_;
  MatrixView<const float> mixed_, beta_, log_decay_;
  int64_t head_ = 0;
  std::vector<float> queries_, keys_, by_queries_, by_keys_;  // normed, and gradients by that, [rows, key_dim]
  std::vector<float> states_;                                 // of a stretch, before each position and behind the last
  std::vector<float> begun_;                                  // before each stretch
  std::vector<float> by_state_, seen_, by_change_;
};

}  // namespace

void causal_convolution_gradient(const DeltaShape& shape, std::span<const float> weight, MatrixView<const float> x,
                                 MatrixView<float> gradient, Activation activation) {
  const int64_t channels = shape.channels(), taps = shape.taps, past = taps - 1;
  ensure(x.cols == channels && gradient.cols == channels && gradient.rows == x.rows &&
             static_cast<int64_t>(weight.size()) == channels * taps,
         "causal_convolution_gradient: shapes differ");
  parallel_for(channels, convolved_channels, [&](int64_t begin, int64_t end) {
    std::vector<float> line(static_cast<size_t>(past + x.rows)), by(static_cast<size_t>(x.rows + past));
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t r = 0; r < x.rows; ++r) line[static_cast<size_t>(past + r)] = x.row(r)[c];
      const float* const taps_of = weight.data() + c * taps;
      for (int64_t r = 0; r < x.rows; ++r) {
        float sum = 0;
        for (int64_t t = 0; t < taps; ++t) sum += taps_of[t] * line[static_cast<size_t>(r + t)];
        by[static_cast<size_t>(r)] = gradient.row(r)[c] * activated_gate({.activation = activation}, sum).slope;
      }
      for (int64_t r = 0; r < x.rows; ++r) {
        float sum = 0;
        for (int64_t t = 0; t < taps; ++t) sum += taps_of[t] * by[static_cast<size_t>(r + past - t)];
        gradient.row(r)[c] = sum;
      }
    }
  });
}

void delta_rule_gradient(const DeltaShape& shape, MatrixView<const float> mixed, MatrixView<const float> beta,
                         MatrixView<const float> log_decay, MatrixView<const float> gradient,
                         const DeltaGradients& by) {
  const int64_t heads = shape.value_heads, each = heads / shape.key_heads;
  const auto fits = [&](MatrixView<const float> x, int64_t cols) { return x.rows == mixed.rows && x.cols == cols; };
  ensure(mixed.cols == shape.channels() && fits(beta, heads) && fits(log_decay, heads) &&
             fits(gradient, shape.values()) && fits(by.mixed, mixed.cols) && fits(by.beta, heads) &&
             fits(by.log_decay, heads),
         "delta_rule_gradient: shapes differ");
  parallel_for(shape.key_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t key_head = begin; key_head < end; ++key_head) {
      HeadGradient head(shape, key_head, mixed);
      for (int64_t own = 0; own < each; ++own) head.run(key_head * each + own, beta, log_decay, gradient, by);
      head.finish(by);
    }
  });
}

}  // namespace w4q::kernels
