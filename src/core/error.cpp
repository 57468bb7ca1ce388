#include "core/error.h"

#include <array>
#include <utility>

namespace w4q {
namespace {

constexpr std::array<ErrorCodeRow, 7> rows{{
    {ErrorCode::bad_argument, "bad_argument", 2, "the command line is wrong"},
    {ErrorCode::verification_failed, "verification_failed", 1, "a check did not hold"},
    {ErrorCode::bad_file, "bad_file", 3, "a file is missing, damaged, unreadable or unwritable"},
    {ErrorCode::unsupported, "unsupported", 3, "valid input that w4q does not handle"},
    {ErrorCode::mismatch, "mismatch", 3, "two inputs that must agree do not"},
    {ErrorCode::device, "device", 4, "the GPU or its driver failed, or there is none"},
    {ErrorCode::internal, "internal", 5, "a bug in w4q"},
}};

}  // namespace

const ErrorCodeRow& describe(ErrorCode code) noexcept {
  for (const auto& row : rows) {
    if (row.code == code) return row;
  }
  return rows.back();
}

Error::Error(ErrorCode code, std::string summary) : code_(code), summary_(std::move(summary)) { compose(); }

Error& Error::detail(std::string_view line) & {
  details_.append("\n  ").append(line);
  compose();
  return *this;
}

Error&& Error::detail(std::string_view line) && {
  static_cast<Error&>(*this).detail(line);
  return std::move(*this);
}

Error& Error::hint(std::string_view line) & {
  hint_ = line;
  compose();
  return *this;
}

Error&& Error::hint(std::string_view line) && {
  static_cast<Error&>(*this).hint(line);
  return std::move(*this);
}

void Error::compose() {
  text_ = summary_ + details_;
  if (!hint_.empty()) text_ += "\n  hint: " + hint_;
}

}  // namespace w4q
