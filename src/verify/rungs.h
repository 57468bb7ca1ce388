// The checks, in the order in which the ladder has them. A check is one file of this folder that defines its row, and
// one line in each of the two lists here.
#pragma once

#include "verify/ladder.h"

namespace w4q::verify {

CheckRow serving_check();
CheckRow digests_check();
CheckRow gguf_check();
CheckRow contents_check();
CheckRow zero_pages_check();
CheckRow rows_check();
CheckRow conventions_check();
CheckRow structure_check();
CheckRow tokenizer_check();
CheckRow codes_check();
CheckRow finite_check();
CheckRow decoder_check();
CheckRow statistics_check();
CheckRow behaviour_check();
CheckRow weights_check();
CheckRow reference_check();
CheckRow perplexity_check();
CheckRow kernels_check();
CheckRow kv_compare_check();
CheckRow speed_check();

inline constexpr CheckRow (*rungs[])() = {
    serving_check,    digests_check,     gguf_check,       contents_check,   zero_pages_check,
    rows_check,       conventions_check, structure_check,  tokenizer_check,  codes_check,
    finite_check,     decoder_check,     statistics_check, weights_check,    reference_check,
    perplexity_check, behaviour_check,   kernels_check,    kv_compare_check, speed_check,
};

}  // namespace w4q::verify
