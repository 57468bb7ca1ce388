#include "devices.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "core/text.h"
#include "device/choice.h"
#include "ranks/ranks.h"

namespace w4q::app {
namespace {

constexpr const char* option_name = "--devices";

std::optional<int> number(std::string_view word) {
  int value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size() || value < 0) return std::nullopt;
  return value;
}

/// Empty: not numbers with commas between them, or one of them twice.
std::vector<int> numbers(std::string_view word) {
  std::vector<int> found;
  for (size_t begin = 0; begin <= word.size();) {
    const size_t end = std::min(word.find(',', begin), word.size());
    const auto value = number(word.substr(begin, end - begin));
    if (!value || std::ranges::count(found, *value) > 0) return {};
    found.push_back(*value);
    begin = end + 1;
  }
  return found;
}

const CLI::Validator different_numbers(
    [](std::string& word) {
      return numbers(word).empty()
                 ? concat("expected numbers of GPUs such as 0,1,2,3, each once, got ", printable(word))
                 : std::string();
    },
    "N,N,...");

/// How many ranks the environment asks for.
int local_ranks() {
  const char* const text = std::getenv("W4Q_LOCAL_RANKS");
  return text != nullptr ? std::max(1, number(text).value_or(1)) : 1;
}

}  // namespace

void add_devices(CLI::App& command, std::string& devices) {
  command
      .add_option(option_name, devices,
                  "GPUs of this machine that share the work, such as 0,1,2,3, with the bytes of one")
      ->check(different_numbers)
      ->excludes(command.get_option("--device"));
}

std::vector<int> devices_of(const CLI::App& program) {
  for (const CLI::App* command : program.get_subcommands()) {
    const auto* const option = command->get_option_no_throw(option_name);
    if (option != nullptr && option->count() > 0) return numbers(option->as<std::string>());
  }
  return {};
}

void make_ranks(const CLI::App& program) {
  const auto devices = devices_of(program);
  const auto launched = ranks::launched();
  if (launched && !devices.empty()) {
    throw Error(ErrorCode::bad_argument, concat("--devices is for one process, and this is one of ", launched->size,
                                                " (", launched->variable, ")"))
        .hint("under mpirun and srun each rank takes the GPU of its number: leave out --devices");
  }
  if (!devices.empty()) return ranks::fork_here(static_cast<int>(devices.size()), option_name);
  if (!launched) ranks::fork_here(local_ranks(), "W4Q_LOCAL_RANKS");
}

void take_device(const CLI::App& program) {
  const auto devices = devices_of(program);
  const auto launched = ranks::launched();
  device::LocalProcess place;
  if (launched) place = {launched->local_rank, launched->local_size};
  if (!devices.empty()) {
    place.gpu = devices.at(static_cast<size_t>(place.index));
    std::string why;
    if (!device::find_gpu(&why, *place.gpu)) throw Error(ErrorCode::device, "--devices: no GPU to use: " + why);
  }
  device::set_local_process(place);
}

}  // namespace w4q::app
