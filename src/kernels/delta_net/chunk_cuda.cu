#include "kernels/delta_net/chunk_cuda.h"

#include "device/fragment.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/delta_net/rows.cuh"

namespace w4q::kernels {
namespace {

constexpr int block_columns = 32;  // columns of the state that a block has
// Rows in shared memory, so far apart that the lanes of a fragment ask for different banks.
constexpr int row_padding = 8;
template <int keys>
constexpr int key_stride = keys + row_padding;                  // of f16
constexpr int relation_stride = delta_chunk + row_padding;      // of f16
constexpr int column_stride = block_columns + row_padding / 2;  // of fp32
constexpr int related_stride = delta_chunk + 1;                 // of fp32
constexpr int relate_threads = 128, rule_threads = 256;

// ---- fragments ------------------------------------------------------------------------------------------------------

using device::HalfType;

__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ float tf32_rounded(float x) { return __uint_as_float(to_tf32(x)); }

/// c[16 × 8] += a[16 × 8] · b[8 × 8].
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// The lane's place in a fragment: row `group` and `group` + 8; a product's columns 2 `part` and 2 `part` + 1. Of the eight
/// terms of a product a lane has these two as well, whose order does not matter as long as both factors have it.
struct FragmentLane {
  int group = static_cast<int>(threadIdx.x % 32) / 4, part = static_cast<int>(threadIdx.x % 4);

  __device__ int row(int tile, int i) const { return 16 * tile + group + i / 2 * 8; }
  __device__ int column(int tile, int i) const { return 8 * tile + 2 * part + i % 2; }
};

/// Rows of tile `tile` of a matrix of f16, terms from `first` on; f16 are tf32.
__device__ __forceinline__ void load_rows(const FragmentLane& lane, const __half* from, int stride, int tile, int first,
                                          uint32_t (&a)[4]) {
  const __half* const at = from + (16 * tile + lane.group) * stride + first + 2 * lane.part;
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(at));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(at + 8 * stride));
  a[0] = __float_as_uint(low.x), a[1] = __float_as_uint(high.x);
  a[2] = __float_as_uint(low.y), a[3] = __float_as_uint(high.y);
}

/// The same of the matrix turned over: its columns from 16 `tile` on are the rows.
__device__ __forceinline__ void load_columns(const FragmentLane& lane, const __half* from, int stride, int tile,
                                             int first, uint32_t (&a)[4]) {
  const __half* const at = from + (first + 2 * lane.part) * stride + 16 * tile + lane.group;
  a[0] = __float_as_uint(__half2float(at[0])), a[1] = __float_as_uint(__half2float(at[8]));
  a[2] = __float_as_uint(__half2float(at[stride])), a[3] = __float_as_uint(__half2float(at[stride + 8]));
}

// ---- what both kernels read -----------------------------------------------------------------------------------------

/// A chunk of a head's rows; those behind the last are zeros.
struct DeltaRows {
  int64_t first;
  int count;

  __device__ DeltaRows(const DeltaNetArgs& args, int64_t index)
      : first(index * delta_chunk), count(static_cast<int>(min(int64_t{delta_chunk}, args.rows - first))) {}
};

template <int keys>
__device__ __forceinline__ void load_halves(const float* from, int64_t stride, int count, __half* to) {
  constexpr int pieces = keys / 4;
  for (int at = static_cast<int>(threadIdx.x); at < delta_chunk * pieces; at += static_cast<int>(blockDim.x)) {
    const int row = at / pieces, column = at % pieces * 4;
    float4 values = make_float4(0, 0, 0, 0);
    if (row < count) values = *reinterpret_cast<const float4*>(from + row * stride + column);
    __half2* const place = reinterpret_cast<__half2*>(to + row * key_stride<keys> + column);
    place[0] = __floats2half2_rn(values.x, values.y);
    place[1] = __floats2half2_rn(values.z, values.w);
  }
}

/// By the first warp: sums of the logarithms of decays up to each row. A decay of zero is as good as one of 1e-30.
template <class Use>
__device__ __forceinline__ void sum_decays(const Rows& rows, const DeltaRows& own, int64_t head, const Use& use) {
  if (threadIdx.x >= 32) return;
  const int lane = static_cast<int>(threadIdx.x);
  float carried = 0;
#pragma unroll
  for (int part = 0; part < delta_chunk; part += 32) {
    const int at = part + lane;
    const float* const rates = rows.rates + ((own.first + at) * rows.shape.value_heads + head) * 2;
    const bool inside = at < own.count;
    float sum = inside ? logf(fmaxf(rates[1], 1e-30f)) : 0.0f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += before;
    }
    sum += carried;
    carried = __shfl_sync(0xFFFFFFFFu, sum, 31);
    use(at, sum, inside ? rates[0] : 0.0f);
  }
}

// ---- what rows are to each other ------------------------------------------------------------------------------------

/// Where things stand in shared memory. Below the diagonal of `related` is A, above it (I + A)⁻¹ turned over.
template <int keys>
struct RelateMemory {
  __half key[delta_chunk * key_stride<keys>], query[delta_chunk * key_stride<keys>];
  float related[delta_chunk * related_stride];
  float sums[delta_chunk], beta[delta_chunk];
};

/// A below the diagonal, and P into the scratch. A warp has 16 rows, and columns up to the last of them.
template <int keys>
__device__ __forceinline__ void relate(RelateMemory<keys>& memory, __half* seen, int64_t stride, int count) {
  const FragmentLane lane;
  const int tile = static_cast<int>(threadIdx.x) / 32;
  for (int columns = 0; columns < 2 * tile + 2; ++columns) {
    float of_keys[4] = {}, of_queries[4] = {};
#pragma unroll
    for (int k = 0; k < keys; k += 16) {
      const auto pair = [&](const __half* from, int row, int at) {
        return *reinterpret_cast<const uint32_t*>(from + row * key_stride<keys> + k + at + 2 * lane.part);
      };
      const int row = 16 * tile + lane.group, column = 8 * columns + lane.group;
      const uint32_t key[4] = {pair(memory.key, row, 0), pair(memory.key, row + 8, 0), pair(memory.key, row, 8),
                               pair(memory.key, row + 8, 8)};
      const uint32_t query[4] = {pair(memory.query, row, 0), pair(memory.query, row + 8, 0), pair(memory.query, row, 8),
                                 pair(memory.query, row + 8, 8)};
      const uint32_t low = pair(memory.key, column, 0), high = pair(memory.key, column, 8);
      HalfType::mma(of_keys, key, low, high);
      HalfType::mma(of_queries, query, low, high);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane.row(tile, i), column = lane.column(columns, i);
      const float decay = column <= row ? expf(memory.sums[row] - memory.sums[column]) : 0.0f;
      if (column < row) memory.related[row * related_stride + column] = memory.beta[row] * decay * of_keys[i];
      of_queries[i] *= decay;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int row = lane.row(tile, i);
      if (row >= count) continue;
      *reinterpret_cast<__half2*>(seen + row * stride + lane.column(columns, i)) =
          __floats2half2_rn(of_queries[i], of_queries[i + 1]);
    }
  }
}

/// (I + A)⁻¹ above the diagonal: a thread for each column, row after row.
__device__ __forceinline__ void invert(float* related) {
  if (threadIdx.x >= delta_chunk) return;
  const int column = static_cast<int>(threadIdx.x), begin = column / 32 * 32;
  float* const own = related + column * related_stride;
  for (int row = begin + 1; row < delta_chunk; ++row) {
    const float* const line = related + row * related_stride;
    float sum = 0;
#pragma unroll 8
    for (int i = begin; i < row; ++i) {
      const float value = i > column ? own[i] : i == column ? 1.0f : 0.0f;
      sum = fmaf(line[i], value, sum);
    }
    if (row > column) own[row] = -sum;
  }
}

/// A block for each chunk of a value head.
template <int keys>
__global__ void __launch_bounds__(relate_threads) relate_kernel(const DeltaNetArgs args) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& memory = *reinterpret_cast<RelateMemory<keys>*>(bytes);
  const Rows rows(args);
  const DeltaShape& shape = args.shape;
  const DeltaRows own(args, blockIdx.x);
  const int64_t head = blockIdx.y, key_head = head / (shape.value_heads / shape.key_heads);
  const float* const queries = rows.mixed + own.first * shape.channels() + key_head * keys;
  load_halves<keys>(queries, shape.channels(), own.count, memory.query);
  load_halves<keys>(queries + shape.keys(), shape.channels(), own.count, memory.key);
  sum_decays(rows, own, head, [&](int row, float sum, float beta) { memory.sums[row] = sum, memory.beta[row] = beta; });
  __syncthreads();
  const int64_t stride = shape.value_heads * 2 * delta_chunk;
  __half* const solved = rows.relations + own.first * stride + head * 2 * delta_chunk;
  relate<keys>(memory, solved + delta_chunk, stride, own.count);
  __syncthreads();
  invert(memory.related);
  __syncthreads();
  for (int at = static_cast<int>(threadIdx.x); at < own.count * (delta_chunk / 2); at += relate_threads) {
    const int row = at / (delta_chunk / 2), column = at % (delta_chunk / 2) * 2;
    const auto value = [&](int c) {
      return c > row ? 0.0f : memory.beta[c] * (c < row ? memory.related[c * related_stride + row] : 1.0f);
    };
    *reinterpret_cast<__half2*>(solved + row * stride + column) = __floats2half2_rn(value(column), value(column + 1));
  }
}

// ---- the rule -------------------------------------------------------------------------------------------------------

template <int keys>
struct RuleMemory {
  __half key[delta_chunk * key_stride<keys>], query[delta_chunk * key_stride<keys>];
  __half solved[delta_chunk * relation_stride], seen[delta_chunk * relation_stride];
  float state[keys * column_stride];  // as it was before the chunk, rounded
  float values[delta_chunk * column_stride], learned[delta_chunk * column_stride];
  float kept[delta_chunk], left[delta_chunk];  // e^G_i, e^(G_last − G_i)
};

template <int keys>
__device__ __forceinline__ void load_chunk(const Rows& rows, const DeltaRows& own, int64_t head, int64_t column,
                                           RuleMemory<keys>& memory) {
  const DeltaShape& shape = rows.shape;
  const int64_t channels = shape.channels(), key_head = head / (shape.value_heads / shape.key_heads);
  const float* const mixed = rows.mixed + own.first * channels;
  load_halves<keys>(mixed + key_head * keys, channels, own.count, memory.query);
  load_halves<keys>(mixed + shape.keys() + key_head * keys, channels, own.count, memory.key);
  const float* const values = mixed + 2 * shape.keys() + head * shape.value_dim + column;
  for (int at = static_cast<int>(threadIdx.x); at < delta_chunk * (block_columns / 4); at += rule_threads) {
    const int row = at / (block_columns / 4), c = at % (block_columns / 4) * 4;
    float4 four = make_float4(0, 0, 0, 0);
    if (row < own.count) four = *reinterpret_cast<const float4*>(values + row * channels + c);
    *reinterpret_cast<float4*>(memory.values + row * column_stride + c) = four;
  }
  const int64_t stride = shape.value_heads * 2 * delta_chunk;
  const __half* const relations = rows.relations + own.first * stride + head * 2 * delta_chunk;
  for (int at = static_cast<int>(threadIdx.x); at < delta_chunk * delta_chunk; at += rule_threads) {
    const int row = at / delta_chunk, pair = at % delta_chunk * 2;  // of both matrices, one behind the other
    uint32_t two = 0;
    if (row < own.count) two = *reinterpret_cast<const uint32_t*>(relations + row * stride + pair);
    __half* const to = pair < delta_chunk ? memory.solved + pair : memory.seen + (pair - delta_chunk);
    *reinterpret_cast<uint32_t*>(to + row * relation_stride) = two;
  }
  float last = 0;
  sum_decays(rows, own, head, [&](int row, float sum, float) {
    memory.left[row] = sum;
    last = sum;
  });
  if (threadIdx.x < 32) {
    last = __shfl_sync(0xFFFFFFFFu, last, 31);
#pragma unroll
    for (int row = static_cast<int>(threadIdx.x); row < delta_chunk; row += 32) {
      const float sum = memory.left[row];
      memory.kept[row] = expf(sum), memory.left[row] = expf(last - sum);
    }
  }
}

/// c += tile `tile` of lower triangular f16 [delta_chunk × delta_chunk] times fp32 [delta_chunk × block_columns], 16
/// columns from 16 `half` on.
__device__ __forceinline__ void multiply_lower(const FragmentLane& lane, const __half* lower, const float* columns,
                                               int tile, int half, float (&c)[2][4]) {
  for (int k = 0; k < 16 * tile + 16; k += 8) {
    uint32_t a[4];
    load_rows(lane, lower, relation_stride, tile, k, a);
    const float* const at = columns + (k + 2 * lane.part) * column_stride + 16 * half + lane.group;
#pragma unroll
    for (int n = 0; n < 2; ++n) multiply_tf32(c[n], a, to_tf32(at[8 * n]), to_tf32(at[8 * n + column_stride]));
  }
}

/// A block for 32 columns of a value head's state, from the first chunk to the last. A warp has 16 rows and 16 columns of
/// the chunk, and 16 keys of the state's columns in its registers.
template <int keys>
__global__ void __launch_bounds__(rule_threads) chunk_rule_kernel(const DeltaNetArgs args) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& memory = *reinterpret_cast<RuleMemory<keys>*>(bytes);
  constexpr int state_tiles = keys / 16, column_tiles = block_columns / 8;
  const Rows rows(args);
  const DeltaShape& shape = args.shape;
  const FragmentLane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32, tile = warp % 4, half = warp / 4;
  const int64_t head = blockIdx.y, column = int64_t{blockIdx.x} * block_columns;
  float* const stored = args.memory.state + head * keys * shape.value_dim + column;
  const bool has_state = warp < state_tiles;
  float state[column_tiles][4];
#pragma unroll
  for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = lane.row(warp, i), c = lane.column(n, i);
      state[n][i] = has_state && !args.begins ? stored[key * shape.value_dim + c] : 0.0f;
      if (has_state) memory.state[key * column_stride + c] = tf32_rounded(state[n][i]);
    }
  }
  for (int64_t index = 0; index * delta_chunk < args.rows; ++index) {
    const DeltaRows own(args, index);
    __syncthreads();  // nobody reads the chunk before any more
    load_chunk<keys>(rows, own, head, column, memory);
    __syncthreads();
    float of_keys[2][4] = {}, out[2][4] = {};
#pragma unroll 4
    for (int k = 0; k < keys; k += 8) {
      uint32_t key[4], query[4];
      load_rows(lane, memory.key, key_stride<keys>, tile, k, key);
      load_rows(lane, memory.query, key_stride<keys>, tile, k, query);
      const float* const at = memory.state + (k + 2 * lane.part) * column_stride + 16 * half + lane.group;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t b0 = __float_as_uint(at[8 * n]), b1 = __float_as_uint(at[8 * n + column_stride]);
        multiply_tf32(of_keys[n], key, b0, b1);
        multiply_tf32(out[n], query, b0, b1);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane.row(tile, i);
        memory.values[row * column_stride + lane.column(2 * half + n, i)] -= memory.kept[row] * of_keys[n][i];
        out[n][i] *= memory.kept[row];
      }
    }
    __syncthreads();
    float learned[2][4] = {};
    multiply_lower(lane, memory.solved, memory.values, tile, half, learned);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        memory.learned[lane.row(tile, i) * column_stride + lane.column(2 * half + n, i)] = learned[n][i];
      }
    }
    __syncthreads();
    multiply_lower(lane, memory.seen, memory.learned, tile, half, out);
    float* const outs = rows.outs + own.first * shape.values() + head * shape.value_dim + column;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane.row(tile, i);
        if (row < own.count) outs[row * shape.values() + lane.column(2 * half + n, i)] = out[n][i];
      }
    }
    if (!has_state) continue;
#pragma unroll
    for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state[n][i] *= memory.kept[delta_chunk - 1];
    }
#pragma unroll 2
    for (int k = 0; k < delta_chunk; k += 8) {
      uint32_t a[4];
      load_columns(lane, memory.key, key_stride<keys>, warp, k, a);
      const int row = k + 2 * lane.part;
      const float* const at = memory.learned + row * column_stride + lane.group;
      const float first = memory.left[row], second = memory.left[row + 1];
#pragma unroll
      for (int n = 0; n < column_tiles; ++n) {
        multiply_tf32(state[n], a, to_tf32(first * at[8 * n]), to_tf32(second * at[8 * n + column_stride]));
      }
    }
#pragma unroll
    for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        memory.state[lane.row(warp, i) * column_stride + lane.column(n, i)] = tf32_rounded(state[n][i]);
      }
    }
  }
  if (!has_state) return;
#pragma unroll
  for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) stored[lane.row(warp, i) * shape.value_dim + lane.column(n, i)] = state[n][i];
  }
}

template <int keys>
void run(const DeltaNetArgs& args, const device::Stream& stream) {
  const auto heads = static_cast<unsigned>(args.shape.value_heads);
  const auto chunks = static_cast<unsigned>((args.rows + delta_chunk - 1) / delta_chunk);
  launch<relate_kernel<keys>>(
      {.grid = dim3(chunks, heads), .threads = relate_threads, .shared_bytes = sizeof(RelateMemory<keys>)}, stream,
      "delta_relate", args);
  launch<chunk_rule_kernel<keys>>({.grid = dim3(static_cast<unsigned>(args.shape.value_dim / block_columns), heads),
                                   .threads = rule_threads,
                                   .shared_bytes = sizeof(RuleMemory<keys>)},
                                  stream, "delta_chunks", args);
}

}  // namespace

bool takes_delta_chunks(const DeltaShape& shape, int64_t rows) noexcept {
  constexpr int64_t fewest = 32;
  return rows >= fewest && (shape.key_dim == 64 || shape.key_dim == 128) && shape.value_dim % block_columns == 0 &&
         shape.value_heads % 2 == 0;
}

void delta_chunks_cuda(const DeltaNetArgs& args, const device::Stream& stream) {
  if (args.shape.key_dim == 64) return run<64>(args, stream);
  run<128>(args, stream);
}

}  // namespace w4q::kernels
