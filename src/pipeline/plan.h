// What a command is about to do, tensor by tensor: the same table serves --dry-run and the report afterwards.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/packed_checkpoint.h"
#include "core/dtype.h"
#include "core/views.h"
#include "formats/scheme.h"
#include "io/json.h"
#include "model/kinds.h"
#include "pipeline/allocation_report.h"

namespace w4q::pipeline {

/// One tensor of the input and what becomes of it.
struct TensorPlan {
  std::string name;  ///< tensor name in the input, or the module path of a linear that is packed already
  DType dtype = DType::bf16;
  Shape shape;
  std::optional<formats::Scheme> scheme;  ///< nothing: carried along as it is
  std::string layout;
  int64_t bytes_before = 0;
  int64_t bytes_after = 0;
  formats::Rotation rotation = {};                    ///< of the input of the first pass
  std::vector<checkpoint::PackedPass> residual = {};  ///< further passes
  std::string why = {};                               ///< it is carried along; empty: as such tensors are

  int64_t weights() const noexcept { return element_count(shape); }
  double bits_per_weight() const noexcept;
  /// One pass over an input as it is.
  bool is_plain() const noexcept { return residual.empty() && rotation.identity(); }
  /// "rotated4-d128+rotated2-d128"; "keep BF16 (router)".
  std::string scheme_text() const;
  /// As config.json will have it, for a tensor that a scheme packs.
  checkpoint::PackedLinearInfo packed_info(bool input_scale) const;
};

/// A part of a run and what it is expected to take.
struct CostPart {
  std::string name;
  double seconds = 0;
  int64_t memory = 0;  ///< bytes while it runs; 0: no more than the parts around it
};

struct PresetCost {
  std::string name;
  std::vector<std::string> steps;
  double seconds = 0;
  int64_t memory = 0;
};

/// What a run of several ranks asks of one of them.
struct RankCost {
  int64_t parts = 0;   ///< of the work
  int64_t reads = 0;   ///< bytes
  int64_t writes = 0;  ///< bytes
  int64_t memory = 0;  ///< bytes that it holds
  double seconds = 0;
};

struct RanksPlan {
  std::vector<RankCost> each;
  double read_rate = 0;  ///< bytes per second, measured; writing is taken to be as fast
  int64_t gathered = 0;  ///< bytes that go to the first rank in the end, where each has a disk of its own

  double seconds() const noexcept;  ///< of the one that takes longest
};

/// Parts of Plan::costs that ranks share in ways of their own.
inline constexpr std::string_view own_text_part = "the model's own text", calibration_part = "calibration";

struct Plan {
  std::vector<TensorPlan> tensors;
  std::optional<AllocationReport> allocation;  ///< where bits were chosen
  int64_t expected_memory = 0;  ///< bytes: the largest tensor in and out, and what the program itself needs
  double expected_seconds =
      0;  ///< computing, from a sample measured on this machine now; reading and writing come on top
  int64_t tensor_memory = 0;        ///< of expected_memory what rounding takes
  std::vector<CostPart> costs;      ///< expected_seconds part by part
  std::optional<RanksPlan> ranks;   ///< where that was asked for, how several would share it
  std::vector<PresetCost> presets;  ///< where one was asked for, what each of them would take
  std::vector<std::string> steps;   ///< what is done beyond rounding each weight by itself, in order
  std::vector<std::string> notes;

  int64_t bytes_before() const noexcept;
  int64_t bytes_after() const noexcept;
  /// Bits per weight over the tensors that a scheme packs; 0 when there are none.
  double packed_bits_per_weight() const noexcept;
  int64_t packed_tensors() const noexcept;
};

/// Table with totals, for a terminal.
std::string to_text(const Plan& plan, model::Detail detail = model::Detail::kinds);
io::Json to_json(const Plan& plan);

/// The program's own share of Plan::expected_memory.
inline constexpr int64_t base_memory = 64'000'000;

}  // namespace w4q::pipeline
