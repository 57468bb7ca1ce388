#include "quantize/kbit_cuda.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/error.h"
#include "core/text.h"
#include "core/with_bits.h"
#include "device/alignment.h"
#include "device/check.h"
#include "device/copy.h"
#include "device/launch.h"
#include "formats/codebook.h"
#include "formats/kbit.h"
#include "quantize/kbit.h"
#include "quantize/kbit_encode.cuh"
#include "quantize/kbit_threshold.h"

namespace w4q::quantize {
namespace {

using formats::ScaleType;
using formats::Scheme;

/// Scales that a table has a row for: every byte, or every finite half that is not negative.
int64_t table_rows(ScaleType type) { return type == ScaleType::e4m4 ? 256 : 0x7C00; }

/// Row r, word j: the threshold between codes j and j + 1 for scale r, in both halves of the word for 16-bit weights.
/// The last word of a row is not used.
__global__ void build_thresholds(const float* codebook, int bits, bool e4m4, DType dtype, uint32_t count,
                                 uint32_t* table) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint32_t row = i >> bits;
  const uint32_t code = i & ((1u << bits) - 1);
  if (code + 1 == 1u << bits) {
    table[i] = 0;
    return;
  }
  const float midpoint = (codebook[code] + codebook[code + 1]) * 0.5f;
  const float scale = e4m4 ? formats::e4m4_decode(static_cast<uint8_t>(row))
                           : __half2float(__ushort_as_half(static_cast<unsigned short>(row)));
  const float threshold = kbit_threshold(midpoint, scale);
  if (dtype == DType::f32) {
    table[i] = __float_as_uint(threshold);
  } else {
    table[i] = (dtype == DType::bf16 ? bf16_floor(threshold) : f16_floor(threshold)) * 0x00010001u;
  }
}

template <class T, int Bits>
void launch(const cuda::EncodeArguments& arguments, const device::Stream& stream) {
  const auto kernel =
      arguments.flat && arguments.e4m4 ? cuda::kbit_encode<T, Bits, true> : cuda::kbit_encode<T, Bits, false>;
  const int64_t wanted = (arguments.blocks + cuda::encode_threads - 1) / cuda::encode_threads;
  const int grid = device::resident_blocks(stream.context(), kernel, cuda::encode_threads, wanted);
  kernel<<<grid, cuda::encode_threads, 0, stream.get()>>>(arguments);
}

void check_matrix(const DeviceMatrix& weight, const DevicePlanes& planes, DType dtype, ScaleType scale) {
  formats::check_dimensions(weight.n, weight.k, "quantize on the GPU");
  const auto refuse = [](std::string_view what) {
    throw Error(ErrorCode::bad_argument, concat("quantize on the GPU: ", what));
  };
  if (weight.dtype != dtype) refuse("the matrix has another type than the encoder");
  if (weight.stride < weight.k) refuse("the row stride is less than a row");
  if (weight.data == nullptr || planes.codes == nullptr || planes.scales == nullptr) refuse("a null pointer");
  if (!device::aligned(weight.data, dtype_bits(dtype) / 8) || !device::aligned(planes.codes, 4) ||
      !device::aligned(planes.scales, scale == ScaleType::e4m4 ? 1 : 2)) {
    refuse("a pointer is not aligned to its elements");
  }
}

/// All ones where a minimum is looked for.
constexpr cuda::KbitCounters cleared{0, ~0u, 0, 0, 0, ~0ull};

/// Row and column of the first NaN or infinity, which stands in the row of `block`.
[[noreturn]] void refuse_bad_block(const DeviceMatrix& weight, std::string_view name, int64_t block,
                                   const device::Stream& stream) {
  const int64_t row = block / formats::kbit_blocks(weight.k);
  const int64_t element = dtype_bits(weight.dtype) / 8;
  std::vector<std::byte> values(static_cast<size_t>(weight.k * element));
  const auto* from = static_cast<const std::byte*>(weight.data) + row * weight.stride * element;
  device::copy(device::Way::from_gpu, values.data(), from, values.size(), stream, "copying a row from the GPU");
  stream.synchronize();
  refuse_non_finite(name, weight.dtype, values, row);
}

}  // namespace

KbitCudaEncoder::KbitCudaEncoder(const device::Context& context, const Scheme& scheme, DType dtype)
    : scheme_(scheme), dtype_(dtype) {
  check_kbit_scheme(scheme);
  if (!is_weight_dtype(dtype)) {
    throw Error(ErrorCode::bad_argument, concat("quantize on the GPU: not a type of weights: ", dtype_name(dtype)));
  }
  table_ = device::DeviceBuffer(context, sizeof(float) << scheme.bits);
  thresholds_ =
      device::DeviceBuffer(context, static_cast<size_t>(table_rows(scheme.scale)) * sizeof(uint32_t) << scheme.bits);
  counters_ = device::DeviceBuffer(context, sizeof(cuda::KbitCounters));
}

void KbitCudaEncoder::set_codebook(std::span<const float> codebook, const device::Stream& stream) {
  ensure(codebook.size() == size_t{1} << scheme_.bits, "quantize on the GPU: a table of another width");
  int exponent = 0;
  const float table_max = formats::table_max(codebook);
  ensure(std::frexp(table_max, &exponent) == 0.5f, "quantize on the GPU: the table's maximum is no power of two");
  inverse_table_max_ = std::ldexp(1.0f, 1 - exponent);
  table_.upload(std::as_bytes(codebook), stream);
  counters_.upload(std::as_bytes(std::span(&cleared, 1)), stream);
  const auto count = static_cast<uint32_t>(table_rows(scheme_.scale) << scheme_.bits);
  constexpr uint32_t threads = 256;
  build_thresholds<<<(count + threads - 1) / threads, threads, 0, stream.get()>>>(
      table_.as<float>(), scheme_.bits, scheme_.scale == ScaleType::e4m4, dtype_, count, thresholds_.as<uint32_t>());
  device::check_launch("build_thresholds", to_string(scheme_));
}

void KbitCudaEncoder::encode(const DeviceMatrix& weight, const DevicePlanes& planes, int64_t first_block,
                             const device::Stream& stream) {
  check_matrix(weight, planes, dtype_, scheme_.scale);
  cuda::EncodeArguments arguments{};
  arguments.data = weight.data;
  arguments.k = weight.k;
  arguments.stride = weight.stride;
  arguments.row_blocks = formats::kbit_blocks(weight.k);
  arguments.blocks = weight.n * arguments.row_blocks;
  arguments.flat = weight.k % formats::kbit_block == 0 && (weight.stride == weight.k || weight.n == 1) &&
                   device::aligned(weight.data, 16);
  arguments.table = thresholds_.as<uint32_t>();
  arguments.codes = planes.codes;
  arguments.scales = planes.scales;
  arguments.e4m4 = scheme_.scale == ScaleType::e4m4;
  arguments.inverse_table_max = inverse_table_max_;
  arguments.counters = counters_.as<cuda::KbitCounters>();
  arguments.first_block = static_cast<unsigned long long>(first_block);
  with_table_bits(scheme_.bits, [&]<int bits>() {
    if (dtype_ == DType::f32) return launch<cuda::F32, bits>(arguments, stream);
    if (dtype_ == DType::bf16) return launch<cuda::Bf16, bits>(arguments, stream);
    launch<cuda::F16, bits>(arguments, stream);
  });
  device::check_launch("kbit_encode", concat(to_string(scheme_), ", ", weight.n, " × ", weight.k));
}

BlockCounters KbitCudaEncoder::counters(const device::Stream& stream) const {
  cuda::KbitCounters raw{};
  counters_.download(std::as_writable_bytes(std::span(&raw, 1)), stream);
  stream.synchronize();
  BlockCounters result;
  result.largest = std::bit_cast<float>(raw.largest);
  result.smallest = raw.smallest == ~0u ? 0 : std::bit_cast<float>(raw.smallest);
  result.zero_blocks = static_cast<int64_t>(raw.zero_blocks);
  result.saturated_scales = static_cast<int64_t>(raw.saturated);
  result.subnormal_scales = static_cast<int64_t>(raw.subnormal);
  result.bad_block = raw.bad_block == ~0ull ? -1 : static_cast<int64_t>(raw.bad_block);
  return result;
}

QuantizeStats quantize_kbit_device(const DeviceMatrix& weight, std::string_view name, const Scheme& scheme,
                                   const QuantizeOptions& options, const DevicePlanes& planes,
                                   std::vector<float>& codebook, const device::Stream& stream) {
  if (options.bnb_compatible) {
    throw Error(ErrorCode::unsupported, concat(printable(name), ": bitsandbytes' bytes are made on the CPU only"));
  }
  KbitCudaEncoder encoder(stream.context(), scheme, weight.dtype);
  return encode_with_factor(chosen_table(scheme, options), scheme, weight.n * formats::kbit_blocks(weight.k), codebook,
                            [&](std::span<const float> table) {
                              encoder.set_codebook(table, stream);
                              encoder.encode(weight, planes, 0, stream);
                              const BlockCounters counters = encoder.counters(stream);
                              if (counters.bad_block >= 0) refuse_bad_block(weight, name, counters.bad_block, stream);
                              return counters;
                            });
}

QuantizeStats encode_with_factor(std::span<const float> table, const Scheme& scheme, int64_t blocks,
                                 std::vector<float>& codebook,
                                 const std::function<BlockCounters(std::span<const float>)>& encode) {
  codebook.assign(table.begin(), table.end());
  BlockCounters counters = encode(codebook);
  const int exponent = formats::kbit_range_exponent(counters.smallest, counters.largest, scheme.scale);
  if (exponent != 0) {
    codebook = formats::kbit_scaled_codebook(table, exponent);
    counters = encode(codebook);
  }
  return {blocks, counters.zero_blocks, counters.saturated_scales, counters.subnormal_scales, exponent};
}

}  // namespace w4q::quantize
