#include "pipeline/mxfp4_import.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <optional>
#include <utility>

#include "checkpoint/digests.h"
#include "checkpoint/folder.h"
#include "checkpoint/low_precision.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/scale_codec.h"
#include "formats/scheme_registry.h"
#include "io/files.h"
#include "io/system.h"
#include "model/model.h"
#include "pipeline/output_rules.h"
#include "pipeline/shared_output.h"
#include "repack/layout_registry.h"

namespace w4q::pipeline {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::ScaleType;
using formats::Scheme;

constexpr int bits = 4, block = 32, bias = 127;

/// The 15 values of E2M1 in order, and 5, which no code means: a table has 16 entries that ascend.
constexpr std::array<float, 16> table = {-6, -4, -3, -2, -1.5f, -1, -.5f, 0, .5f, 1, 1.5f, 2, 3, 4, 5, 6};
/// Of a code of E2M1 its entry; both zeros have one.
constexpr std::array<uint8_t, 16> entry_of = {7, 8, 9, 10, 11, 12, 13, 15, 7, 6, 5, 4, 3, 2, 1, 0};

/// Powers of two that a type of scales holds exactly.
struct Octaves {
  ScaleType type;
  int lowest, highest;
};
constexpr Octaves octaves[] = {{ScaleType::e4m4, -14, 4}, {ScaleType::f16, -24, 15}};

/// Where the files hold the codes of a matrix [n, k]: number `expert` of a stack, or the only one.
struct Source {
  std::string name;  ///< of the matrix: "….down_proj.3.weight"
  std::string codes, scales;
  int64_t expert = 0, n = 0, k = 0;
};

struct Packing {
  Source source;
  checkpoint::PackedLinearInfo info;
  int shift = 0;  ///< the table's values are times 2^shift, and the scales divided by that
};

struct ImportPlan {
  checkpoint::Folder folder;  ///< decoded
  io::Checkpoint raw;
  std::vector<Packing> linears;
  std::vector<io::PlannedTensor> carried;
};

std::optional<Source> source_of(const io::Checkpoint& raw, const io::TensorInfo& matrix) {
  const std::string path(model::module_path(matrix.name));
  Source source{matrix.name, matrix.name + "_packed", matrix.name + "_scale", 0, matrix.shape[0], matrix.shape[1]};
  if (raw.contains(source.codes)) return source;
  const size_t dot = path.rfind('.');
  if (dot == std::string::npos) return std::nullopt;
  const std::string stack = path.substr(0, dot);
  source.codes = stack + "_blocks", source.scales = stack + "_scales";
  if (!raw.contains(source.codes)) return std::nullopt;
  source.expert = std::stoll(path.substr(dot + 1));
  return source;
}

/// The bytes of one matrix out of a tensor that may be a stack.
std::span<const uint8_t> part(const io::LoadedTensor& tensor, const Source& source, int64_t size) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(tensor->bytes.data());
  return {bytes + source.expert * size, static_cast<size_t>(size)};
}

int64_t blocks_of(const Source& source) { return source.n * (source.k / block); }

/// Whether a block of codes, half a byte each, is zeros of either sign: then its scale says nothing.
bool is_zero(std::span<const uint8_t> codes) {
  return std::ranges::all_of(codes, [](uint8_t byte) { return (byte & 0x77) == 0; });
}

/// The lowest and the highest exponent of a matrix; `codes`: of blocks that are not zero alone.
std::pair<int, int> exponents(std::span<const uint8_t> scales, std::span<const uint8_t> codes) {
  int lowest = 255, highest = -1;
  for (size_t b = 0; b < scales.size(); ++b) {
    if (!codes.empty() && is_zero(codes.subspan(b * block / 2, block / 2))) continue;
    lowest = std::min<int>(lowest, scales[b]), highest = std::max<int>(highest, scales[b]);
  }
  return highest < 0 ? std::pair(0, 0) : std::pair(lowest - bias, highest - bias);
}

std::optional<std::pair<ScaleType, int>> type_for(int lowest, int highest) {
  for (const auto& [type, from, to] : octaves) {
    if (lowest >= from && highest <= to) return std::pair(type, 0);
  }
  for (const auto& [type, from, to] : octaves) {
    // As little as it takes: the table stays near 1.
    if (highest - lowest <= to - from) return std::pair(type, lowest < from ? lowest - from : highest - to);
  }
  return std::nullopt;
}

/// Scale type and shift that hold every exponent of a matrix.
std::pair<ScaleType, int> choose_scales(const io::Checkpoint& raw, const Source& source) {
  const auto stored = raw.load(source.scales);
  const auto scales = part(stored, source, blocks_of(source));
  if (std::ranges::find(scales, 255) != scales.end()) {
    throw Error(ErrorCode::bad_file, concat(printable(source.scales), ": a scale is NaN"))
        .detail(concat("of ", printable(source.name), ", E8M0 255"));
  }
  const auto [low, high] = exponents(scales, {});
  if (const auto found = type_for(low, high)) return *found;
  const auto codes = raw.load(source.codes);
  const auto [lowest, highest] = exponents(scales, part(codes, source, source.n * source.k / 2));
  if (const auto found = type_for(lowest, highest)) return *found;
  throw Error(ErrorCode::unsupported, concat(printable(source.name), ": no table scheme holds its scales"))
      .detail(concat("they go from 2^", lowest, " to 2^", highest, ", f16 holds 39 octaves"))
      .hint("--to hf-f32 writes the weights as they are");
}

const repack::LayoutRow& choose_layout(const Mxfp4Request& request, const Scheme& scheme, const Source& source) {
  if (!request.target.empty()) return repack::layout_for_target(request.target, scheme, source.n, source.k);
  const auto& row =
      repack::layout_row(request.layout.empty() ? std::string(formats::canonical_layout) : request.layout);
  std::string why;
  if (row.accepts(scheme, source.n, source.k, &why)) return row;
  throw Error(ErrorCode::unsupported, concat(printable(source.name), ": ", why))
      .detail(concat("needed by layout ", row.name))
      .hint("--target picks a layout that fits, tensor by tensor");
}

ImportPlan make_plan(const Mxfp4Request& request) {
  ImportPlan plan{checkpoint::open_folder(request.input), io::Checkpoint::open(request.input), {}, {}};
  for (const auto& [name, info] : plan.folder.tensors.tensors()) {
    if (plan.raw.contains(name)) {
      plan.carried.push_back({name, info.dtype, info.shape});
      continue;
    }
    const auto source = source_of(plan.raw, info);
    ensure(source.has_value(), name + ": its codes are not where they were found");
    const auto [scale, shift] = choose_scales(plan.raw, *source);
    const Scheme scheme{formats::SchemeFamily::kbit, bits, block, scale};
    const std::string path(model::module_path(name));
    const std::string layout(choose_layout(request, scheme, *source).name);
    plan.linears.push_back({*source, {path, source->n, source->k, DType::bf16, {{scheme, layout}}}, shift});
  }
  return plan;
}

ConversionReport make_report(const ImportPlan& plan) {
  ConversionReport report;
  for (const auto& [source, info, shift] : plan.linears) {
    report.tensors.push_back({source.name,
                              "MXFP4",
                              formats::to_string(info.passes.front().scheme),
                              {source.n, source.k},
                              source.n * source.k / 2 + blocks_of(source),
                              checkpoint::stored_bytes(info),
                              {}});
  }
  for (const auto& tensor : plan.carried) {
    const std::string type(dtype_name(tensor.dtype));
    report.tensors.push_back({tensor.name, type, type, tensor.shape, tensor.size(), tensor.size(), {}});
  }
  for (const auto& warning : plan.raw.warnings()) report.notes.push_back(warning);
  return report;
}

/// Canonical planes.
PackedWeight pack(const ImportPlan& plan, const Packing& packing) {
  const auto& [source, info, shift] = packing;
  const Scheme scheme = info.passes.front().scheme;
  const auto& row = formats::scheme_row(scheme.family);
  PackedWeight weight = formats::allocate_planes(scheme, formats::canonical_layout, source.n, source.k,
                                                 row.planes(scheme, source.n, source.k));
  const auto stored_codes = plan.raw.load(source.codes), stored_scales = plan.raw.load(source.scales);
  const auto codes = part(stored_codes, source, source.n * source.k / 2);
  const auto scales = part(stored_scales, source, blocks_of(source));
  auto* const words = reinterpret_cast<uint32_t*>(weight.plane(PlaneRole::codes).bytes.data());
  auto& scale_plane = weight.plane(PlaneRole::scales);
  parallel_for(blocks_of(source), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t i = 0; i < block; ++i) {
        const uint8_t byte = codes[static_cast<size_t>((b * block + i) / 2)];
        const uint8_t code = entry_of[(byte >> (i % 2 * 4)) & 15];
        for (int64_t plane = 0; plane < bits; ++plane) {
          words[b * bits + plane] |= static_cast<uint32_t>((code >> plane) & 1) << i;
        }
      }
      const auto half = codes.subspan(static_cast<size_t>(b * block / 2), block / 2);
      const float scale = is_zero(half) ? 0 : std::ldexp(1.0f, scales[static_cast<size_t>(b)] - bias - shift);
      formats::put_scale(scale_plane, static_cast<size_t>(b), formats::store_scale(scale, scheme.scale).bits);
    }
  });
  auto* const entries = reinterpret_cast<float*>(weight.plane(PlaneRole::codebook).bytes.data());
  std::ranges::transform(table, entries, [s = shift](float entry) { return std::ldexp(entry, s); });
  return weight;
}

/// What the planes decode to is what the codes stand for.
void prove(const ImportPlan& plan, const Packing& packing, const PackedWeight& weight) {
  const auto& name = packing.source.name;
  const auto& row = formats::scheme_row(weight.scheme.family);
  row.validate(weight, name);
  const auto expected = plan.folder.tensors.load(name);
  const auto* const values = reinterpret_cast<const float*>(expected->bytes.data());
  std::atomic<int64_t> changed = 0;
  parallel_for(weight.n, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> found(static_cast<size_t>(weight.k));
    for (int64_t n = begin; n < end; ++n) {
      row.decode_row(weight, n, found);
      for (size_t col = 0; col < found.size(); ++col)
        changed += found[col] != values[n * weight.k + static_cast<int64_t>(col)];
    }
  });
  ensure(changed == 0, concat(name, ": planes and codes stand for different values"));
}

void write_linear(const ImportPlan& plan, const Packing& packing, io::CheckpointWriter& writer) {
  const PackedWeight canonical = pack(plan, packing);
  prove(plan, packing, canonical);
  const auto& layout = repack::layout_row(packing.info.passes.front().layout);
  const PackedWeight packed = layout.pack(canonical);
  ensure(formats::bytes_equal(layout.unpack(packed, packing.source.name), canonical),
         packing.source.name + ": unpack(pack(w)) differs from w");
  for (const auto& plane : packed.planes) {
    writer.write(checkpoint::plane_name(packing.info.name, 0, plane.spec.role), plane.bytes.bytes());
  }
}

/// The linears, and then what is carried along.
std::vector<WorkUnit> mxfp4_units(const ImportPlan& plan) {
  std::vector<WorkUnit> units;
  for (const auto& packing : plan.linears) {
    units.push_back({packing.info.name, {}, packing.source.n * packing.source.k / 2 + blocks_of(packing.source)});
    for (auto& plane : checkpoint::planned_planes(packing.info)) units.back().tensors.push_back(std::move(plane.name));
  }
  for (const auto& tensor : plan.carried) units.push_back({tensor.name, {tensor.name}, tensor.size()});
  return units;
}

checkpoint::QuantizationConfig quantization_of(const ImportPlan& plan) {
  checkpoint::QuantizationConfig result;
  result.method = "mxfp4";
  for (const auto& packing : plan.linears) result.linears.emplace(packing.info.name, packing.info);
  return result;
}

/// Whether another program's quantization_config says so.
bool states(const std::filesystem::path& folder, const char* key, const char* value) {
  if (!io::is_folder(folder) || !io::path_exists(folder / "config.json")) return false;
  const auto stated = checkpoint::stated_quantization(checkpoint::read_config_file(folder), folder);
  return stated && stated->foreign && stated->json.is_object() && stated->json.value(key, io::Json()) == value;
}

}  // namespace

bool is_mxfp4(const std::filesystem::path& folder) {
  return states(folder, "quant_method", "mxfp4") || states(folder, "format", "mxfp4-pack-quantized");
}

ConversionReport plan_mxfp4(const Mxfp4Request& request) { return make_report(make_plan(request)); }

ConversionReport import_mxfp4(const Mxfp4Request& request) {
  const Stopwatch watch;
  const ImportPlan plan = make_plan(request);
  checkpoint::check_digests(request.input, plan.raw);
  ConversionReport report = make_report(plan);
  std::vector<io::PlannedTensor> planned = plan.carried;
  for (const auto& packing : plan.linears)
    std::ranges::move(checkpoint::planned_planes(packing.info), std::back_inserter(planned));
  SharedFolder output(request.sharing, request.output, request.overwrite, {request.input},
                      former_outputs(request.input));
  io::CheckpointWriter writer(output.staging(), std::move(planned), with_companions(request.write, request.input),
                              output.shard_files());
  const auto units = mxfp4_units(plan);
  SharedWork work(output, writer, units);
  Progress progress("repack", work.cost(), "bytes");
  for (size_t unit = 0; unit < units.size(); ++unit) {
    if (!work.mine(unit)) continue;
    if (unit < plan.linears.size()) {
      write_linear(plan, plan.linears[unit], writer);
    } else {
      writer.copy(plan.raw, units[unit].name);
    }
    work.done(unit, nullptr);
    progress.advance(units[unit].cost);
  }
  work.gather();
  add_notes(report, output.notes());
  return finished(
      std::move(report), writer, output, watch, checkpoint::bases_through(plan.folder), [&](const auto& to) {
        return carry_companions(request.input, to, plan.folder.config, quantization_of(plan), request.write);
      });
}

}  // namespace w4q::pipeline
