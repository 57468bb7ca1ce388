#include "model/stream_writers.h"

#include <algorithm>
#include <array>
#include <string>

namespace w4q::model {
namespace {

struct Writers {
  std::string_view class_name;
  /// Ends of modules' paths, with numbers or without: the last matrices of their projectors, and rows that are learned.
  std::array<std::string_view, 2> ends;
};

constexpr std::string_view projector = "multi_modal_projector.linear_2", newline = "image_newline",
                           sequence = "merger.mlp.2", merger = "merger.linear_fc2",
                           deepstack = "deepstack_merger_list.linear_fc2", connector = "modality_projection.proj";
constexpr std::array<Writers, 18> known{{
    {"AudioFlamingo3ForConditionalGeneration", {projector}},
    {"Glm4vMoeForConditionalGeneration", {"merger.down_proj"}},
    {"Idefics3ForConditionalGeneration", {connector}},
    {"InternVLForConditionalGeneration", {projector}},
    {"LlavaForConditionalGeneration", {projector}},
    {"LlavaNextForConditionalGeneration", {projector, newline}},
    {"LlavaNextVideoForConditionalGeneration", {projector, newline}},
    {"LlavaOnevisionForConditionalGeneration", {projector, newline}},
    {"Mistral3ForConditionalGeneration", {projector}},
    {"Qwen2AudioForConditionalGeneration", {"multi_modal_projector.linear"}},
    {"Qwen2VLForConditionalGeneration", {sequence}},
    {"Qwen2_5_VLForConditionalGeneration", {sequence}},
    {"Qwen3VLForConditionalGeneration", {merger, deepstack}},
    {"Qwen3VLMoeForConditionalGeneration", {merger, deepstack}},
    {"Qwen3_5ForConditionalGeneration", {merger}},
    {"Qwen3_5MoeForConditionalGeneration", {merger}},
    {"SmolVLMForConditionalGeneration", {connector}},
    {"VoxtralForConditionalGeneration", {projector}},
}};

/// "visual.deepstack_merger_list.0.linear_fc2" → "visual.deepstack_merger_list.linear_fc2".
std::string without_numbers(std::string_view path) {
  std::string result;
  while (!path.empty()) {
    const size_t dot = std::min(path.find('.'), path.size());
    const std::string_view part = path.substr(0, dot);
    if (part.find_first_not_of("0123456789") != std::string_view::npos) {
      if (!result.empty()) result += '.';
      result += part;
    }
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return result;
}

bool is_end(std::string_view path, std::string_view end) {
  if (end.empty() || !path.ends_with(end)) return false;
  return path.size() == end.size() || path[path.size() - end.size() - 1] == '.';
}

auto find(std::string_view class_name) { return std::ranges::find(known, class_name, &Writers::class_name); }

}  // namespace

bool knows_stream_writers(std::string_view class_name) noexcept { return find(class_name) != known.end(); }

bool writes_stream(std::string_view class_name, std::string_view tensor) {
  const auto found = find(class_name);
  if (found == known.end()) return false;
  for (const std::string_view suffix : {".weight", ".bias"}) {
    if (tensor.ends_with(suffix)) tensor.remove_suffix(suffix.size());
  }
  const std::string plain = without_numbers(tensor);
  return std::ranges::any_of(found->ends,
                             [&](std::string_view end) { return is_end(tensor, end) || is_end(plain, end); });
}

}  // namespace w4q::model
