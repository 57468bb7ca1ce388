#include "serving/program.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/text.h"

namespace w4q::serving {
namespace {

constexpr std::array<ProgramRow, 6> program_rows{{
    {Program::vllm, "vllm", "vllm 0.33.0", "with humming-kernels 0.1.19, which it requires on CUDA", true, true},
    {Program::sglang, "sglang", "sglang 0.5.23", "", true, true},
    {Program::transformers, "transformers", "transformers 5.23.0", "with gptqmodel and compressed-tensors 0.20.0",
     false, false},
    {Program::llama_cpp, "llama.cpp", "llama.cpp of llama-cpp-python 0.3.36", "", false, false},
    {Program::trt_llm, "trt-llm", "TensorRT-LLM as of 2026-11", "", true, true},
    {Program::mlx, "mlx", "mlx-lm 0.32.2", "", false, false},
}};

}  // namespace

std::span<const ProgramRow> programs() { return program_rows; }

const ProgramRow& describe(Program program) { return program_rows[static_cast<size_t>(program)]; }

std::vector<Program> parse_programs(std::string_view list) {
  std::vector<Program> found;
  const auto add = [&](Program program) {
    if (std::ranges::find(found, program) == found.end()) found.push_back(program);
  };
  while (true) {
    const size_t comma = std::min(list.find(','), list.size());
    const std::string_view name = list.substr(0, comma);
    const auto row = std::ranges::find(program_rows, name, &ProgramRow::name);
    if (name == "all") {
      for (const auto& each : program_rows) add(each.program);
    } else if (row != program_rows.end()) {
      add(row->program);
    } else {
      std::vector<std::string> names;
      for (const auto& each : program_rows) names.emplace_back(each.name);
      throw Error(ErrorCode::bad_argument, concat("--for ", printable(name), ": no such program"))
          .detail(concat("known: ", join(names), ", all; several are separated by commas"));
    }
    if (comma == list.size()) return found;
    list.remove_prefix(comma + 1);
  }
}

}  // namespace w4q::serving
