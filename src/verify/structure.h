// The first rungs of verification: is every parameter there, of the right size, and are the packed bits sound?
#pragma once

#include <functional>
#include <memory>

#include "model/opened.h"
#include "verify/report.h"

namespace w4q::verify {

/// Sees a packed linear that is sound, in the canonical layout, on any thread. What it returns is called in the order of
/// names, one after the other.
using SoundLinear = std::function<std::function<void()>(const checkpoint::PackedLinearInfo&,
                                                        const std::shared_ptr<const formats::PackedLinear>&)>;

/// Every parameter of the architecture is stored once, in 16 bit or packed, with the right type and shape; nothing is
/// missing, nothing extra. With `base`: its config is the same but for the quantization, every tensor of it is
/// accounted for, and what was kept has the same bytes.
Check check_structure(const model::OpenedModel& candidate, const model::OpenedModel* base);

/// Every packed linear unpacks to sound canonical planes (padding zero, codebook ascending, scales in range), and
/// packing those again gives the stored bytes. Several are looked at side by side, of at most 128 MB together.
Check check_codes(const checkpoint::Folder& candidate, const SoundLinear& visit = {});

/// Every 16-bit tensor of the architecture is finite.
Check check_finite(const model::OpenedModel& candidate);

}  // namespace w4q::verify
