#include "pipeline/decode_model.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/digests.h"
#include "checkpoint/folder.h"
#include "checkpoint/mlx_names.h"
#include "checkpoint/turned_stacks.h"
#include "core/buffer.h"
#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/gguf_blocks.h"
#include "model/architecture.h"
#include "model/model.h"
#include "model/stored_sizes.h"
#include "pipeline/output_rules.h"
#include "pipeline/shared_output.h"

namespace w4q::pipeline {
namespace {

constexpr std::string_view half_name = "hf16", exact_name = "hf-f32";
constexpr std::string_view codes_of_stack = "_blocks", scales_of_stack = "_scales";

constexpr size_t kept_memory = size_t{256} << 20;

/// A tensor to write: one that is decoded, several experts that become one stack, or one that is carried along.
struct DecodedTensor {
  std::string name;
  std::vector<std::string> parts;  ///< F32 matrices [n, k]; none: carried along
  Shape shape;
  DType dtype = DType::bf16;
  std::string from;
  int64_t bytes_before = 0;
  bool stack = false;   ///< parts stand one behind the other
  bool turned = false;  ///< each transposed
};

/// Where an expert's matrix stands in a stack.
struct StackPlace {
  std::string stack;
  int64_t position = 0;  ///< in the order of rows, counted in matrices
  int64_t pieces = 1;    ///< matrices of one expert: two where gates and ups stand apart
};

struct DecodePlan {
  checkpoint::Folder source;  ///< as it is opened: of small floats, decoded already
  io::Checkpoint tensors;     ///< with every packed linear as the F32 matrix that it stands for
  DType dtype = DType::bf16;  ///< of what is decoded
  /// Of stacks all of whose experts are linears by themselves now, where the architecture says how they stood: by tensor.
  std::map<std::string, StackPlace, std::less<>> stacks = {};
  bool inputs_first = false;                       ///< they did
  std::string_view end_of_stack = {};              ///< behind their names
  std::set<std::string, std::less<>> turned = {};  ///< stacks that are stored inputs first (checkpoint/turned_stacks.h)
  std::vector<DecodedTensor> list = {};
};

/// What stands in the files under another name alone is as it was.
bool is_decoded(const DecodePlan& plan, const io::Checkpoint& raw, const std::string& name) {
  const bool packed = plan.source.quantization.find(model::module_path(name)) != nullptr && !raw.contains(name);
  return packed || plan.tensors.stored_dtype(name) != plan.tensors.at(name).dtype;
}

/// Whether codes of one byte each stand there as experts with outputs first.
bool holds_stack(const io::Checkpoint& raw, const std::string& stack) {
  return raw.contains(stack) && raw.at(stack).dtype == DType::f8_e4m3 && raw.at(stack).shape.size() == 3;
}

/// "T.3" → "T" and 3; −1: no number stands there.
std::pair<std::string_view, int64_t> numbered(std::string_view module) {
  const size_t dot = module.rfind('.');
  if (dot == std::string_view::npos) return {module, -1};
  const std::string_view digits = module.substr(dot + 1);
  int64_t number = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool whole = error == std::errc() && end == digits.data() + digits.size();
  return {module.substr(0, dot), whole ? number : -1};
}

/// "T.3.weight" → "T", where the files hold the codes of the stack T, or the architecture says that it is one.
std::optional<StackPlace> stack_of(const DecodePlan& plan, const io::Checkpoint& raw, const std::string& name) {
  if (const auto known = plan.stacks.find(name); known != plan.stacks.end()) return known->second;
  const auto [stack, position] = numbered(model::module_path(name));
  if (position < 0) return std::nullopt;
  StackPlace place{std::string(stack), position};
  const bool stands = holds_stack(raw, place.stack) || plan.turned.contains(place.stack) ||
                      raw.contains(place.stack + std::string(codes_of_stack));
  return stands ? std::optional(std::move(place)) : std::nullopt;
}

/// The path that a tensor of codes or scales belongs to: "T_blocks" → "T", "X.weight_scale" → "X".
std::string owner_of(const std::string& name) {
  for (const auto suffix : {codes_of_stack, scales_of_stack}) {
    if (name.ends_with(suffix)) return name.substr(0, name.size() - suffix.size());
  }
  return name.substr(0, name.rfind('.'));
}

/// Parts of a stack in the order of its rows: names have "10" before "9".
void order_parts(const DecodePlan& plan, const io::Checkpoint& raw, DecodedTensor& tensor) {
  std::ranges::sort(tensor.parts, {}, [&](const auto& part) { return stack_of(plan, raw, part)->position; });
}

std::string origin_of(const DecodePlan& plan, const io::Checkpoint& raw, const std::string& name,
                      const std::string& path) {
  if (const auto* packed = plan.source.quantization.find(model::module_path(name)); packed != nullptr) {
    const std::string scheme = formats::to_string(packed->passes.front().scheme);
    return packed->passes.size() > 1 ? concat(scheme, " and ", packed->passes.size() - 1, " passes") : scheme;
  }
  if (!raw.contains(name)) return holds_stack(raw, path) ? std::string(dtype_name(DType::f8_e4m3)) : "E2M1";
  const DType stored = raw.at(name).dtype;
  return stored == DType::u8 || stored == DType::i8 ? "E2M1" : std::string(dtype_name(stored));
}

void list_decoded(DecodePlan& plan, const io::Checkpoint& raw) {
  std::map<std::string, DecodedTensor> decoded;                 // by path
  std::map<std::string, std::string, std::less<>> stack_paths;  // by the path of a part
  for (const auto& [name, info] : plan.tensors.tensors()) {
    if (!is_decoded(plan, raw, name)) continue;
    const auto place = stack_of(plan, raw, name);
    const bool known = plan.stacks.contains(name);
    const std::string module(model::module_path(name)), path = place ? place->stack : module;
    stack_paths.emplace(module, path);
    DecodedTensor& tensor = decoded[path];
    tensor.name = !place ? name : known ? concat(path, plan.end_of_stack) : path;
    tensor.parts.push_back(name);
    tensor.stack = place.has_value();
    tensor.turned = tensor.stack && !holds_stack(raw, path) && (plan.inputs_first || !known);
    const int64_t pieces = place ? place->pieces : 1, experts = std::ssize(tensor.parts) / pieces;
    tensor.shape = !tensor.stack   ? info.shape
                   : tensor.turned ? Shape{experts, info.shape[1], info.shape[0]}
                                   : Shape{experts, info.shape[0] * pieces, info.shape[1]};
    tensor.dtype = plan.dtype;
    tensor.from = origin_of(plan, raw, name, path);
  }
  const auto owning = [&](const std::string& path) {
    const auto part = stack_paths.find(path);
    return decoded.find(part != stack_paths.end() ? part->second : path);
  };
  for (const auto& [name, info] : raw.tensors()) {
    if (plan.tensors.contains(name) && !is_decoded(plan, raw, name)) continue;
    std::string owner = owner_of(checkpoint::name_behind_mlx(plan.source.config, name));
    // A plane of w4q has the number of its pass, too, and that of its expert.
    for (int i = 0; i < 2 && owning(owner) == decoded.end(); ++i) owner = owner_of(owner);
    if (const auto found = owning(owner); found != decoded.end()) {
      found->second.bytes_before += static_cast<int64_t>(info.size());
    }
  }
  for (auto& [path, tensor] : decoded) {
    if (tensor.stack) order_parts(plan, raw, tensor);
    plan.list.push_back(std::move(tensor));
  }
}

/// Of an expert that stands by itself: "….gate_up_proj.3", or by the names of its three matrices.
std::optional<StackPlace> place_in_stack(std::string_view module, const model::MixtureConfig& mixture) {
  if (mixture.storage != model::ExpertStorage::by_name) {
    const auto [stack, position] = numbered(module);
    return position < 0 ? std::nullopt : std::optional(StackPlace{std::string(stack), position});
  }
  const size_t dot = std::min(module.rfind('.'), module.size());
  const auto [experts, number] = numbered(module.substr(0, dot));
  const std::string_view part = module.substr(std::min(dot + 1, module.size()));
  if (number < 0 || !mixture.stacks_alone) return std::nullopt;
  if (part == "down_proj") return StackPlace{concat(experts, ".down_proj"), number};
  if (part != "gate_proj" && part != "up_proj") return std::nullopt;
  return StackPlace{concat(experts, ".gate_up_proj"), 2 * number + (part == "up_proj" ? 1 : 0), 2};
}

void find_stacks(DecodePlan& plan, const io::Checkpoint& raw) {
  const model::ModelConfig config = model::open_model(plan.source).config;
  if (config.architecture == nullptr || config.mixture.experts == 0) return;
  plan.inputs_first = config.mixture.storage == model::ExpertStorage::stacked_in_turn;
  plan.end_of_stack = config.architecture->end_of_stack;
  std::map<std::string, std::map<std::string, StackPlace>> stacks;
  for (const auto& [name, info] : plan.tensors.tensors()) {
    if (!is_decoded(plan, raw, name)) continue;
    auto place = place_in_stack(model::module_path(name), config.mixture);
    if (place) stacks[place->stack].emplace(name, std::move(*place));
  }
  for (auto& [stack, parts] : stacks) {
    const int64_t pieces = parts.begin()->second.pieces;
    if (std::ssize(parts) == pieces * config.mixture.experts) plan.stacks.merge(parts);
  }
}

void list_carried(DecodePlan& plan, const io::Checkpoint& raw) {
  for (const auto& [name, info] : plan.tensors.tensors()) {
    if (is_decoded(plan, raw, name)) continue;
    plan.list.push_back({name,
                         {},
                         info.shape,
                         info.dtype,
                         std::string(dtype_name(info.dtype)),
                         static_cast<int64_t>(info.size()),
                         false});
  }
}

DecodePlan make_plan(const DecodeRequest& request) {
  const auto known = decode_targets();
  if (std::ranges::find(known, request.to) == known.end()) {
    throw Error(ErrorCode::bad_argument, concat("--to ", printable(request.to), ": no type of decoded weights"))
        .detail("known: " + join(known));
  }
  checkpoint::Folder source = checkpoint::open_folder(request.input);
  model::fit_to_config(source);
  const io::Checkpoint files = io::Checkpoint::open(request.input), raw = checkpoint::turn_stacks(files);
  const auto stated = checkpoint::stated_dtype(source.config);
  DecodePlan plan{source, model::decoded(source).tensors, DType::f32};
  for (const auto& [name, info] : files.tensors()) {
    if (!raw.contains(name)) plan.turned.insert(name);
  }
  find_stacks(plan, raw);
  if (request.to == half_name) plan.dtype = stated == DType::f16 ? DType::f16 : DType::bf16;
  list_decoded(plan, raw);
  if (plan.list.empty()) {
    throw Error(ErrorCode::bad_argument, io::shown(request.input) + ": holds nothing to decode")
        .detail("no packed linears, and no small floats with scales")
        .hint("it is a checkpoint of plain weights already");
  }
  list_carried(plan, raw);
  return plan;
}

/// Experts that w4q took out of their stacks keep names of their own.
void note_experts(const DecodePlan& plan, ConversionReport& report) {
  const auto alone = std::ranges::count_if(plan.list, [](const DecodedTensor& tensor) {
    const auto path = model::module_path(tensor.name);
    const std::string_view last = path.substr(path.rfind('.') + 1);
    return !tensor.parts.empty() && !tensor.stack && last.find_first_not_of("0123456789") == std::string_view::npos;
  });
  if (alone == 0) return;
  report.notes.push_back(concat(alone,
                                " experts have names of their own, \"….3.weight\": which way their stacks stood, ",
                                "their files do not say"));
}

ConversionReport make_report(const DecodePlan& plan) {
  ConversionReport report;
  for (const auto& tensor : plan.list) {
    report.tensors.push_back({tensor.name,
                              tensor.from,
                              std::string(dtype_name(tensor.dtype)),
                              tensor.shape,
                              tensor.bytes_before,
                              io::PlannedTensor{tensor.name, tensor.dtype, tensor.shape}.size(),
                              {}});
  }
  report.notes = plan.source.quantization.notes;
  for (const auto& warning : plan.source.tensors.warnings()) report.notes.push_back(warning);
  note_experts(plan, report);
  return report;
}

float largest_of(DType dtype) {
  return dtype == DType::f16    ? formats::gguf_largest(GgmlType::f16)
         : dtype == DType::bf16 ? formats::gguf_largest(GgmlType::bf16)
                                : std::numeric_limits<float>::max();
}

/// Rows of `matrix`, n × k, as columns: F32 [k, n].
Buffer transposed(const io::RowReader& matrix, int64_t n, int64_t k) {
  auto result = Buffer::unfilled(static_cast<size_t>(n * k) * sizeof(float));
  auto* const to = result.as<float>().data();
  constexpr int64_t band = 32;    // rows whose values of a column fill two lines of the cache
  const int64_t stride = k + 16;  // a line more, lest a column be in one set of the cache
  parallel_for(n, band, [&](int64_t begin, int64_t end) {
    std::vector<float> rows(static_cast<size_t>(band * stride));
    for (int64_t row = begin; row < end; ++row) {
      matrix(row, {rows.data() + (row - begin) * stride, static_cast<size_t>(k)});
    }
    for (int64_t col = 0; col < k; ++col) {
      for (int64_t row = begin; row < end; ++row)
        to[col * n + row] = rows[static_cast<size_t>((row - begin) * stride + col)];
    }
  });
  return result;
}

/// The rows to write of a part, of a norm one.
RowSource rows_of(const io::Checkpoint& tensors, const std::string& part, bool turned_over) {
  const Shape& shape = tensors.at(part).shape;
  const int64_t k = std::max<int64_t>(shape.back(), 1);
  if (!turned_over) return {element_count(shape) / k, k, tensors.rows(part), {}};
  const auto turned = std::make_shared<const Buffer>(transposed(tensors.rows(part), shape[0], shape[1]));
  const auto read = [turned](int64_t row, std::span<float> values) {
    std::ranges::copy(turned->as<float>().subspan(static_cast<size_t>(row) * values.size(), values.size()),
                      values.data());
  };
  return {shape[1], shape[0], read, {}};
}

ConversionError write_decoded(const io::Checkpoint& tensors, const DecodedTensor& tensor,
                              io::CheckpointWriter& writer) {
  ConversionError total;
  int64_t written = 0;
  for (const auto& part : tensor.parts) {
    const RowSource rows = rows_of(tensors, part, tensor.turned);
    const RowSink sink{
        static_cast<uint64_t>(rows.k * dtype_bits(tensor.dtype) / 8), largest_of(tensor.dtype),
        [&](std::span<const float> row, std::span<std::byte> bytes) { narrow(row, tensor.dtype, bytes); },
        [&](std::span<const std::byte> bytes, std::span<float> row) { widen(bytes, tensor.dtype, row); }};
    const ConversionError error = convert_rows(part, rows, sink, [&](std::span<const std::byte> chunk) {
      writer.write_part(tensor.name, written, chunk);
      written += static_cast<int64_t>(chunk.size());
    });
    total.squared += error.squared;
    total.squared_error += error.squared_error;
    total.changed += error.changed;
  }
  return total;
}

io::Json decoded_config(const DecodePlan& plan) {
  io::Json config = plan.source.config;
  config.erase("quantization_config");
  config[conversion_mark] = "w4q";
  const char* const dtype = plan.dtype == DType::f32 ? "float32" : plan.dtype == DType::f16 ? "float16" : "bfloat16";
  if (config.contains("dtype")) config["dtype"] = dtype;
  if (config.contains("torch_dtype") || !config.contains("dtype")) config["torch_dtype"] = dtype;
  return config;
}

}  // namespace

std::vector<std::string> decode_targets() { return {std::string(half_name), std::string(exact_name)}; }

ConversionReport plan_decode(const DecodeRequest& request) { return make_report(make_plan(request)); }

ConversionReport decode_model(const DecodeRequest& request) {
  const Stopwatch watch;
  const DecodePlan plan = make_plan(request);
  checkpoint::check_digests(request.input, plan.source.tensors);
  ConversionReport report = make_report(plan);
  std::vector<io::PlannedTensor> planned;
  std::vector<WorkUnit> units;
  for (const auto& tensor : plan.list) {
    planned.push_back({tensor.name, tensor.dtype, tensor.shape});
    units.push_back({tensor.name, {tensor.name}, tensor.bytes_before});
  }
  SharedFolder output(request.sharing, request.output, request.overwrite, {request.input},
                      former_outputs(request.input));
  io::CheckpointWriter writer(output.staging(), std::move(planned), with_companions(request.write, request.input),
                              output.shard_files());
  SharedWork work(output, writer, std::move(units));
  const BufferReuse reuse(kept_memory);  // of stacks, whose experts are turned one by one
  Progress progress("decode", work.cost(), "bytes");
  for (size_t i = 0; i < plan.list.size(); ++i) {
    const DecodedTensor& tensor = plan.list[i];
    if (!work.mine(i)) continue;
    ConversionError error;
    if (tensor.parts.empty()) {
      writer.copy(plan.tensors, tensor.name);
    } else {
      error = write_decoded(plan.tensors, tensor, writer);
    }
    work.done(i, to_record(error));
    progress.advance(tensor.bytes_before);
  }
  int64_t changed = 0;
  const auto records = work.gather();
  for (size_t i = 0; i < records.size(); ++i) {
    report.tensors[i].error = conversion_error(records[i]);
    changed += report.tensors[i].error.changed;
  }
  if (changed > 0) {
    report.notes.push_back(concat(changed, " values are not ", dtype_name(plan.dtype),
                                  " and were rounded to the nearest: --to hf-f32 keeps every value"));
  }
  add_notes(report, output.notes());
  return finished(
      std::move(report), writer, output, watch, checkpoint::bases_through(plan.source),
      [&](const auto& to) { return carry_companions(request.input, to, decoded_config(plan), request.write); });
}

}  // namespace w4q::pipeline
