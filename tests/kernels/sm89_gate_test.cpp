// What an RTX 4090 gets, read from its machine code, so that no 4090 is needed to see that a kernel got worse: every
// instance of the tuned kbit kernels keeps its budget of instructions, loads weights 128 bits at a time, uses no local
// memory beyond what is written here, and has no shared memory beside the one whose size its launch checks
// (kbit_launch.cuh). Where budgets are kept the test prints the figures of the table in docs/kernels/kbit.md.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/sass.h"
#include "support.h"

namespace w4q::test {
namespace {

constexpr int fewest_bits = 2;

struct Budget {
  std::string_view kernel;
  int rows;
  std::array<double, 4> instructions;  ///< per weight and lane in the steady state, at 2, 3, 4, 5 bits
  int local_in_loop, local;            ///< instructions on local memory: in the main loop, in the whole kernel
};

/// Measured with nvcc 13.0 on 2026-11-21: the dearest of f16 and bf16 activations and E4M4 and f16 scales, and 8 %
/// more, because every compiler allots registers a little differently. The memory of an RTX 4090 leaves time for 11.5,
/// 16.6, 21.8 and 26.9. The GEMV spills nothing. The GEMM keeps addresses for its asynchronous copies in local memory,
/// which its main loop reads again (up to 10 and 19 times, at 5 bits).
constexpr Budget budgets[] = {
    {"gemv", 1, {1.15, 1.86, 1.70, 2.66}, 0, 0},    {"gemv", 4, {1.49, 2.21, 2.04, 2.89}, 0, 0},
    {"gemv", 8, {1.62, 2.33, 2.18, 3.01}, 0, 0},    {"gemv", 16, {2.15, 2.87, 2.70, 3.53}, 0, 0},
    {"gemm", 32, {3.90, 5.11, 5.23, 5.84}, 11, 40}, {"gemm", 64, {5.73, 7.12, 7.26, 7.79}, 21, 71},
};
/// Widths × types of activations × types of scales that each row of the table stands for.
constexpr int instances_per_budget = 4 * 2 * 2;

/// One instance of a kernel, as its template arguments say.
struct Instance {
  std::string kernel;
  int bits, rows;

  /// Groups of eight rows: how often one decoded register is multiplied.
  int groups() const { return std::max(1, rows / 8); }
};

std::optional<Instance> instance_of(const std::string& name) {
  // …kbit_gemv_kernel<4, w4q::device::HalfType, w4q::kernels::kbit::E4m4Scales, 1, 3, 12>(…)
  const size_t begin = name.find("kbit_gem");
  const size_t end = name.find("_kernel<", begin);
  if (begin == std::string::npos || end == std::string::npos) return std::nullopt;
  const std::string kernel = name.substr(begin + 5, end - begin - 5);
  std::istringstream text(name.substr(end + 8, name.find('>', end) - end - 8));
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(text, argument, ',');) arguments.push_back(argument);
  if (arguments.size() < 4) return std::nullopt;
  // The GEMM's last argument is its number of groups of eight rows.
  return Instance{kernel, std::stoi(arguments[0]), std::stoi(arguments[3]) * (kernel == "gemm" ? 8 : 1)};
}

/// What the gate asks about one kernel.
struct Figures {
  int instructions = 0;  ///< of one turn of the main loop, in its steady state, as are the next four
  int weights = 0;       ///< per lane
  int weight_loads = 0;  ///< of 128 bits
  int narrow_loads = 0;
  int calls = 0;
  int narrow_weight_loads = 0;  ///< in the whole kernel
  int local_in_loop = 0, local = 0;
};

/// Weights are read once and must not push activations out of L1: only their loads allocate nothing there.
bool is_weight_load(const sass::Instruction& instruction) {
  return sass::is_global_load(instruction) && sass::has_part(instruction, "NA");
}

Figures figures_of(const sass::Kernel& kernel, const sass::Loop& loop, int groups) {
  // A lane of one m16n8k16 mma holds 8 of its 256 weights.
  constexpr int weights_per_mma = 8;
  Figures figures;
  for (size_t i = 0; i < kernel.code.size(); ++i) {
    const sass::Instruction& instruction = kernel.code[i];
    if (is_weight_load(instruction) && !sass::has_part(instruction, "128")) ++figures.narrow_weight_loads;
    if (!sass::is_local(instruction)) continue;
    ++figures.local;
    if (i >= loop.first && i <= loop.last) ++figures.local_in_loop;
  }
  int tensor = 0;
  for (const size_t i : sass::steady_way(kernel, loop)) {
    const sass::Instruction& instruction = kernel.code[i];
    ++figures.instructions;
    if (sass::is_tensor(instruction)) ++tensor;
    if (sass::is_call(instruction)) ++figures.calls;
    if (is_weight_load(instruction)) ++figures.weight_loads;
    if (sass::is_global_load(instruction) && !sass::has_part(instruction, "128")) ++figures.narrow_loads;
  }
  figures.weights = weights_per_mma * tensor / groups;
  return figures;
}

/// The disassembler: the one that the environment names, that of the CUDA toolkit, or the first on PATH.
std::string cuobjdump() {
  if (const char* named = std::getenv("W4Q_CUOBJDUMP")) return named;
  const char* path = std::getenv("PATH");
  std::istringstream folders(std::string(W4Q_CUDA_BIN) + ":" + (path != nullptr ? path : ""));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::filesystem::path tool = std::filesystem::path(folder) / "cuobjdump";
    if (::access(tool.c_str(), X_OK) == 0) return tool;
  }
  return {};
}

/// As one word of the shell.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

/// Skips where there is nothing to read, and says so; else has the sm_89 code of one file of kernels.
class Sm89Gate : public testing::Test {
 protected:
  void SetUp() override {
    if (!W4Q_HAS_SM89_CODE) GTEST_SKIP() << "this build has no sm_89 machine code: W4Q_CUDA_ARCHITECTURES lacks 89";
    if (cuobjdump().empty()) {
      GTEST_SKIP() << "cuobjdump of the CUDA toolkit is neither beside nvcc nor on PATH (W4Q_CUOBJDUMP may name it)";
    }
  }

  /// All instances of a kernel keep their budgets, and are as many as the budgets speak of.
  void check(const std::string& kernel_name) {
    const std::string cubin = "kbit_" + kernel_name + "_cuda.sm_89.cubin";
    run(quoted(cuobjdump()) + " -xelf " + cubin + " " + quoted(W4Q_KERNELS_LIBRARY));
    std::ifstream resources = run(quoted(cuobjdump()) + " -res-usage " + cubin);
    for (const auto& kernel : sass::parse_resources(resources)) {
      EXPECT_EQ(kernel.shared_bytes, 0u) << kernel.name << ": shared memory that the check of its launch does not see";
    }
    std::ifstream listing = run(quoted(cuobjdump()) + " -sass " + cubin);
    for (const auto& kernel : sass::parse_listing(listing)) check_kernel(kernel);
    print_and_count(kernel_name);
  }

 private:
  struct Measured {
    int instances = 0;
    std::array<double, 4> instructions{};  ///< of the dearest instance
  };

  /// What a command prints when it runs in this test's own folder.
  std::ifstream run(const std::string& command) {
    const std::string redirected = "cd " + quoted(folder_.path()) + " && " + command + " > output";
    EXPECT_EQ(std::system(redirected.c_str()), 0) << redirected;
    return std::ifstream(folder_ / "output");
  }

  void check_kernel(const sass::Kernel& kernel) {
    SCOPED_TRACE(kernel.name);
    const auto instance = instance_of(kernel.name);
    ASSERT_TRUE(instance);
    const auto* const budget = std::ranges::find_if(
        budgets, [&](const Budget& b) { return b.kernel == instance->kernel && b.rows == instance->rows; });
    ASSERT_NE(budget, std::end(budgets)) << "a kernel without a budget";
    const auto loop = sass::main_loop(kernel);
    ASSERT_TRUE(loop) << "no loop with tensor instructions";
    const Figures figures = figures_of(kernel, *loop, instance->groups());
    ASSERT_GT(figures.weights, 0);

    const size_t column = static_cast<size_t>(instance->bits - fewest_bits);
    const double per_weight = static_cast<double>(figures.instructions) / figures.weights;
    EXPECT_LE(per_weight, budget->instructions.at(column));
    EXPECT_EQ(figures.calls, 0) << "instructions that are not counted";
    EXPECT_EQ(figures.narrow_loads, 0);
    EXPECT_EQ(figures.narrow_weight_loads, 0);
    EXPECT_EQ(figures.weight_loads * 128, figures.weights * instance->bits) << "codes are to be loaded once";
    EXPECT_LE(figures.local_in_loop, budget->local_in_loop);
    EXPECT_LE(figures.local, budget->local);

    Measured& measured = measured_.at(static_cast<size_t>(budget - std::begin(budgets)));
    ++measured.instances;
    measured.instructions.at(column) = std::max(measured.instructions.at(column), per_weight);
  }

  void print_and_count(const std::string& kernel_name) {
    for (size_t i = 0; i < std::size(budgets); ++i) {
      if (budgets[i].kernel != kernel_name) continue;
      const Measured& measured = measured_.at(i);
      EXPECT_EQ(measured.instances, instances_per_budget) << kernel_name << " of " << budgets[i].rows << " rows";
      const auto& figures = measured.instructions;
      std::printf("| %s, %d rows | %.2f | %.2f | %.2f | %.2f |\n", kernel_name.c_str(), budgets[i].rows, figures[0],
                  figures[1], figures[2], figures[3]);
    }
  }

  TemporaryFolder folder_;
  std::array<Measured, std::size(budgets)> measured_;
};

TEST_F(Sm89Gate, GemvKeepsItsBudgets) { check("gemv"); }
TEST_F(Sm89Gate, GemmKeepsItsBudgets) { check("gemm"); }

}  // namespace
}  // namespace w4q::test
