#include "device/choice.h"

#include <charconv>
#include <optional>

#include "core/error.h"
#include "core/text.h"

namespace w4q::device {
namespace {

LocalProcess local_process;

/// The N of "cuda:N"; nothing: another word.
std::optional<int> ordinal_of(std::string_view word) {
  constexpr std::string_view prefix = "cuda:";
  if (!word.starts_with(prefix)) return std::nullopt;
  int ordinal = -1;
  const auto [end, error] = std::from_chars(word.data() + prefix.size(), word.data() + word.size(), ordinal);
  if (error != std::errc() || end != word.data() + word.size() || ordinal < 0) return std::nullopt;
  return ordinal;
}

/// Of all processes here where they were told its number, or of those whose turn it is.
std::shared_ptr<Context> open(std::optional<int> ordinal) {
  if (ordinal) return std::make_shared<Context>(*ordinal, local_process.count);
  if (local_process.gpu) return std::make_shared<Context>(*local_process.gpu);
  const int gpus = gpu_count();
  return std::make_shared<Context>(gpu_of(local_process, gpus), sharers_of(local_process, gpus));
}

}  // namespace

void set_local_process(LocalProcess process) noexcept { local_process = process; }

int gpu_of(LocalProcess process, int gpus) noexcept { return gpus > 0 ? process.index % gpus : 0; }

int sharers_of(LocalProcess process, int gpus) noexcept {
  if (gpus <= 0) return 1;
  return process.count / gpus + (process.index % gpus < process.count % gpus ? 1 : 0);
}

std::string refused_device(std::string_view word) {
  if (word == "cpu" || word == "auto" || word == "cuda" || ordinal_of(word)) return {};
  return concat(printable(word), " not in {auto,cpu,cuda,cuda:N}");
}

std::shared_ptr<Context> open_device(std::string_view word) {
  if (!refused_device(word).empty()) {
    throw Error(ErrorCode::bad_argument, concat("--device ", printable(word), ": unknown"))
        .detail("known: auto, cpu, cuda, cuda:N");
  }
  if (word == "cpu" || (word == "auto" && !local_process.gpu && !find_gpu())) return nullptr;
  return open(ordinal_of(word));
}

std::shared_ptr<Context> open_gpu(std::string_view word) {
  std::string why;
  const auto ordinal = ordinal_of(word);
  if (find_gpu(&why, ordinal.value_or(local_process.gpu.value_or(0)))) return open(ordinal);
  throw Error(ErrorCode::device, "no GPU to measure: " + why).hint("w4q verify --ppl works on the CPU");
}

}  // namespace w4q::device
