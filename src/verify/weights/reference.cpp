#include "verify/weights/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "core/text.h"
#include "io/checkpoint.h"
#include "model/decoder.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

constexpr std::string_view hidden_prefix = "hidden_fp32.";

template <class T>
std::vector<T> values_of(const io::LoadedTensor& tensor) {
  std::vector<T> values(tensor->bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor->bytes.data(), values.size() * sizeof(T));
  return values;
}

std::vector<int32_t> read_ids(const io::Checkpoint& file) {
  const std::string_view name = file.contains("ids") ? "ids" : "prompt_ids";
  const auto tensor = file.load(name);
  if (tensor->shape.size() != 1 || tensor->shape[0] < 1 ||
      (tensor->dtype != DType::i32 && tensor->dtype != DType::i64)) {
    throw Error(ErrorCode::bad_file, concat(name, " in ", file.file_of(name), " is not a list of token ids"))
        .detail(
            concat("expected I32 or I64 [tokens], found ", dtype_name(tensor->dtype), " ", shape_text(tensor->shape)));
  }
  if (tensor->dtype == DType::i32) return values_of<int32_t>(tensor);
  std::vector<int32_t> ids;
  for (const int64_t id : values_of<int64_t>(tensor)) {
    // Anything that does not fit is outside every vocabulary and is refused there.
    ids.push_back(id < 0 || id > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(id));
  }
  return ids;
}

std::vector<float> read_matrix(const io::Checkpoint& file, const std::string& name, int64_t rows, int64_t cols) {
  const auto tensor = file.load(name);
  if (tensor->dtype != DType::f32 || tensor->shape != Shape{rows, cols}) {
    throw Error(ErrorCode::mismatch, concat(printable(name), " in ", file.file_of(name), " does not fit the model"))
        .detail(concat("expected F32 ", shape_text({rows, cols}), ", found ", dtype_name(tensor->dtype), " ",
                       shape_text(tensor->shape)));
  }
  return values_of<float>(tensor);
}

Difference compare(std::string name, MatrixView<const float> ours, const std::vector<float>& reference) {
  Difference result{std::move(name), 0, 1, 0, 0};
  if (result.name.starts_with(hidden_prefix)) {
    for (const float value : reference) result.scale = std::max(result.scale, double{std::abs(value)});
  }
  for (int64_t r = 0; r < ours.rows; ++r) {
    for (int64_t c = 0; c < ours.cols; ++c) {
      const double difference = std::abs(double{ours.row(r)[c]} - reference[static_cast<size_t>(r * ours.cols + c)]);
      if (difference <= result.largest) continue;
      // A NaN lands here too and stays the largest.
      result.largest = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
      result.row = r;
      result.col = c;
    }
  }
  return result;
}

int64_t count_same_top1(MatrixView<const float> ours, const std::vector<float>& reference) {
  int64_t same = 0;
  for (int64_t r = 0; r < ours.rows; ++r) {
    const float* theirs = reference.data() + r * ours.cols;
    same += std::max_element(ours.row(r), ours.row(r) + ours.cols) - ours.row(r) ==
                    std::max_element(theirs, theirs + ours.cols) - theirs
                ? 1
                : 0;
  }
  return same;
}

/// One decode with rotary frequencies of the given type, compared with everything that the file holds.
ReferenceReport compare_with(const model::Model& model, const io::Checkpoint& file, const std::vector<int32_t>& ids,
                             DType rope_frequencies) {
  const auto& config = model.config();
  const auto tokens = static_cast<int64_t>(ids.size());
  ReferenceReport report;
  report.tokens = tokens;
  report.rope_frequencies = rope_frequencies;
  model::Decoder decoder(model, tokens, rope_frequencies);
  model::Observer observer;
  observer.hidden = [&](int64_t index, MatrixView<const float> hidden) {
    const std::string name = concat(hidden_prefix, index);
    if (!file.contains(name)) return;
    report.differences.push_back(compare(name, hidden, read_matrix(file, name, tokens, config.hidden_size)));
  };
  const auto hidden = decoder.forward(ids, &observer);
  const auto reference = read_matrix(file, "logits_fp32", tokens, config.vocab_size);
  std::vector<float> buffer(static_cast<size_t>(tokens * config.vocab_size));
  const MatrixView<float> logits(buffer.data(), tokens, config.vocab_size);
  decoder.logits(hidden, logits);
  report.differences.push_back(compare("logits_fp32", logits, reference));
  report.same_top1 = count_same_top1(logits, reference);
  return report;
}

/// Beyond this fp32 rounding cannot explain a difference of logits (measured: 3e-5 at most on 26 checkpoints).
constexpr double unexplained = 1e-4;

}  // namespace

double ReferenceReport::largest() const noexcept {
  double result = 0;
  for (const auto& difference : differences) result = std::max(result, difference.largest / difference.scale);
  return result;
}

ReferenceReport compare_reference(const model::Model& model, const std::filesystem::path& path) {
  const auto file = io::Checkpoint::open(path);
  const auto ids = read_ids(file);
  ReferenceReport report = compare_with(model, file, ids, DType::f32);
  report.largest_with_f32 = report.largest();
  const auto dtype = model.config().dtype;
  if (report.largest() <= unexplained || !dtype || *dtype == DType::f32) return report;
  ReferenceReport rounded = compare_with(model, file, ids, *dtype);
  rounded.largest_with_f32 = report.largest_with_f32;
  return rounded.largest() < report.largest() ? rounded : report;
}

std::string to_text(const ReferenceReport& report) {
  TextTable table({"activation", "largest difference", "magnitude", "token", "channel"});
  for (const auto& difference : report.differences) {
    table.row({difference.name, concat(difference.largest), fixed(difference.scale, 1), concat(difference.row),
               concat(difference.col)});
  }
  std::string text = table.str();
  text += concat("same most likely token at ", report.same_top1, " of ", report.tokens, " positions\n");
  if (report.rope_frequencies != DType::f32) {
    text += concat("note: the reference rounded its rotary frequencies to ", dtype_name(report.rope_frequencies),
                   "; compared like with like. With fp32 frequencies, which are right, the largest difference is ",
                   report.largest_with_f32, "\n");
  }
  return text;
}

io::Json to_json(const ReferenceReport& report) {
  io::Json differences = io::Json::array();
  for (const auto& difference : report.differences) {
    differences.push_back({{"name", difference.name},
                           {"largest", difference.largest},
                           {"scale", difference.scale},
                           {"token", difference.row},
                           {"channel", difference.col}});
  }
  return {{"tokens", report.tokens},
          {"largest_difference", report.largest()},
          {"rope_frequencies", dtype_name(report.rope_frequencies)},
          {"largest_difference_with_f32_frequencies", report.largest_with_f32},
          {"same_top1", report.same_top1},
          {"differences", std::move(differences)}};
}

CheckRow reference_check() {
  static constexpr Limit limits[] = {{"--max-diff", "Fail when --reference differs by more"}};
  return {.name = "reference",
          .option = "--reference",
          .value = "ref.safetensors",
          .help = "Safetensors file with ids and logits_fp32 to compare with",
          .limits = limits,
          .run = [](CheckContext& context, Findings& findings) {
            const auto report = compare_reference(context.model(), context.value("--reference"));
            findings.add("reference", to_text(report), to_json(report));
            findings.checks.add(
                {"reference", std::isfinite(report.largest()), concat("largest difference ", report.largest()), {}});
            if (const auto most = context.limit("--max-diff")) {
              findings.checks.add_threshold("largest difference", report.largest(), *most);
            }
          }};
}

}  // namespace w4q::verify
