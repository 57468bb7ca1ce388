#include "checkpoint/affine_integers.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "checkpoint/mlx_names.h"
#include "core/convert.h"
#include "core/error.h"
#include "core/float_formats.h"
#include "core/text.h"

namespace w4q::checkpoint {
namespace {

using Source = std::shared_ptr<const io::Checkpoint>;

[[noreturn]] void refuse_affine(const io::Checkpoint& tensors, std::string_view name, const std::string& expected) {
  const io::TensorInfo& info = tensors.at(name);
  throw Error(ErrorCode::bad_file, concat(printable(name), ": ", dtype_name(info.dtype), " ", shape_text(info.shape)))
      .detail(concat("expected ", expected, ", in ", tensors.file_of(name)));
}

std::string affine_text(const io::Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

int64_t affine_number(const io::Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

/// Codes of `bits` bits, one behind the other from the low end of the first byte on.
void read_stream(std::span<const std::byte> bytes, int bits, std::span<uint8_t> codes) {
  const unsigned mask = (1u << bits) - 1;
  for (size_t i = 0, at = 0; i < codes.size(); ++i, at += static_cast<size_t>(bits)) {
    unsigned window = std::to_integer<unsigned>(bytes[at / 8]);
    if (at / 8 + 1 < bytes.size()) window |= std::to_integer<unsigned>(bytes[at / 8 + 1]) << 8;
    codes[i] = static_cast<uint8_t>(window >> at % 8 & mask);
  }
}

/// What a code stands for beside its scale.
enum class CodeKind { integer, e2m1, e4m3 };

struct MlxMode {
  std::string_view name;
  int bits;  ///< 0: any
  int64_t group;
  CodeKind codes;
  bool float_scales;  ///< E4M3 in bytes; else powers of two
};
constexpr MlxMode modes[] = {{"mxfp4", 4, 32, CodeKind::e2m1, false},
                             {"nvfp4", 4, 16, CodeKind::e2m1, true},
                             {"mxfp8", 8, 32, CodeKind::e4m3, false}};

constexpr std::array<float, 16> e2m1_values = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/// How a matrix, or each expert of a stack, is stored.
struct MlxForm {
  std::string name, scales, biases;  ///< tensors
  int64_t n = 0, k = 0, group = 0, row_bytes = 0;
  int bits = 4;
  const MlxMode* mode = nullptr;  ///< null: integers with offsets
};

/// Values of scales or offsets, [rows, groups] from `first` on.
std::vector<float> affine_values(const io::Checkpoint& tensors, const std::string& name, const MlxMode* mode) {
  const auto loaded = tensors.load(name);
  std::vector<float> values(static_cast<size_t>(element_count(loaded->shape)));
  if (mode != nullptr) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(loaded->bytes.data());
    std::transform(bytes, bytes + values.size(), values.begin(), mode->float_scales ? f32_from_e4m3 : f32_from_e8m0);
  } else {
    widen(loaded->bytes, loaded->dtype, values);
  }
  return values;
}

io::RowReader mlx_rows(const io::Checkpoint& tensors, const MlxForm& form, int64_t first_row) {
  struct Parts {
    io::LoadedTensor codes;
    std::vector<float> scales, biases;
  };
  const auto parts = std::make_shared<const Parts>(
      Parts{tensors.load(form.name), affine_values(tensors, form.scales, form.mode),
            form.biases.empty() ? std::vector<float>() : affine_values(tensors, form.biases, nullptr)});
  return [parts, form, first_row](int64_t row, std::span<float> values) {
    const int64_t stored = first_row + row, groups = form.k / form.group;
    std::vector<uint8_t> codes(static_cast<size_t>(form.k));
    const auto from =
        parts->codes->bytes.subspan(static_cast<size_t>(stored * form.row_bytes), static_cast<size_t>(form.row_bytes));
    read_stream(from, form.bits, codes);
    for (size_t i = 0; i < codes.size(); ++i) {
      const auto group = static_cast<size_t>(stored * groups) + i / static_cast<size_t>(form.group);
      const float scale = parts->scales[group];
      if (form.mode == nullptr) {
        values[i] = static_cast<float>(codes[i]) * scale + parts->biases[group];
      } else {
        values[i] = (form.mode->codes == CodeKind::e2m1 ? e2m1_values[codes[i]] : f32_from_e4m3(codes[i])) * scale;
      }
    }
  };
}

/// What a module's own object of the config says, or else the whole config.
const io::Json& setting_of(const io::Json& quantization, const std::string& module) {
  const auto own = quantization.find(module);
  return own != quantization.end() && own->is_object() ? *own : quantization;
}

MlxForm mlx_form(const io::Checkpoint& tensors, const io::Json& quantization, const std::string& name) {
  const std::string module = name.substr(0, name.size() - std::string_view(".weight").size());
  MlxForm form{.name = name, .scales = module + ".scales", .biases = module + ".biases"};
  const io::Json& setting = setting_of(quantization, module);
  const std::string mode = affine_text(setting, "mode");
  const auto found = std::ranges::find(modes, mode, &MlxMode::name);
  if (found != std::end(modes)) form.mode = found, form.biases.clear();
  form.group = form.mode != nullptr ? form.mode->group : affine_number(setting, "group_size");
  const Shape shape = tensors.at(name).shape, scales = tensors.at(form.scales).shape;
  if (shape.size() < 2 || shape.size() > 3 || scales.size() != shape.size() || form.group < 1) {
    refuse_affine(tensors, form.scales, "as many dimensions as its codes, and groups of group_size");
  }
  form.n = shape[shape.size() - 2], form.k = scales.back() * form.group;
  form.row_bytes = shape.back() * 4;
  const int64_t bits = form.k > 0 ? form.row_bytes * 8 / form.k : 0, stated = affine_number(setting, "bits");
  if (bits < 1 || bits > 8 || bits * form.k != form.row_bytes * 8 || (stated > 0 && stated != bits)) {
    refuse_affine(tensors, name,
                  concat("codes of ", stated > 0 ? stated : bits, " bits for ", scales.back(), " groups of ",
                         form.group, " inputs"));
  }
  form.bits = static_cast<int>(bits);
  Shape wanted = shape;
  wanted.back() = scales.back();
  const bool bytes = form.mode != nullptr;
  if (scales != wanted || bytes != (tensors.at(form.scales).dtype == DType::u8) ||
      (!bytes && !is_weight_dtype(tensors.at(form.scales).dtype))) {
    refuse_affine(tensors, form.scales, concat(bytes ? "U8 " : "BF16, F16 or F32 ", shape_text(wanted)));
  }
  if (form.biases.empty()) return form;
  if (!tensors.contains(form.biases)) {
    throw Error(ErrorCode::bad_file, concat(printable(name), ": codes without their offsets"))
        .detail(concat("expected ", printable(form.biases)));
  }
  if (tensors.at(form.biases).shape != wanted || !is_weight_dtype(tensors.at(form.biases).dtype)) {
    refuse_affine(tensors, form.biases, concat("BF16, F16 or F32 ", shape_text(wanted)));
  }
  return form;
}

void add_matrix(AffineMatrices& all, const std::string& name, const Shape& shape, std::function<io::RowReader()> rows) {
  all.derived.emplace(name, io::DerivedTensor{DType::f32, DType::bf16, shape, {}, std::move(rows)});
}

/// A stack of experts in 16 bit, whose inputs the groups do not divide.
void add_plain_stack(const Source& tensors, const std::string& name, AffineMatrices& all) {
  const Shape shape = tensors->at(name).shape;
  const std::string module = name.substr(0, name.size() - std::string_view(".weight").size());
  all.hidden.insert(name);
  for (int64_t expert = 0; expert < shape[0]; ++expert) {
    add_matrix(all, mlx_expert(module, expert) + ".weight", {shape[1], shape[2]},
               [tensors, name, shape, expert]() -> io::RowReader {
                 const auto loaded = std::make_shared<const io::LoadedTensor>(tensors->load(name));
                 return [loaded, shape, expert](int64_t row, std::span<float> values) {
                   const int64_t width = dtype_bits((*loaded)->dtype) / 8, first = (expert * shape[1] + row) * shape[2];
                   widen((*loaded)->bytes.subspan(static_cast<size_t>(first * width)), (*loaded)->dtype, values);
                 };
               });
  }
}

void add_mlx(const Source& tensors, const io::Json& quantization, const std::string& name, AffineMatrices& all) {
  const MlxForm form = mlx_form(*tensors, quantization, name);
  for (const std::string& part : {form.scales, form.biases}) {
    if (!part.empty()) all.hidden.insert(part);
  }
  all.fewest_bits = std::min(all.fewest_bits, form.bits);
  const Shape& stored = tensors->at(name).shape;
  if (stored.size() == 2) {
    return add_matrix(all, name, {form.n, form.k}, [tensors, form] { return mlx_rows(*tensors, form, 0); });
  }
  all.hidden.insert(name);
  const std::string module = name.substr(0, name.size() - std::string_view(".weight").size());
  for (int64_t expert = 0; expert < stored[0]; ++expert) {
    add_matrix(all, mlx_expert(module, expert) + ".weight", {form.n, form.k},
               [tensors, form, expert] { return mlx_rows(*tensors, form, expert * form.n); });
  }
}

bool is_convolution_of_mlx(const std::string& name, const io::TensorInfo& info) {
  return name.ends_with(".linear_attn.conv1d.weight") && info.shape.size() == 3 && info.shape[1] > 1 &&
         info.shape[2] == 1 && is_weight_dtype(info.dtype);
}

/// Norms that these models store less one, which is not that of a delta net's outputs.
bool is_norm_less_one(const std::string& name, const io::TensorInfo& info) {
  constexpr std::string_view ends[] = {".input_layernorm.weight", ".post_attention_layernorm.weight",
                                       "model.norm.weight", ".q_norm.weight", ".k_norm.weight"};
  return info.shape.size() == 1 && is_weight_dtype(info.dtype) &&
         std::ranges::any_of(ends, [&](std::string_view end) { return name.ends_with(end); });
}

/// mlx-lm turns convolutions of Qwen3.5 and Qwen3-Next round and adds one to their norms, both or neither.
void rearrange_delta_nets(const Source& tensors, AffineMatrices& all) {
  std::map<std::string, io::DerivedTensor, std::less<>> rearranged;
  for (const auto& [name, info] : tensors->tensors()) {
    if (!is_convolution_of_mlx(name, info)) continue;
    rearranged.emplace(
        name, io::DerivedTensor{info.dtype, info.dtype, {info.shape[0], 1, info.shape[1]}, [tensors, name = name] {
                                  return tensors->load(name).buffer();
                                }});
  }
  if (rearranged.empty()) return;
  for (const auto& [name, info] : tensors->tensors()) {
    if (!is_norm_less_one(name, info)) continue;
    rearranged.emplace(name, io::DerivedTensor{DType::f32, info.dtype, info.shape, [tensors, name = name] {
                                                 auto values = affine_values(*tensors, name, nullptr);
                                                 for (float& value : values) value -= 1;
                                                 Buffer result(values.size() * sizeof(float));
                                                 std::memcpy(result.bytes().data(), values.data(), result.size());
                                                 return result;
                                               }});
  }
  all.derived.merge(rearranged);
}

/// By the names that the model has without mlx-lm.
void name_as_model(const Source& tensors, const io::Json& config, AffineMatrices& all) {
  std::map<std::string, io::DerivedTensor, std::less<>> named;
  for (auto& [name, tensor] : all.derived) {
    const std::string own = name_behind_mlx(config, name);
    if (own != name && tensors->contains(name)) all.hidden.insert(name);
    named.emplace(own, std::move(tensor));
  }
  for (const auto& [name, info] : tensors->tensors()) {
    const std::string own = name_behind_mlx(config, name);
    if (own == name || all.hidden.contains(name)) continue;
    all.hidden.insert(name);
    const auto make = [tensors, name = name] { return tensors->load(name).buffer(); };
    named.emplace(own, io::DerivedTensor{info.dtype, tensors->stored_dtype(name), info.shape, make});
  }
  all.derived = std::move(named);
}

/// Two outputs a byte: how many of ModelOpt's there are is told by the scales.
void add_int4(const Source& tensors, const std::string& name, AffineMatrices& all) {
  const std::string module = name.substr(0, name.size() - std::string_view(".weight").size());
  const std::string scales = name + "_scale", inputs = module + ".pre_quant_scale";
  const Shape &codes = tensors->at(name).shape, &found = tensors->at(scales).shape;
  const int64_t n = codes.size() == 2 ? codes[0] * 2 : 0, k = codes.size() == 2 ? codes[1] : 0;
  if (n == 0 || found.size() != 2 || found[0] != n || found[1] == 0 || k % found[1] != 0 ||
      !is_weight_dtype(tensors->at(scales).dtype)) {
    refuse_affine(*tensors, scales, concat("BF16, F16 or F32 [", n, ", groups of ", k, " inputs]"));
  }
  all.hidden.insert(scales);
  all.fewest_bits = std::min(all.fewest_bits, 4);
  if (tensors->contains(inputs)) {
    if (element_count(tensors->at(inputs).shape) != k || !is_weight_dtype(tensors->at(inputs).dtype))
      refuse_affine(*tensors, inputs, shape_text({k}));
    all.hidden.insert(inputs);
  }
  for (const char* unused : {".input_scale", ".weight_scale_2"}) {
    if (tensors->contains(module + unused)) refuse_affine(*tensors, module + unused, "no second scale beside INT4");
  }
  add_matrix(all, name, {n, k}, [tensors, name, scales, inputs, k, groups = found[1]]() -> io::RowReader {
    const auto loaded = std::make_shared<const io::LoadedTensor>(tensors->load(name));
    const auto sizes = std::make_shared<const std::vector<float>>(affine_values(*tensors, scales, nullptr));
    const auto factors = std::make_shared<const std::vector<float>>(
        tensors->contains(inputs) ? affine_values(*tensors, inputs, nullptr) : std::vector<float>());
    return [loaded, sizes, factors, k, groups](int64_t row, std::span<float> values) {
      const auto bytes = (*loaded)->bytes.subspan(static_cast<size_t>(row / 2 * k), static_cast<size_t>(k));
      for (size_t i = 0; i < values.size(); ++i) {
        const int nibble = std::to_integer<int>(bytes[i]) >> (row % 2 * 4) & 15;
        const float scale = (*sizes)[static_cast<size_t>(row * groups) + i / static_cast<size_t>(k / groups)];
        values[i] = static_cast<float>(nibble >= 8 ? nibble - 16 : nibble) * scale;
        if (!factors->empty()) values[i] *= (*factors)[i];
      }
    };
  });
}

}  // namespace

bool states_mlx(const io::Json& quantization) {
  return quantization.is_object() && !quantization.contains("quant_method") &&
         affine_number(quantization, "bits") > 0 && affine_number(quantization, "group_size") > 0;
}

bool states_int4_awq(const io::Json& quantization) {
  if (!quantization.is_object() || affine_text(quantization, "quant_method") != "modelopt") return false;
  const std::string algorithm = affine_text(quantization, "quant_algo");
  return algorithm == "W4A16_AWQ" || algorithm == "INT4_AWQ";
}

AffineMatrices read_affine_integers(const Source& tensors, const io::Json& config, const io::Json& quantization) {
  AffineMatrices all;
  const bool mlx = states_mlx(quantization), int4 = states_int4_awq(quantization);
  if (!mlx && !int4) return all;
  for (const auto& [name, info] : tensors->tensors()) {
    if (!name.ends_with(".weight")) continue;
    const std::string module = name.substr(0, name.size() - std::string_view(".weight").size());
    if (mlx && info.dtype == DType::u32 && tensors->contains(module + ".scales"))
      add_mlx(tensors, quantization, name, all);
    const bool stack = name.find(".switch_mlp.") != std::string::npos || name.find(".experts.") != std::string::npos;
    if (mlx && stack && is_weight_dtype(info.dtype) && info.shape.size() == 3) add_plain_stack(tensors, name, all);
    if (int4 && info.dtype == DType::u8 && tensors->contains(name + "_scale")) add_int4(tensors, name, all);
  }
  all.matrices = all.derived.size();
  if (mlx) rearrange_delta_nets(tensors, all);
  if (mlx) name_as_model(tensors, config, all);
  return all;
}

}  // namespace w4q::checkpoint
