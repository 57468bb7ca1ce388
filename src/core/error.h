// One exception type for the whole program, with a closed list of codes.
//
// A message says what is wrong, where, what was expected, what was found, and what to do:
//
//   error: layers.3.mlp.up_proj: 11000 output rows do not fill tiles of 128
//     needed by layout kbit-tile (sm89); nearest: 11008
//     hint: --layout interleaved accepts any row count
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace w4q {

enum class ErrorCode {
  bad_argument,         ///< the command line or a function argument is wrong
  verification_failed,  ///< a check that the user asked for did not hold
  bad_file,             ///< a file is missing, damaged, unreadable or unwritable
  unsupported,          ///< valid input that this program does not handle
  mismatch,             ///< two inputs that must agree do not
  device,               ///< the GPU or its driver failed, or there is none
  internal,             ///< a bug in w4q
};

/// The row of the one table of error codes.
struct ErrorCodeRow {
  ErrorCode code;
  std::string_view name;
  int exit_status;
  std::string_view sentence;
};

/// Name, exit status and meaning of `code`.
const ErrorCodeRow& describe(ErrorCode code) noexcept;

/// The exception. Built in one expression: `throw Error(code, "what").detail("expected …").hint("do …")`.
class Error : public std::exception {
 public:
  /// `summary`: one line, "<tensor or file>: <what is wrong>", without a full stop.
  Error(ErrorCode code, std::string summary);

  /// Adds an indented line: expected against got, or who needs it.
  Error&& detail(std::string_view line) &&;
  Error& detail(std::string_view line) &;
  /// Adds the remedy, shown last behind "hint:".
  Error&& hint(std::string_view line) &&;
  Error& hint(std::string_view line) &;

  ErrorCode code() const noexcept { return code_; }
  const std::string& summary() const noexcept { return summary_; }
  /// The details, each on a line of its own that begins with "\n  "; and the remedy. Empty: there are none.
  const std::string& details() const noexcept { return details_; }
  const std::string& hint() const noexcept { return hint_; }
  /// The whole message, several lines, without the leading "error:".
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  void compose();

  ErrorCode code_;
  std::string summary_;
  std::string details_;
  std::string hint_;
  std::string text_;
};

/// Throws ErrorCode::internal when `condition` is false: for invariants that only a bug can break.
inline void ensure(bool condition, std::string_view what) {
  if (!condition) throw Error(ErrorCode::internal, std::string(what)).hint("this is a bug in w4q, please report it");
}

}  // namespace w4q
