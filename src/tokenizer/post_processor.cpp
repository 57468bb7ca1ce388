#include "tokenizer/post_processor.h"

#include "core/text.h"

namespace w4q::tokenizer {
namespace {

constexpr int max_depth = 20;

std::vector<int32_t> ids_of(const JsonNode& array, int64_t end_id) {
  std::vector<int32_t> ids;
  for (const auto& item : array.items()) ids.push_back(static_cast<int32_t>(item.integer(0, end_id - 1)));
  return ids;
}

/// ["</s>", 2]
int32_t id_of_pair(const JsonNode& node, int64_t end_id) {
  const auto items = node.items();
  if (items.size() != 2) throw node.wrong_type("a token and its id");
  return static_cast<int32_t>(items[1].integer(0, end_id - 1));
}

}  // namespace

PostProcessor PostProcessor::parse(const std::optional<JsonNode>& node, int64_t end_id) {
  PostProcessor result;
  if (node) result.add(*node, end_id, 0);
  return result;
}

void PostProcessor::add(const JsonNode& node, int64_t end_id, int depth) {
  if (depth > max_depth) throw node.error(ErrorCode::unsupported, "sequences are nested too deeply");
  const std::string& type = node.type();
  if (type == "Sequence") {
    for (const auto& child : node.at("processors").items()) add(child, end_id, depth + 1);
  } else if (type == "TemplateProcessing") {
    add_template(node, end_id);
  } else if (type == "BertProcessing" || type == "RobertaProcessing") {
    add_frame(node, end_id);
  } else if (type != "ByteLevel") {
    throw node.unknown_type("post-processor",
                            "TemplateProcessing, BertProcessing, RobertaProcessing, ByteLevel, Sequence");
  }
}

/// [{"SpecialToken": {"id": name}}, {"Sequence": {"id": "A"}}, …] and what ids the names stand for.
void PostProcessor::add_template(const JsonNode& node, int64_t end_id) {
  std::vector<int32_t> before;
  std::vector<int32_t> after;
  bool text_seen = false;
  for (const auto& piece : node.at("single").items()) {
    if (piece.find("Sequence")) {
      if (text_seen) throw piece.error(ErrorCode::unsupported, "the template repeats the text");
      text_seen = true;
      continue;
    }
    const JsonNode name = piece.at("SpecialToken").at("id");
    const auto ids = ids_of(node.at("special_tokens").at(name.string()).at("ids"), end_id);
    auto& side = text_seen ? after : before;
    side.insert(side.end(), ids.begin(), ids.end());
  }
  if (!text_seen) throw node.at("single").error(ErrorCode::bad_file, "the template lacks the text");
  before_.insert(before_.begin(), before.begin(), before.end());
  after_.insert(after_.end(), after.begin(), after.end());
}

void PostProcessor::add_frame(const JsonNode& node, int64_t end_id) {
  before_.insert(before_.begin(), id_of_pair(node.at("cls"), end_id));
  after_.push_back(id_of_pair(node.at("sep"), end_id));
}

std::vector<int32_t> PostProcessor::apply(std::vector<int32_t> ids) const {
  ids.insert(ids.begin(), before_.begin(), before_.end());
  ids.insert(ids.end(), after_.begin(), after_.end());
  return ids;
}

}  // namespace w4q::tokenizer
