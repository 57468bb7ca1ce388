#include "audit/variants.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "audit/checkpoint_copy.h"
#include "audit/sources.h"
#include "checkpoint/dialect/dialect.h"
#include "checkpoint/digests.h"
#include "core/text.h"
#include "formats/integer.h"
#include "formats/lut.h"
#include "laws/registries.h"
#include "model/model.h"
#include "pipeline/convert_model.h"
#include "pipeline/repack_model.h"
#include "repack/layout_registry.h"
#include "support.h"

namespace w4q::audit {
namespace {

namespace fs = std::filesystem;
using formats::PackedWeight;
using formats::Scheme;

// ---- packed ones ----------------------------------------------------------------------------------------------------

const quantize::QuantizerRow* quantizer_of(const Scheme& scheme) {
  for (const auto& row : quantize::quantizer_registry()) {
    if (row.accepts(scheme)) return &row;
  }
  return nullptr;
}

/// Inputs sorted into groups by the size of their columns, as GPTQ's act order does.
PackedWeight encode_in_act_order(Scheme scheme, const std::vector<float>& values, int64_t n, int64_t k) {
  std::vector<int64_t> order(static_cast<size_t>(k));
  std::iota(order.begin(), order.end(), 0);
  std::vector<double> energy(static_cast<size_t>(k));
  for (size_t i = 0; i < values.size(); ++i) energy[i % energy.size()] += double{values[i]} * double{values[i]};
  std::ranges::stable_sort(order, std::greater<>{}, [&](int64_t col) { return energy[static_cast<size_t>(col)]; });
  auto sorted = values;
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t col = 0; col < k; ++col) {
      sorted[static_cast<size_t>(row * k + col)] =
          values[static_cast<size_t>(row * k + order[static_cast<size_t>(col)])];
    }
  }
  Scheme plain = scheme;
  plain.act_order = false;
  const PackedWeight in_order = test::encoded(plain, sorted, n, k);
  PackedWeight weight = formats::allocate_integer(scheme, n, k);
  for (auto& plane : weight.planes) {
    const bool groups = plane.spec.role == formats::PlaneRole::group_index;
    if (!groups) plane.bytes = in_order.plane(plane.spec.role).bytes.clone();
  }
  auto index = weight.plane(formats::PlaneRole::group_index).bytes.as<int32_t>();
  for (size_t at = 0; at < order.size(); ++at) {
    index[static_cast<size_t>(order[at])] = static_cast<int32_t>(static_cast<int64_t>(at) / scheme.block);
  }
  formats::scheme_row(scheme.family).recode(weight, values);
  return weight;
}

PackedWeight encode(const Scheme& scheme, const std::vector<float>& values, int64_t n, int64_t k,
                    std::span<const float> table) {
  if (scheme.act_order) return encode_in_act_order(scheme, values, n, k);
  return formats::scheme_row(scheme.family).encode(scheme, values, n, k, table);
}

bool is_layer_linear(std::string_view name) {
  return name.find(".layers.") != std::string_view::npos && name.ends_with("_proj.weight");
}

/// By the definition of the scheme, where no quantizer takes it.
void write_by_definition(const fs::path& source, const fs::path& out, const Scheme& scheme, std::string_view layout,
                         std::span<const float> table) {
  const auto folder = checkpoint::open_folder(source);
  CheckpointCopy copy = CheckpointCopy::of(folder);
  checkpoint::QuantizationConfig quantization;
  quantization.method = "rtn";
  for (const auto& [name, info] : folder.tensors.tensors()) {
    if (!is_layer_linear(name)) continue;
    const std::string linear(model::module_path(name));
    if (!repack::layout_row(layout).accepts(scheme, info.shape[0], info.shape[1], nullptr)) continue;
    const auto weight = encode(scheme, values_of(copy.at(name)), info.shape[0], info.shape[1], table);
    copy.tensors.erase(name);
    put_planes(copy, linear, 0, repack::layout_row(layout).pack(weight));
    quantization.linears[linear] = {linear, info.shape[0], info.shape[1], info.dtype, {{scheme, std::string(layout)}}};
  }
  checkpoint::write_quantization_config(quantization, copy.config);
  copy.write(out);
  checkpoint::record_digests(out, checkpoint::open_digests(out).tensors, {folder.tensors.digests()});
}

/// Linears of the source that a layout or dialect does not take.
std::vector<std::string> left_out(const fs::path& source, const std::function<bool(int64_t, int64_t)>& takes) {
  std::vector<std::string> keep;
  const auto tensors = io::Checkpoint::open(source);
  for (const auto& [name, info] : tensors.tensors()) {
    if (is_layer_linear(name) && !takes(info.shape[0], info.shape[1])) keep.emplace_back(model::module_path(name));
  }
  return keep;
}

pipeline::QuantizeRequest request_for(const fs::path& source, const fs::path& out, const Scheme& scheme) {
  pipeline::QuantizeRequest request;
  request.model = source;
  request.output = out;
  request.scheme = scheme;
  request.method = quantizer_of(scheme)->name;
  return request;
}

void write_canonical(const fs::path& source, const fs::path& out, const Scheme& scheme,
                     const std::vector<std::string>& keep, std::span<const float> table) {
  const bool of_table = scheme.family == formats::SchemeFamily::lut && !std::ranges::equal(table, formats::nf4_table());
  if (quantizer_of(scheme) == nullptr || of_table) {
    return write_by_definition(source, out, scheme, formats::canonical_layout, table);
  }
  auto request = request_for(source, out, scheme);
  request.keep = keep;
  // The search over 2^16 states takes long: attention alone, whose matrices are as large as those of the MLPs.
  if (scheme.family == formats::SchemeFamily::exl3) request.keep.emplace_back("*.mlp.*");
  pipeline::quantize_model(request);
}

void repack(const fs::path& from, const fs::path& out, std::string_view layout) {
  pipeline::RepackRequest request;
  request.input = from;
  request.output = out;
  request.layout = layout;
  pipeline::repack_model(request);
}

/// To calibrate with.
pipeline::CalibrationText short_text() {
  pipeline::CalibrationText text;
  text.ids = bundled_model() / "own/selfgen.ids.u16";
  text.samples = 4;
  text.length = 128;
  return text;
}

void convert(const fs::path& from, const fs::path& out, std::string_view to, bool scales_inputs = false) {
  pipeline::ConvertRequest request;
  request.input = from;
  request.output = out;
  request.to = to;
  request.allow_lossy = true;  // zero points that GPTQ's version 1 cannot say go up by one
  if (scales_inputs) request.activations = {.text = short_text(), .inputs = true};
  pipeline::convert_model(request);
}

// ---- the rows -------------------------------------------------------------------------------------------------------

void add_dialects(std::vector<VariantRow>& rows) {
  for (const auto& dialect : checkpoint::dialect_registry()) {
    if (!dialect.stacks.empty()) continue;  // of mixtures alone
    std::set<std::string> seen;
    for (const Scheme& scheme : test::every_scheme()) {
      const auto fit_of = [&dialect, scheme](int64_t n, int64_t k) {
        const auto fit = dialect.fit({"w", n, k, DType::bf16, {{scheme, std::string(formats::canonical_layout)}}});
        // Zeros and orders that it could leave out if their values were others are lost.
        const bool holds = fit.loses.empty() && fit.scheme &&
                           (scheme.block == formats::whole_row || k % scheme.block == 0) &&
                           fit.scheme->asymmetric >= scheme.asymmetric && fit.scheme->act_order == scheme.act_order;
        return holds ? fit.scheme : std::nullopt;
      };
      const auto fit = fit_of(256, 256);
      if (!fit || !seen.insert(formats::to_string(*fit)).second) continue;
      const bool fp4 = dialect.name.ends_with("fp4");
      const bool scales_inputs = dialect.needs_inputs != nullptr && dialect.needs_inputs(*fit);
      rows.push_back({concat(dialect.name, " ", formats::to_string(scheme)), "llama",
                      [&dialect, scheme, fit_of, fp4, scales_inputs](const fs::path& source, const fs::path& out) {
                        const test::TemporaryFolder temporary;
                        const auto keep =
                            left_out(source, [&](int64_t n, int64_t k) { return fit_of(n, k).has_value(); });
                        write_canonical(source, temporary / "planes", scheme, keep,
                                        fp4 ? formats::fp4_table() : formats::nf4_table());
                        convert(temporary / "planes", out, dialect.name, scales_inputs);
                      }});
    }
  }
}

/// Steps that want activations.
pipeline::CalibratedRequest calibrated() {
  pipeline::CalibratedRequest result;
  result.text = short_text();
  return result;
}

using Adjust = std::function<void(pipeline::QuantizeRequest&)>;

VariantRow quantized(std::string name, std::string source, std::string_view scheme, const Adjust& adjust) {
  return {std::move(name), std::move(source),
          [scheme = formats::parse_scheme(scheme), adjust](const fs::path& from, const fs::path& out) {
            auto request = request_for(from, out, scheme);
            adjust(request);
            pipeline::quantize_model(request);
          }};
}

Adjust with_steps(std::string_view steps) {
  return [steps = quantize::parse_steps(steps)](pipeline::QuantizeRequest& request) {
    request.options.steps = steps;
    if (steps.any(&quantize::StepRow::needs_statistics)) request.calibrated = calibrated();
  };
}

Adjust with_residual(std::string_view residual, bool shared) {
  return [residual = formats::parse_schemes(residual), shared](pipeline::QuantizeRequest& request) {
    request.residual = residual;
    request.rotation.shared = shared;
  };
}

void add_ways_of_quantizing(std::vector<VariantRow>& rows) {
  const auto plain = [](pipeline::QuantizeRequest&) {};
  rows.push_back(quantized("two kbit passes", "llama", "kbit4-b32-e4m4", with_residual("kbit3-b32-e4m4", true)));
  rows.push_back(quantized("two rotated passes", "llama", "rotated4-d128", with_residual("rotated2-d128", true)));
  rows.push_back(quantized("passes rotated apart", "llama", "rotated3-d128", with_residual("rotated3-d128", false)));
  rows.push_back(quantized("awq", "llama", "kbit4-b32-e4m4", with_steps("awq")));
  rows.push_back(quantized("awq of integers", "llama", "int4-g128-f16-asym", with_steps("awq")));
  rows.push_back(quantized("fed back errors", "llama", "kbit3-b32-f16", with_steps("feedback")));
  rows.push_back(quantized("learned tables", "llama", "kbit3-b32-e4m4", with_steps("lloyd+search")));
  rows.push_back(quantized("rotated at run time", "llama", "kbit3-b32-e4m4", with_steps("rotate128")));
  rows.push_back(quantized("folded rotations", "llama", "kbit4-b32-e4m4", with_steps("fold")));
  rows.push_back(quantized("folded rotations of integers", "qwen2", "int4-g128-f16", with_steps("fold")));
  rows.push_back(quantized("shards", "llama", "kbit4-b32-e4m4",
                           [](pipeline::QuantizeRequest& request) { request.write.max_shard_bytes = 400'000; }));
  rows.push_back(quantized("qwen2", "qwen2", "kbit4-b32-e4m4", plain));
  rows.push_back(quantized("qwen2 of integers", "qwen2", "int4-g128-f16-asym", plain));
  rows.push_back(quantized("qwen2, head and embeddings", "qwen2", "kbit4-b32-e4m4",
                           [](pipeline::QuantizeRequest& r) { r.lm_head = r.embeddings = true; }));
  rows.push_back(quantized("mistral", "mistral", "kbit4-b32-e4m4", plain));
  rows.push_back(quantized("qwen3", "qwen3", "kbit4-b32-e4m4", plain));
  rows.push_back({"awq in awq-gemm", "llama", [](const fs::path& from, const fs::path& out) {
                    const test::TemporaryFolder temporary;
                    auto request = request_for(from, temporary / "planes", formats::parse_scheme("int4-g128-f16-asym"));
                    with_steps("awq")(request);
                    request.options.steps.find(quantize::StepKind::awq)->input_scales = false;
                    pipeline::quantize_model(request);
                    convert(temporary / "planes", out, "awq-gemm");
                  }});
}

}  // namespace

void write_packed(const fs::path& source, const fs::path& out, const Scheme& scheme, std::string_view layout) {
  const auto& row = repack::layout_row(layout);
  const auto keep = left_out(source, [&](int64_t n, int64_t k) { return row.accepts(scheme, n, k, nullptr); });
  const auto& nf4 = formats::nf4_table();
  if (quantizer_of(scheme) == nullptr) return write_by_definition(source, out, scheme, layout, nf4);
  if (layout == formats::canonical_layout) return write_canonical(source, out, scheme, keep, nf4);
  const test::TemporaryFolder temporary;
  write_canonical(source, temporary / "planes", scheme, keep, nf4);
  repack(temporary / "planes", out, layout);
}

std::vector<VariantRow> every_clean_variant() {
  std::vector<VariantRow> rows;
  const auto schemes = test::every_scheme();
  const auto kinds = weight_kinds();
  const auto add = [&](const Scheme& scheme, const std::string& source) {
    rows.push_back(
        {concat(source, ", ", formats::to_string(scheme)), source, [scheme](const fs::path& from, const fs::path& out) {
           write_packed(from, out, scheme, formats::canonical_layout);
         }});
  };
  for (size_t s = 0; s < schemes.size(); ++s) {
    for (size_t kind = s % 4; kind < kinds.size(); kind += 4) add(schemes[s], "llama " + kinds[kind]);
    for (const int64_t channels : {1, 2, 3, 5, 8, 13, 16, 24, 31, 32, 33, 48, 63, 64}) {
      if ((static_cast<size_t>(channels) + s) % 7 == 0) add(schemes[s], concat("tiny ", channels));
    }
  }
  std::vector<VariantRow> ways;
  add_ways_of_quantizing(ways);
  add_dialects(ways);
  for (size_t way = 0; way < ways.size(); ++way) {
    if (ways[way].source != "llama") continue;
    for (size_t kind = way % 4; kind < kinds.size(); kind += 4) {
      // Of one sign, with so few codes: nothing but the base tells it from zero points that are off by one.
      if (kinds[kind] == "positive" && ways[way].name.find(" int2") != std::string::npos) continue;
      const std::string source = "llama " + kinds[kind];
      rows.push_back({concat(source, ", ", ways[way].name), source, ways[way].make});
    }
  }
  return rows;
}

std::vector<VariantRow> every_variant() {
  std::vector<VariantRow> rows;
  for (const auto& [scheme, layout] : test::every_scheme_and_layout()) {
    rows.push_back({concat(formats::to_string(scheme), " ", layout), "llama",
                    [scheme = scheme, layout = layout](const fs::path& source, const fs::path& out) {
                      write_packed(source, out, scheme, layout);
                    }});
  }
  add_dialects(rows);
  add_ways_of_quantizing(rows);
  return rows;
}

}  // namespace w4q::audit
