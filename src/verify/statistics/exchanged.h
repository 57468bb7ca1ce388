// Scales that belong to the codes of another weight: of another expert, of the same linear in another layer.
#pragma once

#include <map>
#include <span>
#include <string>

#include "checkpoint/folder.h"
#include "verify/statistics/blocks.h"

namespace w4q::verify {

/// Faults by the name of their linear. Where scales of integers do not follow from the codes of their groups, those of all
/// others of the scheme and the size are tried in their place, of other layers those of the role. `passes`: the figures of
/// all passes, of which first ones are looked at. Throws as loading does.
std::map<std::string, std::string> exchanged_scales(const checkpoint::Folder& folder,
                                                    std::span<const BlockSubject> passes);

}  // namespace w4q::verify
