// The search for the symbols of a ring: of all that decode to levels near the targets, those with the least squared
// error, by Viterbi's algorithm over 2^window states (docs/trellis.md, "Encoder"). What a step does is a parameter: the
// plain one here is the definition, a fast one gives the same bits.
//
// State s behind a weight is its window; its predecessors are (j << (window − bits)) | (s >> bits). The states that have
// s >> bits in common, a group, have the predecessors in common too: only the least cost of each group is kept,
//
//     next[g] = min over j of least[p >> bits] + (level(p) − target)²,   p = (j << (window − bits)) | g
//
// every operation rounded to fp32. The way back asks again which j it was; ties go to the lowest. Where rows count
// differently, costs stand in units of the row that they lead to: before it they are multiplied by what the row before
// counts, over what it counts itself, so that a step stays as it is.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "formats/trellis.h"

namespace w4q::formats {

/// One step for a weight that counts: `least` and `next` have 2^(window − bits) costs, and room for `trellis_overread`
/// more; `levels` as prepared for it.
using TrellisStep = void (*)(int bits, int window, const float* least, const float* levels, float target, float* next);
inline constexpr int64_t trellis_overread = 16;
/// The least importance of a row beside the largest of its ring: what counts less counts so.
inline constexpr float trellis_least_importance = 0x1p-20f;

/// The definition: `levels` are trellis_levels(window).
void trellis_plain_step(int bits, int window, const float* least, const float* levels, float target, float* next);

/// The code that a search is for: weights of `bits` bits each, 2^window levels, rings of `length` weights.
struct TrellisCodeView {
  int bits = 0, window = 0;
  std::span<const float> levels = {};
  int length = trellis_rows;
};

/// Scratch of one search: a row of costs for each step, 2^(window − bits) · (length + 1) floats.
class TrellisSearch {
 public:
  /// `step_levels`: what `step` wants. 1 to 8 bits; what `code` and `step_levels` view must outlive this.
  TrellisSearch(const TrellisCodeView& code, TrellisStep step, std::span<const float> step_levels);
  /// Of the trellis family.
  TrellisSearch(int bits, int window, TrellisStep step, std::span<const float> step_levels);

  /// A search over the last and first 48 weights, from all states, decides the state at the seam; a second one goes once
  /// around from it to itself. Where so many weights are missing that the seam is all zeros, that is its state.
  TrellisSymbols operator()(const TrellisColumn& column);
  /// One search alone, around from behind weight `seam` − 1 to itself, where the state stays `state`: if that is of a ring
  /// that stands, none is found that is worse.
  TrellisSymbols operator()(const TrellisColumn& column, int seam, uint32_t state);
  /// The same for a ring of `length` weights that all count: `states` behind each of them.
  void ring(std::span<const float> targets, std::span<uint32_t> states);

  TrellisSearch(TrellisSearch&&) = default;  // views into its own levels stay where they are

 private:
  TrellisSearch(std::vector<float> own_levels, const TrellisCodeView& code, TrellisStep step,
                std::span<const float> step_levels);

  enum class Kind : uint8_t { counts, free, zero };
  struct Weight {
    Kind kind;
    float target;
    float exchange = 1;  ///< what costs before it are multiplied by: they are counted in the importance of its row
  };

  Weight weight(const TrellisColumn& column, int row) const noexcept;
  /// A ring's, in the order of rows.
  static void exchange(const TrellisColumn& column, std::span<Weight> ring) noexcept;
  std::array<Weight, trellis_rows> ring_of(const TrellisColumn& column) const noexcept;
  float cost(Weight weight, uint32_t state) const noexcept;
  float* costs(size_t step) noexcept { return costs_.data() + step * stride_; }
  /// The states behind each of `path`, from `start` or, if that is negative, any; `end` negative: to the cheapest.
  void run(std::span<const Weight> path, int64_t start, int64_t end, std::span<uint32_t> states);
  void around(std::span<const Weight> ring, std::span<uint32_t> states);
  void advance(Weight weight, const float* least, float* next) const;
  uint32_t cheapest(Weight weight, const float* least) const noexcept;
  uint32_t predecessor(Weight weight, const float* least, uint32_t group) const noexcept;

  std::vector<float> own_levels_;
  int bits_, window_;
  TrellisStep step_;
  std::span<const float> step_levels_, levels_;
  size_t groups_, stride_;
  std::vector<float> costs_;
};

}  // namespace w4q::formats
