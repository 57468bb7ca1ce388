// The memory-bound passes on the GPU: quantizing, dequantizing, packing and unpacking, each cold, with random data,
// beside the ceilings measured in the same process. Prints JSON to stdout; arguments name the passes to measure. Every
// rate counts the bytes that a pass must move: quantize is given as bytes of weights read a second and as all bytes,
// read and written (docs/cuda-passes.md).
#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"
#include "core/float_formats.h"
#include "core/rng.h"
#include "core/text.h"
#include "device/buffer.h"
#include "device/ceilings.h"
#include "device/check.h"
#include "device/copy.h"
#include "device/timing.h"
#include "formats/codebook.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "kernels/dequantize/dequantize_cuda.h"
#include "quantize/kbit_cuda.h"
#include "repack/layout_registry.h"
#include "repack/map_pass_cuda.h"

namespace w4q {
namespace {

using device::DeviceBuffer;
using formats::ScaleType;
using formats::Scheme;
using Json = nlohmann::ordered_json;

constexpr int replays = 25;

struct Size {
  int64_t n;
  int64_t k;
};

/// `copies` buffers of `bytes` each in one allocation, every one starting on 256 bytes.
class Rotating {
 public:
  Rotating(const device::Context& gpu, int64_t bytes, int copies)
      : stride_((bytes + 255) / 256 * 256), copies_(copies), data_(gpu, static_cast<size_t>(stride_ * copies)) {}
  std::byte* at(int call) { return data_.data() + call % copies_ * stride_; }
  /// The same host bytes into all copies.
  void fill(std::span<const std::byte> bytes, const device::Stream& stream) {
    for (int i = 0; i < copies_; ++i) {
      device::copy(device::Way::to_gpu, at(i), bytes.data(), bytes.size(), stream, "copying");
    }
    stream.synchronize();
  }

 private:
  int64_t stride_;
  int copies_;
  DeviceBuffer data_;
};

/// Weights as they are in models: N(0, 0.02), from a pool that is repeated at odd distances.
std::vector<std::byte> random_weights(DType dtype, int64_t count) {
  constexpr size_t pool_size = 1'000'003;
  std::vector<float> pool(pool_size);
  for (size_t i = 0; i < pool_size; ++i) pool[i] = 0.02f * static_cast<float>(random_normal(1, i));
  const auto element = static_cast<size_t>(dtype_bits(dtype) / 8);
  std::vector<std::byte> bytes(static_cast<size_t>(count) * element);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const float value = pool[i % pool_size];
    const uint16_t half = dtype == DType::f16 ? f16_from_f32(value) : bf16_from_f32(value);
    std::memcpy(&bytes[i * element], dtype == DType::f32 ? static_cast<const void*>(&value) : &half, element);
  }
  return bytes;
}

std::vector<std::byte> random_bytes(int64_t count, uint64_t seed) {
  std::vector<std::byte> bytes(static_cast<size_t>(count + 8));
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const uint64_t word = random_bits(seed, i);
    std::memcpy(&bytes[i], &word, 8);
  }
  bytes.resize(static_cast<size_t>(count));
  return bytes;
}

int64_t code_bytes(const Scheme& scheme, Size size) { return size.n * formats::kbit_blocks(size.k) * 4 * scheme.bits; }
int64_t scale_bytes(const Scheme& scheme, Size size) {
  return size.n * formats::kbit_blocks(size.k) * (scheme.scale == ScaleType::e4m4 ? 1 : 2);
}

/// One measurement: what ran, how long, and its rates; `of` names the ceiling that percent compares with.
Json figure(std::string_view pass, std::string_view what, Size size, const device::Timing& timing, int64_t bytes,
            double ceiling, std::string_view of) {
  const double rate = static_cast<double>(bytes) / timing.median;
  return {{"pass", pass},
          {"what", what},
          {"n", size.n},
          {"k", size.k},
          {"us_median", timing.median * 1e6},
          {"us_least", timing.least * 1e6},
          {"us_most", timing.most * 1e6},
          {"GB_per_s", rate * 1e-9},
          {"ceiling", of},
          {"percent", 100 * rate / ceiling}};
}

/// Where all is measured.
struct Gpu {
  device::Context context;
  device::Ceilings ceilings = device::measure_ceilings(context);
};

device::TimingOptions options_for(int copies) { return {std::max(10, copies), replays}; }

Json quantize(const Scheme& scheme, DType dtype, Size size, Gpu& gpu) {
  const device::Stream stream(gpu.context);
  const int64_t input = size.n * size.k * dtype_bits(dtype) / 8;
  const int copies = std::max(2, device::rotating_copies(gpu.context.properties(), input));
  Rotating weights(gpu.context, input, copies);
  weights.fill(random_weights(dtype, size.n * size.k), stream);
  Rotating codes(gpu.context, code_bytes(scheme, size), copies);
  Rotating scales(gpu.context, scale_bytes(scheme, size), copies);
  quantize::KbitCudaEncoder encoder(gpu.context, scheme, dtype);
  encoder.set_codebook(formats::codebook("nf", scheme.bits), stream);
  stream.synchronize();
  const auto timing = device::time_calls(
      gpu.context,
      [&](int call, const device::Stream& queue) {
        encoder.encode({weights.at(call), dtype, size.n, size.k, size.k},
                       {reinterpret_cast<uint32_t*>(codes.at(call)), scales.at(call)}, 0, queue);
      },
      options_for(copies));
  const auto what = concat(dtype_name(dtype), " to ", to_string(scheme));
  Json result = figure("quantize", what, size, timing, input, gpu.ceilings.read, "read");
  const int64_t moved = input + code_bytes(scheme, size) + scale_bytes(scheme, size);
  result["GB_per_s_moved"] = static_cast<double>(moved) / timing.median * 1e-9;
  result["percent_moved_of_copy"] = 100 * static_cast<double>(moved) / timing.median / gpu.ceilings.copy;
  result["weights_per_s"] = static_cast<double>(size.n * size.k) / timing.median;
  result["ms_for_16_GB"] = 16e9 / static_cast<double>(input) * timing.median * 1e3;
  return result;
}

Json dequantize(const Scheme& scheme, std::string_view layout, DType dtype, Size size, Gpu& gpu) {
  const device::Stream stream(gpu.context);
  const auto& row = repack::layout_row(layout);
  const auto specs = row.planes(scheme, size.n, size.k);
  const int64_t output = size.n * size.k * dtype_bits(dtype) / 8;
  const int64_t code_size = byte_count(specs[0].dtype, specs[0].shape);
  const int64_t scale_size = byte_count(specs[1].dtype, specs[1].shape);
  const int copies = std::max(2, device::rotating_copies(gpu.context.properties(), output));
  Rotating codes(gpu.context, code_size, copies);
  Rotating scales(gpu.context, scale_size, copies);
  Rotating out(gpu.context, output, copies);
  codes.fill(random_bytes(code_size, 1), stream);
  scales.fill(random_bytes(scale_size, 2), stream);
  const auto table = formats::codebook("nf", scheme.bits);
  const auto codebook = DeviceBuffer::copy_of(std::as_bytes(std::span(table)), stream);
  stream.synchronize();
  const auto timing = device::time_calls(
      gpu.context,
      [&](int call, const device::Stream& queue) {
        kernels::dequantize_cuda({scheme, layout, size.n, size.k, reinterpret_cast<const uint32_t*>(codes.at(call)),
                                  scales.at(call), codebook.as<float>()},
                                 {out.at(call), dtype, size.k}, queue);
      },
      options_for(copies));
  const auto what = concat(to_string(scheme), " ", layout, " to ", dtype_name(dtype));
  Json result = figure("dequantize", what, size, timing, output, gpu.ceilings.write, "write");
  const auto moved = static_cast<double>(output + code_size + scale_size);
  result["GB_per_s_moved"] = moved / timing.median * 1e-9;
  result["percent_moved_of_write"] = 100 * moved / timing.median / gpu.ceilings.write;
  result["percent_moved_of_copy"] = 100 * moved / timing.median / gpu.ceilings.copy;
  return result;
}

Json repack(const Scheme& scheme, std::string_view layout, bool pack, Size size, Gpu& gpu) {
  const device::Stream stream(gpu.context);
  const auto specs = repack::layout_row(layout).planes(scheme, size.n, size.k);
  const int64_t packed_codes = byte_count(specs[0].dtype, specs[0].shape);
  const int64_t packed_scales = byte_count(specs[1].dtype, specs[1].shape);
  const int64_t moved = packed_codes + packed_scales + code_bytes(scheme, size) + scale_bytes(scheme, size);
  const int copies = std::max(2, device::rotating_copies(gpu.context.properties(), moved / 2));
  Rotating canonical_codes(gpu.context, code_bytes(scheme, size), copies);
  Rotating canonical_scales(gpu.context, scale_bytes(scheme, size), copies);
  Rotating codes(gpu.context, packed_codes, copies);
  Rotating scales(gpu.context, packed_scales, copies);
  (pack ? canonical_codes : codes).fill(random_bytes(code_bytes(scheme, size), 3), stream);
  (pack ? canonical_scales : scales).fill(random_bytes(scale_bytes(scheme, size), 4), stream);
  DeviceBuffer bad(gpu.context, sizeof(repack::BadPadding));
  const auto timing = device::time_calls(
      gpu.context,
      [&](int call, const device::Stream& queue) {
        const repack::DeviceBlocks canonical{reinterpret_cast<uint32_t*>(canonical_codes.at(call)),
                                             canonical_scales.at(call)};
        const repack::DeviceBlocks packed{reinterpret_cast<uint32_t*>(codes.at(call)), scales.at(call)};
        if (pack) {
          repack::pack_cuda(layout, scheme, size.n, size.k, canonical, packed, queue);
        } else {
          repack::unpack_cuda(layout, scheme, size.n, size.k, packed, canonical, bad.as<repack::BadPadding>(), queue);
        }
      },
      options_for(copies));
  return figure(pack ? "pack" : "unpack", concat(to_string(scheme), " ", layout), size, timing, moved,
                gpu.ceilings.copy, "copy");
}

constexpr Size wide{4096, 14336};
constexpr Size square{4096, 4096};
constexpr Size large{28672, 14336};  // 0.8 GB of bf16: launches and tails count for nothing, as in 16 GB of them

using Add = std::function<void(Json)>;

void quantize_all(Gpu& gpu, const Add& add) {
  for (int bits = 2; bits <= 5; ++bits) add(quantize({.bits = bits}, DType::bf16, wide, gpu));
  for (DType dtype : {DType::f16, DType::f32}) add(quantize({.bits = 3}, dtype, wide, gpu));
  for (int bits : {3, 4}) add(quantize({.bits = bits, .scale = ScaleType::f16}, DType::bf16, wide, gpu));
  add(quantize({.bits = 3}, DType::bf16, square, gpu));
  for (int bits : {3, 4}) add(quantize({.bits = bits}, DType::bf16, large, gpu));
}

void dequantize_all(Gpu& gpu, const Add& add) {
  for (const std::string_view layout : {"canonical", "kbit-tile", "kbit-fragment"}) {
    for (DType dtype : {DType::f16, DType::bf16, DType::f32}) {
      for (int bits = 2; bits <= 5; ++bits) add(dequantize({.bits = bits}, layout, dtype, wide, gpu));
    }
    add(dequantize({.bits = 4, .scale = ScaleType::f16}, layout, DType::f16, wide, gpu));
    for (int bits = 2; bits <= 5; ++bits) add(dequantize({.bits = bits}, layout, DType::f16, large, gpu));
  }
}

void repack_all(Gpu& gpu, const Add& add) {
  for (const std::string_view layout : {"kbit-tile", "kbit-fragment"}) {
    for (bool pack : {true, false}) {
      for (int bits = 2; bits <= 5; ++bits) add(repack({.bits = bits}, layout, pack, {28672, 4096}, gpu));
    }
  }
}

/// `passes`: which of quantize, dequantize and repack to measure; all of them where none is named.
Json run(std::span<const std::string_view> passes) {
  Gpu gpu;
  Json results = Json::array();
  const auto add = [&](Json figure) {
    std::cerr << figure.dump() << "\n";
    results.push_back(std::move(figure));
  };
  const auto wanted = [&](std::string_view pass) { return passes.empty() || std::ranges::count(passes, pass) > 0; };
  if (wanted("quantize")) quantize_all(gpu, add);
  if (wanted("dequantize")) dequantize_all(gpu, add);
  if (wanted("repack")) repack_all(gpu, add);
  return {{"gpu", gpu.context.properties().name},
          {"read_GB_per_s", gpu.ceilings.read * 1e-9},
          {"write_GB_per_s", gpu.ceilings.write * 1e-9},
          {"copy_GB_per_s", gpu.ceilings.copy * 1e-9},
          {"results", std::move(results)}};
}

}  // namespace
}  // namespace w4q

int main(int count, char** arguments) {
  try {
    const std::vector<std::string_view> passes(arguments + 1, arguments + count);
    std::cout << w4q::run(passes).dump(2) << "\n";
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 4;
  }
}
