// What stays in 16 bit: norms, embeddings, head, biases.
#include <algorithm>

#include "audit/faults.h"
#include "core/text.h"

namespace w4q::audit {
namespace {

constexpr const char* kept_group = "kept tensors";

/// Changes the values of one kept tensor whose name contains `part`.
bool change_kept(Subject& s, std::string_view part, const std::function<void(std::vector<float>&)>& how) {
  const auto names = s.kept(part);
  if (names.empty()) return false;
  s.edit_values(s.pick(names), how);
  return true;
}

bool scale(Subject& s, std::string_view part, float factor) {
  return change_kept(s, part, [factor](std::vector<float>& values) {
    for (float& value : values) value *= factor;
  });
}

/// Exchanges a tensor with its namesake of another layer.
bool exchange_layers(Subject& s, std::string_view part) {
  const auto names = s.kept(part);
  if (names.size() < 2) return false;
  const std::string& first = s.pick(names);
  const auto tail = [](std::string_view name) { return name.substr(name.find('.', name.find(".layers.") + 8)); };
  std::vector<std::string> others;
  for (const auto& name : names) {
    if (name != first && tail(name) == tail(first)) others.push_back(name);
  }
  return !others.empty() && s.exchange(first, s.pick(others));
}

bool exchange_parts(Subject& s, std::string_view one, std::string_view two) {
  const auto names = s.kept(one);
  if (names.empty()) return false;
  const std::string first = s.pick(names);
  std::string second = first;
  second.replace(second.find(one), one.size(), two);
  return s.copy.has(second) && s.exchange(first, second);
}

/// Moves or exchanges rows of a matrix: `from(row)` is the row that comes there.
bool move_rows(Subject& s, std::string_view part, const std::function<int64_t(int64_t row, int64_t rows)>& from) {
  const auto names = s.kept(part);
  if (names.empty()) return false;
  Tensor& tensor = s.copy.at(s.pick(names));
  const auto before = tensor.bytes;
  const auto rows = tensor.shape[0];
  const size_t width = before.size() / static_cast<size_t>(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const auto source = before.begin() + static_cast<int64_t>(width) * from(row, rows);
    std::copy_n(source, width, tensor.bytes.begin() + static_cast<int64_t>(width) * row);
  }
  return true;
}

bool take_other_kept(Subject& s, std::string_view part) {
  const auto names = s.kept(part);
  if (names.empty()) return false;
  const std::string& name = s.pick(names);
  s.copy.at(name).bytes = s.specimen.other_copy.tensors.at(name).bytes;
  return true;
}

}  // namespace

Faults kept_faults() {
  return {
      {kept_group, "a norm is doubled", [](Subject& s) { return scale(s, "layernorm", 2); }},
      {kept_group, "a norm is a tenth too large", [](Subject& s) { return scale(s, "layernorm", 1.1f); }},
      {kept_group, "a norm is zero", [](Subject& s) { return scale(s, "layernorm", 0); }},
      {kept_group, "a norm is negated", [](Subject& s) { return scale(s, "layernorm", -1); }},
      {kept_group, "a norm is stored less one",
       [](Subject& s) {
         return change_kept(s, "layernorm", [](std::vector<float>& values) {
           for (float& value : values) value -= 1;
         });
       }},
      {kept_group, "a norm is all ones",
       [](Subject& s) { return change_kept(s, "layernorm", [](auto& values) { std::ranges::fill(values, 1.0f); }); }},
      {kept_group, "the final norm is all ones",
       [](Subject& s) { return change_kept(s, "model.norm", [](auto& values) { std::ranges::fill(values, 1.0f); }); }},
      {kept_group, "a norm's channels are moved by one",
       [](Subject& s) {
         return change_kept(s, "layernorm", [](auto& values) { std::ranges::rotate(values, values.begin() + 1); });
       }},
      {kept_group, "norms of two layers are exchanged", [](Subject& s) { return exchange_layers(s, "layernorm"); }},
      {kept_group, "the two norms of a layer are exchanged",
       [](Subject& s) { return exchange_parts(s, "input_layernorm", "post_attention_layernorm"); }},
      {kept_group, "norms of queries and keys are exchanged",
       [](Subject& s) { return exchange_parts(s, "q_norm", "k_norm"); }},
      {kept_group, "a norm is another model's", [](Subject& s) { return take_other_kept(s, "layernorm"); }},
      {kept_group, "the embeddings are as they were initialised",
       [](Subject& s) {
         return change_kept(s, "embed_tokens", [&](std::vector<float>& values) {
           for (float& value : values) {
             float sum = -6;  // of twelve: nearly normal
             for (int i = 0; i < 12; ++i) sum += static_cast<float>(s.below(1 << 16)) * 0x1p-16f;
             value = 0.02f * sum;
           }
         });
       }},
      {kept_group, "two rows of the embeddings are exchanged",
       [](Subject& s) {
         const auto a = static_cast<int64_t>(s.below(500)), b = a + 1 + static_cast<int64_t>(s.below(500));
         return move_rows(s, "embed_tokens", [=](int64_t row, int64_t) { return row == a ? b : row == b ? a : row; });
       }},
      {kept_group, "rows of the embeddings are moved by one",
       [](Subject& s) {
         return move_rows(s, "embed_tokens", [](int64_t row, int64_t rows) { return (row + 1) % rows; });
       }},
      {kept_group, "a row of the embeddings is zero",
       [](Subject& s) {
         return change_kept(s, "embed_tokens", [&](std::vector<float>& values) {
           const size_t width = static_cast<size_t>(s.config().hidden_size);
           std::fill_n(values.begin() + static_cast<int64_t>(s.below(1000) * width), width, 0.0f);
         });
       }},
      {kept_group, "the last rows of the embeddings are zero",
       [](Subject& s) {
         return change_kept(s, "embed_tokens", [](std::vector<float>& values) {
           std::fill(values.begin() + static_cast<int64_t>(values.size() / 2), values.end(), 0.0f);
         });
       }},
      {kept_group, "the embeddings are doubled", [](Subject& s) { return scale(s, "embed_tokens", 2); }},
      {kept_group, "the embeddings are another model's", [](Subject& s) { return take_other_kept(s, "embed_tokens"); }},
      {kept_group, "the head is another model's", [](Subject& s) { return take_other_kept(s, "lm_head"); }},
      {kept_group, "the head is the embeddings",
       [](Subject& s) {
         if (!s.copy.has("lm_head.weight") || !s.copy.has("model.embed_tokens.weight")) return false;
         s.copy.at("lm_head.weight").bytes = s.copy.at("model.embed_tokens.weight").bytes;
         return true;
       }},
      {kept_group, "a bias is negated", [](Subject& s) { return scale(s, ".bias", -1); }},
      {kept_group, "a bias is zero", [](Subject& s) { return scale(s, ".bias", 0); }},
      {kept_group, "biases of two layers are exchanged", [](Subject& s) { return exchange_layers(s, ".bias"); }},
      {kept_group, "biases of keys and values are exchanged",
       [](Subject& s) { return exchange_parts(s, "k_proj.bias", "v_proj.bias"); }},
      {kept_group, "bytes of a kept tensor are those of a big-endian machine",
       [](Subject& s) {
         Tensor& tensor = s.copy.at(s.pick(s.kept()));
         for (size_t i = 0; i + 1 < tensor.bytes.size(); i += 2) std::swap(tensor.bytes[i], tensor.bytes[i + 1]);
         return true;
       }},
      {kept_group, "a kept tensor's second half is zero",
       [](Subject& s) {
         Tensor& tensor = s.copy.at(s.pick(s.kept()));
         std::fill(tensor.bytes.begin() + static_cast<int64_t>(tensor.bytes.size() / 2), tensor.bytes.end(),
                   std::byte{0});
         return true;
       }},
  };
}

}  // namespace w4q::audit
