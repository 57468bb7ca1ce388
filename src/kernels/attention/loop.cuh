// A warp's way through the pages of its block: keys, softmax, values, with the next pages on their way into registers.
#pragma once

#include "device/async_copy.cuh"
#include "kernels/attention/decode_parts.cuh"
#include "kernels/attention/merge.cuh"
#include "kernels/attention/operands.cuh"

namespace w4q::kernels::decode {

/// Pages first, first + apart … of the sequence, of which a warp takes the warp-th, (warp + warps)-th …; where they
/// stand in the pool is looked up 32 at a time: lane j has the j-th.
template <int dim>
class PoolPages {
 public:
  __device__ PoolPages(const PagedLayer& layer, int first, int apart, int count)
      : count(count), table_(layer.table), first_(first), apart_(apart) {
    look_up();
  }
  /// The number of the i-th page.
  __device__ int operator()(int i) const { return first_ + i * apart_; }
  /// Where the warp's next one stands; a call for every page, past the last ones too.
  __device__ int next() {
    if (taken_ == 32) look_up();
    return __shfl_sync(0xFFFFFFFFu, places_, taken_++);
  }
  const int count;

 private:
  __device__ void look_up() {
    const int i = looked_up_ + static_cast<int>(threadIdx.x / 32 + threadIdx.x % 32 * warps<dim>);
    places_ = i < count ? table_[(*this)(i)] : 0;
    looked_up_ += 32 * warps<dim>;
    taken_ = 0;
  }

  const int32_t* table_;
  int first_, apart_;
  int looked_up_ = 0, taken_ = 0, places_ = 0;
};

/// A warp's running softmax and sums. Lane (g, t): scores of tokens 2g and 2g + 1 for heads 2t and 2t + 1.
///
/// Weights times their values' scales are rounded to f16. The reference lies so far below the largest score that these
/// products reach up to 2^15: what is small beside the largest is then still no subnormal.
template <KvType type, int dim>
struct Running {
  using Keys = PageKeys<type, dim>;
  using Values = PageValues<type, dim>;

  float reference[2];  ///< what scores of heads 2t and 2t + 1 are measured from, in units of log2
  float largest;       ///< weight, log2: 2^15 over scale_limit
  float scale_limit;   ///< of the values' scales: a power of two
  OutputSums<type, dim> sums;

  __device__ void clear() {
    reference[0] = reference[1] = lowest;
    scale_limit = Values::has_scales ? Values::usual_scale : 1.0f;
    largest = 15 - log2f(scale_limit);
    sums.clear();
  }

  /// Turns scores over `factor` into weights of the values.
  __device__ void weigh(float (&score)[4], float factor, const Values& values) {
    float above[4];
    float most = lowest;
    const auto measure = [&] {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        above[i] = fmaf(score[i], factor, -reference[i % 2]);
        most = fmaxf(most, above[i]);
      }
    };
    measure();
    const float scale = values.largest_scale();
    if (__any_sync(0xFFFFFFFFu, most > largest || scale > scale_limit)) {
      if constexpr (Values::has_scales) raise_limit(scale);
      raise(score, factor);
      measure();
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
    sums.store(
        [&](int head, int d, const float4& four) { *reinterpret_cast<float4*>(&to.sums[2 * t + head][d]) = four; });
  }

 private:
  /// Weights grow by 2^slack before the reference follows: it then seldom does.
  static constexpr float slack = 2;

  __device__ void raise_limit(float scale) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) scale = fmaxf(scale, __shfl_xor_sync(0xFFFFFFFFu, scale, step));
    while (scale_limit < scale && scale_limit < 0x1p100f) scale_limit *= 2, largest -= 1;
  }
  __device__ void raise(const float (&score)[4], float factor) {
    float next[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 4; ++i) next[i % 2] = fmaxf(next[i % 2], score[i]);
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float& most = next[head];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
      most = fmaxf(most * factor - (largest - slack), reference[head]);
    }
    sums.rescale(power_of_two(reference[0] - next[0]), power_of_two(reference[1] - next[1]));
    reference[0] = next[0], reference[1] = next[1];
  }
};

/// Which tokens of which pages count.
struct Sight {
  const Stretch& stretch;
  int first_whole, whole;  ///< pages of which all tokens do

  __device__ explicit Sight(const Stretch& of)
      : stretch(of),
        first_whole((of.oldest + kv_page_tokens - 1) / kv_page_tokens),
        whole(of.position / kv_page_tokens - first_whole) {}
  __device__ bool sees_all(int page) const {
    return static_cast<unsigned>(page - first_whole) < static_cast<unsigned>(max(whole, 0));
  }
};

/// Tokens of a page that sees(slot) refuses have no score.
template <class Sees>
__device__ __forceinline__ void mask_scores(const Sees& sees, float (&score)[4]) {
  const int g = static_cast<int>(threadIdx.x % 32 / 4);
  if (!sees(2 * g)) score[0] = score[1] = -INFINITY;
  if (!sees(2 * g + 1)) score[2] = score[3] = -INFINITY;
}

/// Forgets scores and values of tokens that sees(slot) refuses.
template <class Sees, class Values>
__device__ __forceinline__ void mask_page(const Sees& sees, float (&score)[4], Values& values) {
  mask_scores(sees, score);
  values.clear(sees);
}

/// The token itself, which stands on two head pages of its own.
template <KvType type, int dim>
__device__ void attend_to_itself(const Task& task, int position, const std::byte* fresh,
                                 const typename PageKeys<type, dim>::Queries& queries, Running<type, dim>& running) {
  float score[4];
  PageKeys<type, dim> keys;
  keys.load(fresh);
  keys.scores(queries, score);
  PageValues<type, dim> values;
  values.load(fresh + kv_head_page_bytes(type, dim));
  mask_page([&](int slot) { return slot == position % kv_page_tokens; }, score, values);
  running.weigh(score, score_factor(task) * PageKeys<type, dim>::score_unit, values);
  running.add(values, score);
}

/// What the pages of a key head have in common.
template <KvType type, int dim>
struct HeadPages {
  static constexpr int key_bytes = kv_head_page_bytes(type, dim);
  static constexpr int value_bytes = kv_value_page_bytes(type, dim);
  const std::byte *first_keys, *first_values;
  int kv_heads;

  __device__ HeadPages(const Task& task, int kv_head)
      : first_keys(head_page(task.layer.keys, 0, task.layer.kv_heads, kv_head, key_bytes)),
        first_values(head_page(task.layer.values, 0, task.layer.kv_heads, kv_head, value_bytes)),
        kv_heads(task.layer.kv_heads) {}
  __device__ const std::byte* keys(int place) const { return first_keys + distance(place, key_bytes); }
  __device__ const std::byte* values(int place) const { return first_values + distance(place, value_bytes); }

 private:
  /// One multiplication: places are not negative.
  __device__ uint64_t distance(int place, int bytes) const {
    return static_cast<uint64_t>(static_cast<uint32_t>(place)) * static_cast<uint32_t>(kv_heads * bytes);
  }
};

/// Starts copying into shared memory what stands at two places, one behind the other; multiples of 16 bytes. The whole
/// warp together.
template <int first_bytes, int second_bytes = 0>
__device__ __forceinline__ void copy_from_page(char* to, const std::byte* first, const std::byte* second = nullptr) {
  constexpr int bytes = first_bytes + second_bytes;
  const int begin = 16 * static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int at = 0; at < bytes; at += 512) {
    if (at + 512 > bytes && at + begin >= bytes) break;
    const std::byte* const from = at + begin < first_bytes ? first + at : second + (at - first_bytes);
    device::copy_async(to + at + begin, from + begin);
  }
}

/// A warp's pages on their way into shared memory, where computing needs too many registers to hold what must be under
/// way meanwhile.
template <int bytes, int places>
struct PageRing {
  static constexpr int stages = places;
  alignas(16) char pages[stages][bytes];

  /// Room for a head before the last page of the ring is asked for.
  __device__ float* row() { return reinterpret_cast<float*>(pages[stages - 1]); }
  __device__ const std::byte* at(int stage) const { return reinterpret_cast<const std::byte*>(pages[stage]); }
  __device__ static int after(int stage) { return stage + 1 == stages ? 0 : stage + 1; }
};
/// Keys and values of q4.
template <int dim>
inline constexpr int q4_stages = dim == 64    ? 4
                                 : dim == 128 ? 3
                                              : 2;
template <int dim>
using Q4Ring = PageRing<2 * kv_head_page_bytes(KvType::q4, dim), q4_stages<dim>>;
/// The parts of a page of keys of fp4r, bytes: codes, their scales, and what codes leave.
template <int dim>
struct Fp4Page {
  static constexpr int codes = kv_page_tokens * kv_row_bytes(KvType::fp4r, dim);
  static constexpr int scales = kv_page_tokens * kv_parameter_bytes(KvType::fp4r, dim);
  static constexpr int coarse = codes + scales;
  static constexpr int all = kv_head_page_bytes(KvType::fp4r, dim);
};
/// Codes and scales of keys of fp4r, two pages at a time.
template <int dim>
using Fp4Ring = PageRing<2 * Fp4Page<dim>::coarse, 2>;

/// Where there is room for the page after the one that is in registers.
template <KvType type, int dim>
inline constexpr bool has_next_page = dim <= 128 && type != KvType::f16;
/// Its keys and values, and a head.
template <KvType type, int dim>
struct NextPage {
  static constexpr int bytes = kv_head_page_bytes(type, dim) + kv_value_page_bytes(type, dim);
  alignas(16) char page[has_next_page<type, dim> ? bytes : 16];
  float head[dim];

  __device__ float* row() { return head; }
};

/// What a warp needs of shared memory, one after the other.
template <KvType type, int dim>
union WarpSpace {
  NextPage<type, dim> next;
  Partial<dim> partial;
};
template <int dim>
union WarpSpace<KvType::q4, dim> {
  Q4Ring<dim> ring;
  Partial<dim> partial;
};
template <int dim>
union WarpSpace<KvType::fp4r, dim> {
  Fp4Ring<dim> ring;
  NextPage<KvType::fp4r, dim> next;
  Partial<dim> partial;
};

/// Attends to pages, by way of shared memory. A warp takes the warp-th, (warp + warps)-th ….
template <int dim>
class RingAttending {
 public:
  __device__ RingAttending(const Task& task, const Stretch& stretch, int kv_head, const PoolPages<dim>& pages,
                           Q4Ring<dim>& ring)
      : sight_(stretch),
        head_(task, kv_head),
        pages_(pages),
        ring_(ring),
        factor_(score_factor(task) * Q4Keys<dim>::score_unit) {}

  /// Asks for the first pages; the last place of the ring may still be in use.
  __device__ void begin() {
#pragma unroll
    for (int stage = 0; stage + 1 < Ring::stages; ++stage) ask(warp() + stage * warps<dim>, stage);
  }

  __device__ void run(const Q4Queries<dim>& queries, Running<KvType::q4, dim>& running) {
    ask(warp() + (Ring::stages - 1) * warps<dim>, Ring::stages - 1);
    int stage = 0;
    for (int i = warp(); i < pages_.count; i += warps<dim>) {
      device::wait_async<Ring::stages - 1>();
      __syncwarp();
      const std::byte* const page = ring_.at(stage);
      Q4Keys<dim> keys;
      keys.load(page);
      Q4Values<dim> values;
      values.load(page + page_bytes);
      __syncwarp();
      ask(i + Ring::stages * warps<dim>, stage);
      stage = Ring::after(stage);
      float score[4];
      keys.scores(queries, score);
      const int index = pages_(i);
      if (!sight_.sees_all(index)) {
        mask_page([&](int slot) { return sight_.stretch.sees(index * kv_page_tokens + slot); }, score, values);
      }
      running.weigh(score, factor_, values);
      running.add(values, score);
    }
  }

 private:
  using Ring = Q4Ring<dim>;
  static constexpr int page_bytes = kv_head_page_bytes(KvType::q4, dim);

  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  /// Closes a group even where no page is left, so that groups can be counted.
  __device__ void ask(int i, int stage) {
    const int place = pages_.next();
    if (i < pages_.count) {
      copy_from_page<page_bytes, page_bytes>(ring_.pages[stage], head_.keys(place), head_.values(place));
    }
    device::close_async_group();
  }

  Sight sight_;
  HeadPages<KvType::q4, dim> head_;
  PoolPages<dim> pages_;
  Ring& ring_;
  float factor_;
};

/// The same by way of registers, which take the next keys, and the next values, as soon as the last ones have been
/// multiplied; with has_next_page the one after is under way into shared memory.
template <KvType type, int dim>
class Attending {
 public:
  using Space = WarpSpace<type, dim>;

  __device__ Attending(const Task& task, const Stretch& stretch, int kv_head, const PoolPages<dim>& pages, Space& space)
      : sight_(stretch),
        head_(task, kv_head),
        pages_(pages),
        space_(space),
        factor_(score_factor(task) * PageKeys<type, dim>::score_unit) {}

  /// Asks for the first pages.
  __device__ void begin() {
    const int place = pages_.next();
    if (warp() < pages_.count) {
      keys_.load(head_.keys(place));
      values_.load(head_.values(place));
    }
    ask(warp() + warps<dim>);
  }

  __device__ void run(const typename PageKeys<type, dim>::Queries& queries, Running<type, dim>& running) {
    for (int i = warp(); i < pages_.count; i += warps<dim>) {
      const bool more = i + warps<dim> < pages_.count;
      float score[4];
      keys_.scores(queries, score);
      if (!has_next_page<type, dim> && more) keys_.load(head_.keys(place_));
      const int index = pages_(i);
      if (!sight_.sees_all(index)) {
        mask_page([&](int slot) { return sight_.stretch.sees(index * kv_page_tokens + slot); }, score, values_);
      }
      running.weigh(score, factor_, values_);
      running.add(values_, score);
      if (!has_next_page<type, dim> && more) values_.load(head_.values(place_));
      take_next(more);
      ask(i + 2 * warps<dim>);
    }
  }

 private:
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ void ask(int i) {
    place_ = pages_.next();
    if constexpr (has_next_page<type, dim>) {
      if (i >= pages_.count) return;
      copy_from_page<kv_head_page_bytes(type, dim), kv_value_page_bytes(type, dim)>(
          space_.next.page, head_.keys(place_), head_.values(place_));
      device::close_async_group();
    }
  }
  __device__ void take_next(bool more) {
    if constexpr (has_next_page<type, dim>) {
      if (!more) return;
      device::wait_async<0>();
      __syncwarp();
      const auto* const page = reinterpret_cast<const std::byte*>(space_.next.page);
      keys_.load(page);
      values_.load(page + kv_head_page_bytes(type, dim));
      __syncwarp();
    }
  }

  Sight sight_;
  HeadPages<type, dim> head_;
  PoolPages<dim> pages_;
  Space& space_;
  PageKeys<type, dim> keys_;
  PageValues<type, dim> values_;
  int place_;
  float factor_;
};

}  // namespace w4q::kernels::decode
