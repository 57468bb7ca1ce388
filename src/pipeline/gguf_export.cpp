#include "pipeline/gguf_export.h"

#include <algorithm>
#include <functional>

#include "checkpoint/digests.h"
#include "core/convert.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/gguf_blocks.h"
#include "formats/scheme_registry.h"
#include "gguf/config.h"
#include "gguf/rotary_rows.h"
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
  if (!tensor.is_part()) return tensor.name;
  return concat(model::module_path(tensor.name), ".", tensor.parameter.gguf_part, ".weight");
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
                              tensor.parameter.shape,
                              stored_bytes(plan, tensor),
                              gguf_bytes(tensor.type, tensor.parameter.shape),
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

/// The row of the checkpoint that stands at a row of the GGUF file.
using RowOrder = std::function<int64_t(int64_t row)>;

RowSource plain_rows(const TensorView& view, int64_t rows, int64_t k, GgmlType type, const RowOrder& order) {
  const auto row_bytes = static_cast<size_t>(k * dtype_bits(view.dtype) / 8);
  const auto bytes_of_row = [view, order, row_bytes](int64_t row) {
    return view.bytes.subspan(static_cast<size_t>(order(row)) * row_bytes, row_bytes);
  };
  RowSource source{rows, k, {}, {}};
  if (ggml_type_name(type) == dtype_name(view.dtype)) {
    source.copy = [bytes_of_row](int64_t row, std::span<std::byte> out) {
      std::ranges::copy(bytes_of_row(row), out.begin());
    };
  } else {
    source.read = [bytes_of_row, view](int64_t row, std::span<float> values) {
      widen(bytes_of_row(row), view.dtype, values);
    };
  }
  return source;
}

/// A vector with `offset` added to each value.
RowSource added(const TensorView& vector, RowSource plain, float offset) {
  plain.copy = {};
  plain.read = [vector, offset](int64_t, std::span<float> values) {
    widen(vector.bytes, vector.dtype, values);
    for (float& value : values) value += offset;
  };
  return plain;
}

RowSource packed_rows(const formats::PackedLinear& linear, const ExportedTensor& tensor, const RowOrder& order) {
  const auto& first = linear.passes.front();
  RowSource source{first.n, first.k, {}, {}};
  source.read = [&linear, order](int64_t row, std::span<float> values) {
    formats::decode_linear_row(linear, order(row), values);
  };
  if (tensor.keeps_codes) {
    source.copy = [&first, order, type = tensor.type](int64_t row, std::span<std::byte> blocks) {
      pack_gguf_row(first, order(row), type, blocks);
    };
  }
  return source;
}

/// Rows that were rounded together, in the order of the checkpoint.
RowSource block_rows(const Buffer& blocks, RowSource plain, const RowOrder& order) {
  const size_t row_bytes = blocks.size() / static_cast<size_t>(plain.rows);
  plain.copy = [&blocks, order, row_bytes](int64_t row, std::span<std::byte> out) {
    std::ranges::copy(blocks.bytes().subspan(static_cast<size_t>(order(row)) * row_bytes, row_bytes), out.begin());
  };
  return plain;
}

ConversionError write_tensor(const ExportPlan& plan, const ExportedTensor& tensor, GgufCalibration* calibration,
                             io::GgufWriter& writer) {
  const auto write = [&](std::span<const std::byte> chunk) { writer.append(tensor.name, chunk); };
  const RowOrder order = [rotary = tensor.rotary, head_dim = plan.model.config.head_dim](int64_t row) {
    return rotary ? gguf::rotary_row_from_gguf(row, head_dim) : row;
  };
  const std::string& name = tensor.parameter.name;
  if (tensor.packed != nullptr) {
    const auto linear = checkpoint::load_canonical(plan.model.folder.tensors, *tensor.packed);
    return convert_rows(name, packed_rows(linear, tensor, order), sink_of(tensor.type, tensor.packed->k), write);
  }
  const Shape& shape = tensor.parameter.shape;
  // A vector whose elements change places is a matrix of one column.
  const int64_t k = shape.size() == 1 && tensor.rotary ? 1 : shape.back(), rows = element_count(shape) / k;
  const auto loaded = plan.model.folder.tensors.load(name);
  RowSource source = plain_rows(loaded.view(), rows, k, tensor.type, order);
  if (tensor.parameter.gguf_offset != 0) source = added(loaded.view(), std::move(source), tensor.parameter.gguf_offset);
  Buffer blocks;
  if (tensor.form != nullptr) {
    std::optional<quantize::CalibratedInput> input;
    if (calibration != nullptr) input = calibration->input(model::module_path(name), tensor.form->block);
    blocks = quantize::gguf_blocks(loaded.view(), *tensor.form, input ? &*input : nullptr);
    source = block_rows(blocks, std::move(source), order);
  }
  return convert_rows(name, source, sink_of(tensor.type, k), write);
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

ConversionReport plan_gguf_export(const GgufExportRequest& request) { return make_report(*plan_export(request)); }

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
  if (!plan.rope_factors.empty()) writer.append(gguf::rope_factors_tensor, bytes_of(plan.rope_factors));
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
