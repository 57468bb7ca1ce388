// A relation of codes and scales that all weights of a role have lost, or all of a file, with nothing beside them that has it.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "support.h"
#include "verify/statistics/blocks.h"

namespace w4q::verify {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr const char* roles[] = {"q_proj", "k_proj", "up_proj", "down_proj"};

/// A weight of 16 codes in use whose scales follow from them by `match`, give or take `error`.
BlockSubject weight(int layer, const char* role, double match, double error) {
  BlockSubject subject{concat("model.layers.", layer, ".", role), "int4-g128-f16 0", role, {}};
  subject.figures.blocks = 512, subject.figures.scale_spread = 0.3;
  subject.figures.match = {match, error};
  subject.figures.histogram.assign(16, 1.0 / 16);
  return subject;
}

/// `match` by layer and role.
template <class Match>
std::vector<BlockSubject> file_of(const Match& match, double error) {
  std::vector<BlockSubject> all;
  for (int layer = 0; layer < 6; ++layer) {
    for (const char* role : roles) all.push_back(weight(layer, role, match(layer, std::string_view(role)), error));
  }
  return all;
}

TEST(LostRelations, OfAWholeRole) {
  // As badly known, one by one, as those of small matrices are: only together they surely have nothing.
  const auto match = [](int layer, std::string_view role) {
    return role == "down_proj" ? 0.04 * (layer % 3 - 1) : 0.9;
  };
  const auto faults = block_faults(file_of(match, 0.1));
  EXPECT_THAT(faults, SizeIs(6));
  EXPECT_THAT(faults, Each(HasSubstr("down_proj: scales do not belong to the codes")));
  EXPECT_THAT(faults, Each(HasSubstr("those of all other roles do")));
  EXPECT_THAT(block_faults(file_of([](int, std::string_view) { return 0.9; }, 0.1)), IsEmpty());
}

TEST(LostRelations, OfAWholeFile) {
  const auto nothing = [](int layer, std::string_view) { return 0.04 * (layer % 3 - 1); };
  const auto faults = block_faults(file_of(nothing, 0.1));
  EXPECT_THAT(faults, SizeIs(24));
  EXPECT_THAT(faults, Each(HasSubstr("no weight of this file has its own")));
  // One that has it says that the others may be as their weights are.
  EXPECT_THAT(block_faults(file_of(
                  [](int layer, std::string_view role) { return layer == 3 && role == "k_proj" ? 0.9 : 0.02; }, 0.1)),
              IsEmpty());
}

/// Pruned weights, and those of a few values, have scales that follow from nothing.
TEST(LostRelations, NotOfWeightsOfAFewValues) {
  auto all = file_of([](int, std::string_view) { return 0.0; }, 0.1);
  for (auto& one : all) {
    one.figures.histogram.assign(16, 0.0);
    for (const size_t code : {7, 8, 9}) one.figures.histogram[code] = 1.0 / 3;
  }
  EXPECT_THAT(block_faults(all), IsEmpty());
  for (auto& one : all) {
    one.figures.histogram.assign(16, 0.4 / 15);
    one.figures.histogram[8] = 0.6;
  }
  EXPECT_THAT(block_faults(all), IsEmpty());
}

TEST(LostRelations, OfZeroPoints) {
  auto all = file_of([](int, std::string_view) { return 0.9; }, 0.01);
  for (auto& one : all) one.scheme = "int4-g128-f16-asym 0", one.figures.zeros = {0.02, 0.05};
  EXPECT_THAT(block_faults(all), Each(HasSubstr("zero points do not belong")));
  for (auto& one : all) one.figures.zeros.value = 0.9;
  EXPECT_THAT(block_faults(all), IsEmpty());
}

// ---- zero points and codes that a whole role has lost ----

TEST(LostZeros, OfSymmetricWeights) {
  auto all = file_of([](int, std::string_view) { return 0.9; }, 0.01);
  for (auto& one : all) one.figures.even_zeros = {.even = true, .zero = 8, .ratio = 1.4, .ends = 1};
  EXPECT_THAT(block_faults(all), IsEmpty());  // clipped, they lean by chance alone
  for (auto& one : all) one.figures.even_zeros = {.even = true, .zero = 8, .ratio = 5, .ends = 0.9};
  EXPECT_THAT(block_faults(all), IsEmpty());  // those that lean do not reach both ends
  for (auto& one : all) one.figures.even_zeros.ends = 1;
  EXPECT_THAT(block_faults(all), Each(HasSubstr("their zero points are lost")));
}

TEST(LostZeros, AtOneEnd) {
  auto all = file_of([](int, std::string_view) { return 0.9; }, 0.01);
  for (auto& one : all) one.figures.even_zeros = {.even = true, .zero = 0, .ratio = 5, .ends = 1};
  EXPECT_THAT(block_faults(all), IsEmpty());  // as many there as anywhere
  for (auto& one : all) {
    for (size_t code = 0; code < 16; ++code)
      one.figures.histogram[code] = std::exp(-0.5 * std::pow((static_cast<double>(code) - 7.5) / 3, 2)) / 7.4;
  }
  EXPECT_THAT(block_faults(all), Each(HasSubstr("all its zero points are 0, at the end of the range")));
  for (auto& one : all) std::ranges::sort(one.figures.histogram, std::greater<>());  // of one sign
  EXPECT_THAT(block_faults(all), IsEmpty());
}

TEST(LostZeros, OfOneWord) {
  auto all = file_of([](int, std::string_view) { return 0.9; }, 0.01);
  all[3].figures.far_zeros = {.groups = 2, .row = 5, .group = 1, .steps = 5, .others = 2};
  const auto faults = block_faults(all);
  EXPECT_THAT(faults, SizeIs(1));
  EXPECT_THAT(faults, Each(HasSubstr("the zero point of row 5, group 1 is 5.0 steps")));
  all[3].figures.far_zeros.others = 4;
  EXPECT_THAT(block_faults(all), IsEmpty());
}

TEST(LostCodes, OfOneValue) {
  auto all = file_of([](int, std::string_view) { return 0.9; }, 0.01);
  for (auto& one : all) one.figures.one_value = 200;
  EXPECT_THAT(block_faults(all), Each(HasSubstr("in 200 of 512 blocks, although their scales differ")));
  for (auto& one : all) one.figures.one_value = 40;
  EXPECT_THAT(block_faults(all), IsEmpty());
}

TEST(LostSigns, OfAllScales) {
  auto all = file_of([](int, std::string_view) { return 0.9; }, 0.01);
  for (auto& one : all) one.figures.negative = one.figures.scales = 512;
  EXPECT_THAT(block_faults(all), Each(HasSubstr("all its 512 scales are negative")));
  for (auto& one : all) one.figures.negative = 256;
  EXPECT_THAT(block_faults(all), IsEmpty());
}

}  // namespace
}  // namespace w4q::verify
