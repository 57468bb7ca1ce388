// The kbit quantizer on the GPU: the bytes of quantize/kbit.h (class E0). Weights are read once: codes and scales are
// written for a table without a factor while the block maxima are taken, and again only if these ask for a factor
// (docs/cuda-passes.md).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "device/buffer.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// n × k weights in GPU memory, `stride` >= k elements from row to row. `data` is aligned to its elements; rows of
/// whole blocks without gaps, aligned to 16 bytes, are the fast case.
struct DeviceMatrix {
  const void* data = nullptr;
  DType dtype = DType::bf16;  ///< f32, f16 or bf16
  int64_t n = 0;
  int64_t k = 0;
  int64_t stride = 0;
};

/// Canonical planes in GPU memory: I32 [n, ceil(k/32), bits] and U8 or F16 [n, ceil(k/32)], aligned to their elements.
struct DevicePlanes {
  uint32_t* codes = nullptr;
  void* scales = nullptr;
};

/// What the encoder has seen since its table was set.
struct BlockCounters {
  float smallest = 0;  ///< magnitude of the smallest non-zero block; 0 when there is none
  float largest = 0;
  int64_t zero_blocks = 0;
  int64_t saturated_scales = 0;
  int64_t subnormal_scales = 0;
  int64_t bad_block = -1;  ///< the first block with a NaN or an infinity; −1 when there is none
};

/// Encodes matrices of one type with one table. Everything is queued on the given streams; nothing waits but
/// counters().
class KbitCudaEncoder {
 public:
  /// Throws bad_argument for a scheme that is not kbit or a type that is not a weight's; device when memory is short.
  KbitCudaEncoder(const device::Context& context, const formats::Scheme& scheme, DType dtype);

  /// Takes the table as it will be stored, with largest magnitude a power of two; builds its thresholds and clears the
  /// counters. Encoding on other streams must be ordered behind it.
  void set_codebook(std::span<const float> codebook, const device::Stream& stream);
  /// Writes planes; `first_block` is the number of the matrix's first block in BlockCounters::bad_block. Throws
  /// bad_argument for null or misaligned pointers, another type, or a stride below k, before anything is launched.
  void encode(const DeviceMatrix& weight, const DevicePlanes& planes, int64_t first_block,
              const device::Stream& stream);
  /// Waits for `stream`.
  BlockCounters counters(const device::Stream& stream) const;

 private:
  formats::Scheme scheme_;
  DType dtype_;
  float inverse_table_max_ = 1;
  device::DeviceBuffer table_;
  device::DeviceBuffer thresholds_;
  device::DeviceBuffer counters_;
};

/// Calls encode(table) with the table as given and, if the block maxima that it returns ask for a factor, once more
/// with the factor; leaves the table of the last call in `codebook`.
QuantizeStats encode_with_factor(std::span<const float> table, const formats::Scheme& scheme, int64_t blocks,
                                 std::vector<float>& codebook,
                                 const std::function<BlockCounters(std::span<const float>)>& encode);

/// Quantizes a matrix in the memory of the stream's GPU; waits for it. `codebook` receives the table as it is to be
/// stored. Options and errors as in QuantizerRow::run, naming `name`; bnb_compatible is refused (unsupported).
QuantizeStats quantize_kbit_device(const DeviceMatrix& weight, std::string_view name, const formats::Scheme& scheme,
                                   const QuantizeOptions& options, const DevicePlanes& planes,
                                   std::vector<float>& codebook, const device::Stream& stream);

/// QuantizerRow::run_cuda: a matrix in host memory, streamed through the GPU in chunks, copies overlapping the work.
/// Takes less than 128 MB of GPU memory. bitsandbytes' bytes are made on the CPU, whose rule they share nothing with.
QuantizeResult quantize_kbit_cuda(const TensorView& weight, const formats::Scheme& scheme,
                                  const QuantizeOptions& options, device::Context& gpu);

}  // namespace w4q::quantize
