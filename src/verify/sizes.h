// Where the bytes of a checkpoint go.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "io/json.h"

namespace w4q::verify {

/// All tensors of a kind (model::kind_of): the planes of packed linears with their linear, biases with their weight.
struct KindBytes {
  std::string kind;
  std::set<std::string> schemes;  ///< of packed linears, all passes; else the type
  int64_t tensors = 0;            ///< a packed linear counts as one
  int64_t weights = 0;            ///< values
  int64_t bytes = 0;              ///< as they are stored
};

/// In the order in which the kinds come first by name of the tensors.
std::vector<KindBytes> bytes_by_kind(const checkpoint::Folder& folder);
io::Json to_json(const std::vector<KindBytes>& kinds);

/// All of `folder`: bytes, bits a weight of what is packed (null: nothing is), and kinds.
io::Json sizes_json(const checkpoint::Folder& folder);

}  // namespace w4q::verify
