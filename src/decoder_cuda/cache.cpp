#include "decoder_cuda/cache.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/text.h"
#include "device/copy.h"

namespace w4q::decoder_cuda {
namespace {

void fill_with_all(std::vector<int32_t>& free, int64_t pages) {
  free.resize(static_cast<size_t>(pages));
  std::iota(free.begin(), free.end(), 0);
}

}  // namespace

CudaCache::CudaCache(const model::ModelConfig& config, kernels::KvType type, int64_t pages,
                     const device::Stream& stream)
    : stream_(stream),
      type_(type),
      kv_heads_(static_cast<int>(config.kv_heads)),
      head_dim_(static_cast<int>(config.head_dim)),
      layers_(config.layers),
      pages_(pages) {
  const int dim = kernels::kv_padded_dim(config.head_dim);
  if (dim == 0) {
    throw Error(ErrorCode::unsupported, concat("heads of ", config.head_dim, " values on the GPU"))
        .detail("its attention kernels take up to 256")
        .hint("--device cpu takes any");
  }
  constexpr int64_t most_pages = int64_t{1} << 27;  // 2^31 tokens
  if (pages < 1 || pages > most_pages) {
    throw Error(ErrorCode::bad_argument, concat("a KV cache of ", pages, " pages cannot be held"))
        .detail("a page has 16 tokens; 1 to 2^27 pages");
  }
  key_bytes_ = pages * kv_heads_ * kernels::kv_head_page_bytes(type, dim);
  value_bytes_ = pages * kv_heads_ * kernels::kv_value_page_bytes(type, dim);
  keys_ = device::DeviceBuffer(stream.context(), static_cast<size_t>(key_bytes_ * layers_));
  values_ = device::DeviceBuffer(stream.context(), static_cast<size_t>(value_bytes_ * layers_));
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

kernels::PagedLayer CudaCache::layer(int64_t index) noexcept {
  return {keys_.data() + index * key_bytes_,
          values_.data() + index * value_bytes_,
          device_table_.as<int32_t>(),
          type_,
          kv_heads_,
          head_dim_,
          static_cast<int>(pages_)};
}

int64_t CudaCache::bytes_per_token() const noexcept {
  const int dim = kernels::kv_padded_dim(head_dim_);
  return layers_ * kv_heads_ * (kernels::kv_head_page_bytes(type_, dim) + kernels::kv_value_page_bytes(type_, dim)) /
         kernels::kv_page_tokens;
}

}  // namespace w4q::decoder_cuda
