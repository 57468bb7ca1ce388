// Experts in stacks held against experts one by one, and the reverse.
#include <gmock/gmock.h>

#include "made_contents.h"
#include "packed_model.h"
#include "verify/ladder.h"
#include "verify/weights/kept.h"

namespace w4q::verify {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string layer = "model.language_model.layers.1.mlp.experts.";

/// `made` with the experts of each mixture as stacks, gates and ups one half after the other or in turn.
test::MadeCheckpoint stacked(const test::MadeCheckpoint& made, bool turn) {
  test::MadeCheckpoint result{made.config, {}};
  for (const auto& [name, tensor] : made.tensors) {
    if (name.find(".experts.") == std::string::npos) result.tensors.emplace(name, tensor);
  }
  for (const int number : {0, 1}) {
    const std::string experts = concat("model.language_model.layers.", number, ".mlp.experts.");
    std::vector<std::byte> gate_up, down;
    for (int expert = 0; expert < 4; ++expert) {
      const auto bytes = [&](const char* role) { return made.tensors.at(concat(experts, expert, ".", role)).bytes; };
      const auto gate = bytes("gate_proj.weight"), up = bytes("up_proj.weight"), last = bytes("down_proj.weight");
      const auto width = std::ssize(gate) / 64;
      const auto put = [&](const std::vector<std::byte>& from, std::ptrdiff_t row) {
        gate_up.insert(gate_up.end(), from.begin() + row * width, from.begin() + (row + 1) * width);
      };
      for (std::ptrdiff_t row = 0; row < 128; ++row)
        turn ? put(row % 2 == 0 ? gate : up, row / 2) : put(row < 64 ? gate : up, row % 64);
      down.insert(down.end(), last.begin(), last.end());
    }
    result.tensors[experts + "gate_up_proj"] = {DType::bf16, {4, 128, 128}, std::move(gate_up)};
    result.tensors[experts + "down_proj"] = {DType::bf16, {4, 128, 64}, std::move(down)};
  }
  return result;
}

class Experts : public MadeContents {
 protected:
  /// What is wrong with `candidate` beside `base`.
  std::string faults(const test::MadeCheckpoint& candidate, const test::MadeCheckpoint& base) {
    set_progress_enabled(false);
    candidate.write(folder_ / "candidate");
    base.write(folder_ / "base");
    CheckContext context(test::check_options(folder_ / "candidate", folder_ / "base"));
    const Findings found = climb(context);
    std::string text;
    for (const Check& check : found.checks.checks()) text += join(check.faults, "\n");
    return text;
  }

  const test::MadeCheckpoint by_name_ = test::made_mixture(test::Storage::bf16);
};

TEST_F(Experts, StacksHoldWhatNamesHold) {
  for (const bool turn : {false, true}) {
    const auto stacks = stacked(by_name_, turn);
    EXPECT_THAT(faults(stacks, by_name_), IsEmpty()) << turn;
    EXPECT_THAT(faults(by_name_, stacks), IsEmpty()) << turn;
  }
}

TEST_F(Experts, AnExpertThatIsNotTheBasesIsNamed) {
  auto stacks = stacked(by_name_, false);
  stacks.values<uint16_t>(layer + "gate_up_proj")[size_t{2} * 128 * 128 + 5] ^= 0x8000u;
  EXPECT_THAT(faults(stacks, by_name_), HasSubstr(layer + "gate_up_proj.2.weight"));
  auto names = by_name_;
  names.values<uint16_t>(layer + "2.up_proj.weight")[5] ^= 0x8000u;
  EXPECT_THAT(faults(names, stacked(by_name_, false)), HasSubstr(layer + "2.up_proj.weight"));
}

TEST_F(Experts, SmallFloatsInStacksAreHeldAgainstNames) {
  const auto stacks = test::made_mixture(test::Storage::mxfp4_stack);
  auto base = test::made_mixture(test::Storage::bf16);
  // The base of these: their own values, expert by expert.
  stacks.write(folder_ / "stacks");
  const auto decoded = checkpoint::open_folder(folder_ / "stacks");
  for (auto& [name, tensor] : base.tensors) {
    const size_t at = name.find(".experts.");
    if (at == std::string::npos) {
      tensor = stacks.tensors.contains(name) ? stacks.tensors.at(name) : tensor;
      continue;
    }
    const std::string expert = name.substr(at + 9, 1), role = name.substr(at + 11);
    const bool down = role.starts_with("down");
    const auto whole =
        decoded.tensors.load(concat(name.substr(0, at + 9), down ? "down_proj." : "gate_up_proj.", expert, ".weight"));
    const size_t half = down ? whole->bytes.size() : whole->bytes.size() / 2;
    const auto part = whole->bytes.subspan(role.starts_with("up") ? half : 0, half);
    tensor = {whole->dtype, tensor.shape, {part.begin(), part.end()}};
  }
  EXPECT_THAT(faults(stacks, base), IsEmpty());
}

TEST_F(Experts, LostOnesAreNamed) {
  const auto stacks = stacked(by_name_, false);
  auto lost = by_name_;
  for (const auto& name : lost.names_with(layer + "3.")) lost.tensors.erase(name);
  EXPECT_THAT(faults(lost, stacks), HasSubstr(layer + "3."));
  EXPECT_THAT(faults(lost, by_name_), HasSubstr(layer + "3."));
}

/// Stacks whose names do not say what of an expert they are.
TEST_F(Experts, OnesThatAPackerLostAreNamed) {
  for (const auto& [first, second] : {std::pair{"w13", "w2"}, std::pair{"fc1", "fc2"}}) {
    test::MadeCheckpoint base{by_name_.config, {}};
    for (const auto& [name, tensor] : stacked(by_name_, false).tensors) {
      std::string other = name;
      if (const size_t at = name.find("gate_up_proj"); at != std::string::npos) other.replace(at, 12, first);
      if (const size_t at = name.find("experts.down_proj"); at != std::string::npos) other.replace(at + 8, 9, second);
      base.tensors.emplace(other, tensor);
    }
    base.write(folder_ / "base");
    auto packed = test::made_mixture(test::Storage::int4);
    const auto lost = [&] {
      packed.write(folder_ / "candidate");
      const auto candidate = model::open_model(folder_ / "candidate");
      const auto check =
          check_kept(candidate, model::take_apart_like(model::open_model(folder_ / "base"), candidate.folder.tensors));
      return check.faults;
    };
    EXPECT_THAT(lost(), IsEmpty()) << first;
    for (const auto& name : packed.names_with(layer + "3.")) packed.tensors.erase(name);
    EXPECT_THAT(lost(), ElementsAre(layer + "3: is missing: the base has a stack of experts with it")) << first;
  }
}

}  // namespace
}  // namespace w4q::verify
