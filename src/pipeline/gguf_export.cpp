#include "pipeline/gguf_export.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <vector>

#include "checkpoint/digests.h"
#include "core/convert.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/gguf_blocks.h"
#include "formats/scheme_registry.h"
#include "gguf/config.h"
#include "gguf/tensor_map.h"
#include "io/gguf_writer.h"
#include "io/output.h"
#include "io/system.h"
#include "pipeline/gguf_export_plan.h"
#include "pipeline/gguf_packed.h"
#include "quantize/gguf.h"

namespace w4q::pipeline {
namespace {

/// "blk.0.ffn_up_exps.3.weight": of a part, with its number.
std::string shown_name(const ExportedTensor& tensor) {
  if (!tensor.is_part()) return tensor.name();
  return concat(model::module_path(tensor.name()), ".", tensor.file.part, ".weight");
}

ConversionReport make_report(const ExportPlan& plan) {
  ConversionReport report;
  for (const auto& tensor : plan.tensors) {
    const std::string from = tensor.packed == nullptr
                                 ? std::string(dtype_name(plan.model.folder.tensors.at(tensor.parameter.name).dtype))
                                 : formats::to_string(tensor.packed->passes.front().scheme);
    report.tensors.push_back({shown_name(tensor),
                              from,
                              std::string(ggml_type_name(tensor.type)),
                              tensor.file.shape,
                              stored_bytes(plan, tensor),
                              gguf_bytes(tensor.type, tensor.file.shape),
                              {}});
  }
  report.notes = plan.notes;
  return report;
}

// ---- rows, in the order of the file that is written -----------------------------------------------------------------

RowSink sink_of(GgmlType type, int64_t k) {
  return {
      static_cast<uint64_t>(gguf_bytes(type, {k})), formats::gguf_largest(type),
      [type](std::span<const float> values, std::span<std::byte> bytes) { formats::gguf_encode(type, values, bytes); },
      [type](std::span<const std::byte> bytes, std::span<float> values) { formats::gguf_decode(type, bytes, values); }};
}

/// Reads rows of a matrix in the order of the file, as it has them. `read`: a row of the matrix, all of it.
RowSource ordered_rows(const gguf::FilePart& file, int64_t k,
                       std::function<void(int64_t row, std::span<float> values)> read) {
  RowSource source{file.rows.size(), file.columns.size(), {}, {}};
  const bool all = file.columns.is_plain(k);
  source.read = [file, k, all, read = std::move(read)](int64_t row, std::span<float> values) {
    std::vector<float> whole(all ? 0 : static_cast<size_t>(k));
    read(file.rows(row), all ? values : std::span<float>(whole));
    for (size_t i = 0; i < values.size() && !all; ++i) {
      values[i] = whole[static_cast<size_t>(file.columns(static_cast<int64_t>(i)))];
    }
    if (!file.changes_values()) return;
    for (float& value : values) value = file.to_file(value);
  };
  return source;
}

RowSource plain_rows(const TensorView& view, const gguf::FilePart& file, int64_t k, GgmlType type) {
  const auto row_bytes = static_cast<size_t>(k * dtype_bits(view.dtype) / 8);
  const auto bytes_of_row = [view, row_bytes](int64_t row) {
    return view.bytes.subspan(static_cast<size_t>(row) * row_bytes, row_bytes);
  };
  const bool same = ggml_type_name(type) == dtype_name(view.dtype) && file.columns.is_plain(k);
  if (same && !file.changes_values()) {
    RowSource source{file.rows.size(), k, {}, {}};
    source.copy = [file, bytes_of_row](int64_t row, std::span<std::byte> out) {
      std::ranges::copy(bytes_of_row(file.rows(row)), out.begin());
    };
    return source;
  }
  return ordered_rows(file, k, [view, bytes_of_row](int64_t row, std::span<float> values) {
    widen(bytes_of_row(row), view.dtype, values);
  });
}

/// Blocks of a row in another order.
void order_blocks(const gguf::Order& order, size_t block_bytes, std::span<std::byte> row) {
  const std::vector<std::byte> from(row.begin(), row.end());
  for (int64_t i = 0; i < order.size(); ++i) {
    std::copy_n(from.data() + static_cast<size_t>(order(i)) * block_bytes, block_bytes,
                row.data() + static_cast<size_t>(i) * block_bytes);
  }
}

RowSource packed_rows(const formats::PackedLinear& linear, const ExportedTensor& tensor) {
  const auto& first = linear.passes.front();
  const gguf::FilePart& file = tensor.file;
  RowSource source = ordered_rows(file, first.k, [&linear](int64_t row, std::span<float> values) {
    formats::decode_linear_row(linear, row, values);
  });
  if (!tensor.keeps_codes) return source;
  const auto& type = describe(tensor.type);
  const auto order = file.columns.is_plain(first.k) ? std::nullopt : file.columns.blocks(type.block);
  source.copy = [&first, file, order, &type, ggml = tensor.type](int64_t row, std::span<std::byte> blocks) {
    pack_gguf_row(first, file.rows(row), ggml, blocks);
    if (order) order_blocks(*order, static_cast<size_t>(type.block_bytes), blocks);
  };
  return source;
}

/// What of a tensor stands in the file, as it stands there, in the type that it has.
Buffer gathered(const TensorView& view, const ExportedTensor& tensor) {
  const auto [n, k] = gguf::matrix_size(view.shape);
  const gguf::FilePart& file = tensor.file;
  const auto width = static_cast<size_t>(dtype_bits(view.dtype) / 8);
  const auto rows = static_cast<size_t>(file.rows.size()), columns = static_cast<size_t>(file.columns.size());
  Buffer result(rows * columns * width);
  for (size_t row = 0; row < rows; ++row) {
    const auto from = static_cast<size_t>(file.rows(static_cast<int64_t>(row)) * k);
    for (size_t col = 0; col < columns; ++col) {
      const size_t at = from + static_cast<size_t>(file.columns(static_cast<int64_t>(col)));
      std::memcpy(result.data() + (row * columns + col) * width, view.bytes.data() + at * width, width);
    }
  }
  return result;
}

/// Blocks of searched scales.
Buffer searched_blocks(const TensorView& whole, const ExportedTensor& tensor, GgufCalibration* calibration) {
  std::optional<quantize::CalibratedInput> input;
  if (calibration != nullptr) {
    input = calibration->input(model::module_path(tensor.parameter.name), tensor.form->block, tensor.file.columns);
  }
  if (tensor.is_plain()) return quantize::gguf_blocks(whole, *tensor.form, input ? &*input : nullptr);
  const Buffer values = gathered(whole, tensor);
  const TensorView view{whole.name, whole.dtype, {tensor.file.rows.size(), tensor.file.columns.size()}, values.bytes()};
  return quantize::gguf_blocks(view, *tensor.form, input ? &*input : nullptr);
}

ConversionError write_tensor(const ExportPlan& plan, const ExportedTensor& tensor, GgufCalibration* calibration,
                             io::GgufWriter& writer) {
  const auto write = [&](std::span<const std::byte> chunk) { writer.append(tensor.name(), chunk); };
  const std::string& name = tensor.parameter.name;
  const RowSink sink = sink_of(tensor.type, tensor.file.columns.size());
  if (tensor.packed != nullptr) {
    const auto linear = checkpoint::load_canonical(plan.model.folder.tensors, *tensor.packed);
    return convert_rows(name, packed_rows(linear, tensor), sink, write);
  }
  const auto loaded = plan.model.folder.tensors.load(name);
  RowSource source =
      plain_rows(loaded.view(), tensor.file, gguf::matrix_size(tensor.parameter.shape).columns, tensor.type);
  if (tensor.form == nullptr) return convert_rows(name, source, sink, write);
  const Buffer blocks = searched_blocks(loaded.view(), tensor, calibration);
  source.copy = [&blocks, bytes = static_cast<size_t>(sink.row_bytes)](int64_t row, std::span<std::byte> out) {
    std::ranges::copy(blocks.bytes().subspan(static_cast<size_t>(row) * bytes, bytes), out.begin());
  };
  return convert_rows(name, source, sink, write);
}

/// The digests stand in a file beside, since what readers take as metadata is not theirs. Written before and renamed
/// behind the file that it is about, of whose predecessor nothing is left then.
void commit(io::GgufWriter& writer, const ExportPlan& plan, const std::filesystem::path& output) {
  const auto place = checkpoint::digests_path(output);
  const std::string text = checkpoint::digests_text({.tensors = writer.digests(),
                                                     .config = checkpoint::digest_metadata(writer.header().metadata),
                                                     .bases = checkpoint::bases_through(plan.model.folder)});
  io::OutputFile beside(place, true);
  io::write_all(beside.descriptor(), std::as_bytes(std::span(text)), 0, place);
  std::error_code missing;
  std::filesystem::remove(place, missing);
  writer.commit();
  beside.commit();
}

}  // namespace

ConversionReport plan_gguf_export(const GgufExportRequest& request) {
  const auto plan = plan_export(request);
  ConversionReport report = make_report(*plan);
  if (!request.calibration || plan->calibration != nullptr) return report;  // what has calibrated says with what
  const auto text = fitted(request.calibration->source.text, plan->model.config);
  if (text.is_cut) report.notes.push_back(describe_self(text));
  return report;
}

serving::StoredModel planned_headers(const GgufExportRequest& request) {
  GgufExportRequest uncalibrated = request;
  uncalibrated.calibration.reset(), uncalibrated.bytes = 0;
  const auto plan = plan_export(uncalibrated);
  return serving::StoredModel::planned(io::layout_gguf(planned_tensors(*plan), plan->metadata));
}

ConversionReport export_gguf(const GgufExportRequest& request) {
  const Stopwatch watch;
  io::check_writable(request.output, request.overwrite, {request.input});  // before work that may take long
  const auto planned = plan_export(request);
  ExportPlan& plan = *planned;
  checkpoint::check_digests(request.input, plan.model.folder.tensors);
  ConversionReport report = make_report(plan);
  io::GgufWriter writer(request.output, planned_tensors(plan), plan.metadata, request.overwrite, {request.input});
  if (request.calibration && plan.calibration == nullptr) {
    plan.calibration = std::make_unique<GgufCalibration>(*request.calibration, plan.model, request.output);
  }
  int64_t total = 0;
  for (const auto& tensor : report.tensors) total += tensor.bytes_before;
  Progress progress("export", total, "bytes");
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    report.tensors[i].error = write_tensor(plan, plan.tensors[i], plan.calibration.get(), writer);
    progress.advance(report.tensors[i].bytes_before);
  }
  for (const auto& [name, values] : plan.rope_factors) writer.append(name, bytes_of(values));
  commit(writer, plan, request.output);
  if (plan.calibration != nullptr) {
    const auto& notes = plan.calibration->notes();
    report.notes.insert(report.notes.end(), notes.begin(), notes.end());
  }
  report.done = true;
  report.file_bytes = static_cast<int64_t>(writer.header().file_size());
  report.seconds = watch.seconds();
  return report;
}

}  // namespace w4q::pipeline
