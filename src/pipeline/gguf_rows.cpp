#include "pipeline/gguf_rows.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <set>

#include "core/buffer.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/measure.h"
#include "core/parallel.h"
#include "core/text.h"

namespace w4q::pipeline {
namespace {

/// Enough for all threads, little enough for the cache and the memory.
constexpr int64_t chunk_elements = 1 << 22;
constexpr int64_t elements_per_task = 1 << 14;

std::string scientific(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2e", value);
  return text.data();
}

void check_row(std::string_view name, int64_t row, std::span<const float> values, float largest) {
  if (all_within(values, largest)) return;
  for (size_t col = 0; col < values.size(); ++col) {
    if (std::abs(values[col]) <= largest) continue;
    const std::string place = concat("row ", row, ", column ", col, ": ", values[col]);
    if (!std::isfinite(values[col])) {
      throw Error(ErrorCode::bad_file, concat(printable(name), ": a value is not finite")).detail(place);
    }
    throw Error(ErrorCode::unsupported, concat(printable(name), ": a value is too large for the type to write"))
        .detail(concat(place, "; the largest is ", largest))
        .hint("choose a type with a wider range: BF16 or F32");
  }
}

void add(const ConversionError& more, ConversionError& error) {
  error.squared += more.squared;
  error.squared_error += more.squared_error;
  error.changed += more.changed;
}

/// Rows [begin, end) into `out`.
ConversionError convert_range(std::string_view name, const RowSource& source, const RowSink& sink, int64_t begin,
                              int64_t end, std::span<std::byte> out) {
  ConversionError error;
  std::vector<float> values(static_cast<size_t>(source.k)), stored(values.size());
  for (int64_t row = begin; row < end; ++row) {
    const auto bytes = out.subspan(static_cast<size_t>(row - begin) * sink.row_bytes, sink.row_bytes);
    if (source.copy) source.copy(row, bytes);
    if (!source.read) continue;
    source.read(row, values);
    if (!source.copy) {
      check_row(name, row, values, sink.largest);
      sink.encode(values, bytes);
    }
    sink.decode(bytes, stored);
    const Difference found = difference_of(values, stored);
    add({found.squared_error, found.squared, found.changed}, error);
  }
  return error;
}

std::string error_text(const ConversionError& error, bool done) {
  if (!done) return "";
  return error.changed == 0 ? "exact" : scientific(error.relative());
}

std::string kinds_text(const ConversionReport& report) {
  TextTable table({"tensors", "count", "shape", "from", "to", "before", "after", "error", "worst"});
  for (const auto& kind : model::by_kind(report.tensors)) {
    std::set<std::string> shapes, from, to;
    int64_t before = 0, after = 0;
    ConversionError error, worst;
    for (const ConvertedTensor* tensor : kind.rows) {
      shapes.insert(shape_text(tensor->shape));
      from.insert(tensor->from);
      to.insert(tensor->to);
      before += tensor->bytes_before;
      after += tensor->bytes_after;
      add(tensor->error, error);
      if (tensor->error.changed > 0 && tensor->error.relative() >= worst.relative()) worst = tensor->error;
    }
    table.row({printable(kind.name), concat(kind.rows.size()), model::words_text(shapes), model::words_text(from),
               model::words_text(to), human_bytes(before), human_bytes(after), error_text(error, report.done),
               error_text(worst, report.done)});
  }
  return table.str();
}

std::string tensors_text(const ConversionReport& report) {
  TextTable table({"tensor", "shape", "from", "to", "before", "after", "error"});
  for (const auto& tensor : report.tensors) {
    table.row({printable(tensor.name), shape_text(tensor.shape), tensor.from, tensor.to,
               human_bytes(tensor.bytes_before), human_bytes(tensor.bytes_after),
               error_text(tensor.error, report.done)});
  }
  return table.str();
}

}  // namespace

double ConversionError::relative() const noexcept { return squared == 0 ? 0 : std::sqrt(squared_error / squared); }

io::Json to_record(const ConversionError& error) { return {error.squared_error, error.squared, error.changed}; }

ConversionError conversion_error(const io::Json& record) {
  const auto number = [](const io::Json& value) { return value.is_null() ? NAN : value.get<double>(); };
  return {number(record.at(0)), number(record.at(1)), record.at(2)};
}

ConversionError convert_rows(std::string_view name, const RowSource& source, const RowSink& sink,
                             const std::function<void(std::span<const std::byte>)>& write) {
  ConversionError total;
  const int64_t rows_per_chunk = std::max<int64_t>(1, chunk_elements / std::max<int64_t>(1, source.k));
  const int64_t rows_per_task = std::max<int64_t>(1, elements_per_task / std::max<int64_t>(1, source.k));
  Buffer chunk(static_cast<size_t>(std::min(rows_per_chunk, source.rows)) * sink.row_bytes);
  for (int64_t first = 0; first < source.rows; first += rows_per_chunk) {
    check_interrupt();
    const int64_t count = std::min(rows_per_chunk, source.rows - first);
    std::vector<ConversionError> errors(static_cast<size_t>((count + rows_per_task - 1) / rows_per_task));
    parallel_for(count, rows_per_task, [&](int64_t begin, int64_t end) {
      const auto out = chunk.bytes().subspan(static_cast<size_t>(begin) * sink.row_bytes);
      errors[static_cast<size_t>(begin / rows_per_task)] =
          convert_range(name, source, sink, first + begin, first + end, out);
    });
    for (const auto& error : errors) add(error, total);  // in one order, whatever the threads
    write(chunk.bytes().first(static_cast<size_t>(count) * sink.row_bytes));
  }
  return total;
}

std::string to_text(const ConversionReport& report, model::Detail detail) {
  int64_t before = 0, after = 0, exact = 0;
  for (const auto& tensor : report.tensors) {
    before += tensor.bytes_before;
    after += tensor.bytes_after;
    exact += tensor.error.changed == 0;
  }
  std::string text =
      concat(model::names_all(detail, report.tensors.size()) ? tensors_text(report) : kinds_text(report), "\n",
             report.tensors.size(), " tensors, ", human_bytes(before), " → ", human_bytes(after), "\n");
  for (const auto& note : report.notes) text += "note: " + note + "\n";
  if (report.done) {
    text += concat(exact, " of ", report.tensors.size(),
                   " tensors hold the same values, for the others the relative error is shown; ",
                   human_bytes(report.file_bytes), " written in ", human_seconds(report.seconds), "\n");
  }
  return text;
}

io::Json to_json(const ConversionReport& report) {
  io::Json tensors = io::Json::array();
  for (const auto& tensor : report.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"from", tensor.from},
                       {"to", tensor.to},
                       {"shape", tensor.shape},
                       {"bytes_before", tensor.bytes_before},
                       {"bytes_after", tensor.bytes_after}});
    if (!report.done) continue;
    tensors.back()["values_changed"] = tensor.error.changed;
    tensors.back()["relative_error"] = tensor.error.relative();
  }
  io::Json json = {{"tensors", std::move(tensors)}, {"notes", report.notes}};
  if (report.done) json["file_bytes"] = report.file_bytes;
  if (report.done) json["seconds"] = report.seconds;
  return json;
}

}  // namespace w4q::pipeline
