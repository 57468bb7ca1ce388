// What programs ask of a checkpoint, a row each: docs/serving.md is the same as a page.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "serving/asked.h"
#include "serving/program.h"
#include "serving/stored_model.h"

namespace w4q::serving {

enum class Severity {
  note,     ///< it loads, and this is good to know
  wrong,    ///< it loads, and computes something else
  refused,  ///< it does not load
};
std::string_view to_string(Severity severity) noexcept;

struct Finding {
  std::string_view rule;  ///< its id
  Severity severity = Severity::refused;
  std::vector<std::string> tensors;  ///< names of tensors or modules; empty: it is the config's
  std::string place;                 ///< "config.json: quantization_config.bits"; empty: the tensors' own headers
  std::string expected, got, remedy;
};

/// What a rule is asked about.
struct Question {
  const StoredModel& model;
  const AskedSchemes& asked;
  Program program;
};

/// Collects findings; the same of several tensors becomes one.
class Findings {
 public:
  void of_rule(std::string_view id) noexcept { rule_ = id; }
  void add(Severity severity, std::string tensor, std::string place, std::string expected, std::string got,
           std::string remedy);
  bool empty() const noexcept { return list_.empty(); }
  std::vector<Finding> take() && { return std::move(list_); }

 private:
  std::string_view rule_;
  std::vector<Finding> list_;
};

/// Of which programs a rule was read.
class Programs {
 public:
  constexpr Programs(std::initializer_list<Program> list) {
    for (const Program program : list) bits_ |= 1U << static_cast<unsigned>(program);
  }
  constexpr bool has(Program program) const noexcept { return (bits_ >> static_cast<unsigned>(program) & 1U) != 0; }

 private:
  unsigned bits_ = 0;
};

struct Rule {
  std::string_view id;  ///< "gptq-types"
  Programs programs;
  std::string_view asks;    ///< what must hold, one line
  std::string_view source;  ///< where it was read
  void (*check)(const Question&, Findings&);
};

/// The dialects that hold the codes of integers without an order of groups, and load: a remedy.
std::string same_codes(Program program, const StatedScheme& scheme);

/// Whether SGLang's code of the model looks for the scales of FP8 blocks under a name that its layers do not have.
bool sglang_renames_scales(const Question& question);

/// In the order in which they are asked.
std::vector<Rule> rules();

/// Whether a program loads what a method names.
struct FormatRow {
  Method method;
  std::string_view name;
  Programs loads;
  std::string_view remedy;  ///< for those that do not
};
std::span<const FormatRow> format_rows();

/// The first scales of F16 where config.json says bfloat16, in which programs compute; null: there are none.
const io::TensorInfo* rounded_scales(const StoredModel& model);

// The rows, by what they look at.
std::vector<Rule> format_rules();    ///< the table of formats
std::vector<Rule> config_rules();    ///< quantization_config
std::vector<Rule> kernel_rules();    ///< weights and inputs together
std::vector<Rule> layer_rules();     ///< layers as config.json makes them against tensors
std::vector<Rule> file_rules();      ///< missing tensors, types and shapes
std::vector<Rule> parallel_rules();  ///< sizes over GPUs
std::vector<Rule> value_rules();     ///< orders of groups, factors, scales of the cache
std::vector<Rule> gguf_rules();      ///< types of GGUF files

/// How many GPUs can share the model, 1 … 8; a finding where one alone cannot hold it, a note for each number that a
/// group, not the heads, rules out.
std::vector<int> tensor_parallel(const Question& question, Findings& findings);

}  // namespace w4q::serving
