#include "core/error.h"
#include "core/text.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/kv_encode.cuh"
#include "kernels/common/dependent_launch.cuh"

namespace w4q::kernels {
namespace {

constexpr int warps = 4;
constexpr int most_dim = kv_most_dim;

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
  const bool query = head < qkv.heads;
  float* const raw = qkv.data + row * qkv.stride + int64_t{head} * layer.head_dim;
  load_head(raw, layer.head_dim, dim, values);
  const bool key = !query && head < qkv.heads + layer.kv_heads;
  if (query || key) {
    normalize_head(values, query ? rotation.q_norm : rotation.k_norm, layer.head_dim, rotation.eps);
    const Angles<most_dim> angles(rotation.cosine + row * rotation.pairs, rotation.sine + row * rotation.pairs,
                                  rotation.pairs);
    rotate_head(values, angles, rotation.pairs);
  }
  if (query) {
    for (int i = static_cast<int>(threadIdx.x) % 32; i < layer.head_dim; i += 32) raw[i] = values[i];
    return;
  }
  const int kv_head = key ? head - qkv.heads : head - qkv.heads - layer.kv_heads;
  store_head(layer, key, kv_head, first + row, dim, values);
}

__device__ float decode_q4(bool key, const std::byte* page, int dim, int slot, int i) {
  const auto value_of = [&](int at) { return __half2float(*reinterpret_cast<const __half*>(page + at)); };
  const int group = i / kv_group;
  if (key) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(page + q4_key_word(dim, slot, i / 8));
    const uint32_t code = word >> (4 * (i % 8 / 2) + 16 * (i % 2)) & 15u;
    return fmaf(static_cast<float>(code), value_of(q4_key_step(dim, slot, group)),
                value_of(q4_key_least(dim, slot, group)));
  }
  const uint32_t word = *reinterpret_cast<const uint16_t*>(page + q4_value_halfword(dim, slot, i / 4));
  return fmaf(static_cast<float>(word >> (4 * (i % 4)) & 15u), value_of(q4_value_step(dim, slot, group)),
              value_of(q4_value_least(dim, slot, group)));
}

/// One value of a row of the cache; `type` is that of the page's bytes.
__device__ float decode_value(KvType type, bool key, const std::byte* page, int dim, int slot, int i) {
  const std::byte* const codes = page + slot * kv_row_bytes(type, dim);
  const std::byte* const parameters =
      page + kv_page_tokens * kv_row_bytes(type, dim) + slot * kv_parameter_bytes(type, dim);
  switch (type) {
    case KvType::f16:
      return __half2float(reinterpret_cast<const __half*>(codes)[i]);
    case KvType::fp8:
      return e4m3_value(codes[i]) * *reinterpret_cast<const float*>(parameters);
    case KvType::fp4r: {
      const uint32_t word = reinterpret_cast<const uint32_t*>(codes)[i / 8];
      const float rest = e4m3_value(*(residual_row(const_cast<std::byte*>(page), dim, slot) + i));
      const float scale = e4m3_value(parameters[i / kv_fp4_group]);
      return scale * (f32_from_e2m1(fp4_code(word >> (16 * (i % 2)) & 0xFFFFu, i % 8 / 2)) + rest);
    }
    default:
      return decode_q4(key, page, dim, slot, i);
  }
}

/// A block per page and key head, a warp per row.
__global__ void widen_pages_kernel(PagedLayer layer, std::byte* keys, std::byte* values) {
  __shared__ float rows[warps][most_dim];
  const int dim = kv_padded_dim(layer.head_dim);
  const bool key = blockIdx.z == 0;
  const KvType type = key ? kv_key_type(layer.type) : kv_value_type(layer.type);
  const int from_bytes = kv_head_page_bytes(type, dim);
  const int to_bytes = kv_head_page_bytes(KvType::f16, dim);
  const int head = static_cast<int>(blockIdx.y);
  const std::byte* const from =
      head_page(key ? layer.keys : layer.values, layer.table[blockIdx.x], layer.kv_heads, head, from_bytes);
  std::byte* const to = head_page(key ? keys : values, int64_t{blockIdx.x}, layer.kv_heads, head, to_bytes);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const row = rows[threadIdx.x / 32];
  for (int slot = static_cast<int>(threadIdx.x) / 32; slot < kv_page_tokens; slot += warps) {
    for (int i = lane; i < dim; i += 32) row[i] = decode_value(type, key, from, dim, slot, i);
    __syncwarp();
    if (key && kv_transforms_keys(layer.type)) transform_head<most_dim>(row, dim);
    encode_f16(row, dim, slot, {to, nullptr});
    __syncwarp();
  }
}

}  // namespace

void rotate_and_store_cuda(const QkvRows& qkv, const PagedLayer& layer, const HeadRotation& rotation, int64_t first,
                           const device::Stream& stream) {
  ensure(qkv.rows >= 1 && layer.head_dim <= kv_most_dim && 2 * rotation.pairs <= layer.head_dim,
         "rotate_and_store: shapes do not fit");
  const int64_t items = qkv.rows * (qkv.heads + 2 * layer.kv_heads);
  const LaunchShape shape{dim3(static_cast<unsigned>((items + warps - 1) / warps)), 32 * warps, 0, false};
  launch<rotate_and_store_kernel>(shape, stream, "rotate_and_store", qkv, layer, rotation, first);
}

void widen_pages_cuda(const PagedLayer& layer, int64_t length, std::byte* keys, std::byte* values,
                      const device::Stream& stream) {
  const auto pages = static_cast<unsigned>((length + kv_page_tokens - 1) / kv_page_tokens);
  const LaunchShape shape{dim3(pages, static_cast<unsigned>(layer.kv_heads), 2), 32 * warps, 0, false};
  launch<widen_pages_kernel>(shape, stream, "widen_pages", layer, keys, values);
}

}  // namespace w4q::kernels
