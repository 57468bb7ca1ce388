// Types of GGUF files that a program has kernels or readers for.
#include <algorithm>
#include <array>
#include <span>

#include "core/text.h"
#include "serving/rules.h"

namespace w4q::serving {
namespace {

using enum Program;

constexpr std::array by_sglang{
    GgmlType::f32,   GgmlType::f16,     GgmlType::bf16,   GgmlType::q4_0,  GgmlType::q4_1,  GgmlType::q5_0,
    GgmlType::q5_1,  GgmlType::q8_0,    GgmlType::q2_k,   GgmlType::q3_k,  GgmlType::q4_k,  GgmlType::q5_k,
    GgmlType::q6_k,  GgmlType::iq2_xxs, GgmlType::iq2_xs, GgmlType::iq2_s, GgmlType::iq3_s, GgmlType::iq3_xxs,
    GgmlType::iq1_s, GgmlType::iq1_m,   GgmlType::iq4_nl, GgmlType::iq4_xs};
constexpr std::array by_transformers{GgmlType::f32,     GgmlType::f16,     GgmlType::bf16,   GgmlType::q4_0,
                                     GgmlType::q4_1,    GgmlType::q8_0,    GgmlType::q2_k,   GgmlType::q3_k,
                                     GgmlType::q4_k,    GgmlType::q5_k,    GgmlType::q6_k,   GgmlType::iq1_s,
                                     GgmlType::iq1_m,   GgmlType::iq2_xxs, GgmlType::iq2_xs, GgmlType::iq2_s,
                                     GgmlType::iq3_xxs, GgmlType::iq3_s,   GgmlType::iq4_nl, GgmlType::iq4_xs};

void types(const Question& question, Findings& findings) {
  const io::GgufHeader* const header = question.model.gguf();
  if (header == nullptr) return;
  const std::span<const GgmlType> known =
      question.program == sglang ? std::span<const GgmlType>(by_sglang) : std::span<const GgmlType>(by_transformers);
  for (const auto& tensor : header->tensors) {
    if (std::ranges::find(known, tensor.type) != known.end()) continue;
    std::vector<std::string> names;
    for (const GgmlType type : known) names.emplace_back(ggml_type_name(type));
    findings.add(Severity::refused, tensor.name, {}, join(names), std::string(ggml_type_name(tensor.type)),
                 "another type of GGUF, or llama.cpp");
  }
}

}  // namespace

std::vector<Rule> gguf_rules() {
  return {{"gguf-types",
           {sglang, transformers},
           "tensors of types that the program reads",
           "sglang gguf.py:36-66; transformers integrations/ggml.py",
           types}};
}

}  // namespace w4q::serving
