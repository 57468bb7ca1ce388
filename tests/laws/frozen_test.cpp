// w4q's own bytes, frozen: the fingerprints in testdata/golden/w4q_kbit.json and w4q_int.json were written once and
// change only with the format version. W4Q_PRINT_FROZEN=1 prints the files that the present code would write.
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

/// What a method makes of the matrix, in every layout that takes it.
io::Json in_every_layout(std::string_view method, const formats::Scheme& scheme,
                         const quantize::QuantizeOptions& options) {
  const std::vector<float> values = input();
  const TensorView view{"w", DType::f32, {n, k}, bytes_of(values)};
  const PackedWeight weight = quantize::quantizer_row(method).run(view, scheme, options).weight;
  io::Json json;
  for (const auto& layout : repack::layout_registry()) {
    if (!layout.accepts(scheme, n, k, nullptr)) continue;
    json[std::string(layout.name)] = fingerprints(layout.pack(weight));
  }
  return json;
}

io::Json present_kbit() {
  io::Json json;
  for (const formats::Scheme& scheme : formats::scheme_row(formats::SchemeFamily::kbit).schemes()) {
    for (const auto& table : formats::codebook_registry()) {
      quantize::QuantizeOptions options;
      options.codebook = table.name;
      json[to_string(scheme)][options.codebook] = in_every_layout("kbit", scheme, options);
    }
  }
  return json;
}

io::Json present_int() {
  io::Json json;
  for (const formats::Scheme& scheme : formats::scheme_row(formats::SchemeFamily::integer).schemes()) {
    if (!quantize::quantizer_row("rtn").accepts(scheme)) continue;
    quantize::QuantizeOptions options;
    json[to_string(scheme)]["none"] = in_every_layout("rtn", scheme, options);
    options.steps = {{quantize::StepKind::clip}};
    json[to_string(scheme)]["mse"] = in_every_layout("rtn", scheme, options);
  }
  return json;
}

void expect_frozen(const io::Json& present, const std::string& file) {
  if (std::getenv("W4Q_PRINT_FROZEN") != nullptr) std::cout << file << "\n" << present.dump(1) << "\n";
  const io::Json frozen = io::read_json(test::testdata() / "golden" / file);
  for (const auto& [scheme, ways] : frozen.items()) {
    ASSERT_TRUE(present.contains(scheme)) << scheme << " has vanished";
    for (const auto& [way, layouts] : ways.items()) {
      for (const auto& [layout, planes] : layouts.items()) {
        EXPECT_EQ(present[scheme][way][layout].dump(), planes.dump()) << scheme << " " << way << " " << layout;
      }
    }
  }
  EXPECT_EQ(present.size(), frozen.size()) << "a scheme without frozen bytes: add them";
}

TEST(Frozen, BytesOfEveryTableAndLayoutOfKbit) { expect_frozen(present_kbit(), "w4q_kbit.json"); }

TEST(Frozen, BytesOfEveryClipAndLayoutOfIntegers) { expect_frozen(present_int(), "w4q_int.json"); }

}  // namespace
}  // namespace w4q
