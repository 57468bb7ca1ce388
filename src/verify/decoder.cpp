#include "verify/decoder.h"

#include <algorithm>
#include <bit>
#include <memory>

#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "verify/rungs.h"
#include "verify/survey.h"
#include "verify/weights/weights.h"

namespace w4q::verify {
namespace {

// What it finds wrong lies in code, not in the file: what one stretch of rows of a shape does, the next does too.
constexpr int64_t all_up_to = int64_t{1} << 18, sampled_weights = int64_t{1} << 16;
constexpr int64_t block_rows = 16;

/// First rows of the blocks that are decoded.
std::vector<int64_t> block_starts(int64_t n, int64_t k) {
  const int64_t blocks = (n + block_rows - 1) / block_rows;
  const int64_t wanted =
      n * k <= all_up_to ? blocks : std::clamp<int64_t>(sampled_weights / (block_rows * k), 1, blocks);
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < wanted; ++i) {
    starts.push_back(wanted == 1 ? 0 : i * (blocks - 1) / (wanted - 1) * block_rows);
  }
  return starts;
}

/// Without the sign of a zero.
uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value + 0.0f); }

/// Where the rows [begin, end) differ first; empty: nowhere.
std::string difference(const formats::PackedLinear& packed, const kernels::LinearWeight& weight, int64_t begin,
                       int64_t end, const DecodeRows& fast) {
  const auto k = static_cast<size_t>(weight.k);
  std::vector<float> found(static_cast<size_t>(end - begin) * k), expected(k);
  const MatrixView<float> rows(found.data(), end - begin, weight.k);
  fast(weight, begin, end, rows);
  for (int64_t row = begin; row < end; ++row) {
    formats::decode_linear_row(packed, row, expected);
    const float* const values = rows.row(row - begin);
    for (size_t col = 0; col < k; ++col) {
      if (bits_of(values[col]) == bits_of(expected[col])) continue;
      return concat(printable(weight.name), ": row ", row, ", column ", col, " decodes fast to ", values[col],
                    ", by the definition to ", expected[col]);
    }
  }
  return {};
}

/// The first difference of a linear.
std::string check_linear(const formats::PackedLinear& packed, const kernels::LinearWeight& weight,
                         const std::vector<int64_t>& starts, const DecodeRows& fast) {
  std::vector<std::string> found(starts.size());
  parallel_for(static_cast<int64_t>(starts.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = starts[static_cast<size_t>(i)];
      found[static_cast<size_t>(i)] = difference(packed, weight, begin, std::min(begin + block_rows, weight.n), fast);
    }
  });
  const auto first = std::ranges::find_if(found, [](const std::string& text) { return !text.empty(); });
  return first == found.end() ? std::string{} : *first;
}

void run_decoder(CheckContext& context, Findings& findings) {
  const auto* const survey = context.survey();
  const DecoderReport report =
      survey != nullptr ? survey->decoder : check_decoder(context.candidate().folder, context.options().decode_rows);
  findings.json["decoder"] = to_json(report);
  // That it holds is said in the JSON alone: the text is about the checkpoint, and this is not one of its faults.
  if (report.faults.empty()) return;
  findings.checks.add({"decoder", false,
                       concat(report.faults.size(), " packed weights decode fast to other values than by definition"),
                       report.faults});
}

}  // namespace

DecodedLinear look_at_decoding(const checkpoint::PackedLinearInfo& info,
                               const std::shared_ptr<const formats::PackedLinear>& packed, const DecodeRows& fast) {
  const kernels::LinearWeight weight{info.name, info.n, info.k, packed, {}};
  const auto starts = block_starts(info.n, info.k);
  DecodedLinear decoded{check_linear(*packed, weight, starts, fast)};
  for (const int64_t begin : starts) decoded.rows += std::min(block_rows, info.n - begin);
  return decoded;
}

void add_to_decoder_report(const checkpoint::PackedLinearInfo& info, DecodedLinear decoded, DecoderReport& report) {
  if (!decoded.fault.empty()) report.faults.push_back(std::move(decoded.fault));
  auto& coverage = report.schemes[scheme_text(info)];
  ++coverage.linears;
  coverage.all_rows += info.n;
  coverage.rows += decoded.rows;
}

DecoderReport check_decoder(const checkpoint::Folder& candidate, const DecodeRows& fast) {
  DecoderReport report;
  Progress progress("decoder", static_cast<int64_t>(candidate.quantization.linears.size()), "tensors");
  for (const auto& [name, info] : candidate.quantization.linears) {
    const auto packed =
        std::make_shared<const formats::PackedLinear>(checkpoint::load_canonical(candidate.tensors, info));
    add_to_decoder_report(info, look_at_decoding(info, packed, fast), report);
    progress.advance(1);
  }
  return report;
}

io::Json to_json(const DecoderReport& report) {
  io::Json json = io::Json::array();
  for (const auto& [scheme, coverage] : report.schemes) {
    json.push_back(
        {{"scheme", scheme}, {"linears", coverage.linears}, {"rows", coverage.rows}, {"of", coverage.all_rows}});
  }
  return json;
}

CheckRow decoder_check() {
  return {.name = "decoder",
          .help = "packed weights decode fast to what the definitions of their schemes say",
          .needs = {.packed = true},
          .stops = true,
          .run = run_decoder};
}

}  // namespace w4q::verify
