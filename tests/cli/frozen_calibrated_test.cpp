// What the program writes when calibration steers it, frozen file by file, for every step and every family of schemes.
// The statistics are crafted (crafted_statistics.h): those that decoding text gives depend on the instruction set.
//
// Left out is where sums of many rounded terms decide, and a near tie may fall otherwise on another machine: decoding
// text (--calib); where channels are correlated, AWQ before clips, feedback, norms or rotations, since its scales take
// the Gram matrix away from powers of two, feedback and norms in a rotated basis, and a damping that is not 0. AWQ's
// powers are libm's, whose last bits are gone when a scale is rounded to fp32: four units in the last place of fp64
// more or less change nothing here.
#include "crafted_statistics.h"
#include "frozen_outputs.h"

namespace w4q::test {
namespace {

const std::vector<std::vector<std::string>> to_awq = {{"--to", "awq-gemm"}};
const std::vector<std::vector<std::string>> to_sm89 = {{"--target", "sm89"}};

/// Every way with statistics of that correlation; two layers of four say it all.
void write_calibrated_ways(FrozenOutputs& outputs, Correlation correlation, std::vector<Way> ways) {
  const TemporaryFolder folder;
  const auto file = folder / "statistics.safetensors";
  write_crafted_statistics(outputs.model(), correlation, file);
  const std::vector<std::string> more = {"--stats", file.string(), "--keep", "*.layers.[12].*"};
  for (Way& way : ways) way.quantize.insert(way.quantize.end(), more.begin(), more.end());
  write_ways(outputs, ways);
  outputs.expect_frozen();
}

TEST(Frozen, EveryStepWithCorrelatedChannels) {
  FrozenOutputs outputs("tiny/pairs", bundled_model());
  write_calibrated_ways(
      outputs, Correlation::pairs,
      {{"search-kbit3", {"--k", "3", "--scales", "search"}, {}},
       {"search-kbit4-f16", {"--scheme", "kbit4-b32-f16", "--scales", "search"}, {}},
       {"search-rotated3", {"--scheme", "rotated3-d64-e4m4", "--scales", "search"}, {}},
       {"lloyd-kbit2", {"--k", "2", "--codebook", "lloyd"}, {}},
       {"lloyd-search-kbit3", {"--k", "3", "--codebook", "lloyd", "--scales", "search"}, {}},
       {"rotate-lloyd-search-kbit3", {"--k", "3", "--rotate", "128", "--codebook", "lloyd", "--scales", "search"}, {}},
       {"feedback-kbit3", {"--k", "3", "--feedback", "--damping", "0"}, {}},
       {"feedback-int4", {"--scheme", "int4-g128-f16-asym", "--feedback", "--damping", "0"}, to_awq},
       {"feedback-int3-g32", {"--scheme", "int3-g32-bf16", "--feedback", "--damping", "0"}, {}},
       {"feedback-clip-int4", {"--scheme", "int4-g64-f16-asym", "--clip", "mse", "--feedback", "--damping", "0"}, {}},
       {"feedback-head", {"--k", "5", "--lm-head", "--feedback", "--damping", "0"}, {}},
       {"feedback-sweeps-kbit3", {"--k", "3", "--scales", "search", "--feedback", "--sweeps", "--damping", "0"}, {}},
       {"feedback-sweeps-int4", {"--scheme", "int4-g64-f16-asym", "--feedback", "--sweeps", "--damping", "0"}, {}},
       {"lloyd-search-feedback-kbit2",
        {"--k", "2", "--codebook", "lloyd", "--scales", "search", "--feedback", "--damping", "0"},
        {}},
       {"good-kbit2", {"--k", "2", "--quality", "good", "--damping", "0"}, to_sm89},
       {"good-int4", {"--scheme", "int4-g128-f16", "--quality", "good", "--damping", "0"}, to_sm89},
       {"awq-kbit3", {"--k", "3", "--awq", "--no-clip"}, to_sm89},
       {"awq-int4", {"--scheme", "int4-g128-f16-asym", "--awq", "--no-clip", "--no-input-scales"}, to_awq},
       {"target-bpw", {"--target-bpw", "3.6", "--scales", "search"}, {}}});
}

TEST(Frozen, EveryStepWithoutCorrelation) {
  FrozenOutputs outputs("tiny/diagonal", bundled_model());
  write_calibrated_ways(
      outputs, Correlation::none,
      {{"awq-clips-int4", {"--scheme", "int4-g128-f16-asym", "--awq"}, {}},
       {"awq-clips-kbit3", {"--k", "3", "--awq"}, {}},
       {"awq-feedback-int4", {"--scheme", "int4-g128-f16-asym", "--awq", "--feedback"}, {}},
       {"awq-lloyd-search-feedback-kbit3",
        {"--k", "3", "--awq", "--codebook", "lloyd", "--scales", "search", "--feedback"},
        {}},
       {"rotate-feedback-kbit3", {"--k", "3", "--rotate", "64", "--feedback"}, {}},
       {"feedback-rotated3", {"--scheme", "rotated3-d64-e4m4", "--feedback"}, {}},
       {"feedback-sweeps-rotated3",
        {"--scheme", "rotated3-d64-e4m4", "--scales", "search", "--feedback", "--sweeps"},
        {}},
       {"norms-rotated3", {"--scheme", "rotated3-d64-e4m4", "--calibrate-norms"}, {}},
       {"norms-rotated4", {"--scheme", "rotated4-d128", "--scales", "search", "--calibrate-norms"}, to_sm89},
       {"rotate-feedback-norms-trellis3",
        {"--scheme", "trellis3-w10", "--rotate", "64", "--feedback", "--calibrate-norms"},
        {}},
       {"feedback-sweeps-trellis2", {"--scheme", "trellis2-w8", "--feedback", "--sweeps"}, {}},
       {"awq-norms-trellis2", {"--scheme", "trellis2-w8", "--awq", "--calibrate-norms"}, {}},
       {"norms-residual",
        {"--method", "rotated", "--bits", "3", "--residual-bits", "2", "--feedback", "--calibrate-norms"},
        {}}});
}

}  // namespace
}  // namespace w4q::test
