#include <algorithm>
#include <limits>
#include <set>

#include "core/error.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/dialect/turboquant.h"
#include "io/files.h"
#include "io/output.h"
#include "model/model.h"
#include "pipeline/output_rules.h"
#include "pipeline/turboquant.h"
#include "pipeline/turboquant_config.h"

namespace w4q::pipeline {
namespace {

using checkpoint::PackedLinearInfo;
using formats::PlaneRole;
using Seeds = TurboQuantConfig::Seeds;

struct ExportPlan {
  model::OpenedModel model;
  std::vector<PackedLinearInfo> linears;  ///< in model order
  TurboQuantConfig quantization;
  std::vector<io::PlannedTensor> packed, kept;
};

[[noreturn]] void refuse(const PackedLinearInfo& info, const std::string& why) {
  std::vector<formats::Scheme> schemes;
  for (const auto& pass : info.passes) schemes.push_back(pass.scheme);
  throw Error(ErrorCode::unsupported,
              concat(printable(info.name), ": ", turboquant_name, " cannot hold ", formats::to_string(schemes)))
      .detail(why);
}

std::string stored_name(std::string module) {
  std::ranges::replace(module, '.', '_');
  return module;
}

/// Norms of a second pass are F32 there, whatever those of the first are.
DType norm_type(const formats::Scheme& scheme, size_t pass) {
  return pass == 0 && scheme.scale == formats::ScaleType::f16 ? DType::f16 : DType::f32;
}

void check_linear(const PackedLinearInfo& info) {
  if (info.name.ends_with("embed_tokens")) refuse(info, "it packs linear layers, not embedding tables");
  if (info.input_scale) refuse(info, "its input is divided by an input_scale, which readers would leave out");
  if (info.passes.size() > 2) refuse(info, "it has two passes at most");
  for (const auto& pass : info.passes) {
    if (auto why = formats::turboquant_loss(pass.scheme, info.k); !why.empty()) refuse(info, why);
    if (pass.rotation.block != pass.scheme.block) refuse(info, "its groups are not those of its rotation");
    if (!pass.rotation.seed) refuse(info, "its rotation has no signs");
  }
  const auto& last = info.passes.back().scheme;
  if (last.block != info.passes.front().scheme.block) refuse(info, "its passes have groups of different sizes");
}

/// What the first linears say; all others must follow it.
TurboQuantConfig config_of(const std::vector<PackedLinearInfo>& linears) {
  const PackedLinearInfo& first = linears.front();
  TurboQuantConfig config;
  config.bits = first.passes.front().scheme.bits;
  config.group = first.passes.front().scheme.block;
  config.seed = *first.passes.front().rotation.seed;
  config.half_norms = norm_type(first.passes.front().scheme, 0) == DType::f16;
  if (first.passes.size() == 2) {
    config.residual_bits = first.passes[1].scheme.bits;
    config.residual_seed = *first.passes[1].rotation.seed;
    if (config.residual_seed == config.seed) config.seeds = Seeds::shared;
  }
  const bool steps =
      linears.size() > 1 && linears[1].passes.front().rotation.seed == config.seed + turboquant_seed_step;
  if (steps) config.seeds = Seeds::per_layer;
  return config;
}

void check_alike(const PackedLinearInfo& info, const TurboQuantConfig& config, uint64_t index) {
  if (info.passes.size() != (config.residual_bits == 0 ? 1u : 2u)) refuse(info, "other linears have other passes");
  for (size_t pass = 0; pass < info.passes.size(); ++pass) {
    const auto& [scheme, layout, rotation] = info.passes[pass];
    if (scheme.bits != (pass == 0 ? config.bits : config.residual_bits))
      refuse(info, "other linears have other widths");
    if (scheme.block != config.group) refuse(info, "other linears have other groups");
    if (rotation.seed != config.pass_seed(pass, index)) refuse(info, "no strategy gives the seeds of its rotations");
  }
}

void plan_linear(const PackedLinearInfo& info, ExportPlan& plan) {
  const std::string stored = stored_name(info.name);
  for (size_t pass = 0; pass < info.passes.size(); ++pass) {
    const std::string prefix = stored + (pass == 0 ? "." : ".pass2_");
    const formats::Scheme& scheme = info.passes[pass].scheme;
    plan.packed.push_back({prefix + "indices", DType::u8, formats::turboquant_indices_shape(info.n, info.k)});
    plan.packed.push_back(
        {prefix + "norms", norm_type(scheme, pass), formats::turboquant_norms_shape(scheme, info.n, info.k)});
    if (pass > 0) plan.packed.push_back({prefix + "codebook", DType::f32, {int64_t{1} << scheme.bits}});
  }
  const std::string bias = info.name + ".bias";
  if (!plan.model.folder.tensors.contains(bias)) return;
  const io::TensorInfo& found = plan.model.folder.tensors.at(bias);
  plan.packed.push_back({stored + ".bias", found.dtype, found.shape});
}

void plan_kept(ExportPlan& plan) {
  const checkpoint::Folder& folder = plan.model.folder;
  std::set<std::string, std::less<>> taken;
  for (const auto& [name, info] : folder.quantization.linears) {
    for (auto& plane : checkpoint::planned_planes(info)) taken.insert(std::move(plane.name));
    taken.insert(name + ".bias");
  }
  for (const auto& [name, info] : folder.tensors.tensors()) {
    if (!taken.contains(name)) plan.kept.push_back({name, info.dtype, info.shape});
  }
}

ExportPlan make_plan(const std::filesystem::path& folder) {
  ExportPlan plan{
      model::open_model(checkpoint::open_packed_folder(folder, "w4q quantize --method rotated")), {}, {}, {}, {}};
  const auto& quantization = plan.model.folder.quantization;
  for (const auto& parameter : model::parameters(plan.model.config)) {
    const auto* info = quantization.find(model::module_path(parameter.name));
    if (info == nullptr || !parameter.linear) continue;
    check_linear(*info);
    plan.linears.push_back(*info);
  }
  ensure(plan.linears.size() == quantization.linears.size(), "export: a packed linear that the model does not have");
  plan.quantization = config_of(plan.linears);
  plan.quantization.skip_lm_head = quantization.find("lm_head") == nullptr;
  plan.packed.push_back({"codebook", DType::f32, {int64_t{1} << plan.quantization.bits}});
  for (size_t i = 0; i < plan.linears.size(); ++i) {
    check_alike(plan.linears[i], plan.quantization, i);
    plan_linear(plan.linears[i], plan);
  }
  plan_kept(plan);
  return plan;
}

/// Writes a linear; all share the table of the first, in `table`.
void write_linear(const ExportPlan& plan, const PackedLinearInfo& info, Buffer& table, io::CheckpointWriter& writer,
                  ConvertedLinear& report) {
  const auto linear = checkpoint::load_canonical(plan.model.folder.tensors, info);
  const std::string stored = stored_name(info.name);
  for (size_t pass = 0; pass < linear.passes.size(); ++pass) {
    const formats::PackedWeight& weight = linear.passes[pass];
    const std::string prefix = stored + (pass == 0 ? "." : ".pass2_");
    const Buffer indices = formats::turboquant_indices(weight);
    const Buffer norms = formats::turboquant_norms(weight, norm_type(weight.scheme, pass));
    const Buffer& codebook = weight.plane(PlaneRole::codebook).bytes;
    writer.write(prefix + "indices", indices.bytes());
    writer.write(prefix + "norms", norms.bytes());
    if (pass > 0) {
      writer.write(prefix + "codebook", codebook.bytes());
    } else if (table.size() == 0) {
      table = codebook.clone();
      writer.write("codebook", table.bytes());
    } else if (!std::ranges::equal(table.bytes(), codebook.bytes())) {
      refuse(info, "its table is not that of the other linears, and the file holds one");
    }
    report.proof.codes += weight.n * weight.k;
    report.proof.codes_equal += weight.n * weight.k;
  }
  const std::string bias = info.name + ".bias";
  if (plan.model.folder.tensors.contains(bias))
    writer.write(stored + ".bias", plan.model.folder.tensors.load(bias)->bytes);
}

ConvertReport make_report(const ExportPlan& plan) {
  ConvertReport report;
  report.from = "w4q";
  report.to = turboquant_name;
  for (const auto& info : plan.linears) {
    ConvertedLinear row;
    row.name = info.name;
    row.from = row.to = info.passes.front().scheme;
    row.shape = {info.n, info.k};
    row.bytes_before = checkpoint::stored_bytes(info);
    for (const auto& tensor : plan.packed) {
      if (tensor.name.starts_with(stored_name(info.name) + ".")) row.bytes_after += tensor.size();
    }
    report.linears.push_back(std::move(row));
  }
  report.carried = static_cast<int64_t>(plan.kept.size());
  for (const auto& tensor : plan.kept) report.carried_bytes += tensor.size();
  return report;
}

/// One file, whatever its size, and without metadata: as the project writes it.
io::WriteOptions one_file() {
  io::WriteOptions options;
  options.max_shard_bytes = std::numeric_limits<int64_t>::max();
  options.metadata.clear();
  return options;
}

int64_t write_packed(const ExportPlan& plan, const std::filesystem::path& folder, ConvertReport& report,
                     io::TensorDigests& digests) {
  io::CheckpointWriter writer(folder, plan.packed, one_file());
  Progress progress("convert", static_cast<int64_t>(plan.linears.size()), "linears");
  Buffer table;
  for (size_t i = 0; i < plan.linears.size(); ++i) {
    write_linear(plan, plan.linears[i], table, writer, report.linears[i]);
    progress.advance(1);
  }
  writer.finish();
  digests = writer.digests();
  return writer.file_bytes();
}

int64_t write_kept(const ExportPlan& plan, const std::filesystem::path& folder) {
  const auto aside = folder / "kept";
  std::filesystem::create_directory(aside);
  io::CheckpointWriter writer(aside, plan.kept, one_file());
  for (const auto& tensor : plan.kept) writer.copy(plan.model.folder.tensors, tensor.name);
  writer.finish();
  std::filesystem::rename(aside / "model.safetensors", folder / turboquant_kept_file);
  std::filesystem::remove(aside);
  return writer.file_bytes();
}

}  // namespace

ConvertReport export_turboquant(const ConvertRequest& request, bool dry_run) {
  const Stopwatch watch;
  ExportPlan plan = make_plan(request.input);
  ConvertReport report = make_report(plan);
  if (dry_run) return report;
  io::OutputFolder output(request.output, request.overwrite, {request.input}, former_outputs(request.input));
  checkpoint::check_digests(request.input, plan.model.folder.tensors);
  io::TensorDigests packed;
  report.file_bytes = write_packed(plan, output.staging(), report, packed) + write_kept(plan, output.staging());
  plan.model.folder.config.erase("quantization_config");
  plan.model.folder.config[conversion_mark] = "w4q";
  add_notes(report, carry_companions(request.input, output.staging(), plan.model.folder.config, request.write));
  io::write_file(output.staging() / turboquant_config_file, to_json(plan.quantization).dump(2), false);
  checkpoint::record_digests(output.staging(), std::move(packed), checkpoint::bases_of(request.input));
  output.commit();
  report.done = true;
  report.seconds = watch.seconds();
  return report;
}

}  // namespace w4q::pipeline
