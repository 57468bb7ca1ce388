// Every architecture that the GPU decodes, 16-bit and packed, against the CPU: prompts, single tokens, replayed steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "decoder_cuda/decoder.h"
#include "decoder_cuda/model.h"
#include "device/properties.h"
#include "gpu.h"
#include "kernels/sampling/logits.h"
#include "model/architecture.h"
#include "model/reference_logits.h"
#include "pipeline/quantize_model.h"
#include "small_model.h"
#include "support.h"

namespace w4q::decoder_cuda {
namespace {

/// As in decoder_test.cpp: what f16 activations may cost. A row whose router chose between two experts by less than that
/// may go another way: so many rows of a mixture may.
constexpr double largest_difference = 2e-2, other_rows = 0.1;

class FamiliesOnGpu : public testing::TestWithParam<const model::ArchitectureRow*> {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
    const auto config = model::parse_config(test::small_config(*GetParam()), "small");
    try {
      require_gpu_decoder(config);
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
    test::write_small_model(*GetParam(), folder_.path() / "m");
  }

  std::filesystem::path packed(std::string_view scheme) {
    pipeline::QuantizeRequest request;
    request.model = folder_.path() / "m";
    request.output = folder_.path() / std::string(scheme);
    request.scheme = formats::parse_scheme(scheme);
    if (request.scheme.family == formats::SchemeFamily::integer) request.method = "rtn";
    pipeline::quantize_model(request);
    return request.output;
  }

  test::TemporaryFolder folder_;
};

std::vector<int32_t> some_ids(int64_t count, int64_t vocabulary) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>((i * 29 + i * i * 7 + 3) % vocabulary));
  return ids;
}

std::vector<float> on_gpu(const CudaModel& model, const std::vector<int32_t>& ids, int64_t first, int64_t chunk) {
  CudaDecoderOptions options;
  options.capacity = static_cast<int64_t>(ids.size());
  CudaDecoder decoder(model, options);
  const int64_t vocab = model.config().vocab_size;
  std::vector<float> logits(ids.size() * static_cast<size_t>(vocab));
  int64_t begin = 0;
  while (begin < std::ssize(ids)) {
    const int64_t count = std::min(begin == 0 ? first : chunk, std::ssize(ids) - begin);
    decoder.forward(std::span(ids).subspan(static_cast<size_t>(begin), static_cast<size_t>(count)));
    decoder.logits(0, {logits.data() + begin * vocab, count, vocab});
    begin += count;
  }
  return logits;
}

void expect_close(const std::vector<float>& found, const std::vector<float>& expected, int64_t vocab, bool mixture,
                  const std::string& what) {
  ASSERT_EQ(found.size(), expected.size());
  int64_t rows = 0, others = 0;
  double worst = 0;
  for (size_t row = 0; row < found.size(); row += static_cast<size_t>(vocab), ++rows) {
    double largest = 0;
    for (size_t i = row; i < row + static_cast<size_t>(vocab); ++i) {
      const double difference = std::abs(double{found[i]} - double{expected[i]});
      largest = std::isfinite(difference) ? std::max(largest, difference) : INFINITY;
    }
    others += largest > largest_difference;
    worst = std::max(worst, largest);
  }
  EXPECT_LE(static_cast<double>(others), mixture ? other_rows * static_cast<double>(rows) : 0.0)
      << what << ": " << others << " of " << rows << " rows, by up to " << worst;
}

TEST_P(FamiliesOnGpu, DecodesAsTheCpu) {
  for (const std::string_view scheme : {"", "kbit4-b32-e4m4", "kbit3-b32-e4m4", "int4-g32-f16"}) {
    const model::Model model = model::Model::open(scheme.empty() ? folder_.path() / "m" : packed(scheme));
    const CudaModel uploaded = CudaModel::upload(test::gpu(), model);
    const auto ids = some_ids(70, model.config().vocab_size);
    const auto expected = test::decode(model, ids, {1 << 20});
    const bool mixture = model.config().mixture.experts > 0;
    const int64_t vocab = model.config().vocab_size;
    expect_close(on_gpu(uploaded, ids, 70, 70), expected, vocab, mixture, concat(scheme, " at once"));
    expect_close(on_gpu(uploaded, ids, 33, 20), expected, vocab, mixture, concat(scheme, " in chunks"));
    expect_close(on_gpu(uploaded, ids, 1, 1), expected, vocab, mixture, concat(scheme, " one by one"));
  }
}

/// Replayed steps draw what single calls have as their largest logit.
TEST_P(FamiliesOnGpu, StepsAreSingleCalls) {
  const model::Model model = model::Model::open(packed("kbit4-b32-e4m4"));
  const CudaModel uploaded = CudaModel::upload(test::gpu(), model);
  auto ids = some_ids(20, model.config().vocab_size);
  CudaDecoderOptions options;
  options.capacity = 64;
  CudaDecoder decoder(uploaded, options);
  decoder.start(ids, {});
  for (int i = 0; i < 12; ++i) {
    decoder.step();
    ids.push_back(decoder.token(i));
  }
  const auto logits = on_gpu(uploaded, ids, 20, 1);
  const auto vocab = static_cast<size_t>(model.config().vocab_size);
  for (size_t i = 0; i < 12; ++i) {
    const auto row = std::span(logits).subspan((19 + i) * vocab, vocab);
    const float drawn = row[static_cast<size_t>(ids[20 + i])];
    EXPECT_GE(drawn, row[static_cast<size_t>(kernels::argmax(row))] - largest_difference) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Decoder, FamiliesOnGpu,
                         testing::ValuesIn(model::architectures().begin(), model::architectures().end()),
                         [](const auto& param) { return test::row_name(param.param); });

TEST(FamilyReferences, GpuAgrees) {
  W4Q_NEEDS_SHARED_DATA();
  std::string why;
  if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  for (const char* name : {"qwen3_5", "qwen3_5-moe", "qwen3-next", "qwen3-moe", "qwen3-vl", "mixtral", "qwen2-moe",
                           "glm4-moe", "mistral3-vision", "qwen3-fp8", "qwen3-nvfp4-ct", "qwen3-int4-ct"}) {
    const auto folder = test::shared_data() / "families" / name;
    const model::Model model = model::Model::open(folder);
    const CudaModel uploaded = CudaModel::upload(test::gpu(), model);
    const test::ReferenceLogits reference(folder / "reference.safetensors");
    expect_close(on_gpu(uploaded, reference.ids(), 96, 96), reference.logits(), model.config().vocab_size,
                 model.config().mixture.experts > 0, name);
  }
}

}  // namespace
}  // namespace w4q::decoder_cuda
