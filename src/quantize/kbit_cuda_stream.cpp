// Streams a matrix in host memory through the GPU: two slots take turns, so that one chunk is copied in, another one is
// encoded, and the planes of a third come back.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "core/interrupt.h"
#include "core/parallel.h"
#include "device/check.h"
#include "device/stream.h"
#include "formats/kbit.h"
#include "quantize/kbit.h"
#include "quantize/kbit_cuda.h"
#include "quantize/kbit_encoder.h"

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::kbit_blocks;
using formats::PlaneRole;

constexpr int64_t chunk_bytes = int64_t{16} << 20;  ///< of input: half a millisecond on the bus

/// Copies with all threads: one core does not keep up with the bus.
void copy_parallel(std::byte* to, const std::byte* from, int64_t bytes) {
  parallel_for(bytes, int64_t{1} << 20, [=](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
  });
}

/// Consecutive rows, or consecutive blocks of one long row: one range of input bytes and of blocks either way.
struct Chunk {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t first_byte = 0;
  int64_t first_block = 0;
  int64_t input_bytes = 0;
  int64_t blocks = 0;
};

/// How a matrix is cut.
class Chunks {
 public:
  Chunks(int64_t n, int64_t k, int64_t element) : n_(n), k_(k), element_(element) {
    rows_ = std::clamp<int64_t>(chunk_bytes / (kbit_blocks(k) * kbit_block * element), 1, n);
    cols_ = std::min(k, chunk_bytes / element / kbit_block * kbit_block);
    per_row_ = (k + cols_ - 1) / cols_;
  }

  int64_t count() const { return per_row_ > 1 ? n_ * per_row_ : (n_ + rows_ - 1) / rows_; }
  Chunk operator[](int64_t i) const {
    const int64_t row = per_row_ > 1 ? i / per_row_ : i * rows_;
    const int64_t col = per_row_ > 1 ? i % per_row_ * cols_ : 0;
    Chunk chunk;
    chunk.rows = per_row_ > 1 ? 1 : std::min(rows_, n_ - row);
    chunk.cols = std::min(cols_, k_ - col);
    chunk.first_byte = (row * k_ + col) * element_;
    chunk.first_block = row * kbit_blocks(k_) + col / kbit_block;
    chunk.input_bytes = chunk.rows * chunk.cols * element_;
    chunk.blocks = chunk.rows * kbit_blocks(chunk.cols);
    return chunk;
  }
  int64_t max_input_bytes() const { return (*this)[0].input_bytes; }
  int64_t max_blocks() const { return (*this)[0].blocks; }

 private:
  int64_t n_;
  int64_t k_;
  int64_t element_;
  int64_t rows_ = 0;     ///< of a chunk, where rows are short
  int64_t cols_ = 0;     ///< of a chunk, where they are long
  int64_t per_row_ = 0;  ///< chunks of a row; more than one where rows are long
};

/// Memory of one chunk on both sides of the bus, and the stream that its work is queued on.
struct Slot {
  Slot(device::Context& gpu, int64_t input_bytes, int64_t code_bytes, int64_t scale_bytes)
      : stream(gpu),
        host_input(gpu, static_cast<size_t>(input_bytes)),
        host_codes(gpu, static_cast<size_t>(code_bytes)),
        host_scales(gpu, static_cast<size_t>(scale_bytes)),
        input(gpu, host_input.bytes().size()),
        codes(gpu, host_codes.bytes().size()),
        scales(gpu, host_scales.bytes().size()) {}

  device::Stream stream;
  device::PinnedBuffer host_input;
  device::PinnedBuffer host_codes;
  device::PinnedBuffer host_scales;
  device::DeviceBuffer input;
  device::DeviceBuffer codes;
  device::DeviceBuffer scales;
  std::optional<Chunk> pending;  ///< queued, its planes not yet taken
};

class Pipeline {
 public:
  Pipeline(const TensorView& weight, formats::PackedWeight& packed, device::Context& gpu)
      : weight_(weight),
        packed_(packed),
        chunks_(packed.n, packed.k, dtype_bits(weight.dtype) / 8),
        code_bytes_(4 * packed.scheme.bits),
        scale_bytes_(packed.scheme.scale == formats::ScaleType::e4m4 ? 1 : 2),
        encoder_(gpu, packed.scheme, weight.dtype),
        slots_{make_slot(gpu), make_slot(gpu)} {}

  /// Everything in flight ends before the memory that it uses goes.
  ~Pipeline() {
    for (Slot& slot : slots_) slot.stream.drain();
  }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  BlockCounters encode(std::span<const float> codebook) {
    encoder_.set_codebook(codebook, slots_[0].stream);
    slots_[0].stream.synchronize();
    for (int64_t i = 0; i < chunks_.count(); ++i) {
      check_interrupt();
      Slot& slot = slots_[static_cast<size_t>(i % 2)];
      take_planes(slot);
      submit(slot, chunks_[i]);
    }
    for (int64_t i = chunks_.count(); i < chunks_.count() + 2; ++i) take_planes(slots_[static_cast<size_t>(i % 2)]);
    return encoder_.counters(slots_[0].stream);
  }

 private:
  Slot make_slot(device::Context& gpu) const {
    return {gpu, chunks_.max_input_bytes(), chunks_.max_blocks() * code_bytes_, chunks_.max_blocks() * scale_bytes_};
  }

  void submit(Slot& slot, const Chunk& chunk) {
    copy_parallel(slot.host_input.bytes().data(), weight_.bytes.data() + chunk.first_byte, chunk.input_bytes);
    slot.input.upload(slot.host_input.bytes().first(static_cast<size_t>(chunk.input_bytes)), slot.stream);
    encoder_.encode({slot.input.data(), weight_.dtype, chunk.rows, chunk.cols, chunk.cols},
                    {slot.codes.as<uint32_t>(), slot.scales.data()}, chunk.first_block, slot.stream);
    slot.codes.download(codes_of(slot, chunk), slot.stream);
    slot.scales.download(scales_of(slot, chunk), slot.stream);
    slot.pending = chunk;
  }

  void take_planes(Slot& slot) {
    if (!slot.pending) return;
    slot.stream.synchronize();
    const Chunk& chunk = *slot.pending;
    std::byte* const codes = packed_.plane(PlaneRole::codes).bytes.data() + chunk.first_block * code_bytes_;
    std::byte* const scales = packed_.plane(PlaneRole::scales).bytes.data() + chunk.first_block * scale_bytes_;
    copy_parallel(codes, slot.host_codes.bytes().data(), chunk.blocks * code_bytes_);
    copy_parallel(scales, slot.host_scales.bytes().data(), chunk.blocks * scale_bytes_);
    slot.pending.reset();
  }

  std::span<std::byte> codes_of(Slot& slot, const Chunk& chunk) const {
    return slot.host_codes.bytes().first(static_cast<size_t>(chunk.blocks * code_bytes_));
  }
  std::span<std::byte> scales_of(Slot& slot, const Chunk& chunk) const {
    return slot.host_scales.bytes().first(static_cast<size_t>(chunk.blocks * scale_bytes_));
  }

  const TensorView& weight_;
  formats::PackedWeight& packed_;
  Chunks chunks_;
  int64_t code_bytes_;   ///< of a block
  int64_t scale_bytes_;  ///< of a block
  KbitCudaEncoder encoder_;
  std::array<Slot, 2> slots_;
};

}  // namespace

QuantizeResult quantize_kbit_cuda(const TensorView& weight, const formats::Scheme& scheme,
                                  const QuantizeOptions& options, device::Context& gpu) {
  if (options.bnb_compatible) return kbit_quantizer().run(weight, scheme, options);
  check_kbit_scheme(scheme);
  check_kbit_options(scheme, options);
  check_weight(weight);
  const std::vector<float> table = chosen_table(scheme, options);
  QuantizeResult result{allocate_canonical(weight, scheme, table), {}};
  const int64_t row_blocks = kbit_blocks(result.weight.k);
  Pipeline pipeline(weight, result.weight, gpu);
  std::vector<float> codebook;
  result.stats =
      encode_with_factor(table, scheme, result.weight.n * row_blocks, codebook, [&](std::span<const float> candidate) {
        const BlockCounters counters = pipeline.encode(candidate);
        if (counters.bad_block < 0) return counters;
        const int64_t row = counters.bad_block / row_blocks;
        refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, row), row);
      });
  std::ranges::copy(codebook, result.weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  return result;
}

}  // namespace w4q::quantize
