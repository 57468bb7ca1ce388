// A 64-bit fingerprint of bytes, to tell whether two things are the same by accident or at all: not against forgery.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "core/rng.h"

namespace w4q::pipeline {

/// Each piece enters with its length, so that "ab" + "c" and "a" + "bc" differ.
class Digest {
 public:
  void add(std::span<const std::byte> bytes) noexcept {
    mix(bytes.size());
    for (; !bytes.empty(); bytes = bytes.subspan(bytes.size() < 8 ? bytes.size() : 8)) {
      uint64_t word = 0;
      std::memcpy(&word, bytes.data(), bytes.size() < 8 ? bytes.size() : 8);
      mix(word);
    }
  }
  void add(std::string_view text) noexcept { add(std::as_bytes(std::span(text))); }

  /// 16 hex digits.
  std::string text() const {
    std::string result(16, '0');
    for (size_t i = 0; i < result.size(); ++i) result[i] = "0123456789abcdef"[state_ >> (60 - 4 * i) & 15];
    return result;
  }

 private:
  void mix(uint64_t word) noexcept { state_ = splitmix64(state_ ^ word); }

  uint64_t state_ = 0;
};

}  // namespace w4q::pipeline
