// Which way rows and columns point: what is exchanged, or in another order, where sizes say nothing.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>

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

MadeCheckpoint trained(const char* name) { return MadeCheckpoint::of(test::testdata() / name); }
std::string linear(int layer, const char* name) { return concat("model.layers.", layer, ".", name, ".weight"); }

/// Row `i` becomes what was row from(i).
template <class From>
void reorder_rows(MadeCheckpoint& made, const std::string& name, const From& from) {
  auto& tensor = made.tensors.at(name);
  const auto before = tensor.bytes;
  const auto rows = static_cast<size_t>(tensor.shape[0]);
  const size_t width = tensor.bytes.size() / rows;
  for (size_t row = 0; row < rows; ++row) {
    std::copy_n(before.begin() + static_cast<std::ptrdiff_t>(from(row, rows) * width), width,
                tensor.bytes.begin() + static_cast<std::ptrdiff_t>(row * width));
  }
}

/// Column `i` becomes what was column from(i).
template <class From>
void reorder_columns(MadeCheckpoint& made, const std::string& name, const From& from) {
  auto& tensor = made.tensors.at(name);
  const auto before = tensor.bytes;
  const auto cols = static_cast<size_t>(tensor.shape[1]);
  const size_t rows = static_cast<size_t>(tensor.shape[0]);
  for (size_t row = 0; row < rows; ++row) {
    for (size_t col = 0; col < cols; ++col) {
      std::copy_n(before.begin() + static_cast<std::ptrdiff_t>(2 * (row * cols + from(col))), 2,
                  tensor.bytes.begin() + static_cast<std::ptrdiff_t>(2 * (row * cols + col)));
    }
  }
}

void exchange(MadeCheckpoint& made, const std::string& one, const std::string& other) {
  std::swap(made.tensors.at(one), made.tensors.at(other));
}

TEST(Directions, NothingIsSaidOfTrainedModels) {
  for (const char* name : {"w4q-mixture-tiny", "w4q-hybrid-tiny"})
    EXPECT_THAT(statistics_faults(trained(name)), IsEmpty()) << name;
}

TEST(Directions, GatesAndUpsExchanged) {
  auto made = trained("w4q-llama-tiny");
  exchange(made, linear(2, "mlp.gate_proj"), linear(2, "mlp.up_proj"));
  EXPECT_THAT(
      statistics_faults(made),
      Contains(HasSubstr("model.layers.2.mlp.gate_proj: it and model.layers.2.mlp.up_proj are in each other's")));
  for (const int layer : {0, 1, 3}) exchange(made, linear(layer, "mlp.gate_proj"), linear(layer, "mlp.up_proj"));
  EXPECT_THAT(statistics_faults(made), Contains(HasSubstr("layers.3.mlp.gate_proj: it and model.layers.3.mlp.up")));
  // What all layers of an architecture that is not known agree in is how it is.
  made.config["architectures"] = {"SomethingForCausalLM"}, made.config["model_type"] = "something";
  EXPECT_THAT(statistics_faults(made), IsEmpty());
}

TEST(Directions, GatesOfExpertsOnePlaceOn) {
  auto made = trained("w4q-mixture-tiny");
  const auto gate = [](int expert) { return concat("model.layers.2.mlp.experts.", expert, ".gate_proj.weight"); };
  for (int expert = 0; expert < 7; ++expert) exchange(made, gate(expert), gate(expert + 1));
  EXPECT_THAT(statistics_faults(made),
              Contains(HasSubstr("with those of model.layers.2.mlp.experts.7.gate_proj in their place")));
}

TEST(Directions, GatesInAnotherOrder) {
  auto made = trained("w4q-llama-tiny");
  reorder_rows(made, linear(1, "mlp.gate_proj"), [](size_t row, size_t rows) { return (row + rows - 8) % rows; });
  EXPECT_THAT(statistics_faults(made), Contains(HasSubstr("layers.1.mlp.gate_proj: its channels point along")));
}

TEST(Directions, HeadsInAnotherOrder) {
  auto made = trained("w4q-llama-tiny");
  reorder_columns(made, linear(3, "self_attn.o_proj"), [](size_t col) {
    return std::array<size_t, 4>{0, 2, 1, 3}[col / 64] * 64 + col % 64;
  });
  EXPECT_THAT(statistics_faults(made), Contains(HasSubstr("layers.3.self_attn.o_proj: its heads point along")));
}

/// As of a file whose heads a program put into halves that were halves already.
TEST(Directions, HeadsSortedTwice) {
  auto made = trained("w4q-llama-tiny");
  for (int layer = 0; layer < 4; ++layer) {
    for (const char* name : {"self_attn.q_proj", "self_attn.k_proj"}) {
      reorder_rows(made, linear(layer, name),
                   [](size_t row, size_t) { return row / 64 * 64 + row % 32 * 2 + row % 64 / 32; });
    }
  }
  EXPECT_THAT(statistics_faults(made),
              Contains(HasSubstr("layers.0.self_attn.q_proj: its rows, and those of all layers")));
}

/// As of a folder that keeps the order of a GGUF file: neither by relations to keys, which were sorted along.
TEST(Directions, HeadsSortedForNeighbours) {
  auto made = trained("w4q-llama-tiny");
  for (int layer = 0; layer < 4; ++layer) {
    for (const char* name : {"self_attn.q_proj", "self_attn.k_proj"}) {
      reorder_rows(made, linear(layer, name),
                   [](size_t row, size_t) { return row / 64 * 64 + row % 2 * 32 + row % 64 / 2; });
    }
  }
  EXPECT_THAT(statistics_faults(made), Contains(HasSubstr("neighbours turn together, by config.json halves do")));
}

/// Layers 0 to 2 of the tiny model, over and over: eight.
MadeCheckpoint of_eight_layers() {
  auto made = trained("w4q-llama-tiny");
  const auto four = made.tensors;
  constexpr int of[] = {0, 1, 2, 0, 1, 2, 1, 2};
  for (int layer = 0; layer < 8; ++layer) {
    const std::string from = concat("model.layers.", of[layer], ".");
    for (const auto& [name, tensor] : four) {
      if (name.starts_with(from)) made.tensors[concat("model.layers.", layer, ".", name.substr(from.size()))] = tensor;
    }
  }
  made.config["num_hidden_layers"] = 8;
  return made;
}

/// Of one layer, queries and keys alike, so that they agree: first what a GGUF file that was not sorted becomes.
TEST(Directions, HeadsOfOneLayerSortedNeverOrTwice) {
  EXPECT_THAT(statistics_faults(of_eight_layers()), Not(Contains(HasSubstr("its heads were sorted"))));
  for (const bool twice : {false, true}) {
    auto made = of_eight_layers();
    for (const char* name : {"self_attn.q_proj", "self_attn.k_proj"}) {
      reorder_rows(made, linear(5, name), [twice](size_t row, size_t) {
        return row / 64 * 64 + (twice ? row % 2 * 32 + row % 64 / 2 : row % 32 * 2 + row % 64 / 32);
      });
    }
    EXPECT_THAT(statistics_faults(made), Contains(HasSubstr("model.layers.5.self_attn.q_proj: "))) << twice;
  }
}

/// Behind norms of queries and keys, which take sizes away.
TEST(Directions, KeysSortedForAnotherPairing) {
  auto made = trained("w4q-mixture-tiny");
  reorder_rows(made, linear(2, "self_attn.k_proj"),
               [](size_t row, size_t) { return row / 64 * 64 + row % 2 * 32 + row % 64 / 2; });
  EXPECT_THAT(statistics_faults(made), Contains(HasSubstr("layers.2.self_attn.q_proj: its heads point along")));
}

TEST(Directions, KeysAndValuesExchanged) {
  auto made = trained("w4q-llama-tiny");
  exchange(made, linear(2, "self_attn.k_proj"), linear(2, "self_attn.v_proj"));
  EXPECT_THAT(
      statistics_faults(made),
      Contains(HasSubstr("self_attn.k_proj: it and model.layers.2.self_attn.v_proj are in each other's place")));
}

}  // namespace
}  // namespace w4q::verify
