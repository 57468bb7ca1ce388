// The programs that people load checkpoints with, in the versions whose code the rules were read from.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::serving {

enum class Program { vllm, sglang, transformers, llama_cpp, trt_llm, mlx };

struct ProgramRow {
  Program program;
  std::string_view name;     ///< as --for takes it: "llama.cpp"
  std::string_view package;  ///< what was read: "vllm 0.33.0"
  std::string_view note;     ///< what it needs beside; empty: nothing
  bool fuses = false;        ///< loads q, k, v and gate, up as one linear
  bool splits = false;       ///< spreads a linear over GPUs
};

/// When the packages were read.
inline constexpr std::string_view programs_read = "2026-11";

/// In the order of Program.
std::span<const ProgramRow> programs();
const ProgramRow& describe(Program program);
/// Names separated by commas, or "all". Throws bad_argument with the names that there are.
std::vector<Program> parse_programs(std::string_view list);

}  // namespace w4q::serving
