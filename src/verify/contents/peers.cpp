// Rules that hold one tensor against others of its role: what is stored twice, of another size, or lacks signs; and files
// that lie beside the weights.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "core/convert.h"
#include "core/float_formats.h"
#include "core/parallel.h"
#include "core/text.h"
#include "io/digest.h"
#include "io/system.h"
#include "model/parameters.h"
#include "verify/contents/byte_values.h"
#include "verify/contents/contents.h"
#include "verify/statistics/norms.h"
#include "verify/statistics/repeated_parts.h"

namespace w4q::verify {
namespace {

using Kind = StoredLinear::Kind;

/// Others that must be otherwise before one is named.
constexpr size_t fewest_peers = 6;

/// Of nothing it is NaN.
double median_of(std::vector<double> values) {
  if (values.empty()) return NAN;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

// ---- the same bytes twice ----

struct Copy {
  std::string name, of;
  int64_t layer = -1, first = -1;
};

/// Whether two could not be the same by chance, nor because there is nothing in them.
bool says_something(std::span<const std::byte> bytes) {
  constexpr size_t fewest = 128, values = 16;
  return bytes.size() >= fewest && has_values(bytes, values);
}

/// Whether a tensor of a layer is a norm, or a matrix in 16 bit or FP8.
bool is_compared(const std::string& name, const io::TensorInfo& info) {
  return name.ends_with(".weight") && (is_weight_dtype(info.dtype) || info.dtype == DType::f8_e4m3);
}

/// By role: the first of which a layer holds the bytes again.
std::vector<Copy> copies_of(const StoredContents& contents) {
  constexpr size_t looked_at = 4096;
  std::map<std::string, std::vector<std::string>> alike;  // role and digest of its beginning → names
  std::vector<Copy> copies;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const model::LayerNumbers place = model::layer_numbers(name);
    if (place.layer < 0 || place.expert >= 0 || !is_compared(name, info)) continue;
    const auto loaded = contents.tensors().load(name);
    const auto bytes = loaded->bytes.first(std::min(looked_at, loaded->bytes.size()));
    if (!says_something(bytes)) continue;
    auto& names = alike[concat(role_of(name), shape_text(info.shape), io::digest_of(bytes).text())];
    for (const auto& other : names) {
      if (!std::ranges::equal(contents.tensors().load(other)->bytes, loaded->bytes)) continue;
      copies.push_back({name, other, place.layer, model::layer_numbers(other).layer});
      break;
    }
    names.push_back(name);
  }
  return copies;
}

/// Whether all that is repeated is a part of one layer, and nothing else of it is.
bool is_part_alone(const StoredContents& contents, const std::vector<Copy>& copies) {
  std::vector<Repeated> repeated;
  std::vector<std::string> matrices;
  for (const auto& copy : copies) repeated.push_back({copy.name, copy.of});
  for (const auto& [name, info] : contents.tensors().tensors()) {
    if (info.shape.size() > 1) matrices.push_back(name);
  }
  return !lone_part(repeated, matrices).empty();
}

/// Two norms, or two matrices of one layer, of different roles hold the same values: one was stored as the other.
void roles_twice(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t looked_at = 4096, most = 3;
  std::map<std::string, std::string> seen;
  std::vector<std::pair<std::string, std::string>> found;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const model::LayerNumbers place = model::layer_numbers(name);
    if (place.expert >= 0 || !is_compared(name, info) || name.find("vis") != std::string::npos) continue;
    const bool norm = info.shape.size() == 1 && name.ends_with("norm.weight");
    if (!norm && (place.layer < 0 || info.shape.size() != 2)) continue;
    const auto loaded = contents.tensors().load(name);
    const auto bytes = loaded->bytes.first(std::min(looked_at, loaded->bytes.size()));
    if (!says_something(bytes)) continue;
    const std::string where = norm ? std::string("norm") : std::to_string(place.layer);
    const auto [other, added] =
        seen.try_emplace(concat(where, shape_text(info.shape), io::digest_of(bytes).text()), name);
    if (added || role_of(other->second) == role_of(name)) continue;
    if (std::ranges::equal(contents.tensors().load(other->second)->bytes, loaded->bytes))
      found.emplace_back(name, other->second);
  }
  if (found.size() > most) return;  // keys that are values, as some models have them
  for (const auto& [name, other] : found) findings.fault(name, concat("holds the bytes of ", printable(other)));
}

/// Models are made longer by repeating layers: then most of a layer is another's.
void layers_twice(const StoredContents& contents, ContentsFindings& findings) {
  const auto copies = copies_of(contents);
  std::map<std::pair<int64_t, int64_t>, int64_t> between;
  std::map<int64_t, int64_t> held;
  for (const auto& copy : copies) ++between[{copy.first, copy.layer}];
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const model::LayerNumbers place = model::layer_numbers(name);
    held[place.layer] += place.layer >= 0 && place.expert < 0 && is_compared(name, info);
  }
  constexpr size_t most = 3;  // more are how a model was made
  const bool part = is_part_alone(contents, copies);
  if (copies.size() > most && !part) return;
  for (const auto& copy : copies) {
    if (!part && 2 * between[{copy.first, copy.layer}] > held[copy.layer]) continue;
    findings.fault(copy.name, concat("holds the bytes of ", printable(copy.of)));
  }
}

// ---- what one layer lacks ----

/// A tensor that all other layers have, where its layer lacks nothing else: parts that a search took out of a model go as
/// a whole, and kinds of layers take turns.
void one_missing(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t fewest_layers = 5;
  std::map<std::string, std::map<int64_t, std::string>> roles;  // → layer → name
  std::set<int64_t> layers;
  const int64_t stated = contents.number({"num_hidden_layers"});
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const model::LayerNumbers place = model::layer_numbers(name);
    const bool tower = name.find("vis") != std::string::npos || name.find("audio") != std::string::npos ||
                       name.find("mtp") != std::string::npos;
    if (place.layer < 0 || place.layer >= stated || place.expert >= 0 || tower) continue;
    layers.insert(place.layer);
    roles[role_of(name)][place.layer] = name;
  }
  if (layers.size() < fewest_layers) return;
  std::map<int64_t, std::vector<std::string>> lacks;  // by layer
  for (const auto& [role, held] : roles) {
    if (held.size() + 1 != layers.size()) continue;
    for (const int64_t layer : layers) {
      if (held.contains(layer)) continue;
      const std::string& like = held.begin()->second;
      const std::string number = concat(".", held.begin()->first, ".");
      const size_t at = like.find(number);
      lacks[layer].push_back(
          at == std::string::npos ? role : std::string(like).replace(at, number.size(), concat(".", layer, ".")));
    }
  }
  for (const auto& [layer, names] : lacks) {
    // Codes and scales are one. The first and the last layers may be of a kind of their own.
    const auto of_one = [&](const std::string& name) {
      return model::module_path(name) == model::module_path(names.front());
    };
    if (std::ranges::all_of(names, of_one) && layer != *layers.begin() && layer != *layers.rbegin())
      findings.fault(names.front(), "is missing: all other layers have it");
  }
}

// ---- sizes ----

double size_of(const io::Checkpoint& tensors, const std::string& name) {
  constexpr int64_t rows_looked_at = 32;
  const auto loaded = tensors.load(name);
  const int64_t n = loaded->shape[0], k = n > 0 ? element_count(loaded->shape) / n : 0;
  const size_t width = static_cast<size_t>(k * dtype_bits(loaded->dtype) / 8);
  std::vector<float> values(static_cast<size_t>(k));
  double sum = 0, count = 0;
  for (int64_t row = 0; row < n; row += std::max<int64_t>(1, n / rows_looked_at)) {
    widen(loaded->bytes.subspan(static_cast<size_t>(row) * width, width), loaded->dtype, values);
    for (const float value : values) sum += double{value} * double{value}, count += 1;
  }
  return count > 0 ? std::sqrt(sum / count) : NAN;
}

/// A matrix in 16 bit beside those of its role in the other layers.
void sizes_of_plain(const StoredContents& contents, ContentsFindings& findings) {
  constexpr double far = 100;
  std::vector<std::string> names;
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const model::LayerNumbers place = model::layer_numbers(name);
    if (place.layer < 0 || info.shape.size() != 2 || !is_weight_dtype(info.dtype) || !name.ends_with(".weight"))
      continue;
    names.push_back(name);
  }
  const auto sizes =
      parallel_results(names, [&](const std::string& name) { return size_of(contents.tensors(), name); });
  std::map<std::string, std::vector<double>> by_role;
  for (size_t i = 0; i < names.size(); ++i) {
    if (sizes[i] > 0 && std::isfinite(sizes[i])) by_role[role_of(names[i])].push_back(sizes[i]);
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const auto& peers = by_role[role_of(names[i])];
    const double median = median_of(peers);
    if (peers.size() <= fewest_peers || !(sizes[i] > 0) || !std::isfinite(sizes[i])) continue;
    const auto near =
        std::ranges::count_if(peers, [&](double size) { return size < 10 * median && 10 * size > median; });
    if (static_cast<size_t>(near) + 1 < peers.size() || (sizes[i] < far * median && sizes[i] * far > median)) continue;
    // Folded scales, and layers that were added and hardly trained, make sound ones as different.
    findings.notes.push_back(concat(printable(names[i]), " has values of the size ", sizes[i],
                                    ", those of its role in other layers have ", median));
  }
}

// ---- signs, and the range of codes ----

struct CodeShares {
  double negative = NAN;  ///< of codes that are not zero
  int largest = 0;        ///< without the sign
  double saturated = 0;   ///< of FP8: at the end of the range
  bool nothing = false;   ///< all are zero
};

CodeShares shares_of(const io::Checkpoint& tensors, const StoredLinear& linear) {
  constexpr size_t looked_at = 1 << 16, together = 64;
  const auto loaded = tensors.load(linear.codes);
  const auto bytes = loaded->bytes;
  int64_t negative = 0, count = 0, ends = 0;
  CodeShares result;
  const auto add = [&](int magnitude, bool sign) {
    if (magnitude == 0) return;
    ++count, negative += sign;
    result.largest = std::max(result.largest, magnitude);
  };
  const size_t step = std::max<size_t>(1, bytes.size() / looked_at) * together;
  for (size_t begin = 0; begin < bytes.size(); begin += step) {
    for (size_t i = begin; i < std::min(begin + together, bytes.size()); ++i) {
      const int byte = std::to_integer<int>(bytes[i]);
      if (linear.kind == Kind::fp8) {
        add(byte & 0x7f, byte >= 0x80);
        ends += (byte & 0x7f) == 0x7e;
      } else {
        add(byte & 7, (byte & 8) != 0), add(byte >> 4 & 7, byte >= 0x80);
      }
    }
  }
  constexpr int64_t fewest = 4096;
  result.nothing = count == 0;
  if (count >= fewest) result.saturated = static_cast<double>(ends) / static_cast<double>(count);
  if (count >= fewest) result.negative = static_cast<double>(negative) / static_cast<double>(count);
  return result;
}

/// Of all codes of FP8, without the sign: the loud channels of a matrix may be few.
int largest_code(const io::Checkpoint& tensors, const StoredLinear& linear) {
  const auto loaded = tensors.load(linear.codes);
  int largest = 0;
  for (const std::byte byte : loaded->bytes) largest = std::max(largest, std::to_integer<int>(byte) & 0x7f);
  return largest;
}

bool scales_are_one(const io::Checkpoint& tensors, const StoredLinear& linear) {
  const auto loaded = tensors.load(linear.scales);
  if (!is_weight_dtype(loaded->dtype)) return false;
  std::vector<float> values(static_cast<size_t>(element_count(loaded->shape)));
  widen(loaded->bytes, loaded->dtype, values);
  return std::ranges::all_of(values, [](float value) { return value == 1; });
}

/// Codes that are all at the end of their range, or all zero, in one weight and no other of its role.
void lone_ends(const std::vector<const StoredLinear*>& linears, const std::vector<CodeShares>& shares,
               ContentsFindings& findings) {
  constexpr double many = 0.02, few = 0.002;
  constexpr size_t fewest_of_role = 3;
  for (size_t i = 0; i < linears.size(); ++i) {
    const bool full = linears[i]->kind == Kind::fp8 && shares[i].saturated > many;
    if (!full && !shares[i].nothing) continue;
    size_t others = 0, of_role = 0, alike = 0;
    for (size_t j = 0; j < linears.size(); ++j) {
      if (j == i || linears[j]->kind != linears[i]->kind) continue;
      ++others, of_role += role_of(linears[j]->path) == role_of(linears[i]->path);
      alike += full ? shares[j].saturated > few : shares[j].nothing;
    }
    if (others < fewest_peers || of_role < fewest_of_role || alike > 0) continue;
    const std::string_view path = linears[i]->path;
    // A layer that was added to a model writes nothing at first.
    const bool writes = path.ends_with("o_proj") || path.ends_with("down_proj") || path.ends_with("w2");
    const std::string what = full ? concat("has ", fixed(100 * shares[i].saturated, 1),
                                           " % of its codes at the end of their range, where the ",
                                           "others have next to none: what is larger was cut off")
                                  : "has codes of zero throughout, as no other weight has";
    if (!full && writes) {
      findings.notes.push_back(concat(printable(path), " ", what));
    } else {
      findings.fault(path, what);
    }
  }
}

/// Codes of floats have a sign in half of all cases, and those of FP8 reach the end of their range.
void codes_of_floats(const StoredContents& contents, ContentsFindings& findings) {
  constexpr double even = 0.3, none = 0.02;
  constexpr int upper_octaves = 0x68;  // 64 of 448
  std::vector<const StoredLinear*> linears;
  for (const auto& linear : contents.linears()) {
    const bool small = linear.kind == Kind::fp8 || linear.kind == Kind::mxfp4 || linear.kind == Kind::nvfp4;
    if (small && !linear.scales.empty() && linear.n > 0 && linear.k > 0) linears.push_back(&linear);
  }
  const auto shares =
      parallel_results(linears, [&](const StoredLinear* linear) { return shares_of(contents.tensors(), *linear); });
  const auto is_even = [&](const CodeShares& one) { return one.negative > even && one.negative < 1 - even; };
  const auto evens = static_cast<size_t>(std::ranges::count_if(shares, is_even));
  lone_ends(linears, shares, findings);
  size_t floats8 = 0, low = 0;
  for (size_t i = 0; i < linears.size(); ++i) {
    const bool lopsided = shares[i].negative < none || shares[i].negative > 1 - none;
    if (lopsided && evens >= fewest_peers && 10 * evens >= 8 * linears.size()) {
      findings.fault(linears[i]->path,
                     concat(shares[i].negative < none ? "has codes without signs" : "has negative codes",
                            ", those of the other weights are as often negative as not"));
    }
    if (linears[i]->kind != Kind::fp8) continue;
    ++floats8, low += shares[i].largest < upper_octaves && shares[i].largest > 0;
  }
  if (floats8 < fewest_peers) return;
  for (size_t i = 0; i < linears.size(); ++i) {
    const bool below = linears[i]->kind == Kind::fp8 && shares[i].largest < upper_octaves && shares[i].largest > 0;
    const auto& scales = contents.tensors().at(linears[i]->scales).shape;
    // One scale may be that of several matrices.
    const bool alone = low == 1 && element_count(scales) > 1;
    if (!below || (!alone && low < floats8) || scales_are_one(contents.tensors(), *linears[i])) continue;
    if (largest_code(contents.tensors(), *linears[i]) >= upper_octaves) continue;
    findings.fault(linears[i]->path,
                   concat("has no code beyond ", f32_from_e4m3(static_cast<uint8_t>(shares[i].largest)),
                          " of 448, though its scales are not 1: codes of another type (E5M2?)"));
  }
}

// ---- scales of activations ----

constexpr std::string_view activations[] = {".input_scale", ".activation_scale", ".input_global_scale"};

void scales_of_inputs(const StoredContents& contents, ContentsFindings& findings) {
  const auto& tensors = contents.tensors();
  std::map<std::string_view, size_t> held;
  for (const auto& [name, info] : tensors.tensors()) {
    const auto suffix = std::ranges::find_if(activations, [&](std::string_view end) { return name.ends_with(end); });
    if (suffix == std::end(activations) || !is_weight_dtype(info.dtype)) continue;
    ++held[*suffix];
    const auto loaded = tensors.load(name);
    std::vector<float> values(static_cast<size_t>(element_count(info.shape)));
    widen(loaded->bytes, loaded->dtype, values);
    const auto bad = std::ranges::find_if(values, [](float value) { return !(value > 0) || !std::isfinite(value); });
    if (bad != values.end()) findings.fault(name, concat("is ", *bad, ": a scale of inputs must be positive"));
  }
  // Where all but one have it, it was lost.
  for (const auto& [suffix, count] : held) {
    std::vector<std::string> without;
    for (const auto& linear : contents.linears()) {
      if (linear.kind == Kind::plain || linear.experts > 0) continue;
      if (!tensors.contains(concat(linear.path, suffix))) without.push_back(linear.path);
    }
    if (without.size() == 1 && count > fewest_peers)
      findings.fault(concat(without.front(), suffix), "is missing: all other packed linears have theirs");
  }
}

// ---- files and config.json ----

void adapters(const StoredContents& contents, ContentsFindings& findings) {
  const auto& tensors = contents.tensors().tensors();
  constexpr std::string_view parts[] = {".lora_A",
                                        ".lora_magnitude_vector",
                                        ".lora_embedding_A",
                                        ".base_layer.",
                                        ".modules_to_save.",
                                        ".hada_w1_a",
                                        ".lokr_w1",
                                        ".ia3_l",
                                        ".oft_r",
                                        ".vera_lambda_b"};
  const auto first = std::ranges::find_if(tensors, [&](const auto& entry) {
    return std::ranges::any_of(parts, [&](auto part) { return entry.first.find(part) != std::string::npos; });
  });
  // Of models whose adapters are a part of them (Phi-4-multimodal) config.json says so.
  const bool stated = std::ranges::any_of(contents.config().items(), [](const auto& entry) {
    return entry.key().find("lora") != std::string::npos && entry.value().is_object();
  });
  if (first != tensors.end() && !stated)
    findings.fault(first->first, "is an adapter's that was not merged: programs that do not know it leave it out");
  if (io::path_exists(contents.tensors().folder() / "adapter_config.json"))
    findings.fault("adapter_config.json", "lies beside the model: some programs add the adapter to it, others do not");
}

void shards_twice(const StoredContents& contents, ContentsFindings& findings) {
  for (const auto& warning : contents.tensors().warnings()) {
    const bool unlisted = warning.find(" that the index does not list") != std::string::npos;
    if (warning.find(" in another file, ") != std::string::npos ||
        (unlisted && !contents.quantization().is_object())) {  // of packed ones the conventions say it
      findings.faults.push_back(warning);
    }
  }
}

/// Tokens that the model begins and ends with have rows.
void tokens_in_range(const StoredContents& contents, ContentsFindings& findings) {
  int64_t rows = 0;
  for (const auto& linear : contents.linears()) {
    if (model::is_embedding(linear.path) && model::layer_numbers(linear.path).layer < 0)
      rows = std::max(rows, linear.n);
  }
  if (rows == 0) return;
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    const io::Json& stated = contents.stated({key});
    for (const io::Json& id : stated.is_array() ? stated : io::Json::array({stated})) {
      if (!id.is_number_integer() || id.get<int64_t>() < rows) continue;
      findings.fault("config.json",
                     concat("says ", key, " ", id.get<int64_t>(), ", the embeddings have ", rows, " rows"));
    }
  }
}

}  // namespace

std::span<const ContentsRule> peer_rules() {
  static constexpr ContentsRule rules[] = {
      {"no tensor of a layer stands twice", false, layers_twice},
      {"no role holds another's tensor", false, roles_twice},
      {"no layer lacks one tensor that all others have", false, one_missing},
      {"matrices in 16 bit have the size of their role", false, sizes_of_plain},
      {"codes have signs and reach the end of their range", true, codes_of_floats},
      {"scales of inputs are positive and all there", false, scales_of_inputs},
      {"adapters are merged", false, adapters},
      {"no tensor lies in two files", false, shards_twice},
      {"tokens that begin and end have rows", false, tokens_in_range},
  };
  return rules;
}

}  // namespace w4q::verify
