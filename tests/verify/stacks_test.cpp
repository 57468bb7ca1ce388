// The experts of a mixture together: orders of what reads against what writes, and how stacks lie in memory.
#include "verify/statistics/stacks.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "core/convert.h"
#include "core/rng.h"
#include "made_checkpoint.h"
#include "made_statistics.h"
#include "support.h"
#include "verify/statistics/statistics.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t layers = 6, experts = 8, inner = 64, hidden = 96;

double normal(uint64_t seed, size_t at) {
  double sum = -6;
  for (uint64_t i = 0; i < 12; ++i) sum += random_uniform(seed, 12 * at + i);
  return sum;
}

std::string stack(size_t layer, const char* role) { return concat("model.layers.", layer, ".mlp.experts.", role); }

/// Values of [experts, n, k], in any order of axes in memory.
using Values = std::vector<float>;
void put(MadeCheckpoint& made, const std::string& name, const Shape& shape, const Values& values) {
  std::vector<uint16_t> halves;
  for (const float value : values) halves.push_back(bf16_from_f32(value));
  made.put(name, DType::bf16, shape, halves);
}

/// A channel that is written loudly is read loudly, in each expert others.
double channel(size_t layer, size_t expert, size_t c) { return std::exp(0.5 * normal(layer * 100 + expert, c)); }

Values gate_up(size_t layer, bool turn) {
  Values values(experts * 2 * inner * hidden);
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t expert = i / (2 * inner * hidden), row = i / hidden % (2 * inner);
    const bool up = turn ? row % 2 == 1 : row >= inner;
    const double size = up ? channel(layer, expert, turn ? row / 2 : row - inner) : 1;
    values[i] = static_cast<float>(0.05 * size * normal(1000 + layer, i));
  }
  return values;
}
Values down(size_t layer) {
  Values values(experts * hidden * inner);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(0.05 * channel(layer, i / (hidden * inner), i % inner) * normal(2000 + layer, i));
  return values;
}

/// `values` of axes of these sizes, stored with the axes in another order.
Values stored_as(const Values& values, const std::array<size_t, 3>& sizes, const std::array<size_t, 3>& axes) {
  Values result;
  std::array<size_t, 3> at{};
  for (at[axes[0]] = 0; at[axes[0]] < sizes[axes[0]]; ++at[axes[0]]) {
    for (at[axes[1]] = 0; at[axes[1]] < sizes[axes[1]]; ++at[axes[1]]) {
      for (at[axes[2]] = 0; at[axes[2]] < sizes[axes[2]]; ++at[axes[2]])
        result.push_back(values[(at[0] * sizes[1] + at[1]) * sizes[2] + at[2]]);
    }
  }
  return result;
}

/// Rows of each expert, or experts, from other places.
Values moved(const Values& values, size_t pieces, size_t outer, const std::function<size_t(size_t)>& from) {
  Values result;
  const size_t size = values.size() / outer / pieces;
  for (size_t i = 0; i < outer; ++i) {
    for (size_t piece = 0; piece < pieces; ++piece) {
      const auto at = values.begin() + static_cast<std::ptrdiff_t>((i * pieces + from(piece)) * size);
      result.insert(result.end(), at, at + static_cast<std::ptrdiff_t>(size));
    }
  }
  return result;
}

MadeCheckpoint mixture(bool turn = false) {
  MadeCheckpoint made;
  made.config = {{"architectures", {"UnseenForCausalLM"}},
                 {"model_type", "unseen"},
                 {"hidden_size", hidden},
                 {"num_hidden_layers", layers},
                 {"num_experts", experts}};
  for (size_t layer = 0; layer < layers; ++layer) {
    put(made, stack(layer, "gate_up_proj"), {experts, 2 * inner, hidden}, gate_up(layer, turn));
    put(made, stack(layer, "down_proj"), {experts, hidden, inner}, down(layer));
  }
  return made;
}

TEST(Stacks, SoundOnesAreNotNamed) {
  for (const bool turn : {false, true}) EXPECT_THAT(statistics_faults(mixture(turn)), IsEmpty()) << turn;
}

TEST(Stacks, ExpertsInAnotherOrder) {
  const auto shape = Shape{experts, hidden, inner};
  auto all = mixture(), one = mixture(), two = mixture();
  for (size_t layer = 0; layer < layers; ++layer) {
    put(all, stack(layer, "down_proj"), shape,
        moved(down(layer), experts, 1, [](size_t i) { return (i + 1) % experts; }));
  }
  EXPECT_THAT(statistics_faults(all), Contains(HasSubstr("with experts one place back")));
  put(one, stack(2, "down_proj"), shape, moved(down(2), experts, 1, [](size_t i) { return experts - 1 - i; }));
  EXPECT_THAT(statistics_faults(one), Contains(HasSubstr("layers.2.mlp.experts.down_proj: its columns agree")));
  const auto exchanged = [](size_t i) { return i == 1 ? size_t{5} : i == 5 ? size_t{1} : i; };
  put(two, stack(2, "down_proj"), shape, moved(down(2), experts, 1, exchanged));
  EXPECT_THAT(statistics_faults(two), Contains(HasSubstr("expert 1 by that of 5")));
}

TEST(Stacks, BytesThatLieOtherwise) {
  auto turned = mixture(), inside = mixture();
  put(turned, stack(2, "down_proj"), {experts, hidden, inner}, stored_as(down(2), {experts, hidden, inner}, {0, 2, 1}));
  EXPECT_THAT(statistics_faults(turned), Contains(HasSubstr("with bytes of [experts, inputs, outputs]")));
  put(inside, stack(2, "gate_up_proj"), {experts, 2 * inner, hidden},
      stored_as(gate_up(2, false), {experts, 2 * inner, hidden}, {1, 0, 2}));
  EXPECT_THAT(statistics_faults(inside), Contains(HasSubstr("with bytes of [outputs, experts, inputs]")));
}

TEST(Stacks, GatesAndUpsThatWereSorted) {
  const auto shape = Shape{experts, 2 * inner, hidden};
  auto turn = mixture(), apart = mixture();
  put(turn, stack(2, "gate_up_proj"), shape, gate_up(2, true));
  EXPECT_THAT(statistics_faults(turn), Contains(HasSubstr("with gates and ups in turn")));
  // Halves that were taken for gates and ups in turn.
  const auto sorted = [](size_t row) { return row < inner ? 2 * row : 2 * (row - inner) + 1; };
  for (size_t layer = 0; layer < layers; ++layer)
    put(apart, stack(layer, "gate_up_proj"), shape, moved(gate_up(layer, false), 2 * inner, experts, sorted));
  EXPECT_THAT(statistics_faults(apart), Contains(HasSubstr("even and odd rows were sorted apart")));
}

}  // namespace
}  // namespace w4q::verify
