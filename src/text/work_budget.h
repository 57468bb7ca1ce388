// What one call of the tokenizer may cost, so that a hostile tokenizer.json gives an error and not a hanging program.
#pragma once

#include <chrono>
#include <cstddef>

namespace w4q::text {

class WorkBudget {
 public:
  /// For a call that works on `text_bytes` bytes of text.
  explicit WorkBudget(size_t text_bytes) noexcept;

  /// Whether the time for regular expressions is over. A pattern of a few bytes can need years; real ones need well
  /// under a microsecond per byte, and are allowed two seconds plus ten microseconds per byte.
  bool time_is_over() const noexcept { return std::chrono::steady_clock::now() > end_; }

  /// Counts `bytes` of text that a component is about to produce. Throws unsupported when all of them together have
  /// produced a hundred times the text: real files have up to ten components that less than double it.
  void produce(size_t bytes);

 private:
  std::chrono::steady_clock::time_point end_;
  size_t bytes_left_;
};

}  // namespace w4q::text
