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
#include "gguf/tensor_map.h"
#include "gguf/tokenizer.h"
#include "io/gguf.h"
#include "model/architecture.h"
#include "model/model.h"
#include "pipeline/gguf_packed.h"
#include "pipeline/output_rules.h"
#include "pipeline/shared_output.h"

namespace w4q::pipeline {
namespace {

constexpr std::string_view half_target = "hf16", full_target = "hf-f32", packed_target = "w4q";

/// A tensor of the file, or a part of one, and what it holds of a parameter.
struct ImportedPart {
  const io::GgufTensor* source = nullptr;
  gguf::FilePart file;
};

struct ImportedTensor {
  std::string name;
  DType dtype = DType::f16;
  Shape shape = {};
  std::vector<ImportedPart> parts = {};        ///< each value is in one of them
  std::optional<formats::Scheme> packed = {};  ///< codes and scales are kept
  std::string stack = {};  ///< the tensor of all experts that it goes into; empty: it is one by itself
  int64_t expert = 0, experts = 0;
  bool inputs_first = false;  ///< the stack is [experts, k, n]

  const io::GgufTensor* source() const noexcept { return parts.front().source; }
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

/// True when everything that an F32 tensor holds can be stored as `dtype`.
bool holds_values(const io::GgufFile& file, const ImportedPart& part, DType dtype) {
  const int64_t first = std::max<int64_t>(0, part.file.part) * element_count(part.file.shape);
  const auto bytes = file.bytes(*part.source).subspan(static_cast<size_t>(first) * sizeof(float));
  std::vector<float> values(static_cast<size_t>(element_count(part.file.shape))), back(values.size());
  widen(bytes.first(values.size() * sizeof(float)), DType::f32, values);
  for (float& value : values) value = part.file.from_file(value);
  std::vector<std::byte> narrowed(values.size() * 2);
  narrow(values, dtype, narrowed);
  widen(narrowed, dtype, back);
  return values == back;
}

DType choose_dtype(const io::GgufFile& file, const ImportedPart& part, bool linear, DType common) {
  const auto plain = plain_dtype(part.source->type);
  if (common == DType::f32 || !plain) return common;
  if (*plain != DType::f32) return *plain;
  return !linear && !holds_values(file, part, common) ? DType::f32 : common;
}

/// A part is a matrix of a tensor of three dimensions; a matrix of one row may be a vector.
bool holds_shape(const io::GgufTensor& tensor, const gguf::FilePart& file) {
  const Shape &found = tensor.shape, &wanted = file.shape;
  if (file.part >= 0) {
    return found.size() == 3 && file.part < found[0] && Shape(found.begin() + 1, found.end()) == wanted;
  }
  return found == wanted || (wanted.size() == 2 && wanted[0] == 1 && found == Shape{wanted[1]});
}

ImportedPart find_part(const io::GgufFile& file, gguf::FilePart part, const model::Parameter& parameter) {
  const std::string& name = part.name;
  const auto* source = file.find(name);
  if (source == nullptr) {
    throw Error(ErrorCode::bad_file, concat(printable(file.path().native()), ": tensor \"", name, "\" is missing"))
        .detail("needed for " + parameter.name);
  }
  if (!holds_shape(*source, part)) {
    throw Error(ErrorCode::bad_file,
                concat(printable(file.path().native()), ": tensor \"", name, "\" has the wrong shape"))
        .detail(concat("expected ", shape_text(part.shape), " by the metadata, got ", shape_text(source->shape)));
  }
  if (!formats::gguf_decodes(source->type)) {
    throw Error(ErrorCode::unsupported,
                concat(name, ": tensors of type ", ggml_type_name(source->type), " cannot be decoded"))
        .detail("supported: F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS");
  }
  return {source, std::move(part)};
}

/// Where experts are one tensor in folders, that and the place in it.
void set_stack(const model::ModelConfig& config, const model::Parameter& parameter, ImportedTensor& tensor) {
  const model::MixtureConfig& mixture = config.mixture;
  if (parameter.gguf_part < 0 || mixture.storage == model::ExpertStorage::by_name) return;
  const std::string_view module = model::module_path(parameter.name);
  tensor.stack = module.substr(0, module.rfind('.'));
  tensor.expert = parameter.gguf_part;
  tensor.experts = mixture.experts;
  tensor.inputs_first = mixture.storage == model::ExpertStorage::stacked_in_turn;
}

ImportedTensor find_tensor(const io::GgufFile& file, const model::ModelConfig& config,
                           const model::Parameter& parameter, DType common) {
  ImportedTensor tensor{.name = parameter.name, .dtype = common, .shape = parameter.shape};
  for (auto& part : gguf::file_parts(config, parameter)) {
    tensor.parts.push_back(find_part(file, std::move(part), parameter));
    const DType own = choose_dtype(file, tensor.parts.back(), parameter.linear, common);
    const bool first = tensor.parts.size() == 1;
    tensor.dtype = first || own == tensor.dtype ? own : common;
  }
  set_stack(config, parameter, tensor);
  return tensor;
}

/// A tensor that no parameter needs may change what the model computes, so it is not dropped silently.
void refuse_unknown(const io::GgufFile& file, const std::vector<ImportedTensor>& tensors) {
  std::set<const io::GgufTensor*> used;
  for (const auto& tensor : tensors) {
    for (const auto& part : tensor.parts) used.insert(part.source);
  }
  for (const auto& tensor : file.header().tensors) {
    if (used.contains(&tensor) || gguf::is_rope_factors(tensor.name)) continue;
    throw Error(ErrorCode::unsupported,
                concat(printable(tensor.name), ": no such tensor in models of this architecture"))
        .detail("in " + printable(file.path().native()));
  }
}

/// Whether its blocks are those of a packed linear, whole rows of one type.
bool keeps_codes(const ImportedTensor& tensor) {
  const GgmlType type = tensor.source()->type;
  if (tensor.shape.size() != 2 || !scheme_of_gguf(type)) return false;
  return std::ranges::all_of(tensor.parts, [&](const ImportedPart& part) {
    const gguf::Order& columns = part.file.columns;
    return part.source->type == type && (columns.is_plain(tensor.shape[1]) ||
                                         (columns.size() == tensor.shape[1] && columns.blocks(describe(type).block)));
  });
}

/// Matrices whose blocks a scheme can hold keep their codes.
void choose_packed(Source& source, DType common) {
  source.quantization.method = "gguf";
  for (auto& tensor : source.tensors) {
    if (!keeps_codes(tensor)) continue;
    tensor.packed = scheme_of_gguf(tensor.source()->type);
    tensor.stack.clear();  // planes are the expert's own
    const std::string name(model::module_path(tensor.name));
    const checkpoint::PackedPass pass{*tensor.packed, std::string(formats::canonical_layout)};
    source.quantization.linears[name] = {name, tensor.shape[0], tensor.shape[1], common, {pass}, false};
  }
}

/// A file of several holds a part of the tensors alone.
void refuse_parts(const gguf::GgufKeys& keys) {
  const int64_t parts = keys.integer("split.count").value_or(1);
  if (parts <= 1) return;
  throw keys.error(ErrorCode::unsupported, "split.count", concat("is ", parts, ": this file is one of several"))
      .hint("join them with llama-gguf-split --merge");
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
  refuse_parts(keys);
  const DType common = common_dtype(file, request.to);
  source.config = gguf::config_from_gguf(file, keys, common);
  source.parsed = model::parse_config(source.config, request.input.native());
  const auto vocabulary = keys.text("tokenizer.ggml.model").value_or(std::string(gguf::no_vocabulary));
  if (request.tokenizer && vocabulary != gguf::no_vocabulary) source.tokenizer = gguf::tokenizer_from_gguf(keys);
  for (const auto& parameter : model::parameters(source.parsed)) {
    source.tensors.push_back(find_tensor(file, source.parsed, parameter, common));
  }
  refuse_unknown(file, source.tensors);
  if (const auto* tokens = keys.texts("tokenizer.ggml.tokens");
      tokens != nullptr && request.tokenizer && std::ssize(*tokens) != source.parsed.vocab_size) {
    throw keys.error(ErrorCode::bad_file, "tokenizer.ggml.tokens",
                     concat("has ", tokens->size(), " tokens, token_embd.weight ", source.parsed.vocab_size, " rows"));
  }
  gather_parts(source.tensors, &ImportedTensor::source);  // each is read once
  if (request.to == packed_target) choose_packed(source, common);
  return source;
}

const checkpoint::PackedLinearInfo& packed_info(const Source& source, const ImportedTensor& tensor) {
  return source.quantization.linears.at(std::string(model::module_path(tensor.name)));
}

/// What a tensor becomes: itself, its planes or, of the first expert of a stack, that.
std::vector<io::PlannedTensor> planned_tensors(const Source& source, const ImportedTensor& tensor) {
  if (tensor.packed) return checkpoint::planned_planes(packed_info(source, tensor));
  if (tensor.stack.empty()) return {{tensor.name, tensor.dtype, tensor.shape}};
  if (tensor.expert > 0) return {};
  const int64_t n = tensor.shape[0], k = tensor.shape[1];
  return {{tensor.stack, tensor.dtype, {tensor.experts, tensor.inputs_first ? k : n, tensor.inputs_first ? n : k}}};
}

int64_t bytes_after(const Source& source, const ImportedTensor& tensor) {
  if (!tensor.packed) return element_count(tensor.shape) * dtype_bits(tensor.dtype) / 8;
  int64_t after = 0;
  for (const auto& planned : planned_tensors(source, tensor)) after += planned.size();
  return after;
}

/// Of a part, those of a part.
uint64_t source_bytes(const ImportedTensor& tensor) {
  uint64_t bytes = 0;
  for (const auto& [source, file] : tensor.parts) {
    bytes += source->size / (file.part < 0 ? 1 : static_cast<uint64_t>(source->shape[0]));
  }
  return bytes;
}

ConversionReport make_report(const Source& source) {
  ConversionReport report;
  for (const auto& tensor : source.tensors) {
    const std::string to = tensor.packed ? formats::to_string(*tensor.packed) : std::string(dtype_name(tensor.dtype));
    report.tensors.push_back({tensor.name,
                              std::string(ggml_type_name(tensor.source()->type)),
                              to,
                              tensor.shape,
                              static_cast<int64_t>(source_bytes(tensor)),
                              bytes_after(source, tensor),
                              {}});
  }
  report.notes = source.file.header().warnings;
  if (!source.tokenizer) report.notes.emplace_back("the output has no tokenizer");
  return report;
}

/// Where the rows of a parameter stand: in which parts, and in which rows of these.
class FoundRows {
 public:
  FoundRows(const io::GgufFile& file, const ImportedTensor& tensor) : file_(file), tensor_(tensor) {
    const auto [rows, columns] = gguf::matrix_size(tensor.shape);
    for (const auto& part : tensor.parts) {
      auto& places = places_.emplace_back(static_cast<size_t>(rows), -1);
      for (int64_t row = 0; row < part.file.rows.size(); ++row) {
        places[static_cast<size_t>(part.file.rows(row))] = row;
      }
    }
    columns_ = columns;
  }

  /// Whether rows are rows of the file: columns all there, as they are.
  bool is_plain() const {
    return std::ranges::all_of(tensor_.parts, [&](const ImportedPart& part) {
      return part.file.columns.is_plain(columns_) && !part.file.changes_values();
    });
  }

  /// Of such a row the bytes, and the only part that has it.
  std::span<const std::byte> bytes(int64_t row) const {
    for (size_t i = 0; i < places_.size(); ++i) {
      const int64_t place = places_[i][static_cast<size_t>(row)];
      if (place >= 0) return bytes(tensor_.parts[i], place);
    }
    return {};
  }

  void read(int64_t row, std::span<float> values) const {
    std::vector<float> found;
    for (size_t i = 0; i < places_.size(); ++i) {
      const int64_t place = places_[i][static_cast<size_t>(row)];
      if (place < 0) continue;
      const ImportedPart& part = tensor_.parts[i];
      const gguf::Order& columns = part.file.columns;
      found.resize(static_cast<size_t>(columns.size()));
      formats::gguf_decode(part.source->type, bytes(part, place), found);
      for (int64_t col = 0; col < columns.size(); ++col) {
        const float value = found[static_cast<size_t>(col)];
        values[static_cast<size_t>(columns(col))] = part.file.changes_values() ? part.file.from_file(value) : value;
      }
    }
  }

 private:
  std::span<const std::byte> bytes(const ImportedPart& part, int64_t row) const {
    const int64_t first = std::max<int64_t>(0, part.file.part) * part.file.rows.size();
    const uint64_t width = part.source->row_bytes();
    return file_.bytes(*part.source).subspan(static_cast<size_t>(first + row) * width, width);
  }

  const io::GgufFile& file_;
  const ImportedTensor& tensor_;
  std::vector<std::vector<int64_t>> places_;  // of each part: its row, or -1
  int64_t columns_ = 0;
};

/// The blocks of a matrix that keeps its codes, in the order of its columns.
Buffer ordered_blocks(const FoundRows& found, const ImportedTensor& tensor) {
  const auto& type = describe(tensor.source()->type);
  const gguf::Order order = tensor.parts.front().file.columns.blocks(type.block).value();
  const auto width = static_cast<size_t>(type.block_bytes), row_bytes = static_cast<size_t>(order.size()) * width;
  Buffer result(static_cast<size_t>(tensor.shape[0]) * row_bytes);
  parallel_for(tensor.shape[0], 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto from = found.bytes(row);
      std::byte* const to = result.data() + static_cast<size_t>(row) * row_bytes;
      for (int64_t i = 0; i < order.size(); ++i) {
        std::copy_n(from.data() + static_cast<size_t>(i) * width, width, to + static_cast<size_t>(order(i)) * width);
      }
    }
  });
  return result;
}

/// Codes and scales as they are, compared with the blocks in what they decode to.
ConversionError convert_packed(const Source& source, const ImportedTensor& tensor, const FoundRows& found,
                               io::CheckpointWriter& writer) {
  const auto& info = packed_info(source, tensor);
  const GgmlType type = tensor.source()->type;
  const Buffer blocks = found.is_plain() ? Buffer() : ordered_blocks(found, tensor);
  const auto row_bytes = [&](int64_t row) {
    const size_t width = blocks.size() / static_cast<size_t>(info.n);
    return blocks.size() == 0 ? found.bytes(row) : blocks.bytes().subspan(static_cast<size_t>(row) * width, width);
  };
  const auto weight = packed_from_gguf(type, info.n, info.k, row_bytes);
  const auto& scheme = formats::scheme_row(weight.scheme.family);
  scheme.validate(weight, tensor.name);
  std::atomic<int64_t> changed = 0;
  parallel_for(info.n, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> expected(static_cast<size_t>(info.k)), decoded(expected.size());
    for (int64_t row = begin; row < end; ++row) {
      formats::gguf_decode(type, row_bytes(row), expected);
      scheme.decode_row(weight, row, decoded);
      for (size_t col = 0; col < decoded.size(); ++col) changed += expected[col] != decoded[col];
    }
  });
  ensure(changed == 0, concat(tensor.name, ": planes and blocks decode to different values"));
  for (const auto& plane : weight.planes)
    writer.write(checkpoint::plane_name(info.name, 0, plane.spec.role), plane.bytes.bytes());
  return {};
}

/// [n, k] of elements of `width` bytes → [k, n].
Buffer transposed(std::span<const std::byte> matrix, int64_t n, int64_t k, size_t width) {
  Buffer result(matrix.size());
  parallel_for(k, 64, [&](int64_t begin, int64_t end) {
    for (int64_t col = begin; col < end; ++col) {
      for (int64_t row = 0; row < n; ++row) {
        std::memcpy(result.data() + static_cast<size_t>(col * n + row) * width,
                    matrix.data() + static_cast<size_t>(row * k + col) * width, width);
      }
    }
  });
  return result;
}

ConversionError convert(const Source& source, const ImportedTensor& tensor, io::CheckpointWriter& writer) {
  const FoundRows found(source.file, tensor);
  if (tensor.packed) return convert_packed(source, tensor, found, writer);
  const auto [rows, k] = gguf::matrix_size(tensor.shape);
  RowSource rows_in{rows, k, {}, {}};
  const bool same = std::ranges::all_of(
      tensor.parts, [&](const auto& part) { return plain_dtype(part.source->type) == tensor.dtype; });
  if (same && found.is_plain()) {
    rows_in.copy = [&](int64_t row, std::span<std::byte> bytes) { std::ranges::copy(found.bytes(row), bytes.begin()); };
  } else {
    rows_in.read = [&](int64_t row, std::span<float> values) { found.read(row, values); };
  }
  const GgmlType to = tensor.dtype == DType::f32   ? GgmlType::f32
                      : tensor.dtype == DType::f16 ? GgmlType::f16
                                                   : GgmlType::bf16;
  const auto width = static_cast<size_t>(dtype_bits(tensor.dtype) / 8);
  const RowSink rows_out{
      static_cast<uint64_t>(k) * width, formats::gguf_largest(to),
      [&](std::span<const float> values, std::span<std::byte> bytes) { narrow(values, tensor.dtype, bytes); },
      [&](std::span<const std::byte> bytes, std::span<float> values) { widen(bytes, tensor.dtype, values); }};
  const std::string& name = tensor.stack.empty() ? tensor.name : tensor.stack;
  int64_t written = tensor.expert * rows * k * static_cast<int64_t>(width);
  std::vector<std::byte> whole;  // of an expert whose inputs come first
  const ConversionError error = convert_rows(tensor.name, rows_in, rows_out, [&](std::span<const std::byte> chunk) {
    if (tensor.inputs_first) {
      whole.insert(whole.end(), chunk.begin(), chunk.end());
      return;
    }
    writer.write_part(name, written, chunk);
    written += static_cast<int64_t>(chunk.size());
  });
  if (tensor.inputs_first) writer.write_part(name, written, transposed(whole, rows, k, width).bytes());
  return error;
}

/// Tensors that are written by one process, by their numbers: each by itself, experts of a stack together.
std::vector<std::vector<size_t>> gguf_parts(const Source& source) {
  std::vector<std::vector<size_t>> parts;
  std::map<std::string, size_t, std::less<>> stacks;
  for (size_t i = 0; i < source.tensors.size(); ++i) {
    const auto& stack = source.tensors[i].stack;
    const auto found = stack.empty() ? stacks.end() : stacks.find(stack);
    if (found != stacks.end()) {
      parts[found->second].push_back(i);
      continue;
    }
    if (!stack.empty()) stacks.emplace(stack, parts.size());
    parts.push_back({i});
  }
  return parts;
}

std::vector<WorkUnit> gguf_units(const Source& source, const std::vector<std::vector<size_t>>& parts,
                                 const ConversionReport& report) {
  std::vector<WorkUnit> units;
  for (const auto& part : parts) {
    units.push_back({source.tensors[part.front()].name, {}, 0});
    for (const size_t i : part) {
      units.back().cost += report.tensors[i].bytes_before;
      for (auto& tensor : planned_tensors(source, source.tensors[i]))
        units.back().tensors.push_back(std::move(tensor.name));
    }
  }
  return units;
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
  SharedFolder output(request.sharing, request.output, request.overwrite, {request.input},
                      former_outputs(request.input));
  std::vector<io::PlannedTensor> plan;
  for (const auto& tensor : source.tensors)
    std::ranges::move(planned_tensors(source, tensor), std::back_inserter(plan));
  io::CheckpointWriter writer(output.staging(), std::move(plan), request.write, output.shard_files());
  const auto parts = gguf_parts(source);
  SharedWork work(output, writer, gguf_units(source, parts, report));
  Progress progress("import", work.cost(), "bytes");
  std::set<const io::GgufTensor*> checked;
  std::map<const io::GgufTensor*, int64_t> uses;
  for (const auto& tensor : source.tensors) {
    for (const auto& part : tensor.parts) ++uses[part.source];
  }
  const auto import_one = [&](const ImportedTensor& tensor) {
    for (const auto& [from, file] : tensor.parts) {
      if (!written || !checked.insert(from).second) continue;
      const auto found = io::hash_tensor(ggml_type_name(from->type), from->shape, source.file.bytes(*from));
      io::check_digest(written->tensors, from->name, found, request.input.native());
    }
    const ConversionError error = convert(source, tensor, writer);
    for (const auto& [from, file] : tensor.parts) {
      if (--uses[from] == 0) source.file.release(*from);
    }
    return to_record(error);
  };
  for (size_t unit = 0; unit < parts.size(); ++unit) {
    if (!work.mine(unit)) continue;
    io::Json record = io::Json::array();
    for (const size_t i : parts[unit]) {
      record.push_back(import_one(source.tensors[i]));
      progress.advance(report.tensors[i].bytes_before);
    }
    work.done(unit, record);
  }
  const auto records = work.gather();
  for (size_t unit = 0; unit < records.size(); ++unit) {
    for (size_t i = 0; i < parts[unit].size(); ++i)
      report.tensors[parts[unit][i]].error = conversion_error(records[unit].at(i));
  }
  add_notes(report, output.notes());
  return finished(std::move(report), writer, output, watch, {},
                  [&](const auto& to) { return write_companions(source, to); });
}

}  // namespace w4q::pipeline
