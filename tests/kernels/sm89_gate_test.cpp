// What an RTX 4090 gets, read from its machine code, so that no 4090 is needed to see that a kernel got worse: every
// instance of the tuned kernels keeps its budget of instructions, loads weights 128 bits at a time, uses no local
// memory beyond what is written here, and has no shared memory beside the one whose size its launch checks
// (frame/launch.cuh). Where budgets are kept the test prints the figures of the tables in docs/kernels/.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
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

/// The kernels of some files of src/kernels: those whose name has `traits` in it.
struct Family {
  std::string_view files, traits;  ///< files with spaces between them
  std::string_view name;
  size_t rows_argument;   ///< of the template arguments of the traits: activation rows; none: groups of eight follow
  double mma_per_weight;  ///< in units of what a multiplication alone needs: zero points may have products of their own
  bool narrow_inputs;     ///< activations, or the signs of their rotation, are loaded 32 bits at a time
  bool staged;            ///< codes, scales and activations come by asynchronous copies
  bool shared = false;    ///< … of the whole block, for several warps
  bool codes_only = false;  ///< nothing but codes comes by asynchronous copies
  double mma_beside = 0;    ///< what groups of eight rows share, beside mma_per_weight of each
};
constexpr size_t groups_follow = 99, rows_follow = 98;
/// In place of rows, of which a warp has 128: the inputs of an integer sum. A product has twice the weights.
constexpr std::string_view int8_traits = "Kind<";
/// In place of rows of the GEMV: strips, two of which are gated. In place of a second width: the window, 0 for those that
/// take a mask. A product over bytes has half the weights; eight row tiles have a ninth product, with ones.
constexpr std::string_view trellis_traits = "Codes<";
/// In place of a second width of small floats: the weights of a block of scales, 0 for a tile. Those of a tile are loaded
/// 64 bits at a time.
constexpr std::string_view float_scales = "small_float::";
constexpr Family families[] = {
    {"kbit/gemv_cuda kbit/gemv_bf16_cuda", "KbitGemv<", "kbit gemv", 3, 1, false, false},
    {"kbit/gemv_fused_cuda", "KbitGemv<", "kbit gemv, fused", 3, 1, false, false},
    {"kbit/gemm_cuda", "KbitWeights<", "kbit gemm", groups_follow, 1, false, false},
    {"integer/gemv_cuda", "IntegerGemv<", "marlin gemv", 3, 1.25, true, true},
    {"integer/gemv_fused_cuda", "IntegerGemv<", "marlin gemv, fused", 3, 1.25, true, true},
    {"integer/gemm_cuda", "MarlinWeights<", "marlin gemm", groups_follow, 1, true, false},
    {"integer/interleaved_gemv_cuda", "InterleavedGemv<", "interleaved gemv", 1, 2, true, false},
    {"rotated/gemv_cuda", "Widths<", "rotated gemv", rows_follow, 1, true, false},
    {"rotated/gemv_fused_cuda", "Widths<", "rotated gemv, fused", rows_follow, 1, true, false},
    {"rotated/gemm_cuda", "RotatedWeights<", "rotated gemm", groups_follow, 1, false, false},
    {"integer/int8_gemm_cuda", int8_traits, "marlin int8", 2, 0.5, true, false, true},
    {"trellis/gemv_cuda", trellis_traits, "trellis gemv", rows_follow, 2, true, false},
    {"trellis/gemv_units_cuda", trellis_traits, "trellis unit gemv", rows_follow, 2, true, true, false, true},
    {"trellis/rows_cuda", trellis_traits, "trellis rows", rows_follow, 1, true, false, false, false, 0.125},
    {"trellis/rows_units_cuda", trellis_traits, "trellis unit rows", rows_follow, 1, true, true, false, true, 0.125},
    {"small_float/gemv_cuda", "KbitGemv<", "float gemv", 3, 1, true, false},
    {"small_float/gemv_fused_cuda", "KbitGemv<", "float gemv, fused", 3, 1, true, false},
    {"small_float/gemm_cuda", "KbitWeights<", "float gemm", groups_follow, 1, true, false},
};

struct Budget {
  std::string_view family;
  int rows, bits;
  double instructions;       ///< per weight and lane in the steady state
  int local_in_loop, local;  ///< instructions on local memory: in the main loop, in the whole kernel
  int second_bits = 0;       ///< of a second pass; the window of a trellis; the block of a small float
};

/// Measured with nvcc 13.0 on 2026-11-21: the dearest instance of each line over types of activations, of scales and
/// zero points, and 8 % more, because every compiler allots registers a little differently. The memory of an RTX 4090
/// leaves time for 11.5, 16.6, 21.8 and 26.9 at 2, 3, 4 and 5 bits of kbit, 21.1 for int4-g128. The GEMV spills nothing
/// at 2 to 5 bits but for one address with sixteen rows at 5, and with four rotated rows at 3 + 3. The GEMM keeps
/// addresses for its asynchronous copies in local memory, which its main loop reads again. Small floats: 2026-11-26; of 8
/// bits anew on 2026-11-27 for codes that one instruction decodes: half the instructions, and three tiles in flight at one
/// row; the GEMM of MXFP8 keeps 12 in place of 4 in its loop at 32 rows, of 77 % of the instructions. Trellises of 16 rows
/// at 3 bits: 36 on 2026-11-27 for 32, since sums of four other blocks are received at once.
constexpr Budget budgets[] = {
    {"kbit gemv", 1, 2, 1.14, 0, 0},
    {"kbit gemv", 1, 3, 1.84, 0, 0},
    {"kbit gemv", 1, 4, 1.67, 0, 0},
    {"kbit gemv", 1, 5, 2.66, 0, 0},
    {"kbit gemv", 4, 2, 1.52, 0, 0},
    {"kbit gemv", 4, 3, 2.23, 0, 0},
    {"kbit gemv", 4, 4, 2.07, 0, 0},
    {"kbit gemv", 4, 5, 2.92, 0, 0},
    {"kbit gemv", 8, 2, 1.62, 0, 0},
    {"kbit gemv", 8, 3, 2.34, 0, 0},
    {"kbit gemv", 8, 4, 2.16, 0, 0},
    {"kbit gemv", 8, 5, 3.00, 0, 0},
    {"kbit gemv", 16, 2, 2.21, 0, 0},
    {"kbit gemv", 16, 3, 2.92, 0, 0},
    {"kbit gemv", 16, 4, 2.75, 0, 0},
    {"kbit gemv", 16, 5, 3.58, 2, 3},
    {"kbit gemv, fused", 1, 2, 1.14, 0, 0},
    {"kbit gemv, fused", 1, 3, 1.84, 0, 0},
    {"kbit gemv, fused", 1, 4, 1.67, 0, 0},
    {"kbit gemv, fused", 1, 5, 2.66, 0, 0},
    {"marlin gemv, fused", 1, 4, 2.83, 0, 0},
    {"marlin gemv, fused", 1, 8, 2.88, 0, 0},
    {"kbit gemm", 32, 2, 4.10, 0, 3},
    {"kbit gemm", 32, 3, 5.23, 1, 26},
    {"kbit gemm", 32, 4, 5.16, 1, 11},
    {"kbit gemm", 32, 5, 5.80, 10, 44},
    {"kbit gemm", 64, 2, 5.93, 0, 12},
    {"kbit gemm", 64, 3, 7.04, 4, 29},
    {"kbit gemm", 64, 4, 7.08, 21, 80},
    {"kbit gemm", 64, 5, 7.72, 16, 59},
    {"marlin gemv", 1, 4, 3.15, 0, 0},
    {"marlin gemv", 1, 8, 5.17, 0, 0},
    {"marlin gemv", 8, 4, 3.37, 0, 0},
    {"marlin gemv", 8, 8, 5.37, 0, 0},
    {"marlin gemv", 16, 4, 4.26, 0, 0},
    {"marlin gemv", 16, 8, 6.21, 0, 0},
    {"marlin gemm", 32, 4, 7.06, 0, 0},
    {"marlin gemm", 32, 8, 9.70, 88, 140},
    {"marlin gemm", 64, 4, 9.09, 0, 0},
    {"marlin gemm", 64, 8, 12.21, 60, 100},
    {"interleaved gemv", 1, 4, 3.28, 0, 0},
    {"interleaved gemv", 2, 4, 3.28, 0, 0},
    {"interleaved gemv", 4, 4, 3.74, 0, 0},
    {"interleaved gemv", 8, 4, 5.02, 0, 0},
    {"rotated gemv", 1, 2, 1.27, 0, 0},
    {"rotated gemv", 1, 3, 1.98, 0, 0},
    {"rotated gemv", 1, 4, 1.80, 0, 0},
    {"rotated gemv", 1, 5, 2.85, 0, 0},
    {"rotated gemv", 1, 3, 2.08, 0, 0, 3},
    {"rotated gemv", 1, 4, 1.94, 0, 0, 4},
    {"rotated gemv", 1, 4, 1.76, 0, 0, 2},
    {"rotated gemv", 4, 2, 1.44, 0, 0},
    {"rotated gemv", 4, 3, 2.16, 0, 0},
    {"rotated gemv", 4, 4, 2.00, 0, 0},
    {"rotated gemv", 4, 5, 2.86, 0, 0},
    {"rotated gemv", 4, 3, 2.53, 1, 5, 3},
    {"rotated gemv", 4, 4, 2.31, 0, 0, 4},
    {"rotated gemv", 4, 4, 2.15, 0, 0, 2},
    {"rotated gemv", 8, 2, 1.61, 0, 0},
    {"rotated gemv", 8, 3, 2.34, 0, 0},
    {"rotated gemv", 8, 4, 2.17, 0, 0},
    {"rotated gemv", 8, 5, 2.99, 0, 0},
    {"rotated gemv", 8, 3, 2.60, 0, 0, 3},
    {"rotated gemv", 8, 4, 2.44, 0, 0, 4},
    {"rotated gemv", 8, 4, 2.28, 0, 0, 2},
    {"rotated gemv", 16, 2, 2.16, 0, 0},
    {"rotated gemv", 16, 3, 2.86, 0, 0},
    {"rotated gemv", 16, 4, 2.70, 0, 0},
    {"rotated gemv", 16, 5, 3.60, 2, 3},
    {"rotated gemv", 16, 3, 3.15, 0, 0, 3},
    {"rotated gemv", 16, 4, 2.99, 0, 0, 4},
    {"rotated gemv", 16, 4, 2.87, 0, 0, 2},
    {"rotated gemv, fused", 1, 2, 1.27, 0, 0},
    {"rotated gemv, fused", 1, 3, 1.98, 0, 0},
    {"rotated gemv, fused", 1, 4, 1.80, 0, 0},
    {"rotated gemv, fused", 1, 5, 2.85, 0, 0},
    {"rotated gemv, fused", 1, 3, 2.08, 0, 0, 3},
    {"rotated gemv, fused", 1, 4, 1.94, 0, 0, 4},
    {"rotated gemv, fused", 1, 4, 1.76, 0, 0, 2},
    {"rotated gemm", 32, 2, 4.47, 0, 0},
    {"rotated gemm", 32, 3, 5.63, 0, 8},
    {"rotated gemm", 32, 4, 5.53, 0, 15},
    {"rotated gemm", 32, 5, 6.23, 13, 54},
    {"rotated gemm", 64, 2, 6.70, 0, 15},
    {"rotated gemm", 64, 3, 7.86, 9, 43},
    {"rotated gemm", 64, 4, 7.89, 11, 42},
    {"rotated gemm", 64, 5, 8.52, 16, 65},
    {"marlin int8", 128, 4, 7.61, 0, 0},
    {"marlin int8", 32, 4, 20.49, 8, 36},
    {"marlin int8", 128, 8, 7.94, 0, 0},
    {"marlin int8", 32, 8, 20.74, 8, 37},
    {"trellis gemv", 1, 2, 3.36, 0, 0, 16},
    {"trellis gemv", 1, 2, 4.09, 0, 0, 14},
    {"trellis gemv", 1, 2, 4.44, 0, 0},
    {"trellis gemv", 1, 3, 4.00, 0, 0, 16},
    {"trellis gemv", 1, 3, 4.22, 0, 0, 14},
    {"trellis gemv", 1, 3, 5.08, 0, 0},
    {"trellis gemv", 1, 4, 3.49, 0, 0, 16},
    {"trellis gemv", 1, 4, 4.32, 0, 0, 14},
    {"trellis gemv", 1, 4, 4.57, 0, 0},
    {"trellis gemv", 2, 2, 3.45, 0, 4, 16},
    {"trellis gemv", 2, 2, 4.15, 0, 0, 14},
    {"trellis gemv", 2, 2, 4.51, 0, 4},
    {"trellis gemv", 2, 3, 4.07, 0, 0, 16},
    {"trellis gemv", 2, 3, 4.26, 0, 0, 14},
    {"trellis gemv", 2, 3, 5.15, 0, 0},
    {"trellis gemv", 2, 4, 3.65, 0, 15, 16},
    {"trellis gemv", 2, 4, 4.49, 0, 2, 14},
    {"trellis gemv", 2, 4, 4.73, 0, 11},
    {"trellis unit gemv", 1, 2, 3.27, 0, 0, 16},
    {"trellis unit gemv", 1, 2, 3.95, 0, 0, 14},
    {"trellis unit gemv", 1, 2, 4.35, 0, 0},
    {"trellis unit gemv", 1, 3, 3.86, 0, 0, 16},
    {"trellis unit gemv", 1, 3, 4.00, 0, 0, 14},
    {"trellis unit gemv", 1, 3, 4.94, 0, 0},
    {"trellis unit gemv", 1, 4, 3.23, 0, 0, 16},
    {"trellis unit gemv", 1, 4, 4.04, 0, 0, 14},
    {"trellis unit gemv", 1, 4, 4.31, 0, 0},
    {"trellis unit gemv", 2, 2, 3.27, 0, 0, 16},
    {"trellis unit gemv", 2, 2, 3.95, 0, 0, 14},
    {"trellis unit gemv", 2, 2, 4.35, 0, 0},
    {"trellis unit gemv", 2, 3, 3.86, 0, 0, 16},
    {"trellis unit gemv", 2, 3, 4.00, 0, 0, 14},
    {"trellis unit gemv", 2, 3, 4.94, 0, 0},
    {"trellis unit gemv", 2, 4, 3.23, 0, 0, 16},
    {"trellis unit gemv", 2, 4, 4.04, 0, 0, 14},
    {"trellis unit gemv", 2, 4, 4.31, 0, 0},
    {"trellis rows", 8, 2, 5.10, 0, 0, 16},
    {"trellis rows", 8, 2, 5.78, 0, 0, 14},
    {"trellis rows", 8, 2, 6.19, 0, 0},
    {"trellis rows", 8, 3, 5.75, 0, 0, 16},
    {"trellis rows", 8, 3, 5.89, 0, 0, 14},
    {"trellis rows", 8, 3, 6.83, 0, 0},
    {"trellis rows", 8, 4, 5.24, 0, 0, 16},
    {"trellis rows", 8, 4, 6.05, 0, 0, 14},
    {"trellis rows", 8, 4, 6.34, 0, 0},
    {"trellis rows", 16, 2, 5.43, 0, 18, 16},
    {"trellis rows", 16, 2, 6.11, 0, 30, 14},
    {"trellis rows", 16, 2, 6.51, 0, 18},
    {"trellis rows", 16, 3, 5.96, 0, 39, 16},
    {"trellis rows", 16, 3, 6.10, 0, 37, 14},
    {"trellis rows", 16, 3, 7.04, 0, 39},
    {"trellis rows", 16, 4, 5.48, 0, 91, 16},
    {"trellis rows", 16, 4, 6.24, 0, 83, 14},
    {"trellis rows", 16, 4, 6.56, 0, 91},
    {"trellis unit rows", 8, 2, 4.84, 0, 0, 16},
    {"trellis unit rows", 8, 2, 5.51, 0, 0, 14},
    {"trellis unit rows", 8, 2, 5.92, 0, 0},
    {"trellis unit rows", 8, 3, 5.42, 0, 0, 16},
    {"trellis unit rows", 8, 3, 5.56, 0, 0, 14},
    {"trellis unit rows", 8, 3, 6.50, 0, 0},
    {"trellis unit rows", 8, 4, 4.81, 0, 0, 16},
    {"trellis unit rows", 8, 4, 5.62, 0, 0, 14},
    {"trellis unit rows", 8, 4, 5.89, 0, 0},
    {"trellis unit rows", 16, 2, 4.99, 0, 0, 16},
    {"trellis unit rows", 16, 2, 5.67, 0, 0, 14},
    {"trellis unit rows", 16, 2, 6.07, 0, 0},
    {"trellis unit rows", 16, 3, 5.61, 0, 0, 16},
    {"trellis unit rows", 16, 3, 5.73, 0, 0, 14},
    {"trellis unit rows", 16, 3, 6.69, 0, 0},
    {"trellis unit rows", 16, 4, 4.98, 0, 0, 16},
    {"trellis unit rows", 16, 4, 5.79, 0, 0, 14},
    {"trellis unit rows", 16, 4, 6.06, 0, 0},
    {"float gemv, fused", 1, 4, 2.47, 0, 0, 16},
    {"float gemv, fused", 1, 4, 1.70, 0, 0, 32},
    {"float gemv, fused", 1, 8, 1.25, 0, 4, 32},
    {"float gemv, fused", 1, 8, 1.13, 0, 0},
    {"float gemv", 4, 4, 2.65, 0, 0, 16},
    {"float gemv", 4, 4, 2.06, 0, 0, 32},
    {"float gemv", 4, 8, 1.60, 2, 3, 32},
    {"float gemv", 4, 8, 1.27, 0, 0},
    {"float gemv", 8, 4, 2.80, 0, 0, 16},
    {"float gemv", 8, 4, 2.21, 0, 0, 32},
    {"float gemv", 8, 8, 1.73, 0, 4, 32},
    {"float gemv", 8, 8, 1.41, 0, 0},
    {"float gemv", 16, 4, 3.41, 0, 0, 16},
    {"float gemv", 16, 4, 2.82, 0, 0, 32},
    {"float gemv", 16, 8, 2.33, 0, 0, 32},
    {"float gemv", 16, 8, 2.03, 0, 0},
    {"float gemm", 32, 4, 4.77, 0, 8, 16},
    {"float gemm", 32, 4, 5.00, 0, 8, 32},
    {"float gemm", 32, 8, 5.18, 13, 30, 32},
    {"float gemm", 32, 8, 4.41, 0, 0},
    {"float gemm", 64, 4, 6.74, 3, 21, 16},
    {"float gemm", 64, 4, 6.97, 3, 21, 32},
    {"float gemm", 64, 8, 7.15, 7, 21, 32},
    {"float gemm", 64, 8, 6.70, 55, 109},
};

/// One instance of a kernel, as its template arguments say.
struct Instance {
  int bits, rows;
  int second_bits = 0;

  /// Multiplications of a turn that have no weights: with H, of one row's inputs.
  static int of_inputs(const Family& family, int rows) { return family.traits == "Widths<" && rows == 1 ? 4 : 0; }
  /// Groups of eight rows: how often one decoded register is multiplied.
  int groups(const Family& family) const {
    if (family.traits == int8_traits) return 128 / 8;
    return family.traits == "InterleavedGemv<" ? (rows + 1) / 2 : std::max(1, rows / 8);
  }
};

int float_block(std::string_view scales) {
  if (scales.find("E4m3Scales") != std::string_view::npos) return 16;
  return scales.find("E8m0Scales") != std::string_view::npos ? 32 : 0;
}

std::optional<Instance> instance_of(const Family& family, const std::string& name) {
  // …KbitGemv<4, w4q::device::HalfType, w4q::kernels::kbit::E4m4Scales, 1>…, …KbitWeights<4, …>, 8>(…),
  // …Widths<4, 2>, 1>…
  const size_t begin = name.find(family.traits);
  if (begin == std::string::npos) return std::nullopt;
  const size_t end = name.find('>', begin);
  std::istringstream text(name.substr(begin + family.traits.size(), end - begin - family.traits.size()));
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(text, argument, ',');) arguments.push_back(argument);
  const bool has_bits = family.traits != "InterleavedGemv<";
  Instance instance{has_bits ? std::stoi(arguments.at(0)) : 4, 0};
  const auto following = [&] { return std::stoi(name.substr(name.find(',', end) + 1)); };
  if (family.rows_argument == groups_follow) {
    instance.rows = 8 * following();
  } else if (family.rows_argument == rows_follow) {
    instance.rows = following();
    instance.second_bits = std::stoi(arguments.at(1));
  } else {
    instance.rows = std::stoi(arguments.at(family.rows_argument));
  }
  if (name.find(float_scales) != std::string::npos) instance.second_bits = float_block(arguments.at(2));
  return instance;
}

/// What the gate asks about one kernel.
struct Figures {
  int instructions = 0;  ///< of one turn of the main loop, in its steady state, as are the next four
  int weights = 0;       ///< per lane
  int weight_loads = 0;  ///< of 128 bits
  int copies = 0;        ///< of 128 bits, to shared memory
  int narrow_loads = 0;
  int calls = 0;
  int narrow_weight_loads = 0;  ///< in the whole kernel
  int local_in_loop = 0, local = 0;
};

/// Weights are read once and must not push activations out of L1: only their loads allocate nothing there.
bool is_weight_load(const sass::Instruction& instruction) {
  return sass::is_global_load(instruction) && sass::has_part(instruction, "NA");
}

Figures figures_of(const sass::Kernel& kernel, const sass::Loop& loop, double mma_per_step, int other_mma) {
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
    if (instruction.opcode.starts_with("LDGSTS")) ++figures.copies;
    if (sass::is_global_load(instruction) && !sass::has_part(instruction, "128")) ++figures.narrow_loads;
  }
  figures.weights = static_cast<int>(std::lround(weights_per_mma * (tensor - other_mma) / mma_per_step));
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

/// Skips where there is nothing to read, and says so; else has the sm_89 code of files of kernels.
class Sm89Gate : public testing::Test {
 protected:
  void SetUp() override {
    if (!W4Q_HAS_SM89_CODE)
      GTEST_SKIP() << "this build has no optimized sm_89 machine code: W4Q_CUDA_ARCHITECTURES lacks 89, or "
                      "W4Q_FAST_COMPILED_KERNELS is on";
    if (cuobjdump().empty()) {
      GTEST_SKIP() << "cuobjdump of the CUDA toolkit is neither beside nvcc nor on PATH (W4Q_CUOBJDUMP may name it)";
    }
  }

  /// All instances of a kernel keep their budgets, and every budget has instances.
  void check(std::string_view name) {
    const auto* const family = std::ranges::find(families, name, &Family::name);
    ASSERT_NE(family, std::end(families));
    std::istringstream files{std::string(family->files)};
    for (std::string file; files >> file;) check_file(*family, file);
    print_and_count(*family);
  }

 private:
  /// The tool reads one file at a time.
  void check_file(const Family& family, const std::string& file) {
    // How it names what it takes out of an object depends on its version.
    const std::string cubin = "*sm_89.cubin";
    run("rm -f *.cubin && " + quoted(cuobjdump()) + " -xelf all " + quoted(W4Q_KERNELS_OBJECTS "/" + file + ".cu.o"));
    std::ifstream resources = run(quoted(cuobjdump()) + " -res-usage " + cubin);
    for (const auto& kernel : sass::parse_resources(resources)) {
      EXPECT_EQ(kernel.shared_bytes, 0u) << kernel.name << ": shared memory that the check of its launch does not see";
    }
    std::ifstream listing = run(quoted(cuobjdump()) + " -sass " + cubin);
    for (const auto& kernel : sass::parse_listing(listing)) check_kernel(family, kernel);
  }

  struct Measured {
    int instances = 0;
    double instructions = 0;  ///< of the dearest instance
    int local_in_loop = 0, local = 0;
  };

  /// What a command prints when it runs in this test's own folder.
  std::ifstream run(const std::string& command) {
    const std::string redirected = "cd " + quoted(folder_.path()) + " && " + command + " > output";
    EXPECT_EQ(std::system(redirected.c_str()), 0) << redirected;
    return std::ifstream(folder_ / "output");
  }

  void check_kernel(const Family& family, const sass::Kernel& kernel) {
    SCOPED_TRACE(kernel.name);
    const auto instance = instance_of(family, kernel.name);
    ASSERT_TRUE(instance);
    const auto* const budget = std::ranges::find_if(budgets, [&](const Budget& b) {
      return b.family == family.name && b.rows == instance->rows && b.bits == instance->bits &&
             b.second_bits == instance->second_bits;
    });
    ASSERT_NE(budget, std::end(budgets)) << "a kernel without a budget";
    const auto loop = sass::main_loop(kernel);
    ASSERT_TRUE(loop) << "no loop with tensor instructions";
    const Figures figures =
        figures_of(kernel, *loop, instance->groups(family) * family.mma_per_weight + family.mma_beside,
                   Instance::of_inputs(family, instance->rows));
    ASSERT_GT(figures.weights, 0);

    const double per_weight = static_cast<double>(figures.instructions) / figures.weights;
    EXPECT_LE(per_weight, budget->instructions);
    EXPECT_EQ(figures.calls, 0) << "instructions that are not counted";
    if (!family.narrow_inputs) {
      EXPECT_EQ(figures.narrow_loads, 0);
    }
    EXPECT_EQ(figures.narrow_weight_loads, 0);
    // int8 words of a lane are two neighbouring loads; the second is to find its sector in L1.
    if (family.shared) {
      EXPECT_EQ(figures.weight_loads, 0);
    } else if (family.staged) {
      // Beside the codes: scales or zero points, and a chunk of every fourth row of activations.
      const int others = family.codes_only ? 0 : 1 + (instance->rows + 3) / 4;
      EXPECT_EQ((figures.copies - others) * 128, figures.weights * instance->bits) << "codes are to be copied once";
    } else if (instance->bits < 8) {
      // Of passes of different widths, the loads of both stand there, and a predicate chooses.
      const bool second = instance->second_bits != instance->bits && family.traits == "Widths<";
      const int others = second ? instance->second_bits : 0;
      EXPECT_EQ(figures.weight_loads * 128, figures.weights * (instance->bits + others)) << "codes are loaded once";
    }
    EXPECT_LE(figures.local_in_loop, budget->local_in_loop);
    EXPECT_LE(figures.local, budget->local);

    Measured& measured = measured_.at(static_cast<size_t>(budget - std::begin(budgets)));
    ++measured.instances;
    measured.instructions = std::max(measured.instructions, per_weight);
    measured.local_in_loop = std::max(measured.local_in_loop, figures.local_in_loop);
    measured.local = std::max(measured.local, figures.local);
  }

  void print_and_count(const Family& family) {
    for (size_t i = 0; i < std::size(budgets); ++i) {
      if (budgets[i].family != family.name) continue;
      const Measured& m = measured_.at(i);
      EXPECT_GT(m.instances, 0) << family.name << " of " << budgets[i].rows << " rows";
      const int second = budgets[i].second_bits;
      const std::string bits = std::to_string(budgets[i].bits) + (second > 0 ? " + " + std::to_string(second) : "");
      const char* const of = family.traits == int8_traits ? "inputs a sum"
                             : family.traits == trellis_traits && family.name.find("rows") == std::string_view::npos
                                 ? "strips"
                                 : "rows";
      std::printf("| %s, %d %s, %s bits | %.2f | %d | %d |\n", std::string(family.name).c_str(), budgets[i].rows, of,
                  bits.c_str(), m.instructions, m.local_in_loop, m.local);
    }
  }

  TemporaryFolder folder_;
  std::array<Measured, std::size(budgets)> measured_;
};

TEST_F(Sm89Gate, KbitGemvKeepsItsBudgets) { check("kbit gemv"); }
TEST_F(Sm89Gate, FusedKbitGemvKeepsItsBudgets) { check("kbit gemv, fused"); }
TEST_F(Sm89Gate, KbitGemmKeepsItsBudgets) { check("kbit gemm"); }
TEST_F(Sm89Gate, MarlinGemvKeepsItsBudgets) { check("marlin gemv"); }
TEST_F(Sm89Gate, FusedMarlinGemvKeepsItsBudgets) { check("marlin gemv, fused"); }
TEST_F(Sm89Gate, MarlinGemmKeepsItsBudgets) { check("marlin gemm"); }
TEST_F(Sm89Gate, InterleavedGemvKeepsItsBudgets) { check("interleaved gemv"); }
TEST_F(Sm89Gate, RotatedGemvKeepsItsBudgets) { check("rotated gemv"); }
TEST_F(Sm89Gate, FusedRotatedGemvKeepsItsBudgets) { check("rotated gemv, fused"); }
TEST_F(Sm89Gate, RotatedGemmKeepsItsBudgets) { check("rotated gemm"); }
TEST_F(Sm89Gate, Int8GemmKeepsItsBudgets) { check("marlin int8"); }
TEST_F(Sm89Gate, TrellisGemvKeepsItsBudgets) { check("trellis gemv"); }
TEST_F(Sm89Gate, TrellisUnitGemvKeepsItsBudgets) { check("trellis unit gemv"); }
TEST_F(Sm89Gate, TrellisRowsKeepTheirBudgets) { check("trellis rows"); }
TEST_F(Sm89Gate, TrellisUnitRowsKeepTheirBudgets) { check("trellis unit rows"); }
TEST_F(Sm89Gate, FloatGemvKeepsItsBudgets) { check("float gemv"); }
TEST_F(Sm89Gate, FusedFloatGemvKeepsItsBudgets) { check("float gemv, fused"); }
TEST_F(Sm89Gate, FloatGemmKeepsItsBudgets) { check("float gemm"); }

}  // namespace
}  // namespace w4q::test
