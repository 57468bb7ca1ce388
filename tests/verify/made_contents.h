// Checkpoints in memory, written and looked at by the rules of contents.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/progress.h"
#include "made_checkpoint.h"
#include "support.h"
#include "verify/contents/contents.h"

namespace w4q::verify {

class MadeContents : public testing::Test {
 protected:
  /// The headers of `made`, which is written in the place of the one before.
  checkpoint::Folder headers_of(const test::MadeCheckpoint& made) {
    set_progress_enabled(false);
    made.write(folder_ / "made");
    return {folder_ / "made", made.config, io::Checkpoint::open(folder_ / "made")};
  }
  static std::string faults_of(const checkpoint::Folder& headers) {
    const auto contents = check_contents(headers);
    return join(contents ? contents->faults : std::vector<std::string>{}, "\n");
  }

  test::TemporaryFolder folder_;
};

}  // namespace w4q::verify
