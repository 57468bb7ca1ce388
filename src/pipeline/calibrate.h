// Streams calibration text through a model one decoder layer at a time and keeps statistics of what its linear layers
// read. The layers run in 16 or 32 bit as they are stored: what a layer sees does not depend on how the layers before
// it will be quantized, so statistics can be saved, merged and used with any scheme (docs/awq.md). Pairs are the
// exception: of what two models, one of them quantized on the way, hand on (docs/quality.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "chat/chat_text.h"
#include "device/context.h"
#include "model/model.h"
#include "model/opened.h"
#include "pipeline/layer_turns.h"
#include "pipeline/linear_groups.h"
#include "quantize/asymmetric.h"

namespace w4q::quantize {
struct CudaWork;
}

namespace w4q::pipeline {

class ExchangeCuda;

/// Where calibration text comes from, and how much of it is used.
struct CalibrationText {
  std::filesystem::path text;   ///< UTF-8, tokenized as a whole without special tokens …
  std::filesystem::path ids;    ///< … or token ids; exactly one of these, `chat` and `self` is given
  int64_t samples = 128;        ///< windows, spread evenly over the text; fewer when it is short
  int64_t length = 512;         ///< tokens of a window
  chat::ChatFile chat = {};     ///< or conversations, by the model's chat template, one behind the other
  bool self = false;            ///< or what the model writes (model/self_text.h) …
  uint64_t seed = 0;            ///< … with this seed
  bool length_is_open = false;  ///< nobody asked for this length: of `self` as much of it as the model has positions …
  bool samples_are_open = false;  ///< … with as many more windows as keep the number of tokens
  bool is_cut = false;            ///< which was done

  bool empty() const noexcept { return text.empty() && ids.empty() && chat.empty() && !self; }
  /// The file that is given; of `self` none. Throws bad_argument unless it is one.
  const std::filesystem::path& source() const;
};
/// "64 windows of 512 tokens that the model wrote, seed 0".
std::string describe_self(const CalibrationText& text);
/// The text as a model writes it, whose positions may be fewer than a length that is open; any other text as it is. Throws
/// bad_argument for a length beyond them that was asked for.
CalibrationText fitted(CalibrationText text, const model::ModelConfig& config);

/// Token ids cut into windows, each of which is decoded by itself.
struct CalibrationWindows {
  std::vector<int32_t> ids;  ///< [samples × length]
  int64_t samples = 0;
  int64_t length = 0;
  std::string hash;  ///< of the ids and the length, 16 hex digits

  std::span<const int32_t> window(int64_t index) const {
    return std::span(ids).subspan(static_cast<size_t>(index * length), static_cast<size_t>(length));
  }
};

/// `gpu` (null: the CPU) is what a model writes on. Throws bad_argument when the text does not fill one window or the
/// numbers make no sense.
CalibrationWindows read_windows(const model::OpenedModel& model, const CalibrationText& text,
                                device::Context* gpu = nullptr);
/// The windows of ids that are at hand. `source` names them in messages.
CalibrationWindows cut_windows(std::span<const int32_t> ids, int64_t samples, int64_t length, std::string_view source);

/// Tokens that go through a layer at once on a GPU; a longer window goes by itself. Bytes depend on it.
inline constexpr int64_t calibration_chunk_rows = 4096;

/// What multiplies while text is decoded, on whose last bits near ties depend. `gpu` null: on the CPU.
std::string products_on(const device::Context* gpu);

struct CalibrationOptions {
  bool gram = true;                 ///< collect Gram matrices
  int64_t max_memory = 0;           ///< bytes that the process should stay below; 0: no limit
  int64_t reserved_memory = 0;      ///< of these, bytes that the caller needs for itself
  int64_t travelling_memory = 0;    ///< and what goes from rank to rank (shared_walk.h)
  std::filesystem::path spill_at;   ///< where hidden states that do not fit go: a hidden folder beside this path
  std::function<void()> on_window;  ///< called after each window of each layer
  /// Keep what the model as it is and what the quantized one hand from layer to layer side by side: pair(), finish().
  bool pairs = false;
  /// Run the layers on the GPU; null: on the CPU. `max_memory` counts host memory only.
  std::shared_ptr<quantize::CudaWork> gpu;
};

/// The walk through the layers. Holds the hidden states of all windows and one layer's weights.
class Calibration {
 public:
  /// `model` must outlive it. Throws bad_argument when max_memory is not enough for one layer.
  Calibration(const model::OpenedModel& model, CalibrationWindows windows, const CalibrationOptions& options);
  ~Calibration();

  /// Runs the next layer over all windows. Layers come in order; throws internal after the last one. On the GPU Gram
  /// matrices stay there with `keep_gram`. On the CPU its sums are added to those of `before`, of windows that somebody
  /// else decoded.
  LayerStatistics next(bool keep_gram = false, LayerStatistics before = {});
  /// On a GPU and without pairs, instead of next(): this rank's part in a round of layers (layer_turns.h). The first turn
  /// of all ranks is that of the first round. `exchange` may be null where nothing comes or goes.
  LayerStatistics take_turn(const LayerTurn& turn, ExchangeCuda* exchange, bool keep_gram);
  /// With CalibrationOptions::pairs: goes on to the next layer for its pairs alone.
  void next_without_statistics();
  /// With pairs, after one of these and in the order of the groups: the inputs of a group of its layer, in the model as it is and where
  /// the layers before were finished with their quantized weights and this one runs with `quantized`. Nothing for an
  /// expert's.
  /// `changed` is about the call before. On the GPU matrices stay there with `keep`.
  std::optional<quantize::InputPair> pair(size_t group, const model::LayerWeights& quantized,
                                          const ChangedLinears& changed = {}, bool keep = false);
  /// With pairs, before the next layer: this one's weights as they were quantized.
  void finish(const model::LayerWeights& quantized, const ChangedLinears& changed = {});
  /// How many windows lie on disk between layers.
  int64_t spilled() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Throws bad_argument where max_memory is not enough for one layer: before anything is walked.
void require_calibration_memory(const model::OpenedModel& model, const CalibrationWindows& windows,
                                const CalibrationOptions& options);
/// Bytes of the sums of the largest layer.
int64_t statistics_memory(const model::ModelConfig& config, bool gram);
/// Bytes that calibrating one layer takes beside the hidden states of the windows.
int64_t calibration_memory(const model::OpenedModel& model, int64_t length, bool gram);
/// What pairs take beyond, likewise.
int64_t pairs_memory(const model::OpenedModel& model, int64_t length);

}  // namespace w4q::pipeline
