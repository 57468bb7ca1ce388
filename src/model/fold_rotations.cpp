#include "model/fold_rotations.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "model/model.h"
#include "model/opened.h"
#include "model/parameters.h"
#include "model/stream_writers.h"
#include "model/turn_weight.h"

namespace w4q::model {
namespace {

using formats::InputRotation;
using formats::Rotation;
using SharedCheckpoint = std::shared_ptr<const io::Checkpoint>;
using SharedRotation = std::shared_ptr<const InputRotation>;
using DerivedTensors = std::map<std::string, io::DerivedTensor, std::less<>>;

constexpr const char* config_key = "folded_rotations";
constexpr const char* tied_key = "tie_word_embeddings";
std::string embedding_name(const ModelConfig& config) { return embedding_plan(config).name + ".weight"; }
std::string head_name(const ModelConfig& config) { return head_plan(config).name + ".weight"; }
constexpr int64_t least_block = 32;

int64_t row_length(const Shape& shape) { return shape.empty() ? 1 : shape.back(); }

/// A tensor in fp32. A value that is not finite is refused here: turned, it would be in every channel.
Buffer widened(const io::Checkpoint& checkpoint, const std::string& name) {
  const auto loaded = checkpoint.load(name);
  const int64_t cols = row_length(loaded->shape), rows = element_count(loaded->shape) / cols;
  const auto row_bytes = static_cast<size_t>(cols * dtype_bits(loaded->dtype) / 8);
  Buffer result(static_cast<size_t>(rows * cols) * sizeof(float));
  const auto values = result.as<float>();
  std::mutex mutex;
  int64_t bad = rows * cols;
  parallel_for(rows, 64, [&](int64_t begin, int64_t end) {
    const auto part = values.subspan(static_cast<size_t>(begin * cols), static_cast<size_t>((end - begin) * cols));
    widen(loaded->bytes.subspan(static_cast<size_t>(begin) * row_bytes, static_cast<size_t>(end - begin) * row_bytes),
          loaded->dtype, part);
    const auto found = std::ranges::find_if(part, [](float value) { return !std::isfinite(value); });
    if (found == part.end()) return;
    const std::lock_guard lock(mutex);
    bad = std::min(bad, begin * cols + (found - part.begin()));
  });
  if (bad == rows * cols) return result;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": NaN or infinity"))
      .detail(concat("at row ", bad / cols, ", column ", bad % cols, " in ", checkpoint.file_of(name)));
}

/// What is done to one matrix or bias.
struct Turn {
  std::string source;                    ///< the tensor it starts from
  std::optional<PlannedNorm> norm = {};  ///< of its inputs
  SharedRotation inputs;                 ///< null: stay
  SharedRotation outputs;                ///< null: stay
};

Buffer turned(const io::Checkpoint& checkpoint, const Turn& turn) {
  const Shape& shape = checkpoint.at(turn.source).shape;
  Buffer result = widened(checkpoint, turn.source);
  const int64_t cols = row_length(shape);
  const MatrixView<float> matrix(result.as<float>().data(), element_count(shape) / cols, cols);
  if (turn.norm) {
    Buffer norm = widened(checkpoint, turn.norm->name + ".weight");
    if (turn.norm->offset != 0) std::ranges::for_each(norm.as<float>(), [&](float& w) { w += turn.norm->offset; });
    multiply_columns(matrix, norm.as<float>());
  }
  if (turn.inputs) turn_inputs(matrix, *turn.inputs);
  if (turn.outputs) turn_outputs(matrix, *turn.outputs);
  return result;
}

/// A stack of experts each of which is turned, as it stood.
Buffer turned_stack(const io::Checkpoint& checkpoint, const StackedExperts& stack, const std::vector<Turn>& turns) {
  const int64_t size = stack.n * stack.k;
  Buffer result(static_cast<size_t>(stack.experts * size) * sizeof(float));
  for (int64_t index = 0; index < stack.experts; ++index) {
    const Buffer expert = turned(checkpoint, turns[static_cast<size_t>(index)]);
    const float* const from = expert.as<float>().data();
    float* const to = result.as<float>().data() + index * size;
    if (!stack.inputs_first) {
      std::copy_n(from, size, to);
      continue;
    }
    for (int64_t row = 0; row < stack.n; ++row) {
      for (int64_t col = 0; col < stack.k; ++col) to[col * stack.n + row] = from[row * stack.k + col];
    }
  }
  return result;
}

/// Goes over the graph and says how each tensor is made.
class Folding {
 public:
  Folding(SharedCheckpoint checkpoint, const ModelConfig& config, const std::vector<StackedExperts>& stacks,
          const FoldedRotations& rotations)
      : checkpoint_(std::move(checkpoint)),
        config_(config),
        stacks_(stacks),
        stream_(std::make_shared<InputRotation>(rotations.residual, config.hidden_size)),
        head_(std::make_shared<InputRotation>(rotations.heads, config.head_dim)) {}

  DerivedTensors run() && {
    const std::string table = embedding_name(config_), head = head_name(config_);
    matrix(table, {.source = table, .inputs = stream_, .outputs = {}});
    for (int64_t layer = 0; layer < config_.layers; ++layer) fold_layer(layer_plan(config_, layer));
    const PlannedNorm norm = final_norm_plan(config_);
    matrix(head, {.source = config_.tied_embeddings ? table : head, .norm = norm, .inputs = stream_, .outputs = {}});
    ones(norm);
    for (const auto& stack : stacks_) whole(stack);
    for (const auto& [name, info] : checkpoint_->tensors()) {
      if (writes_stream(config_.architecture_name, name)) fold_writer(name, info.shape);
    }
    return std::move(tensors_);
  }

 private:
  void fold_layer(const LayerPlan& plan) {
    for (const auto& block : plan.blocks) {
      const auto bare = std::ranges::find_if(
          block.groups, [](const InputGroup& group) { return group.inputs == Basis::stream && !group.norm; });
      if (bare != block.groups.end() && block.norm(NormRole::output) == nullptr) {
        throw Error(ErrorCode::unsupported, concat(bare->name(), ": rotations are not folded into it"))
            .detail("what takes them reads the residual stream behind a norm")
            .hint("leave out --fold-rotations");
      }
      if (block.norm(NormRole::output) == nullptr) continue;
      throw Error(ErrorCode::unsupported, concat(block.norm(NormRole::output)->name, ": a norm before the sum"))
          .detail("outputs cannot be turned behind a norm")
          .hint("leave out --fold-rotations");
    }
    for (const auto& group : plan.groups()) {
      for (const auto& linear : group.linears) fold_linear(group, linear);
    }
    for (const auto& norm : plan.norms()) {
      if (norm.role == NormRole::input) ones(norm);
    }
  }

  void fold_linear(const InputGroup& group, const PlannedLinear& linear) {
    const std::string weight = linear.name + ".weight", bias = linear.name + ".bias";
    const SharedRotation outputs = rotation(linear.outputs);
    matrix(weight, {.source = weight, .norm = group.norm, .inputs = rotation(group.inputs), .outputs = outputs});
    // As one row, a bias is turned as inputs are.
    if (!linear.bias || !outputs) return;
    const std::string& rows = linear.bias_tensor.empty() ? bias : linear.bias_tensor;
    matrix(rows, {.source = rows, .inputs = outputs, .outputs = {}});
  }

  /// Of a tower: a weight, or a row of the stream, a bias or one that is learned.
  void fold_writer(const std::string& name, const Shape& shape) {
    const bool row = shape == Shape{config_.hidden_size};
    if (!row && (shape.size() != 2 || shape[0] != config_.hidden_size)) {
      throw Error(ErrorCode::mismatch, concat(printable(name), ": ", shape_text(shape)))
          .detail(concat("expected rows of the residual stream, ", config_.hidden_size, " channels"))
          .hint("leave out --fold-rotations");
    }
    matrix(name, {.source = name, .inputs = row ? stream_ : nullptr, .outputs = row ? nullptr : stream_});
  }

  /// The stack itself, for whoever keeps it as one.
  void whole(const StackedExperts& stack) {
    std::vector<Turn> turns;
    for (int64_t index = 0; index < stack.experts; ++index) turns.push_back(turns_.at(stack.expert(index)));
    const io::TensorInfo& info = checkpoint_->at(stack.name);
    auto make = [checkpoint = checkpoint_, stack, turns = std::move(turns)] {
      return turned_stack(*checkpoint, stack, turns);
    };
    tensors_.emplace(stack.name, io::DerivedTensor{DType::f32, info.dtype, info.shape, std::move(make)});
  }

  /// Null where nothing is folded.
  SharedRotation rotation(Basis basis) const {
    return basis == Basis::stream ? stream_ : basis == Basis::heads ? head_ : nullptr;
  }

  void matrix(const std::string& name, Turn turn) {
    const io::TensorInfo& info = checkpoint_->at(turn.source);
    if (!stacks_.empty()) turns_.emplace(name, turn);
    auto make = [checkpoint = checkpoint_, turn = std::move(turn)] { return turned(*checkpoint, turn); };
    tensors_.emplace(name, io::DerivedTensor{DType::f32, info.dtype, info.shape, std::move(make)});
  }

  /// The norm that multiplies by one.
  void ones(const PlannedNorm& norm) {
    const std::string name = norm.name + ".weight";
    const io::TensorInfo& info = checkpoint_->at(name);
    auto make = [count = static_cast<size_t>(element_count(info.shape)), value = 1.0f - norm.offset] {
      Buffer result(count * sizeof(float));
      std::ranges::fill(result.as<float>(), value);
      return result;
    };
    tensors_.emplace(name, io::DerivedTensor{DType::f32, info.dtype, info.shape, std::move(make)});
  }

  const SharedCheckpoint checkpoint_;
  const ModelConfig& config_;
  const std::vector<StackedExperts>& stacks_;
  std::map<std::string, Turn> turns_;  ///< where there are stacks
  const SharedRotation stream_, head_;
  DerivedTensors tensors_;
};

/// Throws unsupported for a tensor beside the text model where what it does to the residual stream is not known.
void check_beside(const std::string& name, const ModelConfig& config) {
  const std::string_view why = reason_to_carry(config, name);
  if (why == further_tokens) {
    throw Error(ErrorCode::unsupported, concat(printable(name), ": ", further_tokens))
        .detail("it reads the residual stream behind the final norm, whose weight goes into the head")
        .hint("leave out --fold-rotations, or these layers from the folder");
  }
  if (why == of_tower && knows_stream_writers(config.architecture_name)) return;
  if (why == of_tower) {
    throw Error(ErrorCode::unsupported, concat(printable(name), ": ", of_tower))
        .detail(concat("which of the tensors of ", config.architecture_name,
                       " put rows into the residual stream is not known; they would do so in the basis of before"))
        .hint("leave out --fold-rotations");
  }
  throw Error(ErrorCode::unsupported, concat(printable(name), ": is no parameter of ", config.architecture_name))
      .detail("it might read or write the residual stream, and would do so in the basis of before")
      .hint("leave out --fold-rotations, or the tensor");
}

/// Every parameter is there as config.json wants it, and nothing else of which it is not known whether it reads or writes
/// the residual stream.
void check_parameters(const io::Checkpoint& checkpoint, const ModelConfig& config,
                      const std::vector<StackedExperts>& stacks) {
  std::set<std::string, std::less<>> known;
  for (const auto& parameter : parameters(config)) {
    check_weight(checkpoint, parameter.name, parameter.shape);
    known.insert(parameter.name);
  }
  for (const auto& stack : stacks) known.insert(stack.name);
  if (config.tied_embeddings) known.insert(head_name(config));  // stored or not, it is not read
  bool tower = false, writes = false;
  for (const auto& [name, info] : checkpoint.tensors()) {
    if (known.contains(name) || is_derived_tensor(name)) continue;
    check_beside(name, config);
    tower = true;
    writes = writes || writes_stream(config.architecture_name, name);
  }
  if (!tower || writes) return;
  throw Error(ErrorCode::unsupported,
              concat(checkpoint.folder().string(), ": no projector of ", config.architecture_name))
      .detail("what its tower puts into the residual stream has no name that is known")
      .hint("leave out --fold-rotations");
}

std::vector<std::string> notes_of(const OpenedModel& model) {
  const std::string behind =
      model.config.qk_norm ? "q_norm, k_norm and the rotary embedding lie" : "the rotary embedding lies";
  std::vector<std::string> notes{
      concat("not folded: q_proj's and k_proj's outputs; ", behind, " behind them"),
      "not folded: down_proj's input, a product of gate and up channel by channel; --rotate rotates it at run time"};
  if (has_tied_head(model)) {
    const auto& table = model.folder.tensors.at(embedding_name(model.config));
    notes.push_back(concat("the head becomes a tensor of its own, ", human_bytes(static_cast<int64_t>(table.size())),
                           ": the final norm's weight cannot be folded into a table that embeds too"));
  }
  return notes;
}

}  // namespace

std::string to_string(const FoldedRotations& rotations) {
  return concat(formats::to_string(rotations.residual), ", heads ", formats::to_string(rotations.heads));
}

FoldedRotations widest_rotations(const ModelConfig& config, uint64_t seed) {
  const int64_t divisor = std::min(config.hidden_size & -config.hidden_size, formats::max_rotation_block);
  const int64_t block = divisor >= least_block ? divisor : formats::whole_row;
  return {.residual = {block, seed}, .heads = {formats::whole_row, seed}};
}

std::optional<FoldedRotations> read_folded_rotations(const io::Json& config, std::string_view source) {
  const auto found = config.is_object() ? config.find(config_key) : config.end();
  if (found == config.end() || found->is_null()) return std::nullopt;
  const auto rotation = [&](const char* key) {
    const auto value = found->is_object() ? found->find(key) : found->end();
    if (!found->is_object() || value == found->end() || !value->is_string()) {
      throw Error(ErrorCode::bad_file, concat(source, ": ", config_key, " has no text \"", key, "\""))
          .hint("the file was damaged or edited by hand");
    }
    return formats::parse_rotation(value->get<std::string>());
  };
  return FoldedRotations{rotation("residual"), rotation("heads")};
}

OpenedModel fold_rotations(OpenedModel model, const FoldedRotations& rotations) {
  io::Checkpoint& tensors = model.folder.tensors;
  io::Json& json = model.folder.config;
  if (model.folded) {
    throw Error(ErrorCode::bad_argument,
                model.folder.config_path().string() + ": rotations are folded into this model already")
        .detail(to_string(*model.folded))
        .hint("fold the model it was made from, or leave out --fold-rotations");
  }
  model.notes = notes_of(model);
  model.config.tied_embeddings = has_tied_head(model);
  check_parameters(tensors, model.config, model.apart);
  const auto source = std::make_shared<const io::Checkpoint>(std::move(tensors));
  tensors =
      io::Checkpoint::derive(source, Folding(source, model.config, model.apart, rotations).run(), to_string(rotations));
  model.config.tied_embeddings = false;
  model.config.tie_word_embeddings = false;
  model.folded = rotations;
  json[tied_key] = false;
  if (const auto text = json.find("text_config"); text != json.end() && text->contains(tied_key)) {
    (*text)[tied_key] = false;
  }
  json[config_key] = {{"residual", formats::to_string(rotations.residual)},
                      {"heads", formats::to_string(rotations.heads)}};
  return model;
}

}  // namespace w4q::model
