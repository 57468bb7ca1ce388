// What reading and writing GGUF files share: rows of one tensor go from one type to another, and what that cost.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/views.h"
#include "io/json.h"
#include "model/kinds.h"

namespace w4q::pipeline {

/// Where the rows of a tensor come from, in the order of the file to write. Called from any thread.
struct RowSource {
  int64_t rows = 0;
  int64_t k = 0;
  /// The values of a row. May be empty where `copy` is not.
  std::function<void(int64_t row, std::span<float> values)> read;
  /// Writes a row as it is to be stored, nothing rounded. Empty: `read` and RowSink::encode do. With both, what is
  /// stored is decoded again and compared.
  std::function<void(int64_t row, std::span<std::byte> bytes)> copy;
};

/// How a row is stored. `decode` is the inverse of `encode` but for rounding.
struct RowSink {
  uint64_t row_bytes = 0;
  float largest = 0;  ///< the largest magnitude that can be stored
  std::function<void(std::span<const float> values, std::span<std::byte> bytes)> encode;
  std::function<void(std::span<const std::byte> bytes, std::span<float> values)> decode;
};

/// What storing did to the values.
struct ConversionError {
  double squared_error = 0, squared = 0;
  int64_t changed = 0;  ///< values that did not come back exactly

  /// sqrt(Σ(x − x̂)² / Σx²).
  double relative() const noexcept;
};

/// As it travels between ranks and stands in the journal. Numbers come back as they were, but for infinite ones, which come
/// back as NaN.
io::Json to_record(const ConversionError& error);
ConversionError conversion_error(const io::Json& record);

/// Converts all rows, a chunk at a time, and hands the chunks to `write` in order. Throws bad_file for NaN and Inf and
/// unsupported for values above `sink.largest`, naming `name` and the place.
ConversionError convert_rows(std::string_view name, const RowSource& source, const RowSink& sink,
                             const std::function<void(std::span<const std::byte>)>& write);

/// One tensor of a report.
struct ConvertedTensor {
  std::string name;  ///< in the file that is written
  std::string from, to;
  Shape shape;
  int64_t bytes_before = 0, bytes_after = 0;
  ConversionError error;
};

/// What importing and exporting tell the user; of a dry run, without errors and times.
struct ConversionReport {
  std::vector<ConvertedTensor> tensors;
  std::vector<std::string> notes;
  bool done = false;
  int64_t file_bytes = 0;
  double seconds = 0;
};

std::string to_text(const ConversionReport& report, model::Detail detail = model::Detail::kinds);
io::Json to_json(const ConversionReport& report);

/// Parts of one tensor of a GGUF file, as `whole` tells them, follow each other in the place of the first.
template <class Part, class Whole>
void gather_parts(std::vector<Part>& parts, Whole whole) {
  std::map<std::decay_t<std::invoke_result_t<Whole, const Part&>>, size_t> places;
  for (const Part& part : parts) places.try_emplace(std::invoke(whole, part), places.size());
  std::ranges::stable_sort(parts, {}, [&](const Part& part) { return places.at(std::invoke(whole, part)); });
}

}  // namespace w4q::pipeline
