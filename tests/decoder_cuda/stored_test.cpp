// Packed weights that go to the GPU as they stand in a checkpoint: the planes, the logits and the errors of those that
// are brought to the canonical layout and packed anew.
#include "decoder_cuda/stored.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

#include "checkpoint/packed_checkpoint.h"
#include "core/convert.h"
#include "core/progress.h"
#include "core/rng.h"
#include "core/text.h"
#include "decoder_cuda/decoder.h"
#include "device/copy.h"
#include "dialect_samples.h"
#include "gpu.h"
#include "laws/registries.h"
#include "model/reference_logits.h"
#include "pipeline/quantize_model.h"
#include "pipeline/repack_model.h"
#include "support.h"

namespace w4q::decoder_cuda {
namespace {

using formats::PackedLinear;
using formats::PackedWeight;
using formats::PlaneRole;
using kernels::DevicePass;
using kernels::LinearWeight;

class StoredPlanes : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

PackedWeight canonical_weight(const formats::Scheme& scheme, int64_t n, int64_t k, uint64_t seed) {
  if (scheme.family == formats::SchemeFamily::integer) {
    PackedWeight weight = test::sample_integer(scheme, n, k, seed);
    if (scheme.act_order) {
      // The same order of inputs for all, so that they stack; every group has its number of them.
      const auto groups = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
      const auto size = static_cast<int32_t>(formats::integer_group_size(scheme, k));
      for (size_t i = 0; i < groups.size(); ++i) groups[i] = static_cast<int32_t>(i * 3 % groups.size()) / size;
    }
    return weight;
  }
  std::vector<float> values = test::sample(test::distributions[1], n, k, seed);
  return test::encoded(scheme, values, n, k);
}

/// One linear, canonical and as it would stand in a checkpoint.
struct Pair {
  LinearWeight canonical, stored;
};

LinearWeight linear_of(const std::string& name, const PackedLinear& linear, std::vector<float> bias) {
  const auto& first = linear.passes.front();
  PackedLinear copy{name, linear.source_dtype, {}, linear.input_scale, linear.rotations};
  for (const auto& pass : linear.passes) copy.passes.push_back(pass.clone());
  return {name, first.n, first.k, std::make_shared<const PackedLinear>(std::move(copy)), std::move(bias)};
}

Pair make_pair(const std::string& name, PackedLinear linear, std::string_view layout, bool biased = false) {
  linear.name = name;
  const int64_t n = linear.passes.front().n;
  std::vector<float> bias;
  for (int64_t i = 0; biased && i < n; ++i) bias.push_back(static_cast<float>(i) + static_cast<float>(n));
  LinearWeight canonical = linear_of(name, linear, bias);
  for (auto& pass : linear.passes) pass = repack::layout_row(layout).pack(pass);
  return {std::move(canonical), linear_of(name, linear, std::move(bias))};
}

std::vector<std::byte> read(const void* from, size_t bytes, const device::Stream& stream) {
  std::vector<std::byte> result(bytes);
  if (bytes > 0) device::copy(device::Way::from_gpu, result.data(), from, bytes, stream, "reading planes");
  stream.synchronize();
  return result;
}

/// The bytes of the planes of a pass in GPU memory.
std::vector<std::vector<std::byte>> planes_of(const DevicePass& pass, const device::Stream& stream) {
  std::vector<std::vector<std::byte>> planes;
  if (pass.layout == kernels::f16_rows) return {read(pass.codes, static_cast<size_t>(pass.n * pass.k) * 2, stream)};
  for (const auto& spec : repack::layout_row(pass.layout).planes(pass.scheme, pass.n, pass.k)) {
    auto size = static_cast<size_t>(byte_count(spec.dtype, spec.shape));
    // Of FP8 a GPU has two floats a tile.
    const bool by_tiles = pass.layout == "float-fragment" && pass.scheme.bits == 8 && pass.scheme.block != 32;
    if (by_tiles && spec.role == PlaneRole::scales) {
      size = static_cast<size_t>((pass.n + 63) / 64 * ((pass.k + 63) / 64)) * 2 * sizeof(float);
    }
    if (spec.role == PlaneRole::codes) planes.push_back(read(pass.codes, size, stream));
    if (spec.role == PlaneRole::scales) planes.push_back(read(pass.scales, size, stream));
    if (spec.role == PlaneRole::zeros) planes.push_back(read(pass.zeros, size, stream));
    // A computed code has its table's stretch in table_max, and no table.
    const bool has_table = spec.role == PlaneRole::codebook && pass.codebook != nullptr;
    if (has_table) planes.push_back(read(pass.codebook, size, stream));
    if (spec.role == PlaneRole::group_index) planes.push_back(read(pass.input_order, size, stream));
  }
  if (pass.output_factors != nullptr) {
    planes.push_back(read(pass.output_factors, static_cast<size_t>(pass.n) * sizeof(float), stream));
  }
  return planes;
}

void expect_same_pass(const DevicePass& got, const DevicePass& expected, const device::Stream& stream,
                      const std::string& what) {
  EXPECT_EQ(got.n, expected.n) << what;
  EXPECT_EQ(got.scale_max, expected.scale_max) << what;
  EXPECT_EQ(got.table_max, expected.table_max) << what;
  EXPECT_EQ(got.table_stretch, expected.table_stretch) << what;
  EXPECT_EQ(got.product_stretch, expected.product_stretch) << what;
  EXPECT_EQ(got.table_over_first, expected.table_over_first) << what;
  if (got.layout != expected.layout) return;
  EXPECT_EQ(planes_of(got, stream), planes_of(expected, stream)) << what;
}

/// Everything of a linear on the GPU but where it is. Layouts may differ where both have kernels.
void expect_same(const CudaLinear& got, const CudaLinear& expected, const device::Stream& stream,
                 const std::string& what) {
  EXPECT_EQ(got.names, expected.names) << what;
  EXPECT_EQ(got.gates(), expected.gates()) << what;
  EXPECT_EQ(got.widened, expected.widened) << what;
  ASSERT_EQ(got.products.size(), expected.products.size()) << what;
  for (size_t i = 0; i < got.products.size(); ++i) {
    const CudaProduct &a = got.products[i], &b = expected.products[i];
    EXPECT_EQ(a.first, b.first) << what;
    EXPECT_EQ(a.n(), b.n()) << what;
    const auto *bias = a.linear.bias, *other_bias = b.linear.bias;
    ASSERT_EQ(bias == nullptr, other_bias == nullptr) << what;
    const auto floats = static_cast<size_t>(a.n()) * 4;
    if (bias != nullptr) {
      EXPECT_EQ(read(bias, floats, stream), read(other_bias, floats, stream)) << what;
    }
    const auto &passes = a.linear.passes, &others = b.linear.passes;
    ASSERT_EQ(passes.size(), others.size()) << what;
    for (size_t p = 0; p < passes.size(); ++p) expect_same_pass(passes[p], others[p], stream, what);
  }
}

/// Stacked below one another, and as gate and up in turn.
void expect_same_uploads(const std::vector<Pair>& pairs, UploadRing& ring, const std::string& what) {
  const device::Stream& stream = ring.stream();
  std::vector<const LinearWeight*> canonical, stored;
  for (const auto& pair : pairs) canonical.push_back(&pair.canonical), stored.push_back(&pair.stored);
  expect_same(upload_linears(stored, ring), upload_linears(canonical, ring), stream, what);
  const CudaLinear turned = upload_gated(pairs[0].stored, pairs[1].stored, ring);
  const CudaLinear expected = upload_gated(pairs[0].canonical, pairs[1].canonical, ring);
  ring.finish();
  expect_same(turned, expected, stream, what + ", gated");
}

struct Sizes {
  int64_t first, second, third, k;
};
/// Whole tiles, and what has padding. The first two are gate and up where they are of one size.
constexpr Sizes sizes[] = {{128, 128, 64, 256}, {192, 64, 320, 512}, {100, 100, 64, 200}, {64, 64, 33, 256}};

TEST_F(StoredPlanes, AreThoseOfPackingCanonicalOnesAnew) {
  const device::Stream stream(test::gpu());
  UploadRing ring(stream);
  for (const auto& [scheme, layout] : test::every_scheme_and_layout()) {
    if (scheme.family == formats::SchemeFamily::rotated) continue;  // behind a rotation: below
    for (const auto& size : sizes) {
      if (!repack::layout_row(layout).accepts(scheme, size.first, size.k, nullptr)) continue;
      std::vector<Pair> pairs;
      for (const int64_t n : {size.first, size.second, size.third}) {
        PackedLinear linear{"", DType::bf16, {}};
        linear.passes.push_back(canonical_weight(scheme, n, size.k, static_cast<uint64_t>(pairs.size())));
        pairs.push_back(make_pair(concat("linear.", pairs.size()), std::move(linear), layout, n == size.third));
      }
      expect_same_uploads(pairs, ring, concat(layout, " ", to_string(scheme), ", k = ", size.k));
    }
  }
}

/// What kernels of interleaved words read is not what canonical weights are packed to: held against the CPU's packing.
TEST_F(StoredPlanes, InterleavedWordsAreThoseOfTheStack) {
  const device::Stream stream(test::gpu());
  for (const char* name : {"int4-g32-f16", "int4-g128-f16", "int4-g64-f16-asym"}) {
    const auto scheme = formats::parse_scheme(name);
    std::vector<Pair> pairs;
    std::vector<PackedWeight> weights;
    for (const uint64_t seed : {1, 2}) {
      weights.push_back(canonical_weight(scheme, 128, 256, seed));
      PackedLinear linear{"", DType::bf16, {}};
      linear.passes.push_back(weights.back().clone());
      pairs.push_back(make_pair("linear", std::move(linear), "interleaved"));
    }
    const PackedWeight* const both[] = {&weights[0], &weights[1]};
    const auto expect_packed = [&](const CudaLinear& linear, int64_t rows_in_turn) {
      const DevicePass pass = linear.products.front().linear.passes.front();
      ASSERT_EQ(pass.layout, "interleaved");
      const auto planes = planes_of(pass, stream);
      const auto packed = repack::layout_row("interleaved").pack(stack(both, rows_in_turn));
      for (size_t i = 0; i < planes.size(); ++i) {
        EXPECT_TRUE(same_bytes(planes[i], packed.planes[i].bytes.bytes())) << name << ", plane " << i;
      }
    };
    const LinearWeight* const stored[] = {&pairs[0].stored, &pairs[1].stored};
    expect_packed(upload_linears(stored, stream), 0);
    UploadRing ring(stream);
    const CudaLinear turned = upload_gated(pairs[0].stored, pairs[1].stored, ring);
    EXPECT_EQ(turned.gates(), kernels::GateOrder::turns);
    EXPECT_TRUE(fuses(turned));
    ring.finish();
    expect_packed(turned, 8);
  }
}

TEST_F(StoredPlanes, OfRotatedPassesAreThoseOfCanonicalOnes) {
  const device::Stream stream(test::gpu());
  UploadRing ring(stream);
  for (const auto& [name, layout] : {std::pair{"rotated4-d64", "rotated-fragment"},
                                     {"rotated2-d128", "rotated-fragment"},
                                     {"rotated3-d32-e4m4", "rotated-fragment"},
                                     {"rotated5-d128-f32", "rotated-fragment"},
                                     {"rotated4-row", "rotated-fragment"},
                                     {"kbit4-b32-e4m4", "kbit-fragment"},
                                     {"kbit3-b32-f16", "kbit-fragment"}}) {
    const auto scheme = formats::parse_scheme(name);
    for (const auto& size : sizes) {
      std::vector<Pair> pairs;
      for (const int64_t n : {size.first, size.second, size.third}) {
        PackedLinear linear{"", DType::bf16, {}};
        for (uint64_t pass = 0; pass < 2; ++pass) {
          linear.passes.push_back(canonical_weight(scheme, n, size.k, 3 * pairs.size() + pass));
          linear.rotations.emplace_back(formats::Rotation{64, 7}, size.k);
        }
        linear.input_scale.assign(static_cast<size_t>(size.k), 1.5f);
        pairs.push_back(make_pair(concat("linear.", pairs.size()), std::move(linear), layout));
      }
      expect_same_uploads(pairs, ring, concat(name, ", k = ", size.k));
    }
  }
}

/// Whether anything of a model goes up as it stands.
int64_t count_stored(const model::Model& model) {
  int64_t count = 0;
  for (const auto& layer : model.layers()) {
    for (const auto& weight : layer.linears) {
      const auto* packed = std::get_if<std::shared_ptr<const PackedLinear>>(&weight.matrix);
      if (packed != nullptr && goes_as_stored(test::gpu().properties(), **packed)) ++count;
    }
  }
  return count;
}

std::vector<float> logits_of(const CudaModel& model, const std::vector<int32_t>& ids, size_t chunk) {
  CudaDecoder decoder(model, {.capacity = static_cast<int64_t>(ids.size())});
  const int64_t vocab = model.config().vocab_size;
  std::vector<float> logits(ids.size() * static_cast<size_t>(vocab));
  for (size_t begin = 0; begin < ids.size(); begin += chunk) {
    const size_t count = std::min(chunk, ids.size() - begin);
    decoder.forward(std::span(ids).subspan(begin, count));
    decoder.logits(0, {logits.data() + static_cast<int64_t>(begin) * vocab, static_cast<int64_t>(count), vocab});
  }
  return logits;
}

struct Quantized {
  const char* scheme;
  const char* layout;
  const char* residual = "";
  int64_t rotation = 0;
  bool embeddings = false;
};

void quantize(const Quantized& how, const std::filesystem::path& folder) {
  pipeline::QuantizeRequest request;
  request.model = test::testdata() / "w4q-llama-tiny";
  request.output = folder / "canonical";
  request.scheme = formats::parse_scheme(how.scheme);
  if (request.scheme.family == formats::SchemeFamily::integer) request.method = "rtn";
  if (request.scheme.family == formats::SchemeFamily::rotated) request.method = "rotated";
  if (request.scheme.family == formats::SchemeFamily::trellis) request.method = "trellis";
  if (request.scheme.family == formats::SchemeFamily::small_float) request.method = "float";
  if (*how.residual != '\0') request.residual = {formats::parse_scheme(how.residual)};
  if (how.rotation > 0)
    request.options.steps.add({.kind = quantize::StepKind::rotate, .block = how.rotation, .seed = 7});
  request.lm_head = true;
  request.embeddings = how.embeddings;
  pipeline::quantize_model(request);
  pipeline::RepackRequest repack;
  repack.input = request.output;
  repack.output = folder / "packed";
  repack.layout = how.layout;
  pipeline::repack_model(repack);
}

TEST_F(StoredPlanes, LogitsAreThoseOfCanonicalPlanes) {
  set_progress_enabled(false);
  const test::ReferenceLogits reference(test::testdata() / "w4q-llama-tiny" / "own" / "reference.safetensors");
  for (const Quantized& how : {Quantized{"kbit2-b32-e4m4", "kbit-fragment"},
                               {"kbit3-b32-f16", "kbit-fragment"},
                               {"kbit4-b32-e4m4", "kbit-fragment", "", 0, true},
                               {"kbit5-b32-e4m4", "kbit-fragment"},
                               {"kbit4-b32-e4m4", "kbit-tile"},
                               {"kbit4-b32-e4m4", "kbit-fragment", "", 128},
                               {"int4-g128-f16", "marlin"},
                               {"int4-g32-f16-asym", "marlin"},
                               {"int8-row-f16", "marlin"},
                               {"int4-g128-f16", "gptq"},
                               {"rotated4-d64", "rotated-fragment", "rotated4-d64"},
                               {"rotated3-d128-e4m4", "rotated-fragment"},
                               {"rotated4-d128-f32", "rotated-fragment"},
                               {"trellis3-w10", "trellis-fragment", "", 128},
                               {"nvfp4", "float-fragment"},
                               {"mxfp8", "float-fragment"},
                               {"fp8-tensor", "float-fragment"},
                               {"fp8-block128", "float-fragment"}}) {
    const std::string what = concat(how.scheme, " in ", how.layout, how.rotation > 0 ? ", rotated" : "");
    const test::TemporaryFolder folder;
    quantize(how, folder.path());
    const auto canonical = model::Model::open(folder / "packed");
    const auto stored = model::Model::open(folder / "packed", true, model::Planes::stored);
    const bool as_it_stands = std::string_view(how.layout) != "kbit-tile" && std::string_view(how.layout) != "gptq";
    EXPECT_EQ(count_stored(stored), as_it_stands ? 7 * stored.config().layers : 0) << what;
    std::vector<std::optional<int64_t>> budgets = {std::nullopt};
    if (*how.residual != '\0') budgets.insert(budgets.end(), {0, 300'000});
    for (const auto& budget : budgets) {
      const CudaModel expected = CudaModel::upload(test::gpu(), canonical, budget);
      const CudaModel got = CudaModel::upload(test::gpu(), stored, budget);
      EXPECT_EQ(got.bytes_per_token(), expected.bytes_per_token()) << what;
      for (const size_t chunk : {1, 40, 1 << 20}) {
        EXPECT_EQ(logits_of(got, reference.ids(), chunk), logits_of(expected, reference.ids(), chunk))
            << what << ", chunks of " << chunk;
      }
    }
  }
}

/// Twice what logits by Marlin's words are from the CPU's (decoder_test.cpp): the same roundings, and other sums.
constexpr double interleaved_bound = 5e-2;

TEST_F(StoredPlanes, ADecoderRunsInterleavedWords) {
  set_progress_enabled(false);
  const test::ReferenceLogits reference(test::testdata() / "w4q-llama-tiny" / "own" / "reference.safetensors");
  for (const char* scheme : {"int4-g128-f16", "int4-g32-f16-asym"}) {
    const test::TemporaryFolder folder;
    quantize({scheme, "interleaved"}, folder.path());
    const auto stored = model::Model::open(folder / "packed", true, model::Planes::stored);
    EXPECT_EQ(count_stored(stored), 7 * stored.config().layers);
    const CudaModel on_gpu = CudaModel::upload(test::gpu(), stored);
    for (const auto* linear : linears_of(on_gpu.layers())) {
      EXPECT_EQ(linear->products.front().linear.passes.front().layout, "interleaved");
      EXPECT_TRUE(fuses(*linear));
    }
    const auto expected = test::decode(model::Model::open(folder / "packed"), reference.ids(), {1 << 20});
    for (const size_t chunk : {1, 40, 1 << 20}) {
      EXPECT_LE(test::largest_difference(logits_of(on_gpu, reference.ids(), chunk), expected), interleaved_bound)
          << scheme << ", chunks of " << chunk;
    }
  }
}

TEST_F(StoredPlanes, DenseWeightsAreNarrowedAsOnTheCpu) {
  const device::Stream stream(test::gpu());
  constexpr int64_t n = 70, k = 129;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    std::vector<float> values(static_cast<size_t>(n * k));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(random_normal(3, i)) * std::exp2(static_cast<float>(i % 40) - 30.0f);
    }
    values[5] = 65504.0f;
    values[6] = -0.0f;
    std::vector<std::byte> bytes(values.size() * static_cast<size_t>(dtype_bits(dtype) / 8));
    if (dtype == DType::f32) {
      std::memcpy(bytes.data(), values.data(), bytes.size());
    } else {
      narrow(values, dtype, bytes);
      if (dtype == DType::bf16) values[5] = 0;  // bf16 has 65536 there
      narrow(values, dtype, bytes);
      widen(bytes, dtype, values);
    }
    const auto upload = [&] {
      UploadRing ring(stream);
      const LinearWeight weight{
          "w", n, k, LinearWeight::Dense{TensorView{"w.weight", dtype, {n, k}, bytes}, nullptr}, {}};
      device::DeviceBuffer rows = upload_rows(weight, ring);
      ring.finish();
      return read(rows.data(), rows.size(), stream);
    };
    std::vector<std::byte> expected(values.size() * 2);
    narrow(values, DType::f16, expected);
    EXPECT_EQ(upload(), expected) << dtype_name(dtype);
    // What f16 does not hold is named with its value, the first of them.
    const size_t width = bytes.size() / values.size();
    const float large = dtype == DType::f16 ? INFINITY : 131072.0f;
    for (const size_t at : {values.size() - 1, size_t{4000}}) {
      if (dtype == DType::f32) {
        std::memcpy(bytes.data() + at * width, &large, width);
      } else {
        narrow(std::span(&large, 1), dtype, std::span(bytes).subspan(at * width, width));
      }
      test::expect_error(ErrorCode::unsupported,
                         {concat("w: a weight of ", large, " does not fit f16"), "--device cpu"}, upload);
    }
  }
}

TEST_F(StoredPlanes, TheRingBringsEveryByte) {
  const device::Stream stream(test::gpu());
  UploadRing ring(stream);
  constexpr size_t slot = size_t{8} << 20;
  for (const size_t size : {size_t{1}, size_t{63}, size_t{100'000}, slot - 1, slot, slot + 1, 5 * slot + 77}) {
    std::vector<std::byte> bytes(size);
    for (size_t i = 0; i < size; i += 1 + size / 5000) bytes[i] = static_cast<std::byte>(random_bits(size, i));
    const device::DeviceBuffer buffer = ring.copy_of(bytes);
    EXPECT_EQ(read(buffer.data(), size, stream), bytes) << size;
  }
}

std::string said(const std::function<void()>& check) {
  try {
    check();
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

/// Needs no GPU.
TEST(DamagedStoredPlanes, AreRefusedInTheWordsOfCanonicalOnes) {
  int refused = 0;
  for (const auto& [scheme, layout] : test::every_scheme_and_layout()) {
    if (layout != "kbit-fragment" && layout != "marlin" && layout != "interleaved" && layout != "rotated-fragment" &&
        layout != "trellis-fragment" && layout != "float-fragment") {
      continue;
    }
    PackedLinear linear{"model.layers.0.mlp.up_proj", DType::bf16, {}};
    linear.passes.push_back(repack::layout_row(layout).pack(canonical_weight(scheme, 64, 128, 1)));
    for (uint64_t round = 0; round < 60; ++round) {
      PackedLinear damaged{linear.name, DType::bf16, {}};
      damaged.passes.push_back(linear.passes.front().clone());
      for (auto& plane : damaged.passes.front().planes) {
        if (plane.spec.role == PlaneRole::codes) continue;
        plane.bytes.data()[random_bits(round, 1) % plane.bytes.size()] = static_cast<std::byte>(random_bits(round, 2));
      }
      const std::string canonical = said([&] { checkpoint::to_canonical(damaged); });
      EXPECT_EQ(said([&] { checked_scale(damaged, 0); }), canonical) << layout << " " << to_string(scheme);
      refused += canonical.empty() ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 300);
}

TEST_F(StoredPlanes, OfADamagedFileAreRefused) {
  const device::Stream stream(test::gpu());
  PackedLinear linear{"model.layers.0.mlp.up_proj", DType::bf16, {}};
  const auto scheme = formats::parse_scheme("int4-g64-f16");
  linear.passes.push_back(repack::layout_row("marlin").pack(canonical_weight(scheme, 64, 128, 1)));
  linear.passes.front().plane(PlaneRole::scales).bytes.as<uint16_t>()[3] = 0x7E00;
  const LinearWeight weight = linear_of(linear.name, linear, {});
  const LinearWeight* const one[] = {&weight};
  test::expect_error(ErrorCode::bad_file, {"model.layers.0.mlp.up_proj: plane scales", "not finite", "row 24, group 0"},
                     [&] { upload_linears(one, stream); });
}

}  // namespace
}  // namespace w4q::decoder_cuda
