#include "verify/weights/rescaled.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "verify/weights/kept.h"

namespace w4q::verify {
namespace {

using kernels::LinearWeight;

/// Rows that are decoded together.
constexpr int64_t row_block = 16;

std::vector<float> load_vector(const checkpoint::Folder& source, const std::string& name, int64_t size) {
  const auto loaded = source.tensors.load(name);
  if (loaded->shape != Shape{size}) {
    throw Error(ErrorCode::mismatch, concat(printable(name), ": shape ", shape_text(loaded->shape)))
        .detail(concat("expected ", shape_text({size})));
  }
  std::vector<float> values(static_cast<size_t>(size));
  widen(loaded->bytes, loaded->dtype, values);
  return values;
}

double dot(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += double{a[i]} * double{b[i]};
  return sum;
}

/// The number that each row of `stored` was divided by: of all s, the one for which the error of s · stored is
/// orthogonal to the base's row, which rounding leaves nearly unbiased.
std::vector<float> measure_rows(const LinearWeight& base, const LinearWeight& stored,
                                const std::vector<float>& columns) {
  std::vector<float> result(static_cast<size_t>(stored.n), 1.0f);
  parallel_for(stored.n, row_block, [&](int64_t begin, int64_t end) {
    std::vector<float> a(static_cast<size_t>((end - begin) * stored.k)), b(a.size());
    kernels::decode_rows(base, begin, end, {a.data(), end - begin, stored.k});
    kernels::decode_rows(stored, begin, end, {b.data(), end - begin, stored.k});
    for (int64_t r = begin; r < end; ++r) {
      float* wanted = a.data() + (r - begin) * stored.k;
      for (int64_t c = 0; c < stored.k; ++c) wanted[c] *= columns[static_cast<size_t>(c)];
      const double norm = dot(wanted, wanted, stored.k),
                   product = dot(wanted, b.data() + (r - begin) * stored.k, stored.k);
      if (norm > 0 && product > 0) result[static_cast<size_t>(r)] = static_cast<float>(norm / product);
    }
  });
  return result;
}

/// The number that each column of `stored` was multiplied by, by least squares. Its rows are as they were.
std::vector<float> measure_columns(const LinearWeight& base, const LinearWeight& stored) {
  const auto k = static_cast<size_t>(base.k);
  std::vector<double> products(k), squares(k);
  std::vector<float> a(static_cast<size_t>(row_block) * k), b(a.size());
  for (int64_t begin = 0; begin < std::min(base.n, stored.n); begin += row_block) {
    const int64_t end = std::min(begin + row_block, std::min(base.n, stored.n));
    kernels::decode_rows(base, begin, end, {a.data(), end - begin, base.k});
    kernels::decode_rows(stored, begin, end, {b.data(), end - begin, base.k});
    for (size_t row = 0; row < static_cast<size_t>(end - begin); ++row) {
      for (size_t c = 0; c < k; ++c) {
        const double wanted = a[row * k + c], found = b[row * k + c];
        products[c] += wanted * found, squares[c] += wanted * wanted;
      }
    }
  }
  std::vector<float> result(k, 1.0f);
  for (size_t c = 0; c < k; ++c) {
    if (squares[c] > 0 && products[c] > 0) result[c] = static_cast<float>(products[c] / squares[c]);
  }
  return result;
}

/// Of each of k columns, the factor of the row that writes it; one where there is none.
std::vector<float> channel_factors(const model::InputGroup& group, const std::vector<float>& rows, int64_t k) {
  std::vector<float> result(static_cast<size_t>(k), 1.0f);
  for (int64_t c = 0; c < k && !rows.empty(); ++c) {
    const auto channel = static_cast<size_t>(group.producer_channel(c));
    if (channel < rows.size()) result[static_cast<size_t>(c)] = rows[channel];
  }
  return result;
}

/// Rows of what reads scaled rows that are asked.
constexpr int64_t asked_rows = 256;
/// A factor is another one beyond so many standard errors.
constexpr double surely = 4;

/// Columns whose own factor is that of the row that writes them, and those that have none although the row has.
struct CarriedColumns {
  int64_t all = 0, with = 0, without = 0;

  /// Whether factors went into them: into more than a few single ones, and hardly any is without.
  bool carry() const noexcept { return with > 2 * without && 256 * with > all; }
};

/// Of sums over rows of a column: what the base's is multiplied by to come nearest to the stored one, and its standard
/// error.
struct ColumnFactor {
  double products = 0, squares = 0, found = 0;
  int64_t rows = 0;

  double value() const noexcept { return products / squares; }
  double error() const noexcept {
    const double rest = std::max(0.0, found - products * products / squares);
    return std::sqrt(rest / squares / static_cast<double>(rows));
  }
};

std::vector<ColumnFactor> column_factors(const LinearWeight& base, const LinearWeight& stored) {
  const auto k = static_cast<size_t>(stored.k);
  const int64_t blocks = (stored.n + row_block - 1) / row_block;
  const int64_t taken = std::clamp<int64_t>(asked_rows / row_block, 1, blocks);
  std::vector<float> a(static_cast<size_t>(row_block) * k), b(a.size());
  std::vector<ColumnFactor> columns(k);
  for (int64_t i = 0; i < taken; ++i) {
    const int64_t begin = i * blocks / taken * row_block, end = std::min(begin + row_block, stored.n);
    kernels::decode_rows(base, begin, end, {a.data(), end - begin, stored.k});
    kernels::decode_rows(stored, begin, end, {b.data(), end - begin, stored.k});
    for (size_t row = 0; row < static_cast<size_t>(end - begin); ++row) {
      for (size_t c = 0; c < k; ++c) {
        const double wanted = a[row * k + c], found = b[row * k + c];
        columns[c].products += wanted * found, columns[c].squares += wanted * wanted, columns[c].found += found * found;
      }
    }
    for (auto& column : columns) column.rows += end - begin;
  }
  return columns;
}

void ask_columns(const std::vector<ColumnFactor>& columns, const std::vector<float>& of_rows, CarriedColumns& result) {
  for (size_t c = 0; c < columns.size(); ++c) {
    if (!(columns[c].squares > 0)) continue;
    ++result.all;
    const double value = columns[c].value(), sure = surely * columns[c].error();
    // Of a column nearly all of whose codes are none, beside louder ones, nothing is known.
    if (!(value > sure)) continue;
    const double from_row = std::abs(value - double{of_rows[c]}), from_one = std::abs(value - 1);
    result.with += from_one > sure && 2 * from_row < from_one;
    result.without += from_row > sure && 2 * from_one < from_row;
  }
}

}  // namespace

LinearWeight stored_weight(const checkpoint::Folder& source, const std::string& module) {
  if (const auto* info = source.quantization.find(module)) {
    auto packed = std::make_shared<const formats::PackedLinear>(checkpoint::load_canonical(source.tensors, *info));
    return {module, info->n, info->k, std::move(packed), {}};
  }
  auto loaded = std::make_shared<const io::LoadedTensor>(source.tensors.load(module + ".weight"));
  const Shape shape = loaded->view().shape;
  LinearWeight weight{module, 0, 0, LinearWeight::Dense{loaded->view(), loaded}, {}};
  if (shape.size() == 2) weight.n = shape[0], weight.k = shape[1];
  return weight;
}

bool RescaledWeights::says_so() const { return candidate_.folder.quantization.dialect == nullptr; }

bool RescaledWeights::is_rescaled_norm(const std::string& parameter) const {
  if (says_so()) return candidate_.folder.quantization.rescaled.contains(parameter);
  return !holds_base_values(candidate_, base_, parameter);
}

bool RescaledWeights::is_rescaled(const std::string& module) {
  if (says_so()) return candidate_.folder.quantization.rescaled.contains(module + ".weight");
  const auto place = model::find_linear(candidate_.config, module);
  if (!place) return false;
  if (place->group.norm && is_rescaled_norm(place->group.norm->name + ".weight")) return true;
  return folds(module) || (!place->group.producer.empty() && folds(place->group.producer));
}

bool RescaledWeights::folds(const std::string& producer) {
  const auto place = model::find_linear(candidate_.config, producer);
  if (!place) return false;
  std::vector<std::string> members;
  for (const auto& group : model::input_groups(candidate_.config, place->layer)) {
    if (group.producer == producer) members = group.names();
  }
  if (says_so()) {
    return std::ranges::any_of(members, [&](const auto& name) { return is_rescaled(name); });
  }
  if (members.empty()) return false;
  const auto known = folds_.find(producer);
  if (known != folds_.end()) return known->second;
  return folds_[producer] = !are_plain(producer, members) || carries_rows(producer, members);
}

bool RescaledWeights::are_plain(const std::string& producer, std::vector<std::string> consumers) const {
  consumers.push_back(producer);
  return std::ranges::all_of(consumers, [&](const std::string& module) {
    const auto member = model::find_linear(candidate_.config, module);
    Units units;
    if (member->group.norm) units.cols = norm_ratio(member->group, member->linear.k);
    const auto limit =
        limit_of(stored_weight(base_.folder, module), stored_weight(candidate_.folder, module), units, {});
    return !limit || (limit->holds() && limit->worst_row() == nullptr);
  });
}

bool RescaledWeights::carries_rows(const std::string& producer, const std::vector<std::string>& consumers) {
  const auto stored = stored_weight(candidate_.folder, producer), base = stored_weight(base_.folder, producer);
  if (stored.n != base.n || stored.k != base.k) return false;
  const auto& factors = rows(producer);
  CarriedColumns columns;
  for (const std::string& module : consumers) {
    const auto group = model::find_linear(candidate_.config, module)->group;
    const auto wanted = stored_weight(base_.folder, module), found = stored_weight(candidate_.folder, module);
    if (wanted.n != found.n || wanted.k != found.k) return false;
    ask_columns(column_factors(wanted, found), channel_factors(group, factors, found.k), columns);
  }
  return columns.carry();
}

std::vector<float> RescaledWeights::norm_ratio(const model::InputGroup& group, int64_t size) const {
  const model::PlannedNorm& norm = *group.norm;
  std::vector<float> result(static_cast<size_t>(size), 1.0f);
  const std::string name = norm.name + ".weight";
  if (!is_rescaled_norm(name)) return result;
  if (candidate_.folder.tuned.contains(name)) {
    const std::string first = group.names().front();
    return measure_columns(stored_weight(base_.folder, first), stored_weight(candidate_.folder, first));
  }
  const auto before = load_vector(base_.folder, name, size), after = load_vector(candidate_.folder, name, size);
  for (size_t c = 0; c < result.size(); ++c) {
    const float was = before[c] + norm.offset, is = after[c] + norm.offset;
    if (is != 0 && was != 0) result[c] = was / is;
  }
  return result;
}

std::vector<float> RescaledWeights::columns(const std::string& module, int64_t k) {
  const auto group = model::find_linear(candidate_.config, module)->group;
  if (group.norm) return norm_ratio(group, k);
  const bool carries = !group.producer.empty() && folds(group.producer);
  return channel_factors(group, carries ? rows(group.producer) : std::vector<float>{}, k);
}

const std::vector<float>& RescaledWeights::rows(const std::string& module) {
  const auto found = rows_.find(module);
  if (found != rows_.end()) return found->second;
  const auto stored = stored_weight(candidate_.folder, module), base = stored_weight(base_.folder, module);
  if (stored.n != base.n || stored.k != base.k) {
    throw Error(ErrorCode::mismatch, concat(printable(module), ": its size is not the base's"));
  }
  return rows_.emplace(module, measure_rows(base, stored, columns(module, stored.k))).first->second;
}

Units RescaledWeights::units(const std::string& module) {
  const auto place = model::find_linear(candidate_.config, module);
  if (!place || !is_rescaled(module)) return {};
  Units result{.cols = columns(module, stored_weight(candidate_.folder, module).k)};
  if (folds(module)) result.rows = rows(module);
  result.measured = folds(module) || (!place->group.producer.empty() && folds(place->group.producer));
  for (float& scale : result.rows) scale = 1 / scale;
  return result;
}

std::vector<float> RescaledWeights::row_factors(const std::string& module) {
  std::vector<float> factors = rows(module);
  for (float& factor : factors) factor = 1 / factor;
  return factors;
}

LinearWeight RescaledWeights::effective(const std::string& module) {
  auto stored = stored_weight(candidate_.folder, module);
  const Units scales = units(module);
  if (scales.cols.empty()) return stored;
  auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(stored.n * stored.k));
  const MatrixView<float> matrix(values->data(), stored.n, stored.k);
  parallel_for(stored.n, row_block, [&](int64_t begin, int64_t end) {
    kernels::decode_rows(stored, begin, end, {matrix.row(begin), end - begin, stored.k});
    for (int64_t r = begin; r < end; ++r) {
      const float scale = scales.rows.empty() ? 1.0f : scales.rows[static_cast<size_t>(r)];
      for (int64_t c = 0; c < stored.k; ++c) matrix.row(r)[c] /= scale * scales.cols[static_cast<size_t>(c)];
    }
  });
  const TensorView view{stored.name, DType::f32, {stored.n, stored.k}, bytes_of(*values)};
  return {module, stored.n, stored.k, LinearWeight::Dense{view, values}, {}};
}

}  // namespace w4q::verify
