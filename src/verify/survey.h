// What one pass over the packed weights leaves for several rungs, so that each weight is read and unpacked once.
#pragma once

#include "verify/decoder.h"
#include "verify/statistics/statistics.h"

namespace w4q::verify {

/// Of all packed linears of a candidate, all of which are sound.
struct PackedSurvey {
  DecoderReport decoder;
  StatisticsCollector statistics;
};

}  // namespace w4q::verify
