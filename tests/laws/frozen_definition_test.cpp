// The definitions, frozen apart from the quantizers: what every scheme encodes to in every layout, what every dialect
// and GGUF type makes of it.
#include <cmath>
#include <limits>
#include <set>

#include "dialect_samples.h"
#include "formats/gguf_blocks.h"
#include "formats/integer_recast.h"
#include "laws/frozen.h"
#include "laws/registries.h"
#include "quantize/gguf.h"

namespace w4q {
namespace {

using formats::PackedWeight;
using formats::Scheme;
using formats::SchemeFamily;
using formats::StoredTensor;

/// The tables of a family by name; one without a name where a scheme has none.
std::vector<std::pair<std::string, std::vector<float>>> tables_of(const Scheme& scheme) {
  if (scheme.family == SchemeFamily::lut) {
    return {{"fp4", {formats::fp4_table().begin(), formats::fp4_table().end()}},
            {"nf4", {formats::nf4_table().begin(), formats::nf4_table().end()}}};
  }
  if (scheme.family != SchemeFamily::kbit) return {{"own", test::table_of(scheme)}};
  std::vector<std::pair<std::string, std::vector<float>>> tables;
  for (const auto& row : formats::codebook_registry()) {
    tables.emplace_back(row.name, formats::codebook(row.name, scheme.bits));
  }
  return tables;
}

std::string fingerprint_in(const repack::LayoutRow& layout, const PackedWeight& weight) {
  return test::hex(test::fingerprint(layout.pack(weight)));
}

/// Every table in the canonical layout, the first one in all that take the scheme.
void add_encodings(const Scheme& scheme, int64_t n, int64_t k, io::Json& json) {
  const auto tables = tables_of(scheme);
  for (const auto& [name, table] : tables) {
    const PackedWeight weight =
        formats::scheme_row(scheme.family).encode(scheme, test::frozen_input(n, k), n, k, table);
    for (const auto& layout : repack::layout_registry()) {
      const bool wanted = name == tables.front().first || layout.name == formats::canonical_layout;
      if (!wanted || !layout.accepts(scheme, n, k, nullptr)) continue;
      json[concat(to_string(scheme), " ", name, " ", n, "x", k, " ", layout.name)] = fingerprint_in(layout, weight);
    }
  }
}

/// Integers with all codes and zeros, and inputs that belong to random groups.
void add_samples(const Scheme& scheme, int64_t n, int64_t k, io::Json& json) {
  const PackedWeight weight = test::sample_integer(scheme, n, k, 2026);
  for (const auto& layout : repack::layout_registry()) {
    if (!layout.accepts(scheme, n, k, nullptr)) continue;
    json[concat(to_string(scheme), " sample ", n, "x", k, " ", layout.name)] = fingerprint_in(layout, weight);
  }
}

TEST(Frozen, EncodingOfEverySchemeAndLayout) {
  io::Json json;
  for (const Scheme& scheme : test::every_scheme()) {
    for (const auto& [n, k] : {std::pair{1, 31}, std::pair{130, 200}, std::pair{256, 256}}) {
      if (scheme.family == SchemeFamily::exl3 && n > 1) continue;  // its definition takes long
      add_encodings(scheme, n, k, json);
      if (scheme.family == SchemeFamily::integer) add_samples(scheme, n, k, json);
    }
  }
  test::expect_frozen(json, "w4q_encodings.json");
}

std::string fingerprint_of(const std::vector<StoredTensor>& tensors) {
  uint64_t hash = test::fingerprint(std::span<const std::byte>{});
  for (const auto& [spec, bytes] : tensors) {
    const std::string text = concat(spec.suffix, " ", dtype_name(spec.dtype), " ", shape_text(spec.shape));
    hash = test::fingerprint(bytes.bytes(), test::fingerprint(std::as_bytes(std::span(text)), hash));
  }
  return test::hex(hash);
}

/// The tensors of a weight in a dialect, values that it refuses bent; none where it has no place for the scheme.
std::vector<StoredTensor> held(const checkpoint::DialectRow& row, const PackedWeight& weight) {
  const auto fit = row.fit({"w", weight.n, weight.k, DType::f16, {{weight.scheme, weight.layout}}});
  if (!fit.scheme || !fit.loses.empty()) return {};
  const bool recasts = weight.scheme.family == SchemeFamily::integer;
  if (recasts && !formats::integer_recast_loss(weight, *fit.scheme).empty()) return {};
  PackedWeight recast = recasts ? formats::integer_recast(weight, *fit.scheme, "w") : weight.clone();
  if (row.refuses != nullptr && !row.refuses(recast).empty()) {
    if (row.bend == nullptr) return {};
    row.bend(recast);
  }
  return row.encode(recast);
}

/// Weights of a scheme that have everything a dialect may have to say: all codes and zeros, random groups.
std::vector<std::pair<std::string, PackedWeight>> samples_of(const Scheme& scheme, int64_t n, int64_t k) {
  std::vector<std::pair<std::string, PackedWeight>> samples;
  if (scheme.family == SchemeFamily::integer) {
    samples.emplace_back("sample", test::sample_integer(scheme, n, k, 2026));
    return samples;
  }
  for (const auto& [name, table] : tables_of(scheme)) {
    samples.emplace_back(name,
                         formats::scheme_row(scheme.family).encode(scheme, test::frozen_input(n, k), n, k, table));
  }
  return samples;
}

TEST(Frozen, TensorsOfEveryDialect) {
  io::Json json;
  std::set<std::string_view> written;
  for (const Scheme& scheme : test::every_scheme()) {
    const int64_t size = scheme.family == SchemeFamily::exl3 ? 128 : 256;
    for (const auto& [name, weight] : samples_of(scheme, size, size)) {
      for (const auto& row : checkpoint::dialect_registry()) {
        const auto tensors = held(row, weight);
        if (tensors.empty()) continue;
        written.insert(row.name);
        json[concat(row.name, " ", to_string(scheme), " ", name)] = fingerprint_of(tensors);
      }
    }
  }
  EXPECT_EQ(written.size(), checkpoint::dialect_registry().size()) << "a dialect holds none of these weights";
  test::expect_frozen(json, "w4q_dialects.json");
}

/// What drawn bytes decode to; which NaN comes of an infinite scale is the processor's choice.
std::string decoded_draw(const GgmlTypeRow& row) {
  constexpr size_t blocks = 64;
  std::vector<std::byte> bytes(blocks * static_cast<size_t>(row.block_bytes));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(random_bits(2026, i) >> 56);
  std::vector<float> values(blocks * static_cast<size_t>(row.block));
  formats::gguf_decode(row.type, bytes, values);
  for (float& value : values) {
    if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
  }
  return test::hex(test::fingerprint(std::as_bytes(std::span(values))));
}

std::string encoded_input(const GgmlTypeRow& row) {
  const std::vector<float> values = test::frozen_input(16, 256);
  std::vector<std::byte> blocks(values.size() / static_cast<size_t>(row.block) * static_cast<size_t>(row.block_bytes));
  formats::gguf_encode(row.type, values, blocks);
  return test::hex(test::fingerprint(blocks));
}

/// With scales that are searched, each weight rounded by itself.
std::string searched_input(const formats::GgufForm& form) {
  const std::vector<float> values = test::frozen_input(16, 256);
  const TensorView view{"w", DType::f32, {16, 256}, bytes_of(values)};
  return test::hex(test::fingerprint(quantize::gguf_blocks(view, form, nullptr).bytes()));
}

TEST(Frozen, BlocksOfEveryGgufType) {
  io::Json json;
  for (const auto* row : test::every_gguf_type()) {
    if (formats::gguf_encodes(row->type)) json[std::string(row->name)] = encoded_input(*row);
    if (formats::gguf_decodes(row->type)) json[concat("decoded-", row->name)] = decoded_draw(*row);
    const auto* form = formats::find_gguf_form(row->type);
    if (form != nullptr) json[concat("searched-", row->name)] = searched_input(*form);
  }
  test::expect_frozen(json, "w4q_gguf.json");
}

}  // namespace
}  // namespace w4q
