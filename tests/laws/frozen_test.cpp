// w4q's own bytes, frozen: the fingerprints in testdata/golden/w4q_kbit.json were written once and change only with the
// format version. W4Q_PRINT_FROZEN=1 prints the file that the present code would write.
#include <cstdlib>
#include <iostream>

#include "io/json.h"
#include "laws/registries.h"
#include "quantize/quantizer_registry.h"
#include "support.h"

namespace w4q {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;

constexpr int64_t n = 130;
constexpr int64_t k = 100;

/// The matrix: int16(draw >> 48) · 2^-17 of stream 2026, exact in fp32 and the same on every machine.
std::vector<float> input() {
  std::vector<float> values(static_cast<size_t>(n * k));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<int16_t>(random_bits(2026, i) >> 48)) * 0x1p-17f;
  }
  return values;
}

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

io::Json fingerprints(const PackedWeight& weight) {
  io::Json json;
  for (const formats::Plane& plane : weight.planes) {
    json[std::string(to_string(plane.spec.role))] = hex(test::fingerprint(plane.bytes.bytes()));
  }
  return json;
}

io::Json present_bytes() {
  const std::vector<float> values = input();
  io::Json json;
  for (const formats::Scheme& scheme : formats::scheme_row(formats::SchemeFamily::kbit).schemes()) {
    for (const auto& table : formats::codebook_registry()) {
      quantize::QuantizeOptions options;
      options.codebook = table.name;
      const TensorView view{"w", DType::f32, {n, k}, bytes_of(values)};
      const PackedWeight weight = quantize::quantizer_row("kbit").run(view, scheme, options).weight;
      for (const auto& layout : repack::layout_registry()) {
        if (!layout.accepts(scheme, n, k, nullptr)) continue;
        json[to_string(scheme)][std::string(table.name)][std::string(layout.name)] = fingerprints(layout.pack(weight));
      }
    }
  }
  return json;
}

TEST(Frozen, BytesOfEverySchemeTableAndLayout) {
  const io::Json present = present_bytes();
  if (std::getenv("W4Q_PRINT_FROZEN") != nullptr) std::cout << present.dump(1) << "\n";
  const io::Json frozen = io::read_json(test::testdata() / "golden" / "w4q_kbit.json");
  for (const auto& [scheme, tables] : frozen.items()) {
    ASSERT_TRUE(present.contains(scheme)) << scheme << " has vanished";
    for (const auto& [table, layouts] : tables.items()) {
      for (const auto& [layout, planes] : layouts.items()) {
        EXPECT_EQ(present[scheme][table][layout].dump(), planes.dump()) << scheme << " " << table << " " << layout;
      }
    }
  }
  EXPECT_EQ(present.size(), frozen.size()) << "a scheme without frozen bytes: add them";
}

}  // namespace
}  // namespace w4q
