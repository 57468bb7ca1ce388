#include "checkpoint/dialect/checkpoint.h"

#include <utility>

#include "checkpoint/dialect/dialect.h"
#include "checkpoint/dialect/integer.h"
#include "core/error.h"
#include "formats/scheme_registry.h"

namespace w4q::checkpoint {

formats::PackedLinear load_stored(const io::Checkpoint& checkpoint, const PackedLinearInfo& info) {
  ensure(info.dialect != nullptr && info.passes.size() == 1, "load_stored: not a linear of a dialect");
  check_stored(checkpoint, info, info.dialect->name);
  std::vector<formats::StoredTensor> tensors;
  for (const auto& [name, dtype, shape, sidecar] : info.stored) {
    tensors.push_back({{name.substr(info.name.size()), dtype, shape}, Buffer::copy_of(checkpoint.load(name)->bytes)});
  }
  formats::PackedLinear result{info.name, info.source_dtype, {}};
  result.passes.push_back(info.dialect->decode(info, std::move(tensors)));
  const formats::PackedWeight& weight = result.passes.front();
  formats::scheme_row(weight.scheme.family).validate(weight, info.name);
  const formats::Rotation& rotation = info.passes.front().rotation;
  if (!rotation.identity()) result.rotations.emplace_back(rotation, info.k);
  return result;
}

}  // namespace w4q::checkpoint
