// Of models that see or hear: which matrices beside the text model put rows into its residual stream, in the place of
// embeddings or added to it. Whoever changes the basis of the stream changes their outputs with it.
#pragma once

#include <string_view>

namespace w4q::model {

/// Whether it is known of the class ("Qwen3VLForConditionalGeneration") which tensors do.
bool knows_stream_writers(std::string_view class_name) noexcept;

/// Whether `tensor` does, a weight [hidden, …], a bias or a row [hidden] by itself.
bool writes_stream(std::string_view class_name, std::string_view tensor);

}  // namespace w4q::model
