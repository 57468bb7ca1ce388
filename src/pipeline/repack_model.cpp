#include "pipeline/repack_model.h"

#include <algorithm>
#include <set>

#include "checkpoint/folder.h"
#include "core/error.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "io/output.h"
#include "pipeline/output_rules.h"
#include "pipeline/shared_output.h"
#include "repack/layout_registry.h"

namespace w4q::pipeline {
namespace {

using formats::PackedWeight;

const repack::LayoutRow& choose_layout(const RepackRequest& request, const checkpoint::PackedLinearInfo& info,
                                       const formats::Scheme& scheme) {
  if (!request.target.empty()) return repack::layout_for_target(request.target, scheme, info.n, info.k);
  const auto& row = repack::layout_row(request.layout);
  std::string why;
  if (!row.accepts(scheme, info.n, info.k, &why)) {
    throw Error(ErrorCode::unsupported, concat(printable(info.name), ": ", why))
        .detail(concat("needed by layout ", row.name))
        .hint("--target picks a layout that fits, tensor by tensor");
  }
  return row;
}

checkpoint::QuantizationConfig new_quantization(const checkpoint::Folder& source, const RepackRequest& request) {
  checkpoint::QuantizationConfig result = source.quantization;
  result.dialect = nullptr;
  for (auto& [name, info] : result.linears) {
    info.dialect = nullptr;
    for (auto& pass : info.passes) pass.layout = choose_layout(request, info, pass.scheme).name;
  }
  return result;
}

/// Tensor names of all planes of the stored checkpoint.
std::set<std::string> plane_names(const checkpoint::QuantizationConfig& quantization) {
  std::set<std::string> result;
  for (const auto& [name, info] : quantization.linears) {
    for (auto& plane : checkpoint::planned_planes(info)) result.insert(std::move(plane.name));
  }
  return result;
}

Plan make_plan(const checkpoint::Folder& source, const checkpoint::QuantizationConfig& after) {
  Plan plan;
  int64_t largest = 0;
  for (const auto& [name, info] : after.linears) {
    TensorPlan tensor{.name = name,
                      .dtype = info.source_dtype,
                      .shape = {info.n, info.k},
                      .scheme = info.passes.front().scheme,
                      .layout = info.passes.front().layout,
                      .bytes_before = checkpoint::stored_bytes(source.quantization.linears.at(name)),
                      .bytes_after = checkpoint::stored_bytes(info)};
    tensor.residual.assign(info.passes.begin() + 1, info.passes.end());
    // Stored, canonical, packed, and unpacked again for the proof.
    largest = std::max(largest, 2 * (tensor.bytes_before + tensor.bytes_after));
    plan.tensors.push_back(std::move(tensor));
  }
  const auto planes = plane_names(source.quantization);
  for (const auto& [name, info] : source.tensors.tensors()) {
    if (planes.contains(name)) continue;
    const auto size = static_cast<int64_t>(info.size());
    plan.tensors.push_back({.name = name,
                            .dtype = info.dtype,
                            .shape = info.shape,
                            .scheme = {},
                            .layout = {},
                            .bytes_before = size,
                            .bytes_after = size});
  }
  plan.expected_memory = base_memory + largest;
  plan.notes = source.quantization.notes;
  for (const auto& warning : source.tensors.warnings()) plan.notes.push_back(warning);
  return plan;
}

/// LayoutRow::pack and unpack on the chosen device; on the CPU for layouts without a pass on the GPU.
PackedWeight pack(const repack::LayoutRow& row, const PackedWeight& canonical, device::Context* gpu) {
  return gpu != nullptr && row.pack_cuda != nullptr ? row.pack_cuda(canonical, *gpu) : row.pack(canonical);
}
PackedWeight unpack(const repack::LayoutRow& row, const PackedWeight& packed, const std::string& name,
                    device::Context* gpu) {
  return gpu != nullptr && row.unpack_cuda != nullptr ? row.unpack_cuda(packed, name, *gpu) : row.unpack(packed, name);
}

/// The whole trip of one pass: stored → canonical → new layout, and back again for the proof, which is the
/// CPU's whatever packed.
PackedWeight repack_pass(const PackedWeight& stored, const std::string& layout, const std::string& name,
                         device::Context* gpu) {
  const PackedWeight canonical = unpack(repack::layout_row(stored.layout), stored, name, gpu);
  formats::scheme_row(canonical.scheme.family).validate(canonical, name);
  const auto& row = repack::layout_row(layout);
  PackedWeight packed = pack(row, canonical, gpu);
  ensure(formats::bytes_equal(row.unpack(packed, name), canonical), name + ": unpack(pack(w)) differs from w");
  return packed;
}

/// Writes a linear as `after` says; returns how many passes were proven.
int64_t repack_linear(const checkpoint::Folder& source, const checkpoint::PackedLinearInfo& after, device::Context* gpu,
                      io::CheckpointWriter& writer) {
  const auto& before = source.quantization.linears.at(after.name);
  const auto stored = checkpoint::load_packed(source.tensors, before);
  if (before.input_scale) writer.write(checkpoint::input_scale_name(after.name), bytes_of(stored.input_scale));
  for (size_t pass = 0; pass < after.passes.size(); ++pass) {
    const auto packed = repack_pass(stored.passes[pass], after.passes[pass].layout, after.name, gpu);
    for (const auto& plane : packed.planes) {
      writer.write(checkpoint::plane_name(after.name, pass, plane.spec.role), plane.bytes.bytes());
    }
  }
  return static_cast<int64_t>(after.passes.size());
}

std::vector<io::PlannedTensor> planned_of(const TensorPlan& tensor,
                                          const checkpoint::QuantizationConfig& quantization) {
  if (!tensor.scheme) return {{tensor.name, tensor.dtype, tensor.shape}};
  return checkpoint::planned_planes(quantization.linears.at(tensor.name));
}

}  // namespace

Plan plan_repack(const RepackRequest& request) {
  const checkpoint::Folder source = checkpoint::open_packed_folder(request.input);
  Plan plan = make_plan(source, new_quantization(source, request));
  // Each packed byte is read and written about four times; one core moves several gigabytes a second.
  constexpr double seconds_per_byte = 4 / 3e9;
  for (const auto& tensor : plan.tensors) {
    if (tensor.scheme) plan.expected_seconds += seconds_per_byte * static_cast<double>(tensor.bytes_before);
  }
  return plan;
}

RepackReport repack_model(const RepackRequest& request) {
  const Stopwatch watch;
  const checkpoint::Folder source = checkpoint::open_packed_folder(request.input);
  checkpoint::check_digests(request.input, source.tensors);
  const auto quantization = new_quantization(source, request);
  RepackReport report;
  report.plan = make_plan(source, quantization);

  std::vector<io::PlannedTensor> planned;
  std::vector<WorkUnit> units;
  for (const auto& tensor : report.plan.tensors) {
    units.push_back({tensor.name, {}, tensor.bytes_before});
    for (auto& each : planned_of(tensor, quantization)) {
      units.back().tensors.push_back(each.name);
      planned.push_back(std::move(each));
    }
  }
  SharedFolder output(request.sharing, request.output, request.overwrite, {request.input},
                      former_outputs(request.input));
  io::CheckpointWriter writer(output.staging(), planned, with_companions(request.write, request.input),
                              output.shard_files());
  SharedWork work(output, writer, std::move(units));
  Progress progress("repack", work.cost(), "bytes");
  for (size_t unit = 0; unit < report.plan.tensors.size(); ++unit) {
    const TensorPlan& tensor = report.plan.tensors[unit];
    if (!work.mine(unit)) continue;
    int64_t proven = 0;
    if (tensor.scheme) {
      proven = repack_linear(source, quantization.linears.at(tensor.name), request.gpu.get(), writer);
    } else {
      writer.copy(source.tensors, tensor.name);
    }
    work.done(unit, proven);
    progress.advance(tensor.bytes_before);
  }
  for (const auto& proven : work.gather()) report.proven += proven.get<int64_t>();
  add_notes(report, output.notes());
  return finished(std::move(report), writer, output, watch, checkpoint::bases_through(source), [&](const auto& to) {
    return carry_companions(request.input, to, source.config, quantization, request.write);
  });
}

std::string to_text(const RepackReport& report, model::Detail detail) {
  std::string text = to_text(report.plan, detail);
  text += concat("unpack(pack(w)) == w for all ", report.proven, " packed weights; ", human_bytes(report.file_bytes),
                 " written in ", human_seconds(report.seconds), "\n");
  return text;
}

io::Json to_json(const RepackReport& report) {
  io::Json json = to_json(report.plan);
  json["round_trips_proven"] = report.proven;
  json["file_bytes"] = report.file_bytes;
  json["seconds"] = report.seconds;
  return json;
}

}  // namespace w4q::pipeline
