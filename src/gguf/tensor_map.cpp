#include "gguf/tensor_map.h"

#include <cmath>
#include <string_view>

#include "core/float_formats.h"
#include "core/text.h"
#include "gguf/families.h"
#include "gguf/rotary_rows.h"
#include "model/architecture.h"

namespace w4q::gguf {
namespace {

using kernels::DeltaShape;

/// "blk.3.ssm_a" → "ssm_a", and what stands before it.
std::pair<std::string, std::string_view> split_name(std::string_view name) {
  const size_t dot = name.starts_with("blk.") ? name.find('.', 4) : std::string_view::npos;
  if (dot == std::string_view::npos) return {"", name};
  return {std::string(name.substr(0, dot + 1)), name.substr(dot + 1)};
}

Order rotary_order(int64_t rows, int64_t head_dim) {
  std::vector<int64_t> listed;
  for (int64_t row = 0; row < rows; ++row) listed.push_back(rotary_row_from_gguf(row, head_dim));
  return Order(std::move(listed));
}

/// Of each head's `turning` first rows neighbours turn together: a file has the first ones of all pairs, then the others.
Order halved_order(int64_t rows, int64_t head_dim, int64_t turning) {
  std::vector<int64_t> listed;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t channel = row % head_dim, half = turning / 2;
    listed.push_back(channel < turning ? row - channel + channel % half * 2 + channel / half : row);
  }
  return Order(std::move(listed));
}

/// Value heads of `width` each, which key heads have in turn behind `before` others: a file has the first ones of all
/// key heads, then the second ones.
Order tiled_order(const DeltaShape& delta, int64_t before, int64_t width) {
  std::vector<int64_t> listed;
  for (int64_t i = 0; i < before; ++i) listed.push_back(i);
  const int64_t shared = delta.value_heads / delta.key_heads;
  for (int64_t head = 0; head < delta.value_heads; ++head) {
    const int64_t from = head % delta.key_heads * shared + head / delta.key_heads;
    for (int64_t i = 0; i < width; ++i) listed.push_back(before + from * width + i);
  }
  return Order(std::move(listed));
}

/// Of rows that stand key head by key head, queries, keys, values and gates of each, the `count` from `first` on of
/// every key head.
void add_of_heads(const DeltaShape& delta, int64_t first, int64_t count, std::vector<int64_t>& listed) {
  const int64_t of_head = (2 * delta.keys() + 2 * delta.values()) / delta.key_heads;
  for (int64_t head = 0; head < delta.key_heads; ++head) {
    for (int64_t i = 0; i < count; ++i) listed.push_back(head * of_head + first + i);
  }
}

/// in_proj_qkvz: two tensors, the first one with all queries, all keys, all values.
std::vector<FilePart> mixed_and_gate(const DeltaShape& delta, const std::string& layer, FilePart whole) {
  const int64_t values = delta.values() / delta.key_heads;
  std::vector<int64_t> mixed, gate;
  add_of_heads(delta, 0, delta.key_dim, mixed);
  add_of_heads(delta, delta.key_dim, delta.key_dim, mixed);
  add_of_heads(delta, 2 * delta.key_dim, values, mixed);
  add_of_heads(delta, 2 * delta.key_dim + values, values, gate);
  FilePart first = whole, second = std::move(whole);
  first.name = layer + "attn_qkv.weight", second.name = layer + "attn_gate.weight";
  first.rows = Order(std::move(mixed)), second.rows = Order(std::move(gate));
  first.shape[0] = first.rows.size(), second.shape[0] = second.rows.size();
  return {std::move(first), std::move(second)};
}

/// Gates and ups of a stack as two tensors; of biases, [experts, both], columns are cut and not rows.
std::vector<FilePart> gates_and_ups(model::ExpertStorage storage, const std::string& layer, const FilePart& whole) {
  const bool biases = whole.part < 0, in_turn = storage == model::ExpertStorage::stacked_in_turn;
  const int64_t half = (biases ? whole.columns : whole.rows).size() / 2;
  std::vector<FilePart> result;
  for (const bool up : {false, true}) {
    FilePart& part = result.emplace_back(whole);
    part.name = concat(layer, up ? "ffn_up_exps" : "ffn_gate_exps", biases ? ".bias" : ".weight");
    const int64_t first = !up ? 0 : in_turn ? 1 : half;
    (biases ? part.columns : part.rows) = Order(half, first, in_turn ? 2 : 1);
    part.shape[biases ? part.shape.size() - 1 : 0] = half;
  }
  return result;
}

/// Orders of a delta net whose value heads are tiled.
void tile_heads(const DeltaShape& delta, std::string_view local, FilePart& part) {
  if (local == "attn_qkv.weight" || local == "ssm_conv1d.weight") {
    part.rows = tiled_order(delta, 2 * delta.keys(), delta.value_dim);
  } else if (local == "attn_gate.weight") {
    part.rows = tiled_order(delta, 0, delta.value_dim);
  } else if (local == "ssm_alpha.weight" || local == "ssm_beta.weight") {
    part.rows = tiled_order(delta, 0, 1);
  } else if (local == "ssm_a" || local == "ssm_dt.bias") {
    part.columns = tiled_order(delta, 0, 1);
  } else if (local == "ssm_out.weight") {
    part.columns = tiled_order(delta, 0, delta.value_dim);
  }
}

}  // namespace

std::optional<Order> Order::blocks(int64_t block) const {
  if (count_ % block != 0) return std::nullopt;
  std::vector<int64_t> listed;
  for (int64_t at = 0; at < count_; at += block) {
    const int64_t from = (*this)(at);
    if (from % block != 0) return std::nullopt;
    for (int64_t i = 1; i < block; ++i) {
      if ((*this)(at + i) != from + i) return std::nullopt;
    }
    listed.push_back(from / block);
  }
  return Order(std::move(listed));
}

float FilePart::to_file(float value) const noexcept {
  return decays ? static_cast<float>(-std::exp(static_cast<double>(value))) : value + offset;
}

float FilePart::from_file(float value) const noexcept {
  if (!decays) return value - offset;
  const auto exact = static_cast<float>(std::log(-static_cast<double>(value)));
  const float narrow = f32_from_bf16(bf16_from_f32(exact));
  return to_file(narrow) == value ? narrow : exact;
}

MatrixSize matrix_size(const Shape& shape) noexcept {
  MatrixSize size{1, shape.empty() ? 1 : shape.back()};
  for (size_t i = 0; i + 1 < shape.size(); ++i) size.rows *= shape[i];
  return size;
}

std::vector<FilePart> file_parts(const model::ModelConfig& config, const model::Parameter& parameter) {
  const model::ArchitectureRow& row = *config.architecture;
  const GgufFamily* const family = gguf_family(row.model_type);
  const auto [rows, columns] = matrix_size(parameter.shape);
  FilePart whole{.name = parameter.gguf,
                 .part = parameter.gguf_part,
                 .shape = parameter.shape,
                 .rows = Order(rows),
                 .columns = Order(columns),
                 .offset = parameter.gguf_offset};
  const auto [layer, local] = split_name(parameter.gguf);
  if (parameter.rotary_rows) {
    const bool vector = parameter.shape.size() == 1;
    Order& order = vector ? whole.columns : whole.rows;
    if (row.gguf_rotary_pairs) order = rotary_order(order.size(), config.head_dim);
    if (family != nullptr && family->halves_pairs) {
      const auto turning = static_cast<double>(config.head_dim) * config.rope.partial_rotary_factor;
      order = halved_order(order.size(), config.head_dim, static_cast<int64_t>(turning));
    }
  }
  if (local == "ssm_in.weight") return mixed_and_gate(config.delta, layer, std::move(whole));
  if (local.starts_with("ffn_gate_up_exps.") && (family == nullptr || !family->joins_experts)) {
    return gates_and_ups(config.mixture.storage, layer, whole);
  }
  whole.decays = local == "ssm_a";
  if (local == "ssm_conv1d.weight") whole.shape = {rows, columns};
  const bool tiles = family != nullptr && family->tiles_heads && config.delta.key_heads != config.delta.value_heads;
  if (tiles) tile_heads(config.delta, local, whole);
  return {std::move(whole)};
}

}  // namespace w4q::gguf
