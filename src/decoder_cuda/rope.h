// Cosines and sines of the rotary embedding in GPU memory.
#pragma once

#include <cstdint>
#include <vector>

#include "device/buffer.h"
#include "kernels/attention/attention_cuda.h"
#include "model/config.h"
#include "model/rope_table.h"

namespace w4q::decoder_cuda {

/// Made by model::RopeTable on the CPU, so both decoders rotate by the same angles.
class CudaRope {
 public:
  /// Row p of its table holds the angles of a token that is decoded by itself at position p.
  CudaRope(const model::RopeConfig& rope, int64_t head_dim, int64_t capacity, const device::Stream& stream);

  bool is_of(const model::AttentionConfig& attention) const noexcept;
  /// Before a call that decodes rows at positions first …: under dynamic scaling, and with factors for long sequences,
  /// their angles depend on where it ends.
  void set_call(int64_t first, int64_t rows, const device::Stream& stream);
  /// Tables whose row 0 belongs to `position`: of the call that was set, or of single tokens from position 0 on.
  kernels::HeadRotation rotation(int64_t position) const noexcept;
  kernels::HeadRotation steps() const noexcept;

 private:
  model::RopeConfig rope_;
  int64_t head_dim_;
  model::RopeTable table_;
  bool dynamic_;
  device::DeviceBuffer cosine_, sine_;            ///< [capacity × pairs], of single tokens
  device::DeviceBuffer call_cosine_, call_sine_;  ///< dynamic only
  int64_t call_first_ = 0;
};

/// Those of all layers: as many as layers differ in.
class CudaRopes {
 public:
  CudaRopes(const model::ModelConfig& config, int64_t capacity, const device::Stream& stream);

  void set_call(int64_t first, int64_t rows, const device::Stream& stream);
  /// As CudaRope; without pairs where nothing turns.
  kernels::HeadRotation rotation(const model::AttentionConfig& attention, int64_t position) const noexcept;
  kernels::HeadRotation steps(const model::AttentionConfig& attention) const noexcept;

 private:
  const CudaRope* of(const model::AttentionConfig& attention) const noexcept;

  std::vector<CudaRope> ropes_;
};

}  // namespace w4q::decoder_cuda
