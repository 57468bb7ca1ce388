// Columns of strips of rows into rings, on the GPU: each by itself, or one after the other with error feedback.
#pragma once

#include <cstdint>

#include "quantize/trellis_search.cuh"

namespace w4q::quantize::cuda {

/// Columns that a thread block goes through one after the other; with feedback, the block of the factor.
inline constexpr int rings_columns = 32;

/// Up to 128 rows that share rings.
struct TrellisStrip {
  int64_t first = 0;  ///< in matrices
  int rows = 0;
};

struct TrellisJob {
  int window = 0;
  int64_t strips = 0, k = 0;
  int64_t begin = 0, end = 0;  ///< positions of the columns
  const TrellisStrip* strip = nullptr;
  const float* steps = nullptr;      ///< [rows]: what levels are multiplied by
  const float* targets = nullptr;    ///< [rows, k] by positions
  uint32_t* codes = nullptr;         ///< [strips, k, 4·bits]
  float* kept = nullptr;             ///< [thread blocks, kept_rows, 2^(window − bits)]
  const int32_t* columns = nullptr;  ///< [k]: where positions are; null: there
  // With feedback, where [begin, end) is one block of columns:
  const float* coupling = nullptr;  ///< [k, k]: of the factor
  const float* weights = nullptr;   ///< [rows, k] by positions
  float* errors = nullptr;          ///< [rows, end − begin]: what was missed

  /// Thread blocks may each have one at a time.
  W4Q_HOST_DEVICE int64_t tasks() const { return strips * parts(); }
  W4Q_HOST_DEVICE int64_t parts() const { return (end - begin + rings_columns - 1) / rings_columns; }
};

/// Targets of some columns of a strip. Rows are 129 floats, so that columns stand in other banks.
inline constexpr int moved_stride = trellis_rows + 1;
W4Q_HOST_DEVICE constexpr int search_rows(int bits, int window, int tiles) noexcept {
  return (one_row(bits, tiles) ? 1 : 2) << (window - bits);
}
/// Of dynamic shared memory.
W4Q_HOST_DEVICE constexpr size_t rings_shared_bytes(int bits, int window, int tiles) noexcept {
  return (static_cast<size_t>(search_rows(bits, window, tiles)) + rings_columns * moved_stride) * sizeof(float);
}

/// What one thread block does to some columns of a strip, rounded in `shared`.
template <int bits>
class StripColumns {
 public:
  /// `writes`: this one of the blocks that do the same.
  __device__ StripColumns(const TrellisJob& job, int64_t task, bool writes, SearchShared& shared, float* moved)
      : job_(job),
        writes_(writes),
        index_(task / job.parts()),
        strip_(job.strip[index_]),
        begin_(job.begin + task % job.parts() * rings_columns),
        cols_(static_cast<int>(min(job.end - begin_, int64_t{rings_columns}))),
        shared_(shared),
        moved_(moved) {}

  __device__ int rows() const { return strip_.rows; }
  __device__ int cols() const { return cols_; }

  __device__ void load() {
    for (int i = thread(); i < strip_.rows * cols_; i += threads()) {
      moved_[i % cols_ * moved_stride + i / cols_] = job_.targets[row(i / cols_) * job_.k + begin_ + i % cols_];
    }
    __syncthreads();
  }

  /// The targets of a column, in units of levels.
  __device__ void aim(int col) {
    for (int r = thread(); r < trellis_rows; r += threads()) {
      const float step = r < strip_.rows ? job_.steps[row(r)] : 0;
      shared_.kinds[r] = r >= strip_.rows ? WeightKind::zero : step > 0 ? WeightKind::counts : WeightKind::free;
      const float target = step > 0 ? __fdiv_rn(moved_[col * moved_stride + r], step) : 0;
      constexpr float most = formats::trellis_largest_target;
      shared_.targets[r] = fminf(fmaxf(target, -most), most);
    }
    __syncthreads();
  }

  /// Stores the ring that the states of a column say.
  __device__ void store(int col) const {
    if (!writes_) return;
    constexpr int words = formats::trellis_ring_words(bits);
    const int64_t column = job_.columns == nullptr ? begin_ + col : job_.columns[begin_ + col];
    uint32_t* const ring = job_.codes + (index_ * job_.k + column) * words;
    for (int word = thread(); word < words; word += threads()) {
      uint32_t value = 0;
      for (int bit = word * 32; bit < word * 32 + 32; ++bit) {
        const int r = bit / bits;
        const uint32_t state = r < strip_.rows ? shared_.states[r] : 0u;
        value = value << 1 | (state >> (bits - 1 - bit % bits) & 1);
      }
      ring[word] = value;
    }
  }

  /// Moves the targets of later columns by what this one misses the weights by.
  __device__ void feed_back(int col) {
    for (int r = thread(); r < strip_.rows; r += threads()) {
      const float value = __fmul_rn(level_of(shared_.states[r]), job_.steps[row(r)]);
      const float error = __fsub_rn(job_.weights[row(r) * job_.k + begin_ + col], value);
      if (writes_) job_.errors[row(r) * cols_ + col] = error;
      for (int later = col + 1; later < cols_; ++later) {
        const float effect = job_.coupling[(begin_ + later) * job_.k + begin_ + col];
        float& target = moved_[later * moved_stride + r];
        target = __fadd_rn(target, __fmul_rn(effect, error));
      }
    }
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }
  __device__ int64_t row(int r) const { return strip_.first + r; }

  const TrellisJob& job_;
  bool writes_;
  int64_t index_;
  TrellisStrip strip_;
  int64_t begin_;
  int cols_;
  SearchShared& shared_;
  float* moved_;
};

/// What a thread block does of a job, or the `blocks` of a cluster together.
template <int bits, int tiles, int blocks>
__device__ void round_rings(const TrellisJob& job, SearchShared& shared, float* rows) {
  const int64_t first = blockIdx.x / blocks, step = gridDim.x / blocks;
  const int64_t kept = kept_rows(bits, job.window) * (int64_t{1} << (job.window - bits));
  RingSearch<bits, tiles, blocks> search(job.window, shared, rows, job.kept + first * kept);
  float* const moved = rows + search_rows(bits, job.window, tiles);
  for (int64_t task = first; task < job.tasks(); task += step) {
    StripColumns<bits> columns(job, task, blockIdx.x % blocks == 0, shared, moved);
    columns.load();
    for (int col = 0; col < columns.cols(); ++col) {
      columns.aim(col);
      search(columns.rows());
      columns.store(col);
      if (job.coupling != nullptr) columns.feed_back(col);
      __syncthreads();
    }
  }
}

/// search_block() threads.
template <int bits, int tiles>
__global__ void __launch_bounds__(search_threads, 1) trellis_rings_kernel(const TrellisJob job) {
  extern __shared__ float4 dynamic[];
  __shared__ SearchShared shared;
  round_rings<bits, tiles, 1>(job, shared, reinterpret_cast<float*>(dynamic));
}

/// The same at the widest window, where a GPU has clusters; cluster_threads().
template <int bits, int blocks>
__global__ void W4Q_CLUSTER(blocks) __launch_bounds__(cluster_threads(blocks), 1)
    trellis_clusters_kernel(const TrellisJob job) {
  extern __shared__ float4 dynamic[];
  __shared__ SearchShared shared;
  round_rings<bits, 1, blocks>(job, shared, reinterpret_cast<float*>(dynamic));
}

}  // namespace w4q::quantize::cuda
