#include "verify/weights/limit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "formats/codebook.h"
#include "formats/exl3.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "formats/small_float.h"
#include "verify/weights/nearest.h"

namespace w4q::verify {
namespace {

using formats::PackedLinear;
using formats::PackedWeight;
using formats::SchemeFamily;
using kernels::LinearWeight;

/// Rounded of a weight: all of a small one.
constexpr int64_t sampled_weights = int64_t{1} << 18;
constexpr size_t most_suspects = 8;
/// Of fewer, a level for each weight is no measure of codes that share bits, which are searched together.
constexpr int64_t fewest_shared_inputs = 64;
/// Scales that are folded into norms and measured from rows are known to the rounding of a 16-bit norm, 2^-8: what
/// follows from that alone is no fault of the codes.
constexpr double unit_error = 1.0 / 256;

/// Weights that a scheme holds exactly, such as ternary ones, may have been rounded with other scales: no less noise is
/// asked for than normal weights have.
double tolerated(double signal, double rounded, double usual, double share) {
  return share * std::max(rounded, usual * signal) + unit_error * unit_error * signal;
}

/// What may be missed where a weight was moved besides.
double tolerated(double signal, double rounded, double usual, double share, const Moves& moves) {
  return tolerated(signal, rounded, usual, share) + moves.energy * signal;
}

/// Noise over signal of the best levels for normal weights: 9.3, 14.6, 20.2 and 26 dB with 2 to 5 bits, about 6 more
/// for each bit.
double usual_noise(int bits) { return std::pow(10.0, -(5.6 * bits - 2) / 10); }

int bits_of(const PackedLinear& packed) {
  int bits = 0;
  for (const auto& pass : packed.passes) bits += pass.scheme.bits;
  return bits;
}

double decibels(double signal, double noise) {
  return noise == 0 ? std::numeric_limits<double>::infinity() : 10 * std::log10(signal / noise);
}

/// The stored table with its largest magnitude 1, times the power of two that these values want.
std::vector<float> clean_table(const PackedWeight& pass, const formats::Scheme& scheme, std::span<const float> values) {
  const int64_t k = pass.k;
  if (scheme.family == SchemeFamily::integer) return {};
  if (scheme.family == SchemeFamily::rotated) {
    const auto table = formats::normal_codebook(scheme.bits);
    return {table.begin(), table.end()};
  }
  const auto stored = pass.plane(formats::PlaneRole::codebook).bytes.as<float>();
  std::vector<float> table(stored.begin(), stored.end());
  if (scheme.family == SchemeFamily::small_float) return table;
  const float largest = formats::table_max(table);
  for (float& entry : table) entry /= largest;
  if (scheme.family != SchemeFamily::kbit) return table;
  float most = 0, least = std::numeric_limits<float>::max();
  for (size_t row = 0; row < values.size(); row += static_cast<size_t>(k)) {
    for (int64_t begin = 0; begin < k; begin += formats::kbit_block) {
      float block = 0;
      for (int64_t c = begin; c < std::min<int64_t>(begin + formats::kbit_block, k); ++c) {
        block = std::max(block, std::abs(values[row + static_cast<size_t>(c)]));
      }
      if (block > 0) most = std::max(most, block), least = std::min(least, block);
    }
  }
  return formats::kbit_scaled_codebook(table, formats::kbit_range_exponent(least, most, scheme.scale));
}

/// Which input stands where when those of a group stand together.
std::vector<size_t> order_of(const PackedWeight& pass) {
  std::vector<size_t> order(static_cast<size_t>(pass.k));
  std::iota(order.begin(), order.end(), size_t{0});
  if (!pass.scheme.act_order) return order;
  const auto group = pass.plane(formats::PlaneRole::group_index).bytes.as<int32_t>();
  std::ranges::stable_sort(order, {}, [&](size_t col) { return group[col]; });
  return order;
}

/// As many levels under a scale for each row, or as many as there are tables for.
formats::Scheme scalar_twin(const formats::Scheme& trellis) {
  const int bits = std::clamp(trellis.bits, formats::table_min_bits, formats::table_max_bits);
  return {SchemeFamily::rotated, bits, formats::whole_row, formats::ScaleType::f16};
}

/// The one scale that all of a matrix of integers has; 0: several.
float scale_of_all(const PackedWeight& pass) {
  const auto& scheme = pass.scheme;
  if (scheme.family != SchemeFamily::integer || scheme.block != formats::whole_row || scheme.asymmetric) return 0;
  const float first = formats::scale_at(pass, 0);
  for (int64_t row = 1; row < pass.n; ++row) {
    if (formats::scale_at(pass, row) != first) return 0;
  }
  return pass.n > 1 && std::isfinite(first) ? std::abs(first) : 0;
}

/// Linears that servers fuse share a factor, the power of two that the largest weight of all of them asks for: under one that
/// is larger than its own wants, a weight's least scales are coarser. A further row that asks for the stored factor.
std::vector<float> row_of_factor(const PackedWeight& pass) {
  const auto& scheme = pass.scheme;
  if (scheme.family != SchemeFamily::small_float || scheme.scale != formats::ScaleType::e4m3) return {};
  const float stored = formats::tensor_factor(pass), factor = scheme.divisor ? 1 / stored : stored;
  constexpr float middle = 160;  // of the scales that the largest weight has under its factor
  const float asks = factor * middle * formats::small_float_largest(scheme.bits);
  if (!(factor > 0) || !std::isfinite(asks) || formats::small_float_factor(asks) != factor) return {};
  std::vector<float> row(static_cast<size_t>(pass.k));
  row.front() = asks;
  return row;
}

/// values ← what rounding them to nearest makes of them, by the definition of the pass's scheme.
void round_to_nearest(const PackedWeight& pass, std::span<float> values) {
  // Which scale fits all rows, some of them do not tell.
  if (const float scale = scale_of_all(pass); scale > 0) {
    const auto top = static_cast<float>((1 << (pass.scheme.bits - 1)) - 1);
    for (float& value : values) value = std::clamp(std::nearbyint(value / scale), -top - 1, top) * scale;
    return;
  }
  const auto k = static_cast<size_t>(pass.k), n = values.size() / k;
  const auto order = order_of(pass);
  formats::Scheme scheme = pass.scheme;
  scheme.act_order = false;
  // Rings of some rows are not those of all, and take long to search: a level for each weight is somewhat worse.
  if (formats::shares_bits(scheme)) scheme = scalar_twin(scheme);
  std::vector<float> ordered(values.size()), row(k);
  for (size_t r = 0; r < n; ++r) {
    for (size_t c = 0; c < k; ++c) ordered[r * k + c] = values[r * k + order[c]];
  }
  // EXL3 rounds what rotations made of its inputs, whichever signs they have.
  std::optional<formats::InputRotation> turn;
  if (pass.scheme.family == SchemeFamily::exl3) turn.emplace(formats::Rotation{formats::exl3_block, 0}, pass.k);
  for (size_t r = 0; turn && r < n; ++r) turn->rotate(std::span(ordered).subspan(r * k, k));
  const auto& definition = formats::scheme_row(scheme.family);
  const auto table = clean_table(pass, scheme, ordered);
  const auto further = row_of_factor(pass);
  ordered.insert(ordered.end(), further.begin(), further.end());
  const auto rounded = definition.encode(scheme, ordered, static_cast<int64_t>(ordered.size() / k), pass.k, table);
  for (size_t r = 0; r < n; ++r) {
    definition.decode_row(rounded, static_cast<int64_t>(r), row);
    if (turn) turn->restore(row);
    for (size_t c = 0; c < k; ++c) values[r * k + order[c]] = row[c];
  }
}

/// What a linear with these passes, rotations and input scales makes of rows when each pass rounds to nearest what those
/// before it left.
std::vector<float> rounded_rows(const PackedLinear& packed, std::span<const float> base) {
  const auto k = static_cast<size_t>(packed.passes.front().k);
  std::vector<float> rest(base.begin(), base.end());
  const auto scale = packed.input_scale;
  for (size_t i = 0; !scale.empty() && i < rest.size(); ++i) rest[i] *= scale[i % k];
  for (size_t pass = 0; pass < packed.passes.size(); ++pass) {
    const formats::InputRotation* turn = packed.rotations.empty() ? nullptr : &packed.rotations[pass];
    for (size_t i = 0; turn != nullptr && i < rest.size(); i += k) turn->rotate(std::span(rest).subspan(i, k));
    std::vector<float> values = rest;
    round_to_nearest(packed.passes[pass], values);
    for (size_t i = 0; i < rest.size(); ++i) rest[i] -= values[i];
    for (size_t i = 0; turn != nullptr && i < rest.size(); i += k) turn->restore(std::span(rest).subspan(i, k));
  }
  for (size_t i = 0; !scale.empty() && i < rest.size(); ++i) rest[i] /= scale[i % k];
  for (size_t i = 0; i < rest.size(); ++i) rest[i] = base[i] - rest[i];
  return rest;
}

/// Counts codes that are not the nearest to what is left for their pass.
void count_off(const PackedLinear& packed, std::vector<float> rest, bool folded, const std::vector<uint8_t>& unsure,
               std::vector<RoundedRow>& rows) {
  const auto k = static_cast<size_t>(packed.passes.front().k);
  const auto scale = packed.input_scale;
  for (size_t i = 0; !scale.empty() && i < rest.size(); ++i) rest[i] *= scale[i % k];
  std::vector<float> decoded(k);
  for (size_t pass = 0; pass < packed.passes.size(); ++pass) {
    const PackedWeight& weight = packed.passes[pass];
    const formats::InputRotation* turn = packed.rotations.empty() ? nullptr : &packed.rotations[pass];
    const auto& definition = formats::scheme_row(weight.scheme.family);
    NearestCodes codes(weight, folded);
    for (size_t i = 0; i < rows.size(); ++i) {
      RoundedRow& row = rows[i];
      const auto values = std::span(rest).subspan(i * k, k);
      if (turn != nullptr) turn->rotate(values);
      codes.look_at(row.row, values, [&](int64_t col) {
        if (!unsure.empty() && unsure[static_cast<size_t>(col)] != 0) return;
        if (row.off++ == 0) row.first_off = col;
      });
      if (pass + 1 == packed.passes.size()) continue;
      definition.decode_row(weight, row.row, decoded);
      for (size_t c = 0; c < k; ++c) values[c] -= decoded[c];
      if (turn != nullptr) turn->restore(values);
    }
  }
}

std::vector<RoundedRow> chosen_rows(int64_t n, int64_t k, const std::vector<int64_t>& suspects) {
  const int64_t taken = std::clamp<int64_t>(sampled_weights / k, 1, n);
  std::vector<RoundedRow> rows;
  for (int64_t i = 0; i < taken; ++i) rows.push_back({.row = i * n / taken});
  if (taken == n) return rows;
  for (const int64_t row : suspects) rows.push_back({.row = row, .suspect = true});
  return rows;
}

std::vector<float> decode(const LinearWeight& weight, const std::vector<RoundedRow>& rows) {
  std::vector<float> values(rows.size() * static_cast<size_t>(weight.k));
  for (size_t i = 0; i < rows.size(); ++i) {
    kernels::decode_rows(weight, rows[i].row, rows[i].row + 1,
                         {values.data() + i * static_cast<size_t>(weight.k), 1, weight.k});
  }
  return values;
}

/// Values that are no other than those of rounding to nearest but for this share: where scales were folded, they are
/// known to the rounding of a norm.
constexpr float same_value = 1e-5f, same_folded = 0.02f;
/// Of the distance between two values: scales are stored to 20 bits or to 24.
constexpr double same_distance = 1e-3;

Gains measured_gains(const std::vector<RoundedRow>& rows, const Units& units, HeldRows held) {
  for (const RoundedRow& row : rows) held.numbers.push_back(row.row);
  held.unsure = units.unsure;
  return gains_of(held);
}

void measure(std::span<const float> base, std::span<const float> found, std::span<const float> rounded, float same,
             RoundedRow& row) {
  double signal = 0, noise = 0, product = 0, rounded_noise = 0, rounded_product = 0, chance = 0;
  for (size_t c = 0; c < base.size(); ++c) {
    const double value = base[c], is = found[c], would_be = rounded[c], gap = std::abs(is - would_be);
    signal += value * value;
    noise += (value - is) * (value - is);
    product += value * is;
    chance += is * is * (value - is) * (value - is);
    rounded_noise += (value - would_be) * (value - would_be);
    rounded_product += value * would_be;
    if (!(gap > same * std::abs(rounded[c]))) continue;
    // Between two values whichever a rounding of their scale makes the nearer: programs round scales differently.
    const bool tie = std::abs(std::abs(value - is) - std::abs(value - would_be)) <= same_distance * gap;
    if (!tie && row.unlike++ == 0) row.first_unlike = static_cast<int64_t>(c);
  }
  row.signal = signal, row.noise = noise, row.product = product, row.chance = chance;
  row.rounded_noise = rounded_noise, row.rounded_product = rounded_product;
}

}  // namespace

void Units::apply(int64_t row, std::span<float> values) const {
  for (size_t c = 0; c < values.size(); ++c) {
    if (!cols.empty()) values[c] *= cols[c];
    if (!rows.empty()) values[c] *= rows[static_cast<size_t>(row)];
  }
}

double WeightLimit::sqnr() const noexcept { return decibels(signal, noise); }
double WeightLimit::floor() const noexcept {
  return decibels(signal, tolerated(signal, rounded_noise, usual, most(), moves));
}
double WeightLimit::gain() const noexcept { return rounded_product > 0 ? product / rounded_product : 1; }

bool WeightLimit::holds() const noexcept {
  if (!(signal > 0) || !(rounded_product > 0)) return true;
  return noise <= tolerated(signal, rounded_noise, usual, most(), moves) && gain() >= least_gain && gain() <= most_gain;
}

const RoundedRow* WeightLimit::worst_row() const noexcept {
  if (!(signal > 0) || bits < 4) return nullptr;
  // A row whose own error happens to be small is given the tensor's.
  const double share = std::max(usual, rounded_noise / signal);
  const RoundedRow* worst = nullptr;
  double most = 1;
  for (const RoundedRow& row : rows) {
    const double limit = tolerated(row.signal, row.rounded_noise, share, most_row_noise, moves);
    if (row.signal > 0 && row.noise / limit > most) worst = &row, most = row.noise / limit;
  }
  return worst;
}

double WeightLimit::row_spread() const noexcept {
  constexpr size_t fewest = 8;
  constexpr double quartiles_apart = 1.35;  // of normal numbers, in standard deviations
  std::vector<double> factors, chances;
  for (const RoundedRow& row : rows) {
    const double found = row.noise - row.signal + 2 * row.product;  // Σ ŵ²
    if (row.suspect || !(row.signal > 0) || !(found > 0)) continue;
    factors.push_back(row.product / found), chances.push_back(row.chance / (found * found));
  }
  if (factors.size() < fewest || measured) return 0;
  // Fed back errors leave a few rows that have little in common with the others.
  const auto at = [](std::vector<double>& values, size_t quarter) {
    const auto place = values.begin() + static_cast<std::ptrdiff_t>(quarter * (values.size() - 1) / 4);
    std::ranges::nth_element(values, place);
    return *place;
  };
  const double spread = (at(factors, 3) - at(factors, 1)) / quartiles_apart;
  return std::sqrt(std::max(0.0, spread * spread - at(chances, 2)));
}

int64_t WeightLimit::count(int64_t RoundedRow::*what) const noexcept {
  int64_t sum = 0;
  for (const RoundedRow& row : rows) sum += row.*what;
  constexpr int64_t of_folding = 16;
  return measured || (folded && sum < of_folding) ? 0 : sum;
}

std::vector<int64_t> loudest_errors(std::span<const model::WeightError> rows) {
  std::vector<int64_t> loudest(rows.size());
  std::iota(loudest.begin(), loudest.end(), int64_t{0});
  const size_t count = std::min(most_suspects, loudest.size());
  const auto relative = [&](int64_t row) {
    const auto& error = rows[static_cast<size_t>(row)];
    return error.signal > 0 ? error.noise / error.signal : 0;
  };
  std::ranges::partial_sort(loudest, loudest.begin() + static_cast<int64_t>(count), std::greater{}, relative);
  loudest.resize(count);
  return loudest;
}

bool was_moved(const checkpoint::Folder& folder, std::string_view module) {
  return folder.has_moved_targets && module.find(".experts.") == std::string_view::npos;
}

std::optional<WeightLimit> limit_of(const LinearWeight& base, const LinearWeight& candidate, const Units& units,
                                    const std::vector<int64_t>& suspects, bool moved) {
  const auto* packed = std::get_if<std::shared_ptr<const PackedLinear>>(&candidate.matrix);
  if (packed == nullptr || (*packed)->passes.empty()) return std::nullopt;
  if (formats::shares_bits((*packed)->passes.front().scheme) && base.k < fewest_shared_inputs) return std::nullopt;
  WeightLimit limit{.rows = chosen_rows(base.n, base.k, suspects), .bits = bits_of(**packed)};
  limit.usual = usual_noise(limit.bits);
  if (moved) limit.moves = moves_of(limit.bits);
  limit.turned = !(*packed)->rotations.empty() || (*packed)->passes.front().scheme.family == SchemeFamily::exl3;
  const auto k = static_cast<size_t>(base.k);
  auto values = decode(base, limit.rows);
  const auto found = decode(candidate, limit.rows);
  for (size_t i = 0; i < limit.rows.size(); ++i) units.apply(limit.rows[i].row, std::span(values).subspan(i * k, k));
  if (!std::ranges::all_of(values, [](float value) { return std::isfinite(value); })) return std::nullopt;
  std::vector<float> rounded;
  try {
    rounded = rounded_rows(**packed, values);
  } catch (const Error&) {
    return std::nullopt;  // weights that the scheme cannot hold: nothing to compare with
  }
  const bool folded = limit.folded = !units.cols.empty() || !units.rows.empty();
  for (size_t i = 0; i < limit.rows.size(); ++i) {
    RoundedRow& row = limit.rows[i];
    measure(std::span(values).subspan(i * k, k), std::span(found).subspan(i * k, k),
            std::span(rounded).subspan(i * k, k), folded ? same_folded : same_value, row);
    if (row.suspect) continue;
    limit.signal += row.signal, limit.noise += row.noise, limit.product += row.product;
    limit.rounded_noise += row.rounded_noise, limit.rounded_product += row.rounded_product;
  }
  limit.values = static_cast<int64_t>(values.size());
  limit.gains = measured_gains(limit.rows, units,
                               {.base = values,
                                .found = found,
                                .rounded = rounded,
                                .width = k,
                                .bits = limit.bits,
                                .least = limit.moves.least_of_line});
  // Rotations spread what is not known over all inputs.
  limit.measured = units.measured || (!units.unsure.empty() && !(*packed)->rotations.empty());
  if (!limit.measured) count_off(**packed, std::move(values), folded, units.unsure, limit.rows);
  if (limit.measured) limit.gains.column = -1;
  return limit;
}

}  // namespace w4q::verify
