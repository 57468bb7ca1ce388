// --device auto|cpu|cuda.
#pragma once

#include <string_view>

namespace w4q::device {

enum class Device { cpu, cuda };

/// "cpu"; "cuda": throws device with the reason when there is no usable GPU; "auto": the GPU where there is one. Throws
/// bad_argument for another word.
Device choose_device(std::string_view word);

/// For what only a GPU can do: throws device with the reason when there is no usable one.
void require_gpu();

}  // namespace w4q::device
