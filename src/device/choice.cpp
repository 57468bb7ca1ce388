#include "device/choice.h"

#include <charconv>
#include <optional>

#include "core/error.h"
#include "core/text.h"

namespace w4q::device {
namespace {

/// The N of "cuda:N", 0 of "cuda"; nothing: another word.
std::optional<int> ordinal_of(std::string_view word) {
  constexpr std::string_view prefix = "cuda:";
  if (word == "cuda") return 0;
  if (!word.starts_with(prefix)) return std::nullopt;
  int ordinal = -1;
  const auto [end, error] = std::from_chars(word.data() + prefix.size(), word.data() + word.size(), ordinal);
  if (error != std::errc() || end != word.data() + word.size() || ordinal < 0) return std::nullopt;
  return ordinal;
}

}  // namespace

std::string refused_device(std::string_view word) {
  if (word == "cpu" || word == "auto" || ordinal_of(word)) return {};
  return concat(printable(word), " not in {auto,cpu,cuda,cuda:N}");
}

std::shared_ptr<Context> open_device(std::string_view word) {
  if (!refused_device(word).empty()) {
    throw Error(ErrorCode::bad_argument, concat("--device ", printable(word), ": unknown"))
        .detail("known: auto, cpu, cuda, cuda:N");
  }
  if (word == "cpu" || (word == "auto" && !find_gpu())) return nullptr;
  return std::make_shared<Context>(ordinal_of(word).value_or(0));
}

std::shared_ptr<Context> open_gpu(std::string_view word) {
  std::string why;
  const int ordinal = ordinal_of(word).value_or(0);
  if (find_gpu(&why, ordinal)) return std::make_shared<Context>(ordinal);
  throw Error(ErrorCode::device, "no GPU to measure: " + why).hint("w4q verify --ppl works on the CPU");
}

}  // namespace w4q::device
