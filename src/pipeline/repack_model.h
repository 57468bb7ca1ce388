// Moves the bits of a packed checkpoint into another layout and proves, tensor by tensor, that nothing was lost.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "device/context.h"
#include "io/checkpoint_writer.h"
#include "io/json.h"
#include "pipeline/plan.h"
#include "pipeline/sharing.h"

namespace w4q::pipeline {

struct RepackRequest {
  std::filesystem::path input;  ///< a checkpoint packed by w4q, in any layout
  std::filesystem::path output;
  std::string target;  ///< "sm89": the best layout of each tensor for it …
  std::string layout;  ///< … or this layout for all; exactly one of the two is given
  io::WriteOptions write;
  bool overwrite = false;
  std::shared_ptr<device::Context> gpu = {};  ///< where the bits move, to the same bytes; null: on the CPU
  Sharing sharing = {};                       ///< with other ranks, and with a run that was ended
};

struct RepackReport {
  Plan plan;
  int64_t proven = 0;  ///< passes for which unpack(pack(w)) == w was checked
  int64_t file_bytes = 0;
  double seconds = 0;
};

/// What repack_model would do; writes nothing.
Plan plan_repack(const RepackRequest& request);

/// Throws bad_file for a damaged input, unsupported when no layout fits, internal when a round trip fails.
RepackReport repack_model(const RepackRequest& request);

std::string to_text(const RepackReport& report, model::Detail detail = model::Detail::kinds);
io::Json to_json(const RepackReport& report);

}  // namespace w4q::pipeline
