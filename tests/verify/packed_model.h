// A quantized copy of the bundled model, for tests that damage it.
#pragma once

#include <filesystem>

#include "core/progress.h"
#include "pipeline/quantize_model.h"
#include "support.h"

namespace w4q::test {

inline std::filesystem::path bundled_model() { return testdata() / "w4q-llama-tiny"; }

/// Quantizes the bundled model to `bits` bits into `folder`/q.
inline std::filesystem::path quantized_model(const TemporaryFolder& folder, int bits) {
  set_progress_enabled(false);
  pipeline::QuantizeRequest request;
  request.model = bundled_model();
  request.output = folder / "q";
  request.scheme.bits = bits;
  pipeline::quantize_model(request);
  return request.output;
}

}  // namespace w4q::test
