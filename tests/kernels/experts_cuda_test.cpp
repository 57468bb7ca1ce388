// Products of a mixture's experts on the GPU: of one row, whose experts the product chooses, and of many that have been sorted.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/rng.h"
#include "core/text.h"
#include "device/properties.h"
#include "device_values.h"
#include "formats/scheme_registry.h"
#include "gpu.h"
#include "kbit_weight.h"
#include "linear_cuda_check.h"
#include "model/router.h"

namespace w4q::kernels {
namespace {

using test::from_device;
using test::KbitWeight;
using test::on_device;

/// `experts` weights of n × k below one another.
struct Experts {
  int64_t experts, n, k;
  KbitWeight weight;
  DeviceLinear linear;
  LaunchPlan plan;

  Experts(const char* scheme, int64_t experts_, int64_t n_, int64_t k_, const device::Stream& stream)
      : experts(experts_),
        n(n_),
        k(k_),
        weight(formats::parse_scheme(scheme), {experts_ * n_, k_}, 0.05, stream),
        linear{.passes = {weight.on_device()}},
        plan(test::TestWorkspace::plan(linear)) {}

  double product(int64_t expert, int64_t output, const float* x) const {
    const float* const row = weight.decoded().data() + (expert * n + output) * k;
    double sum = 0;
    for (int64_t c = 0; c < k; ++c) sum += double{row[c]} * x[c];
    return sum;
  }
};

double relative_error(const std::vector<float>& got, const std::vector<double>& wanted) {
  EXPECT_EQ(got.size(), wanted.size());
  double error = 0, signal = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
    signal += wanted[i] * wanted[i];
  }
  return std::sqrt(error / signal);
}

class ExpertsCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

struct OneRow {
  int64_t experts, chosen, n, k;
};
/// Few tiles and many: one, two and four are a warp's, or several times as many as it can ask for at once; k of which these
/// are no divisors.
constexpr OneRow one_rows[] = {{8, 2, 64, 192},    {32, 4, 64, 128},  {100, 7, 128, 64},  {128, 8, 64, 256},
                               {256, 10, 64, 128}, {384, 8, 64, 64},  {9, 8, 384, 2048},  {9, 8, 768, 2048},
                               {9, 8, 1536, 2048}, {6, 4, 960, 2880}, {33, 32, 128, 128}, {8, 8, 128, 704}};

TEST_F(ExpertsCuda, OneRowChoosesItsExpertsAndIsMultiplied) {
  const device::Stream stream(test::gpu());
  for (const char* scheme : {"kbit4-b32-e4m4", "kbit3-b32-f16", "kbit5-b32-e4m4", "kbit2-b32-e4m4"}) {
    for (const auto& [experts, chosen, n, k] : one_rows) {
      if (experts * n * k > 4'000'000 && scheme[4] != '4') continue;
      SCOPED_TRACE(concat(scheme, ", ", chosen, " of ", experts, " × ", n, " × ", k));
      const Experts all(scheme, experts, n, k, stream);
      // Many equal ones, zeros of both signs among them: the first of them is chosen.
      std::vector<float> logits;
      for (int64_t i = 0; i < experts; ++i) {
        logits.push_back(static_cast<float>(std::round(4 * random_normal(31, static_cast<uint64_t>(i))) / 4));
      }
      const model::MixtureConfig config{.experts = experts, .chosen = chosen, .renormalizes = true};
      const auto routing = model::route(config, {logits.data(), 1, experts}, {}, {});
      const test::Activations x(1, k, k, DType::f16);
      const auto x_device = on_device(x.bits, stream);
      auto logits_device = on_device(logits, stream);
      const auto places = static_cast<size_t>(chosen);
      auto places_device = test::poisoned(places * 4, stream), shares = test::poisoned(places * 4, stream);
      auto y = test::poisoned(places * static_cast<size_t>(n) * 4, stream);
      test::TestWorkspace workspace(all.linear, 1, stream);
      RoutedCall call{.x = x_device.as<__half>(),
                      .experts = places_device.as<int32_t>(),
                      .places = static_cast<int>(chosen),
                      .n = n,
                      .y = y.data()};
      call.choice = {.logits = logits_device.as<float>(),
                     .rows = 1,
                     .stride = experts,
                     .experts = static_cast<int>(experts),
                     .chosen = static_cast<int>(chosen),
                     .renormalizes = true,
                     .places = places_device.as<int32_t>(),
                     .shares = shares.as<float>()};
      ASSERT_TRUE(routes(all.linear, all.plan, n) && chooses(call.choice));
      multiply_routed(all.linear, all.plan, call, workspace.get(), stream);
      EXPECT_EQ(from_device<int32_t>(places_device, places, stream), routing.experts);
      const auto got_shares = from_device<float>(shares, places, stream);
      for (size_t i = 0; i < places; ++i) EXPECT_NEAR(got_shares[i], routing.shares[i], 1e-6);
      std::vector<double> wanted(places * static_cast<size_t>(n));
      parallel_for(std::ssize(wanted), 64, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          wanted[static_cast<size_t>(i)] =
              all.product(routing.experts[static_cast<size_t>(i / n)], i % n, x.values.data());
        }
      });
      EXPECT_LE(relative_error(from_device<float>(y, wanted.size(), stream), wanted),
                test::linear_bound(DType::f16, n * k));
      // The same experts as they stand, added up onto ones.
      if (!adds_up(all.linear)) continue;
      auto sums = on_device(std::vector<float>(static_cast<size_t>(n), 1.0f), stream);
      call.choice = {};
      call.y = sums.data();
      call.shares = shares.as<float>();
      multiply_routed(all.linear, all.plan, call, workspace.get(), stream);
      std::vector<double> added(static_cast<size_t>(n), 1.0);
      for (size_t i = 0; i < wanted.size(); ++i) {
        added[i % static_cast<size_t>(n)] += double{routing.shares[i / static_cast<size_t>(n)]} * wanted[i];
      }
      EXPECT_LE(relative_error(from_device<float>(sums, added.size(), stream), added),
                test::linear_bound(DType::f16, n * k));
      EXPECT_TRUE(workspace.left_semaphores_empty(stream));
    }
  }
}

struct Tail {
  int64_t n, k, outputs;
};
/// Blocks that store one N-tile, several, and none.
constexpr Tail tails[] = {{2048, 4096, 128}, {2880, 4096, 32}, {512, 1024, 257}, {64, 8192, 384}, {4096, 256, 1}};

/// A product into the residual stream makes a router's products of what it leaves, in parts.
TEST_F(ExpertsCuda, AProductLeavesPartsOfTheNextOne) {
  const device::Stream stream(test::gpu());
  for (const auto& [n, k, outputs] : tails) {
    SCOPED_TRACE(concat(outputs, " of ", n, " × ", k));
    const KbitWeight weight(formats::parse_scheme("kbit4-b32-e4m4"), {n, k}, 0.05, stream);
    const DeviceLinear linear{.passes = {weight.on_device()}};
    const auto plan = test::TestWorkspace::plan(linear);
    if (!leaves_tail(test::gpu().properties(), linear, plan.steps(1), outputs)) continue;  // of so few multiprocessors
    const test::Activations x(1, k, k, DType::f16), router(outputs, n, n, DType::f16);
    const auto x_device = on_device(x.bits, stream), router_device = on_device(router.bits, stream);
    const auto ones = on_device(std::vector<float>(static_cast<size_t>(n), 1.0f), stream);
    const auto last = on_device(std::vector<float>(static_cast<size_t>(norm_state_floats(n)), 0.5f), stream);
    auto y = on_device(std::vector<float>(static_cast<size_t>(n), 0.25f), stream);
    auto next_x = test::poisoned(static_cast<size_t>(n) * 2, stream), next_norm = test::poisoned(last.size(), stream);
    const auto count = static_cast<size_t>(n / 64 * outputs);
    auto parts = test::poisoned(count * 4, stream);
    test::TestWorkspace workspace(linear, 1, stream);
    LinearCall call;
    call.m = 1;
    call.x = x_device.data(), call.ldx = k;
    call.residual = call.y = y.data(), call.ldy = n;
    call.fp32 = call.beside_routed = call.weights_ready = true;
    call.fusion.next_x = next_x.data();
    call.fusion.next_weight = ones.as<float>();
    call.fusion.next_norm = next_norm.as<float>();
    call.fusion.last_norm = last.as<float>();
    call.fusion.tail = {router_device.data(), static_cast<int>(outputs), parts.as<float>()};
    multiply(linear, plan, call, workspace.get(), stream);
    EXPECT_TRUE(workspace.left_semaphores_empty(stream));
    const auto left = test::floats(from_device<uint16_t>(next_x, static_cast<size_t>(n), stream));
    std::vector<double> wanted(count, 0.0);
    for (size_t i = 0; i < count; ++i) {
      const auto group = static_cast<int64_t>(i) / outputs, output = static_cast<int64_t>(i) % outputs;
      for (int64_t c = 64 * group; c < 64 * group + 64; ++c) {
        wanted[i] += double{left[static_cast<size_t>(c)]} * router.values[static_cast<size_t>(output * n + c)];
      }
    }
    // Sums of 64 products in fp32.
    EXPECT_LE(relative_error(from_device<float>(parts, count, stream), wanted), 64 * 0x1p-24);
  }
}

/// Logits in parts are summed up and left; experts stand before the launch behind begins, time and again.
TEST_F(ExpertsCuda, ExpertsAreChosenByPartsAndStandAtOnce) {
  const device::Stream stream(test::gpu());
  constexpr int64_t experts = 100, chosen = 7, n = 128, k = 192, stride = experts + 1, count = 45;
  const Experts all("kbit4-b32-e4m4", experts, n, k, stream);
  const test::Activations x(1, k, k, DType::f16);
  const auto x_device = on_device(x.bits, stream);
  std::vector<float> bias;
  for (int64_t i = 0; i < experts; ++i) bias.push_back(static_cast<float>(random_normal(9, static_cast<uint64_t>(i))));
  const auto bias_device = on_device(bias, stream);
  auto places = test::poisoned(chosen * 4, stream), shares = test::poisoned(chosen * 4, stream);
  auto logits = test::poisoned(stride * 4, stream), y = test::poisoned(chosen * n * 4, stream);
  test::TestWorkspace workspace(all.linear, 1, stream);
  for (uint64_t run = 0; run < 20; ++run) {
    std::vector<float> parts;
    for (uint64_t i = 0; i < count * stride; ++i) parts.push_back(static_cast<float>(random_normal(100 + run, i)));
    std::vector<float> summed(stride);
    for (int64_t i = 0; i < stride; ++i) {
      float sums[4] = {};  // of every fourth part, as the kernel has them side by side
      for (int64_t part = 0; part < count; ++part) sums[part % 4] += parts[static_cast<size_t>(part * stride + i)];
      summed[static_cast<size_t>(i)] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      if (i < experts) summed[static_cast<size_t>(i)] += bias[static_cast<size_t>(i)];
    }
    const model::MixtureConfig config{.experts = experts, .chosen = chosen, .renormalizes = true};
    const auto routing = model::route(config, {summed.data(), 1, experts}, {}, {});
    const auto parts_device = on_device(parts, stream);
    auto sums = on_device(std::vector<float>(static_cast<size_t>(n), 0.0f), stream);
    RoutedCall call{.x = x_device.as<__half>(),
                    .experts = places.as<int32_t>(),
                    .places = static_cast<int>(chosen),
                    .n = n,
                    .y = y.data(),
                    .weights_ready = true};
    call.choice = {.logits = logits.as<float>(),
                   .parts = parts_device.as<float>(),
                   .part_count = static_cast<int>(count),
                   .rows = 1,
                   .stride = stride,
                   .experts = static_cast<int>(experts),
                   .chosen = static_cast<int>(chosen),
                   .renormalizes = true,
                   .bias = bias_device.as<float>(),
                   .places = places.as<int32_t>(),
                   .shares = shares.as<float>()};
    multiply_routed(all.linear, all.plan, call, workspace.get(), stream);
    call.choice = {};
    call.y = sums.data();
    call.shares = shares.as<float>();
    call.places_stand = true;
    multiply_routed(all.linear, all.plan, call, workspace.get(), stream);
    EXPECT_EQ(from_device<float>(logits, stride, stream), summed);
    EXPECT_EQ(from_device<int32_t>(places, chosen, stream), routing.experts);
    std::vector<double> added(static_cast<size_t>(n), 0.0);
    for (size_t i = 0; i < chosen * added.size(); ++i) {
      const auto place = i / added.size();
      added[i % added.size()] +=
          double{routing.shares[place]} *
          all.product(routing.experts[place], static_cast<int64_t>(i % added.size()), x.values.data());
    }
    EXPECT_LE(relative_error(from_device<float>(sums, added.size(), stream), added),
              test::linear_bound(DType::f16, n * k));
  }
  EXPECT_TRUE(workspace.left_semaphores_empty(stream));
}

TEST_F(ExpertsCuda, SortedRowsGoThroughTheirOwnWeights) {
  const device::Stream stream(test::gpu());
  constexpr int64_t rows = 150;
  // A weight without rows, one of one, full groups, and several of one weight.
  const std::vector<RowGroup> groups = {{4, 0, 1}, {0, 1, 31}, {2, 32, 32}, {2, 64, 64}, {1, 128, 5}, {5, 133, 17}};
  for (const char* scheme : {"kbit4-b32-e4m4", "kbit3-b32-e4m4", "kbit4-b32-f16", "kbit5-b32-e4m4", "kbit2-b32-e4m4"}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{64, 64}, {128, 200}, {320, 512}, {192, 1472}}) {
      SCOPED_TRACE(concat(scheme, ", ", n, " × ", k));
      const Experts all(scheme, 6, n, k, stream);
      std::vector<float> bias;
      for (int64_t i = 0; i < 6 * n; ++i)
        bias.push_back(static_cast<float>(random_normal(5, static_cast<uint64_t>(i))));
      const auto bias_device = on_device(bias, stream);
      const test::Activations x(rows, k, k, DType::f16);
      const auto x_device = on_device(x.bits, stream);
      const auto groups_device = on_device(groups, stream);
      DeviceLinear linear = all.linear;
      linear.bias = bias_device.as<float>();
      linear.gates = GateOrder::turns;
      ASSERT_TRUE(multiplies_groups(test::gpu().properties(), linear, n));
      std::vector<double> wanted(static_cast<size_t>(rows * n), 0.0);
      parallel_for(std::ssize(groups), 1, [&](int64_t begin, int64_t) {
        const RowGroup& group = groups[static_cast<size_t>(begin)];
        for (int64_t row = group.first; row < group.first + group.count; ++row) {
          for (int64_t i = 0; i < n; ++i) {
            wanted[static_cast<size_t>(row * n + i)] = all.product(group.weight, i, x.values.data() + row * k) +
                                                       bias[static_cast<size_t>(group.weight * n + i)];
          }
        }
      });
      auto y = test::poisoned(static_cast<size_t>(rows * n) * 4, stream);
      GroupedCall call{.x = x_device.as<__half>(),
                       .groups = groups_device.as<RowGroup>(),
                       .count = static_cast<int>(groups.size()),
                       .most_rows = 64,
                       .n = n,
                       .y = y.data()};
      multiply_groups(linear, all.plan, call, stream);
      EXPECT_LE(relative_error(from_device<float>(y, wanted.size(), stream), wanted),
                test::linear_bound(DType::f16, n * k));
      // Of at most 32 rows another tiling does it: the first three groups.
      auto few = test::poisoned(static_cast<size_t>(64 * n) * 4, stream);
      call.count = 3, call.most_rows = 32, call.y = few.data();
      multiply_groups(linear, all.plan, call, stream);
      wanted.resize(static_cast<size_t>(64 * n));
      EXPECT_LE(relative_error(from_device<float>(few, wanted.size(), stream), wanted),
                test::linear_bound(DType::f16, n * k));
      // Gates and ups in turn.
      auto gated = test::poisoned(static_cast<size_t>(64 * n / 2) * 2, stream);
      call.y = gated.data(), call.swiglu = true;
      multiply_groups(linear, all.plan, call, stream);
      std::vector<double> products;
      for (int64_t row = 0; row < 64; ++row) {
        for (int64_t i = 0; i < n / 2; ++i) {
          const int64_t at = row * n + i + i / gate_up_turn * gate_up_turn;
          const double gate = wanted[static_cast<size_t>(at)], up = wanted[static_cast<size_t>(at + gate_up_turn)];
          products.push_back(gate / (1 + std::exp(-gate)) * up);
        }
      }
      EXPECT_LE(relative_error(test::floats(from_device<uint16_t>(gated, products.size(), stream)), products),
                2 * test::linear_bound(DType::f16, n * k));
    }
  }
}

TEST_F(ExpertsCuda, RefusesGroupsThatItCannotMultiply) {
  const device::Stream stream(test::gpu());
  const Experts all("kbit4-b32-e4m4", 2, 64, 64, stream);
  const GroupedCall good{.count = 1, .most_rows = 1, .n = 64};
  const auto refuse = [&](const auto& change) {
    GroupedCall bad = good;
    change(bad);
    test::expect_error(ErrorCode::bad_argument, {"groups of rows", "kbit4"},
                       [&] { multiply_groups(all.linear, all.plan, bad, stream); });
  };
  refuse([](auto& call) { call.count = 0; });
  refuse([](auto& call) { call.most_rows = 65; });
  refuse([](auto& call) { call.n = 96; });
  refuse([](auto& call) { call.swiglu = true; });  // there are no gates
}

}  // namespace
}  // namespace w4q::kernels
