// Experts in stacks held against experts one by one, and the reverse.
#include <gmock/gmock.h>

#include "core/convert.h"
#include "core/rng.h"
#include "made_contents.h"
#include "packed_model.h"
#include "verify/ladder.h"
#include "verify/weights/kept.h"

namespace w4q::verify {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

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

const std::string all_layers = "model.language_model.layers.";
constexpr size_t mixtures = 2, experts_each = 4, inner_rows = 64, outer_rows = 128;

/// A model that is not known, whose experts have biases, one by one or in stacks.
test::MadeCheckpoint with_expert_biases(test::MadeCheckpoint made, bool stacks, bool turn) {
  made.config["architectures"] = {"OfNextYear"};
  made.config["model_type"] = "of_next_year";
  for (size_t mixture = 0; mixture < mixtures; ++mixture) {
    const std::string experts = concat(all_layers, mixture, ".mlp.experts.");
    std::vector<uint16_t> both, last;
    for (size_t expert = 0; expert < experts_each; ++expert) {
      const auto values = [&](size_t role, size_t count) {
        std::vector<uint16_t> result;
        for (size_t i = 0; i < count; ++i)
          result.push_back(bf16_from_f32(static_cast<float>(random_uniform(10 * mixture + role, 1000 * expert + i))));
        return result;
      };
      const auto gate = values(0, inner_rows), up = values(1, inner_rows), down = values(2, outer_rows);
      for (size_t i = 0; i < 2 * inner_rows; ++i)
        both.push_back(turn ? (i % 2 == 0 ? gate : up)[i / 2] : (i < inner_rows ? gate : up)[i % inner_rows]);
      last.insert(last.end(), down.begin(), down.end());
      if (stacks) continue;
      const auto name = [&](const char* role) { return concat(experts, expert, ".", role, ".bias"); };
      made.put(name("gate_proj"), DType::bf16, {int64_t{inner_rows}}, gate);
      made.put(name("up_proj"), DType::bf16, {int64_t{inner_rows}}, up);
      made.put(name("down_proj"), DType::bf16, {int64_t{outer_rows}}, down);
    }
    if (!stacks) continue;
    made.put(experts + "gate_up_proj_bias", DType::bf16, {int64_t{experts_each}, int64_t{2 * inner_rows}}, both);
    made.put(experts + "down_proj_bias", DType::bf16, {int64_t{experts_each}, int64_t{outer_rows}}, last);
  }
  return made;
}

TEST_F(Experts, BiasesGoWithTheirWeights) {
  for (const bool turn : {false, true}) {
    const auto stacks = with_expert_biases(stacked(by_name_, turn), true, turn),
               names = with_expert_biases(by_name_, false, turn);
    EXPECT_THAT(faults(stacks, names), IsEmpty()) << turn;
    EXPECT_THAT(faults(names, stacks), IsEmpty()) << turn;
    auto exchanged = names;
    std::swap(exchanged.tensors.at(layer + "1.gate_proj.bias"), exchanged.tensors.at(layer + "1.up_proj.bias"));
    EXPECT_THAT(faults(exchanged, stacks), HasSubstr(layer + "1.gate_proj.bias")) << turn;
    auto lost = names;
    lost.tensors.erase(layer + "2.down_proj.bias");
    EXPECT_THAT(faults(lost, stacks), HasSubstr(layer + "2.down_proj.bias")) << turn;
    auto other = stacks;
    other.values<uint16_t>(layer + "down_proj_bias")[7] ^= 0x8000u;
    EXPECT_THAT(faults(other, names), HasSubstr(layer + "down_proj_bias")) << turn;
    auto without = stacks;
    without.tensors.erase(layer + "gate_up_proj_bias");
    EXPECT_THAT(faults(without, names), HasSubstr(layer)) << turn;
  }
}

/// `made` with every `first` in the names of its tensors as `second`.
test::MadeCheckpoint renamed(const test::MadeCheckpoint& made,
                             std::initializer_list<std::pair<std::string_view, std::string_view>> names) {
  test::MadeCheckpoint result{made.config, {}};
  for (const auto& [name, tensor] : made.tensors) {
    std::string other = name;
    for (const auto& [first, second] : names) {
      if (const size_t at = other.find(first); at != std::string::npos) other.replace(at, first.size(), second);
    }
    result.tensors.emplace(other, tensor);
  }
  result.config["architectures"] = {"OfNextYear"};
  result.config["model_type"] = "of_next_year";
  return result;
}

TEST_F(Experts, LinearsOfOtherNamesAreHeldAgainstEachOther) {
  const auto names = renamed(by_name_, {});
  const auto others = renamed(by_name_, {{".gate_proj", ".w1"}, {".down_proj", ".w2"}, {".up_proj", ".w3"}});
  EXPECT_THAT(faults(names, others), IsEmpty());
  EXPECT_THAT(faults(others, names), IsEmpty());
  auto exchanged = names;
  std::swap(exchanged.tensors.at(layer + "2.gate_proj.weight"), exchanged.tensors.at(layer + "2.up_proj.weight"));
  EXPECT_THAT(faults(exchanged, others), HasSubstr(layer + "2.gate_proj.weight"));
  auto lost = names;
  lost.tensors.erase(layer + "2.down_proj.weight");
  EXPECT_THAT(faults(lost, others), HasSubstr(layer + "2."));
}

TEST_F(Experts, StacksOfGraniteAreHeldAgainstNames) {
  const auto names = renamed(by_name_, {{".mlp.experts.", ".block_sparse_moe.experts."}});
  const auto stacks =
      renamed(stacked(by_name_, false), {{".mlp.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"},
                                         {".mlp.experts.down_proj", ".block_sparse_moe.output_linear.weight"}});
  EXPECT_THAT(faults(names, stacks), IsEmpty());
  EXPECT_THAT(faults(stacks, names), IsEmpty());
  const std::string granite = all_layers + "1.block_sparse_moe.experts.";
  auto exchanged = names;
  std::swap(exchanged.tensors.at(granite + "2.gate_proj.weight"), exchanged.tensors.at(granite + "2.up_proj.weight"));
  EXPECT_THAT(faults(exchanged, stacks), HasSubstr(granite + "2.gate_proj.weight"));
}

/// Names that nobody knows are no fault of the base.
TEST_F(Experts, PackedOnesOfNamesThatTheBaseDoesNotHaveAreNoted) {
  set_progress_enabled(false);
  renamed(test::made_mixture(test::Storage::int4), {}).write(folder_ / "candidate");
  auto base = renamed(by_name_, {{".gate_proj", ".lin_a"}, {".down_proj", ".lin_b"}, {".up_proj", ".lin_c"}});
  base.write(folder_ / "base");
  const auto weighed = [&] {
    CheckContext context(test::check_options(folder_ / "candidate", folder_ / "base"));
    Findings found;
    for (const CheckRow& row : ladder()) {
      if (row.name == "weights") row.run(context, found);
    }
    return found.text + join(found.checks.checks().front().faults, "\n");
  };
  const std::string found = weighed();
  EXPECT_THAT(found, HasSubstr("24 packed experts are not held against the base, which has nothing of their names: "
                               "model.language_model.layers.0.mlp.experts.0.down_proj, "));
  EXPECT_THAT(found, HasSubstr(" and 21 more"));
  EXPECT_THAT(found, Not(HasSubstr("the base has no such weight")));
  // One that stands alone with it is not called so by anyone.
  base = renamed(by_name_, {});
  base.tensors.erase(layer + "2.up_proj.weight");
  base.tensors.erase(all_layers + "1.self_attn.o_proj.weight");
  base.write(folder_ / "base");
  const std::string lone = weighed();
  EXPECT_THAT(lone, HasSubstr(layer + "2.up_proj: the base has no such weight"));
  EXPECT_THAT(lone, Not(HasSubstr("not held against")));
}

TEST_F(Experts, AStackThatIsNotThereLeavesOthersToBeHeldAgainstNames) {
  const auto stacks = stacked(by_name_, false);
  auto lost = by_name_;
  lost.values<uint16_t>(layer + "2.up_proj.weight")[5] ^= 0x8000u;
  for (const auto& name : lost.names_with(all_layers + "0.mlp.experts.")) lost.tensors.erase(name);
  const std::string found = faults(lost, stacks);
  EXPECT_THAT(found, HasSubstr(layer + "2.up_proj.weight"));
  EXPECT_THAT(found, HasSubstr(all_layers + "0.mlp.experts."));
  EXPECT_THAT(found, Not(HasSubstr(layer + "0."))) << found;
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
