#include "device/choice.h"

#include "core/error.h"
#include "core/text.h"
#include "device/properties.h"

namespace w4q::device {

Device choose_device(std::string_view word) {
  if (word == "cpu") return Device::cpu;
  if (word != "auto" && word != "cuda") {
    throw Error(ErrorCode::bad_argument, concat("--device ", printable(word), ": unknown"))
        .detail("known: auto, cpu, cuda");
  }
  std::string why;
  if (find_gpu(&why)) return Device::cuda;
  if (word == "auto") return Device::cpu;
  throw Error(ErrorCode::device, "no GPU to use: " + why).hint("--device cpu does without");
}

void require_gpu() {
  std::string why;
  if (find_gpu(&why)) return;
  throw Error(ErrorCode::device, "no GPU to measure: " + why).hint("w4q verify --ppl works on the CPU");
}

}  // namespace w4q::device
