#include "verify/gguf/metadata.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <string_view>
#include <type_traits>

#include "core/text.h"

namespace w4q::verify {
namespace of_metadata {
namespace {

using enum GgmlType;

// ---- general.file_type ------------------------------------------------------------------------------------------------

/// What general.file_type says that most matrices are.
struct FileType {
  uint32_t number;
  std::string_view name;
  std::array<GgmlType, 2> types;  ///< either
};

constexpr FileType file_types[] = {
    {0, "F32", {f32, f32}},           {1, "F16", {f16, f16}},           {2, "Q4_0", {q4_0, q4_0}},
    {3, "Q4_1", {q4_1, q4_1}},        {7, "Q8_0", {q8_0, q8_0}},        {8, "Q5_0", {q5_0, q5_0}},
    {9, "Q5_1", {q5_1, q5_1}},        {10, "Q2_K", {q2_k, q2_k}},       {11, "Q3_K_S", {q3_k, q3_k}},
    {12, "Q3_K_M", {q3_k, q3_k}},     {13, "Q3_K_L", {q3_k, q3_k}},     {14, "Q4_K_S", {q4_k, q4_k}},
    {15, "Q4_K_M", {q4_k, q4_k}},     {16, "Q5_K_S", {q5_k, q5_k}},     {17, "Q5_K_M", {q5_k, q5_k}},
    {18, "Q6_K", {q6_k, q6_k}},       {19, "IQ2_XXS", {iq2_xxs, q2_k}}, {20, "IQ2_XS", {iq2_xs, q2_k}},
    {21, "Q2_K_S", {q2_k, q2_k}},     {22, "IQ3_XS", {iq3_xxs, iq3_s}}, {23, "IQ3_XXS", {iq3_xxs, iq3_xxs}},
    {24, "IQ1_S", {iq1_s, iq2_xxs}},  {25, "IQ4_NL", {iq4_nl, iq4_nl}}, {26, "IQ3_S", {iq3_s, iq3_s}},
    {27, "IQ3_M", {iq3_s, iq3_xxs}},  {28, "IQ2_S", {iq2_s, iq2_xs}},   {29, "IQ2_M", {iq2_s, iq2_xs}},
    {30, "IQ4_XS", {iq4_xs, iq4_xs}}, {31, "IQ1_M", {iq1_m, iq2_xxs}},  {32, "BF16", {bf16, bf16}},
    {36, "TQ1_0", {tq1_0, tq1_0}},    {37, "TQ2_0", {tq2_0, tq2_0}},    {38, "MXFP4", {mxfp4, mxfp4}},
};

double bits_of(GgmlType type) {
  const auto& row = describe(type);
  return 8.0 * static_cast<double>(row.block_bytes) / static_cast<double>(row.block);
}

/// Whether a tensor is what a file's type speaks of: matrices of layers, tables and the head, but not routers, convolutions
/// and other small ones that stay in F32 whatever the file is.
bool is_weight(const io::GgufTensor& tensor) {
  if (tensor.shape.size() < 2 || tensor.shape[tensor.shape.size() - 2] < 2) return false;
  constexpr std::string_view small[] = {"gate_inp", "conv1d", "norm", "ssm_a", "ssm_d", "ssm_beta", "ssm_ba", "rope_"};
  return std::ranges::none_of(small,
                              [&](std::string_view part) { return tensor.name.find(part) != std::string::npos; });
}

/// Rows that are no whole blocks of 256 take another type in a file whose type has such blocks.
bool may_differ(const io::GgufTensor& tensor, GgmlType stated) {
  return describe(stated).block > 32 && tensor.shape.back() % describe(stated).block != 0;
}

class MetadataCheck {
 public:
  explicit MetadataCheck(const io::GgufHeader& header)
      : header_(header), architecture_(text("general.architecture").value_or("")) {}

  GgufMetadataReport run() {
    for (const auto rule : {&MetadataCheck::file_type, &MetadataCheck::kind, &MetadataCheck::quantization,
                            &MetadataCheck::rope, &MetadataCheck::vocabulary, &MetadataCheck::vocabulary_size,
                            &MetadataCheck::special_tokens, &MetadataCheck::ends, &MetadataCheck::chat_template}) {
      (this->*rule)();
    }
    return std::move(report_);
  }

 private:
  template <class... Parts>
  void fault(std::string_view key, const Parts&... parts) {
    report_.faults.push_back(concat(full(key), ": ", parts...));
  }
  template <class... Parts>
  void note(std::string_view key, const Parts&... parts) {
    report_.notes.push_back(concat(full(key), ": ", parts...));
  }

  /// "%." stands for the architecture.
  std::string full(std::string_view key) const {
    return key.starts_with("%.") ? concat(architecture_, key.substr(1)) : std::string(key);
  }
  const io::GgufValue* find(std::string_view key) const { return io::find(header_.metadata, full(key)); }

  std::optional<double> number(std::string_view key) const {
    const io::GgufValue* value = find(key);
    if (value == nullptr) return std::nullopt;
    return std::visit(
        []<class T>(const T& held) -> std::optional<double> {
          if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) return static_cast<double>(held);
          return std::nullopt;
        },
        *value);
  }
  std::optional<std::string> text(std::string_view key) const {
    const io::GgufValue* value = find(key);
    const auto* held = value == nullptr ? nullptr : std::get_if<std::string>(value);
    return held == nullptr ? std::nullopt : std::optional(*held);
  }
  template <class T>
  const std::vector<T>* array(std::string_view key) const {
    const io::GgufValue* value = find(key);
    const auto* held = value == nullptr ? nullptr : std::get_if<io::GgufArray>(value);
    return held == nullptr ? nullptr : std::get_if<std::vector<T>>(held);
  }

  /// By what is stored most: whoever gives single tensors other types leaves the name of the rest.
  void file_type() {
    constexpr uint32_t guessed = 1024;  // a bit that says that a reader made it up
    constexpr double most_apart = 1.6;
    const auto stated = number("general.file_type");
    if (!stated) return;
    const auto row = std::ranges::find(file_types, static_cast<uint32_t>(*stated) & ~guessed, &FileType::number);
    if (row == std::end(file_types)) return note("general.file_type", *stated, " is no type that is known");
    double bits = 0, weights = 0, own = 0, own_bits = 0, cut = 0;
    std::map<GgmlType, double> stored;
    for (const io::GgufTensor& tensor : header_.tensors) {
      if (!is_weight(tensor)) continue;
      const auto count = static_cast<double>(element_count(tensor.shape));
      bits += count * bits_of(tensor.type), weights += count, stored[tensor.type] += count;
      if (std::ranges::find(row->types, tensor.type) != row->types.end()) {
        own += count, own_bits += count * bits_of(tensor.type);
      }
      if (may_differ(tensor, row->types[0])) cut += count;
    }
    // Few weights of many bits may be most of the file: MXFP4 experts beside a large table in BF16.
    if (weights == 0 || 2 * own_bits > bits) return;
    bits /= weights;
    const double named = bits_of(row->types[0]);
    const auto& most = *std::ranges::max_element(stored, {}, [](const auto& entry) { return entry.second; });
    const bool found = own > 0 || 2 * cut > weights;
    const bool apart = bits > most_apart * named || named > most_apart * bits;
    if (found && !apart) {
      if (4 * own < weights && 2 * most.second > weights && 2 * cut < weights && most.first != mxfp4) {
        note("general.file_type", "says ", row->name, " (", row->number, "), but most weights are ",
             ggml_type_name(most.first));
      }
      return;
    }
    fault("general.file_type", "says ", row->name, " (", row->number, "), but ",
          found ? std::string("weights have ") : concat("no matrix is ", ggml_type_name(row->types[0]), ": they have "),
          fixed(bits, 2), " bits, most are ", ggml_type_name(most.first));
  }

  void kind() {
    const auto stated = text("general.type");
    if (stated && *stated != "model")
      fault("general.type", "is \"", printable(*stated), "\", but the file holds a model: readers load it as that");
  }

  void quantization() {
    const auto stated = number("general.quantization_version");
    const bool quantized =
        std::ranges::any_of(header_.tensors, [](const auto& tensor) { return describe(tensor.type).block > 1; });
    if (stated && quantized && *stated != 2)
      fault("general.quantization_version", "is ", *stated, ", but blocks are read as those of version 2");
  }

  /// Lengths of waves, which grow from 2π on, are those of texts.
  void rope() {
    constexpr double least = 100;
    const auto stated = number("%.rope.freq_base");
    if (stated && !(*stated >= least))
      fault("%.rope.freq_base", "is ", *stated,
            ": positions further apart than a few tokens look alike; models have 10000 and more");
    const bool rotates = find("%.rope.dimension_count") != nullptr;
    if (!stated && rotates) note("%.rope.freq_base", "is missing: readers take 10000");
  }

  // ---- tokens -----------------------------------------------------------------------------------------------------------

  static constexpr std::string_view tokens_key = "tokenizer.ggml.tokens", types_key = "tokenizer.ggml.token_type",
                                    model_key = "tokenizer.ggml.model", pre_key = "tokenizer.ggml.pre";
  enum Kind : int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

  void vocabulary() {
    const auto* tokens = array<std::string>(tokens_key);
    if (tokens == nullptr) return;
    const auto model = text(model_key);
    if (!model) return fault(model_key, "is missing beside ", tokens->size(), " tokens");
    if (*model == "no_vocab" || *model == "none")
      fault(model_key, "is \"", *model, "\" beside ", tokens->size(), " tokens");
    const bool pairs = find("tokenizer.ggml.merges") != nullptr, scores = find("tokenizer.ggml.scores") != nullptr;
    if (*model == "bert" && pairs && !scores)
      fault(model_key, "is \"bert\", whose words have no merges, beside merges: readers cut words otherwise");
    if (*model == "gpt2" && !find(pre_key))
      fault(pre_key, "is missing: readers cut text into words by a rule that is no model's");
    if (*model == "gpt2" && text(pre_key) == "default")
      note(pre_key, "is \"default\": readers cut text into words by a rule of their own");
    if (find(types_key) == nullptr)
      fault(types_key, "is missing: readers take every token for text, the end of one, too");
  }

  void vocabulary_size() {
    const auto stated = number("%.vocab_size");
    const auto table = std::ranges::find(header_.tensors, std::string_view("token_embd.weight"), &io::GgufTensor::name);
    const auto* tokens = array<std::string>(tokens_key);
    if (!stated || table == header_.tensors.end() || table->shape.size() != 2) return;
    const auto rows = static_cast<double>(table->shape[0]);
    if (*stated == rows || (tokens != nullptr && *stated == static_cast<double>(tokens->size()))) return;
    fault("%.vocab_size", "is ", *stated, ", but token_embd.weight has ", rows, " rows");
  }

  struct Token {
    std::string text;
    int32_t kind = normal;
    bool is_text() const {
      constexpr std::string_view marks = "<[|";
      return (kind == normal || kind == byte) && (text.empty() || marks.find(text.front()) == std::string_view::npos);
    }
  };
  std::optional<Token> token_of(std::string_view key) const {
    const auto id = number(key);
    const auto* tokens = array<std::string>(tokens_key);
    const auto* kinds = array<int32_t>(types_key);
    if (!id || tokens == nullptr || kinds == nullptr || kinds->size() != tokens->size()) return std::nullopt;
    if (*id < 0 || *id >= static_cast<double>(tokens->size())) return std::nullopt;  // whoever reads the file says so
    const auto at = static_cast<size_t>(*id);
    return Token{(*tokens)[at], (*kinds)[at]};
  }

  static constexpr std::string_view bos_key = "tokenizer.ggml.bos_token_id", eos_key = "tokenizer.ggml.eos_token_id",
                                    eot_key = "tokenizer.ggml.eot_token_id", eom_key = "tokenizer.ggml.eom_token_id";

  void special_tokens() {
    const auto* kinds = array<int32_t>(types_key);
    bool marked = false;
    for (const std::string_view key : {bos_key, eos_key, eot_key, eom_key}) {
      const auto token = token_of(key);
      if (!token) continue;
      if (token->kind == unused)
        fault(key, "is a token that is not used");
      else if (token->is_text())
        fault(key, "is \"", printable(token->text), "\", a piece of text: its type is ", token->kind,
              ", not control (3)");
      else
        marked = marked || token->kind != normal;
      if (!token->is_text() && token->kind == normal) {
        const bool others = std::ranges::any_of(*kinds, [](int32_t kind) { return kind == control; });
        fault(types_key, others ? "others are control tokens, but not " : "no token is a control token, nor is ", "\"",
              printable(token->text), "\" (", full(key), "): readers take it for text");
        return;
      }
    }
    if (kinds == nullptr || kinds->empty()) return;
    for (const int32_t kind : {int32_t{control}, int32_t{unused}, int32_t{user_defined}}) {
      if (std::ranges::all_of(*kinds, [&](int32_t each) { return each == kind; }))
        fault(types_key, "all tokens have type ", kind, ": none is text");
    }
  }

  /// Tokens that begin a text end none.
  void ends() {
    constexpr std::string_view begins[] = {"<s>",
                                           "<bos>",
                                           "[BOS]",
                                           "<|begin_of_text|>",
                                           "<|startoftext|>",
                                           "<|bos|>",
                                           "<|begin▁of▁sentence|>",
                                           "<｜begin▁of▁sentence｜>"};
    for (const std::string_view key : {eos_key, eot_key}) {
      const auto token = token_of(key);
      if (token && std::ranges::find(begins, token->text) != std::end(begins))
        fault(key, "is \"", printable(token->text), "\", which begins a text: none would end");
    }
    const auto model = text(model_key);
    if (array<std::string>(tokens_key) == nullptr || find(eos_key) != nullptr || find(eot_key) != nullptr || !model)
      return;
    if (*model == "gpt2") fault(eos_key, "is missing: readers take token 11");
    if (*model == "llama") note(eos_key, "is missing: readers take token 2");
  }

  void chat_template() {
    const auto stated = text("tokenizer.chat_template");
    if (stated && stated->empty()) fault("tokenizer.chat_template", "is empty");
  }

  const io::GgufHeader& header_;
  std::string architecture_;
  GgufMetadataReport report_;
};

}  // namespace
}  // namespace of_metadata

GgufMetadataReport check_gguf_metadata(const io::GgufHeader& header) {
  return of_metadata::MetadataCheck(header).run();
}

}  // namespace w4q::verify
