// Heads that are arranged by a launch of their own, and plain attention, against the CPU's.
#include "kernels/attention/heads_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "core/rng.h"
#include "device/properties.h"
#include "device_values.h"
#include "gpu.h"
#include "kernels/attention/attention.h"
#include "kernels/elementwise/elementwise.h"
#include "random_matrix.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using test::floats;
using test::from_device;
using test::on_device;
using test::RandomMatrix;

struct Case {
  const char* name;
  int heads, kv_heads, head_dim;
  AttentionOptions options = {};
  int pairs = 0;
  bool neighbours = false, norms = false, whole_norms = false, value_norm = false, keys_are_values = false;
  float query_scale = 1, temperature = 0, clip = 0;
};

const Case cases[] = {
    {.name = "plain", .heads = 4, .kv_heads = 2, .head_dim = 64},
    {.name = "window", .heads = 4, .kv_heads = 1, .head_dim = 32, .options = {.window = 9}},
    {.name = "cap", .heads = 4, .kv_heads = 2, .head_dim = 48, .options = {.scale = 0.3, .soft_cap = 4}},
    {.name = "wide", .heads = 2, .kv_heads = 1, .head_dim = 512, .pairs = 64, .norms = true, .value_norm = true},
    {.name = "odd_width", .heads = 3, .kv_heads = 3, .head_dim = 250, .options = {.window = 30, .scale = 0.05}},
    {.name = "neighbours", .heads = 4, .kv_heads = 2, .head_dim = 128, .pairs = 32, .neighbours = true},
    {.name = "whole_norms", .heads = 4, .kv_heads = 2, .head_dim = 32, .pairs = 16, .norms = true, .whole_norms = true},
    {.name = "keys_are_values",
     .heads = 4,
     .kv_heads = 2,
     .head_dim = 64,
     .pairs = 32,
     .norms = true,
     .value_norm = true,
     .keys_are_values = true},
    {.name = "scaled",
     .heads = 2,
     .kv_heads = 1,
     .head_dim = 64,
     .pairs = 16,
     .query_scale = 0.5F,
     .temperature = 0.3F},
    {.name = "clip",
     .heads = 4,
     .kv_heads = 2,
     .head_dim = 32,
     .pairs = 16,
     .norms = true,
     .whole_norms = true,
     .clip = 0.75F},
};
constexpr int64_t length = 75, temperature_length = 8;
constexpr float eps = 1e-6F;

std::vector<float> some(size_t count, uint64_t seed, float middle = 0) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = middle + 0.3F * static_cast<float>(random_normal(seed, i));
  return values;
}

/// What the model says, on the CPU.
class Definition {
 public:
  explicit Definition(const Case& c)
      : own(c),
        products(length, c.heads * c.head_dim + (c.keys_are_values ? 1 : 2) * c.kv_heads * c.head_dim, 5),
        cosine(static_cast<size_t>(length * std::max(c.pairs, 1))),
        sine(cosine.size()),
        sinks(some(static_cast<size_t>(c.heads), 9)) {
    for (size_t i = 0; i < cosine.size(); ++i) {
      cosine[i] = std::cos(0.01F * static_cast<float>(i)), sine[i] = std::sin(0.01F * static_cast<float>(i));
    }
    const int64_t query_norm = c.whole_norms ? c.heads * c.head_dim : c.head_dim;
    const int64_t key_norm = c.whole_norms ? c.kv_heads * c.head_dim : c.head_dim;
    q_norm = some(static_cast<size_t>(query_norm), 6, 1), k_norm = some(static_cast<size_t>(key_norm), 7, 1);
    arrange();
  }

  std::vector<float> attended(std::span<const float> chosen_sinks) {
    std::vector<float> out(q.size());
    AttentionOptions options = own.options;
    options.sinks = chosen_sinks;
    const KeyValueCache cache{keys.data(), values.data(), own.kv_heads, length, own.head_dim};
    append(cache, 0, view(k), view(v));
    attention(view(q), cache, 0, options, {out.data(), length, int64_t{own.heads} * own.head_dim});
    return out;
  }

  MatrixView<float> view(std::vector<float>& rows) {
    return {rows.data(), length, static_cast<int64_t>(rows.size()) / length};
  }

  const Case& own;
  RandomMatrix products;
  std::vector<float> cosine, sine, sinks, q_norm, k_norm, q, k, v, keys, values;

 private:
  void arrange() {
    const int64_t dim = own.head_dim, queries = own.heads * dim, width = own.kv_heads * dim;
    for (int64_t r = 0; r < length; ++r) {
      const float* const row = products.row(r);
      q.insert(q.end(), row, row + queries);
      k.insert(k.end(), row + queries, row + queries + width);
      const float* const from = own.keys_are_values ? row + queries : row + queries + width;
      v.insert(v.end(), from, from + width);
    }
    if (own.norms) rms_norm_heads(view(q), q_norm, eps), rms_norm_heads(view(k), k_norm, eps);
    const std::vector<float> ones(static_cast<size_t>(dim), 1);
    if (own.value_norm) rms_norm_heads(view(v), ones, eps);
    for (auto* rows : {&q, &k, &v}) {
      for (float& value : *rows) value = own.clip > 0 ? std::clamp(value, -own.clip, own.clip) : value;
    }
    if (own.pairs > 0) {
      const auto turn = own.neighbours ? rotate_neighbours : rotate_heads;
      for (auto* rows : {&q, &k}) {
        turn(view(*rows), dim, {cosine.data(), length, own.pairs}, {sine.data(), length, own.pairs});
      }
    }
    for (int64_t r = 0; r < length; ++r) {
      const auto passed = static_cast<float>(1 + r / temperature_length);
      const float factor = own.query_scale * (1 + own.temperature * std::log(passed));
      for (int64_t c = 0; c < queries; ++c) view(q).row(r)[c] *= factor;
    }
    keys.resize(k.size()), values.resize(v.size());
  }
};

/// The same on the GPU, a few rows after the others.
class OnGpu {
 public:
  OnGpu(Definition& definition, const device::Stream& stream_)
      : stream(stream_),
        own(definition.own),
        products(on_device(definition.products.values, stream)),
        cosine(on_device(definition.cosine, stream)),
        sine(on_device(definition.sine, stream)),
        q_norm(on_device(definition.q_norm, stream)),
        k_norm(on_device(definition.k_norm, stream)),
        sinks(on_device(definition.sinks, stream)),
        stride(definition.products.view().cols) {
    const int64_t pages = (length + kv_page_tokens - 1) / kv_page_tokens;
    std::vector<int32_t> places(static_cast<size_t>(pages));
    std::iota(places.rbegin(), places.rend(), 0);
    table = on_device(places, stream);
    const auto bytes =
        static_cast<size_t>(pages * own.kv_heads * kv_head_page_bytes(KvType::f16, kv_padded_dim(own.head_dim)));
    keys = test::poisoned(bytes, stream), values = test::poisoned(bytes, stream);
    layer = {keys.data(), values.data(), table.as<int32_t>(), KvType::f16, own.kv_heads, own.head_dim};
    arranged = test::poisoned(static_cast<size_t>(length * (own.heads + 2 * own.kv_heads) * own.head_dim) * 4, stream);
    out = test::poisoned(static_cast<size_t>(length * own.heads * own.head_dim) * 2, stream);
  }

  /// Rows first … first + rows − 1; `position` says where the first stands, or it is told on the host.
  void run(int64_t first, int64_t rows, const int32_t* position, bool with_sinks) {
    const int64_t width = int64_t{own.heads + 2 * own.kv_heads} * own.head_dim;
    ArrangeHeadsArgs args;
    args.products = products.as<float>() + first * stride;
    args.rows = rows, args.stride = stride;
    args.heads = own.heads, args.kv_heads = own.kv_heads, args.head_dim = own.head_dim;
    args.keys_at = int64_t{own.heads} * own.head_dim;
    args.values_at = own.keys_are_values ? args.keys_at : args.keys_at + int64_t{own.kv_heads} * own.head_dim;
    const int64_t table_row = position == nullptr ? first : 0;
    args.rotation = {.cosine = cosine.as<float>() + table_row * own.pairs,
                     .sine = sine.as<float>() + table_row * own.pairs,
                     .pairs = own.pairs,
                     .eps = eps};
    if (own.norms) args.rotation.q_norm = q_norm.as<float>(), args.rotation.k_norm = k_norm.as<float>();
    args.neighbours = own.neighbours, args.whole_norms = own.whole_norms, args.value_norm = own.value_norm;
    args.clip = own.clip, args.query_scale = own.query_scale, args.temperature = own.temperature;
    args.temperature_length = temperature_length;
    args.first = position == nullptr ? first : 0, args.position = position;
    args.out = arranged.as<float>() + first * width;
    args.store = &layer;
    arrange_heads_cuda(args, stream);
    PlainAttentionArgs attending;
    attending.qkv = {args.out, rows, width, own.heads};
    attending.layer = layer;
    attending.first = args.first, attending.position = position;
    attending.window = own.options.window;
    const double usual = 1 / std::sqrt(static_cast<double>(own.head_dim));
    attending.scale = static_cast<float>(own.options.scale == 0 ? usual : own.options.scale);
    attending.soft_cap = static_cast<float>(own.options.soft_cap);
    if (with_sinks) attending.sinks = sinks.as<float>();
    attending.out = out.as<__half>() + first * own.heads * own.head_dim;
    plain_attention_cuda(attending, stream);
  }
  std::vector<float> result() {
    return floats(from_device<uint16_t>(out, static_cast<size_t>(length * own.heads * own.head_dim), stream));
  }

  const device::Stream& stream;
  const Case& own;
  device::DeviceBuffer products, cosine, sine, q_norm, k_norm, sinks, table, keys, values, arranged, out;
  int64_t stride;
  PagedLayer layer;
};

/// Keys, values and results are rounded to f16, of values of a few units.
constexpr double tolerance = 6e-3;

void expect_near(const std::vector<float>& found, const std::vector<float>& expected, const Case& c) {
  ASSERT_EQ(found.size(), expected.size());
  double largest = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_TRUE(std::isfinite(found[i])) << c.name << " " << i;
    largest = std::max(largest, std::abs(double{found[i]} - double{expected[i]}));
  }
  EXPECT_LE(largest, tolerance) << c.name;
}

class HeadsCuda : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

TEST_P(HeadsCuda, ManyRowsAttendAsOnTheCpu) {
  const device::Stream stream(test::gpu());
  for (const bool with_sinks : {false, true}) {
    Definition definition(GetParam());
    OnGpu gpu(definition, stream);
    gpu.run(0, 40, nullptr, with_sinks);
    gpu.run(40, length - 40, nullptr, with_sinks);
    expect_near(gpu.result(),
                definition.attended(with_sinks ? std::span<const float>(definition.sinks) : std::span<const float>{}),
                GetParam());
  }
}

TEST_P(HeadsCuda, SingleRowsTakeTheirPositionFromTheGpu) {
  const device::Stream stream(test::gpu());
  Definition definition(GetParam());
  OnGpu gpu(definition, stream);
  for (int64_t row = 0; row < length; ++row) {
    const auto at = on_device(std::vector<int32_t>{static_cast<int32_t>(row)}, stream);
    gpu.run(row, 1, at.as<int32_t>(), true);
    stream.synchronize();
  }
  expect_near(gpu.result(), definition.attended(definition.sinks), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Attention, HeadsCuda, testing::ValuesIn(cases),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace w4q::kernels
