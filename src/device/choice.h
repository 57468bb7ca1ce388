// --device auto|cpu|cuda|cuda:N.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "device/context.h"

namespace w4q::device {

/// What is wrong with a word for --device; empty: nothing.
std::string refused_device(std::string_view word);

/// "cpu": null. "cuda:1": that GPU, "cuda": the first; throws device with the reason where it cannot be used. "auto":
/// the first GPU where there is one, else null. Throws bad_argument for another word.
std::shared_ptr<Context> open_device(std::string_view word);

/// For what only a GPU can do: as open_device, but "auto" insists on one.
std::shared_ptr<Context> open_gpu(std::string_view word = "auto");

}  // namespace w4q::device
