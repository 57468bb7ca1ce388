#include "kernels/attention/kv_page.h"

#include <string>

#include "core/error.h"
#include "core/text.h"

namespace w4q::kernels {
namespace {

struct Name {
  KvType type;
  std::string_view name;
};
constexpr Name names[] = {
    {KvType::f16, "f16"}, {KvType::fp8, "fp8"}, {KvType::q4, "q4"}, {KvType::q4h, "q4h"}, {KvType::fp4r, "fp4r"}};

}  // namespace

std::string_view to_string(KvType type) noexcept {
  for (const auto& [known, name] : names) {
    if (known == type) return name;
  }
  return "?";
}

KvType parse_kv_type(std::string_view word) {
  std::vector<std::string> known;
  for (const auto& [type, name] : names) {
    if (name == word) return type;
    known.emplace_back(name);
  }
  throw Error(ErrorCode::bad_argument, concat("KV cache type ", printable(word), ": unknown"))
      .detail("known: " + join(known));
}

}  // namespace w4q::kernels
