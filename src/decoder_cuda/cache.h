// The KV cache of a sequence on the GPU: a pool of pages of 16 tokens, and the table of those that the sequence has.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/buffer.h"
#include "kernels/attention/kv_page.h"
#include "model/config.h"

namespace w4q::decoder_cuda {

/// Keys and values of one layer: heads and their width; without heads the layer keeps none of its own.
struct KeyShape {
  int kv_heads = 0, head_dim = 0;
  kernels::KvType type = kernels::KvType::f16;

  bool operator==(const KeyShape&) const = default;
};
/// Each layer's. What plain attention reads is f16 whatever `type` says (attends_plainly).
std::vector<KeyShape> key_shapes(const model::ModelConfig& config, kernels::KvType type);

/// Pages that hold this many tokens.
inline int64_t pages_for(int64_t tokens) { return (tokens + kernels::kv_page_tokens - 1) / kernels::kv_page_tokens; }

class CudaCache {
 public:
  /// A pool of `pages`; each holds 16 tokens of every one of `shapes`. Throws unsupported for heads that no kernel takes,
  /// bad_argument for no pages, device when the memory does not suffice.
  CudaCache(std::vector<KeyShape> shapes, int64_t pages, const device::Stream& stream);

  /// Gives all pages back.
  void clear() noexcept;
  /// Takes free pages until the sequence has room for `length` tokens. Throws bad_argument when the pool has too few,
  /// and then takes none.
  void grow(int64_t length);

  kernels::PagedLayer layer(size_t index) noexcept;
  std::span<const KeyShape> shapes() const noexcept { return shapes_; }
  int64_t pages() const noexcept { return pages_; }
  std::span<const int32_t> table() const noexcept { return table_; }
  /// Tokens for which the sequence has pages.
  int64_t room() const noexcept { return static_cast<int64_t>(table_.size()) * kernels::kv_page_tokens; }
  /// Of keys and values of one token, all layers.
  int64_t bytes_per_token() const noexcept;

 private:
  void upload(size_t from);

  const device::Stream& stream_;
  std::vector<KeyShape> shapes_;
  int64_t pages_;
  std::vector<size_t> keys_at_, values_at_;  ///< where each layer's begin
  device::DeviceBuffer keys_, values_, device_table_;
  device::PinnedBuffer staged_;
  std::vector<int32_t> table_, free_;
};

}  // namespace w4q::decoder_cuda
