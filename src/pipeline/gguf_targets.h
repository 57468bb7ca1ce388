// What a GGUF file can be made as: one type for all matrices, or one of llama.cpp's mixes by the same name, which gives
// more bits to the matrices that its authors found to need them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/ggml_type.h"
#include "model/config.h"
#include "model/parameters.h"

namespace w4q::pipeline {

/// Where a matrix stands.
enum class GgufRole { embeddings, head, query, key, value, query_key_value, output, gate, up, down };

struct GgufPlace {
  GgufRole role = GgufRole::query;
  int64_t layer = 0, layers = 0;
  int64_t heads_per_value = 1;  ///< heads of queries that share one of values
  bool tied = false;            ///< embeddings: they are the head too
  bool calibrated = false;      ///< it is rounded with what calibration knows
};
/// `name`: of the tensor in the file.
GgufPlace gguf_place(const model::ModelConfig& config, const model::Parameter& parameter, std::string_view name,
                     bool calibrated);

/// A row of the table.
struct GgufTarget {
  std::string_view name;  ///< "gguf-q4_k_m"
  std::string_view description;
  uint32_t file_type = 0;  ///< general.file_type, which readers show
  GgmlType linear = GgmlType::f32;
  GgmlType head = GgmlType::f32;  ///< of the head, and of embeddings that are tied to it
  bool quantizes = true;
  bool lossless = false;  ///< every tensor in the type that holds it
};

std::span<const GgufTarget> gguf_targets() noexcept;
/// Throws bad_argument with all names.
const GgufTarget& gguf_target(const std::string& name);

/// The type of a matrix under a target, whatever its shape.
GgmlType gguf_type(const GgufTarget& target, const GgufPlace& place);
/// What takes the place of a type whose blocks do not fill rows of k weights: the next one with blocks of 32, F16 where
/// these do not fill them either.
GgmlType gguf_type_for_rows(GgmlType type, int64_t k);

}  // namespace w4q::pipeline
