#include "verify/weights/rescaled.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "verify/weights/base_values.h"

namespace w4q::verify {
namespace {

using kernels::LinearWeight;

io::LoadedTensor load_norm(const checkpoint::Folder& source, const std::string& name, int64_t size) {
  auto loaded = source.tensors.load(name);
  if (loaded->shape != Shape{size}) {
    throw Error(ErrorCode::mismatch, concat(printable(name), ": shape ", shape_text(loaded->shape)))
        .detail(concat("expected ", shape_text({size})));
  }
  return loaded;
}

/// The number that each column of `stored` was multiplied by, by least squares. Its rows are as they were.
std::vector<float> measure_columns(const LinearWeight& base, const LinearWeight& stored) {
  const auto k = static_cast<size_t>(base.k);
  std::vector<double> products(k), squares(k);
  std::vector<float> a(static_cast<size_t>(decoded_rows) * k), b(a.size());
  for (int64_t begin = 0; begin < std::min(base.n, stored.n); begin += decoded_rows) {
    const int64_t end = std::min(begin + decoded_rows, std::min(base.n, stored.n));
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

/// What rows are multiplied by, as the columns say whose factors are known: those of ups and values may be folded, too.
std::vector<float> rows_behind(const LinearWeight& base, const LinearWeight& stored,
                               const std::vector<NormFactor>& factors) {
  std::vector<float> columns(factors.size()), rows;
  for (size_t c = 0; c < factors.size(); ++c) columns[c] = factors[c].known ? factors[c].factor : 0;
  for (const Factor& row : row_factors_of(base, stored, columns)) {
    rows.push_back(row.products > 0 ? static_cast<float>(row.value()) : 0);
  }
  return rows;
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

/// By how much more of a row than of the columns that read it rounding must have taken for these to know its factor better.
constexpr double better_known = 2;
/// A factor is another one beyond so many standard errors.
constexpr double surely = 4;

/// One factor of what several say, each as far as it knows it.
struct WeighedFactor {
  double weight = 0, sum = 0;

  void add(const Factor& factor) noexcept {
    if (!(factor.squares > 0) || !(factor.value() > surely * factor.error())) return;
    const double error = std::max(factor.error() / factor.value(), 1e-6);
    weight += 1 / (error * error), sum += factor.value() / (error * error);
  }
  /// 0: nobody knows it.
  float value() const noexcept { return weight > 0 ? static_cast<float>(sum / weight) : 0; }
};

/// Columns whose own factor is that of the row that writes them, and those that have none although the row has.
struct CarriedColumns {
  int64_t all = 0, with = 0, without = 0;

  /// Whether factors went into them: into more than a few single ones, and hardly any is without.
  bool carry() const noexcept { return with > 2 * without && 256 * with > all; }
};

void ask_columns(const std::vector<Factor>& columns, const std::vector<float>& of_rows, CarriedColumns& result) {
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

std::vector<std::string> norm_readers(const model::ModelConfig& config, const model::InputGroup& group) {
  constexpr size_t enough = 16;
  std::vector<std::string> readers;
  for (const auto& each : model::input_groups(config, model::find_linear(config, group.name())->layer)) {
    if (!each.norm || each.norm->name != group.norm->name) continue;
    for (const auto& linear : each.linears) {
      if (readers.size() < enough) readers.push_back(linear.name);
    }
  }
  return readers;
}

bool gives_rows(const model::ModelConfig& config, const std::string& module) {
  const auto groups = model::input_groups(config, model::find_linear(config, module)->layer);
  return std::ranges::find(groups, module, &model::InputGroup::producer) != groups.end();
}

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

bool RescaledWeights::says_so() const {
  return candidate_.folder.quantization.dialect == nullptr && !candidate_.folder.small_floats;
}

bool RescaledWeights::is_rescaled_norm(const model::PlannedNorm& norm) const {
  if (says_so()) return candidate_.folder.quantization.rescaled.contains(norm.name + ".weight");
  return !holds_base_values(candidate_, base_, norm);
}

bool RescaledWeights::is_rescaled(const std::string& module) {
  if (says_so()) return candidate_.folder.quantization.rescaled.contains(module + ".weight");
  const auto place = model::find_linear(candidate_.config, module);
  if (!place) return false;
  if (place->group.norm && is_rescaled_norm(*place->group.norm)) return true;
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

bool RescaledWeights::are_plain(const std::string& producer, std::vector<std::string> consumers) {
  consumers.push_back(producer);
  return std::ranges::all_of(consumers, [&](const std::string& module) {
    const auto member = model::find_linear(candidate_.config, module);
    Units units;
    if (member->group.norm) {
      const auto& scales = norm_scales(member->group, member->linear.k);
      units.cols = scales.factors, units.unsure = scales.unsure;
    }
    const auto limit = limit_of(stored_weight(base_.folder, module), stored_weight(candidate_.folder, module), units,
                                {}, was_moved(candidate_.folder, module));
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

const ChannelScales& RescaledWeights::norm_scales(const model::InputGroup& group, int64_t size) {
  const std::string name = group.norm->name + ".weight";
  if (const auto known = norms_.find(name); known != norms_.end()) return known->second;
  ChannelScales& scales = norms_[name] = {std::vector<float>(static_cast<size_t>(size), 1.0f)};
  if (!is_rescaled_norm(*group.norm)) return scales;
  if (candidate_.folder.tuned.contains(name)) {
    const std::string first = group.names().front();
    scales.factors = measure_columns(stored_weight(base_.folder, first), stored_weight(candidate_.folder, first));
    return scales;
  }
  const auto before = load_norm(base_.folder, name, size), after = load_norm(candidate_.folder, name, size);
  const auto factors = norm_factors(after.view(), before.view(), group.norm->offset);
  std::ranges::transform(factors, scales.factors.begin(), &NormFactor::factor);
  if (!std::ranges::all_of(factors, &NormFactor::known)) measure_unsure(group, factors, scales);
  return scales;
}

void RescaledWeights::measure_unsure(const model::InputGroup& group, const std::vector<NormFactor>& factors,
                                     ChannelScales& scales) const {
  std::vector<WeighedFactor> told(factors.size());
  auto readers = norm_readers(candidate_.config, group);
  // Rows of values and ups may have been folded, too: these are asked where nobody else reads the norm.
  const auto gives = [&](const std::string& module) { return gives_rows(candidate_.config, module); };
  const bool rows = std::ranges::all_of(readers, gives);
  if (!rows) std::erase_if(readers, gives);
  for (const std::string& module : readers) {
    const auto base = stored_weight(base_.folder, module), stored = stored_weight(candidate_.folder, module);
    if (base.n != stored.n || base.k != stored.k || static_cast<size_t>(base.k) != told.size()) continue;
    const auto columns = column_factors(base, stored, rows ? rows_behind(base, stored, factors) : std::vector<float>{});
    for (size_t c = 0; c < told.size(); ++c) told[c].add(columns[c]);
  }
  scales.unsure.resize(factors.size());
  for (size_t c = 0; c < factors.size(); ++c) {
    if (factors[c].known) continue;
    scales.factors[c] = factors[c].nearest(told[c].value());
    scales.unsure[c] = 1;
  }
}

std::vector<float> RescaledWeights::columns(const std::string& module, int64_t k) {
  const auto group = model::find_linear(candidate_.config, module)->group;
  if (group.norm) return norm_scales(group, k).factors;
  const bool carries = !group.producer.empty() && folds(group.producer);
  return channel_factors(group, carries ? rows(group.producer) : std::vector<float>{}, k);
}

const std::vector<float>& RescaledWeights::rows(const std::string& module) {
  const auto known = rows_.find(module);
  if (known != rows_.end()) return known->second;
  const auto stored = stored_weight(candidate_.folder, module), base = stored_weight(base_.folder, module);
  if (stored.n != base.n || stored.k != base.k) {
    throw Error(ErrorCode::mismatch, concat(printable(module), ": its size is not the base's"));
  }
  const auto factors = row_factors_of(base, stored, columns(module, stored.k));
  std::vector<float> result(factors.size(), 1.0f);
  for (size_t row = 0; row < factors.size(); ++row) {
    if (factors[row].explained() > 0) result[row] = static_cast<float>(1 / factors[row].value());
  }
  ask_readers(module, factors, result);
  return rows_.emplace(module, std::move(result)).first->second;
}

void RescaledWeights::ask_readers(const std::string& module, const std::vector<Factor>& rows,
                                  std::vector<float>& result) const {
  std::vector<Factor> columns(rows.size());
  const int64_t layer = model::find_linear(candidate_.config, module)->layer;
  for (const auto& group : model::input_groups(candidate_.config, layer)) {
    if (group.producer != module) continue;
    for (const std::string& reader : group.names()) {
      const auto base = stored_weight(base_.folder, reader), stored = stored_weight(candidate_.folder, reader);
      if (base.n != stored.n || base.k != stored.k) continue;
      const auto of_reader = column_factors(base, stored);
      for (int64_t c = 0; c < stored.k; ++c) {
        const auto channel = static_cast<size_t>(group.producer_channel(c));
        if (channel < columns.size()) columns[channel].add(of_reader[static_cast<size_t>(c)]);
      }
    }
  }
  for (size_t row = 0; row < rows.size(); ++row) {
    const double of_row = 1 - rows[row].explained(), of_columns = 1 - columns[row].explained();
    if (better_known * of_columns < of_row) result[row] = static_cast<float>(columns[row].value());
  }
}

Units RescaledWeights::units(const std::string& module) {
  const auto place = model::find_linear(candidate_.config, module);
  if (!place || !is_rescaled(module)) return {};
  const int64_t width = stored_weight(candidate_.folder, module).k;
  Units result{.cols = columns(module, width)};
  if (place->group.norm) result.unsure = norm_scales(place->group, width).unsure;
  if (folds(module)) result.rows = rows(module);
  result.measured = folds(module) || (!place->group.producer.empty() && folds(place->group.producer));
  for (float& scale : result.rows) scale = 1 / scale;
  return result;
}

std::optional<Units> RescaledWeights::measured_units(const std::string& module) {
  if (says_so()) return std::nullopt;
  const auto place = model::find_linear(candidate_.config, module);
  if (!place) return std::nullopt;
  const bool rows = gives_rows(candidate_.config, module), columns = !place->group.producer.empty();
  if (!rows && !columns) return std::nullopt;
  Units result = units(module);
  if (columns) result.cols = channel_factors(place->group, this->rows(place->group.producer), place->linear.k);
  if (rows) result.rows = row_factors(module);
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
  parallel_for(stored.n, decoded_rows, [&](int64_t begin, int64_t end) {
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
