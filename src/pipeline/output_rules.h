// What the commands that write a checkpoint share: when a folder may be replaced, and how config.json travels.
#pragma once

#include <filesystem>
#include <string_view>

#include "io/json.h"
#include "model/packed_checkpoint.h"

namespace w4q::pipeline {

/// A key of config.json, or of its quantization_config, with the value "w4q": it marks a folder that w4q made out of
/// another format, or for a dialect.
inline constexpr std::string_view conversion_mark = "converted_by";

/// True for an empty folder and for one that w4q wrote: only those may be replaced.
bool is_replaceable_output(const std::filesystem::path& folder);

/// Copies everything but the weights from `from` to `to` and writes `config` as config.json. Left out are the files
/// that repeat an old quantization_config.
void carry_companions(const std::filesystem::path& from, const std::filesystem::path& to, const io::Json& config);
/// The same with the new quantization_config.
void carry_companions(const std::filesystem::path& from, const std::filesystem::path& to, io::Json config,
                      const model::QuantizationConfig& quantization);

}  // namespace w4q::pipeline
