#include "quantize/exl3.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <vector>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/exl3.h"
#include "formats/scale_codec.h"
#include "kernels/linear/gemm.h"
#include "quantize/feedback_rows.h"
#include "quantize/source_matrix.h"
#include "quantize/trellis_simd.h"

namespace w4q::quantize {
namespace {

using formats::exl3_block;
using formats::exl3_tile;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;
using formats::SchemeFamily;

constexpr auto block_width = static_cast<size_t>(exl3_block);
/// How far the scale of an input may be from the mean of its block.
constexpr double most_spread = 16;

bool accepts(const Scheme& scheme) { return scheme.family == SchemeFamily::exl3; }

void check_options(const Scheme& scheme, const QuantizeOptions& options) {
  if (!accepts(scheme)) {
    throw Error(ErrorCode::bad_argument, concat("exl3 cannot quantize to ", to_string(scheme)))
        .detail("expected a scheme such as exl3-3")
        .hint("`w4q list` shows the schemes");
  }
  constexpr std::string_view refusal = "exl3 has no ", hint = "it belongs to another --method";
  const auto refuse = [&](std::string_view what) {
    throw Error(ErrorCode::bad_argument, concat(refusal, what)).hint(hint);
  };
  if (options.bnb_compatible) refuse("bitsandbytes-compatible mode");
  if (!options.table.empty() || !options.codebook.empty()) refuse("codebook: its levels are computed");
  check_steps(options.steps, scheme, refusal, hint);
}

/// n × k in fp32. Throws bad_file naming tensor, row and column of a value that is not finite.
std::vector<float> widened(const TensorView& weight) {
  const int64_t n = weight.shape[0], k = weight.shape[1];
  std::vector<float> values(static_cast<size_t>(n * k));
  parallel_for(n, row_grain(k), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto out = std::span(values).subspan(static_cast<size_t>(row * k), static_cast<size_t>(k));
      widen(row_bytes(weight, row), weight.dtype, out);
      const bool finite = std::ranges::all_of(out, [](float value) { return std::isfinite(value); });
      if (!finite) refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, row), row);
    }
  });
  return values;
}

/// A search has megabytes of scratch: tasks hand them on.
class Searches {
 public:
  explicit Searches(const Scheme& scheme)
      : scheme_(scheme), levels_(trellis_fast_levels(scheme.bits, formats::exl3_levels(scheme.code))) {}

  template <class Body>
  void with(const Body& body) const {
    std::unique_ptr<formats::TrellisSearch> search;
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) search = std::move(idle_.back()), idle_.pop_back();
    }
    if (!search) {
      search = std::make_unique<formats::TrellisSearch>(formats::exl3_search(scheme_, trellis_fast_step, levels_));
    }
    body(*search);
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(search));
  }

 private:
  Scheme scheme_;
  std::vector<float> levels_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<formats::TrellisSearch>> idle_;
};

void encode(std::span<const float> targets, PackedWeight& packed) {
  const Searches searches(packed.scheme);
  parallel_for(formats::exl3_padded(packed.n) / exl3_tile, 1, [&](int64_t tile, int64_t) {
    searches.with([&](formats::TrellisSearch& search) { formats::exl3_search_tiles(search, targets, tile, packed); });
  });
}

// ---- with calibration -----------------------------------------------------------------------------------------------

/// The scale t of every input for which Σ ‖w/t‖² · Σ h·t² is least in each block of 128, where errors are spread evenly by
/// the rotation: t² = ‖w‖/√h; and by blocks so that what is rounded has the size of the levels. `rows`: weights over the
/// scales of their outputs; `gram`: of the inputs.
std::vector<float> input_scales(const Scheme& scheme, MatrixView<const float> rows, MatrixView<const float> gram) {
  std::vector<double> sizes(static_cast<size_t>(rows.cols));
  for (int64_t r = 0; r < rows.rows; ++r) {
    for (int64_t c = 0; c < rows.cols; ++c) sizes[static_cast<size_t>(c)] += std::pow(double{rows.row(r)[c]}, 2);
  }
  double mean_power = 0;
  for (int64_t c = 0; c < rows.cols; ++c) mean_power += double{gram.row(c)[c]} / static_cast<double>(rows.cols);
  const auto outputs = static_cast<double>(formats::exl3_padded(rows.rows));
  std::vector<float> scales(sizes.size());
  for (size_t first = 0; first < sizes.size(); first += block_width) {
    const size_t last = std::min(first + block_width, sizes.size());
    std::vector<double> wanted(last - first);
    double logs = 0;
    for (size_t c = first; c < last; ++c) {
      // Inputs that calibration never saw cost a little, too.
      const double power = gram.row(static_cast<int64_t>(c))[c] + 1e-2 * mean_power;
      const double size = std::sqrt(sizes[c] / outputs) + 1e-9;
      wanted[c - first] = power > 0 ? std::sqrt(size / std::sqrt(power)) : 1;
      logs += std::log(wanted[c - first]);
    }
    const double middle = std::exp(logs / static_cast<double>(wanted.size()));
    double energy = 0;
    for (size_t c = first; c < last; ++c) {
      double& scale = wanted[c - first];
      scale = std::clamp(scale / middle, 1 / most_spread, most_spread);
      energy += sizes[c] / (scale * scale);
    }
    const double rms = std::sqrt(energy / (outputs * static_cast<double>(exl3_block)));
    const double factor = rms > 0 ? rms / formats::exl3_factor(scheme) : 1;
    for (size_t c = first; c < last; ++c) scales[c] = static_cast<float>(wanted[c - first] * factor);
  }
  return scales;
}

/// Scales and signs of all inputs and outputs.
PackedWeight allocate_calibrated(const Scheme& scheme, MatrixView<const float> weight, MatrixView<const float> gram) {
  PackedWeight packed = formats::exl3_allocate(scheme, weight);
  std::vector<float> outputs(static_cast<size_t>(weight.rows)), rows(static_cast<size_t>(weight.rows * weight.cols));
  for (int64_t r = 0; r < weight.rows; ++r) {
    outputs[static_cast<size_t>(r)] =
        std::abs(formats::load_scale(packed.plane(PlaneRole::scales), static_cast<size_t>(r)));
    const float scale = outputs[static_cast<size_t>(r)];
    for (int64_t c = 0; c < weight.cols; ++c) {
      rows[static_cast<size_t>(r * weight.cols + c)] = scale > 0 ? weight.row(r)[c] / scale : 0;
    }
  }
  formats::exl3_put_scales(packed, input_scales(scheme, {rows.data(), weight.rows, weight.cols}, gram), outputs);
  return packed;
}

/// xᵀx of what tiles are multiplied by, [K, K]: inputs times their scales, in the rotated basis.
std::vector<float> rotated_gram(const PackedWeight& packed, MatrixView<const float> gram) {
  const int64_t k = packed.k, inputs = formats::exl3_padded(k);
  std::vector<float> scales(static_cast<size_t>(inputs));
  formats::load_scales(packed.plane(PlaneRole::input_scales), 0, scales);
  std::vector<float> result(static_cast<size_t>(inputs * inputs));
  const MatrixView<float> view(result.data(), inputs, inputs);
  parallel_for(k, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < k; ++c) {
        view.row(r)[c] = gram.row(r)[c] * scales[static_cast<size_t>(r)] * scales[static_cast<size_t>(c)];
      }
      for (int64_t c = 0; c < inputs; c += exl3_block) formats::hadamard({view.row(r) + c, block_width});
    }
  });
  parallel_for(inputs, 16, [&](int64_t begin, int64_t end) {
    std::array<float, block_width> column{};
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t first = 0; first < inputs; first += exl3_block) {
        for (size_t r = 0; r < block_width; ++r) column[r] = view.row(first + static_cast<int64_t>(r))[c];
        formats::hadamard(column);
        for (size_t r = 0; r < block_width; ++r) {
          view.row(first + static_cast<int64_t>(r))[c] = column[r] * formats::exl3_turned;
        }
      }
    }
  });
  return result;
}

/// Tiles of 16 outputs, one after the other. Errors of a tile are those of a block: what a later one makes up for is
/// what the factor says once the couplings inside of the later one are taken off.
class Exl3Feedback final : public BlockFeedback {
 public:
  Exl3Feedback(const ErrorFactor& factor, PackedWeight& packed)
      : factor_(factor), packed_(packed), searches_(packed.scheme) {}

  int64_t task_rows() const noexcept override { return exl3_tile; }

  void round(FeedbackRows& rows, RowRange part, size_t block) const override {
    const int64_t begin = factor_.block_starts()[block], end = factor_.block_starts()[block + 1];
    const MatrixView<float> targets = rows.targets(part, begin, end);
    for (int64_t r = 0; r < part.count; ++r) uncouple(rows.weights(part.first + r) + begin, begin, end, targets.row(r));
    std::array<int, exl3_tile> inputs{};  // where each position stands in its tile
    for (int64_t p = begin; p < end; ++p) {
      inputs[static_cast<size_t>(p - begin)] = static_cast<int>(column(p) % exl3_tile);
    }
    std::array<float, formats::exl3_tile_weights> wanted{};
    for (int64_t r = 0; r < part.count; ++r) {
      for (int64_t p = 0; p < exl3_tile; ++p) {
        wanted[static_cast<size_t>(formats::exl3_weight(inputs[static_cast<size_t>(p)], static_cast<int>(r)))] =
            targets.row(r)[p];
      }
    }
    formats::Exl3States states{};
    searches_.with([&](formats::TrellisSearch& search) { search.ring(wanted, states); });
    const int64_t output_tile = rows.index(part.first) / exl3_tile;
    formats::exl3_put(states, packed_.scheme.bits,
                      formats::exl3_words(packed_, column(begin) / exl3_tile, output_tile));
    const auto levels = formats::exl3_levels(packed_.scheme.code);
    for (int64_t r = 0; r < part.count; ++r) {
      for (int64_t p = 0; p < exl3_tile; ++p) {
        const int weight = formats::exl3_weight(inputs[static_cast<size_t>(p)], static_cast<int>(r));
        rows.errors(part.first + r)[begin + p] =
            rows.weights(part.first + r)[begin + p] - levels[states[static_cast<size_t>(weight)]];
      }
    }
  }

 private:
  int64_t column(int64_t position) const { return factor_.order()[static_cast<size_t>(position)]; }

  /// targets ← weights + (targets − weights) · M⁻¹, M the couplings at positions [begin, end).
  void uncouple(const float* weights, int64_t begin, int64_t end, float* targets) const {
    for (int64_t j = 0; j < end - begin; ++j) {
      float shift = targets[j] - weights[j];
      const float* const coupling = factor_.coupling().row(begin + j) + begin;
      for (int64_t i = 0; i < j; ++i) shift -= coupling[i] * (targets[i] - weights[i]);
      targets[j] = weights[j] + shift;
    }
  }

  const ErrorFactor& factor_;
  PackedWeight& packed_;
  const Searches searches_;
};

void encode_with_feedback(std::string_view name, std::span<const float> targets, MatrixView<const float> gram,
                          double damping, PackedWeight& packed) {
  const int64_t n = formats::exl3_padded(packed.n), k = formats::exl3_padded(packed.k);
  const auto rotated = rotated_gram(packed, gram);
  const ErrorFactor factor({rotated.data(), k, k}, exl3_tile, damping, name);
  const Exl3Feedback feedback(factor, packed);
  const TensorView view{name, DType::f32, {n, k}, std::as_bytes(targets)};
  run_feedback(view, {.mean_squares = {}, .feedback = &factor}, feedback);
}

QuantizeStats stats_of(const PackedWeight& packed) {
  const formats::ScaleCodec& codec = formats::scale_codec(formats::ScaleType::f16);
  QuantizeStats stats;
  stats.blocks = packed.n;
  for (int64_t row = 0; row < packed.n; ++row) {
    const float scale = std::abs(formats::load_scale(packed.plane(PlaneRole::scales), static_cast<size_t>(row)));
    stats.zero_blocks += scale == 0 ? 1 : 0;
    stats.saturated_scales += scale == codec.largest ? 1 : 0;
    stats.subnormal_scales += scale != 0 && scale < codec.smallest_normal ? 1 : 0;
  }
  return stats;
}

QuantizeResult run(const TensorView& weight, const Scheme& scheme, const QuantizeOptions& options) {
  check_options(scheme, options);
  check_weight(weight);
  const auto values = widened(weight);
  const MatrixView<const float> matrix(values.data(), weight.shape[0], weight.shape[1]);
  if (!options.feeds_back()) {
    PackedWeight packed = formats::exl3_allocate(scheme, matrix);
    encode(formats::exl3_inner_targets(packed, matrix), packed);
    const QuantizeStats stats = stats_of(packed);
    return {std::move(packed), stats};
  }
  const MatrixView<const float> gram = options.input->gram;
  if (gram.rows != matrix.cols || gram.cols != matrix.cols) {
    throw Error(ErrorCode::bad_argument, concat(printable(weight.name), ": the Gram matrix belongs to another input"))
        .detail(concat("expected ", matrix.cols, " channels, got ", gram.rows));
  }
  PackedWeight packed = allocate_calibrated(scheme, matrix, gram);
  const Step* const feedback = options.steps.find(StepKind::feedback);
  const double damping = feedback == nullptr ? Step{}.damping : feedback->damping;
  encode_with_feedback(weight.name, formats::exl3_inner_targets(packed, matrix), gram, damping, packed);
  const QuantizeStats stats = stats_of(packed);
  return {std::move(packed), stats};
}

}  // namespace

QuantizerRow exl3_quantizer() {
  return {.name = "exl3",
          .description = "exllamav3's tiles of the least squared error, by Viterbi's algorithm; best with --feedback",
          .accepts = accepts,
          .run = run,
          .run_cuda = nullptr};
}

int64_t fit_exl3_outputs(PackedWeight& packed, MatrixView<const float> weight, MatrixView<const float> gram) {
  std::atomic<int64_t> changed = 0;
  const int64_t k = packed.k;
  const auto bits = packed.plane(PlaneRole::scales).bytes.as<uint16_t>();
  parallel_for(packed.n, exl3_block, [&](int64_t begin, int64_t end) {
    std::vector<float> rows(static_cast<size_t>((end - begin) * k)), products(rows.size());
    const MatrixView<float> decoded(rows.data(), end - begin, k), product(products.data(), end - begin, k);
    formats::exl3_decode_rows(packed, begin, decoded);
    kernels::gemm_nn(decoded, gram, product);
    for (int64_t r = 0; r < end - begin; ++r) {
      double wanted = 0, found = 0;
      for (int64_t c = 0; c < k; ++c) {
        wanted += double{weight.row(begin + r)[c]} * double{product.row(r)[c]};
        found += double{decoded.row(r)[c]} * double{product.row(r)[c]};
      }
      const double factor = found > 0 ? wanted / found : 1;
      if (!(factor > 0.5 && factor < 2)) continue;
      uint16_t& scale = bits[static_cast<size_t>(begin + r)];
      const float value = formats::decode_scale(scale & 0x7FFF, formats::ScaleType::f16);
      const auto stored = formats::store_scale(static_cast<float>(value * factor), formats::ScaleType::f16);
      if (stored.value == value) continue;
      scale = static_cast<uint16_t>(stored.bits | (scale & 0x8000));
      ++changed;
    }
  });
  return changed;
}

}  // namespace w4q::quantize
