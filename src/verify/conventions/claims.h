// What a foreign config claims about single linears: which of them it leaves in 16 bit.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/dialect/dialect.h"

namespace w4q::verify {

class Claims {
 public:
  /// Throws as the dialect's config reader does.
  explicit Claims(const checkpoint::DialectSource& source);
  ~Claims();

  /// The entry of the config that leaves `linear` in 16 bit, for messages; empty: none does.
  std::string left_out_by(const std::string& linear) const;
  /// Whether the config has a way to leave single layers out: where not, one in 16 bit contradicts nothing.
  bool can_leave_out() const noexcept { return can_leave_out_; }
  /// Bits and group size that the config gives a linear.
  struct Words {
    int bits = 4;
    int group = 0;
    bool asymmetric = true;
  };
  Words words_of(const std::string& linear) const;

 private:
  struct Readers;
  std::unique_ptr<Readers> readers_;
  bool can_leave_out_ = true;
};

}  // namespace w4q::verify
