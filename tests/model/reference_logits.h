// Reference activations of a checkpoint, and how far the decoder is from them.
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "core/convert.h"
#include "io/checkpoint.h"
#include "model/decoder.h"

namespace w4q::test {

/// ids or prompt_ids, logits_fp32 and, where stored, hidden_fp32.i of a reference.safetensors.
class ReferenceLogits {
 public:
  explicit ReferenceLogits(const std::filesystem::path& file) : file_(io::Checkpoint::open(file)) {
    const auto loaded = file_.load(file_.contains("ids") ? "ids" : "prompt_ids");
    ids_.resize(loaded->bytes.size() / sizeof(int32_t));
    std::memcpy(ids_.data(), loaded->bytes.data(), ids_.size() * sizeof(int32_t));
    logits_ = floats("logits_fp32");
  }

  const std::vector<int32_t>& ids() const { return ids_; }
  const std::vector<float>& logits() const { return logits_; }
  bool has_hidden(int64_t index) const { return file_.contains("hidden_fp32." + std::to_string(index)); }
  std::vector<float> hidden(int64_t index) const { return floats("hidden_fp32." + std::to_string(index)); }

 private:
  std::vector<float> floats(const std::string& name) const {
    const auto loaded = file_.load(name);
    std::vector<float> values(static_cast<size_t>(element_count(loaded->shape)));
    widen(loaded->bytes, loaded->dtype, values);
    return values;
  }

  io::Checkpoint file_;
  std::vector<int32_t> ids_;
  std::vector<float> logits_;
};

/// Largest |a − b|; infinite where the sizes differ or a value is not finite.
inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(double{a[i]} - double{b[i]});
    largest = std::isfinite(difference) ? std::max(largest, difference) : INFINITY;
  }
  return largest;
}

/// A view's values without its stride.
inline std::vector<float> values_of(MatrixView<const float> matrix) {
  std::vector<float> values;
  for (int64_t r = 0; r < matrix.rows; ++r) values.insert(values.end(), matrix.row(r), matrix.row(r) + matrix.cols);
  return values;
}

/// Logits of `ids` decoded in chunks of the given sizes; the last size repeats until all are done.
inline std::vector<float> decode(const model::Model& model, const std::vector<int32_t>& ids,
                                 const std::vector<size_t>& chunks, const model::Observer* observer = nullptr,
                                 DType rope_frequencies = DType::f32, bool int8_activations = false) {
  const int64_t vocab = model.config().vocab_size;
  model::Decoder decoder(model, static_cast<int64_t>(ids.size()), rope_frequencies, int8_activations);
  std::vector<float> logits(ids.size() * static_cast<size_t>(vocab));
  for (size_t begin = 0, chunk = 0; begin < ids.size(); ++chunk) {
    const size_t count = std::min(chunks[std::min(chunk, chunks.size() - 1)], ids.size() - begin);
    const auto hidden = decoder.forward(std::span(ids).subspan(begin, count), observer);
    decoder.logits(hidden, {logits.data() + static_cast<int64_t>(begin) * vocab, hidden.rows, vocab});
    begin += count;
  }
  return logits;
}

}  // namespace w4q::test
