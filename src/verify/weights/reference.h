// Comparison with reference activations that another implementation wrote to a safetensors file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "io/json.h"
#include "model/model.h"

namespace w4q::verify {

struct Difference {
  std::string name;    ///< "logits_fp32", "hidden_fp32.3"
  double largest = 0;  ///< max |ours − reference|
  double scale = 1;    ///< of hidden states: the largest magnitude in the reference, at least 1; of logits 1
  int64_t row = 0;     ///< where: token
  int64_t col = 0;     ///< and channel
};

struct ReferenceReport {
  int64_t tokens = 0;
  /// The type in which the reference held its rotary frequencies. Right is fp32, but a module that is cast to 16 bit as
  /// a whole rounds them too, and its logits then differ by 1e-2 and more from the right ones.
  DType rope_frequencies = DType::f32;
  double largest_with_f32 = 0;  ///< the largest difference with fp32 frequencies, whatever the reference did
  std::vector<Difference> differences;
  int64_t same_top1 = 0;  ///< tokens whose largest logit is the same

  /// The largest difference of all: absolute for logits, relative to `scale` for hidden states, whose few outlier
  /// channels reach into the hundreds.
  double largest() const noexcept;
};

/// Decodes the file's `ids` or `prompt_ids` (I32 or I64) and compares with `logits_fp32` [tokens, vocab] and, where
/// they stand, `hidden_fp32.i` [tokens, hidden] (0: embeddings, i: after layer i − 1, the last after the final norm).
/// Throws bad_file naming the tensor when one is missing or misshapen.
ReferenceReport compare_reference(const model::Model& model, const std::filesystem::path& file);

std::string to_text(const ReferenceReport& report);
io::Json to_json(const ReferenceReport& report);

}  // namespace w4q::verify
