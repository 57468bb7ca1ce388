// The CPU decoder in fp32: the definition that every faster decoder is compared with.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/views.h"
#include "model/decoder_layer.h"
#include "model/model.h"

namespace w4q::model {

/// Throws bad_argument where `ids` are none, do not fit behind `position` or are outside the vocabulary.
void check_ids(std::span<const int32_t> ids, int64_t position, int64_t capacity, int64_t vocab_size);

/// Scales and caps the products of the head as config.json says.
void finish_logits(const ModelConfig& config, MatrixView<float> logits);

/// A sequence being decoded: the KV cache and the scratch of one model. Not thread-safe; the model may be shared and
/// must outlive it.
class Decoder {
 public:
  /// `capacity`: the most positions of one sequence. `rope_frequencies`: see RopeTable; f32 is right,
  /// ModelConfig::dtype reproduces activations of a module that was cast to 16 bit as a whole. Throws bad_argument when
  /// the capacity is not positive or its cache is larger than memory can be. `int8_activations`: of prompts, see
  /// int8_activations.h, whose errors it throws.
  Decoder(const Model& model, int64_t capacity, DType rope_frequencies = DType::f32, bool int8_activations = false);
  ~Decoder();
  Decoder(Decoder&&) noexcept;

  /// Forgets the sequence.
  void reset() noexcept;
  /// Positions decoded so far.
  int64_t position() const noexcept;

  /// Appends `ids` (at least one) to the sequence and returns the hidden states after the final norm, [ids × hidden],
  /// valid until the next call. One token at a time gives the same as all at once (class E2), except under dynamic rope
  /// scaling beyond the model's positions, where the length so far decides (docs/model.md). Throws bad_argument for
  /// an id outside the vocabulary or when the capacity is exceeded.
  MatrixView<const float> forward(std::span<const int32_t> ids, const Observer* observer = nullptr);

  /// The same of a model that several processes hold together: those at a stage that is not the last one get hidden
  /// states behind their own layers. All call it with the same ids.
  MatrixView<const float> forward(std::span<const int32_t> ids, const LayerStage& stage);

  /// Logits of hidden states, [rows × vocab]; where the last layer is.
  void logits(MatrixView<const float> hidden, MatrixView<float> out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::model
