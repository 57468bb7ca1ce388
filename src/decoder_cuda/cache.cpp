#include "decoder_cuda/cache.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/text.h"
#include "decoder_cuda/attention.h"
#include "device/copy.h"

namespace w4q::decoder_cuda {
namespace {

void fill_with_all(std::vector<int32_t>& free, int64_t pages) {
  free.resize(static_cast<size_t>(pages));
  std::iota(free.begin(), free.end(), 0);
}

/// Of a page, of all its heads.
int64_t key_bytes(const KeyShape& shape) {
  return int64_t{shape.kv_heads} * kernels::kv_head_page_bytes(shape.type, kernels::kv_padded_dim(shape.head_dim));
}
int64_t value_bytes(const KeyShape& shape) {
  return int64_t{shape.kv_heads} * kernels::kv_value_page_bytes(shape.type, kernels::kv_padded_dim(shape.head_dim));
}

}  // namespace

std::vector<KeyShape> key_shapes(const model::ModelConfig& config, kernels::KvType type) {
  std::vector<KeyShape> shapes(static_cast<size_t>(config.layers));
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const model::AttentionConfig attention = config.attention_of(layer);
    if (config.has_delta_net(layer) || attention.keys_of) continue;
    shapes[static_cast<size_t>(layer)] = {static_cast<int>(attention.kv_heads), static_cast<int>(attention.head_dim),
                                          attends_plainly(attention) ? kernels::KvType::f16 : type};
  }
  // A layer that reads another one's keys may attend to them in the plain way.
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto from = config.attention_of(layer).keys_of;
    if (from) shapes[static_cast<size_t>(*from)].type = kernels::KvType::f16;
  }
  return shapes;
}

CudaCache::CudaCache(std::vector<KeyShape> shapes, int64_t pages, const device::Stream& stream)
    : stream_(stream), shapes_(std::move(shapes)), pages_(pages) {
  for (const auto& shape : shapes_) {
    if (kernels::kv_padded_dim(shape.head_dim) != 0) continue;
    throw Error(ErrorCode::unsupported, concat("heads of ", shape.head_dim, " values on the GPU"))
        .detail("its attention kernels take up to 512")
        .hint("--device cpu takes any");
  }
  constexpr int64_t most_pages = int64_t{1} << 27;  // 2^31 tokens
  if (pages < 1 || pages > most_pages) {
    throw Error(ErrorCode::bad_argument, concat("a KV cache of ", pages, " pages cannot be held"))
        .detail("a page has 16 tokens; 1 to 2^27 pages");
  }
  size_t keys = 0, values = 0;
  for (const auto& shape : shapes_) {
    keys_at_.push_back(keys), values_at_.push_back(values);
    keys += static_cast<size_t>(pages * key_bytes(shape));
    values += static_cast<size_t>(pages * value_bytes(shape));
  }
  keys_ = device::DeviceBuffer(stream.context(), keys);
  values_ = device::DeviceBuffer(stream.context(), values);
  device_table_ = device::DeviceBuffer(stream.context(), static_cast<size_t>(pages) * sizeof(int32_t));
  staged_ = device::PinnedBuffer(stream.context(), device_table_.size());
  free_.reserve(static_cast<size_t>(pages));
  fill_with_all(free_, pages);
}

void CudaCache::clear() noexcept {
  table_.clear();
  fill_with_all(free_, pages_);
}

void CudaCache::grow(int64_t length) {
  if (length <= room()) return;
  const auto needed = static_cast<size_t>((length + kernels::kv_page_tokens - 1) / kernels::kv_page_tokens);
  const size_t more = needed - table_.size();
  if (more > free_.size()) {
    throw Error(ErrorCode::bad_argument, concat("the KV cache is out of pages"))
        .detail(concat(length, " tokens need ", needed, " pages of 16, the sequence has ", table_.size(), " and ",
                       free_.size(), " of ", pages_, " are free"))
        .hint("ask for a shorter context, or --kv fp8 or q4 in the same memory");
  }
  const size_t from = table_.size();
  for (size_t i = 0; i < more; ++i) {
    table_.push_back(free_.back());
    free_.pop_back();
  }
  upload(from);
}

void CudaCache::upload(size_t from) {
  if (from == table_.size()) return;
  // Entries of the staging area are written once per sequence; a new sequence may not overwrite what is still copied.
  if (from == 0) stream_.synchronize();
  auto* const staged = reinterpret_cast<int32_t*>(staged_.bytes().data());
  std::copy(table_.begin() + static_cast<std::ptrdiff_t>(from), table_.end(), staged + from);
  device::copy(device::Way::to_gpu, device_table_.as<int32_t>() + from, staged + from,
               (table_.size() - from) * sizeof(int32_t), stream_, "copying a block table");
}

kernels::PagedLayer CudaCache::layer(size_t index) noexcept {
  const KeyShape& shape = shapes_[index];
  return {keys_.data() + keys_at_[index],
          values_.data() + values_at_[index],
          device_table_.as<int32_t>(),
          shape.type,
          shape.kv_heads,
          shape.head_dim,
          static_cast<int>(pages_)};
}

int64_t CudaCache::bytes_per_token() const noexcept {
  int64_t bytes = 0;
  for (const auto& shape : shapes_) bytes += key_bytes(shape) + value_bytes(shape);
  return bytes / kernels::kv_page_tokens;
}

}  // namespace w4q::decoder_cuda
