// The config of GPTQ checkpoints: one setting for all linears and rules that change it for some.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/dialect/dialect.h"
#include "text/regex.h"
#include "text/work_budget.h"

namespace w4q::checkpoint {

/// What the config says of one linear.
struct GptqSetting {
  int bits = 4;
  int group = 128;  ///< as Scheme::block
  bool symmetric = true;
  bool left_out = false;  ///< a rule says that it is not packed

  bool operator==(const GptqSetting&) const = default;
};

class GptqConfig {
 public:
  /// Throws bad_file for malformed values, unsupported for words that are not 32 bits.
  explicit GptqConfig(const DialectSource& source);

  /// The setting of a linear: the first rule of "dynamic" whose expression matches the beginning of its path counts.
  GptqSetting setting(std::string_view linear);

 private:
  struct Rule {
    text::Regex expression;
    GptqSetting setting;
  };

  void read_auto_round(const DialectSource& source);

  GptqSetting common_;
  std::vector<Rule> rules_;
  text::WorkBudget budget_{1 << 20};  ///< for all linears of a checkpoint
};

/// True for a config of GPTQ, in any of its formats but Marlin's.
bool is_gptq(const DialectSource& source);
/// "gptq", "gptq_v2" or another checkpoint_format.
std::string gptq_format(const DialectSource& source);

/// DialectRow::describe of AutoRound over GPTQ's words: single linears by their paths, and by the names of what servers
/// fuse.
io::Json describe_auto_round(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept);
/// DialectRow::describe for `format`.
io::Json describe_gptq(std::string_view format, const std::vector<DialectLinear>& linears,
                       const std::vector<std::string>& kept);

}  // namespace w4q::checkpoint
