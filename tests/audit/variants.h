// The sound folders that faults are seeded into: every scheme in every layout that takes it, every dialect with every
// scheme that it holds without loss, and what quantizing can do beyond: several passes, folded and searched scales,
// folded rotations, shards, other architectures.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "pipeline/quantize_model.h"

namespace w4q::audit {

struct VariantRow {
  std::string name;              ///< "kbit4-b32-e4m4 marlin", "gptq-v1 int4-g128-f16", "folded"
  std::string source = "llama";  ///< of which 16-bit model (sources.h)
  /// Makes `out` of the 16-bit model `source`. Throws what the pipeline throws.
  std::function<void(const std::filesystem::path& source, const std::filesystem::path& out)> make;
};

/// In the order of the registries.
std::vector<VariantRow> every_variant();

/// Sound folders beyond these: weights of every kind in every scheme and in the ways of quantizing, and models of very
/// small matrices.
std::vector<VariantRow> every_clean_variant();

/// Rounds to nearest, or takes what encodes by definition where no quantizer takes the scheme. Linears that `layout`
/// does not take stay in 16 bit.
void write_packed(const std::filesystem::path& source, const std::filesystem::path& out, const formats::Scheme& scheme,
                  std::string_view layout);

}  // namespace w4q::audit
