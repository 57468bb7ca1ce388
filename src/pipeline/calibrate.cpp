#include "pipeline/calibrate.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/progress.h"
#include "core/text.h"
#include "decoder_cuda/generate.h"
#include "io/files.h"
#include "model/decoder_layer.h"
#include "model/model.h"
#include "model/self_text.h"
#include "pipeline/calibration_cuda.h"
#include "pipeline/digest.h"
#include "pipeline/hidden_states.h"
#include "pipeline/plan.h"
#include "tokenizer/token_file.h"
#include "tokenizer/tokenizer.h"

namespace w4q::pipeline {
namespace {

/// Bytes of a layer's weights as they are stored, the largest layer.
int64_t layer_bytes(const model::OpenedModel& model) {
  const auto& tensors = model.folder.tensors.tensors();
  int64_t largest = 0;
  for (int64_t layer = 0; layer < model.config.layers; ++layer) {
    const std::string prefix = concat(model.config.names.prefix, "layers.", layer, ".");
    int64_t sum = 0;
    for (auto it = tensors.lower_bound(prefix); it != tensors.end() && it->first.starts_with(prefix); ++it) {
      sum += static_cast<int64_t>(it->second.size());
    }
    largest = std::max(largest, sum);
  }
  return largest;
}

/// What hidden states may take when everything else has had its share.
int64_t states_limit(const model::OpenedModel& model, const CalibrationWindows& windows,
                     const CalibrationOptions& options) {
  if (options.max_memory == 0) return std::numeric_limits<int64_t>::max();
  const int64_t fixed = options.reserved_memory + calibration_memory(model, windows.length, options.gram) +
                        model::WalkMemories::kept_bytes(model.config, windows.samples, windows.length);
  if (options.max_memory >= fixed) return options.max_memory - fixed;
  throw Error(ErrorCode::bad_argument, concat("--max-memory ", human_bytes(options.max_memory), " is not enough"))
      .detail(concat("one layer of this model needs ", human_bytes(fixed)))
      .hint("give more, shorten --length, or leave out the Gram matrices (--diagonal)");
}

}  // namespace

CalibrationWindows cut_windows(std::span<const int32_t> ids, int64_t samples, int64_t length, std::string_view source) {
  if (samples < 1 || length < 2) {
    throw Error(ErrorCode::bad_argument, concat("calibration with ", samples, " samples of ", length, " tokens"));
  }
  const int64_t available = static_cast<int64_t>(ids.size()) / length;
  if (available == 0) {
    throw Error(ErrorCode::bad_argument, concat(source, ": too short for calibration"))
        .detail(concat(ids.size(), " tokens do not fill one window of ", length))
        .hint("give more text, or a smaller --length");
  }
  CalibrationWindows result;
  result.samples = std::min(samples, available);
  result.length = length;
  for (int64_t i = 0; i < result.samples; ++i) {
    const auto window =
        ids.subspan(static_cast<size_t>(i * available / result.samples * length), static_cast<size_t>(length));
    result.ids.insert(result.ids.end(), window.begin(), window.end());
  }
  Digest digest;
  digest.add(bytes_of(result.ids));
  digest.add(concat(length));
  result.hash = digest.text();
  return result;
}

const std::filesystem::path& CalibrationText::source() const {
  const int given = static_cast<int>(!text.empty()) + static_cast<int>(!ids.empty()) + static_cast<int>(!chat.empty()) +
                    static_cast<int>(self);
  if (given == 1) return !text.empty() ? text : !ids.empty() ? ids : chat.path;
  throw Error(ErrorCode::bad_argument,
              "calibration needs a text, a file of token ids, conversations or the model's own text, one of these");
}

std::string describe_self(const CalibrationText& text) {
  return concat(text.samples, " windows of ", text.length, " tokens that the model wrote, seed ", text.seed);
}

namespace {

CalibrationWindows write_windows(const model::OpenedModel& opened, const CalibrationText& text, device::Context* gpu) {
  const model::SelfText request{text.samples, text.length, text.seed};
  const model::Model model = model::Model::of(opened, model::planes_for(gpu));
  Progress progress("write", gpu != nullptr ? text.samples * text.length : model::steps_of(opened.config, request),
                    gpu != nullptr ? "tokens" : "steps");
  const auto on_step = [&progress] { progress.advance(1); };
  const auto ids = gpu != nullptr ? decoder_cuda::write_text_cuda(*gpu, model, request, on_step)
                                  : model::write_text(model, request, on_step);
  return cut_windows(ids, text.samples, text.length, "the model's own text");
}

}  // namespace

CalibrationWindows read_windows(const model::OpenedModel& model, const CalibrationText& text, device::Context* gpu) {
  const int64_t vocabulary = model.config.vocab_size;
  const auto& source = text.source();
  if (text.self) return write_windows(model, text, gpu);
  const auto ids = !text.ids.empty() ? tokenizer::read_ids(text.ids, vocabulary)
                   : text.text.empty()
                       ? chat::encode_chats(model.folder.path, text.chat)
                       : tokenizer::Tokenizer::open(model.folder.path).encode(io::read_file(text.text), false);
  for (const int32_t id : ids) {
    if (id < vocabulary) continue;
    throw Error(ErrorCode::bad_file, concat(source.string(), ": the tokenizer gives id ", id))
        .detail(concat("the model has ", vocabulary, " embeddings"));
  }
  return cut_windows(ids, text.samples, text.length, source.string());
}

int64_t calibration_memory(const model::OpenedModel& model, int64_t length, bool gram) {
  const model::ModelConfig& config = model.config;
  int64_t statistics = 0, widest = config.hidden_size;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    int64_t sums = 0;
    for (const auto& group : model::input_groups(config, layer)) {
      sums += int64_t{sizeof(double)} * (2 * group.width + (gram ? quantize::triangle_size(group.width) : 0));
      widest = std::max(widest, group.width);
    }
    statistics = std::max(statistics, sums);
  }
  // The decoder's scratch: some ten matrices, of which three are as wide as the MLP; and keys and values.
  const int64_t rows = length * int64_t{sizeof(float)};
  const int64_t scratch = rows * (4 * widest + 6 * config.hidden_size + 4 * config.kv_heads * config.head_dim);
  return base_memory + layer_bytes(model) + statistics + scratch;
}

struct Calibration::Impl {
  Impl(const model::OpenedModel& model_, CalibrationWindows windows_, const CalibrationOptions& options_)
      : model(model_),
        config(model_.config),
        windows(std::move(windows_)),
        options(options_),
        gpu(options.gpu == nullptr
                ? nullptr
                : std::make_unique<CalibrationCuda>(options.gpu, config,
                                                    CalibrationShape{windows.samples, windows.length, options.gram})),
        resident(gpu == nullptr ? 0 : gpu->resident()),
        states(windows.samples - resident, windows.length, config.hidden_size, states_limit(model, windows, options),
               options.spill_at),
        decoder(config),
        memories(config, windows.samples, windows.length) {
    model::require_decoder(config, "calibration");
    if (gpu != nullptr) model::require_layer_by_layer(config, "calibration on a GPU");
    own_embeddings = model::load_layer_embeddings(model);
    decoder.set_positions(0, windows.length);
  }

  void embed() {
    const auto table = model::load_embeddings(model);
    std::vector<float> first(resident > 0 ? static_cast<size_t>(windows.length * config.hidden_size) : 0);
    const MatrixView<float> hidden(first.data(), windows.length, config.hidden_size);
    for (int64_t window = 0; window < resident; ++window) {
      model::embed(config, table, windows.window(window), hidden);
      gpu->put(window, hidden);
    }
    for (int64_t window = resident; window < windows.samples; ++window) {
      model::embed(config, table, windows.window(window), states.get(window - resident));
      states.put(window - resident);
    }
  }

  LayerStatistics run(int64_t index, bool keep_gram) {
    const auto weights = model::load_layer(model, index);
    return gpu != nullptr ? gpu->run(weights, index, states, keep_gram, options.on_window) : run_on_cpu(weights, index);
  }

  /// What layers add of their own: computed anew for each of them, which takes no memory between layers.
  void embed_layers(int64_t window) {
    if (!embeddings) embeddings = model::load_embeddings(model);
    const auto hidden = embedded.matrix(windows.length, config.hidden_size);
    const auto rows = layer_embeddings.matrix(windows.length, own_embeddings->table.k);
    model::embed(config, *embeddings, windows.window(window), hidden);
    model::embed_layers(config, *own_embeddings, windows.window(window), hidden, rows);
    decoder.set_layer_embeddings(rows);
  }

  LayerStatistics run_on_cpu(const model::LayerWeights& weights, int64_t index) {
    const auto groups = model::input_groups(config, index);
    LayerStatistics result(groups.size());
    for (size_t i = 0; i < groups.size(); ++i) result[i] = quantize::make_statistics(groups[i].width, options.gram);
    model::Observer observer;
    observer.linear_input = [&](std::span<const std::string_view> linears, MatrixView<const float> input) {
      for (size_t i = 0; i < groups.size(); ++i) {
        if (groups[i].name() == linears.front()) quantize::add_rows(result[i], input, groups[i].name());
      }
    };
    for (int64_t window = 0; window < windows.samples; ++window) {
      if (own_embeddings) embed_layers(window);
      decoder.run(weights, memories.layer(index, window), states.get(window), &observer);
      states.put(window);
      check_interrupt();
      if (options.on_window) options.on_window();
    }
    return result;
  }

  const model::OpenedModel& model;
  const model::ModelConfig& config;
  const CalibrationWindows windows;
  const CalibrationOptions options;
  const std::unique_ptr<CalibrationCuda> gpu;
  const int64_t resident;  // windows on the GPU, which are not among `states`
  HiddenStates states;
  model::LayerDecoder decoder;
  model::WalkMemories memories;
  std::optional<model::LayerEmbeddings> own_embeddings;
  std::optional<kernels::LinearWeight> embeddings;  ///< where layers have some of their own
  model::Floats embedded, layer_embeddings;
  int64_t layer = 0;
};

Calibration::Calibration(const model::OpenedModel& model, CalibrationWindows windows, const CalibrationOptions& options)
    : impl_(std::make_unique<Impl>(model, std::move(windows), options)) {}
Calibration::~Calibration() = default;

LayerStatistics Calibration::next(bool keep_gram) {
  ensure(impl_->layer < impl_->config.layers, "calibration: there is no further layer");
  if (impl_->layer == 0) impl_->embed();
  return impl_->run(impl_->layer++, keep_gram);
}

int64_t Calibration::spilled() const noexcept { return impl_->states.spilled(); }

}  // namespace w4q::pipeline
