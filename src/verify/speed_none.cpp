#include "core/error.h"
#include "verify/speed.h"

namespace w4q::verify {
namespace {

[[noreturn]] void refuse() { throw Error(ErrorCode::device, "this program was built without CUDA"); }

}  // namespace

SpeedReport measure_speed(device::Context&, const model::Model&, const SpeedOptions&) { refuse(); }
SpeedReport measure_random_speed(device::Context&, const model::ModelConfig&, std::span<const formats::Scheme>,
                                 const SpeedOptions&) {
  refuse();
}

}  // namespace w4q::verify
