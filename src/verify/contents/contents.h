// What others write, judged by itself: is everything there that config.json promises, and do the scales of small floats
// belong to their codes? A rule is one row of a table; none decodes more than a sample, and none needs a base.
#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/dialect/compressed_tensors_config.h"
#include "checkpoint/folder.h"
#include "verify/report.h"

namespace w4q::verify {

/// A matrix, or a stack of them, as the files hold it.
struct StoredLinear {
  enum class Kind { plain, fp8, mxfp4, nvfp4, integer } kind = Kind::plain;
  std::string path;                   ///< of its module; of a stack without ".weight"
  std::string codes, scales, factor;  ///< names of tensors; empty where there are none
  int64_t experts = 0;                ///< of a stack [experts, n, k]; 0: one matrix
  int64_t n = 0, k = 0;               ///< as stored; outputs first for small floats
};

/// Modules by path, by a part of it from a dot to a dot, or by a pattern with "re:" or *.
class NameList {
 public:
  /// Of compressed-tensors * is a letter as any other.
  explicit NameList(const std::vector<std::string>& entries, bool globs = true);
  /// The first entry that names the module, by patterns last; empty: none does.
  std::string entry_for(std::string_view module) const;

 private:
  std::set<std::string, std::less<>> paths_;
  std::vector<std::pair<std::string, checkpoint::CtTarget>> patterns_;
};

/// A checkpoint as far as its headers, with what the rules ask of it. `folder` must outlive it.
class StoredContents {
 public:
  explicit StoredContents(const checkpoint::Folder& folder);

  const io::Checkpoint& tensors() const noexcept { return folder_.tensors; }
  const std::vector<StoredLinear>& linears() const noexcept { return linears_; }
  const StoredLinear* find(std::string_view path) const;
  const io::Json& quantization() const noexcept { return quantization_; }
  /// Whether that is stated with this quant_method.
  bool has_method(std::string_view method) const;
  const io::Json& config() const noexcept { return folder_.config; }
  /// Whether the weights are floats of few bits; of integers other rungs know more.
  bool small_floats() const noexcept { return small_floats_; }
  /// A key of config.json, in its text_config where that has it; null: by none of these keys.
  const io::Json& stated(std::initializer_list<const char*> keys) const;
  int64_t number(std::initializer_list<const char*> keys) const;  ///< 0 where it is no integer
  /// What config.json leaves in 16 bit, by its lists.
  const std::vector<std::string>& ignored() const noexcept { return ignored_; }
  /// Whether * in an entry of theirs stands for anything.
  bool globs() const noexcept { return globs_; }
  /// The entry that leaves a module in 16 bit; empty: none does, and the config means it to be quantized.
  std::string left_out_by(std::string_view module) const;
  /// Whether the program that packed the others packs none like it: mlx-lm leaves inputs that its groups do not divide,
  /// and bitsandbytes what is no linear of its own in memory, as experts are.
  bool is_left_by_program(const StoredLinear& linear) const;
  /// Whether a known architecture never reads it, or reads it beside the text model.
  bool is_carried(std::string_view module) const { return carried_.contains(module); }
  /// Whether the architecture is one that is decoded.
  bool is_known() const noexcept { return known_; }

 private:
  void add(const std::string& name, const io::TensorInfo& info);
  std::string scales_beside(const std::string& name) const;  ///< empty: there are none
  /// Whether a byte is two codes of E2M1.
  bool holds_pairs(const std::string& name, const io::TensorInfo& info) const;
  void find_carried();
  int64_t mlx_group(const std::string& module) const;  ///< 0: not MLX's

  const checkpoint::Folder& folder_;
  io::Json quantization_;
  bool small_floats_ = false, known_ = false, globs_ = true;
  std::vector<std::string> ignored_;
  std::optional<NameList> left_out_, targets_;
  std::set<std::string, std::less<>> carried_;
  std::vector<StoredLinear> linears_;
  std::map<std::string, size_t, std::less<>> places_;  ///< of linears_, by path
};

/// Where faults and notes of a rule go.
struct ContentsFindings {
  std::vector<std::string> faults, notes;
  void fault(std::string_view subject, const std::string& what);
};

struct ContentsRule {
  std::string_view name;  ///< "experts are all there"
  bool small_floats;      ///< asked of small floats alone
  void (*run)(const StoredContents&, ContentsFindings&);
};

/// By names and shapes (names.cpp), by values (values.cpp), beside others (peers.cpp), by what config.json claims
/// (claims.cpp), by the sizes that it states (sizes.cpp), by what other layers and experts have (layers.cpp), by what a
/// module consists of (modules.cpp), by what config.json says that nobody can do (config.cpp), and by what settings say of
/// codes (settings.cpp).
std::span<const ContentsRule> name_rules();
std::span<const ContentsRule> value_rules();
std::span<const ContentsRule> peer_rules();
std::span<const ContentsRule> claim_rules();
std::span<const ContentsRule> size_rules();
std::span<const ContentsRule> layer_rules();
std::span<const ContentsRule> module_rules();
std::span<const ContentsRule> config_rules();
std::span<const ContentsRule> setting_rules();

/// Nothing for a folder of w4q's own.
std::optional<Check> check_contents(const checkpoint::Folder& headers, std::vector<std::string>* notes = nullptr);
/// What config.json promises and the base lacks as well was not lost on the way: such faults become notes.
void excuse_as_in_base(Check& check, const checkpoint::Folder& base, std::vector<std::string>& notes);

}  // namespace w4q::verify
