// Does the code that decodes fast decode what the definition of the scheme says: here, on this machine's instruction
// set, the very weights that are verified? The quantizer measures with that code too, so nothing else would notice.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "kernels/linear/linear.h"

namespace w4q::verify {

/// kernels::decode_rows, or what a test puts in its place.
using DecodeRows = std::function<void(const kernels::LinearWeight&, int64_t begin, int64_t end, MatrixView<float>)>;

struct DecoderReport {
  struct Coverage {
    int64_t linears = 0;
    int64_t rows = 0;      ///< that were decoded both ways
    int64_t all_rows = 0;  ///< that there are
  };
  std::map<std::string, Coverage> schemes;  ///< by the schemes of a linear's passes, "rotated4-d128+rotated3-d128"
  std::vector<std::string> faults;          ///< the first difference of a linear: tensor, row, column, both values
};

/// What one linear of the candidate's, in the canonical layout, says.
struct DecodedLinear {
  std::string fault;
  int64_t rows = 0;  ///< that were decoded both ways
};
DecodedLinear look_at_decoding(const checkpoint::PackedLinearInfo& info,
                               const std::shared_ptr<const formats::PackedLinear>& packed, const DecodeRows& fast);
void add_to_decoder_report(const checkpoint::PackedLinearInfo& info, DecodedLinear decoded, DecoderReport& report);

/// Decodes rows of every packed linear by formats::decode_linear_row and by `fast`: all of them up to 2^18 weights, of
/// a larger one blocks of 16 rows spread evenly, 2^16 weights together. Every bit must be the same but for the sign of
/// zero, which a sum of passes does not keep. Throws as loading does.
DecoderReport check_decoder(const checkpoint::Folder& candidate, const DecodeRows& fast);

io::Json to_json(const DecoderReport& report);

}  // namespace w4q::verify
