// How fast a model decodes on a GPU, beside what its memory could do.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/context.h"
#include "io/json.h"
#include "kernels/attention/kv_page.h"
#include "model/config.h"
#include "model/model.h"

namespace w4q::verify {

struct SpeedOptions {
  int64_t prompt = 512;    ///< tokens of the prompt, which is also the context of the steps
  int64_t generate = 128;  ///< steps
  kernels::KvChoice kv = {};
  bool project_sm89 = false;                   ///< add what an RTX 4090 should do
  std::optional<int64_t> residual_bytes = {};  ///< measure too with residual passes in so many bytes of GPU memory
  bool int8_activations = false;               ///< measure the prompt too with int8 activations
};

/// Single tokens, one way of running them.
struct StepSpeed {
  std::string name;         ///< "graph", "graph without overlap", "launches"
  double seconds = 0;       ///< a token
  double host_seconds = 0;  ///< of the calling thread, a token: the median
  double tokens_per_second() const noexcept { return 1 / seconds; }
};

struct PartSpeed {
  std::string name;
  int64_t launches = 0;
  int64_t bytes = 0;
  double seconds = 0;
};

/// The model behind it: seconds = bytes / bandwidth + overhead. The overhead is what a step without overlapping
/// launches takes here beyond its bytes at this card's read bandwidth; it is taken over as it is, though the other card
/// has the higher clock.
struct Projection {
  double bandwidth = 0;  ///< bytes a second that the best public decoder reaches there
  double overhead = 0;   ///< seconds a token
  double seconds = 0;    ///< a token
};

/// The same model with residual passes that come from host memory.
struct OffloadSpeed {
  int64_t budget = 0;         ///< bytes of GPU memory for residual passes
  int64_t moved_bytes = 0;    ///< in a step, and for each chunk of a prompt
  double link_bandwidth = 0;  ///< bytes a second while copying
  double step_seconds = 0, prompt_seconds = 0;
  double step_overlap = 0, prompt_overlap = 0;  ///< shares of the copying that other work hid
  /// The longer of computing (measured without the copies) and copying; and the share of the copying for which there is
  /// computing.
  double predicted_step_seconds = 0, predicted_prompt_seconds = 0;
  double predicted_step_overlap = 0, predicted_prompt_overlap = 0;
  int64_t memory_bytes = 0;  ///< of the GPU, that model and decoder have taken when all is done
  /// What they take with everything in GPU memory, less the bytes that are not there, and the two buffers.
  int64_t predicted_memory_bytes = 0;
};

struct SpeedReport {
  std::string gpu;
  std::string model;
  double read_bandwidth = 0;  ///< bytes a second, measured in the same run
  int64_t weight_bytes = 0;   ///< that a token reads
  int64_t step_bytes = 0;     ///< … with the cache at the mean context
  int64_t cache_bytes_per_token = 0;
  SpeedOptions options;
  double prompt_seconds = 0;       ///< to the first token
  double int8_prompt_seconds = 0;  ///< the same with int8 activations; 0: not measured
  std::vector<StepSpeed> steps;    ///< the first one counts
  int64_t launches = 0;            ///< in a step
  std::vector<PartSpeed> parts;
  double kept_pages = 1;  ///< share of the cache's pages that the last step attended to
  std::optional<Projection> sm89;
  std::optional<OffloadSpeed> offload;
  std::vector<std::string> widened;  ///< packed layers without a kernel
};

/// Decodes random tokens with `model` on a GPU. Throws device where this program was built without CUDA.
SpeedReport measure_speed(device::Context& gpu, const model::Model& model, const SpeedOptions& options);
/// The same with random weights of a shape, in passes of these schemes or, without, f16.
SpeedReport measure_random_speed(device::Context& gpu, const model::ModelConfig& shape,
                                 std::span<const formats::Scheme> passes, const SpeedOptions& options);

std::string to_text(const SpeedReport& report);
io::Json to_json(const SpeedReport& report);

}  // namespace w4q::verify
