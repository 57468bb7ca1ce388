// What a program takes a layer for, by config.json alone: the scheme that it makes room for before it reads a tensor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serving/names.h"
#include "serving/program.h"
#include "serving/stored_model.h"

namespace w4q::serving {

/// How config.json says that a linear is quantized.
struct StatedScheme {
  Form form = Form::plain;
  int bits = 0;
  int64_t group = -1;  ///< inputs that share a scale; −1: all of a row
  bool symmetric = true;
  bool act_order = false;
  int64_t block_rows = 0, block_cols = 0;  ///< of FP8 in blocks
  bool operator==(const StatedScheme&) const = default;
};
/// "4-bit compressed-tensors words, symmetric, groups of 128".
std::string to_text(const StatedScheme& scheme);

struct Asked {
  std::optional<StatedScheme> scheme;  ///< nothing: 16 bit
  std::string by;                      ///< the entry of config.json that decides: "ignore: lm_head"
  std::string refused;                 ///< the program ends here, and why
};

/// compressed-tensors: one group of config_groups.
struct CtGroup {
  std::string name, format;
  std::vector<std::string> targets;
  StatedScheme scheme;
  io::Json weights, input_activations;
};
std::vector<CtGroup> read_ct_groups(const StoredModel& model);

/// The config of one model, read once.
class AskedSchemes {
 public:
  /// Throws unsupported for a list with a pattern that is no expression.
  explicit AskedSchemes(const StoredModel& model);

  /// Of a layer by its name and parts in that program's words.
  Asked of(Program program, const Layer& layer) const;
  /// What config.json says of most linears; nothing where it has no such words.
  const std::optional<StatedScheme>& common() const noexcept { return common_; }
  const std::vector<CtGroup>& groups() const noexcept { return groups_; }

 private:
  struct Rule {
    std::string text;
    bool leaves_out = false;
    Pattern pattern;
    StatedScheme scheme;
  };
  using Match = std::string (NameList::*)(std::string_view) const;

  Asked compressed_tensors(Program program, const Layer& layer) const;
  Asked gptq(Program program, const Layer& layer) const;
  Asked auto_round(const Layer& layer) const;
  Asked listed(const Layer& layer, Match match, bool fused_names, bool unfused_names, const char* key) const;
  Asked modelopt(const Layer& layer) const;
  bool is_plain(const Layer& layer) const;
  bool takes_usual_blocks(Program program) const;
  std::optional<size_t> ct_group(Program program, const Layer& layer) const;
  std::optional<size_t> named_group(std::string_view name) const;
  const Rule* rule_of(std::string_view name) const;

  const StoredModel& model_;
  std::optional<StatedScheme> common_;
  NameList left_out_;
  std::vector<CtGroup> groups_;
  std::map<std::string, size_t, std::less<>> by_name_;      ///< exact targets
  std::vector<std::pair<Pattern, size_t>> by_pattern_;      ///< "re:" targets
  std::optional<size_t> by_class_;                          ///< "Linear"
  std::vector<Rule> rules_;                                 ///< dynamic, extra_config
  std::map<std::string, StatedScheme, std::less<>> mixed_;  ///< ModelOpt's quantized_layers
};

/// The names under which a server asks for the parts of a layer: of experts those of the first.
std::vector<std::string> unfused_names(const Layer& layer);

}  // namespace w4q::serving
