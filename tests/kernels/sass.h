// Machine code of GPU kernels as `cuobjdump -sass` prints it, and the questions that the sm_89 gate asks of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::test::sass {

struct Instruction {
  uint32_t address;                               ///< bytes from the start of the kernel
  std::string opcode;                             ///< with its parts: "LDG.E.128"
  std::optional<uint32_t> target = std::nullopt;  ///< where a branch goes
  bool conditional = false;                       ///< guarded by a predicate, or a branch that takes one
};

struct Kernel {
  std::string name;  ///< demangled where it can be
  std::vector<Instruction> code;
};

/// What one line says, or nothing where it is no instruction (headings, the second half of an encoding).
std::optional<Instruction> parse_line(std::string_view line);
/// All kernels of a `cuobjdump -sass` listing.
std::vector<Kernel> parse_listing(std::istream& listing);

struct Resources {
  std::string name;
  uint32_t shared_bytes;  ///< static shared memory
};
/// All kernels of a `cuobjdump -res-usage` listing.
std::vector<Resources> parse_resources(std::istream& listing);

/// Instructions `first` to `last` of a kernel; `last` branches back to `first`.
struct Loop {
  size_t first, last;
};

/// The main loop: of the stretches that end in a branch back to their beginning, and where a way leads from there to
/// the branch, the shortest of those with most tensor instructions. Nothing for a kernel that has none.
std::optional<Loop> main_loop(const Kernel& kernel);

/// The way through a loop in its steady state, as indices of instructions, the closing branch last.
///
/// A main loop holds several ways: for whole tiles and for the ragged ones at an end, for aligned activations and for
/// others, and for row groups that end here. The steady way multiplies most, loads most 128-bit words for the next
/// turn, and takes no detour: of all ways forward from `first` to `last`, the one with the most tensor instructions; of
/// these with the most 128-bit global loads or asynchronous copies; of these the shortest.
std::vector<size_t> steady_way(const Kernel& kernel, const Loop& loop);

bool is_tensor(const Instruction& instruction);
/// A load from global memory to registers, or an asynchronous copy from global to shared memory.
bool is_global_load(const Instruction& instruction);
/// To or from local memory: a spilled register, or an array that the compiler could not keep in registers.
bool is_local(const Instruction& instruction);
/// A call that is always made. Guarded ones are how the compiler leaves a loop for far away.
bool is_call(const Instruction& instruction);
/// Whether `part` is one of the parts of the opcode that stand between dots: has_part("LDG.E.128", "128").
bool has_part(const Instruction& instruction, std::string_view part);

}  // namespace w4q::test::sass
