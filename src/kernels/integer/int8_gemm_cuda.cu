// Integer weights as Marlin stores them times int8 activations on the integer tensor cores (sm_80 and newer), whose
// rate is four times that of f16 with f32 sums on an RTX 4090.
//
// A block has 256 outputs × 128 rows, eight warps of 32 × 128. Codes and activations come in stages of 128 inputs by
// asynchronous copies, one or two stages ahead in 96 KB. A warp decodes its row tiles of all 128 inputs, 32 registers,
// and multiplies them with four groups of eight rows at a time: a chain of four products sums 128 inputs exactly as
// integers, and goes to an f32 sum with the group's scale. With groups of 32 and 64 every product goes there by itself.
// Where there are fewer tiles than multiprocessors, several blocks share one along k; who comes last adds up their sums
// in order: the same result every time.
//
// Reads for a tile and 128 inputs: 16 KB of activations, 16 KB (8 bits: 32) of codes, from the L2 cache.
#include <algorithm>

#include "device/async_copy.cuh"
#include "kernels/integer/int8_tile.cuh"

namespace w4q::kernels::int8 {
namespace {

constexpr int threads = 256;
constexpr int turn_groups = 4;  ///< groups of eight rows that are multiplied at a time
constexpr int turns = tile_rows / (8 * turn_groups);

template <int bits, bool zeros, int inputs>
struct Kind {
  static constexpr int width = bits;
  static constexpr bool with_zeros = zeros;
  static constexpr int segments = chunk_inputs / inputs;  ///< integer sums of 128 inputs
  static constexpr int stages = bits == 4 ? 3 : 2;
  static constexpr int x_at = Codes<bits>::stage_bytes;
  static constexpr int sums_at = x_at + tile_rows * chunk_inputs;
  static constexpr int sum_bytes = with_zeros ? segments * tile_rows * 2 : 0;
  static constexpr int stage_bytes = sums_at + sum_bytes;
  static constexpr int shared_bytes = stages * stage_bytes;
};

/// A block's tile and its share of k.
struct Work {
  int row_tile, output_tile, tile, split, begin, end;

  __device__ explicit Work(const GemmLaunch& args) {
    const int index = static_cast<int>(blockIdx.x);
    tile = index / args.splits;
    split = index % args.splits;
    row_tile = tile % args.row_tiles;
    output_tile = tile / args.row_tiles;
    begin = static_cast<int>(static_cast<int64_t>(args.chunks) * split / args.splits);
    end = static_cast<int>(static_cast<int64_t>(args.chunks) * (split + 1) / args.splits);
  }
};

/// Brings a tile's activations, and their sums, one stage at a time.
template <class K>
struct InputFetcher {
  const uint8_t* codes;
  int64_t chunk_bytes;
  const char* sums;
  int64_t padded;

  __device__ InputFetcher(const GemmLaunch& args, int row_tile)
      : codes(args.rows_codes + static_cast<int64_t>(row_tile) * (tile_rows * chunk_inputs) + threadIdx.x * 16),
        chunk_bytes(args.padded * chunk_inputs),
        sums(reinterpret_cast<const char*>(args.rows_sums + static_cast<int64_t>(row_tile) * tile_rows)),
        padded(args.padded) {}

  __device__ __forceinline__ void fetch(char* stage, int chunk) const {
    const uint8_t* const from = codes + chunk * chunk_bytes;
    char* const to = stage + K::x_at + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < tile_rows * chunk_inputs / (threads * 16); ++i) {
      device::copy_async(to + i * (threads * 16), from + i * (threads * 16));
    }
    if constexpr (K::with_zeros) {
      const int at = static_cast<int>(threadIdx.x) * 16;
      if (at >= K::sum_bytes) return;
      constexpr int of_segment = tile_rows * 2;
      const int64_t row = (static_cast<int64_t>(chunk) * K::segments + at / of_segment) * padded * 2;
      device::copy_async(stage + K::sums_at + at, sums + row + at % of_segment);
    }
  }
};

/// A warp's sums of 32 outputs × 128 rows: [row tile][eight rows][as mma leaves them].
struct Totals {
  float values[2][tile_rows / 8][4];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 128; ++i) (&values[0][0][0])[i] = 0;
  }
};

/// total += scale · (sum + offset · Σ q), the integers exactly.
template <bool with_zeros>
__device__ __forceinline__ void flush(float (&total)[4], const int (&sum)[4], float2 scale, int2 offset,
                                      uint32_t rows) {
  const int of_row[2] = {static_cast<short>(rows & 0xFFFFu), static_cast<int>(rows) >> 16};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int value = sum[i];
    if constexpr (with_zeros) value += (i < 2 ? offset.x : offset.y) * of_row[i % 2];
    total[i] = fmaf(__int_as_float(value) - __uint_as_float(float_base), i < 2 ? scale.x : scale.y, total[i]);
  }
}

/// What a warp knows of its part of a tile.
struct Part {
  int n_tile;  ///< of 64 outputs, in the tile
  int half;    ///< of each lane's words
  int rows;    ///< of the tile that are there: others are not multiplied

  __device__ Part(const GemmLaunch& args, const Work& work)
      : n_tile(threadIdx.x / 64), half(threadIdx.x / 32 % 2), rows(args.m - work.row_tile * tile_rows) {}
  __device__ bool has(int turn) const { return turn * (8 * turn_groups) < rows; }
};

/// The products of one stage with four groups of eight rows.
template <class K>
struct Turn {
  const uint32_t (&a)[2][4][4];
  const float2 (&scales)[K::segments][2];
  const int2 (&offsets)[K::segments][2];
  const char* stage;

  __device__ __forceinline__ void run(int turn, Totals& totals) const {
    const int lane = threadIdx.x % 32;
    const char* const x = stage + K::x_at + turn * (turn_groups * group_bytes);
    int sums[turn_groups][2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 b[turn_groups];
#pragma unroll
      for (int n = 0; n < turn_groups; ++n) {
        b[n] = device::load_matrices(x + n * group_bytes + place_of_piece(lane % 8, 4 * half + lane / 8));
      }
#pragma unroll
      for (int step = 2 * half; step < 2 * half + 2; ++step) {
#pragma unroll
        for (int n = 0; n < turn_groups; ++n) {
          const uint2 inputs = step % 2 == 0 ? make_uint2(b[n].x, b[n].y) : make_uint2(b[n].z, b[n].w);
#pragma unroll
          for (int j = 0; j < 2; ++j) multiply(sums[n][j], a[j][step], inputs, K::segments == 4 || step == 0);
        }
        if (K::segments == 4 || step == 3) add(turn, K::segments == 4 ? step : 0, sums, totals);
      }
    }
  }

 private:
  __device__ __forceinline__ static void multiply(int (&sum)[4], const uint32_t (&weights)[4], uint2 inputs,
                                                  bool first) {
    constexpr int base = static_cast<int>(float_base);
    constexpr int start[4] = {base, base, base, base};
    if (first) {
      mma(sum, weights, inputs.x, inputs.y, start);
    } else {
      mma(sum, weights, inputs.x, inputs.y, sum);
    }
  }
  __device__ __forceinline__ void add(int turn, int segment, const int (&sums)[turn_groups][2][4],
                                      Totals& totals) const {
#pragma unroll
    for (int n = 0; n < turn_groups; ++n) {
      const int group = turn * turn_groups + n;
      uint32_t rows = 0;
      if constexpr (K::with_zeros) {
        const int row = 8 * group + static_cast<int>(threadIdx.x) % 4 * 2;
        rows = *reinterpret_cast<const uint32_t*>(stage + K::sums_at + (segment * tile_rows + row) * 2);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        flush<K::with_zeros>(totals.values[j][group], sums[n][j], scales[segment][j], offsets[segment][j], rows);
      }
    }
  }
};

/// One stage: 128 inputs.
template <class K>
__device__ __forceinline__ void multiply(const GemmLaunch& args, const char* stage, const Part& part,
                                         const ChunkGroups<K::width, K::with_zeros, K::segments>& groups,
                                         Totals& totals) {
  uint32_t a[2][4][4];
  Codes<K::width>::decode(stage, part.n_tile, part.half, a);
  float2 scales[K::segments][2];
  int2 offsets[K::segments][2];
#pragma unroll
  for (int i = 0; i < K::segments; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      scales[i][j] = groups.scale(i, j, args.bf16_scales);
      offsets[i][j] = groups.offset(i, part.half, j);
    }
  }
  const Turn<K> products{a, scales, offsets, stage};
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    if (part.has(turn)) products.run(turn, totals);
  }
}

/// Leaves a block's sums for whoever comes last to its tile; true for that block, which then has all of them.
__device__ __forceinline__ bool gather(const GemmLaunch& args, const Work& work, const Part& part, Totals& totals,
                                       char* shared) {
  constexpr int64_t block_values = tile_outputs * tile_rows;
  float4* const tile =
      reinterpret_cast<float4*>(args.partials + work.tile * (args.splits * block_values)) + threadIdx.x;
  const auto for_groups = [&](int split, const auto& use) {
#pragma unroll
    for (int group = 0; group < tile_rows / 8; ++group) {
      if (!part.has(group / turn_groups)) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        use(totals.values[j][group], tile + split * (block_values / 4) + (2 * group + j) * threads);
      }
    }
  };
  for_groups(work.split, [](const float(&v)[4], float4* to) { *to = make_float4(v[0], v[1], v[2], v[3]); });
  __threadfence();
  __syncthreads();
  auto* const last = reinterpret_cast<int*>(shared);
  if (threadIdx.x == 0) {
    *last = atomicAdd(args.counters + work.tile, 1u) + 1 == static_cast<unsigned>(args.splits);
  }
  __syncthreads();
  if (*last == 0) return false;
  __threadfence();
  totals.clear();
  for (int split = 0; split < args.splits; ++split) {
    for_groups(split, [](float(&v)[4], const float4* from) {
      const float4 more = __ldcg(from);
      v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
    });
  }
  return true;
}

/// Four neighbouring outputs on their way to y.
struct OutputWriter {
  const GemmLaunch& args;
  int64_t first;  ///< output
  float scales[4], bias[4];

  __device__ OutputWriter(const GemmLaunch& launch, int64_t first_output) : args(launch), first(first_output) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = first + i < args.n;
      scales[i] = inside && args.output_scales != nullptr ? frame::output_scale(args, static_cast<int>(first + i)) : 1;
      bias[i] = inside && args.bias != nullptr ? __ldg(args.bias + first + i) : 0;
    }
  }

  __device__ __forceinline__ void store(int64_t row, float4 sums) const {
    if (row >= args.m || first >= args.n) return;
    const float factor = __ldg(args.rows_scales + row) * args.result_factor;
    const float parts[4] = {sums.x, sums.y, sums.z, sums.w};
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = parts[i] * (scales[i] * factor) + bias[i];
    const int64_t at = row * args.ldy + first;
    if (args.vectors && first + 4 <= args.n) {
      if (args.fp32) return store_floats(at, values);
      if (args.bf16) return store_pairs<device::Bf16Type>(at, values);
      return store_pairs<device::HalfType>(at, values);
    }
    for (int i = 0; i < 4 && first + i < args.n; ++i) {
      if (args.bf16) {
        store_value<device::Bf16Type>(args.y, args.residual, args.fp32, at + i, values[i]);
      } else {
        store_value<device::HalfType>(args.y, args.residual, args.fp32, at + i, values[i]);
      }
    }
  }

 private:
  __device__ __forceinline__ void store_floats(int64_t at, float (&v)[4]) const {
    if (args.residual != nullptr) {
      const float4 r = *reinterpret_cast<const float4*>(static_cast<const float*>(args.residual) + at);
      v[0] += r.x, v[1] += r.y, v[2] += r.z, v[3] += r.w;
    }
    *reinterpret_cast<float4*>(static_cast<float*>(args.y) + at) = make_float4(v[0], v[1], v[2], v[3]);
  }
  template <class Type>
  __device__ __forceinline__ void store_pairs(int64_t at, float (&v)[4]) const {
    if (args.residual != nullptr) {
      const uint2 r = *reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(args.residual) + at);
      const float2 low = Type::widen_pair(r.x), high = Type::widen_pair(r.y);
      v[0] += low.x, v[1] += low.y, v[2] += high.x, v[3] += high.y;
    }
    *reinterpret_cast<uint2*>(static_cast<unsigned short*>(args.y) + at) =
        make_uint2(Type::pack(v[0], v[1]), Type::pack(v[2], v[3]));
  }
};

/// A turn's rows at a time through shared memory, where neighbouring outputs come together: two warps have the outputs
/// of an N-tile, and store half of the rows each.
template <int bits>
__device__ __forceinline__ void store(const GemmLaunch& args, const Work& work, const Part& part, const Totals& totals,
                                      char* shared) {
  constexpr int pitch = 64 + 4;
  constexpr int rows = 8 * turn_groups;
  const int lane = threadIdx.x % 32;
  float* const slice = reinterpret_cast<float*>(shared) + part.n_tile * (rows * pitch);
  const OutputWriter writer(args, int64_t{tile_outputs} * work.output_tile + 64 * part.n_tile + lane % 16 * 4);
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    if (!part.has(turn)) break;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float* const column = slice + 16 * (2 * Codes<bits>::pair(part.half) + j) + lane / 4;
#pragma unroll
      for (int i = 0; i < 4 * turn_groups; ++i) {
        column[(8 * (i / 4) + lane % 4 * 2 + i % 2) * pitch + 8 * (i % 4 / 2)] =
            totals.values[j][turn * turn_groups + i / 4][i % 4];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int row = rows / 2 * part.half + lane / 16; row < rows / 2 * (part.half + 1); row += 2) {
      writer.store(int64_t{tile_rows} * work.row_tile + rows * turn + row,
                   *reinterpret_cast<const float4*>(slice + row * pitch + lane % 16 * 4));
    }
  }
}

template <class K>
__global__ void __launch_bounds__(threads, 1) gemm_kernel(const GemmLaunch args) {
  extern __shared__ uint4 shared_words[];
  char* const shared = reinterpret_cast<char*>(shared_words);
  const Work work(args);
  const Part part(args, work);
  const int first_group = work.output_tile * (tile_outputs / 64);
  const typename Codes<K::width>::Fetcher codes(args, first_group);
  const InputFetcher<K> inputs(args, work.row_tile);
  const auto stage_of = [&](int chunk) { return shared + (chunk - work.begin) % K::stages * K::stage_bytes; };
  const auto fetch = [&](int chunk) {
    if (chunk < work.end) {
      codes.fetch(stage_of(chunk), chunk);
      inputs.fetch(stage_of(chunk), chunk);
    }
    device::close_async_group();
  };
  Totals totals;
  totals.clear();
#pragma unroll
  for (int i = 0; i < K::stages - 1; ++i) fetch(work.begin + i);
  for (int chunk = work.begin; chunk < work.end; ++chunk) {
    ChunkGroups<K::width, K::with_zeros, K::segments> groups;
    groups.load(args, first_group + part.n_tile, part.half, chunk);
    device::wait_async<K::stages - 2>();
    __syncthreads();
    fetch(chunk + K::stages - 1);
    multiply<K>(args, stage_of(chunk), part, groups, totals);
  }
  device::wait_async<0>();
  __syncthreads();
  if (args.splits > 1 && !gather(args, work, part, totals, shared)) return;
  store<K::width>(args, work, part, totals, shared);
}

template <class K>
void launch_kind(const GemmLaunch& args, const device::Stream& stream, std::string_view shape) {
  frame::launch_kernel<gemm_kernel<K>, K::shared_bytes>(args, args.row_tiles * args.output_tiles * args.splits, threads,
                                                        stream, "int8_gemm", shape);
}

}  // namespace

void launch_gemm(const GemmLaunch& args, int bits, const device::Stream& stream, std::string_view shape) {
  const auto run = [&]<int width, bool with_zeros>() {
    if (sum_inputs(args.group_shift) == 32) return launch_kind<Kind<width, with_zeros, 32>>(args, stream, shape);
    launch_kind<Kind<width, with_zeros, 128>>(args, stream, shape);
  };
  if (bits == 8) return run.template operator()<8, true>();  // a zero point of 128 where there is none
  if (args.zeros != nullptr) return run.template operator()<4, true>();
  run.template operator()<4, false>();
}

}  // namespace w4q::kernels::int8
