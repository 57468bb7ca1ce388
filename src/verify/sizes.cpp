#include "verify/sizes.h"

#include <algorithm>
#include <map>

#include "model/kinds.h"
#include "verify/weights/weights.h"

namespace w4q::verify {
namespace {

KindBytes& find_kind(std::vector<KindBytes>& kinds, const std::string& name) {
  const auto found = std::ranges::find(kinds, name, &KindBytes::kind);
  return found != kinds.end() ? *found : kinds.emplace_back(KindBytes{name, {}});
}

}  // namespace

std::vector<KindBytes> bytes_by_kind(const checkpoint::Folder& folder) {
  std::map<std::string, const checkpoint::PackedLinearInfo*> owners;
  for (const auto& [name, info] : folder.quantization.linears) {
    for (const auto& plane : checkpoint::planned_planes(info)) owners[plane.name] = &info;
  }
  std::vector<KindBytes> kinds;
  std::set<const checkpoint::PackedLinearInfo*> counted;
  for (const auto& [name, tensor] : folder.tensors.tensors()) {
    const auto owner = owners.find(name);
    const auto* info = owner == owners.end() ? nullptr : owner->second;
    KindBytes& kind = find_kind(kinds, model::kind_of(info == nullptr ? name : info->name));
    kind.bytes += static_cast<int64_t>(tensor.size());
    if (info != nullptr && !counted.insert(info).second) continue;
    kind.schemes.insert(info == nullptr ? std::string(dtype_name(tensor.dtype)) : scheme_text(*info));
    kind.weights += info == nullptr ? element_count(tensor.shape) : info->n * info->k;
    ++kind.tensors;
  }
  return kinds;
}

io::Json to_json(const std::vector<KindBytes>& kinds) {
  io::Json json = io::Json::array();
  for (const KindBytes& kind : kinds) {
    json.push_back({{"kind", kind.kind},
                    {"scheme", model::words_text(kind.schemes)},
                    {"tensors", kind.tensors},
                    {"weights", kind.weights},
                    {"bytes", kind.bytes},
                    {"bits_per_weight", kind.weights == 0 ? io::Json()
                                                          : io::Json(8.0 * static_cast<double>(kind.bytes) /
                                                                     static_cast<double>(kind.weights))}});
  }
  return json;
}

io::Json sizes_json(const checkpoint::Folder& folder) {
  const auto kinds = bytes_by_kind(folder);
  int64_t bytes = 0;
  for (const KindBytes& kind : kinds) bytes += kind.bytes;
  double packed = 0, weights = 0;
  for (const auto& [name, info] : folder.quantization.linears) {
    packed += static_cast<double>(checkpoint::stored_bytes(info));
    weights += static_cast<double>(info.n) * static_cast<double>(info.k);
  }
  return {{"bytes", bytes},
          {"bits_per_weight", weights == 0 ? io::Json() : io::Json(8 * packed / weights)},
          {"kinds", to_json(kinds)}};
}

}  // namespace w4q::verify
