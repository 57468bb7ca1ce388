#include "core/error.h"
#include "core/text.h"
#include "kernels/attention_cuda.h"
#include "kernels/kv_encode.cuh"
#include "kernels/overlap_launch.cuh"

namespace w4q::kernels {
namespace {

constexpr int warps = 4;
constexpr int most_dim = 256;

/// A warp per head of a row.
__global__ void rotate_and_store_kernel(QkvRows qkv, PagedLayer layer, HeadRotation rotation, int64_t first) {
  __shared__ float rows[warps][most_dim];
  float* const values = rows[threadIdx.x / 32];
  const int all_heads = qkv.heads + 2 * layer.kv_heads;
  const int64_t index = int64_t{blockIdx.x} * warps + threadIdx.x / 32;
  if (index >= qkv.rows * all_heads) return;
  const int64_t row = index / all_heads;
  const int head = static_cast<int>(index % all_heads);
  const int dim = kv_padded_dim(layer.head_dim);
  __half* const source = qkv.data + row * qkv.stride + int64_t{head} * layer.head_dim;
  load_head(source, layer.head_dim, dim, values);
  const bool query = head < qkv.heads;
  const bool key = !query && head < qkv.heads + layer.kv_heads;
  if (query || key) {
    normalize_head(values, query ? rotation.q_norm : rotation.k_norm, layer.head_dim, rotation.eps);
    const Angles<most_dim> angles(rotation.cosine + row * rotation.pairs, rotation.sine + row * rotation.pairs,
                                  rotation.pairs);
    rotate_head(values, angles, rotation.pairs);
  }
  if (query) {
    for (int i = static_cast<int>(threadIdx.x) % 32; i < layer.head_dim; i += 32) {
      source[i] = __float2half_rn(values[i]);
    }
    return;
  }
  const int64_t position = first + row;
  const int kv_head = key ? head - qkv.heads : head - qkv.heads - layer.kv_heads;
  const KvType type = key ? layer.type : kv_value_type(layer.type);
  std::byte* const page = head_page(key ? layer.keys : layer.values, layer.table[position / kv_page_tokens],
                                    layer.kv_heads, kv_head, kv_head_page_bytes(type, dim));
  encode_row(type, values, dim, page, static_cast<int>(position % kv_page_tokens));
}

/// One value of a row of the cache.
__device__ float decode_value(KvType type, const std::byte* page, int dim, int slot, int i) {
  const std::byte* const codes = page + slot * kv_row_bytes(type, dim);
  const std::byte* const parameters =
      page + kv_page_tokens * kv_row_bytes(type, dim) + slot * kv_parameter_bytes(type, dim);
  if (type == KvType::f16) return __half2float(reinterpret_cast<const __half*>(codes)[i]);
  if (type == KvType::fp8) return e4m3_value(codes[i]) * *reinterpret_cast<const float*>(parameters);
  const uint32_t word = reinterpret_cast<const uint32_t*>(codes)[i / 8];
  if (type == KvType::fp4r) {
    const float rest = e4m3_value(*(residual_row(const_cast<std::byte*>(page), dim, slot) + i));
    const float scale = e4m3_value(parameters[i / kv_fp4_group]);
    return scale * (e2m1_value(fp4_code(word >> (16 * (i % 2)) & 0xFFFFu, i % 8 / 2)) + rest);
  }
  const uint32_t code = word >> (4 * (i % 8 / 2) + 16 * (i % 2)) & 15u;
  const float2 used = __half22float2(reinterpret_cast<const __half2*>(parameters)[i / kv_group]);
  return fmaf(static_cast<float>(code), used.x, used.y);
}

/// A block per page and key head.
__global__ void widen_pages_kernel(PagedLayer layer, std::byte* keys, std::byte* values) {
  const int dim = kv_padded_dim(layer.head_dim);
  const bool is_key = blockIdx.z == 0;
  const KvType type = is_key ? layer.type : kv_value_type(layer.type);
  const int from_bytes = kv_head_page_bytes(type, dim);
  const int to_bytes = kv_head_page_bytes(KvType::f16, dim);
  const int head = static_cast<int>(blockIdx.y);
  const std::byte* const from =
      head_page(is_key ? layer.keys : layer.values, layer.table[blockIdx.x], layer.kv_heads, head, from_bytes);
  auto* const to =
      reinterpret_cast<__half*>(head_page(is_key ? keys : values, int64_t{blockIdx.x}, layer.kv_heads, head, to_bytes));
  for (int i = static_cast<int>(threadIdx.x); i < kv_page_tokens * dim; i += static_cast<int>(blockDim.x)) {
    to[i] = __float2half_rn(decode_value(type, from, dim, i / dim, i % dim));
  }
}

}  // namespace

void rotate_and_store_cuda(const QkvRows& qkv, const PagedLayer& layer, const HeadRotation& rotation, int64_t first,
                           cudaStream_t stream) {
  ensure(qkv.rows >= 1 && kv_padded_dim(layer.head_dim) > 0 && 2 * rotation.pairs <= layer.head_dim,
         "rotate_and_store: shapes do not fit");
  const int64_t items = qkv.rows * (qkv.heads + 2 * layer.kv_heads);
  const LaunchShape shape{dim3(static_cast<unsigned>((items + warps - 1) / warps)), 32 * warps, 0, false};
  launch<rotate_and_store_kernel>(shape, stream, "rotate_and_store", qkv, layer, rotation, first);
}

void widen_pages_cuda(const PagedLayer& layer, int64_t length, std::byte* keys, std::byte* values,
                      cudaStream_t stream) {
  const auto pages = static_cast<unsigned>((length + kv_page_tokens - 1) / kv_page_tokens);
  const LaunchShape shape{dim3(pages, static_cast<unsigned>(layer.kv_heads), 2), 128, 0, false};
  launch<widen_pages_kernel>(shape, stream, "widen_pages", layer, keys, values);
}

}  // namespace w4q::kernels
