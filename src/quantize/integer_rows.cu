#include "quantize/integer_rows.cuh"

#include "core/text.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "device/stream.h"

namespace w4q::quantize::cuda {
namespace {

using formats::PlaneRole;

using device::element_threads;

/// Bytes of codes to the dense stream of each row, a thread per word.
__global__ void __launch_bounds__(element_threads)
    join_codes_kernel(int bits, int64_t rows, int64_t k, int64_t row_words, const uint8_t* codes, uint32_t* words) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * element_threads + threadIdx.x;
  if (index >= rows * row_words) return;
  const int64_t row = index / row_words;
  const int64_t first_bit = index % row_words * 32;
  uint32_t word = 0;
  for (int64_t i = first_bit / bits; i < k && i * bits < first_bit + 32; ++i) {
    const auto code = static_cast<uint32_t>(codes[row * k + i]);
    const int64_t at = i * bits - first_bit;
    word |= at >= 0 ? code << at : code >> -at;
  }
  words[index] = word;
}

void copy_rows(const device::DeviceBuffer& from, PlaneRole role, int64_t first, int64_t rows, int64_t bytes,
               formats::PackedWeight& packed, const device::Stream& stream) {
  const auto plane = packed.plane(role).bytes.bytes();
  from.download(plane.subspan(static_cast<size_t>(first * bytes), static_cast<size_t>(rows * bytes)), stream);
}

}  // namespace

IntegerRows::IntegerRows(const formats::PackedWeight& packed, int64_t rows, const device::Stream& stream)
    : stream_(stream),
      bits_(packed.scheme.bits),
      k_(packed.k),
      groups_(formats::integer_groups(packed.scheme, packed.k)),
      row_words_(formats::dense_words(packed.k, packed.scheme.bits)),
      scale_bytes_(packed.scheme.scale == formats::ScaleType::f32 ? 4 : 2),
      asymmetric_(packed.scheme.asymmetric),
      codes_(stream.context(), static_cast<size_t>(rows * k_)),
      words_(stream.context(), static_cast<size_t>(rows * row_words_ * 4)),
      scales_(stream.context(), static_cast<size_t>(rows * groups_ * scale_bytes_)),
      zeros_(stream.context(), static_cast<size_t>(rows * groups_)),
      counters_(stream.context(), sizeof(IntegerCounters)) {
  const IntegerCounters none{0, 0, 0, ~0ull};
  counters_.upload(std::as_bytes(std::span(&none, 1)), stream_);
  stream_.synchronize();
}

IntegerOut IntegerRows::out() {
  return {scales_.data(), asymmetric_ ? zeros_.as<uint8_t>() : nullptr, codes_.as<uint8_t>(),
          counters_.as<IntegerCounters>()};
}

void IntegerRows::take(int64_t first, int64_t rows, formats::PackedWeight& packed) {
  const auto blocks = static_cast<unsigned>((rows * row_words_ + element_threads - 1) / element_threads);
  join_codes_kernel<<<blocks, element_threads, 0, stream_.get()>>>(bits_, rows, k_, row_words_, codes_.as<uint8_t>(),
                                                                   words_.as<uint32_t>());
  device::check_launch("integer codes", concat(rows, " × ", k_));
  copy_rows(words_, PlaneRole::codes, first, rows, row_words_ * 4, packed, stream_);
  copy_rows(scales_, PlaneRole::scales, first, rows, groups_ * scale_bytes_, packed, stream_);
  if (asymmetric_) copy_rows(zeros_, PlaneRole::zeros, first, rows, groups_, packed, stream_);
  stream_.synchronize();
}

IntegerCounters IntegerRows::counted() {
  IntegerCounters seen{};
  counters_.download(std::as_writable_bytes(std::span(&seen, 1)), stream_);
  stream_.synchronize();
  return seen;
}

QuantizeStats IntegerRows::stats(const IntegerCounters& counters, int64_t blocks) {
  QuantizeStats stats;
  stats.blocks = blocks;
  stats.zero_blocks = static_cast<int64_t>(counters.zero_blocks);
  stats.saturated_scales = static_cast<int64_t>(counters.saturated_scales);
  stats.subnormal_scales = static_cast<int64_t>(counters.subnormal_scales);
  return stats;
}

}  // namespace w4q::quantize::cuda
