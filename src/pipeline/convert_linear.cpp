#include "pipeline/convert_linear.h"

#include <optional>
#include <utility>

#include "checkpoint/dialect/dialect.h"
#include "checkpoint/dialect/stacks.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/cut_rows.h"
#include "formats/scheme_registry.h"
#include "pipeline/round_anew.h"
#include "repack/layout_registry.h"

namespace w4q::pipeline {
namespace {

using checkpoint::PackedLinearInfo;
using formats::PackedLinear;
using formats::PackedWeight;
using formats::StoredTensor;

/// Codes, zeros and scales that are equal; of families without integers, whole planes.
formats::RecastProof compare(const PackedWeight& a, const PackedWeight& b) {
  using formats::SchemeFamily;
  if (a.scheme.family == SchemeFamily::integer && b.scheme.family == SchemeFamily::integer) {
    return formats::integer_compare(a, b);
  }
  formats::RecastProof proof;
  proof.codes = a.n * a.k;
  for (const auto& plane : a.planes) {
    if (plane.spec.role == formats::PlaneRole::scales) proof.scales += element_count(plane.spec.shape);
  }
  if (formats::bytes_equal(a, b)) proof.codes_equal = proof.codes, proof.scales_equal = proof.scales;
  return proof;
}

/// The canonical weight that the dialect will hold, where it is another object than the source's: the same values, or
/// `linear.loses` says why not.
std::optional<PackedWeight> prepare(const PackedLinear& source, const LinearPlan& plan, bool allow_lossy,
                                    ConvertedLinear& linear) {
  const formats::Scheme& scheme = plan.to.passes.front().scheme;
  const checkpoint::DialectRow& row = *plan.to.dialect;
  const PackedWeight& before = source.passes.front();
  const bool same = before.scheme == scheme;
  if (linear.loses.empty() && !same) linear.loses = formats::integer_recast_loss(before, scheme);
  const bool anew = !linear.loses.empty();
  std::optional<PackedWeight> weight;
  if (!anew && !same) weight = formats::integer_recast(before, scheme, plan.to.name);
  if (anew && allow_lossy) weight = round_anew(source, scheme, plan.to.passes.front().rotation);
  if (!anew || allow_lossy) {
    auto why = row.refuses == nullptr ? std::string{} : row.refuses(weight ? *weight : before);
    if (why.empty()) return weight;
    if (!anew) linear.loses = std::move(why);
    if (allow_lossy && row.bend != nullptr) {
      if (!weight) weight = before.clone();
      row.bend(*weight);
      return weight;
    }
  }
  Error error(ErrorCode::unsupported, concat(printable(plan.to.name), ": ", row.name, " cannot hold it without loss"));
  error.detail(linear.loses);
  if (!allow_lossy) error.hint("--allow-lossy changes as little as possible and reports the error");
  throw Error(error);
}

/// To its place, which may be in a tensor that others share.
void write_tensor(const LinearPlan& plan, const StoredTensor& tensor, io::CheckpointWriter& writer) {
  const std::string name = plan.to.name + tensor.spec.suffix;
  const auto bytes = tensor.bytes.bytes();
  const auto part = checkpoint::stacked_part(*plan.to.dialect, name);
  if (!part) return writer.write(name, bytes);
  writer.write_part(part->whole, part->index * static_cast<int64_t>(bytes.size()), bytes);
}

/// Converts one linear to a dialect, writes it, and reads what was written for the proof.
void write_dialect(const PackedLinear& source, const LinearPlan& plan, bool allow_lossy, io::CheckpointWriter& writer,
                   ConvertedLinear& linear) {
  std::vector<StoredTensor> tensors;
  {
    const auto weight = prepare(source, plan, allow_lossy, linear);
    tensors = plan.to.dialect->encode(weight ? *weight : source.passes.front());
  }
  for (const auto& tensor : tensors) write_tensor(plan, tensor, writer);
  const PackedWeight back = plan.to.dialect->decode(plan.to, std::move(tensors));
  linear.proof = compare(source.passes.front(), back);
  if (linear.loses.empty()) {
    ensure(linear.proof.complete(), plan.to.name + ": what was written decodes to another weight");
    return;
  }
  linear.error = rounding_error(source, back, plan.to.passes.front().rotation);
}

/// There and back once more in the form that the source has.
PackedWeight round_trip(const PackedWeight& canonical, const PackedLinearInfo& from, size_t pass) {
  if (from.dialect == nullptr) {
    const auto& layout = repack::layout_row(from.passes[pass].layout);
    return layout.unpack(layout.pack(canonical), from.name);
  }
  const checkpoint::DialectFit fit = from.dialect->fit(from);
  ensure(fit.scheme.has_value() && fit.loses.empty(), from.name + ": its own dialect does not hold it");
  if (canonical.scheme.family != formats::SchemeFamily::integer) {
    return from.dialect->decode(from, from.dialect->encode(canonical));
  }
  return from.dialect->decode(from, from.dialect->encode(formats::integer_recast(canonical, *fit.scheme, from.name)));
}

void write_own(const PackedLinear& source, const LinearPlan& plan, io::CheckpointWriter& writer,
               ConvertedLinear& linear) {
  if (plan.to.input_scale) writer.write(checkpoint::input_scale_name(plan.to.name), bytes_of(source.input_scale));
  for (size_t pass = 0; pass < source.passes.size(); ++pass) {
    const PackedWeight& weight = source.passes[pass];
    for (const auto& plane : weight.planes) {
      writer.write(checkpoint::plane_name(plan.to.name, pass, plane.spec.role), plane.bytes.bytes());
    }
    linear.proof += compare(weight, round_trip(weight, *plan.from, pass));
  }
  ensure(linear.proof.complete(), plan.to.name + ": packed once more it is another weight");
}

/// The rows of `source` that `plan` is about.
PackedLinear part_of(PackedLinear source, const LinearPlan& plan) {
  if (plan.to.n == plan.from->n) return source;
  for (auto& pass : source.passes) {
    const auto specs = formats::scheme_row(pass.scheme.family).planes(pass.scheme, plan.to.n, plan.to.k);
    pass = formats::cut_rows(pass, plan.first_row, plan.to.n, specs, plan.to.name);
  }
  source.name = plan.to.name;
  return source;
}

}  // namespace

void convert_linear(const io::Checkpoint& checkpoint, const LinearPlan& plan, bool allow_lossy,
                    io::CheckpointWriter& writer, ConvertedLinear& linear) {
  const PackedLinear source = part_of(checkpoint::load_canonical(checkpoint, *plan.from), plan);
  if (plan.to.dialect == nullptr) return write_own(source, plan, writer, linear);
  write_dialect(source, plan, allow_lossy, writer, linear);
}

}  // namespace w4q::pipeline
