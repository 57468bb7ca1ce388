#include "pipeline/gguf_import.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/gguf_blocks.h"
#include "formats/scheme_registry.h"
#include "gguf/config.h"
#include "gguf/rotary_rows.h"
#include "gguf/tokenizer.h"
#include "io/gguf.h"
#include "io/output.h"
#include "model/architecture.h"
#include "model/model.h"
#include "pipeline/gguf_packed.h"
#include "pipeline/output_rules.h"

namespace w4q::pipeline {
namespace {

constexpr std::string_view half_target = "hf16", full_target = "hf-f32", packed_target = "w4q";

struct ImportedTensor {
  std::string name;
  const io::GgufTensor* source = nullptr;
  DType dtype = DType::f16;
  Shape shape = {};
  int64_t part = -1;                           ///< of the source, which has several; negative: it is all of it
  float offset = 0;                            ///< that the source has added
  bool rotary = false;                         ///< rows are in the order of the architecture "llama"
  std::optional<formats::Scheme> packed = {};  ///< codes and scales are kept
};

struct Source {
  io::GgufFile file;
  io::Json config;
  model::ModelConfig parsed;
  std::optional<gguf::TokenizerFiles> tokenizer;
  std::vector<ImportedTensor> tensors;
  checkpoint::QuantizationConfig quantization;
};

std::optional<DType> plain_dtype(GgmlType type) {
  switch (type) {
    case GgmlType::f32:
      return DType::f32;
    case GgmlType::f16:
      return DType::f16;
    case GgmlType::bf16:
      return DType::bf16;
    default:
      return std::nullopt;
  }
}

bool is_matrix(const io::GgufTensor& tensor, GgmlType type) { return tensor.type == type && tensor.shape.size() == 2; }

/// True when the lower half of every F32 is zero.
bool is_bf16_in_f32(std::span<const std::byte> bytes) {
  uint32_t bits = 0;
  for (size_t at = 0; at < bytes.size() && (bits & 0xFFFF) == 0; at += sizeof bits) {
    std::memcpy(&bits, bytes.data() + at, sizeof bits);
  }
  return (bits & 0xFFFF) == 0;
}

/// The type of everything that has no 16-bit type of its own: BF16 where the file has BF16 matrices, or F32 ones that
/// were BF16 once.
DType common_dtype(const io::GgufFile& file, std::string_view to) {
  if (to == full_target) return DType::f32;
  const auto& tensors = file.header().tensors;
  const auto has = [&](GgmlType type) {
    return std::ranges::any_of(tensors, [&](const auto& tensor) { return is_matrix(tensor, type); });
  };
  if (has(GgmlType::bf16)) return DType::bf16;
  const bool widened = has(GgmlType::f32) && std::ranges::all_of(tensors, [&](const auto& tensor) {
                         return !is_matrix(tensor, GgmlType::f32) || is_bf16_in_f32(file.bytes(tensor));
                       });
  return widened ? DType::bf16 : DType::f16;
}

/// True when every value of an F32 vector can be stored as `dtype`.
bool holds_vector(const io::GgufFile& file, const io::GgufTensor& tensor, float offset, DType dtype) {
  std::vector<float> values(static_cast<size_t>(tensor.shape[0])), back(values.size());
  widen(file.bytes(tensor), DType::f32, values);
  for (float& value : values) value -= offset;
  std::vector<std::byte> bytes(values.size() * 2);
  narrow(values, dtype, bytes);
  widen(bytes, dtype, back);
  return values == back;
}

DType choose_dtype(const io::GgufFile& file, const io::GgufTensor& tensor, float offset, DType common) {
  const auto plain = plain_dtype(tensor.type);
  if (common == DType::f32 || !plain) return common;
  if (*plain != DType::f32) return *plain;
  return tensor.shape.size() == 1 && !holds_vector(file, tensor, offset, common) ? DType::f32 : common;
}

/// A part is a matrix of a tensor of three dimensions; a matrix of one row may be a vector.
bool holds_shape(const io::GgufTensor& tensor, const model::Parameter& parameter) {
  const Shape &found = tensor.shape, &wanted = parameter.shape;
  if (parameter.gguf_part >= 0) {
    return found.size() == 3 && parameter.gguf_part < found[0] && Shape(found.begin() + 1, found.end()) == wanted;
  }
  return found == wanted || (wanted.size() == 2 && wanted[0] == 1 && found == Shape{wanted[1]});
}

ImportedTensor find_tensor(const io::GgufFile& file, const model::Parameter& parameter, bool permuted, DType common) {
  const std::string& name = parameter.gguf;
  const auto* source = file.find(name);
  if (source == nullptr) {
    throw Error(ErrorCode::bad_file, concat(printable(file.path().native()), ": tensor \"", name, "\" is missing"))
        .detail("needed for " + parameter.name);
  }
  if (!holds_shape(*source, parameter)) {
    throw Error(ErrorCode::bad_file,
                concat(printable(file.path().native()), ": tensor \"", name, "\" has the wrong shape"))
        .detail(concat("expected ", shape_text(parameter.shape), " by the metadata, got ", shape_text(source->shape)));
  }
  if (!formats::gguf_decodes(source->type)) {
    throw Error(ErrorCode::unsupported,
                concat(name, ": tensors of type ", ggml_type_name(source->type), " cannot be decoded"))
        .detail("supported: F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS");
  }
  return {.name = parameter.name,
          .source = source,
          .dtype = choose_dtype(file, *source, parameter.gguf_offset, common),
          .shape = parameter.shape,
          .part = parameter.gguf_part,
          .offset = parameter.gguf_offset,
          .rotary = permuted && parameter.rotary_rows};
}

/// A tensor that no parameter needs may change what the model computes, so it is not dropped silently.
void refuse_unknown(const io::GgufFile& file, const std::vector<ImportedTensor>& tensors) {
  std::set<const io::GgufTensor*> used;
  for (const auto& tensor : tensors) used.insert(tensor.source);
  for (const auto& tensor : file.header().tensors) {
    if (used.contains(&tensor) || tensor.name == gguf::rope_factors_tensor) continue;
    throw Error(ErrorCode::unsupported,
                concat(printable(tensor.name), ": no such tensor in models of this architecture"))
        .detail("in " + printable(file.path().native()));
  }
}

/// Matrices whose blocks an integer scheme can hold keep their codes.
void choose_packed(Source& source, DType common) {
  source.quantization.method = "gguf";
  for (auto& tensor : source.tensors) {
    const auto& from = *tensor.source;
    if (tensor.shape.size() == 2) tensor.packed = scheme_of_gguf(from.type);
    if (!tensor.packed) continue;
    const std::string name(model::module_path(tensor.name));
    const checkpoint::PackedPass pass{*tensor.packed, std::string(formats::canonical_layout)};
    source.quantization.linears[name] = {name, tensor.shape[0], tensor.shape[1], common, {pass}, false};
  }
}

Source open_source(const GgufImportRequest& request) {
  const auto known = gguf_import_targets();
  if (std::ranges::find(known, request.to) == known.end()) {
    throw Error(ErrorCode::bad_argument, concat("--to ", request.to, ": a GGUF file cannot become this"))
        .detail("from a GGUF file: " + join(known));
  }
  Source source{.file = io::GgufFile::open(request.input),
                .config = {},
                .parsed = {},
                .tokenizer = {},
                .tensors = {},
                .quantization = {}};
  const auto& file = source.file;
  const gguf::GgufKeys keys(file.header().metadata, request.input.native());
  const DType common = common_dtype(file, request.to);
  source.config = gguf::config_from_gguf(file, keys, common);
  source.parsed = model::parse_config(source.config, request.input.native());
  if (request.tokenizer && keys.text("tokenizer.ggml.model")) source.tokenizer = gguf::tokenizer_from_gguf(keys);
  for (const auto& parameter : model::parameters(source.parsed)) {
    source.tensors.push_back(find_tensor(file, parameter, source.parsed.architecture->gguf_rotary_pairs, common));
  }
  refuse_unknown(file, source.tensors);
  gather_parts(source.tensors, &ImportedTensor::source);  // each is read once
  if (request.to == packed_target) choose_packed(source, common);
  return source;
}

const checkpoint::PackedLinearInfo& packed_info(const Source& source, const ImportedTensor& tensor) {
  return source.quantization.linears.at(std::string(model::module_path(tensor.name)));
}

/// What a tensor becomes: itself, or its planes.
std::vector<io::PlannedTensor> planned_tensors(const Source& source, const ImportedTensor& tensor) {
  if (tensor.packed) return checkpoint::planned_planes(packed_info(source, tensor));
  return {{tensor.name, tensor.dtype, tensor.shape}};
}

/// Of a part, those of a part.
uint64_t source_bytes(const ImportedTensor& tensor) {
  const uint64_t parts = tensor.part < 0 ? 1 : static_cast<uint64_t>(tensor.source->shape[0]);
  return tensor.source->size / parts;
}

ConversionReport make_report(const Source& source) {
  ConversionReport report;
  for (const auto& tensor : source.tensors) {
    int64_t after = 0;
    for (const auto& planned : planned_tensors(source, tensor)) after += planned.size();
    const std::string to = tensor.packed ? formats::to_string(*tensor.packed) : std::string(dtype_name(tensor.dtype));
    report.tensors.push_back({tensor.name,
                              std::string(ggml_type_name(tensor.source->type)),
                              to,
                              tensor.shape,
                              static_cast<int64_t>(source_bytes(tensor)),
                              after,
                              {}});
  }
  report.notes = source.file.header().warnings;
  if (!source.tokenizer) report.notes.emplace_back("the output has no tokenizer");
  return report;
}

using RowBytes = std::function<std::span<const std::byte>(int64_t row)>;

/// Codes and scales as they are, compared with the blocks in what they decode to.
ConversionError convert_packed(const Source& source, const ImportedTensor& tensor, const RowBytes& row_bytes,
                               io::CheckpointWriter& writer) {
  const auto& info = packed_info(source, tensor);
  const GgmlType type = tensor.source->type;
  const auto weight = packed_from_gguf(type, info.n, info.k, row_bytes);
  const auto& scheme = formats::scheme_row(formats::SchemeFamily::integer);
  scheme.validate(weight, tensor.name);
  std::atomic<int64_t> changed = 0;
  parallel_for(info.n, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> expected(static_cast<size_t>(info.k)), found(expected.size());
    for (int64_t row = begin; row < end; ++row) {
      formats::gguf_decode(type, row_bytes(row), expected);
      scheme.decode_row(weight, row, found);
      for (size_t col = 0; col < found.size(); ++col) changed += expected[col] != found[col];
    }
  });
  ensure(changed == 0, concat(tensor.name, ": planes and blocks decode to different values"));
  for (const auto& plane : weight.planes)
    writer.write(checkpoint::plane_name(info.name, 0, plane.spec.role), plane.bytes.bytes());
  return {};
}

ConversionError convert(const Source& source, const ImportedTensor& tensor, io::CheckpointWriter& writer) {
  const auto& from = *tensor.source;
  const int64_t head_dim = source.parsed.head_dim;
  // A vector whose elements change places is a matrix of one column.
  const bool column = tensor.shape.size() == 1 && tensor.rotary;
  const int64_t k = column ? 1 : tensor.shape.back(), rows = element_count(tensor.shape) / k;
  const int64_t first = std::max<int64_t>(0, tensor.part) * rows;
  const uint64_t from_bytes = column ? from.size / static_cast<uint64_t>(rows) : from.row_bytes();
  const auto row_of = [&](int64_t row) {
    return first + (tensor.rotary ? gguf::rotary_row_to_gguf(row, head_dim) : row);
  };
  const auto bytes_of_row = [&](int64_t row) {
    return source.file.bytes(from).subspan(static_cast<size_t>(row_of(row)) * from_bytes, from_bytes);
  };
  if (tensor.packed) return convert_packed(source, tensor, bytes_of_row, writer);
  RowSource rows_in{rows, k, {}, {}};
  if (plain_dtype(from.type) == tensor.dtype && tensor.offset == 0) {
    rows_in.copy = [&](int64_t row, std::span<std::byte> bytes) {
      std::ranges::copy(bytes_of_row(row), bytes.begin());
    };
  } else {
    rows_in.read = [&](int64_t row, std::span<float> values) {
      formats::gguf_decode(from.type, bytes_of_row(row), values);
      if (tensor.offset == 0) return;
      for (float& value : values) value -= tensor.offset;
    };
  }
  const GgmlType to = tensor.dtype == DType::f32   ? GgmlType::f32
                      : tensor.dtype == DType::f16 ? GgmlType::f16
                                                   : GgmlType::bf16;
  const RowSink rows_out{
      static_cast<uint64_t>(k * dtype_bits(tensor.dtype) / 8), formats::gguf_largest(to),
      [&](std::span<const float> values, std::span<std::byte> bytes) { narrow(values, tensor.dtype, bytes); },
      [&](std::span<const std::byte> bytes, std::span<float> values) { widen(bytes, tensor.dtype, values); }};
  int64_t written = 0;
  return convert_rows(tensor.name, rows_in, rows_out, [&](std::span<const std::byte> chunk) {
    writer.write_part(tensor.name, written, chunk);
    written += static_cast<int64_t>(chunk.size());
  });
}

void write_json(const std::filesystem::path& path, const io::Json& json) {
  io::write_file(path, json.dump(2) + "\n", false);
}

std::vector<std::string> write_companions(const Source& source, const std::filesystem::path& folder) {
  io::Json config = source.config;
  config[conversion_mark] = "w4q";
  if (!source.quantization.linears.empty()) checkpoint::write_quantization_config(source.quantization, config);
  write_json(folder / "config.json", config);
  write_json(folder / "generation_config.json",
             {{"bos_token_id", config["bos_token_id"]}, {"eos_token_id", config["eos_token_id"]}});
  if (!source.tokenizer) return {};
  write_json(folder / "tokenizer.json", source.tokenizer->tokenizer);
  write_json(folder / "tokenizer_config.json", source.tokenizer->tokenizer_config);
  return {};
}

}  // namespace

std::vector<std::string> gguf_import_targets() {
  return {std::string(half_target), std::string(full_target), std::string(packed_target)};
}

ConversionReport plan_gguf_import(const GgufImportRequest& request) { return make_report(open_source(request)); }

ConversionReport import_gguf(const GgufImportRequest& request) {
  const Stopwatch watch;
  const Source source = open_source(request);
  const auto written = checkpoint::read_digests(request.input);
  ConversionReport report = make_report(source);
  io::OutputFolder output(request.output, request.overwrite, {request.input}, former_outputs(request.input));
  std::vector<io::PlannedTensor> plan;
  for (const auto& tensor : source.tensors)
    std::ranges::move(planned_tensors(source, tensor), std::back_inserter(plan));
  io::CheckpointWriter writer(output.staging(), std::move(plan), request.write);
  int64_t total = 0;
  for (const auto& tensor : report.tensors) total += tensor.bytes_before;
  Progress progress("import", total, "bytes");
  for (size_t i = 0; i < source.tensors.size(); ++i) {
    const io::GgufTensor& from = *source.tensors[i].source;
    const bool first = i == 0 || source.tensors[i - 1].source != &from;
    const bool last = i + 1 == source.tensors.size() || source.tensors[i + 1].source != &from;
    if (written && first) {
      const auto found = io::hash_tensor(ggml_type_name(from.type), from.shape, source.file.bytes(from));
      io::check_digest(written->tensors, from.name, found, request.input.native());
    }
    report.tensors[i].error = convert(source, source.tensors[i], writer);
    if (last) source.file.release(from);
    progress.advance(report.tensors[i].bytes_before);
  }
  return finished(std::move(report), writer, output, watch, {},
                  [&](const auto& to) { return write_companions(source, to); });
}

}  // namespace w4q::pipeline
