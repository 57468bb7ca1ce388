// A short text that has gone through a model once, forth and back, block by block: what each block read and added, and
// what the loss would do if it added something else.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/views.h"
#include "model/decoder_layer.h"
#include "model/layer_gradient.h"
#include "model/model.h"

namespace w4q::verify::behaviour {

/// A matrix of activations that owns its values.
struct Activations {
  Activations() = default;
  Activations(int64_t rows_, int64_t cols_) : rows(rows_), cols(cols_), values(static_cast<size_t>(rows_ * cols_)) {}
  explicit Activations(MatrixView<const float> from);

  MatrixView<float> view() { return {values.data(), rows, cols}; }
  MatrixView<const float> view() const { return {values.data(), rows, cols}; }
  bool empty() const noexcept { return values.empty(); }

  int64_t rows = 0, cols = 0;
  std::vector<float> values;
};

/// What a model is run with; a reading of it is a copy with something else in its place.
struct Reader {
  explicit Reader(const model::Model& model);

  /// One for each block of each layer, in the order in which they run; weights of a layer with a plan of that block alone.
  struct Place {
    int64_t layer = 0;
    model::LayerWeights weights;
    const model::Block& block() const noexcept { return weights.plan.blocks.front(); }
  };

  model::ModelConfig config;
  std::vector<Place> places;
  kernels::LinearWeight embeddings, head;
  std::vector<float> final_norm;
};

/// Why there is no Passage for this model; empty: there is.
std::string_view obstacle_to_passage(const model::ModelConfig& config);

/// Losses of the tokens of a text behind the first one, nats.
using Losses = std::vector<double>;

/// Runs a reader over a text.
class Passage {
 public:
  /// `reader` must outlive it.
  Passage(const Reader& reader, std::span<const int32_t> ids);

  /// What stands around a block: [ids × hidden], and what its last linear reads; of a mixture nothing of the latter.
  struct Around {
    Activations before, added, by_added;  ///< the residual stream; what the block adds, and the loss's gradient by it
    Activations inner, by_inner;          ///< what its last linear reads, and the gradient by that
  };

  /// Forth; losses() and `before`, `added` of all places are known behind it.
  void run();
  /// Back: gradients are known behind it.
  void back();

  const Reader& reader() const noexcept { return reader_; }
  const Losses& losses() const noexcept { return losses_; }
  const Around& around(size_t place) const { return around_[place]; }
  size_t places() const noexcept { return around_.size(); }

  /// What a block with other weights adds to the residual stream in this place.
  Activations added_by(const model::LayerWeights& weights, size_t place);
  /// What it adds where its last linear reads this.
  Activations added_from(size_t place, const Activations& inner) const;
  /// Losses where the block in this place adds that; of the first `tokens` of the text.
  Losses losses_with(size_t place, const Activations& added, int64_t tokens = std::numeric_limits<int64_t>::max());

 private:
  void run_place(const model::LayerWeights& weights, size_t place, MatrixView<float> x);
  Losses losses_behind(const Activations& hidden) const;

  const Reader& reader_;
  std::vector<int32_t> ids_;
  model::LayerDecoder decoder_;
  model::LayerMemories memories_;
  std::vector<Around> around_;
  Activations last_;  ///< behind the last block
  Losses losses_;
};

/// Mean change of losses, and how many of its standard errors it is away from nothing; both negative where `to` is less.
/// `to` may be those of a beginning of the text alone.
struct Change {
  double mean = 0, errors = 0;
};
Change change_of(const Losses& from, const Losses& to);
double mean_of(const Losses& losses);

}  // namespace w4q::verify::behaviour
