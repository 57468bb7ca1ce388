// What can go wrong with a checkpoint, as a table: a row is one kind of fault and applies to whatever variant has what
// it damages. Rows of one group stand in one file.
#pragma once

#include <string_view>
#include <vector>

#include "audit/subject.h"

namespace w4q::audit {

struct FaultRow {
  std::string_view group;  ///< "files", "kept tensors" …
  std::string_view kind;   ///< "a tensor is missing"
  /// Damages the copy; false where the variant has nothing that could be damaged so. What leaves everything as it was
  /// counts as that, too.
  bool (*damage)(Subject&);
};

using Faults = std::vector<FaultRow>;

Faults file_faults();
Faults kept_faults();
Faults config_faults();
Faults packed_faults();
Faults dialect_faults();
Faults small_faults();
Faults tokenizer_faults();

inline Faults every_fault() {
  Faults all;
  for (const auto group :
       {file_faults, kept_faults, config_faults, packed_faults, dialect_faults, small_faults, tokenizer_faults}) {
    const Faults rows = group();
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

}  // namespace w4q::audit
