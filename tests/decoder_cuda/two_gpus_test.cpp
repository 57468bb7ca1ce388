// Two GPUs in one process: decoders on both give the same tokens and, on GPUs of one kind, the same bits, whether one
// thread drives them by turns or each has its own.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <numeric>
#include <thread>

#include "decoder_cuda/decoder.h"
#include "device/properties.h"
#include "gpu.h"
#include "model/shapes.h"
#include "support.h"

namespace w4q::decoder_cuda {
namespace {

constexpr int steps = 24;

class TwoGpus : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why, 1)) GTEST_SKIP() << "needs two GPUs: " << why;
    for (int i = 0; i < 2; ++i) gpus.push_back(std::make_unique<device::Context>(i));
  }
  bool of_one_kind() const {
    const auto &a = gpus[0]->properties(), &b = gpus[1]->properties();
    return a.name == b.name && a.multiprocessors == b.multiprocessors;
  }
  /// Calls work(GPU) for both, each in a thread of its own.
  template <class Work>
  void in_threads(const Work& work) {
    std::thread other([&] { work(1); });
    work(0);
    other.join();
  }

  std::vector<std::unique_ptr<device::Context>> gpus;
};

/// A decoder, and what it has drawn.
struct Side {
  Side(const CudaModel& model, const CudaDecoderOptions& options) : decoder(model, options) {}
  void start(const std::vector<int32_t>& prompt) {
    decoder.start(prompt, {.temperature = 1, .seed = 5});
    tokens = {decoder.token(0)};
  }
  void step() {
    decoder.step();
    tokens.push_back(decoder.token(static_cast<int64_t>(tokens.size())));
  }

  CudaDecoder decoder;
  std::vector<int32_t> tokens;
};

std::vector<int32_t> prompt_of(int64_t length, int64_t vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(length));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>((7 + 31 * i) % static_cast<size_t>(vocab));
  return ids;
}

TEST_F(TwoGpus, DecodeTheSameTokens) {
  const model::Model model = model::Model::open(test::testdata() / "w4q-llama-tiny");
  const auto prompt = prompt_of(20, model.config().vocab_size);
  const std::array models{CudaModel::upload(*gpus[0], model), CudaModel::upload(*gpus[1], model)};
  EXPECT_EQ(&models[1].context(), gpus[1].get());
  for (const bool graph : {true, false}) {
    std::vector<std::vector<int32_t>> tokens;
    // By turns from one thread, then each in its own.
    std::array turns{std::make_unique<Side>(models[0], CudaDecoderOptions{.capacity = 64, .graph = graph}),
                     std::make_unique<Side>(models[1], CudaDecoderOptions{.capacity = 64, .graph = graph})};
    for (auto& side : turns) side->start(prompt);
    for (int i = 0; i < steps; ++i) {
      for (auto& side : turns) side->step();
    }
    for (auto& side : turns) tokens.push_back(side->tokens);
    tokens.resize(4);
    in_threads([&](size_t gpu) {
      Side side(models[gpu], {.capacity = 64, .graph = graph});
      side.start(prompt);
      for (int i = 0; i < steps; ++i) side.step();
      tokens[2 + gpu] = side.tokens;
    });
    for (const auto& others : tokens) EXPECT_EQ(others, tokens[0]);
  }
}

/// Every family of kernels: products of one row and of many (GEMV, GEMM, warpgroups or decoding and cuBLAS), with norms
/// inside them and without, attention over every type of cache.
TEST_F(TwoGpus, KernelsOfEveryFamilyGiveTheSameBits) {
  if (!of_one_kind()) GTEST_SKIP() << "different GPUs add up in different orders";
  model::ModelConfig shape = model::named_shape("llama3-1b");
  shape.layers = 2;
  shape.vocab_size = 1000;
  const auto ids = prompt_of(300, shape.vocab_size);
  for (const char* scheme : {"", "kbit3-b32-e4m4", "int4-g128-f16", "int8-g128-f16", "rotated4-d128+rotated3-d128"}) {
    const auto passes = *scheme == 0 ? std::vector<formats::Scheme>() : formats::parse_schemes(scheme);
    std::array<std::vector<float>, 2> logits;
    in_threads([&](size_t gpu) {
      const CudaModel model = CudaModel::random(*gpus[gpu], shape, passes);
      for (const kernels::KvType type : kernels::kv_types) {
        CudaDecoder decoder(model, {.capacity = 512, .kv = type});
        for (const size_t chunk : {1, 17, 100, 300}) {
          decoder.reset();
          decoder.forward(std::span(ids).first(chunk));
          auto& all = logits[gpu];
          all.resize(all.size() + static_cast<size_t>(shape.vocab_size));
          decoder.logits(static_cast<int64_t>(chunk) - 1,
                         {all.data() + all.size() - shape.vocab_size, 1, shape.vocab_size, shape.vocab_size});
        }
      }
    });
    EXPECT_EQ(logits[0], logits[1]) << scheme;
  }
}

}  // namespace
}  // namespace w4q::decoder_cuda
