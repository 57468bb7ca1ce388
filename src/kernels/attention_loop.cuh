// A warp's way through the pages of its block: keys, softmax, values, with the next pages on their way into registers.
#pragma once

#include "kernels/attention_decode_parts.cuh"
#include "kernels/attention_merge.cuh"
#include "kernels/attention_operands.cuh"

namespace w4q::kernels::decode {

/// Pages warp, warp + warps … of a list, and where they stand in the pool, looked up 32 at a time: lane j has the j-th.
template <int dim, class PageOf>
class PoolPages {
 public:
  __device__ PoolPages(const Task& task, int count, const PageOf& page_of)
      : table_(task.layer.table), count_(count), page_of_(page_of) {
    look_up();
  }
  /// The next one; a call for every page, past the last ones too.
  __device__ int next() {
    if (taken_ == 32) look_up();
    return __shfl_sync(0xFFFFFFFFu, places_, taken_++);
  }

 private:
  __device__ void look_up() {
    const int i = first_ + static_cast<int>(threadIdx.x / 32 + threadIdx.x % 32 * warps<dim>);
    places_ = i < count_ ? table_[page_of_(i)] : 0;
    first_ += 32 * warps<dim>;
    taken_ = 0;
  }

  const int32_t* table_;
  int count_;
  PageOf page_of_;
  int first_ = 0, taken_ = 0, places_ = 0;
};

/// A warp's running softmax and sums. Lane (g, t): scores of tokens 2g and 2g + 1 for heads 2t and 2t + 1.
template <KvType type, int dim>
struct Running {
  using Keys = PageKeys<type, dim>;
  using Values = PageValues<type, dim>;

  float reference[2];  ///< what scores of heads 2t and 2t + 1 are measured from, in units of log2
  OutputSums<type, dim> sums;

  __device__ void clear() {
    reference[0] = reference[1] = lowest;
    sums.clear();
  }

  /// Turns scores over `factor` into weights.
  __device__ void weigh(float (&score)[4], float factor) {
    float above[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) above[i] = fmaf(score[i], factor, -reference[i % 2]);
    const float most = fmaxf(fmaxf(above[0], above[1]), fmaxf(above[2], above[3]));
    if (__any_sync(0xFFFFFFFFu, most > slack)) {
      raise(score, factor);
#pragma unroll
      for (int i = 0; i < 4; ++i) above[i] = fmaf(score[i], factor, -reference[i % 2]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = power_of_two(above[i]);
  }
  __device__ void add(const Values& values, float (&weights)[4]) {
    float scaled[4] = {weights[0], weights[1], weights[2], weights[3]};
    values.scale(scaled);
    const uint32_t b0 = transposed(device::HalfType::pack(scaled[0], scaled[1]));
    const uint32_t b1 = transposed(device::HalfType::pack(scaled[2], scaled[3]));
    sums.add(values, b0, b1, weights);
  }
  __device__ void store(Partial<dim>& to) const {
    const int t = static_cast<int>(threadIdx.x % 4);
    const float2 weights = sums.weights();
    if (threadIdx.x % 32 < 4) {
      to.reference[2 * t] = reference[0], to.reference[2 * t + 1] = reference[1];
      to.weight[2 * t] = weights.x, to.weight[2 * t + 1] = weights.y;
    }
    sums.store([&](int head, int d, const float4& four) {
      *reinterpret_cast<float4*>(&to.sums[2 * t + head][d]) = four;
    });
  }

 private:
  /// Weights may be up to 2^slack before the reference follows: it then seldom does, and f16 holds them times any step.
  static constexpr float slack = 2;

  __device__ void raise(const float (&score)[4], float factor) {
    float next[2] = {fmaxf(score[0], score[2]), fmaxf(score[1], score[3])};
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float& most = next[head];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
      most = fmaxf(most * factor, reference[head]);
    }
    sums.rescale(power_of_two(reference[0] - next[0]), power_of_two(reference[1] - next[1]));
    reference[0] = next[0], reference[1] = next[1];
  }
};

/// Keys and values of the pages that a warp has in registers or on their way there.
template <KvType type, int dim>
struct PagesAhead {
  /// Two where registers suffice.
  static constexpr int count = dim == 64 || type == KvType::q4 || (dim == 128 && type != KvType::f16) ? 2 : 1;
  PageKeys<type, dim> keys[count];
  PageValues<type, dim> values[count];
};

/// What a block attends to: pages page_of(0) … page_of(count − 1) of the sequence, and with `last` the token itself
/// after them, which stands in `fresh`. A warp takes items warp, warp + warps ….
template <KvType type, int dim, class PageOf>
class Attending {
 public:
  using Ahead = PagesAhead<type, dim>;

  __device__ Attending(const Task& task, const Stretch& stretch, int kv_head, int count, bool last, const PageOf& page_of)
      : stretch_(stretch),
        keys_(head_page(task.layer.keys, 0, task.layer.kv_heads, kv_head, key_bytes)),
        values_(head_page(task.layer.values, 0, task.layer.kv_heads, kv_head, value_bytes)),
        kv_heads_(task.layer.kv_heads),
        count_(count),
        items_(last ? count + 1 : count),
        page_of_(page_of),
        pool_(task, count, page_of),
        factor_(score_factor(task) * PageKeys<type, dim>::score_unit) {}

  /// Asks for the first pages; the token itself is not there yet.
  __device__ void begin(Ahead& ahead) {
#pragma unroll
    for (int b = 0; b < Ahead::count; ++b) {
      const int i = warp() + b * warps<dim>;
      const int place = pool_.next();
      if (i >= count_) continue;
      const Places at = places(place);
      ahead.keys[b].load(at.keys);
      ahead.values[b].load(at.values);
    }
  }

  __device__ void run(const std::byte* fresh, const typename PageKeys<type, dim>::Queries& queries, Ahead& ahead,
                      Running<type, dim>& running) {
#pragma unroll
    for (int b = 0; b < Ahead::count; ++b) {
      if (items_ == count_ || warp() + b * warps<dim> != count_) continue;
      ahead.keys[b].load(fresh);
      ahead.values[b].load(fresh + key_bytes);
    }
    for (int i = warp(); i < items_;) {
#pragma unroll
      for (int b = 0; b < Ahead::count; ++b) {
        if (b > 0 && i >= items_) break;
        const int next = i + Ahead::count * warps<dim>;
        Places at = places(pool_.next());
        if (next == count_) at = {fresh, fresh + key_bytes};
        float score[4];
        ahead.keys[b].scores(queries, score);
        if (next < items_) ahead.keys[b].load(at.keys);
        mask(i, score, ahead.values[b]);
        running.weigh(score, factor_);
        running.add(ahead.values[b], score);
        if (next < items_) ahead.values[b].load(at.values);
        i += warps<dim>;
      }
    }
  }

 private:
  static constexpr int key_bytes = kv_head_page_bytes(type, dim);
  static constexpr int value_bytes = kv_value_page_bytes(type, dim);
  struct Places {
    const std::byte *keys, *values;
  };

  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ Places places(int pool_page) const {
    const int64_t page = int64_t{pool_page} * kv_heads_;
    return {keys_ + page * key_bytes, values_ + page * value_bytes};
  }
  /// Tokens that are not seen have no weight.
  __device__ void mask(int i, float (&score)[4], PageValues<type, dim>& values) const {
    const bool fresh = i == count_;
    const int index = fresh ? stretch_.position / kv_page_tokens : page_of_(i);
    if (!fresh && stretch_.sees_all(index)) return;
    const auto sees = [&](int slot) {
      const int token = index * kv_page_tokens + slot;
      return fresh ? token == stretch_.position : stretch_.sees(token);
    };
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
    const int t = static_cast<int>(threadIdx.x % 4);
    if (!sees(2 * g)) score[0] = score[1] = -INFINITY;
    if (!sees(2 * g + 1)) score[2] = score[3] = -INFINITY;
    values.clear([&](int j) { return sees(4 * t + j); });
  }

  const Stretch& stretch_;
  const std::byte *keys_, *values_;
  int kv_heads_, count_, items_;
  PageOf page_of_;
  PoolPages<dim, PageOf> pool_;
  float factor_;
};

}  // namespace w4q::kernels::decode
