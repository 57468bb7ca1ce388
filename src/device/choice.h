// --device auto|cpu|cuda|cuda:N.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "device/context.h"

namespace w4q::device {

/// What is wrong with a word for --device; empty: nothing.
std::string refused_device(std::string_view word);

/// Which of the processes of one run on this machine this one is, and how many there are.
struct LocalProcess {
  int index = 0, count = 1;
  std::optional<int> gpu = {};  ///< that was chosen for it, and for no other
};
/// From now on, for what is opened here: "auto" and "cuda" mean the GPU that was chosen for it; or else another GPU for
/// each process, as far as there are enough, and several share one where there are not.
void set_local_process(LocalProcess process) noexcept;
/// The GPU of a process where a machine has so many, and how many processes have that one.
int gpu_of(LocalProcess process, int gpus) noexcept;
int sharers_of(LocalProcess process, int gpus) noexcept;

/// "cpu": null. "cuda:1": that GPU, "cuda": this process' own, the first for one by itself; throws device with the reason where it cannot be used. "auto":
/// the same where there is one or one was chosen, else null. Throws bad_argument for another word.
std::shared_ptr<Context> open_device(std::string_view word);

/// For what only a GPU can do: as open_device, but "auto" insists on one.
std::shared_ptr<Context> open_gpu(std::string_view word = "auto");

}  // namespace w4q::device
