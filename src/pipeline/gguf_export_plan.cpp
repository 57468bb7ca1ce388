#include "pipeline/gguf_export_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/text.h"
#include "formats/gguf_blocks.h"
#include "gguf/config.h"
#include "gguf/tokenizer.h"
#include "io/files.h"
#include "io/system.h"
#include "model/architecture.h"
#include "pipeline/gguf_allocate.h"
#include "pipeline/gguf_packed.h"
#include "pipeline/mxfp4_import.h"
#include "tokenizer/tokenizer.h"

namespace w4q::pipeline {
namespace {

namespace fs = std::filesystem;

/// What general.file_type calls a file whose linears are all of a type that no target rounds to.
constexpr std::array<std::pair<GgmlType, uint32_t>, 3> plain_file_types{{
    {GgmlType::f32, 0},
    {GgmlType::f16, 1},
    {GgmlType::bf16, 32},
}};

uint32_t kind_of_file(GgmlType type) {
  for (const auto& [plain, kind] : plain_file_types) {
    if (plain == type) return kind;
  }
  const auto made = std::ranges::find_if(
      gguf_targets(), [type](const GgufTarget& target) { return !target.lossless && target.linear == type; });
  ensure(made != gguf_targets().end(), "a GGUF type that no target writes");
  return made->file_type;
}

/// By the type of most bytes.
uint32_t mixed_file_type(const std::vector<ExportedTensor>& tensors) {
  std::map<GgmlType, int64_t> bytes;
  for (const auto& tensor : tensors) bytes[tensor.type] += gguf_bytes(tensor.type, tensor.file.shape);
  return kind_of_file(std::ranges::max_element(bytes, {}, [](const auto& entry) { return entry.second; })->first);
}

/// A target's own, unless codes that were there before are kept beside it.
uint32_t file_type(const GgufTarget& target, const std::vector<ExportedTensor>& tensors) {
  const bool anew = std::ranges::none_of(tensors, &ExportedTensor::keeps_codes);
  return target.quantizes && anew ? target.file_type : mixed_file_type(tensors);
}

GgmlType plain_type(DType dtype) {
  return dtype == DType::f32 ? GgmlType::f32 : dtype == DType::f16 ? GgmlType::f16 : GgmlType::bf16;
}

/// The block type that says the same as a scheme, if there is one.
std::optional<GgmlType> lossless_type(const checkpoint::PackedLinearInfo& packed) {
  if (packed.passes.size() != 1 || packed.input_scale || packed.k % 32 != 0) return std::nullopt;
  if (!packed.passes.front().rotation.identity()) return std::nullopt;
  return gguf_of_scheme(packed.passes.front().scheme);
}

/// Whether columns stand as they do, or in another order of whole blocks.
bool keeps_blocks(const ExportedTensor& tensor, int64_t k) {
  return tensor.file.columns.is_plain(k) || tensor.file.columns.blocks(describe(tensor.type).block).has_value();
}

/// Chooses the type of a packed linear. Quantizing what was quantized before would only add errors.
void choose_packed(const checkpoint::PackedLinearInfo& packed, const GgufTarget& target, ExportedTensor& tensor) {
  const auto same = lossless_type(packed);
  if (same) tensor.type = *same;
  tensor.keeps_codes = same && (target.quantizes || target.lossless) && keeps_blocks(tensor, packed.k);
  if (tensor.keeps_codes) return;
  if (target.quantizes || target.lossless) {
    throw Error(ErrorCode::unsupported,
                concat(printable(packed.name), ": ", formats::to_string(packed.passes.front().scheme),
                       packed.input_scale ? " with an input scale" : "", " has no equal in GGUF"))
        .detail("int4-g32-f16 is Q4_0, int8-g32-f16 is Q8_0 and mxfp4 is MXFP4, without loss")
        .hint("--to gguf-f16 writes the decoded weights; or start from the 16-bit checkpoint");
  }
  tensor.type = target.linear;
}

/// What routes is small, and readers multiply by it as it is; what is no matrix of a linear, they add.
bool stays_plain(const model::Parameter& parameter) {
  if (parameter.linear && parameter.gguf.starts_with("per_layer_token_embd")) return false;
  return !parameter.linear || !parameter.left.empty();
}

GgmlType choose_plain(const ExportedTensor& tensor, const io::TensorInfo& info, const GgufTarget& target,
                      const GgufPlace& place, std::vector<std::string>& notes) {
  const model::Parameter& parameter = tensor.parameter;
  if (parameter.shape.size() == 1 || stays_plain(parameter)) return GgmlType::f32;
  if (target.lossless) return plain_type(info.dtype);
  const GgmlType type = gguf_type(target, place), taken = gguf_type_for_rows(type, parameter.shape[1]);
  if (taken != type && tensor.file.part <= 0) {
    notes.push_back(concat(tensor.file.part < 0 ? parameter.name : tensor.file.name, ": rows of ", parameter.shape[1],
                           " are no whole blocks of ", ggml_type_name(type), ", so it is ", ggml_type_name(taken)));
  }
  return taken;
}

/// The form of a type whose scales are searched. Where nothing is known of the inputs, the types with a rule of the
/// reference's follow that, so that their bytes are those of other tools; Q8_0 always does.
const formats::GgufForm* searched_form(GgmlType type, bool calibrated) {
  if (type == GgmlType::q8_0 || (!calibrated && formats::gguf_encodes(type))) return nullptr;
  return formats::find_gguf_form(type);
}

void check_shape(const model::Parameter& parameter, const Shape& found) {
  if (found == parameter.shape) return;
  throw Error(ErrorCode::bad_file, concat(parameter.name, ": wrong shape"))
      .detail(concat("expected ", shape_text(parameter.shape), " by config.json, found ", shape_text(found)));
}

void check_parameter(const io::TensorInfo& info, const model::Parameter& parameter) {
  check_shape(parameter, info.shape);
  if (!is_weight_dtype(info.dtype)) {
    throw Error(ErrorCode::unsupported, concat(parameter.name, ": a weight of type ", dtype_name(info.dtype)))
        .detail("expected F32, F16 or BF16");
  }
}

void check_name(const model::Parameter& parameter, const model::ModelConfig& config) {
  if (parameter.gguf.ends_with("_exps.bias") && parameter.shape.size() == 1) {
    throw Error(ErrorCode::unsupported,
                concat(printable(parameter.name), ": a bias of one expert, where GGUF has those of all in one tensor"))
        .hint("start from the 16-bit checkpoint, which has them so");
  }
  if (!parameter.gguf.empty()) return;
  throw Error(ErrorCode::unsupported,
              concat(parameter.name, ": GGUF's architecture ", config.architecture->gguf, " has no such tensor"));
}

/// A tensor has one type.
void check_parts(const std::vector<ExportedTensor>& tensors) {
  for (size_t i = 1; i < tensors.size(); ++i) {
    const ExportedTensor &one = tensors[i - 1], &other = tensors[i];
    if (one.name() != other.name() || one.type == other.type) continue;
    throw Error(ErrorCode::unsupported, concat(printable(other.parameter.name), ": ", ggml_type_name(other.type),
                                               " beside ", ggml_type_name(one.type), " of the expert before"))
        .detail("GGUF has one type for all experts of a layer")
        .hint("--to gguf-f16, or start from the 16-bit checkpoint");
  }
}

void choose_type(ExportPlan& plan, const GgufTarget& target, bool calibrated, ExportedTensor& tensor) {
  const model::Parameter& parameter = tensor.parameter;
  if (tensor.packed != nullptr) return choose_packed(*tensor.packed, target, tensor);
  const GgufPlace place = gguf_place(plan.model.config, parameter, tensor.file.name, calibrated);
  tensor.type = choose_plain(tensor, plan.model.folder.tensors.at(parameter.name), target, place, plan.notes);
  tensor.form = searched_form(tensor.type, place.calibrated);
}

std::vector<ExportedTensor> choose_types(ExportPlan& plan, const GgufTarget& target, bool calibrated) {
  std::vector<ExportedTensor> tensors;
  for (const auto& parameter : model::parameters(plan.model.config)) {
    check_name(parameter, plan.model.config);
    const checkpoint::PackedLinearInfo* const packed =
        parameter.linear ? plan.model.folder.quantization.find(model::module_path(parameter.name)) : nullptr;
    if (packed != nullptr) {
      check_shape(parameter, {packed->n, packed->k});
    } else {
      check_parameter(plan.model.folder.tensors.at(parameter.name), parameter);
    }
    for (auto& file : gguf::file_parts(plan.model.config, parameter)) {
      tensors.push_back({.parameter = parameter, .file = std::move(file), .packed = packed});
      choose_type(plan, target, calibrated, tensors.back());
    }
  }
  gather_parts(tensors, &ExportedTensor::name);
  check_parts(tensors);
  return tensors;
}

io::Json json_or_empty(const fs::path& path) {
  return io::path_exists(path) ? io::read_json(path) : io::Json::object();
}

/// The tokenizer's metadata; newer folders keep the chat template in a file of its own.
io::GgufMetadata read_tokenizer(const GgufExportRequest& request, ExportPlan& plan) {
  const fs::path& folder = request.input;
  if (!request.tokenizer || !io::path_exists(folder / "tokenizer.json")) {
    plan.notes.emplace_back(request.tokenizer ? "there is no tokenizer.json: the file has no tokenizer"
                                              : "the file has no tokenizer");
    return gguf::token_ids_to_gguf(plan.model.config);
  }
  const auto path = folder / "tokenizer.json";
  const std::string text = io::read_model_file(path, io::max_tokenizer_bytes);
  tokenizer::Tokenizer::parse(text, path.native());  // what this refuses would be wrong in the other file too
  gguf::TokenizerFiles files{io::parse_json(text, path.native()), json_or_empty(folder / "tokenizer_config.json")};
  const auto chat_template = folder / "chat_template.jinja";
  if (io::path_exists(chat_template)) {
    files.tokenizer_config["chat_template"] = io::read_model_file(chat_template, io::max_config_bytes);
  }
  return gguf::tokenizer_to_gguf(files, plan.model.config, plan.notes);
}

/// Tensors that are no parameters of the architecture have no names in GGUF.
void note_left_out(ExportPlan& plan) {
  std::set<std::string, std::less<>> used;
  for (const auto& tensor : plan.tensors) {
    used.insert(tensor.parameter.name);
    if (tensor.packed == nullptr) continue;
    for (auto& plane : checkpoint::planned_planes(*tensor.packed)) used.insert(std::move(plane.name));
  }
  std::vector<std::string> left;
  for (const auto& [name, info] : plan.model.folder.tensors.tensors()) {
    if (!used.contains(name)) left.push_back(printable(name));
  }
  if (left.empty()) return;
  constexpr size_t shown = 5;
  const size_t more = left.size() - std::min(left.size(), shown);
  left.resize(left.size() - more);
  plan.notes.push_back(concat("left out, since GGUF has no place for it in this architecture: ", join(left),
                              more > 0 ? concat(" and ", more, " more tensors") : ""));
}

io::GgufMetadata general_metadata(const fs::path& folder, const GgufTarget& target, const ExportPlan& plan) {
  const fs::path place = fs::weakly_canonical(folder);
  io::GgufMetadata metadata = {{"general.architecture", std::string(plan.model.config.architecture->gguf)},
                               {"general.type", std::string("model")},
                               {"general.name", place.filename().string()},
                               {"general.file_type", file_type(target, plan.tensors)}};
  const bool blocks =
      std::ranges::any_of(plan.tensors, [](const ExportedTensor& tensor) { return describe(tensor.type).block > 1; });
  if (blocks) metadata.push_back({"general.quantization_version", uint32_t{2}});
  return metadata;
}

void append(io::GgufMetadata& metadata, io::GgufMetadata more) {
  std::ranges::move(more, std::back_inserter(metadata));
}

/// What stands in a plan until types are chosen by size.
GgufTarget sized_target() { return gguf_target("gguf-q4_k"); }

/// Calibration runs the model as it is, and what was rounded before is not rounded again.
void refuse_packed(const ExportPlan& plan) {
  const auto& packed = plan.model.folder.quantization.linears;
  if (packed.empty()) return;
  throw Error(ErrorCode::unsupported, concat(printable(packed.begin()->first), ": it is packed already"))
      .hint("start from the 16-bit checkpoint");
}

void choose_size(const GgufExportRequest& request, ExportPlan& plan) {
  GgufCalibrationRequest calibration = request.calibration.value();
  calibration.windows = true;
  const auto beside = request.output.empty() ? fs::temp_directory_path() / "w4q" : request.output;
  plan.calibration = std::make_unique<GgufCalibration>(calibration, plan.model, beside);
  choose_gguf_types(plan, request.bytes, beside);
  for (auto& entry : plan.metadata) {
    if (entry.key == "general.file_type") entry.value = mixed_file_type(plan.tensors);
  }
}

/// MXFP4 keeps its codes but where everything is rounded anew.
model::OpenedModel open_source(const GgufExportRequest& request) {
  if (request.calibration || request.bytes > 0 || !is_mxfp4(request.input)) return model::open_model(request.input);
  return model::open_model(checkpoint::open_folder(request.input, true, checkpoint::FloatForm::packed));
}

}  // namespace

bool ExportedTensor::is_plain() const noexcept {
  const auto [rows, columns] = gguf::matrix_size(parameter.shape);
  return file.rows.is_plain(rows) && file.columns.is_plain(columns) && !file.changes_values();
}

/// Layers behind which what was seen is added, of a model that sees: a file of its towers has to meet one that says so.
void add_picture_layers(ExportPlan& plan) {
  const io::Json& config = plan.model.folder.config;
  const auto vision = config.find("vision_config");
  if (vision == config.end() || !vision->is_object()) return;
  const auto layers = vision->find("deepstack_visual_indexes");
  if (layers == vision->end() || !layers->is_array() || layers->empty()) return;
  const std::string_view name = plan.model.config.architecture->gguf;
  plan.metadata.push_back({concat(name, ".n_deepstack_layers"), static_cast<uint32_t>(layers->size())});
}

std::unique_ptr<ExportPlan> plan_export(const GgufExportRequest& request) {
  GgufTarget target = gguf_target(request.to);
  if (request.bytes > 0) target = sized_target();
  auto made = std::make_unique<ExportPlan>(open_source(request));
  ExportPlan& plan = *made;
  model::require_decoder(plan.model.config, "a GGUF file");
  if (plan.model.config.architecture->gguf.empty()) {
    throw Error(ErrorCode::unsupported, concat("GGUF of ", plan.model.config.architecture_name, " is not written"))
        .hint("repack --to another format");
  }
  plan.model.config.tied_embeddings = model::has_tied_head(plan.model);
  if (request.calibration || request.bytes > 0) refuse_packed(plan);
  if (request.calibration) fitted(request.calibration->source.text, plan.model.config);  // or throws, before any work
  plan.tensors = choose_types(plan, target, request.calibration.has_value());
  note_left_out(plan);
  plan.rope_factors = gguf::rope_factors_to_gguf(plan.model.config);
  plan.metadata = general_metadata(request.input, target, plan);
  append(plan.metadata, gguf::config_to_gguf(plan.model.config, plan.notes));
  add_picture_layers(plan);
  append(plan.metadata, read_tokenizer(request, plan));
  for (const auto& warning : plan.model.folder.tensors.warnings()) plan.notes.push_back(warning);
  if (request.bytes > 0) choose_size(request, plan);
  return made;
}

std::vector<io::PlannedGgufTensor> planned_tensors(const ExportPlan& plan) {
  std::vector<io::PlannedGgufTensor> result;
  for (const auto& tensor : plan.tensors) {
    const Shape& shape = tensor.file.shape;
    if (!tensor.is_part()) {
      result.push_back({tensor.name(), tensor.type, shape});
    } else if (!result.empty() && result.back().name == tensor.name()) {
      ++result.back().shape[0];
    } else {
      result.push_back({tensor.name(), tensor.type, {1, shape[0], shape[1]}});
    }
  }
  for (const auto& [name, values] : plan.rope_factors) {
    result.push_back({std::string(name), GgmlType::f32, {std::ssize(values)}});
  }
  return result;
}

int64_t stored_bytes(const ExportPlan& plan, const ExportedTensor& tensor) {
  const auto& tensors = plan.model.folder.tensors;
  const auto all = tensor.packed == nullptr ? static_cast<int64_t>(tensors.at(tensor.parameter.name).size())
                                            : checkpoint::stored_bytes(*tensor.packed);
  const auto count = [](const Shape& shape) { return static_cast<double>(element_count(shape)); };
  return std::llround(static_cast<double>(all) * (count(tensor.file.shape) / count(tensor.parameter.shape)));
}

int64_t gguf_bytes(GgmlType type, const Shape& shape) {
  const auto& row = describe(type);
  return element_count(shape) / row.block * row.block_bytes;
}

}  // namespace w4q::pipeline
