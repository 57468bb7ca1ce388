// Causal attention on the GPU over a paged KV cache: the twins of attention.h. Products leave q, k and v in f32. Keys
// and values are rounded once, when they are stored. Queries of many tokens, and of one with an f16 cache, become two
// f16, which lose 2^-23 of them (or 2^-25, if that is more); with caches whose keys are coarser than that one f16.
// Scores, softmax and sums are fp32, results f16 (class E2 against the CPU on the same cache).
//
// Many tokens: rotate_and_store_cuda, then prefill_attention_cuda. One token: decode_attention_cuda does both, with the
// position in GPU memory, so that it can be captured once and replayed.
#pragma once

#include <cuda_fp16.h>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "device/stream.h"
#include "kernels/attention/kv_page.h"

namespace w4q::kernels {

/// What happens to q and k heads before attention.
struct HeadRotation {
  const float* cosine = nullptr;  ///< [positions × pairs]
  const float* sine = nullptr;
  int pairs = 0;                  ///< channels i and i + pairs are rotated, i < pairs
  const float* q_norm = nullptr;  ///< RMSNorm of each head first, [head_dim], or null
  const float* k_norm = nullptr;
  float eps = 0;
  bool single = false;  ///< the tables have the row of the one position only
};

/// Rows of q, k and v heads side by side, as one product makes them: [rows][heads + 2 · kv_heads][head_dim].
struct QkvRows {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t stride = 0;  ///< elements from row to row
  int heads = 0;
};

/// Normalizes and rotates q heads where they are, k heads on their way into the cache, and stores v. Row r stands at
/// position first + r, whose angles are row r of the tables. The sequence's pages up to first + rows − 1 are in the
/// table.
void rotate_and_store_cuda(const QkvRows& qkv, const PagedLayer& layer, const HeadRotation& rotation, int64_t first,
                           const device::Stream& stream);

/// Decodes positions 0 … length − 1 of a layer into f16 head pages in their order: what prefill_attention_cuda reads
/// where the cache has another type. `keys` and `values` hold ceil(length / 16) pages.
void widen_pages_cuda(const PagedLayer& layer, int64_t length, std::byte* keys, std::byte* values,
                      const device::Stream& stream);

struct PrefillAttentionArgs {
  QkvRows qkv;                   ///< queries as rotate_and_store_cuda left them
  PagedLayer layer;              ///< f16; without a table pages stand in their order
  int64_t first = 0;             ///< position of row 0; positions up to first + rows − 1 are stored
  int64_t window = 0;            ///< position p sees p − window + 1 … p; 0: all before it
  __half* out = nullptr;         ///< [rows][heads · head_dim]
  const float* sinks = nullptr;  ///< [heads]: AttentionOptions::sinks; null: none
};
/// FlashAttention-2: blocks of 64 queries stream past tiles of keys, scores stay in registers. 3 · rows · length ·
/// head_dim multiply-adds a head on tensor cores: a query is two f16.
void prefill_attention_cuda(const PrefillAttentionArgs& args, const device::Stream& stream);

struct DecodeAttentionArgs {
  const float* qkv = nullptr;  ///< one row, raw
  int heads = 0;
  PagedLayer layer;
  HeadRotation rotation;              ///< tables from position 0 on, or `single`
  const int32_t* position = nullptr;  ///< in GPU memory: where the token stands
  int64_t window = 0;
  const float* sinks = nullptr;    ///< [heads], or null
  __half* out = nullptr;           ///< [heads · head_dim]
  std::byte* workspace = nullptr;  ///< decode_attention_workspace() bytes, aligned to 256, zeroed once
  /// elementwise_cuda.h; the launch before leaves `qkv` and nothing else that is read here: the position, the cache and
  /// the tables of angles that are not `single` stood before it began.
  bool overlap = false;
  // fp4r
  int64_t capacity = 0;           ///< tokens that the workspace was asked for
  float delta = INFINITY;         ///< pages whose scores stay this far (nats) below those that matter are skipped
  int32_t* kept = nullptr;        ///< pages attended to, of each key head and eight of its query heads; or null
  uint32_t* keep_mask = nullptr;  ///< [the same][ceil(capacity / 512)] bit i: the i-th page that is seen; or null
};
struct DecodeAttentionShape {
  int heads, kv_heads;
  int64_t head_dim;
  KvType type = KvType::f16;
  int64_t capacity = 0;
};
/// Throws unsupported for a context in which pages cannot be chosen.
size_t decode_attention_workspace(const device::Properties& gpu, const DecodeAttentionShape& shape);
inline constexpr int fp4r_most_tokens = 1 << 19;
/// Normalizes, rotates, stores and attends in one launch. Blocks share the pages of a key head (split-KV) and the last
/// one adds their sums up in order. Reads the cache once: 2 · length · kv_heads rows; of fp4r the codes of all keys,
/// and what they leave and the values of the pages that are kept: those with a score, by codes alone, at most delta
/// below the largest one of the first page and the newest 15.
void decode_attention_cuda(const DecodeAttentionArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
