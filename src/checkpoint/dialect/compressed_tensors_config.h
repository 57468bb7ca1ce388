// compressed-tensors' quantization_config: groups of targets, each with a way to quantize, and what is ignored.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/dialect/dialect.h"
#include "text/regex.h"

namespace w4q::checkpoint {

/// Of integers: a cache in FP8, and inputs as they are.
extern const ActivationForm compressed_tensors_cache;

/// How the weights of one group of the config are quantized.
struct CtWeights {
  int bits = 4;
  int group = formats::whole_row;  ///< Scheme::block
  bool asymmetric = false;
  bool one_scale = false;  ///< strategy "tensor"
};

/// One entry of `targets` or `ignore`: "re:" and a pattern that matches from the start of a module's path, the path, or
/// a class's name.
class CtTarget {
 public:
  CtTarget(std::string text, std::string_view place);
  bool names(std::string_view module) const;
  /// 2: the path itself, 1: a pattern, 0: the class Linear, −1: no match.
  int rank(std::string_view module) const;

 private:
  std::string text_;
  std::vector<text::Regex> pattern_;  // one or none
};

class CtConfig {
 public:
  /// Throws bad_file or unsupported naming the place. Of floats, targets and what is ignored alone are read.
  explicit CtConfig(const DialectSource& source, bool floats = false);

  /// Of the group with the closest target. Throws bad_file for a module that no group has.
  const CtWeights& weights_of(const std::string& linear) const;
  /// Whether the config leaves the linear in 16 bit.
  bool ignores(std::string_view linear) const;
  /// Whether a group's targets reach the linear.
  bool targets(std::string_view linear) const;
  /// What is said of activations and the cache, which w4q leaves alone.
  const std::vector<std::string>& notes() const noexcept { return notes_; }

 private:
  struct Group {
    std::vector<CtTarget> targets;
    CtWeights weights;
  };
  const Group* find(std::string_view linear) const;

  std::string place_;
  std::vector<Group> groups_;
  std::vector<CtTarget> ignore_;
  std::vector<std::string> notes_;
};

/// DialectRow::describe for a release: one group for every way of quantizing.
io::Json describe_compressed_tensors(std::string_view version, const std::vector<DialectLinear>& linears,
                                     const std::vector<std::string>& kept);

}  // namespace w4q::checkpoint
