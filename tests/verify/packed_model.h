// A quantized copy of the bundled model, for tests that damage it.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <vector>

#include "core/progress.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "pipeline/quantize_model.h"
#include "quantize/rounding.h"
#include "support.h"
#include "verify/ladder.h"

namespace w4q::test {

inline std::filesystem::path bundled_model() { return testdata() / "w4q-llama-tiny"; }

/// Quantizes the bundled model into `folder`/q, each weight rounded by itself.
inline std::filesystem::path quantized_model(const TemporaryFolder& folder, const formats::Scheme& scheme) {
  set_progress_enabled(false);
  pipeline::QuantizeRequest request;
  request.model = bundled_model();
  request.output = folder / "q";
  request.scheme = scheme;
  request.method = quantize::rounding_quantizer(scheme).name;
  pipeline::quantize_model(request);
  return request.output;
}
inline std::filesystem::path quantized_model(const TemporaryFolder& folder, int bits) {
  formats::Scheme scheme;
  scheme.bits = bits;
  return quantized_model(folder, scheme);
}

/// What to climb for.
inline verify::CheckOptions check_options(const std::filesystem::path& model, const std::filesystem::path& base = {},
                                          const std::filesystem::path& ids = {}) {
  verify::CheckOptions options;
  options.model = model;
  options.base = base;
  options.ids = ids;
  return options;
}

/// Sees every tensor; returns false to leave it out.
using Change = std::function<bool(io::PlannedTensor&, std::vector<std::byte>&)>;

/// Writes the weights of `model` anew, with changes.
inline void rewrite(const std::filesystem::path& model, const Change& change) {
  std::vector<io::PlannedTensor> plan;
  std::map<std::string, std::vector<std::byte>> data;
  {
    const auto checkpoint = io::Checkpoint::open(model);
    for (const auto& [name, info] : checkpoint.tensors()) {
      const auto tensor = checkpoint.load(name);
      io::PlannedTensor planned{name, info.dtype, info.shape};
      std::vector<std::byte> bytes(tensor->bytes.begin(), tensor->bytes.end());
      if (!change(planned, bytes)) continue;
      data[planned.name] = std::move(bytes);
      plan.push_back(std::move(planned));
    }
  }
  std::filesystem::remove(model / "model.safetensors");
  io::CheckpointWriter writer(model, plan, {});
  for (const auto& [name, bytes] : data) writer.write(name, bytes);
  writer.finish();
}

}  // namespace w4q::test
