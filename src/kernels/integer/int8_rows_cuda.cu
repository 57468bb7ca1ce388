// A block takes a row, finds its largest magnitude and writes its codes in the places that the product reads them from.
#include "kernels/integer/int8_rows_cuda.h"

#include "core/text.h"
#include "device/alignment.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "device/fragment.cuh"
#include "kernels/common/block_reduce.cuh"

namespace w4q::kernels {
namespace {

using int8::Int8Order;

using device::element_threads;
constexpr int piece_inputs = 16;  ///< a thread's: two runs of eight, sixteen apart
constexpr uint32_t infinity = 0x7F800000u;

template <class Type>
struct RowReader {
  using Scalar = typename Type::Scalar;
  const Scalar* x;
  const int32_t* order;
  int64_t k;
  bool aligned;

  __device__ RowReader(const Int8RowsArgs& args, bool rows_are_aligned, int64_t row)
      : x(static_cast<const Scalar*>(args.x) + row * args.ldx),
        order(args.input_order),
        k(args.k),
        aligned(rows_are_aligned) {}

  /// Inputs first … first + 7; zeros beyond k.
  __device__ __forceinline__ void load(int64_t first, float (&values)[8]) const {
    if (order == nullptr && aligned && first + 8 <= k) {
      const uint4 words = *reinterpret_cast<const uint4*>(x + first);
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = Type::widen_pair(pairs[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = 0;
      if (first + i < k) values[i] = Type::widen(x[order == nullptr ? first + i : __ldg(order + first + i)]);
    }
  }
  /// The two runs of piece `piece` of a row: 16 bytes in Int8Order.
  __device__ __forceinline__ void load_piece(int64_t piece, float (&a)[8], float (&b)[8]) const {
    const int64_t first = piece / 2 * 32 + piece % 2 * 8;
    load(first, a);
    load(first + 16, b);
  }
};

/// The bits of the largest magnitude: those of a NaN are larger than all others.
__device__ __forceinline__ uint32_t larger_bits(uint32_t most, const float (&values)[8]) {
#pragma unroll
  for (const float value : values) most = max(most, __float_as_uint(value) & 0x7FFFFFFFu);
  return most;
}

__device__ __forceinline__ uint32_t code_byte(float x, float scale) {
  const int code = __float2int_rn(__fdiv_rn(x, scale));
  return static_cast<uint32_t>(min(max(code, -127), 127)) & 0xFFu;
}

__device__ __forceinline__ uint4 codes_of(const float (&a)[8], const float (&b)[8], float scale) {
  uint32_t words[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    words[t] = code_byte(a[2 * t], scale) | code_byte(b[2 * t], scale) << 8 | code_byte(a[2 * t + 1], scale) << 16 |
               code_byte(b[2 * t + 1], scale) << 24;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ int sum_of_bytes(const uint4& words) {
  constexpr int ones = 0x01010101;
  int sum = __dp4a(static_cast<int>(words.x), ones, 0);
  sum = __dp4a(static_cast<int>(words.y), ones, sum);
  sum = __dp4a(static_cast<int>(words.z), ones, sum);
  return __dp4a(static_cast<int>(words.w), ones, sum);
}

struct QuantizeArgs : Int8RowsArgs {
  Int8Order order;
  bool aligned;  ///< rows of x may be read 16 bytes at a time
};

/// Eight neighbouring lanes have the pieces of 128 inputs: adds up those of a segment.
__device__ __forceinline__ void store_sum(const QuantizeArgs& args, int64_t row, int64_t piece, int sum, bool inside) {
  constexpr uint32_t all = 0xFFFFFFFFu;
  const int lanes = args.sum_inputs / piece_inputs;  // 2 or 8
  sum += __shfl_xor_sync(all, sum, 1);
  if (lanes == 8) {
    sum += __shfl_xor_sync(all, sum, 2);
    sum += __shfl_xor_sync(all, sum, 4);
  }
  if (!inside || piece % lanes != 0) return;
  args.sums[piece / lanes * args.order.padded_rows + row] = static_cast<int16_t>(sum);
}

template <class Type>
__global__ void __launch_bounds__(element_threads) quantize_kernel(const QuantizeArgs args) {
  __shared__ uint32_t slots[32];
  const int64_t row = blockIdx.x;
  const RowReader<Type> reader(args, args.aligned, row);
  const int64_t pieces = args.order.chunks * (int8::chunk_inputs / piece_inputs);
  if (row == 0) {
    for (int i = threadIdx.x; i < args.counter_count; i += element_threads) args.counters[i] = 0;
  }
  float a[8], b[8];
  uint32_t most = 0;
  for (int64_t piece = threadIdx.x; piece < pieces; piece += element_threads) {
    reader.load_piece(piece, a, b);
    most = larger_bits(larger_bits(most, a), b);
  }
  most = block_reduce(most, slots, 0u, [](uint32_t p, uint32_t q) { return max(p, q); });
  const float scale = most < infinity ? __fdiv_rn(__uint_as_float(most), 127.0f) : __uint_as_float(0x7FC00000u);
  if (threadIdx.x == 0) args.scales[row] = scale;
  // Whole warps go round, so that lanes can add up.
  for (int64_t first = threadIdx.x / 32 * 32; first < pieces; first += element_threads) {
    const int64_t piece = first + threadIdx.x % 32;
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (piece < pieces && scale > 0) {
      reader.load_piece(piece, a, b);
      codes = codes_of(a, b, scale);
    }
    if (piece < pieces) {
      uint8_t* const group = args.codes + args.order.group(row, piece / 8);
      const int place = int8::place_of_piece(static_cast<int>(row % 8), static_cast<int>(piece % 8));
      *reinterpret_cast<uint4*>(group + place) = codes;
    }
    if (args.sums != nullptr) store_sum(args, row, piece, sum_of_bytes(codes), piece < pieces);
  }
}

}  // namespace

void int8_rows_cuda(const Int8RowsArgs& args, const device::Stream& stream) {
  const bool aligned = device::aligned(args.x, 16) && args.ldx % 8 == 0;
  const QuantizeArgs launch{args, Int8Order(args.m, args.k), aligned};
  const auto blocks = static_cast<unsigned>(args.m);
  if (args.activation == DType::f16) {
    quantize_kernel<device::HalfType><<<blocks, element_threads, 0, stream.get()>>>(launch);
  } else {
    quantize_kernel<device::Bf16Type><<<blocks, element_threads, 0, stream.get()>>>(launch);
  }
  device::check_launch("int8_rows", concat(args.m, " × ", args.k));
}

}  // namespace w4q::kernels
