// Codes, scales and zeros of some rows of an integer weight in GPU memory, on their way into its planes.
#pragma once

#include <cstdint>

#include "device/buffer.h"
#include "formats/packed.h"
#include "quantize/integer_round.cuh"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize::cuda {

struct IntegerCounters {
  unsigned long long zero_blocks, saturated_scales, subnormal_scales;
  unsigned long long bad_row;  ///< the first row with a value that is not finite; all ones when there is none
};

/// Where kernels write: scales and zeros [rows][groups], codes [rows][k] a byte each.
struct IntegerOut {
  void* scales;
  uint8_t* zeros;  ///< null in symmetric schemes
  uint8_t* codes;
  IntegerCounters* counters;

  /// By one lane of the group. `low` and `high` are its range.
  __device__ void store(const Rule& rule, int64_t index, const Scale& scale, float low, float high) const {
    if (rule.scale == formats::ScaleType::f32) {
      static_cast<uint32_t*>(scales)[index] = scale.bits;
    } else {
      static_cast<uint16_t*>(scales)[index] = static_cast<uint16_t>(scale.bits);
    }
    if (zeros != nullptr) zeros[index] = static_cast<uint8_t>(scale.zero);
    if (low == high) atomicAdd(&counters->zero_blocks, 1ull);
    if (scale.saturated) atomicAdd(&counters->saturated_scales, 1ull);
    if (scale.value < rule.least_normal) atomicAdd(&counters->subnormal_scales, 1ull);
  }
};

class IntegerRows {
 public:
  /// Room for `rows` rows of `packed`.
  IntegerRows(const formats::PackedWeight& packed, int64_t rows, const device::Stream& stream);

  IntegerOut out();
  /// Joins the codes of the first `rows` rows and copies everything into rows first … of `packed`. Waits.
  void take(int64_t first, int64_t rows, formats::PackedWeight& packed);
  /// What was counted; bad_row as in IntegerCounters. Waits.
  IntegerCounters counted();
  /// The counts as a report has them.
  static QuantizeStats stats(const IntegerCounters& counters, int64_t blocks);

 private:
  const device::Stream& stream_;
  int bits_;
  int64_t k_, groups_, row_words_, scale_bytes_;
  bool asymmetric_;
  device::DeviceBuffer codes_, words_, scales_, zeros_, counters_;
};

}  // namespace w4q::quantize::cuda
