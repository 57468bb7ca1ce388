#include <algorithm>
#include <functional>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "decoder_cuda/decoder.h"
#include "device/ceilings.h"
#include "verify/speed.h"

namespace w4q::verify {
namespace {

using decoder_cuda::CudaDecoder;
using decoder_cuda::CudaDecoderOptions;
using decoder_cuda::CudaModel;

/// Bytes a second that the best public decoder reads on an RTX 4090 (docs/notes/kernels/kbit.md).
constexpr double rtx4090_bandwidth = 940e9;

std::vector<int32_t> random_prompt(int64_t length, int64_t vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(length));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(random_bits(17, i) % static_cast<uint64_t>(vocab));
  }
  return ids;
}

/// Prompts of more tokens take seconds each: what is measured behind one is measured behind the same.
constexpr int64_t long_prompt = 16384;

/// Median time from the prompt to its first token; of one that is long the only one. The prompt stays.
double first_token_seconds(CudaDecoder& decoder, const std::vector<int32_t>& prompt) {
  std::vector<double> seconds;
  if (std::ssize(prompt) > long_prompt) {
    decoder.start(std::span(prompt).first(512), {});  // loads libraries
    decoder.reset();
    decoder.stream().synchronize();
    const Stopwatch watch;
    decoder.start(prompt, {});
    decoder.token(0);
    return watch.seconds();
  }
  for (int i = 0; i < 4; ++i) {
    decoder.reset();
    decoder.stream().synchronize();
    const Stopwatch watch;
    decoder.start(prompt, {});
    decoder.token(0);
    if (i > 0) seconds.push_back(watch.seconds());  // the first one loads libraries
  }
  std::ranges::sort(seconds);
  return seconds[1];
}

double int8_prompt_seconds(const CudaModel& model, CudaDecoderOptions how, const std::vector<int32_t>& prompt) {
  how.int8_activations = true;
  CudaDecoder decoder(model, how);
  return first_token_seconds(decoder, prompt);
}

/// `begin` is called when the prompt and a few steps are done; without a prompt the sequence goes on.
StepSpeed step_speed(
    std::string name, CudaDecoder& decoder, const std::vector<int32_t>& prompt, int64_t count,
    const std::function<void()>& begin = [] {}) {
  constexpr int warm_up = 4;
  if (!prompt.empty()) {
    decoder.reset();
    decoder.start(prompt, {});
  }
  for (int i = 0; i < warm_up; ++i) decoder.step();
  decoder.token(warm_up);
  decoder.stream().synchronize();
  begin();
  const Stopwatch watch;
  std::vector<double> calls;
  for (int64_t i = 0; i < count; ++i) {
    const Stopwatch call;
    decoder.step();
    calls.push_back(call.seconds());
    // As in generation: one token is read while the next is decoded.
    decoder.token(warm_up + i);
  }
  decoder.token(warm_up + count);
  const double seconds = watch.seconds() / static_cast<double>(count);
  const auto middle = calls.begin() + count / 2;
  std::ranges::nth_element(calls, middle);
  return {std::move(name), seconds, *middle};
}

SpeedReport measure(const CudaModel& model, std::string name, const SpeedOptions& options) {
  if (options.prompt < 1 || options.generate < 1) {
    throw Error(ErrorCode::bad_argument, "speed: a prompt and a generation of at least one token");
  }
  SpeedReport report;
  report.model = std::move(name);
  report.gpu = model.context().properties().name;
  report.options = options;
  report.read_bandwidth = device::measure_ceilings(model.context()).read;
  report.weight_bytes = model.bytes_per_token();
  report.widened = model.widened();
  const auto prompt = random_prompt(options.prompt, model.config().vocab_size);
  CudaDecoderOptions how{.capacity = options.prompt + options.generate + 8, .kv = options.kv};
  if (options.int8_activations) report.int8_prompt_seconds = int8_prompt_seconds(model, how, prompt);
  const bool goes_on = options.prompt > long_prompt;
  {
    CudaDecoder decoder(model, how);
    report.prompt_seconds = first_token_seconds(decoder, prompt);
    report.steps.push_back(step_speed("graph", decoder, goes_on ? std::vector<int32_t>{} : prompt, options.generate));
    report.launches = static_cast<int64_t>(decoder.graph_nodes());
    report.kept_pages = decoder.kept_pages();
    if (!goes_on) {
      decoder.reset();
      decoder.start(prompt, {});
    }
    report.cache_bytes_per_token = (decoder.step_bytes() - report.weight_bytes) / options.prompt;
    for (auto& part : decoder.time_step_parts()) {
      report.parts.push_back({std::move(part.name), part.launches, part.bytes, part.seconds});
    }
  }
  report.step_bytes = report.weight_bytes + report.cache_bytes_per_token * (options.prompt + options.generate / 2);
  if (goes_on && !options.project_sm89) return report;
  how.overlap = false;
  {
    CudaDecoder decoder(model, how);
    report.steps.push_back(step_speed("graph without overlap", decoder, prompt, options.generate));
  }
  how.overlap = true;
  how.graph = false;
  {
    CudaDecoder decoder(model, how);
    report.steps.push_back(step_speed("launches without graph", decoder, prompt, options.generate));
  }
  if (options.project_sm89) {
    const auto bytes = static_cast<double>(report.step_bytes);
    const double overhead = report.steps[1].seconds - bytes / report.read_bandwidth;
    report.sm89 = Projection{rtx4090_bandwidth, overhead, bytes / rtx4090_bandwidth + overhead};
  }
  return report;
}

/// Makes the model, with residual passes in so many bytes of GPU memory, or all of them.
using Make = std::function<CudaModel(std::optional<int64_t> residual_bytes)>;

/// GPU memory that the model takes with everything in it, and its decoder.
int64_t resident_bytes(const device::Context& gpu, const Make& make, const CudaDecoderOptions& how) {
  const int64_t before = gpu.free_bytes();
  const CudaModel on_gpu = make({});
  const CudaDecoder decoder(on_gpu, how);
  return before - gpu.free_bytes();
}

OffloadSpeed measure_offload(const device::Context& gpu, const Make& make, const SpeedReport& resident) {
  const SpeedOptions& options = resident.options;
  CudaDecoderOptions how{.capacity = options.prompt + options.generate + 8, .kv = options.kv};
  how.graph = false;
  OffloadSpeed speed;
  speed.budget = *options.residual_bytes;
  const int64_t all_bytes = resident_bytes(gpu, make, how);
  const int64_t free_before = gpu.free_bytes();
  const CudaModel on_gpu = make(speed.budget);
  CudaDecoder decoder(on_gpu, how);
  decoder_cuda::CudaOffload* const offload = decoder.offload();
  if (offload == nullptr) return speed;
  const auto prompt = random_prompt(options.prompt, on_gpu.config().vocab_size);
  const auto step_seconds = [&](const std::function<void()>& begin) {
    return step_speed("offload", decoder, prompt, options.generate, begin).seconds;
  };
  speed.moved_bytes = offload->round_bytes();
  offload->skip_copies(true);
  const double of_prompt = first_token_seconds(decoder, prompt), step = step_seconds([] {});
  offload->skip_copies(false);
  offload->reset_traffic();
  speed.prompt_seconds = first_token_seconds(decoder, prompt);
  speed.prompt_overlap = offload->traffic().overlap();
  speed.step_seconds = step_seconds([&] { offload->reset_traffic(); });
  const decoder_cuda::OffloadTraffic traffic = offload->traffic();
  speed.step_overlap = traffic.overlap();
  speed.link_bandwidth = static_cast<double>(traffic.bytes) / traffic.copy_seconds;
  const double copying = static_cast<double>(speed.moved_bytes) / speed.link_bandwidth;
  const double prompt_copying = copying * static_cast<double>((options.prompt + how.chunk - 1) / how.chunk);
  speed.predicted_step_seconds = std::max(copying, step);
  speed.predicted_prompt_seconds = std::max(prompt_copying, of_prompt);
  speed.predicted_step_overlap = std::min(1.0, step / copying);
  speed.predicted_prompt_overlap = std::min(1.0, of_prompt / prompt_copying);
  speed.memory_bytes = free_before - gpu.free_bytes();
  speed.predicted_memory_bytes = all_bytes - speed.moved_bytes + offload->device_bytes();
  return speed;
}

SpeedReport measure(const device::Context& gpu, const Make& make, std::string name, const SpeedOptions& options) {
  SpeedReport report = measure(make({}), std::move(name), options);
  if (options.residual_bytes) report.offload = measure_offload(gpu, make, report);
  return report;
}

}  // namespace

SpeedReport measure_speed(device::Context& gpu, const model::Model& model, const SpeedOptions& options) {
  return measure(
      gpu, [&](std::optional<int64_t> residual_bytes) { return CudaModel::upload(gpu, model, residual_bytes); },
      model.config().architecture_name, options);
}

SpeedReport measure_random_speed(device::Context& gpu, const model::ModelConfig& shape,
                                 std::span<const formats::Scheme> passes, const SpeedOptions& options) {
  return measure(
      gpu, [&](std::optional<int64_t> residual_bytes) { return CudaModel::random(gpu, shape, passes, residual_bytes); },
      concat(shape.architecture_name, ", ", passes.empty() ? "f16" : formats::to_string(passes)), options);
}

}  // namespace w4q::verify
