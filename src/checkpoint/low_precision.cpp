#include "checkpoint/low_precision.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "checkpoint/affine_integers.h"
#include "checkpoint/dialect/byte_integers_config.h"
#include "checkpoint/dialect/small_floats_config.h"
#include "core/convert.h"
#include "core/error.h"
#include "core/float_formats.h"
#include "core/text.h"

namespace w4q::checkpoint {
namespace {

using Source = std::shared_ptr<const io::Checkpoint>;

/// How scales lie over the values of a matrix: one for `rows` × `cols` of them.
struct Scales {
  std::vector<float> values;
  int64_t rows = 1, cols = 1, across = 1;
  std::vector<float> inputs = {};  ///< what ModelOpt's AWQ multiplies each input by; empty: nothing

  std::span<const float> of_row(int64_t row) const {
    return std::span(values).subspan(static_cast<size_t>(row / rows * across), static_cast<size_t>(across));
  }
};

int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

[[noreturn]] void refuse(const io::Checkpoint& tensors, std::string_view name, const std::string& expected) {
  const io::TensorInfo& info = tensors.at(name);
  throw Error(ErrorCode::bad_file, concat(printable(name), ": ", dtype_name(info.dtype), " ", shape_text(info.shape)))
      .detail(concat("expected ", expected, ", in ", tensors.file_of(name)));
}

std::vector<float> widened(const io::Checkpoint& tensors, const std::string& name) {
  const auto loaded = tensors.load(name);
  std::vector<float> values(static_cast<size_t>(element_count(loaded->shape)));
  const auto* const bytes = reinterpret_cast<const uint8_t*>(loaded->bytes.data());
  if (loaded->dtype == DType::f8_e4m3) {
    std::transform(bytes, bytes + values.size(), values.begin(), f32_from_e4m3);
  } else if (loaded->dtype == DType::u8 || loaded->dtype == DType::f8_e8m0) {
    std::transform(bytes, bytes + values.size(), values.begin(), f32_from_e8m0);
  } else if (is_weight_dtype(loaded->dtype)) {
    widen(loaded->bytes, loaded->dtype, values);
  } else {
    refuse(tensors, name, "scales of F32, BF16, F16, F8_E4M3 or F8_E8M0");
  }
  return values;
}

/// Of LLM.int8: a row has one scale.
void widen_int8(std::span<const std::byte> codes, std::span<const float> scales, size_t, std::span<float> values) {
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scales[0];
}

/// Rows of [n, k] out of codes that fill `row_bytes` a row from `offset` bytes into their tensor on.
io::RowReader decoded_rows(const io::Checkpoint& tensors, const std::string& name, int64_t offset, int64_t row_bytes,
                           Scales scales, decltype(widen_e4m3)& widen_row) {
  const auto codes = std::make_shared<const io::LoadedTensor>(tensors.load(name));
  const auto shared = std::make_shared<const Scales>(std::move(scales));
  return [codes, shared, offset, row_bytes, &widen_row](int64_t row, std::span<float> values) {
    const auto from = (*codes)->bytes.subspan(static_cast<size_t>(offset + row * row_bytes));
    widen_row(from, shared->of_row(row), static_cast<size_t>(shared->cols), values);
    for (size_t col = 0; col < shared->inputs.size(); ++col) values[col] *= shared->inputs[col];
  };
}

/// Finds the matrices of a checkpoint that are stored as small floats.
class SmallFloats {
 public:
  SmallFloats(Source tensors, const io::Json& quantization)
      : tensors_(std::move(tensors)), quantization_(quantization) {
    const auto size = quantization.find("weight_block_size");
    if (size != quantization.end() && size->is_array() && size->size() == 2 && (*size)[0].is_number_integer() &&
        (*size)[1].is_number_integer()) {
      block_rows_ = std::max<int64_t>((*size)[0].get<int64_t>(), 1);
      block_cols_ = std::max<int64_t>((*size)[1].get<int64_t>(), 1);
    }
  }

  Folder run(Folder folder) {
    if (states_mlx(quantization_) || states_int4_awq(quantization_)) return run_integers(std::move(folder));
    for (const auto& [name, info] : tensors_->tensors()) {
      const bool stack = info.shape.size() == 3 && !name.ends_with("_weight_scale");
      if (info.dtype == DType::f8_e4m3 && stack) read_fp8_stack(name, info);
      if (info.dtype == DType::f8_e4m3 && info.shape.size() != 3 && name.ends_with(".weight")) read_fp8(name, info);
      if (info.dtype == DType::u8 && name.ends_with("_blocks")) read_mxfp4_stack(name, info);
      if (info.dtype == DType::u8 && name.ends_with(".weight_packed")) read_packed(name, info, "_packed");
      const auto module = std::string_view(name).substr(0, name.rfind('.'));
      if (info.dtype == DType::i8 && tensors_->contains(concat(module, ".SCB"))) read_int8(name, info);
      const bool nibbles = info.dtype == DType::u8 || (info.dtype == DType::i8 && has_power_scales(name));
      if (nibbles && name.ends_with(".weight")) read_packed(name, info, "");
      for (const char* scale : {".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".output_scale"}) {
        if (!name.ends_with(scale) || element_count(info.shape) > 1) continue;
        hidden_.insert(name);
        activations_ = true;
      }
    }
    folder.quantization.notes.push_back(note(derived_.size(), "small floats") +
                                        (activations_ ? "; the scales of activations are left out" : ""));
    folder.small_floats = !derived_.empty();
    folder.tensors = io::Checkpoint::derive(tensors_, std::move(derived_), tensors_->derivation(), std::move(hidden_));
    folder.config.erase("quantization_config");
    return folder;
  }

 private:
  /// What was found, for people: `what` is how `count` matrices are stored.
  static std::string note(size_t count, std::string_view what) {
    if (count == 0)
      return concat("quantization_config promises ", what, ", but no matrix is stored so: it is left out");
    return concat(count, " matrices are stored as ", what, " and read as the weights that they stand for");
  }

  void add(const std::string& name, const Shape& shape, std::function<io::RowReader()> rows) {
    derived_.emplace(name, io::DerivedTensor{DType::f32, DType::bf16, shape, {}, std::move(rows)});
  }

  /// Of folders that hold nothing else.
  Folder run_integers(Folder folder) {
    auto matrices = read_affine_integers(tensors_, folder.config, quantization_);
    folder.quantization.notes.push_back(note(matrices.matrices, "codes of few bits"));
    folder.small_floats = matrices.matrices > 0;
    folder.text_alone = states_mlx(quantization_);
    folder.few_bits = folder.small_floats && matrices.fewest_bits < 4;
    folder.tensors = io::Checkpoint::derive(tensors_, std::move(matrices.derived), tensors_->derivation(),
                                            std::move(matrices.hidden));
    for (const char* key : {"quantization_config", "quantization"}) folder.config.erase(key);
    return folder;
  }

  /// The tensor that must be there too.
  const io::TensorInfo& beside(const std::string& codes, const std::string& name) {
    if (!tensors_->contains(name)) {
      throw Error(ErrorCode::bad_file,
                  concat(printable(codes), ": ", dtype_name(tensors_->at(codes).dtype), " without its scales"))
          .detail(concat("expected ", printable(name)));
    }
    hidden_.insert(name);
    return tensors_->at(name);
  }

  /// The factors of the inputs that a module states, of [k].
  std::function<std::vector<float>()> inputs_of(std::string_view module, int64_t k) {
    const std::string name = concat(module, ".pre_quant_scale");
    if (!tensors_->contains(name)) return [] { return std::vector<float>(); };
    if (element_count(tensors_->at(name).shape) != k) refuse(*tensors_, name, shape_text({k}));
    hidden_.insert(name);
    return [tensors = tensors_, name] { return widened(*tensors, name); };
  }

  /// bitsandbytes' LLM.int8: weight I8 [n, k], SCB F32 [n], the largest magnitude of a row.
  void read_int8(const std::string& name, const io::TensorInfo& info) {
    const auto module = std::string_view(name).substr(0, name.size() - 7);
    const std::string scales = concat(module, ".SCB"), order = concat(module, ".weight_format");
    if (info.shape.size() != 2) refuse(*tensors_, name, "two dimensions");
    if (beside(name, scales).shape != Shape{info.shape[0]}) refuse(*tensors_, scales, shape_text({info.shape[0]}));
    if (tensors_->contains(order)) {
      const auto loaded = tensors_->load(order);
      if (loaded->bytes.empty() || loaded->bytes[0] != std::byte{0}) refuse(*tensors_, order, "0, for rows");
      hidden_.insert(order);
    }
    add(name, info.shape, [tensors = tensors_, name, scales, shape = info.shape] {
      constexpr float top = 127;
      Scales form{widened(*tensors, scales), 1, shape[1], 1};
      for (float& value : form.values) value /= top;
      return decoded_rows(*tensors, name, 0, shape[1], std::move(form), widen_int8);
    });
  }

  void leave_out_activations(std::string_view module) {
    for (const char* name :
         {".input_scale", ".activation_scale", ".input_global_scale", ".input_scale_ub", ".weight_shape"}) {
      const std::string full = concat(module, name);
      if (!tensors_->contains(full)) continue;
      hidden_.insert(full);
      activations_ = activations_ || !full.ends_with("shape");
    }
  }

  /// The scales of a matrix of codes, under whichever name: DeepSeek-V4 has "X.scale" beside "X.weight".
  std::string scales_beside(const std::string& name) const {
    if (const std::string inverse = name + "_scale_inv"; tensors_->contains(inverse)) return inverse;
    if (name.ends_with(".weight")) {
      const std::string plain = concat(std::string_view(name).substr(0, name.size() - 6), "scale");
      if (tensors_->contains(plain)) return plain;
    }
    return name + "_scale";
  }

  /// Whether codes of I8 are two of E2M1 in a byte: then their scales are powers of two.
  bool has_power_scales(const std::string& name) const {
    const std::string scales = scales_beside(name);
    return tensors_->contains(scales) && tensors_->at(scales).dtype == DType::f8_e8m0;
  }

  /// How scales of shape `found` lie over n × k codes.
  Scales form_of(const std::string& scales, const Shape& found, int64_t n, int64_t k) const {
    const DType dtype = tensors_->at(scales).dtype;
    if (element_count(found) == 1) return {{}, n, k, 1};
    if (found == Shape{n} || found == Shape{n, 1}) return {{}, 1, k, 1};
    if (found == Shape{blocks(n, block_rows_), blocks(k, block_cols_)}) return {{}, block_rows_, block_cols_, found[1]};
    const bool powers = dtype == DType::u8 || dtype == DType::f8_e8m0;
    if (found == Shape{n, blocks(k, 32)} && powers) return {{}, 1, 32, found[1]};  // MXFP8
    if (found == Shape{blocks(n, 32), k} && powers) return {{}, 32, 1, k};         // of ModelOpt's stacks of experts
    refuse(*tensors_, scales,
           concat("one scale, ", n, ", or ", shape_text({blocks(n, block_rows_), blocks(k, block_cols_)}),
                  " for blocks of ", block_rows_, " × ", block_cols_));
  }

  /// Experts in one tensor, outputs first: codes [experts, n, k], scales [experts, …].
  void read_fp8_stack(const std::string& name, const io::TensorInfo& info) {
    const std::string scales = scales_beside(name);
    const Shape shape = info.shape;
    Shape found = beside(name, scales).shape;
    if (found.empty() || found[0] != shape[0]) refuse(*tensors_, scales, concat(shape[0], " experts first"));
    found.erase(found.begin());
    const Scales form = form_of(scales, found, shape[1], shape[2]);
    hidden_.insert(name);
    const auto module = std::string_view(name).substr(0, name.size() - (name.ends_with(".weight") ? 7 : 0));
    leave_out_activations(module);
    for (int64_t expert = 0; expert < shape[0]; ++expert) {
      add(concat(module, ".", expert, ".weight"), {shape[1], shape[2]},
          [tensors = tensors_, name, scales, shape, form, expert] {
            const auto all = widened(*tensors, scales);
            const auto count = static_cast<std::ptrdiff_t>(all.size()) / shape[0];
            Scales filled = form;
            filled.values.assign(all.begin() + expert * count, all.begin() + (expert + 1) * count);
            return decoded_rows(*tensors, name, expert * shape[1] * shape[2], shape[2], std::move(filled), widen_e4m3);
          });
    }
  }

  void read_fp8(const std::string& name, const io::TensorInfo& info) {
    if (info.shape.size() != 2) refuse(*tensors_, name, "two dimensions");
    const std::string scales = scales_beside(name);
    const Shape shape = info.shape;
    const Scales form = form_of(scales, shape_of_scales(beside(name, scales).shape), shape[0], shape[1]);
    const auto module = std::string_view(name).substr(0, name.size() - 7);
    leave_out_activations(module);
    add(name, shape, [tensors = tensors_, name, scales, shape, form, inputs = inputs_of(module, shape[1])] {
      Scales filled = form;
      filled.values = widened(*tensors, scales);
      filled.inputs = inputs();
      return decoded_rows(*tensors, name, 0, shape[1], std::move(filled), widen_e4m3);
    });
  }

  /// gpt-oss: codes [experts, n, k / 32, 16], scales [experts, n, k / 32].
  void read_mxfp4_stack(const std::string& name, const io::TensorInfo& info) {
    const std::string stack = name.substr(0, name.size() - 7), scales = stack + "_scales";
    const Shape& shape = info.shape;
    if (shape.size() != 4 || shape[3] != 16) refuse(*tensors_, name, "[experts, n, k / 32, 16]");
    if (beside(name, scales).shape != Shape{shape[0], shape[1], shape[2]}) {
      refuse(*tensors_, scales, shape_text({shape[0], shape[1], shape[2]}));
    }
    hidden_.insert(name);
    const int64_t n = shape[1], groups = shape[2];
    for (int64_t expert = 0; expert < shape[0]; ++expert) {
      add(concat(stack, ".", expert, ".weight"), {n, groups * 32},
          [tensors = tensors_, name, scales, n, groups, expert] {
            const auto stored = tensors->load(scales);
            const auto* const bytes = reinterpret_cast<const uint8_t*>(stored->bytes.data()) + expert * n * groups;
            Scales form{std::vector<float>(static_cast<size_t>(n * groups)), 1, 32, groups};
            std::transform(bytes, bytes + n * groups, form.values.begin(), f32_from_e8m0);
            return decoded_rows(*tensors, name, expert * n * groups * 16, groups * 16, std::move(form), widen_e2m1);
          });
    }
  }

  /// compressed-tensors: weight_packed with weight_scale, and NVFP4's weight_global_scale, which divides; ModelOpt:
  /// weight with weight_scale and weight_scale_2, which multiplies.
  void read_packed(const std::string& name, const io::TensorInfo& info, std::string_view suffix) {
    const std::string weight = name.substr(0, name.size() - suffix.size());
    const std::string divisor = weight + "_global_scale", factor = weight + "_scale_2";
    const std::string scales = scales_beside(weight);
    if (info.shape.size() != 2) refuse(*tensors_, name, "[n, k / 2]");
    const Shape shape = {info.shape[0], info.shape[1] * 2};
    const io::TensorInfo& found = beside(name, scales);
    const bool nvfp4 = found.dtype == DType::f8_e4m3;
    const int64_t group = nvfp4 ? 16 : 32;
    if (found.shape != Shape{shape[0], blocks(shape[1], group)}) {
      refuse(*tensors_, scales, shape_text({shape[0], blocks(shape[1], group)}));
    }
    const bool divides = nvfp4 && tensors_->contains(divisor);
    const std::string whole = !nvfp4 ? std::string() : divides ? divisor : factor;
    if (nvfp4 && element_count(beside(name, whole).shape) != 1) refuse(*tensors_, whole, "one scale");
    hidden_.insert(name);
    const auto module = std::string_view(weight).substr(0, weight.size() - 7);
    leave_out_activations(module);
    const auto inputs = inputs_of(module, shape[1]);
    add(weight, shape, [tensors = tensors_, name, scales, whole, shape, group, divides, inputs] {
      Scales form{widened(*tensors, scales), 1, group, blocks(shape[1], group), inputs()};
      if (!whole.empty()) {
        const float scale = widened(*tensors, whole).front();
        for (float& value : form.values) value = divides ? value / scale : value * scale;
      }
      return decoded_rows(*tensors, name, 0, shape[1] / 2, std::move(form), widen_e2m1);
    });
  }

  Source tensors_;
  const io::Json& quantization_;
  int64_t block_rows_ = 128, block_cols_ = 128;
  std::map<std::string, io::DerivedTensor, std::less<>> derived_;
  std::set<std::string, std::less<>> hidden_;
  bool activations_ = false;
};

}  // namespace

namespace {

std::string text_of(const io::Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

/// "mx_fp", "nv_fp4", "fp": with the tensors of compressed-tensors, whose names they have.
bool is_auto_round_float(const io::Json& quantization) {
  const std::string type = text_of(quantization, "data_type");
  return type.starts_with("fp") || type.find("_fp") != std::string::npos;
}

}  // namespace

Shape shape_of_scales(const Shape& stored) {
  const bool spread = stored.size() == 4 && stored[1] == 1 && stored[3] == 1;
  return spread ? Shape{stored[0], stored[2]} : stored;
}

std::string integer_algorithm(const io::Json& quantization) {
  if (!quantization.is_object() || text_of(quantization, "quant_method") != "modelopt") return {};
  const std::string algorithm = text_of(quantization, "quant_algo");
  const bool integer = algorithm.ends_with("_AWQ") || algorithm.starts_with("W8A8_SQ") || algorithm.starts_with("INT");
  return integer && !algorithm.starts_with("NVFP4") && !states_int4_awq(quantization) ? algorithm : std::string();
}

bool is_low_precision(const io::Json& quantization) {
  if (!quantization.is_object() || !integer_algorithm(quantization).empty()) return false;
  if (states_mlx(quantization)) return true;
  const std::string method = text_of(quantization, "quant_method"), format = text_of(quantization, "format");
  constexpr std::string_view methods[] = {"fp8", "mxfp4", "mxfp8", "modelopt", "fbgemm_fp8", "deepseek_v4_fp8"};
  if (std::ranges::find(methods, method) != std::end(methods)) return true;
  if (method == "bitsandbytes") return quantization.value("load_in_8bit", io::Json()) == true;
  if (method == "auto-round" || method == "intel/auto-round") return is_auto_round_float(quantization);
  if (const std::string quark = quark_weights(quantization); !quark.empty()) {
    return quark.starts_with("fp8") || quark.starts_with("fp4");
  }
  return method == "compressed-tensors" && (is_float_format(format) || is_naive_float(quantization));
}

Folder read_low_precision(Folder folder, const StatedQuantization& stated) {
  const auto source = std::make_shared<const io::Checkpoint>(std::move(folder.tensors));
  SmallFloats reader(source, stated.json);
  return reader.run({std::move(folder.path), std::move(folder.config), *source});
}

}  // namespace w4q::checkpoint
