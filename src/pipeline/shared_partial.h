// A hidden folder that the ranks of a run work in together, and that goes with it.
#pragma once

#include <exception>
#include <filesystem>
#include <optional>

#include "io/partial.h"
#include "ranks/ranks.h"

namespace w4q::pipeline {

/// The first rank makes and removes it, beside `target`, where all ranks see it.
class SharedPartial {
 public:
  /// At every rank. Throws bad_file when the folder of `target` cannot be written.
  SharedPartial(ranks::Ranks& ranks, const std::filesystem::path& target) : ranks_(ranks) {
    if (ranks.first()) own_.emplace(target, io::Partial::Kind::folder);
    path_ = ranks.broadcast(own_ ? own_->path().native() : std::string());
    if (!own_) others_.emplace(path_);
  }

  ~SharedPartial() {
    if (std::uncaught_exceptions() > 0) ranks_.stop_others();
  }
  SharedPartial(const SharedPartial&) = delete;
  SharedPartial& operator=(const SharedPartial&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  ranks::Ranks& ranks_;
  std::optional<io::Partial> own_;           // at the first rank
  std::optional<io::OthersPartial> others_;  // at the others
  std::filesystem::path path_;
};

}  // namespace w4q::pipeline
