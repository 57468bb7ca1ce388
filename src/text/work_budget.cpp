#include "text/work_budget.h"

#include "core/error.h"

namespace w4q::text {

WorkBudget::WorkBudget(size_t text_bytes) noexcept
    : end_(std::chrono::steady_clock::now() + std::chrono::seconds(2) +
           std::chrono::microseconds(10) * static_cast<int64_t>(text_bytes)),
      bytes_left_(100 * text_bytes + 1'000'000) {}

void WorkBudget::produce(size_t bytes) {
  if (bytes > bytes_left_) {
    throw Error(ErrorCode::unsupported, "tokenizer.json: its components make this text a hundred times longer")
        .hint("the file looks damaged or malicious");
  }
  bytes_left_ -= bytes;
}

}  // namespace w4q::text
