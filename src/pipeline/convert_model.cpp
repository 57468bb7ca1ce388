#include "pipeline/convert_model.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "io/checkpoint.h"
#include "io/output.h"
#include "model/dialect.h"
#include "model/model.h"
#include "pipeline/output_rules.h"
#include "pipeline/round_anew.h"
#include "repack/layout_registry.h"

namespace w4q::pipeline {
namespace {

using formats::PackedLinear;
using formats::PackedWeight;
using formats::StoredTensor;
using model::PackedLinearInfo;

constexpr std::string_view own_dialect = "w4q";

struct Source {
  io::Checkpoint checkpoint;
  io::Json config;
  model::QuantizationConfig quantization;
};

/// A linear before and after.
struct LinearPlan {
  const PackedLinearInfo* from = nullptr;
  PackedLinearInfo to;
  std::string loses;
};

struct ConvertPlan {
  Source source;
  const model::DialectRow* dialect = nullptr;  ///< null: w4q's own
  std::vector<LinearPlan> linears;
  std::vector<io::PlannedTensor> carried;
  std::vector<std::string> kept;  ///< linear layers in 16 bit
};

Source open_source(const std::filesystem::path& folder) {
  const auto config_path = folder / "config.json";
  Source source{io::Checkpoint::open(folder), io::read_json(config_path), {}};
  source.quantization = model::read_quantization(source.config, source.checkpoint, config_path.string());
  if (source.quantization.linears.empty()) {
    throw Error(ErrorCode::bad_argument, folder.string() + ": holds no packed tensors")
        .hint("w4q quantize makes a packed checkpoint from a 16-bit one");
  }
  return source;
}

const model::DialectRow* find_target(const std::string& name) {
  if (name == own_dialect) return nullptr;
  const auto* row = model::find_dialect(name);
  if (row == nullptr) {
    throw Error(ErrorCode::bad_argument, concat("--to ", printable(name), ": a packed checkpoint cannot become this"))
        .detail("known: " + join(convert_targets()));
  }
  return row;
}

/// What a dialect has no tensor for, beside the codes.
std::string refuse_structure(const PackedLinearInfo& info) {
  if (info.passes.size() > 1) return concat("it is the sum of ", info.passes.size(), " passes");
  if (info.input_scale) return "its input is divided by an input_scale, which readers would leave out";
  return {};
}

LinearPlan plan_linear(const PackedLinearInfo& info, const model::DialectRow& row, bool allow_lossy) {
  const auto refuse = [&](const std::string& why) {
    return Error(ErrorCode::unsupported, concat(printable(info.name), ": ", row.name, " cannot hold ",
                                                formats::to_string(info.passes.front().scheme)))
        .detail(why);
  };
  if (info.name.ends_with("embed_tokens")) {
    throw refuse("it packs linear layers, not embedding tables").hint("quantize without --embeddings");
  }
  model::DialectFit fit = row.fit(info);
  if (!fit.scheme) throw refuse(fit.loses);
  if (auto why = refuse_structure(info); !why.empty()) fit.loses = std::move(why);
  if (!fit.loses.empty() && !allow_lossy) {
    throw refuse(fit.loses).hint(
        concat("--allow-lossy rounds the weights anew to ", formats::to_string(*fit.scheme), " and reports the error"));
  }
  LinearPlan plan{&info, {info.name, info.n, info.k, info.source_dtype, {}}, std::move(fit.loses)};
  plan.to.passes = {{*fit.scheme, std::string(formats::canonical_layout)}};
  plan.to.dialect = &row;
  for (const auto& spec : row.tensors(*fit.scheme, info.n, info.k)) {
    plan.to.stored.push_back({info.name + spec.suffix, spec.dtype, spec.shape});
  }
  return plan;
}

LinearPlan plan_own(const PackedLinearInfo& info) {
  LinearPlan plan{&info, info, {}};
  plan.to.dialect = nullptr;
  plan.to.stored.clear();
  for (auto& pass : plan.to.passes) pass.layout = formats::canonical_layout;
  return plan;
}

bool is_linear_layer(const io::TensorInfo& info) {
  return info.name.ends_with(".weight") && info.shape.size() == 2 && is_weight_dtype(info.dtype) &&
         !info.name.ends_with("embed_tokens.weight");
}

/// Everything that belongs to no packed linear.
void plan_carried(ConvertPlan& plan) {
  std::set<std::string> packed;
  for (const auto& [name, info] : plan.source.quantization.linears) {
    for (auto& tensor : model::planned_planes(info)) packed.insert(std::move(tensor.name));
  }
  for (const auto& [name, info] : plan.source.checkpoint.tensors()) {
    if (packed.contains(name)) continue;
    plan.carried.push_back({name, info.dtype, info.shape});
    if (is_linear_layer(info)) plan.kept.emplace_back(model::module_path(name));
  }
}

ConvertPlan make_plan(const ConvertRequest& request) {
  ConvertPlan plan{open_source(request.input), find_target(request.to), {}, {}, {}};
  for (const auto& [name, info] : plan.source.quantization.linears) {
    plan.linears.push_back(plan.dialect == nullptr ? plan_own(info)
                                                   : plan_linear(info, *plan.dialect, request.allow_lossy));
  }
  plan_carried(plan);
  return plan;
}

/// What config.json says of the output.
io::Json describe(const ConvertPlan& plan) {
  std::vector<model::DialectLinear> linears;
  for (const auto& linear : plan.linears) {
    const auto& from = linear.from->passes.front().scheme;
    const auto& to = linear.to.passes.front().scheme;
    const bool symmetric = linear.loses.empty() ? !from.asymmetric : !to.asymmetric;
    linears.push_back({linear.to.name, to, symmetric});
  }
  io::Json json = plan.dialect->describe(linears, plan.kept);
  json[conversion_mark] = own_dialect;
  return json;
}

model::QuantizationConfig own_quantization(const ConvertPlan& plan) {
  model::QuantizationConfig result;
  result.method = plan.source.quantization.method;
  result.rescaled = plan.source.quantization.rescaled;
  for (const auto& linear : plan.linears) result.linears.emplace(linear.to.name, linear.to);
  return result;
}

int64_t tensor_bytes(const PackedLinearInfo& info) {
  int64_t sum = 0;
  for (const auto& tensor : model::planned_planes(info)) sum += tensor.size();
  return sum;
}

ConvertReport make_report(const ConvertPlan& plan) {
  ConvertReport report;
  const auto* from = plan.source.quantization.dialect;
  report.from = from == nullptr ? own_dialect : from->name;
  report.to = plan.dialect == nullptr ? own_dialect : plan.dialect->name;
  for (const auto& linear : plan.linears) {
    report.linears.push_back({linear.to.name,
                              linear.from->passes.front().scheme,
                              linear.to.passes.front().scheme,
                              {linear.to.n, linear.to.k},
                              tensor_bytes(*linear.from),
                              tensor_bytes(linear.to),
                              linear.loses,
                              {},
                              {}});
  }
  report.carried = static_cast<int64_t>(plan.carried.size());
  for (const auto& tensor : plan.carried) report.carried_bytes += tensor.size();
  report.notes = plan.source.quantization.notes;
  for (const auto& warning : plan.source.checkpoint.warnings()) report.notes.push_back(warning);
  return report;
}

// ---- one linear -----------------------------------------------------------------------------------------------------

/// Codes, zeros and scales that are equal; of families without integers, whole planes.
formats::RecastProof compare(const PackedWeight& a, const PackedWeight& b) {
  using formats::SchemeFamily;
  if (a.scheme.family == SchemeFamily::integer && b.scheme.family == SchemeFamily::integer) {
    return formats::integer_compare(a, b);
  }
  formats::RecastProof proof;
  proof.codes = a.n * a.k;
  if (formats::bytes_equal(a, b)) proof.codes_equal = proof.codes;
  return proof;
}

/// The canonical weight that the dialect will hold: the same values, or `linear.loses` says why not.
PackedWeight prepare(const PackedLinear& source, const LinearPlan& plan, bool allow_lossy, ConvertedLinear& linear) {
  const formats::Scheme& scheme = plan.to.passes.front().scheme;
  const model::DialectRow& row = *plan.to.dialect;
  const PackedWeight& before = source.passes.front();
  const bool same = before.scheme == scheme;
  if (linear.loses.empty() && !same) linear.loses = formats::integer_recast_loss(before, scheme);
  const bool anew = !linear.loses.empty();
  std::optional<PackedWeight> weight;
  if (!anew) weight = same ? before.clone() : formats::integer_recast(before, scheme, plan.to.name);
  if (anew && allow_lossy) weight = round_anew(source, scheme);
  if (weight && row.refuses != nullptr) {
    if (auto why = row.refuses(*weight); !why.empty()) {
      if (!anew) linear.loses = std::move(why);
      if (!allow_lossy || row.bend == nullptr) weight.reset();
      if (weight) row.bend(*weight);
    }
  }
  if (weight) return std::move(*weight);
  Error error(ErrorCode::unsupported, concat(printable(plan.to.name), ": ", row.name, " cannot hold it without loss"));
  error.detail(linear.loses);
  if (!allow_lossy) error.hint("--allow-lossy changes as little as possible and reports the error");
  throw Error(error);
}

/// Converts one linear to a dialect, writes it, and reads what was written for the proof.
void write_dialect(const PackedLinear& source, const LinearPlan& plan, bool allow_lossy, io::CheckpointWriter& writer,
                   ConvertedLinear& linear) {
  const PackedWeight weight = prepare(source, plan, allow_lossy, linear);
  std::vector<StoredTensor> tensors = plan.to.dialect->encode(weight);
  for (const auto& tensor : tensors) writer.write(plan.to.name + tensor.spec.suffix, tensor.bytes.bytes());
  const PackedWeight back = plan.to.dialect->decode(plan.to, std::move(tensors));
  linear.proof = compare(source.passes.front(), back);
  if (linear.loses.empty()) {
    ensure(linear.proof.complete(), plan.to.name + ": what was written decodes to another weight");
    return;
  }
  linear.error = rounding_error(source, back);
}

/// There and back once more in the form that the source has.
PackedWeight round_trip(const PackedWeight& canonical, const PackedLinearInfo& from, size_t pass) {
  if (from.dialect == nullptr) {
    const auto& layout = repack::layout_row(from.passes[pass].layout);
    return layout.unpack(layout.pack(canonical), from.name);
  }
  const model::DialectFit fit = from.dialect->fit(from);
  ensure(fit.scheme.has_value() && fit.loses.empty(), from.name + ": its own dialect does not hold it");
  if (canonical.scheme.family != formats::SchemeFamily::integer) {
    return from.dialect->decode(from, from.dialect->encode(canonical));
  }
  return from.dialect->decode(from, from.dialect->encode(formats::integer_recast(canonical, *fit.scheme, from.name)));
}

void write_own(const PackedLinear& source, const LinearPlan& plan, io::CheckpointWriter& writer,
               ConvertedLinear& linear) {
  if (plan.to.input_scale) writer.write(model::input_scale_name(plan.to.name), bytes_of(source.input_scale));
  for (size_t pass = 0; pass < source.passes.size(); ++pass) {
    const PackedWeight& weight = source.passes[pass];
    for (const auto& plane : weight.planes) {
      writer.write(model::plane_name(plan.to.name, pass, plane.spec.role), plane.bytes.bytes());
    }
    linear.proof += compare(weight, round_trip(weight, *plan.from, pass));
  }
  ensure(linear.proof.complete(), plan.to.name + ": packed once more it is another weight");
}

void write_companions(const ConvertPlan& plan, const std::filesystem::path& from, const std::filesystem::path& to) {
  if (plan.dialect == nullptr) return carry_companions(from, to, plan.source.config, own_quantization(plan));
  const io::Json quantization = describe(plan);
  io::Json config = plan.source.config;
  config["quantization_config"] = quantization;
  carry_companions(from, to, config);
  if (plan.dialect->config_file.empty()) return;
  io::write_file(to / plan.dialect->config_file, quantization.dump(2) + "\n", false);
}

}  // namespace

std::vector<std::string> convert_targets() {
  std::vector<std::string> names{std::string(own_dialect)};
  for (const auto& row : model::dialect_registry()) names.emplace_back(row.name);
  return names;
}

ConvertReport plan_convert(const ConvertRequest& request) {
  const ConvertPlan plan = make_plan(request);
  if (plan.dialect != nullptr) describe(plan);
  return make_report(plan);
}

ConvertReport convert_model(const ConvertRequest& request) {
  const Stopwatch watch;
  const ConvertPlan plan = make_plan(request);
  if (plan.dialect != nullptr) describe(plan);
  ConvertReport report = make_report(plan);
  std::vector<io::PlannedTensor> planned = plan.carried;
  for (const auto& linear : plan.linears)
    std::ranges::move(model::planned_planes(linear.to), std::back_inserter(planned));
  io::OutputFolder output(request.output, request.overwrite, {request.input}, is_replaceable_output);
  io::CheckpointWriter writer(output.staging(), std::move(planned), request.write);
  Progress progress("convert", plan.source.checkpoint.total_bytes(), "bytes");
  for (size_t i = 0; i < plan.linears.size(); ++i) {
    const auto source = model::load_canonical(plan.source.checkpoint, *plan.linears[i].from);
    if (plan.dialect == nullptr) {
      write_own(source, plan.linears[i], writer, report.linears[i]);
    } else {
      write_dialect(source, plan.linears[i], request.allow_lossy, writer, report.linears[i]);
    }
    progress.advance(report.linears[i].bytes_before);
  }
  for (const auto& tensor : plan.carried) {
    writer.write(tensor.name, plan.source.checkpoint.load(tensor.name)->bytes);
    progress.advance(tensor.size());
  }
  writer.finish();
  write_companions(plan, request.input, output.staging());
  output.commit();
  report.done = true;
  report.file_bytes = writer.file_bytes();
  report.seconds = watch.seconds();
  return report;
}

}  // namespace w4q::pipeline
