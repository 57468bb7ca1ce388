// A warp turns heads of fp32 rows into rows of the KV cache, and rotates and transforms them before.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "core/float_formats.h"
#include "kernels/attention/kv_page.h"
#include "kernels/common/block_reduce.cuh"
#include "kernels/common/hadamard.cuh"

namespace w4q::kernels {

/// Reads a head into `row` (shared memory, `dim` values, zeros beyond head_dim), the whole warp together.
__device__ __forceinline__ void load_head(const float* head, int head_dim, int dim, float* row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int i = lane; i < dim; i += 32) row[i] = i < head_dim ? head[i] : 0.0f;
  __syncwarp();
}

/// RMSNorm of the row where there is a weight.
__device__ __forceinline__ void normalize_head(float* row, const float* weight, int head_dim, float eps) {
  if (weight == nullptr) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  float sum = 0;
  for (int i = lane; i < head_dim; i += 32) sum = fmaf(row[i], row[i], sum);
  const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(head_dim) + eps);
  for (int i = lane; i < head_dim; i += 32) row[i] = weight[i] * (row[i] * scale);
  __syncwarp();
}

/// The row's Walsh–Hadamard transform over √dim: its own inverse. `most` values at most.
template <int most>
__device__ __forceinline__ void transform_head(float* row, int dim) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float values[most / 32];
#pragma unroll
  for (int j = 0; j < most / 32; ++j) values[j] = lane + 32 * j < dim ? row[lane + 32 * j] : 0.0f;
  warp_hadamard(values, lane, dim);
  const float scale = rsqrtf(static_cast<float>(dim));
#pragma unroll
  for (int j = 0; j < most / 32; ++j) {
    if (lane + 32 * j < dim) row[lane + 32 * j] = values[j] * scale;
  }
  __syncwarp();
}

/// A lane's angles of one position: of pairs lane, lane + 32 …; heads have up to `dim` values.
template <int dim>
struct Angles {
  float cosine[dim / 64], sine[dim / 64];

  Angles() = default;
  __device__ __forceinline__ Angles(const float* cosines, const float* sines, int pairs) {
#pragma unroll
    for (int j = 0; j < dim / 64; ++j) {
      const int i = static_cast<int>(threadIdx.x) % 32 + 32 * j;
      cosine[j] = i < pairs ? cosines[i] : 1.0f;
      sine[j] = i < pairs ? sines[i] : 0.0f;
    }
  }
};

/// Rotates pairs i and i + pairs of the row.
template <int dim>
__device__ __forceinline__ void rotate_head(float* row, const Angles<dim>& angles, int pairs) {
#pragma unroll
  for (int j = 0; j < dim / 64; ++j) {
    const int i = static_cast<int>(threadIdx.x) % 32 + 32 * j;
    if (i >= pairs) break;
    const float a = row[i];
    const float b = row[i + pairs];
    row[i] = a * angles.cosine[j] - b * angles.sine[j];
    row[i + pairs] = b * angles.cosine[j] + a * angles.sine[j];
  }
  __syncwarp();
}

/// Head pages that take the same row: one of the cache and, where it is read before the cache has it, another one.
struct RowTargets {
  std::byte* page;
  std::byte* copy;  ///< or null

  template <class Store>
  __device__ __forceinline__ void each(const Store& store) const {
    store(page);
    if (copy != nullptr) store(copy);
  }
};

__device__ __forceinline__ void encode_f16(const float* row, int dim, int slot, const RowTargets& to) {
  for (int i = static_cast<int>(threadIdx.x % 32); i < dim / 2; i += 32) {
    const __half2 pair = __floats2half2_rn(row[2 * i], row[2 * i + 1]);
    to.each([&](std::byte* page) { reinterpret_cast<__half2*>(page + slot * dim * 2)[i] = pair; });
  }
}

__device__ __forceinline__ void encode_fp8(const float* row, int dim, int slot, const RowTargets& to) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float largest = 0;
  for (int i = lane; i < dim; i += 32) largest = fmaxf(largest, fabsf(row[i]));
  largest = warp_max(largest);
  const float scale = largest / kv_fp8_max;
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  for (int i = lane; i < dim; i += 32) {
    const auto code = static_cast<std::byte>(__nv_cvt_float_to_fp8(row[i] * inverse, __NV_SATFINITE, __NV_E4M3));
    to.each([&](std::byte* page) { page[slot * dim + i] = code; });
  }
  if (lane != 0) return;
  to.each([&](std::byte* page) { reinterpret_cast<float*>(page + kv_page_tokens * dim)[slot] = scale; });
}

/// Eight neighbouring values of a group lie with each lane, four lanes make a group.
__device__ __forceinline__ void encode_q4(bool key, const float* row, int dim, int slot, const RowTargets& to) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool inside = 8 * lane < dim;
  const float* const mine = row + (inside ? 8 * lane : 0);
  float least = mine[0];
  float most = mine[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    least = fminf(least, mine[i]);
    most = fmaxf(most, mine[i]);
  }
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    least = fminf(least, __shfl_xor_sync(0xFFFFFFFFu, least, step));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
  }
  // Codes are chosen for the parameters as they are stored.
  const __half2 stored = __floats2half2_rn((most - least) / 15.0f, least);
  const float2 used = __half22float2(stored);
  const float inverse = used.x > 0 ? 1.0f / used.x : 0.0f;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float code = fminf(fmaxf(rintf((mine[i] - used.y) * inverse), 0.0f), 15.0f);
    word |= static_cast<uint32_t>(code) << (key ? 4 * (i / 2) + 16 * (i % 2) : 4 * i);
  }
  if (!inside) return;
  to.each([&](std::byte* page) {
    const auto half_at = [&](int at) { return reinterpret_cast<__half*>(page + at); };
    if (key) {
      *reinterpret_cast<uint32_t*>(page + q4_key_word(dim, slot, lane)) = word;
    } else {
      *reinterpret_cast<uint16_t*>(page + q4_value_halfword(dim, slot, 2 * lane)) = static_cast<uint16_t>(word);
      *reinterpret_cast<uint16_t*>(page + q4_value_halfword(dim, slot, 2 * lane + 1)) =
          static_cast<uint16_t>(word >> 16);
    }
    if (lane % 4 != 0) return;
    const int group = lane / 4;
    *half_at(key ? q4_key_step(dim, slot, group) : q4_value_step(dim, slot, group)) = __low2half(stored);
    *half_at(key ? q4_key_least(dim, slot, group) : q4_value_least(dim, slot, group)) = __high2half(stored);
  });
}

__device__ __forceinline__ float e4m3_value(std::byte code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3)));
}

/// What the codes of row `slot` leave, on a head page of fp4r keys.
__device__ __forceinline__ std::byte* residual_row(std::byte* head_page, int dim, int slot) {
  return head_page + kv_page_tokens * (kv_row_bytes(KvType::fp4r, dim) + kv_parameter_bytes(KvType::fp4r, dim)) +
         slot * dim;
}

/// Eight neighbouring values of a group lie with each lane, two lanes make a group. The scale is at least the smallest
/// E4M3 number: what codes leave is still kept where a group is nearly zero.
__device__ __forceinline__ void encode_fp4r(const float* row, int dim, int slot, const RowTargets& to) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool inside = 8 * lane < dim;
  const float* const mine = row + (inside ? 8 * lane : 0);
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(mine[i]));
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
  const auto scale = static_cast<std::byte>(
      max(__nv_cvt_float_to_fp8(largest / 6.0f, __NV_SATFINITE, __NV_E4M3), __nv_fp8_storage_t{1}));
  const float used = e4m3_value(scale);
  uint32_t word = 0;
  uint32_t left[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = mine[i] / used;
    const uint32_t code = e2m1_magnitude(fabsf(x)) | (x < 0 ? 8u : 0u);
    word |= fp4_halfword(code, i / 2) << (16 * (i % 2));
    const uint32_t rest = __nv_cvt_float_to_fp8(x - f32_from_e2m1(code), __NV_SATFINITE, __NV_E4M3);
    left[i / 4] |= rest << (8 * (i % 4));
  }
  if (!inside) return;
  to.each([&](std::byte* page) {
    reinterpret_cast<uint32_t*>(page + slot * dim / 2)[lane] = word;
    if (lane % 2 == 0) page[(kv_page_tokens * dim / 2 + slot * (dim / kv_fp4_group)) + lane / 2] = scale;
    reinterpret_cast<uint2*>(residual_row(page, dim, slot))[lane] = make_uint2(left[0], left[1]);
  });
}

/// Stores `row` as token `slot` of keys or values of a type. The whole warp together.
__device__ __forceinline__ void encode_row(KvType type, bool key, const float* row, int dim, int slot,
                                           const RowTargets& to) {
  switch (key ? kv_key_type(type) : kv_value_type(type)) {
    case KvType::f16:
      return encode_f16(row, dim, slot, to);
    case KvType::fp8:
      return encode_fp8(row, dim, slot, to);
    case KvType::fp4r:
      return encode_fp4r(row, dim, slot, to);
    default:
      return encode_q4(key, row, dim, slot, to);
  }
}

/// The head page of key head `head` on page `page` of the pool.
__device__ __forceinline__ std::byte* head_page(std::byte* pool, int64_t page, int kv_heads, int head, int bytes) {
  return pool + (page * kv_heads + head) * bytes;
}

/// Stores a key or a value of key head `kv_head` where the token at `position` has its row; keys are transformed in place
/// where their type has it. The whole warp together.
__device__ __forceinline__ void store_head(const PagedLayer& layer, bool key, int kv_head, int64_t position, int dim,
                                           float* values) {
  if (key && kv_transforms_keys(layer.type)) transform_head<kv_most_dim>(values, dim);
  const KvType type = key ? layer.type : kv_value_type(layer.type);
  std::byte* const page = head_page(key ? layer.keys : layer.values, layer.table[position / kv_page_tokens],
                                    layer.kv_heads, kv_head, kv_head_page_bytes(type, dim));
  encode_row(layer.type, key, values, dim, static_cast<int>(position % kv_page_tokens), {page, nullptr});
}

}  // namespace w4q::kernels
