// A picture of a layout, drawn with the same map that packs and reads it.
#pragma once

#include <string>

#include "io/json.h"
#include "repack/layout_registry.h"

namespace w4q::app {

struct LayoutDrawing {
  std::string text;
  io::Json json;
};

/// Draws where the blocks of an n × k weight go, and the bits of one block. Throws unsupported when the layout does not
/// fit.
LayoutDrawing draw_layout(const repack::LayoutRow& layout, const formats::Scheme& scheme, int64_t n, int64_t k);

}  // namespace w4q::app
