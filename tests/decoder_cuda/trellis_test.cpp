// Linears of trellises in GPU memory: every kernel that takes them against the fp64 product of the decoded weights, from
// the canonical layout and from trellis-fragment.
#include "decoder_cuda/trellis.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/float_formats.h"
#include "core/rng.h"
#include "core/text.h"
#include "decoder_cuda/linear.h"
#include "device/graph.h"
#include "device/properties.h"
#include "formats/scheme_registry.h"
#include "formats/trellis.h"
#include "gpu.h"
#include "kernels/linear/kernel_row.h"
#include "kernels/trellis/dequantize.h"
#include "repack/layout_registry.h"
#include "support.h"

namespace w4q::decoder_cuda {
namespace {

using formats::PackedLinear;
using formats::PackedWeight;
using formats::PlaneRole;
using kernels::LinearWeight;

class TrellisGpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

/// Any bits are rings; those of rows that do not exist are zero.
PackedWeight random_trellis(const formats::Scheme& scheme, int64_t n, int64_t k, uint64_t seed) {
  PackedWeight weight = formats::allocate_canonical(scheme, n, k);
  for (int64_t strip = 0; strip < formats::trellis_strips(n); ++strip) {
    const int64_t rows = std::min<int64_t>(formats::trellis_rows, n - strip * formats::trellis_rows);
    for (int64_t column = 0; column < k; ++column) {
      formats::TrellisSymbols symbols{};
      for (int64_t row = 0; row < rows; ++row) {
        const auto at = static_cast<uint64_t>((strip * formats::trellis_rows + row) * k + column);
        symbols[static_cast<size_t>(row)] = static_cast<uint8_t>(random_bits(seed, at) % (1u << scheme.bits));
      }
      formats::trellis_put(symbols, scheme.bits, formats::trellis_ring(weight, strip, column));
    }
  }
  const auto scales = weight.plane(PlaneRole::scales).bytes.as<uint16_t>();
  for (size_t row = 0; row < scales.size(); ++row) {
    scales[row] = f16_from_f32(0.01f + 0.01f * static_cast<float>(random_uniform(seed + 1, row)));
  }
  weight.plane(PlaneRole::codebook).bytes.as<float>()[0] = 0x1p-7f;
  return weight;
}

struct Case {
  const char* scheme;
  int64_t n, k;
  int64_t rotation = 0;
  bool scaled = false;
  bool stored = false;  ///< in trellis-fragment
};

LinearWeight random_linear(const Case& c, std::string name, int64_t n, uint64_t seed) {
  auto packed = std::make_shared<PackedLinear>(PackedLinear{name, DType::bf16, {}});
  const PackedWeight canonical = random_trellis(formats::parse_scheme(c.scheme), n, c.k, seed);
  packed->passes.push_back(c.stored ? repack::layout_row("trellis-fragment").pack(canonical) : canonical.clone());
  if (c.rotation > 0) packed->rotations.emplace_back(formats::Rotation{c.rotation, 7}, c.k);
  for (int64_t i = 0; c.scaled && i < c.k; ++i) packed->input_scale.push_back(0.5f + static_cast<float>(i % 5));
  return {.name = std::move(name), .n = n, .k = c.k, .matrix = packed, .bias = {}};
}

/// fp64 products with the decoded rows of some linears, one below the other.
std::vector<double> products(std::span<const LinearWeight* const> linears, const std::vector<uint16_t>& x, int64_t m) {
  const int64_t k = linears.front()->k;
  int64_t n = 0;
  for (const auto* linear : linears) n += linear->n;
  std::vector<double> result(static_cast<size_t>(m * n));
  std::vector<float> row(static_cast<size_t>(k));
  int64_t at = 0;
  for (const auto* linear : linears) {
    PackedLinear canonical = PackedLinear{linear->name, DType::bf16, {}};
    const auto& packed = *std::get<std::shared_ptr<const PackedLinear>>(linear->matrix);
    const PackedWeight& pass = packed.passes.front();
    canonical.passes.push_back(repack::layout_row(pass.layout).unpack(pass, linear->name));
    canonical.rotations = packed.rotations;
    canonical.input_scale = packed.input_scale;
    for (int64_t o = 0; o < linear->n; ++o, ++at) {
      formats::decode_linear_row(canonical, o, row);
      for (int64_t r = 0; r < m; ++r) {
        double sum = 0;
        for (int64_t i = 0; i < k; ++i) {
          sum += double{row[static_cast<size_t>(i)]} * f32_from_f16(x[static_cast<size_t>(r * k + i)]);
        }
        result[static_cast<size_t>(r * n + at)] = sum;
      }
    }
  }
  return result;
}

std::vector<uint16_t> inputs(int64_t count) {
  std::vector<uint16_t> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) x[i] = f16_from_f32(static_cast<float>(random_normal(4, i)));
  return x;
}

template <class T>
double relative_error(const std::vector<T>& got, const std::vector<double>& expected) {
  double error = 0, signal = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(double{got[i]} - expected[i], 2);
    signal += expected[i] * expected[i];
  }
  return std::sqrt(error / signal);
}

const Case cases[] = {
    {"trellis3-w16", 384, 256, 128},
    {"trellis3-w16", 256, 1408, 128, true, true},
    {"trellis2-w16", 128, 512, 64, false, true},
    {"trellis4-w16", 640, 320, 32},
    {"trellis2-w12", 200, 100},
    {"trellis3-w8", 128, 200, 0, true},
    {"trellis4-w13", 300, 576, 256},
    {"trellis3-w14", 1000, 4096, 128},
    {"trellis4-w16", 384, 2048, 64, true},
    {"trellis2-w12", 300, 1024},
    {"trellis2-w14", 256, 1024, 128},
    {"trellis4-w14", 300, 2048, 64},
};

TEST_F(TrellisGpu, ProductsAgreeWithTheDecodedWeights) {
  const device::Stream stream(test::gpu());
  for (const Case& c : cases) {
    const LinearWeight linears[] = {random_linear(c, "q", c.n / 128 * 128, 1), random_linear(c, "k", 128, 2),
                                    random_linear(c, "v", c.n, 3)};
    const LinearWeight* const all[] = {&linears[0], &linears[1], &linears[2]};
    const CudaLinear made = upload_linears(all, stream);
    ASSERT_EQ(made.products.size(), 1u) << c.scheme;
    EXPECT_EQ(made.products[0].linear.passes[0].layout, "trellis-fragment");
    EXPECT_TRUE(fuses(made)) << c.scheme;
    for (const int64_t m : {1, 2, 8, 9, 16, 17, 100}) {
      const CudaLinear* const used[] = {&made};
      CudaMultiplier multiplier(used, m, stream);
      const auto x = inputs(m * c.k);
      const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
      device::DeviceBuffer y(stream.context(), static_cast<size_t>(m * made.n) * 4);
      std::vector<float> got(static_cast<size_t>(m * made.n));
      multiplier.multiply(made, input.as<__half>(), m, y.as<float>());
      y.download(std::as_writable_bytes(std::span(got)), stream);
      stream.synchronize();
      EXPECT_LT(relative_error(got, products(all, x, m)), 1.5e-3)
          << c.scheme << ", " << c.n << " × " << c.k << ", " << m;
    }
  }
}

/// All kernels that take several rows, not only the one that is preferred here: with warps that work on several strips,
/// with strips of several blocks, and with inputs that end within a piece or are no whole tiles of rows.
TEST_F(TrellisGpu, EveryKernelOfSeveralRowsAgrees) {
  const device::Stream stream(test::gpu());
  const device::Properties& gpu = test::gpu().properties();
  for (const Case& c : {Case{"trellis3-w16", 2000 * 128, 64, 64}, Case{"trellis2-w16", 300, 4096, 128},
                        Case{"trellis4-w16", 640, 320, 32}, Case{"trellis3-w14", 1000, 2112, 64},
                        Case{"trellis3-w12", 384, 1408, 128}, Case{"trellis4-w14", 128, 14336}}) {
    const LinearWeight linear = random_linear(c, "linear", c.n, 1);
    const LinearWeight* const all[] = {&linear};
    const CudaLinear made = upload_linears(all, stream);
    const kernels::DeviceLinear& product = made.products.at(0).linear;
    for (const int64_t m : {2, 8, 9, 16, 17, 40, 130}) {
      if (m * c.n * c.k > int64_t{1} << 28) continue;  // fp64 products take too long
      const auto x = inputs(m * c.k);
      const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
      const std::vector<double> expected = products(all, x, m);
      const kernels::LinearDesc desc{.gpu = gpu, .passes = product.passes, .m = m};
      int taken = 0;
      for (const auto& row : kernels::kernel_registry()) {
        if (!row.accepts(desc, nullptr)) continue;
        ++taken;
        const kernels::WorkspaceSizes sizes = row.workspace(desc);
        device::DeviceBuffer semaphores(stream.context(), sizes.semaphores), scratch(stream.context(), sizes.scratch);
        device::DeviceBuffer y(stream.context(), static_cast<size_t>(m * c.n) * 4);
        semaphores.fill(0, stream);
        kernels::LinearArgs args;
        args.m = m;
        args.x = input.data(), args.ldx = c.k;
        args.y = y.data(), args.ldy = c.n;
        args.fp32 = true;
        args.passes = product.passes;
        args.workspace = {semaphores.data(), scratch.data(), sizes};
        kernels::run_kernel(row, args, stream);
        std::vector<float> got(static_cast<size_t>(m * c.n));
        y.download(std::as_writable_bytes(std::span(got)), stream);
        stream.synchronize();
        EXPECT_LT(relative_error(got, expected), 1.5e-3) << row.name << ", " << c.scheme << ", " << c.n << ", " << m;
      }
      EXPECT_GE(taken, 1) << c.scheme << ", " << m;
    }
  }
}

/// 532 strips: on a GPU of up to 133 multiprocessors some of a block's teams of warps have one from its begin to its end.
TEST_F(TrellisGpu, RunsOfWholeStrips) {
  const device::Stream stream(test::gpu());
  const Case c{"trellis2-w16", 532 * 128, 1024, 128};
  const LinearWeight linear = random_linear(c, "head", c.n, 1);
  const LinearWeight* const all[] = {&linear};
  const CudaLinear made = upload_linears(all, stream);
  const CudaLinear* const used[] = {&made};
  CudaMultiplier multiplier(used, 1, stream);
  const auto x = inputs(c.k);
  const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
  device::DeviceBuffer y(stream.context(), static_cast<size_t>(c.n) * 4);
  std::vector<float> got(static_cast<size_t>(c.n));
  multiplier.multiply(made, input.as<__half>(), 1, y.as<float>());
  y.download(std::as_writable_bytes(std::span(got)), stream);
  stream.synchronize();
  EXPECT_LT(relative_error(got, products(all, x, 1)), 1.5e-3);
}

TEST_F(TrellisGpu, GatesAboveUpsAreMultipliedInTheProduct) {
  const device::Stream stream(test::gpu());
  for (const Case& c : {Case{"trellis3-w16", 512, 1408, 128}, Case{"trellis4-w12", 256, 320, 0, true, true},
                        Case{"trellis2-w16", 384, 256, 64}, Case{"trellis3-w16", 256, 1024, 128}}) {
    const LinearWeight gate = random_linear(c, "gate", c.n, 1), up = random_linear(c, "up", c.n, 2);
    UploadRing ring(stream);
    const CudaLinear made = upload_gated(gate, up, ring);
    ring.finish();
    EXPECT_EQ(made.gates(), kernels::GateOrder::halves);
    const LinearWeight* const both_linears[] = {&gate, &up};
    for (const int64_t m : {1, 5}) {
      const CudaLinear* const used[] = {&made};
      CudaMultiplier multiplier(used, m, stream);
      const auto x = inputs(m * c.k);
      const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
      device::DeviceBuffer both(stream.context(), static_cast<size_t>(m * made.n) * 2);
      device::DeviceBuffer y(stream.context(), static_cast<size_t>(m * c.n) * 2);
      std::vector<uint16_t> halves(static_cast<size_t>(m * c.n));
      multiplier.multiply_gated(made, input.as<__half>(), m, both.as<__half>(), y.as<__half>());
      y.download(std::as_writable_bytes(std::span(halves)), stream);
      stream.synchronize();
      const auto sums = products(both_linears, x, m);
      std::vector<double> expected;
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t i = 0; i < c.n; ++i) {
          const double g = sums[static_cast<size_t>(r * made.n + i)];
          expected.push_back(g / (1 + std::exp(-g)) * sums[static_cast<size_t>(r * made.n + c.n + i)]);
        }
      }
      std::vector<float> got(halves.size());
      std::ranges::transform(halves, got.begin(), f32_from_f16);
      EXPECT_LT(relative_error(got, expected), 3e-3) << c.scheme << ", " << m;  // of both factors
    }
  }
}

TEST_F(TrellisGpu, DecodingIsTheDefinition) {
  const device::Stream stream(test::gpu());
  for (const auto& [scheme_name, n, k] : {std::tuple{"trellis2-w8", 128, 64},
                                          {"trellis3-w16", 300, 200},
                                          {"trellis4-w11", 130, 1000},
                                          {"trellis3-w14", 129, 33},
                                          {"trellis2-w14", 128, 64},
                                          {"trellis4-w14", 130, 100}}) {
    const auto scheme = formats::parse_scheme(scheme_name);
    const PackedWeight canonical = random_trellis(scheme, n, k, 5);
    const PackedWeight packed = repack::layout_row("trellis-fragment").pack(canonical);
    const auto codes = device::DeviceBuffer::copy_of(packed.plane(PlaneRole::codes).bytes.bytes(), stream);
    const auto scales = device::DeviceBuffer::copy_of(packed.plane(PlaneRole::scales).bytes.bytes(), stream);
    for (const int64_t first : {0, 64}) {
      const int64_t count = n - first;
      device::DeviceBuffer out(stream.context(), static_cast<size_t>(count * k) * 4);
      kernels::trellis::dequantize({scheme, n, k, codes.as<uint32_t>(), scales.data(), 0x1p-7f}, first, count,
                                   {out.data(), DType::f32, k}, stream);
      std::vector<float> got(static_cast<size_t>(count * k)), row(static_cast<size_t>(k));
      out.download(std::as_writable_bytes(std::span(got)), stream);
      stream.synchronize();
      for (int64_t r = 0; r < count; ++r) {
        formats::scheme_row(scheme.family).decode_row(canonical, first + r, row);
        EXPECT_EQ(std::memcmp(row.data(), got.data() + r * k, row.size() * 4), 0)
            << scheme_name << ", row " << first + r;
      }
    }
  }
}

/// Also f16, whose weights are computed two at a time where u is a power of two, and not where it is none.
TEST_F(TrellisGpu, SixteenBitsAreOneRoundingOfTheDefinition) {
  const device::Stream stream(test::gpu());
  for (const auto& [scheme_name, n, k] :
       {std::tuple{"trellis2-w8", 128, 64}, {"trellis3-w16", 300, 200}, {"trellis4-w11", 130, 1001}}) {
    const auto scheme = formats::parse_scheme(scheme_name);
    const PackedWeight packed = repack::layout_row("trellis-fragment").pack(random_trellis(scheme, n, k, 6));
    const auto codes = device::DeviceBuffer::copy_of(packed.plane(PlaneRole::codes).bytes.bytes(), stream);
    const auto scales = device::DeviceBuffer::copy_of(packed.plane(PlaneRole::scales).bytes.bytes(), stream);
    const auto count = static_cast<size_t>(n * k);
    const auto decode = [&](float unit, DType dtype, std::span<std::byte> to) {
      device::DeviceBuffer out(stream.context(), to.size());
      kernels::trellis::dequantize({scheme, n, k, codes.as<uint32_t>(), scales.data(), unit}, 0, n,
                                   {out.data(), dtype, k}, stream);
      out.download(to, stream);
      stream.synchronize();
    };
    for (const float unit : {0x1p-7f, 0x1.8p-7f, 0x1p-14f, 0x1p5f, 0x1p-20f}) {
      std::vector<float> exact(count);
      std::vector<uint16_t> half(count), brain(count);
      decode(unit, DType::f32, std::as_writable_bytes(std::span(exact)));
      decode(unit, DType::f16, std::as_writable_bytes(std::span(half)));
      decode(unit, DType::bf16, std::as_writable_bytes(std::span(brain)));
      size_t wrong = 0;
      for (size_t i = 0; i < count; ++i) {
        if (half[i] != f16_from_f32(exact[i]) || brain[i] != bf16_from_f32(exact[i])) ++wrong;
      }
      EXPECT_EQ(wrong, 0u) << scheme_name << ", u = " << unit;
    }
  }
}

TEST_F(TrellisGpu, LaunchesThatOverlapMakeTheSameEveryTime) {
  const device::Stream stream(test::gpu());
  const Case c{"trellis3-w16", 512, 512, 128};
  const LinearWeight linear = random_linear(c, "square", c.n, 1);
  const LinearWeight* const layers[] = {&linear};
  const CudaLinear made = upload_linears(layers, stream);
  const CudaLinear* const used[] = {&made};
  for (const int64_t m : {1, 7, 16}) {
    CudaMultiplier multiplier(used, m, stream);
    const auto x = inputs(m * c.k);
    const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
    device::DeviceBuffer sums(stream.context(), static_cast<size_t>(m * c.n) * 4);
    std::vector<float> expected(static_cast<size_t>(m * c.n)), got(expected.size());
    const auto run = [&](std::vector<float>& to) {
      sums.download(std::as_writable_bytes(std::span(to)), stream);
      stream.synchronize();
    };
    const auto add_six = [&] {
      for (int i = 0; i < 6; ++i) multiplier.multiply_residual(made, input.as<__half>(), m, sums.as<float>());
    };
    multiplier.set_overlap(false);
    sums.fill(0, stream);
    add_six();
    run(expected);
    multiplier.set_overlap(true);
    const device::Graph graph(stream, add_six);
    for (int i = 0; i < 20; ++i) {
      sums.fill(0, stream);
      graph.launch(stream);
      run(got);
      EXPECT_EQ(got, expected) << m << " rows";
    }
  }
}

}  // namespace
}  // namespace w4q::decoder_cuda
