// The "post_processor" of tokenizer.json: the special tokens around a text, such as BOS.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tokenizer/json_node.h"

namespace w4q::tokenizer {

class PostProcessor {
 public:
  /// Adds nothing.
  PostProcessor() = default;
  /// Reads TemplateProcessing (its template for a single text), BertProcessing, RobertaProcessing, ByteLevel (which
  /// concerns offsets only) and Sequence. Ids are below `end_id`. Throws bad_file, or unsupported for others.
  static PostProcessor parse(const std::optional<JsonNode>& node, int64_t end_id);

  /// The ids with their special tokens.
  std::vector<int32_t> apply(std::vector<int32_t> ids) const;

 private:
  void add(const JsonNode& node, int64_t end_id, int depth);
  void add_template(const JsonNode& node, int64_t end_id);
  void add_frame(const JsonNode& node, int64_t end_id);

  std::vector<int32_t> before_;
  std::vector<int32_t> after_;
};

}  // namespace w4q::tokenizer
