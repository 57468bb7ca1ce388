#include "verify/statistics/norms.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <span>

#include "core/convert.h"
#include "core/text.h"
#include "model/layer_plan.h"
#include "model/parameters.h"
#include "verify/hollow.h"
#include "verify/median.h"

namespace w4q::verify {
namespace {

/// Shorter ones say too little.
constexpr size_t least_channels = 64;
/// Magnitudes that no parameter of a trained model has, in any number.
constexpr double absurd_size = 1e6, absurd_share = 0.01;

/// Of a table with so many values in so many sizes: their spread says of which type its bytes are.
constexpr size_t least_table = 4096, many_sizes = 64;
/// Nearly all values of BF16 read as F16 have exponents next to zero; those of F16 read as BF16 are next to nothing.
constexpr double nearly_all = 0.99, next_to_nothing = 1e-9;
/// A table of tokens has rows for padding, but not so many.
constexpr double most_zeros = 0.25;
/// A channel as large as the others but of the other sign, where none is below this share of the median.
constexpr double turned_sign = -0.3;

/// Of a norm's channel over the median: an upper bit of its exponent has turned.
constexpr double next_to_none = 0x1p-40;

struct Vector {
  std::string name, role;
  size_t channels = 0;
  double zeros = 0, negative = 0, ones = 0, absurd = 0;  ///< shares
  size_t run = 0;                                        ///< of zeros, the longest
  double zero_run = 0;                                   ///< run, as a share
  double median = 0;                                     ///< of magnitudes
  double other_median = 0;                               ///< the same of its bytes read as the other 16-bit type
  double least = 0;                                      ///< the smallest value over that median
  double near_one = 0;                                   ///< share of magnitudes from 1/2 to 2
  size_t sizes = 0;                                      ///< different magnitudes, up to many_sizes
  DType dtype = DType::bf16;
  bool is_read = false;                ///< by linears, channel by channel
  double reader = 0;                   ///< size of a usual column of these; 0: not known
  double bare_spread = 0, spread = 0;  ///< of these columns, and of them times the norm: of their logarithms
  bool nothing = false;                ///< all values are zero
  bool alternate = false;              ///< every other value is zero, and hardly any between
  bool halves = false;                 ///< the second half is the first one again
  size_t vanishing = 0;                ///< values that are next to nothing beside the median, but not zero
};

/// The other type of 16 bit; of 32 bit itself.
DType other_half(DType dtype) { return dtype == DType::f16 ? DType::bf16 : dtype == DType::bf16 ? DType::f16 : dtype; }

/// Half the distance between the values that a sixth of all lie below and above: a standard deviation where they are
/// normal. Infinite ones are left out.
double spread_of(std::vector<double> values) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.size() < least_channels) return 0;
  std::ranges::sort(values);
  const size_t sixth = values.size() * 16 / 100;
  return (values[values.size() - 1 - sixth] - values[sixth]) / 2;
}

/// At most 2^17 of its values, as many from every part of it.
std::vector<float> some_values(const TensorView& tensor) {
  constexpr int64_t most = int64_t{1} << 17, together = 64;
  const int64_t count = element_count(tensor.shape);
  const int64_t step = std::max<int64_t>(1, count / most) * together, width = dtype_bits(tensor.dtype) / 8;
  std::vector<float> values;
  for (int64_t begin = 0; begin < count; begin += step) {
    const auto size = static_cast<size_t>(std::min(together, count - begin));
    values.resize(values.size() + size);
    widen(tensor.bytes.subspan(static_cast<size_t>(begin * width)), tensor.dtype, std::span(values).last(size));
  }
  return values;
}

void measure_sizes(std::span<const float> values, Vector& result) {
  std::vector<float> sizes;
  std::set<float> different;
  for (const float value : values) {
    if (value == 0 || !std::isfinite(value)) continue;
    sizes.push_back(std::abs(value));
    result.near_one += sizes.back() >= 0.5f && sizes.back() < 2;
    if (different.size() < many_sizes) different.insert(sizes.back());
  }
  if (sizes.empty()) return;
  result.near_one /= static_cast<double>(sizes.size());
  result.sizes = different.size();
  const auto middle = sizes.begin() + static_cast<std::ptrdiff_t>(sizes.size() / 2);
  std::ranges::nth_element(sizes, middle);
  result.median = *middle;
  result.least = std::ranges::min(values) / *middle;
  result.vanishing = static_cast<size_t>(
      std::ranges::count_if(sizes, [&](float size) { return double{size} < next_to_none * result.median; }));
}

/// What a norm of 32 bits looks like that was read as one of 16: of values that were rounded to BF16 every other half is zero.
bool is_every_other_zero(std::span<const float> values) {
  size_t zeros[2] = {0, 0};
  for (size_t i = 0; i < values.size(); ++i) zeros[i % 2] += values[i] == 0;
  const auto half = values.size() / 2;
  return half >= 32 && std::ranges::max(zeros) >= half && 20 * std::ranges::min(zeros) <= half;
}

bool are_halves_alike(std::span<const float> values) {
  constexpr size_t fewest = 128, fewest_sizes = 16;
  const auto half = values.size() / 2;
  if (values.size() < fewest || values.size() % 2 != 0) return false;
  if (!std::ranges::equal(values.first(half), values.last(half))) return false;
  return std::set<float>(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(half)).size() >= fewest_sizes;
}

Vector measure(const std::string& name, const TensorView& tensor, bool norm) {
  Vector result{name, role_of(name)};
  const auto values = some_values(tensor);
  result.channels = values.size();
  size_t run = 0;
  for (const float value : values) {
    run = value == 0 ? run + 1 : 0;
    result.run = std::max(result.run, run);
    result.zeros += value == 0, result.negative += value < 0, result.ones += value == 1;
    result.absurd += std::abs(value) > absurd_size;
  }
  for (double* share : {&result.zeros, &result.negative, &result.ones, &result.absurd}) {
    *share /= std::max<double>(1, static_cast<double>(values.size()));
  }
  result.zero_run = static_cast<double>(result.run) / std::max<double>(1, static_cast<double>(values.size()));
  result.dtype = tensor.dtype;
  result.nothing = result.zeros == 1;
  result.alternate = norm && is_every_other_zero(values);
  result.halves = norm && are_halves_alike(values);
  measure_sizes(values, result);
  if (const DType other = other_half(tensor.dtype); norm && other != tensor.dtype) {
    std::vector<float> sizes(static_cast<size_t>(element_count(tensor.shape)));
    widen(tensor.bytes, other, sizes);
    for (float& size : sizes) size = std::isfinite(size) ? std::abs(size) : 0;
    const auto middle = sizes.begin() + static_cast<std::ptrdiff_t>(sizes.size() / 2);
    std::ranges::nth_element(sizes, middle);
    result.other_median = *middle;
  }
  if (!norm) result.zeros = result.negative = result.ones = 0, result.run = 0;
  return result;
}

/// What is added to what is stored, of each norm of an architecture that is known, by tensor.
std::map<std::string, double, std::less<>> offsets_of(const model::OpenedModel& model) {
  std::map<std::string, double, std::less<>> offsets;
  if (model.config.architecture == nullptr) return offsets;
  for (const auto& norm : model::all_norms(model.config)) offsets.emplace(norm.name + ".weight", norm.offset);
  return offsets;
}

/// Measures what reads a norm, by itself and times the norm's factors.
void add_reader(const TensorView& norm, double offset, const std::vector<double>& columns, Vector& result) {
  result.is_read = true;
  if (columns.empty()) return;
  result.reader = std::exp(median(columns));
  std::vector<float> factors(static_cast<size_t>(element_count(norm.shape)));
  if (factors.size() != columns.size()) return;
  widen(norm.bytes, norm.dtype, factors);
  auto products = columns;
  for (size_t c = 0; c < products.size(); ++c) products[c] += std::log(std::abs(double{factors[c]} + offset));
  result.bare_spread = spread_of(columns), result.spread = spread_of(std::move(products));
}

/// Whether a tensor is a norm's factors, of towers and further layers too: "visual.blocks.0.norm1.weight".
bool is_norm(const std::string& name, const Shape& shape) {
  if (shape.size() != 1 || !name.ends_with(".weight")) return false;
  const size_t end = name.size() - std::string_view(".weight").size(), dot = name.rfind('.', end - 1);
  const size_t begin = dot == std::string::npos ? 0 : dot + 1;
  const std::string_view last = std::string_view(name).substr(begin, end - begin);
  return last.find("norm") != std::string_view::npos || last.starts_with("ln");
}

/// Whether three or more others have this name, and all of them are so.
template <class Holds>
bool others_of(const std::vector<Vector>& all, const Vector& one, Holds holds) {
  size_t peers = 0;
  for (const Vector& other : all) {
    if (&other == &one || other.role != one.role) continue;
    if (!holds(other)) return false;
    ++peers;
  }
  return peers >= 3;
}

/// Norms of which one has a type of 16 bit that no other has.
constexpr size_t least_norms_of_type = 5;

/// Whatever their layers and towers are: programs round all norms to one type.
void add_lone_types(const io::Checkpoint& tensors, std::vector<std::string>& warnings) {
  std::map<DType, std::vector<const std::string*>> names;
  for (const auto& [name, info] : tensors.tensors()) {
    if (is_norm(name, info.shape) && tensors.stored_dtype(name) == info.dtype) names[info.dtype].push_back(&name);
  }
  const auto &halves = names[DType::f16], &brains = names[DType::bf16];
  if (halves.size() + brains.size() < least_norms_of_type || std::min(halves.size(), brains.size()) != 1) return;
  const bool half = halves.size() == 1;
  warnings.push_back(concat(printable(*(half ? halves : brains).front()), ": is ", half ? "F16" : "BF16",
                            ", all other ", std::max(halves.size(), brains.size()), " norms are ",
                            half ? "BF16" : "F16", ": its bytes may be of that type, too"));
}

/// A norm, times what reads it, is far from the others of its name by this factor, and near them by that.
constexpr double far_size = 32, near_size = 4;

/// The bytes of one norm are of the other type than all its like, whatever the header calls them.
void add_other_bytes(const std::vector<Vector>& norms, const std::set<std::string, std::less<>>& plain,
                     std::vector<std::string>& warnings) {
  constexpr size_t fewest = 3;
  for (const Vector& norm : norms) {
    if (!plain.contains(norm.name) || !(norm.median > 0) || !(norm.other_median > 0) || !(norm.reader > 0)) continue;
    std::vector<double> sizes;
    for (const Vector& peer : norms) {
      const bool like = &peer != &norm && peer.role == norm.role && peer.dtype == norm.dtype && peer.reader > 0;
      if (like) sizes.push_back(peer.median * peer.reader);
    }
    if (sizes.size() < fewest) continue;
    const double usual = median(sizes);
    const auto is_far = [&](double size) { return size > far_size * usual || far_size * size < usual; };
    const double read_so = norm.other_median * norm.reader;
    const bool near = read_so < near_size * usual && near_size * read_so > usual;
    if (!is_far(norm.median * norm.reader) || !near || std::ranges::any_of(sizes, is_far)) continue;
    warnings.push_back(concat(printable(norm.name), ": half of its values are below ", norm.median,
                              " in size, read as ", dtype_name(other_half(norm.dtype)), " below ", norm.other_median,
                              ", as the others of its name are: its bytes may be of that type"));
  }
}

/// A norm is as large as those of the layers before and behind it, within this factor in all other layers, and not by that
/// one in one.
constexpr double steady = 2, unsteady = 6;

/// By how much a norm is larger (or smaller: below 0) than both the one before and the one behind, as a logarithm.
double apart_from_both(std::span<const double> sizes, size_t at) {
  const double before = sizes[at] - sizes[at - 1], behind = sizes[at] - sizes[at + 1];
  if (before * behind <= 0) return 0;
  return std::abs(before) < std::abs(behind) ? before : behind;
}

/// Sizes of norms, times what reads them, go from layer to layer in small steps, but at the ends of a model.
void add_unsteady(const model::OpenedModel& model, const std::vector<Vector>& norms,
                  std::vector<std::string>& warnings) {
  constexpr size_t fewest_steady = 3;
  // Of 1 + w what is stored says little of what is multiplied by.
  if (model.config.architecture != nullptr && model::final_norm_plan(model.config).offset != 0) return;
  std::map<std::string, std::map<int64_t, const Vector*>> roles;
  for (const Vector& norm : norms) {
    const auto place = model::layer_numbers(norm.name);
    if (place.layer >= 0 && place.expert < 0) roles[norm.role][place.layer] = &norm;
  }
  for (const auto& [role, layers] : roles) {
    std::vector<const Vector*> line;
    std::vector<double> sizes;
    for (const auto& [layer, norm] : layers) {
      const double reader = norm->reader > 0 ? norm->reader : 1;
      if (norm->median > 0) line.push_back(norm), sizes.push_back(std::log(norm->median * reader));
    }
    if (sizes.size() != layers.size()) continue;
    for (size_t at = 1; at + 1 < sizes.size(); ++at) {
      const double apart = apart_from_both(sizes, at);
      if (std::abs(apart) < std::log(unsteady)) continue;
      size_t others = 0;
      bool all_steady = true;
      for (size_t other = 1; other + 1 < sizes.size(); ++other) {
        if (other + 1 >= at && other <= at + 1) continue;
        ++others, all_steady = all_steady && std::abs(apart_from_both(sizes, other)) < std::log(steady);
      }
      if (others < fewest_steady || !all_steady) continue;
      warnings.push_back(concat(printable(line[at]->name), ": is ", fixed(std::exp(std::abs(apart)), 1), " times as ",
                                apart > 0 ? "large" : "small", " as those of the layers before and behind it, which ",
                                "no other layer's is by more than ", fixed(steady, 0)));
    }
  }
}

/// Whether a norm of ones is not the one that what reads it was trained behind: these columns are as those that read the
/// others of its name are, and not as their products with these, which folding leaves.
bool is_lost(const std::vector<Vector>& norms, const Vector& norm) {
  constexpr size_t fewest = 3;
  constexpr double clearly_less = 0.6, as_little = 0.5;
  // Into nothing but what reads it channel by channel is it folded.
  if (!norm.is_read) return true;
  double least = INFINITY, least_bare = INFINITY;
  size_t peers = 0;
  for (const Vector& other : norms) {
    if (&other == &norm || other.role != norm.role || !(other.spread > 0)) continue;
    least = std::min(least, other.spread), least_bare = std::min(least_bare, other.bare_spread);
    ++peers;
  }
  return peers >= fewest && norm.bare_spread < clearly_less * least && norm.bare_spread > as_little * least_bare;
}

/// Norms of queries and keys are of one kind and the others of another.
bool is_of_heads(const Vector& norm) {
  return norm.name.ends_with("q_norm.weight") || norm.name.ends_with("k_norm.weight");
}

/// Norms of 1 + w under the name of an architecture whose norms are w.
void add_offset_norms(const model::OpenedModel& model, const std::vector<Vector>& norms,
                      const std::set<std::string, std::less<>>& plain, std::vector<std::string>& faults) {
  constexpr double many_negative = 0.2;
  constexpr int64_t fewest = 5;
  if (model.config.architecture == nullptr) return;
  int64_t count = 0, negative = 0;
  for (const Vector& norm : norms) {
    if (!plain.contains(norm.name) || is_of_heads(norm)) continue;
    ++count, negative += norm.negative > many_negative;
  }
  if (count < fewest || 2 * negative <= count) return;
  faults.push_back(concat("norms: ", negative, " of ", count,
                          " have negative factors in a fifth of their channels and ",
                          "more: ", printable(model.config.architecture_name), " multiplies by w, these are of 1 + w"));
}

/// Values of F16 under the name of BF16: exponents of 5 bits and the upper bits of fractions are read as exponents of 8, so
/// that what differs by a factor of two differs by one of 2^8.
void add_half_norms(const std::vector<Vector>& norms, const std::set<std::string, std::less<>>& plain,
                    std::vector<std::string>& faults) {
  constexpr int64_t fewest = 5;
  constexpr double small = 0x1p-10, least = 0x1p-7, most = 0x1p4;
  int64_t count = 0, tiny = 0;
  for (const Vector& norm : norms) {
    if (!plain.contains(norm.name) || is_of_heads(norm) || norm.dtype != DType::bf16 || norm.ones == 1 ||
        norm.zeros == 1)
      continue;
    if (!(norm.other_median > least) || !(norm.other_median < most)) return;
    ++count, tiny += norm.median < small;
  }
  if (count < fewest || 2 * tiny <= count) return;
  faults.push_back(concat("norms: half of the values of ", tiny, " of ", count, " are below ", small,
                          " in size, read as F16 those of all are from ", least, " to ", most, ": F16 labelled BF16"));
}

}  // namespace

std::string role_of(std::string_view name) {
  std::string role;
  while (!name.empty()) {
    const size_t dot = std::min(name.find('.'), name.size());
    const std::string_view part = name.substr(0, dot);
    if (part.find_first_not_of("0123456789") != std::string_view::npos) role += concat(role.empty() ? "" : ".", part);
    name.remove_prefix(std::min(dot + 1, name.size()));
  }
  return role;
}

NormReport check_norms(const model::OpenedModel& model, const ReaderColumns& readers) {
  std::vector<Vector> norms, tables;
  const auto offsets = offsets_of(model);
  for (const auto& parameter : model::parameters(model)) {
    // Of what is decoded as it is loaded the rules of codes say more.
    const auto& tensors = model.folder.tensors;
    if (!tensors.contains(parameter.name)) continue;
    if (tensors.stored_dtype(parameter.name) != tensors.at(parameter.name).dtype) continue;
    const auto tensor = model.folder.tensors.load(parameter.name);
    if (!is_weight_dtype(tensor->dtype)) continue;
    const bool norm = parameter.name.ends_with("norm.weight");
    if (static_cast<size_t>(element_count(tensor->shape)) < least_channels) continue;
    (norm ? norms : tables).push_back(measure(parameter.name, tensor.view(), norm));
    if (const auto reader = readers.find(parameter.name); reader != readers.end() && norm) {
      const auto offset = offsets.find(parameter.name);
      add_reader(tensor.view(), offset == offsets.end() ? 0 : offset->second, reader->second, norms.back());
    }
  }
  NormReport report;
  auto& faults = report.faults;
  const auto add = [&](const Vector& vector, const std::string& what) {
    faults.push_back(concat(printable(vector.name), ": ", what));
  };
  const auto warn = [&](const Vector& vector, const std::string& what) {
    report.warnings.push_back(concat(printable(vector.name), ": ", what));
  };
  std::set<std::string, std::less<>> plain;  // whose factors are what is stored
  for (const auto& [name, offset] : offsets) {
    if (offset == 0) plain.insert(name);
  }
  /// Whether nearly all other norms are otherwise; where the architecture is not known, those of its name.
  const auto alone = [&](const Vector& norm, double Vector::*share, double most) {
    const auto last = [](const std::string& name) { return name.substr(name.find_last_of('.', name.size() - 8) + 1); };
    size_t peers = 0, like = 0;
    for (const Vector& other : norms) {
      if (model.config.architecture == nullptr && last(other.name) != last(norm.name)) continue;
      ++peers, like += &other != &norm && other.*share > most;
    }
    return peers >= 4 && like * 4 <= peers;
  };
  const bool known = model.config.architecture != nullptr;
  const bool hollow =
      std::ranges::any_of(norms, [](const Vector& norm) { return norm.zeros == 1; }) && is_hollow(model.folder.tensors);
  if (hollow) return report;
  constexpr size_t few_zeros = 8;  // channels that were taken out of a model are so in all norms
  for (const Vector& norm : norms) {
    const auto not_zero = [](const Vector& other) { return other.zeros < 1; };
    if (norm.alternate) {
      add(norm, "has zeros in every other channel: its values are of 32 bits, and were read as 16");
      continue;
    }
    // Heads that were repeated have one norm for each.
    if (norm.halves && !is_of_heads(norm)) {
      add(norm, "has the same values in the second half of its channels as in the first: one part was stored twice");
      continue;
    }
    if (norm.zeros == 1 && plain.contains(norm.name)) {
      add(norm, "is zero in all channels: nothing goes through it");
    } else if (norm.zeros == 1 && alone(norm, &Vector::zeros, 0.99) &&
               (plain.contains(norm.name) || others_of(norms, norm, not_zero))) {
      // Of 1 + w that is a factor of one.
      const bool folded = offsets.contains(norm.name) && !plain.contains(norm.name) && !is_lost(norms, norm);
      folded ? warn(norm, "is zero in all channels, as no other norm is")
             : add(norm, "is zero in all channels: nothing goes through it");
    } else if (norm.zeros < 1 && norm.run >= norm.channels / 4 && alone(norm, &Vector::zeros, 0.2)) {
      add(norm, concat("is zero in ", norm.run, " channels in a row of ", norm.channels));
    } else if (norm.run >= few_zeros && norm.zeros < 1 && norms.size() >= 5 && plain.contains(norm.name) &&
               std::ranges::all_of(norms, [&](const Vector& other) { return &other == &norm || other.zeros == 0; })) {
      add(norm, concat("is zero in ", norm.run, " channels in a row, and no other norm has any that is"));
    }
    if (norm.negative > 0.9 && alone(norm, &Vector::negative, 0.5)) {
      const std::string what = "is negative in nearly all channels, as no other norm is";
      plain.contains(norm.name) ? add(norm, what) : warn(norm, what);
    }
    constexpr double as_weights = 0.35, as_weights_too = 0.65;
    if (plain.contains(norm.name) && norm.negative > as_weights && norm.negative < as_weights_too) {
      add(norm, concat("is negative in ", fixed(100 * norm.negative, 0),
                       " % of its channels, as weights are and no norm is: it holds something else"));
    }
    const bool one_negative = norm.negative * static_cast<double>(norm.channels) == 1 && norm.least < turned_sign;
    const auto positive = [&](const Vector& other) { return &other == &norm || other.negative == 0; };
    if (one_negative && norms.size() >= 5 && std::ranges::all_of(norms, positive)) {
      // Training leaves a few of these in models of millions of channels.
      warn(norm, concat("has one negative channel, ", fixed(norm.least, 2),
                        " times as large as the others are, and no other norm has any: a sign may have turned"));
    }
    const auto whole = [&](const Vector& other) { return &other == &norm || other.vanishing == 0; };
    if (norm.vanishing == 1 && norms.size() >= 5 && std::ranges::all_of(norms, whole)) {
      add(norm, "has one channel that is next to nothing, and no other norm has any: a bit of its exponent has turned");
    }
    // The last one may be folded into the head, so it is held against those of its name.
    const auto not_ones = [](const Vector& other) { return other.ones < 0.5; };
    if (norm.ones == 1 && alone(norm, &Vector::ones, 0.5) && others_of(norms, norm, not_ones)) {
      // Of an unknown architecture nobody can tell what it was folded into.
      known&& is_lost(norms, norm) ? add(norm, "is one in all channels, as no other norm is: it was never loaded")
                                   : warn(norm, "is one in all channels, as no other norm is");
    }
  }
  for (const Vector& table : tables) {
    const bool tokens =
        model::is_embedding(model::module_path(table.name)) || model::is_head(model::module_path(table.name));
    if (tokens && table.zero_run > most_zeros && table.zero_run < 1) {
      // Programs add rows for tokens that are to come.
      warn(table, concat(fixed(100 * table.zero_run, 1), " % of it are zeros in a row: it may end early"));
    }
    if (table.channels < least_table || table.sizes < many_sizes) continue;
    if (table.dtype == DType::f16 && table.near_one > nearly_all) {
      add(table,
          concat(fixed(100 * table.near_one, 1), " % of its values are from 1/2 to 2 in size: BF16 labelled F16"));
    }
    if (table.dtype == DType::bf16 && table.median < next_to_nothing) {
      add(table, concat("half of its values are below ", table.median, " in size: F16 labelled BF16"));
    }
  }
  for (const Vector& table : tables) {
    if (!table.nothing || !others_of(tables, table, [](const Vector& other) { return !other.nothing; })) continue;
    // A layer that was added to a model writes nothing at first.
    const bool writes = table.name.ends_with("o_proj.weight") || table.name.ends_with("down_proj.weight") ||
                        table.name.ends_with(".bias") || table.name.ends_with("w2.weight");
    const std::string what = "is zero throughout, as no other of its name is";
    writes ? warn(table, what) : add(table, what);
  }
  add_other_bytes(norms, plain, report.warnings);
  add_offset_norms(model, norms, plain, faults);
  add_half_norms(norms, plain, faults);
  add_unsteady(model, norms, report.warnings);
  add_lone_types(model.folder.tensors, report.warnings);
  for (const auto* list : {&norms, &tables}) {
    for (const Vector& vector : *list) {
      const bool named = std::ranges::any_of(report.warnings, [&](const std::string& warning) {
        return warning.starts_with(concat(printable(vector.name), ": is "));
      });
      if (const DType other = other_half(vector.dtype);
          !named && other != vector.dtype &&
          others_of(*list, vector, [&](const Vector& peer) { return peer.dtype == other; })) {
        warn(vector, concat("is ", dtype_name(vector.dtype), ", all others of its name are ", dtype_name(other),
                            ": its bytes may be of that type, too"));
      }
      if (vector.absurd > absurd_share) {
        add(vector, concat(fixed(100 * vector.absurd, 1), " % of its values are larger than ", absurd_size,
                           ": bytes of another type or order"));
      }
    }
  }
  return report;
}

}  // namespace w4q::verify
