// What quantizers write, frozen plane by plane in every layout, and as a whole at several sizes.
#include "laws/frozen.h"
#include "laws/registries.h"
#include "quantize/quantizer_registry.h"

namespace w4q {
namespace {

using formats::PackedWeight;
using quantize::QuantizeOptions;

constexpr int64_t n = 130;
constexpr int64_t k = 100;

PackedWeight quantized(const quantize::QuantizerRow& row, const formats::Scheme& scheme, const QuantizeOptions& options,
                       int64_t rows, int64_t cols) {
  const std::vector<float> values = test::frozen_input(rows, cols);
  return row.run({"w", DType::f32, {rows, cols}, bytes_of(values)}, scheme, options).weight;
}

io::Json fingerprints(const PackedWeight& weight) {
  io::Json json;
  for (const formats::Plane& plane : weight.planes) {
    json[std::string(to_string(plane.spec.role))] = test::hex(test::fingerprint(plane.bytes.bytes()));
  }
  return json;
}

/// What a method makes of the matrix, in every layout that takes it.
io::Json in_every_layout(const quantize::QuantizerRow& row, const formats::Scheme& scheme,
                         const QuantizeOptions& options) {
  const PackedWeight weight = quantized(row, scheme, options, n, k);
  io::Json json;
  for (const auto& layout : repack::layout_registry()) {
    if (!layout.accepts(scheme, n, k, nullptr)) continue;
    json[std::string(layout.name)] = fingerprints(layout.pack(weight));
  }
  return json;
}

/// The ways of rounding to a scheme without calibration: each table, or each choice of an integer group's range.
std::vector<std::pair<std::string, QuantizeOptions>> ways_to(const formats::Scheme& scheme) {
  std::vector<std::pair<std::string, QuantizeOptions>> ways;
  if (scheme.family == formats::SchemeFamily::integer) {
    ways.resize(2);
    ways[0].first = "none";
    ways[1].first = "mse";
    ways[1].second.steps = {{quantize::StepKind::clip}};
    return ways;
  }
  if (scheme.family == formats::SchemeFamily::small_float) {
    ways.resize(2);
    ways[0].first = "none";
    ways[1].first = "search";
    ways[1].second.steps = {{quantize::StepKind::search_scales}};
    return ways;
  }
  if (formats::scheme_row(scheme.family).table == nullptr) {
    ways.emplace_back("none", QuantizeOptions{});
    return ways;
  }
  if (scheme.family == formats::SchemeFamily::lut) {
    ways.resize(2);
    ways[0].first = "nf4";
    ways[1].first = "fp4";
    ways[1].second.codebook = "fp4";
    return ways;
  }
  for (const auto& table : formats::codebook_registry()) {
    ways.emplace_back(table.name, QuantizeOptions{});
    ways.back().second.codebook = table.name;
  }
  return ways;
}

io::Json present(const quantize::QuantizerRow& row) {
  io::Json json;
  for (const formats::Scheme& scheme : test::every_scheme()) {
    if (!row.accepts(scheme)) continue;
    for (const auto& [way, options] : ways_to(scheme)) {
      json[to_string(scheme)][way] = in_every_layout(row, scheme, options);
    }
  }
  return json;
}

TEST(Frozen, BytesOfEveryQuantizerAndLayout) {
  for (const auto& row : quantize::quantizer_registry()) {
    test::expect_frozen(present(row), test::golden_file(row.name));
  }
}

TEST(Frozen, BytesOfEveryQuantizerAtOtherSizes) {
  io::Json json;
  for (const auto& row : quantize::quantizer_registry()) {
    for (const formats::Scheme& scheme : test::every_scheme()) {
      if (!row.accepts(scheme)) continue;
      for (const auto& [way, options] : ways_to(scheme)) {
        for (const auto& [rows, cols] : {std::pair{1, 31}, std::pair{256, 256}}) {
          json[concat(to_string(scheme), " ", way, " ", rows, "x", cols)] =
              test::hex(test::fingerprint(quantized(row, scheme, options, rows, cols)));
        }
      }
    }
  }
  test::expect_frozen(json, "w4q_sizes.json");
}

}  // namespace
}  // namespace w4q
