// Canonical integer weights and their forms in dialects, for tests.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dialect/dialect.h"
#include "checkpoint/folder.h"
#include "core/float_formats.h"
#include "core/rng.h"
#include "formats/integer.h"
#include "io/checkpoint_writer.h"
#include "io/output.h"

namespace w4q::test {

/// A random weight: all codes and zeros occur, the ends too; scales are powers of two, so that every type holds them.
/// With act order, inputs belong to random groups.
inline formats::PackedWeight sample_integer(const formats::Scheme& scheme, int64_t n, int64_t k, uint64_t seed) {
  formats::PackedWeight weight = formats::allocate_integer(scheme, n, k);
  uint64_t draw = 0;
  const auto below = [&](uint64_t bound) { return random_bits(seed, draw++) % bound; };
  std::vector<uint8_t> codes(static_cast<size_t>(k));
  for (int64_t row = 0; row < n; ++row) {
    for (size_t col = 0; col < codes.size(); col += 8) {
      const uint64_t bits = random_bits(seed, draw++);
      for (size_t i = 0; i < 8 && col + i < codes.size(); ++i) {
        codes[col + i] = static_cast<uint8_t>(bits >> (8 * i) & ((1u << scheme.bits) - 1));
      }
    }
    formats::integer_write_codes(weight, row, codes);
  }
  auto& scales = weight.plane(formats::PlaneRole::scales);
  for (size_t i = 0; i < static_cast<size_t>(element_count(scales.spec.shape)); ++i) {
    const auto value = static_cast<float>(1.0 / static_cast<double>(16u << below(6)));
    if (scheme.scale == formats::ScaleType::f16) scales.bytes.as<uint16_t>()[i] = f16_from_f32(value);
    if (scheme.scale == formats::ScaleType::bf16) scales.bytes.as<uint16_t>()[i] = bf16_from_f32(value);
    if (scheme.scale == formats::ScaleType::f32) scales.bytes.as<float>()[i] = value;
  }
  if (scheme.asymmetric) {
    for (uint8_t& zero : weight.plane(formats::PlaneRole::zeros).bytes.as<uint8_t>()) {
      zero = static_cast<uint8_t>(below(1u << scheme.bits));
    }
  }
  if (scheme.act_order) {
    const auto groups = static_cast<uint64_t>(formats::integer_groups(scheme, k));
    for (int32_t& group : weight.plane(formats::PlaneRole::group_index).bytes.as<int32_t>()) {
      group = static_cast<int32_t>(below(groups));
    }
  }
  return weight;
}

/// Whether the target of a conversion holds weights of this scheme without rounding them anew.
inline bool keeps_codes(std::string_view target, const formats::Scheme& scheme, int64_t n, int64_t k) {
  for (const auto& row : checkpoint::dialect_registry()) {
    if (row.name != target) continue;
    const auto fit = row.fit({"w", n, k, DType::f16, {{scheme, std::string(formats::canonical_layout)}}});
    return fit.scheme && fit.loses.empty();
  }
  return true;
}

/// What a linear of a dialect is to its codec.
inline checkpoint::PackedLinearInfo dialect_info(const checkpoint::DialectRow& row, const formats::Scheme& scheme,
                                                 int64_t n, int64_t k) {
  checkpoint::PackedLinearInfo info{"w", n, k, DType::f16, {{scheme, std::string(formats::canonical_layout)}}};
  info.dialect = &row;
  for (const auto& spec : row.tensors(scheme, n, k)) info.stored.push_back({"w" + spec.suffix, spec.dtype, spec.shape});
  return info;
}

inline std::vector<formats::StoredTensor> clone(const std::vector<formats::StoredTensor>& tensors) {
  std::vector<formats::StoredTensor> copy;
  for (const auto& tensor : tensors) copy.push_back({tensor.spec, tensor.bytes.clone()});
  return copy;
}

/// Writes a checkpoint of nothing but these tensors, by name, in place of what was there.
inline void write_checkpoint(const std::filesystem::path& folder, const io::Json& config,
                             const std::vector<std::pair<std::string, formats::StoredTensor>>& tensors,
                             const io::WriteOptions& options = {}) {
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  std::vector<io::PlannedTensor> plan;
  for (const auto& [name, tensor] : tensors) plan.push_back({name, tensor.spec.dtype, tensor.spec.shape});
  io::CheckpointWriter writer(folder, plan, options);
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor.bytes.bytes());
  writer.finish();
  io::write_file(folder / "config.json", config.dump(2), true);
}

/// The config and all linears of a checkpoint.
inline checkpoint::QuantizationConfig read_quantization(const std::filesystem::path& folder) {
  return checkpoint::open_folder(folder).quantization;
}
inline formats::PackedWeight load_linear(const std::filesystem::path& folder, const std::string& name) {
  const auto opened = checkpoint::open_folder(folder);
  auto linear = checkpoint::load_canonical(opened.tensors, opened.quantization.linears.at(name));
  return std::move(linear.passes.front());
}

}  // namespace w4q::test
