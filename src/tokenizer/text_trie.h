// Several texts, found by what a text begins with.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/regex.h"

namespace w4q::tokenizer {

class TextTrie {
 public:
  struct Match {
    text::TextRange range;
    int32_t value;
  };
  /// Adds a text that is not empty, with a value that is not negative; the first of two equal texts counts.
  void add(std::string_view text, int32_t value);
  /// The leftmost match that begins at `from` or later, the longest of those that begin there.
  std::optional<Match> find(std::string_view text, size_t from) const;
  /// Calls visit(bytes, value) for each of the texts that `text` begins with, the shortest first.
  template <class Visit>
  void each_prefix(std::string_view text, Visit&& visit) const {
    uint32_t node = 0;
    for (size_t at = 0; at < text.size(); ++at) {
      const auto next = edges_.find(edge(node, text[at]));
      if (next == edges_.end()) return;
      node = next->second;
      if (values_[node] >= 0) visit(at + 1, values_[node]);
    }
  }

 private:
  static uint64_t edge(uint32_t node, char byte) noexcept {
    return static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(byte);
  }

  std::array<bool, 256> begins_{};
  std::unordered_map<uint64_t, uint32_t> edges_;
  std::vector<int32_t> values_ = {-1};  ///< of each node; -1 where no text ends
};

}  // namespace w4q::tokenizer
