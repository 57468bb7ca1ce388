// Folding rotations, against its definition: dense matrices in fp64, written out as model/fold_rotations.h has them.
// verify folds its base with the same function as the quantizer its input, so a fault in it would stand on both sides.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <map>
#include <random>

#include "core/convert.h"
#include "core/text.h"
#include "model/model.h"
#include "model/opened.h"
#include "support.h"

namespace w4q::model {
namespace {

/// Row-major, fp64. A vector is a matrix of one column.
struct Matrix {
  Matrix(int64_t of_rows, int64_t of_cols)
      : rows(of_rows), cols(of_cols), values(static_cast<size_t>(of_rows * of_cols)) {}
  double& at(int64_t r, int64_t c) { return values[static_cast<size_t>(r * cols + c)]; }
  double at(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * cols + c)]; }

  int64_t rows, cols;
  std::vector<double> values;
};

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix product(a.rows, b.cols);
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t i = 0; i < a.cols; ++i) {
      for (int64_t c = 0; c < b.cols; ++c) product.at(r, c) += a.at(r, i) * b.at(i, c);
    }
  }
  return product;
}

Matrix transposed(const Matrix& a) {
  Matrix result(a.cols, a.rows);
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.cols; ++c) result.at(c, r) = a.at(r, c);
  }
  return result;
}

Matrix diagonal(const Matrix& column) {
  Matrix result(column.rows, column.rows);
  for (int64_t i = 0; i < column.rows; ++i) result.at(i, i) = column.at(i, 0);
  return result;
}

/// `count` times the same block down the diagonal.
Matrix repeated(const Matrix& block, int64_t count) {
  Matrix result(block.rows * count, block.cols * count);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t r = 0; r < block.rows; ++r) {
      for (int64_t c = 0; c < block.cols; ++c) result.at(i * block.rows + r, i * block.cols + c) = block.at(r, c);
    }
  }
  return result;
}

/// Sylvester's matrix over √width times random signs, for each of the descending powers of two that make up `size`.
Matrix rotation(const formats::Rotation& of, int64_t size) {
  Matrix result(size, size);
  for (int64_t start = 0, width = 0; start < size; start += width) {
    width = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(size - start)));
    if (of.block != formats::whole_row) width = std::min(width, of.block);
    std::mt19937 signs(static_cast<uint32_t>(of.seed.value_or(0) + static_cast<uint64_t>(start)));
    for (int64_t c = 0; c < width; ++c) {
      const double sign = width == 1 || signs() % 2 == 1 ? 1 : -1;
      for (int64_t r = 0; r < width; ++r) {
        const double entry = std::popcount(static_cast<uint64_t>(r & c)) % 2 == 0 ? 1 : -1;
        result.at(start + r, start + c) = entry * sign / std::sqrt(static_cast<double>(width));
      }
    }
  }
  return result;
}

Matrix load(const io::Checkpoint& checkpoint, const std::string& name) {
  const auto loaded = checkpoint.load(name);
  std::vector<float> values(static_cast<size_t>(element_count(loaded->shape)));
  widen(loaded->bytes, loaded->dtype, values);
  Matrix result(loaded->shape[0], loaded->shape.size() == 2 ? loaded->shape[1] : 1);
  result.values.assign(values.begin(), values.end());
  return result;
}

/// What becomes of each parameter of a model with separate head.
class Definition {
 public:
  Definition(const OpenedModel& model, const FoldedRotations& rotations)
      : source_(model.folder.tensors),
        config_(model.config),
        r_(rotation(rotations.residual, config_.hidden_size)),
        head_(rotation(rotations.heads, config_.head_dim)) {}

  Matrix of(const std::string& name) const {
    const std::string prefix = name.substr(0, name.find('.', std::string_view("model.layers.").size()) + 1);
    const auto is = [&](std::string_view part) { return name.find(part) != std::string::npos; };
    const bool bias = name.ends_with(".bias");
    const Matrix w = load(source_, name == "lm_head.weight" && config_.tied_embeddings ? embeddings : name);
    if (name == embeddings) return w * transposed(r_);
    if (name == "lm_head.weight") return reads(w, "model.norm.weight");
    if (is("q_norm") || is("k_norm")) return w;
    if (is("norm")) return ones(w.rows);
    if (is("o_proj")) return bias ? r_ * w : r_ * w * transposed(repeated(head_, config_.heads));
    if (is("down_proj")) return r_ * w;
    const Matrix read =
        bias ? w : reads(w, prefix + (is("mlp") ? "post_attention_layernorm.weight" : "input_layernorm.weight"));
    return is("v_proj") ? repeated(head_, config_.kv_heads) * read : read;
  }

 private:
  static constexpr const char* embeddings = "model.embed_tokens.weight";

  static Matrix ones(int64_t size) {
    Matrix result(size, 1);
    std::ranges::fill(result.values, 1.0);
    return result;
  }
  Matrix reads(const Matrix& weight, const std::string& norm) const {
    return weight * diagonal(load(source_, norm)) * transposed(r_);
  }

  const io::Checkpoint& source_;
  const ModelConfig& config_;
  Matrix r_, head_;
};

/// ‖found − expected‖ / ‖expected‖.
double distance(const Matrix& found, const Matrix& expected) {
  double error = 0, size = 0;
  for (size_t i = 0; i < expected.values.size(); ++i) {
    error += std::pow(found.values[i] - expected.values[i], 2);
    size += std::pow(expected.values[i], 2);
  }
  return std::sqrt(error / size);
}

/// A turn of 32 is five butterflies and a factor, each an error of at most 2^-24 of what it gives, and stages keep the
/// ratio of norms; two turns, a norm before them and the final value: 14 roundings. Measured: at most 1.0e-7.
constexpr double bound = 14.0 / (1 << 24);

TEST(FoldLaw, EveryTensorIsItsDefinition) {
  for (const auto& entry : std::filesystem::directory_iterator(test::testdata() / "arch")) {
    for (const FoldedRotations& rotations : {FoldedRotations{{32, 3}, {formats::whole_row, 3}}, {{8, 7}, {4, 9}}}) {
      SCOPED_TRACE(concat(entry.path().filename().string(), ", ", to_string(rotations)));
      OpenedModel model = open_plain_model(entry.path(), std::nullopt);
      const auto folded = fold_rotations(model, rotations);
      model.config.tied_embeddings = !model.folder.tensors.contains("lm_head.weight");
      const Definition definition(model, rotations);
      for (const Parameter& parameter : parameters(folded.config)) {
        const Matrix found = load(folded.folder.tensors, parameter.name), expected = definition.of(parameter.name);
        ASSERT_EQ(found.values.size(), expected.values.size()) << parameter.name;
        EXPECT_LE(distance(found, expected), bound) << parameter.name;
      }
    }
  }
}

}  // namespace
}  // namespace w4q::model
