#include <algorithm>
#include <set>

#include "core/error.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/dialect/turboquant.h"
#include "formats/scheme_registry.h"
#include "io/checkpoint.h"
#include "io/output.h"
#include "model/config.h"
#include "model/model.h"
#include "pipeline/output_rules.h"
#include "pipeline/turboquant.h"
#include "pipeline/turboquant_config.h"

namespace w4q::pipeline {
namespace {

using formats::PackedWeight;

/// A linear as the files have it.
struct ForeignLinear {
  checkpoint::PackedLinearInfo info;  ///< as w4q will have it
  std::string stored;                 ///< its name there: "model_layers_0_mlp_up_proj"
};

struct Source {
  io::Json config;
  TurboQuantConfig quantization;
  io::Checkpoint packed, kept;
  std::vector<ForeignLinear> linears;
  std::vector<io::PlannedTensor> carried;  ///< under their names in the output
};

std::string stored_name(std::string module) {
  std::ranges::replace(module, '.', '_');
  return module;
}

/// Refuses what this reader does not know, by the first tensor of it.
void check_known(const io::Checkpoint& packed) {
  for (const auto& [name, info] : packed.tensors()) {
    const auto refuse = [&](std::string_view what) {
      throw Error(ErrorCode::unsupported, concat(printable(name), ": ", what))
          .hint("quantize again with norm_codec fp32 or fp16, without entropy coding and embedding quantization");
    };
    if (name.find(".norms.") != std::string::npos) refuse("factored norms");
    if (name.ends_with(".indices_ec") || name.ends_with(".indices_ec_shape")) refuse("entropy-coded indices");
    if (name.ends_with(".qe_mode") || name.ends_with(".qe_meta")) refuse("a quantized embedding of its own format");
  }
}

formats::Scheme scheme_of(const TurboQuantConfig& config, const io::Checkpoint& packed, const std::string& norms,
                          int bits, int64_t k) {
  const DType dtype = packed.at(norms).dtype;
  if (dtype != DType::f32 && dtype != DType::f16) {
    throw Error(ErrorCode::bad_file, concat(printable(norms), ": norms of type ", dtype_name(dtype)))
        .detail("expected F32 or F16");
  }
  const formats::ScaleType scale = dtype == DType::f32 ? formats::ScaleType::f32 : formats::ScaleType::f16;
  const formats::Scheme scheme{formats::SchemeFamily::rotated, bits, config.group, scale};
  const std::string name = formats::to_string(scheme);
  if (formats::parse_scheme(name) != scheme) throw Error(ErrorCode::unsupported, name + ": no such scheme");
  if (auto why = formats::turboquant_loss(scheme, k); !why.empty()) {
    throw Error(ErrorCode::unsupported, concat(printable(norms), ": ", name, " with ", k, " inputs")).detail(why);
  }
  if (config.group == formats::whole_row && (k & (k - 1)) != 0) {
    throw Error(ErrorCode::bad_file, concat(printable(norms), ": a Hadamard rotation of ", k, " inputs"))
        .detail("its width must be a power of two");
  }
  return scheme;
}

void check_tensor(const io::Checkpoint& packed, const std::string& name, const Shape& shape) {
  const io::TensorInfo& found = packed.at(name);
  if (found.shape == shape) return;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": wrong shape"))
      .detail(concat("expected ", shape_text(shape), ", found ", shape_text(found.shape)));
}

/// The tensors of pass `pass`: "X.indices", "X.pass2_norms" …
std::string tensor_of(const std::string& stored, size_t pass, std::string_view role) {
  return concat(stored, pass == 0 ? "." : ".pass2_", role);
}

checkpoint::PackedLinearInfo linear_info(const Source& source, const std::string& module, const std::string& stored,
                                         const Shape& shape, uint64_t index) {
  const TurboQuantConfig& config = source.quantization;
  checkpoint::PackedLinearInfo info{module, shape[0], shape[1], DType::bf16, {}};
  const size_t passes = source.packed.contains(tensor_of(stored, 1, "indices")) ? 2 : 1;
  if (passes == 2 && config.residual_bits == 0) {
    throw Error(ErrorCode::bad_file, concat(printable(stored), ": has a second pass, which the config does not know"));
  }
  for (size_t pass = 0; pass < passes; ++pass) {
    const std::string norms = tensor_of(stored, pass, "norms");
    const auto scheme =
        scheme_of(config, source.packed, norms, pass == 0 ? config.bits : config.residual_bits, shape[1]);
    check_tensor(source.packed, tensor_of(stored, pass, "indices"),
                 formats::turboquant_indices_shape(shape[0], shape[1]));
    check_tensor(source.packed, norms, formats::turboquant_norms_shape(scheme, shape[0], shape[1]));
    check_tensor(source.packed, pass == 0 ? "codebook" : tensor_of(stored, 1, "codebook"), {int64_t{1} << scheme.bits});
    info.passes.push_back(
        {scheme, std::string(formats::canonical_layout), {config.group, config.pass_seed(pass, index)}});
  }
  return info;
}

/// Every parameter of the architecture, packed or kept, in model order: the order that per-layer seeds count in.
void find_tensors(const model::ModelConfig& model, Source& source) {
  std::set<std::string> taken;
  uint64_t index = 0;
  auto parameters = model::parameters(model);
  const bool has_head = std::ranges::any_of(parameters, [](const auto& p) { return p.name == "lm_head.weight"; });
  if (!has_head && source.packed.contains("lm_head.indices")) {
    parameters.push_back({.name = "lm_head.weight",
                          .shape = {model.vocab_size, model.hidden_size},
                          .linear = true,
                          .gguf = "output.weight"});
  }
  for (const auto& parameter : parameters) {
    const std::string module(model::module_path(parameter.name)), stored = stored_name(module);
    if (parameter.linear && source.packed.contains(stored + ".indices")) {
      source.linears.push_back({linear_info(source, module, stored, parameter.shape, index++), stored});
      if (const std::string bias = stored + ".bias"; source.packed.contains(bias)) {
        const io::TensorInfo& found = source.packed.at(bias);
        source.carried.push_back({module + ".bias", found.dtype, found.shape});
        taken.insert(module + ".bias");
      }
      taken.insert(parameter.name);
    }
  }
  for (const auto& [name, info] : source.kept.tensors()) {
    if (!taken.contains(name)) source.carried.push_back({name, info.dtype, info.shape});
  }
}

Source open_source(const std::filesystem::path& folder) {
  const auto path = folder / turboquant_config_file;
  const TurboQuantConfig quantization = parse_turboquant_config(io::read_json(path), path.string());
  Source source{.config = checkpoint::read_config_file(folder),
                .quantization = quantization,
                .packed = io::Checkpoint::open(folder / "model.safetensors"),
                .kept = io::Checkpoint::open(folder / turboquant_kept_file),
                .linears = {},
                .carried = {}};
  source.config.erase(conversion_mark);
  check_known(source.packed);
  find_tensors(model::read_config(source.config, folder), source);
  if (source.linears.empty()) throw Error(ErrorCode::bad_file, folder.string() + ": holds no packed linear");
  // A head that is packed by itself is no longer the embeddings'.
  if (source.packed.contains("lm_head.indices")) source.config["tie_word_embeddings"] = false;
  return source;
}

PackedWeight read_pass(const Source& source, const ForeignLinear& linear, size_t pass) {
  const auto indices = source.packed.load(tensor_of(linear.stored, pass, "indices"));
  const auto norms = source.packed.load(tensor_of(linear.stored, pass, "norms"));
  const auto codebook = source.packed.load(pass == 0 ? "codebook" : tensor_of(linear.stored, 1, "codebook"));
  if (indices->dtype != DType::u8 || codebook->dtype != DType::f32) {
    throw Error(ErrorCode::bad_file, concat(printable(linear.stored), ": indices are not U8, or the codebook not F32"));
  }
  const Buffer table = Buffer::copy_of(codebook->bytes);  // files may hold it at any address
  const formats::Scheme& scheme = linear.info.passes[pass].scheme;
  PackedWeight weight = formats::decode_turboquant(scheme, linear.info.n, linear.info.k, indices->bytes, norms->bytes,
                                                   table.as<float>(), linear.stored);
  formats::scheme_row(scheme.family).validate(weight, linear.stored);
  return weight;
}

/// Writes a pass, and proves that it says what was read.
void convert_pass(const Source& source, const ForeignLinear& linear, size_t pass, io::CheckpointWriter& writer,
                  ConvertedLinear& report) {
  const PackedWeight weight = read_pass(source, linear, pass);
  for (const auto& plane : weight.planes) {
    writer.write(checkpoint::plane_name(linear.info.name, pass, plane.spec.role), plane.bytes.bytes());
  }
  const auto same = [&](std::string_view role, const Buffer& bytes) {
    return std::ranges::equal(source.packed.load(tensor_of(linear.stored, pass, role))->bytes, bytes.bytes());
  };
  ensure(same("indices", formats::turboquant_indices(weight)) &&
             same("norms", formats::turboquant_norms(weight, weight.plane(formats::PlaneRole::scales).spec.dtype)),
         linear.stored + ": its planes do not give the bytes that were read");
  report.proof.codes += weight.n * weight.k;
  report.proof.codes_equal += weight.n * weight.k;
}

ConvertReport make_report(const Source& source) {
  ConvertReport report;
  report.from = turboquant_name;
  report.to = "w4q";
  for (const auto& linear : source.linears) {
    ConvertedLinear row;
    row.name = linear.info.name;
    row.from = row.to = linear.info.passes.front().scheme;
    row.shape = {linear.info.n, linear.info.k};
    row.bytes_after = checkpoint::stored_bytes(linear.info);
    for (const auto& [name, info] : source.packed.tensors()) {
      if (name.starts_with(linear.stored + ".")) row.bytes_before += static_cast<int64_t>(info.size());
    }
    report.linears.push_back(std::move(row));
  }
  report.carried = static_cast<int64_t>(source.carried.size());
  for (const auto& tensor : source.carried) report.carried_bytes += tensor.size();
  return report;
}

}  // namespace

bool is_turboquant(const std::filesystem::path& folder) {
  std::error_code unreadable;
  return std::filesystem::exists(folder / turboquant_config_file, unreadable);
}

ConvertReport import_turboquant(const ConvertRequest& request, bool dry_run) {
  const Stopwatch watch;
  const Source source = open_source(request.input);
  ConvertReport report = make_report(source);
  if (dry_run) return report;
  checkpoint::check_digests(request.input, source.packed);
  std::vector<io::PlannedTensor> planned = source.carried;
  checkpoint::QuantizationConfig quantization;
  quantization.method = turboquant_name;
  for (const auto& linear : source.linears) {
    std::ranges::move(checkpoint::planned_planes(linear.info), std::back_inserter(planned));
    quantization.linears.emplace(linear.info.name, linear.info);
  }
  io::OutputFolder output(request.output, request.overwrite, {request.input}, former_outputs(request.input));
  io::CheckpointWriter writer(output.staging(), std::move(planned), with_companions(request.write, request.input));
  Progress progress("convert", static_cast<int64_t>(source.linears.size()), "linears");
  for (size_t i = 0; i < source.linears.size(); ++i) {
    for (size_t pass = 0; pass < source.linears[i].info.passes.size(); ++pass) {
      convert_pass(source, source.linears[i], pass, writer, report.linears[i]);
    }
    progress.advance(1);
  }
  for (const auto& tensor : source.carried) {
    const bool kept = source.kept.contains(tensor.name);
    const std::string stored =
        kept ? tensor.name : stored_name(std::string(tensor.name.substr(0, tensor.name.size() - 5))) + ".bias";
    writer.write(tensor.name, (kept ? source.kept : source.packed).load(stored)->bytes);
  }
  return finished(std::move(report), writer, output, watch, checkpoint::bases_of(request.input),
                  [&](const std::filesystem::path& to) {
                    auto notes = carry_companions(request.input, to, source.config, quantization, request.write);
                    std::filesystem::remove(to / turboquant_config_file);
                    return notes;
                  });
}

}  // namespace w4q::pipeline
