// What the blocks of a GGUF file's matrices say of themselves: codes against the scales and minimums of their parts, these
// against the unit of their block (docs/verify.md). Whoever rounds takes a part's scale from its weights, so the codes know
// it; bytes in another place, order or meaning do not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "formats/gguf_forms.h"
#include "verify/conventions/sample.h"

namespace w4q::verify {

/// What one matrix says. Parts are weights that share a scale (formats::GgufForm), sizes of weights their root mean square.
/// Match, minimums and ends are those of fine parts.
struct GgufFigures {
  int64_t parts = 0, blocks = 0;  ///< looked at
  int64_t fine = 0;      ///< of the parts: their levels differ, and their scale is no small multiple of the unit
  Slope match;           ///< of −log step over log deviation of the levels, within rows: 1 where they belong together
  Slope minimums;        ///< of the mean level over offset / step; no error: the type has none, or all are alike
  Slope units;           ///< of −log d over log size of what scales and levels say, between blocks
  double spread = 0;     ///< standard deviation of log step within rows
  double ends = 0;       ///< share of fine parts whose levels reach the end of the range, of types with offsets both
  double lean = 0;       ///< mean of all weights over their deviation within parts
  double size = 0;       ///< of the weights of a usual part
  double commonest = 0;  ///< share of the commonest level
  double levels_in_use = 0;  ///< of those that the type has, the share that one in 500 weights and more has
  int64_t empty = 0;         ///< parts whose step is zero though their levels differ
  int64_t unscaled = 0;      ///< blocks whose scales are all zero beside a unit, though their levels differ
  int64_t constant = 0;      ///< parts whose levels are all the same beside a step
  int64_t negative = 0;      ///< units below zero of a type whose programs write none
  int64_t invalid = 0;       ///< units that are no finite number
  bool one_unit = false;     ///< all units are one number
  double near_one = 0;       ///< share of units from 1/2 to 2 in size: what BF16 is where it is read as F16
  bool no_minimums = false;  ///< the type has minimums, and all of them are zero
};

/// Of `rows` rows of `k` weights; of more than 2^18 weights 2^17 in rows that are spread evenly. `form` is no lattice.
GgufFigures gguf_figures(const formats::GgufForm& form, std::span<const std::byte> bytes, int64_t rows, int64_t k);

struct GgufSubject {
  std::string name;  ///< "blk.3.ffn_up.weight", of an expert with ", expert 5" behind it
  std::string role;  ///< model::kind_of the name
  const formats::GgufForm* form = nullptr;
  GgufFigures figures;
};

/// Faults, each with the name of its matrix: what the others have and one lacks, or all of a type where nothing that
/// rounds leaves it so.
std::vector<std::string> gguf_block_faults(std::span<const GgufSubject> subjects);

}  // namespace w4q::verify
