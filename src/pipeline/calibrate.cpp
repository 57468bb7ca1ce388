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
#include "kernels/linear/gemm.h"
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

/// What a layer's groups read is kept from statistics to pairs up to so many bytes, where memory has no limit; beyond, the
/// layer runs once more.
constexpr int64_t most_kept_inputs = int64_t{4} << 30;

/// What hidden states may take when everything else has had its share.
int64_t states_limit(const model::OpenedModel& model, const CalibrationWindows& windows,
                     const CalibrationOptions& options) {
  if (options.max_memory == 0) return std::numeric_limits<int64_t>::max();
  const int64_t streams = options.pairs ? 2 : 1;
  const int64_t fixed = options.reserved_memory + options.travelling_memory +
                        calibration_memory(model, windows.length, options.gram) +
                        (options.pairs ? pairs_memory(model, windows.length) : 0) +
                        streams * model::WalkMemories::kept_bytes(model.config, windows.samples, windows.length);
  if (options.max_memory >= fixed) return (options.max_memory - fixed) / streams;
  throw Error(ErrorCode::bad_argument, concat("--max-memory ", human_bytes(options.max_memory), " is not enough"))
      .detail(concat("one layer of this model needs ", human_bytes(fixed),
                     options.travelling_memory == 0 ? ""
                                                    : concat(", of these ", human_bytes(options.travelling_memory),
                                                             " for sums that go from rank to rank")))
      .hint(concat("give more, shorten --length, ",
                   options.travelling_memory == 0 ? "" : "leave the work to one process (no sums travel then), ",
                   "or leave out the Gram matrices (--diagonal)"));
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
  return concat(text.samples, " windows of ", text.length, " tokens that the model wrote, seed ", text.seed,
                text.is_cut ? "; it has no more positions" : "");
}

CalibrationText fitted(CalibrationText text, const model::ModelConfig& config) {
  if (!text.self) return text;
  const auto most = model::most_positions(config);
  if (text.length_is_open && most && text.length > *most) {
    constexpr int64_t most_samples = 1 << 20;
    const int64_t samples = (text.samples * text.length + *most - 1) / *most;
    if (text.samples_are_open) text.samples = std::min(samples, most_samples);
    text.length = *most, text.is_cut = true;
  }
  model::check_self_text(config, {text.samples, text.length, text.seed});
  return text;
}

namespace {

/// Half of what a model writes are conversations, where it has a template for them and a tokenizer for that.
model::SelfText self_text(const model::OpenedModel& opened, const CalibrationText& text) {
  model::SelfText request{text.samples, text.length, text.seed};
  const auto turns = chat::turns_of(opened.folder.path);
  if (!turns) return request;
  try {
    const auto tokenizer = tokenizer::Tokenizer::open(opened.folder.path);
    const auto known = [&](const std::string& part) {
      auto ids = tokenizer.encode(part, false);
      const auto is_known = [&](int32_t id) { return id < opened.config.vocab_size; };
      return std::ranges::all_of(ids, is_known) ? ids : std::vector<int32_t>();
    };
    request.opening = known(turns->opening), request.answer = known(turns->answer);
  } catch (const Error&) {
    request.opening.clear();  // as of a model without a template
  }
  return request;
}

CalibrationWindows write_windows(const model::OpenedModel& opened, const CalibrationText& text, device::Context* gpu) {
  const model::SelfText request = self_text(opened, text);
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

std::string products_on(const device::Context* gpu) {
  return gpu == nullptr ? std::string(kernels::gemm_library()) : concat("cuBLAS, ", printable(gpu->properties().name));
}

int64_t statistics_memory(const model::ModelConfig& config, bool gram) {
  int64_t largest = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    int64_t sums = 0;
    for (const auto& group : model::input_groups(config, layer)) {
      sums += int64_t{sizeof(double)} * (2 * group.width + (gram ? quantize::triangle_size(group.width) : 0));
    }
    largest = std::max(largest, sums);
  }
  return largest;
}

int64_t calibration_memory(const model::OpenedModel& model, int64_t length, bool gram) {
  const model::ModelConfig& config = model.config;
  int64_t widest = config.hidden_size;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& group : model::input_groups(config, layer)) widest = std::max(widest, group.width);
  }
  // The decoder's scratch: some ten matrices, of which three are as wide as the MLP; and keys and values.
  const int64_t rows = length * int64_t{sizeof(float)};
  const int64_t scratch = rows * (4 * widest + 6 * config.hidden_size + 4 * config.kv_heads * config.head_dim);
  return base_memory + layer_bytes(model) + statistics_memory(config, gram) + scratch;
}

int64_t pairs_memory(const model::OpenedModel& model, int64_t length) {
  int64_t sums = 0, widest = 0;
  for (int64_t layer = 0; layer < model.config.layers; ++layer) {
    for (const auto& group : model::input_groups(model.config, layer)) {
      if (group.expert) continue;
      widest = std::max(widest, group.width);
      sums =
          std::max(sums, int64_t{sizeof(double)} * (group.width * group.width + quantize::triangle_size(group.width)));
    }
  }
  // Both inputs of a group for a window, and what lies between them.
  return layer_bytes(model) + sums + 3 * length * widest * int64_t{sizeof(float)};
}

void require_calibration_memory(const model::OpenedModel& model, const CalibrationWindows& windows,
                                const CalibrationOptions& options) {
  states_limit(model, windows, options);
}

struct Calibration::Impl {
  Impl(const model::OpenedModel& model_, CalibrationWindows windows_, const CalibrationOptions& options_)
      : model(model_),
        config(model_.config),
        windows(std::move(windows_)),
        options(options_),
        gpu(options.gpu == nullptr ? nullptr
                                   : std::make_unique<CalibrationCuda>(options.gpu, config,
                                                                       CalibrationShape{windows.samples, windows.length,
                                                                                        options.gram, options.pairs})),
        resident(gpu == nullptr ? 0 : gpu->resident()),
        states(windows.samples - resident, windows.length, config.hidden_size, states_limit(model, windows, options),
               options.spill_at),
        decoder(config),
        memories(config, windows.samples, windows.length) {
    if (options.pairs) quantized.emplace(model, windows, options, resident);
    model::require_decoder(config, "calibration");
    if (gpu != nullptr && options.pairs) model::require_layer_by_layer(config, "following quantized inputs on a GPU");
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
      if (quantized) quantized->put(window - resident, states.get(window - resident));
    }
  }

  LayerStatistics run(int64_t index, bool keep_gram, LayerStatistics before) {
    weights = model::load_layer(model, index);
    plain_inputs.clear();
    if (!want_statistics) return {};
    if (gpu == nullptr) return run_on_cpu(index, std::move(before));
    ensure(before.empty(), "calibration: sums are added to others on the CPU only");
    return gpu->run(
        {.turn = {.layer = index}, .weights = &*weights, .keep_gram = keep_gram, .embed_layer = embedder(index)},
        states, options.on_window);
  }

  LayerStatistics take_turn(const LayerTurn& turn, ExchangeCuda* exchange, bool keep_gram) {
    ensure(gpu != nullptr && !options.pairs, "calibration: turns are taken on GPUs");
    weights.reset();
    if (turn.layer == 0) embed();
    if (turn.layer) weights = model::load_layer(model, *turn.layer);
    return gpu->run(
        {turn, weights ? &*weights : nullptr, exchange, keep_gram, turn.layer ? embedder(*turn.layer) : nullptr},
        states, options.on_window);
  }

  /// What gives a layer what it adds of its own.
  CalibrationCuda::EmbedLayer embedder(int64_t index) {
    if (!own_embeddings) return nullptr;
    const auto projection = std::make_shared<model::LayerProjection>(config, *own_embeddings, index);
    return [this, projection](int64_t window, MatrixView<float> rows) {
      model::embed_layer(config, *own_embeddings, *projection, windows.window(window), first_states(window), rows);
    };
  }

  /// Hidden states 0 of a window, where layers add something of their own.
  MatrixView<float> first_states(int64_t window) {
    if (!embeddings) embeddings = model::load_embeddings(model);
    const auto hidden = embedded.matrix(windows.length, config.hidden_size);
    model::embed(config, *embeddings, windows.window(window), hidden);
    return hidden;
  }

  /// What layers add of their own: computed anew for each of them, which takes no memory between layers.
  void embed_layers(int64_t window) {
    const auto hidden = first_states(window);
    const auto rows = layer_embeddings.matrix(windows.length, own_embeddings->table.k);
    model::embed_layers(config, *own_embeddings, windows.window(window), hidden, rows);
    decoder.set_layer_embeddings(rows);
  }

  LayerStatistics run_on_cpu(int64_t index, LayerStatistics result) {
    const auto groups = model::input_groups(config, index);
    for (size_t i = result.size(); i < groups.size(); ++i) {
      result.push_back(quantize::make_statistics(groups[i].width, options.gram));
    }
    make_room(groups);
    // Pairs go over this layer again, unless they find its inputs here.
    const bool again = quantized && plain_inputs.empty();
    int64_t window = 0;
    std::vector<int64_t> seen(groups.size());
    model::Observer observer;
    observer.linear_input = [&](std::span<const std::string_view> linears, MatrixView<const float> input) {
      for (size_t i = 0; i < groups.size(); ++i) {
        if (groups[i].name() != linears.front()) continue;
        quantize::add_rows(result[i], input, groups[i].name());
        if (i < plain_inputs.size() && plain_inputs[i]) copy_rows(input, plain_inputs[i]->get(window), seen[i]);
      }
    };
    for (; window < windows.samples; ++window) {
      if (own_embeddings) embed_layers(window);
      std::ranges::fill(seen, 0);
      const auto hidden = again ? quantized->copy(states.get(window)) : states.get(window);
      decoder.run(*weights, memories.layer(index, window), hidden, &observer);
      if (!again) states.put(window);
      check_interrupt();
      if (options.on_window) options.on_window();
    }
    if (!again) plain_blocks = weights->plan.blocks.size();
    return result;
  }

  /// For what the model as it is reads in a layer, where pairs will ask for it. Not of experts, which see some of a window's
  /// rows and have no pairs.
  void make_room(const std::vector<model::InputGroup>& groups) {
    if (!quantized || options.max_memory > 0) return;
    int64_t width = 0;
    for (const auto& group : groups) width += group.expert ? 0 : group.width;
    if (windows.samples * windows.length * width * int64_t{sizeof(float)} > most_kept_inputs) return;
    for (const auto& group : groups) {
      plain_inputs.push_back(group.expert ? nullptr
                                          : std::make_unique<HiddenStates>(windows.samples, windows.length, group.width,
                                                                           most_kept_inputs, options.spill_at));
    }
  }

  /// Rows that a group reads, behind those that it has `seen`.
  static void copy_rows(MatrixView<const float> input, MatrixView<float> rows, int64_t& seen) {
    ensure(seen + input.rows <= rows.rows && input.cols == rows.cols, "calibration: inputs of another shape");
    for (int64_t r = 0; r < input.rows; ++r) std::copy_n(input.row(r), input.cols, rows.row(seen + r));
    seen += input.rows;
  }

  /// Runs one of the models over blocks [first, last] of the present layer, as `part` says; the inputs of `group` that it
  /// meets go into `rows`.
  void capture(const model::InputGroup& group, const model::LayerPart& part, const model::LayerWeights& of,
               const model::LayerMemory& memory, MatrixView<float> hidden, MatrixView<float> rows) {
    int64_t seen = 0;
    model::Observer observer;
    observer.linear_input = [&](std::span<const std::string_view> linears, MatrixView<const float> input) {
      if (linears.front() == group.name()) copy_rows(input, rows, seen);
    };
    decoder.run_part(part, of, memory, hidden, &observer);
    ensure(seen == rows.rows, "calibration: inputs of another length");
  }

  quantize::InputPair pair(size_t index, const model::LayerWeights& packed, const ChangedLinears& changed, bool keep) {
    const auto group = model::input_groups(config, layer - 1)[index];
    const auto [block, end] = place_of(packed.plan, group.name());
    if (gpu != nullptr) return gpu->pair(group, block, paired(packed, changed), keep);
    advance_plain(block);
    advance_quantized(block, packed);
    const bool kept = !plain_inputs.empty();
    // What the model as it is does behind a block's last group does not wait for what is made of it.
    const bool goes_on = !kept && packed.plan.blocks[block].groups.back().name() == group.name();
    const model::LayerPart part{block, block, end};
    const model::LayerPart plain_part = goes_on ? model::LayerPart{block, block} : part;
    auto result = quantize::make_input_pair(group.width);
    for (int64_t window = 0; window < windows.samples; ++window) {
      if (own_embeddings) embed_layers(window);
      const auto plain =
          kept ? plain_inputs[index]->get(window) : quantized->plain_rows.matrix(windows.length, group.width);
      const auto rounded = quantized->rounded_rows.matrix(windows.length, group.width);
      if (!kept) {
        const auto hidden = goes_on ? states.get(window) : quantized->copy(states.get(window));
        capture(group, plain_part, *weights, memories.layer(layer - 1, window), hidden, plain);
      }
      if (goes_on) states.put(window);
      capture(group, part, packed, quantized->memories.layer(layer - 1, window),
              quantized->copy(quantized->states.get(window)), rounded);
      quantize::add_rows(result, plain, rounded, group.name());
      check_interrupt();
    }
    if (goes_on) plain_blocks = block + 1;
    if (kept) plain_inputs[index].reset();
    return result;
  }

  /// Of the model as it is: the blocks of the present layer up to `end`.
  void advance_plain(size_t end) {
    for (int64_t window = 0; plain_blocks < end && window < windows.samples; ++window) {
      if (own_embeddings) embed_layers(window);
      decoder.run_part({plain_blocks, end - 1}, *weights, memories.layer(layer - 1, window), states.get(window));
      states.put(window);
      check_interrupt();
    }
    plain_blocks = std::max(plain_blocks, end);
  }

  /// Of the quantized one.
  void advance_quantized(size_t end, const model::LayerWeights& packed) {
    for (int64_t window = 0; quantized_blocks < end && window < windows.samples; ++window) {
      if (own_embeddings) embed_layers(window);
      decoder.run_part({quantized_blocks, end - 1}, packed, quantized->memories.layer(layer - 1, window),
                       quantized->states.get(window));
      quantized->states.put(window);
      check_interrupt();
    }
    quantized_blocks = std::max(quantized_blocks, end);
  }

  PairedStates paired(const model::LayerWeights& packed, const ChangedLinears& changed) {
    return {packed, changed, states, quantized->states};
  }

  void finish(const model::LayerWeights& packed, const ChangedLinears& changed) {
    if (gpu != nullptr) return gpu->finish_pairs(paired(packed, changed));
    advance_plain(packed.plan.blocks.size());
    advance_quantized(packed.plan.blocks.size(), packed);
  }

  /// The block of a group, and where its run may end that is there for the group's inputs.
  static std::pair<size_t, model::LayerPart::End> place_of(const model::LayerPlan& plan, const std::string& group) {
    using End = model::LayerPart::End;
    for (size_t i = 0; i < plan.blocks.size(); ++i) {
      const auto& groups = plan.blocks[i].groups;
      if (groups.front().name() == group) return {i, End::at_first_group};
      if (std::ranges::any_of(groups, [&](const auto& own) { return own.name() == group; }))
        return {i, End::at_last_group};
    }
    ensure(false, "calibration: a group of another layer");
    return {};
  }

  /// What the layers that are quantized hand on.
  struct Quantized {
    Quantized(const model::OpenedModel& model, const CalibrationWindows& windows, const CalibrationOptions& options,
              int64_t resident)
        : states(windows.samples - resident, windows.length, model.config.hidden_size,
                 states_limit(model, windows, options), options.spill_at),
          memories(model.config, windows.samples, windows.length) {}

    void put(int64_t window, MatrixView<const float> hidden) {
      const auto own = states.get(window);
      std::copy_n(hidden.data, hidden.rows * hidden.cols, own.data);
      states.put(window);
    }
    /// Of hidden states that are to stay, for a run that changes them; valid until the next.
    MatrixView<float> copy(MatrixView<const float> hidden) {
      const auto result = scratch.matrix(hidden.rows, hidden.cols);
      std::copy_n(hidden.data, hidden.rows * hidden.cols, result.data);
      return result;
    }

    HiddenStates states;
    model::WalkMemories memories;
    model::Floats scratch, plain_rows, rounded_rows;
  };

  const model::OpenedModel& model;
  const model::ModelConfig& config;
  const CalibrationWindows windows;
  const CalibrationOptions options;
  const std::unique_ptr<CalibrationCuda> gpu;
  const int64_t resident;  // windows on the GPU, which are not among `states`
  HiddenStates states;
  model::LayerDecoder decoder;
  model::WalkMemories memories;
  std::optional<Quantized> quantized;          ///< with pairs
  std::optional<model::LayerWeights> weights;  ///< of the latest layer
  /// What its groups read in the model as it is, for pairs; empty: not kept.
  std::vector<std::unique_ptr<HiddenStates>> plain_inputs;
  std::optional<model::LayerEmbeddings> own_embeddings;
  std::optional<kernels::LinearWeight> embeddings;  ///< where layers have some of their own
  model::Floats embedded, layer_embeddings;
  int64_t layer = 0;  ///< the next one
  bool want_statistics = true;
  bool finished = true;                           ///< the one before it, where that is asked for
  size_t plain_blocks = 0, quantized_blocks = 0;  ///< of the one before it, which hidden states are behind
};

Calibration::Calibration(const model::OpenedModel& model, CalibrationWindows windows, const CalibrationOptions& options)
    : impl_(std::make_unique<Impl>(model, std::move(windows), options)) {}
Calibration::~Calibration() = default;

LayerStatistics Calibration::next(bool keep_gram, LayerStatistics before) {
  ensure(impl_->layer < impl_->config.layers, "calibration: there is no further layer");
  ensure(impl_->finished, "calibration: the layer before was not finished");
  if (impl_->layer == 0) impl_->embed();
  impl_->finished = !impl_->options.pairs;
  impl_->plain_blocks = impl_->quantized_blocks = 0;
  auto statistics = impl_->run(impl_->layer++, keep_gram, std::move(before));
  if (impl_->gpu != nullptr && impl_->options.pairs) impl_->gpu->begin_pairs(*impl_->weights);
  return statistics;
}

LayerStatistics Calibration::take_turn(const LayerTurn& turn, ExchangeCuda* exchange, bool keep_gram) {
  return impl_->take_turn(turn, exchange, keep_gram);
}

void Calibration::next_without_statistics() {
  ensure(impl_->options.pairs, "calibration: there are no pairs");
  impl_->want_statistics = false;
  next();
  impl_->want_statistics = true;
}

std::optional<quantize::InputPair> Calibration::pair(size_t group, const model::LayerWeights& quantized,
                                                     const ChangedLinears& changed, bool keep) {
  ensure(!impl_->finished, "calibration: there are no pairs");
  if (model::input_groups(impl_->config, impl_->layer - 1).at(group).expert) return std::nullopt;
  return impl_->pair(group, quantized, changed, keep);
}

void Calibration::finish(const model::LayerWeights& quantized, const ChangedLinears& changed) {
  ensure(!impl_->finished, "calibration: there are no pairs");
  impl_->finish(quantized, changed);
  impl_->finished = true;
}

int64_t Calibration::spilled() const noexcept {
  return impl_->states.spilled() + (impl_->quantized ? impl_->quantized->states.spilled() : 0);
}

}  // namespace w4q::pipeline
