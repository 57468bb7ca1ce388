#include "verify/conventions/claims.h"

#include <algorithm>

#include "checkpoint/dialect/compressed_tensors_config.h"
#include "checkpoint/dialect/config.h"
#include "checkpoint/dialect/gptq_config.h"
#include "checkpoint/dialect/small_floats_config.h"
#include "core/text.h"
#include "formats/scheme.h"

namespace w4q::verify {
namespace {

std::vector<std::string> texts(const io::Json& config, const char* key) {
  std::vector<std::string> result;
  const auto found = config.find(key);
  if (found == config.end() || !found->is_array()) return result;
  for (const auto& entry : *found) {
    if (entry.is_string()) result.push_back(entry.get<std::string>());
  }
  return result;
}

}  // namespace

struct Claims::Readers {
  std::string method;
  std::vector<std::string> skipped;  // parts of paths
  const char* skipped_key = "";
  std::optional<checkpoint::GptqConfig> gptq;
  std::optional<checkpoint::CtConfig> compressed_tensors;
  Words words;
};

Claims::Claims(const checkpoint::DialectSource& source) : readers_(std::make_unique<Readers>()) {
  Readers& readers = *readers_;
  readers.method =
      checkpoint::config_text(source, {"quant_method"}, source.config.contains("zero_point") ? "awq" : "gptq");
  if (const std::string words = checkpoint::auto_round_words(source); !words.empty()) readers.method = words;
  if (readers.method == "gptq") {
    readers.gptq.emplace(source);
    can_leave_out_ = checkpoint::config_text(source, {"checkpoint_format", "format"}, "gptq") != "marlin";
  } else if (readers.method == "compressed-tensors") {
    readers.compressed_tensors.emplace(
        source, checkpoint::holds_float_groups(source) || checkpoint::is_naive_float(source.config));
  } else {
    readers.skipped_key = readers.method == "awq" ? "modules_to_not_convert" : "llm_int8_skip_modules";
    readers.skipped = texts(source.config, readers.skipped_key);
    readers.words.group = checkpoint::config_group(source, {"group_size", "q_group_size"});
    readers.words.asymmetric = checkpoint::config_flag(source, {"zero_point"}, true);
    can_leave_out_ = readers.method == "awq" || readers.method == "bitsandbytes";
  }
}

Claims::~Claims() = default;

std::string Claims::left_out_by(const std::string& linear) const {
  if (readers_->gptq) return readers_->gptq->setting(linear).left_out ? "a rule of \"dynamic\"" : "";
  if (const auto& config = readers_->compressed_tensors) {
    if (config->ignores(linear)) return "\"ignore\"";
    return config->targets(linear) ? "" : "\"config_groups\", no target of which names it";
  }
  const auto hit = std::ranges::find_if(
      readers_->skipped, [&](const std::string& part) { return linear.find(part) != std::string::npos; });
  return hit == readers_->skipped.end() ? "" : concat(readers_->skipped_key, " (\"", printable(*hit), "\")");
}

Claims::Words Claims::words_of(const std::string& linear) const {
  if (readers_->gptq) {
    const auto setting = readers_->gptq->setting(linear);
    return {setting.bits, setting.group, !setting.symmetric};
  }
  if (const auto& config = readers_->compressed_tensors; config && config->targets(linear)) {
    const auto& weights = config->weights_of(linear);
    return {weights.bits, weights.group, weights.asymmetric};
  }
  return readers_->words;
}

}  // namespace w4q::verify
