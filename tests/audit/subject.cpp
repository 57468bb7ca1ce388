#include "audit/subject.h"

#include <algorithm>

#include "checkpoint/dialect/dialect.h"
#include "core/rng.h"
#include "core/text.h"
#include "formats/integer_recast.h"
#include "formats/scale_codec.h"
#include "kbit_samples.h"
#include "model/model.h"
#include "repack/layout_registry.h"

namespace w4q::audit {

using formats::PackedWeight;
using formats::PlaneRole;

namespace {

uint64_t seed_of(std::string_view variant, std::string_view fault) {
  const std::string text = concat(variant, " ", fault);
  return test::fingerprint(std::as_bytes(std::span(text))) & 0xFFFF'FFFF;
}

}  // namespace

Subject::Subject(const Specimen& made, std::string_view fault)
    : specimen(made), copy(made.copy), seed_(seed_of(made.row->name, fault)) {}

uint64_t Subject::below(uint64_t bound) { return random_bits(seed_, drawn_++) % bound; }

std::vector<std::string> Subject::linears(std::string_view suffix) const {
  std::vector<std::string> names;
  for (const auto& [name, info] : quantization().linears) {
    if (name.find(".layers.") != std::string::npos && name.ends_with(suffix)) names.push_back(name);
  }
  return names;
}

std::string Subject::linear(std::string_view suffix) {
  const auto names = linears(suffix);
  return names.empty() ? std::string{} : pick(names);
}

std::pair<std::string, std::string> Subject::two_layers(std::string_view suffix) {
  const std::string first = linear(suffix);
  if (first.empty()) return {};
  const auto others = linears(first.substr(first.find('.', first.find(".layers.") + 8)));
  if (others.size() < 2) return {};
  const size_t at = static_cast<size_t>(std::ranges::find(others, first) - others.begin());
  return {first, others[(at + 1 + below(others.size() - 1)) % others.size()]};
}

std::vector<std::string> Subject::planes(const std::string& linear) const {
  std::vector<std::string> names;
  for (const auto& plane : checkpoint::planned_planes(*quantization().find(linear))) {
    if (copy.has(plane.name)) names.push_back(plane.name);
  }
  return names;
}

std::vector<std::string> Subject::kept(std::string_view part) const {
  std::vector<std::string> names;
  for (const auto& parameter : model::parameters(config())) {
    if (copy.has(parameter.name) && quantization().find(model::module_path(parameter.name)) == nullptr &&
        parameter.name.find(part) != std::string::npos) {
      names.push_back(parameter.name);
    }
  }
  return names;
}

formats::PackedLinear Subject::load(const std::string& linear, bool of_other) const {
  const auto& folder = of_other ? specimen.other.folder : specimen.sound.folder;
  return checkpoint::load_canonical(folder.tensors, *folder.quantization.find(linear));
}

bool Subject::store(const std::string& linear, const PackedWeight& canonical, size_t pass) {
  const auto& info = *quantization().find(linear);
  if (info.dialect == nullptr) {
    put_planes(copy, linear, pass, repack::layout_row(info.passes[pass].layout).pack(canonical));
    return true;
  }
  auto plain = info;
  plain.dialect = nullptr;
  const auto fit = info.dialect->fit(plain);
  if (!fit.scheme) return false;
  PackedWeight weight = canonical.clone();
  if (weight.scheme != *fit.scheme) {
    if (!formats::integer_recast_loss(weight, *fit.scheme).empty()) return false;
    weight = formats::integer_recast(weight, *fit.scheme, linear);
  }
  if (info.dialect->refuses != nullptr && !info.dialect->refuses(weight).empty()) return false;
  for (const auto& stored : info.dialect->encode(weight)) {
    Tensor& tensor = copy.at(linear + stored.spec.suffix);
    const auto bytes = stored.bytes.bytes();
    tensor.bytes.assign(bytes.begin(), bytes.end());
  }
  return true;
}

bool Subject::edit(const std::string& linear, const std::function<bool(PackedWeight&)>& change) {
  if (linear.empty()) return false;
  auto loaded = load(linear);
  PackedWeight weight = loaded.passes.front().clone();
  return change(weight) && store(linear, weight);
}

bool Subject::edit_some(const std::function<bool(PackedWeight&)>& change, std::string_view suffix) {
  return edit(linear(suffix), change);
}

void Subject::edit_values(const std::string& name, const std::function<void(std::vector<float>&)>& change) {
  auto values = values_of(copy.at(name));
  change(values);
  set_values(copy.at(name), values);
}

bool Subject::exchange(const std::string& a, const std::string& b) {
  Tensor &x = copy.at(a), &y = copy.at(b);
  if (x.dtype != y.dtype || x.shape != y.shape) return false;
  std::swap(x.bytes, y.bytes);
  return true;
}

namespace {

/// Calls `visit` with byte and bit of each bit of each code.
template <class Visit>
void for_each_code_bit(const PackedWeight& weight, const Visit& visit) {
  const auto& row = formats::scheme_row(weight.scheme.family);
  const auto& plane = weight.plane(PlaneRole::codes);
  const int64_t width = dtype_bits(plane.spec.dtype) / 8;
  for (int64_t r = 0; r < weight.n; ++r) {
    for (int64_t c = 0; c < weight.k; ++c) {
      for (int bit = 0; bit < weight.scheme.bits; ++bit) {
        const auto place = row.place(weight.scheme, weight.n, weight.k, r, c, bit);
        visit(static_cast<size_t>(r * weight.k + c), bit, static_cast<size_t>(place.word * width + place.bit / 8),
              place.bit % 8);
      }
    }
  }
}

}  // namespace

std::vector<uint8_t> codes_of(const PackedWeight& weight) {
  std::vector<uint8_t> codes(static_cast<size_t>(weight.n * weight.k));
  const auto bytes = weight.plane(PlaneRole::codes).bytes.as<uint8_t>();
  for_each_code_bit(weight, [&](size_t index, int bit, size_t byte, int at) {
    codes[index] = static_cast<uint8_t>(codes[index] | ((bytes[byte] >> at & 1) << bit));
  });
  return codes;
}

void set_codes(PackedWeight& weight, const std::vector<uint8_t>& codes) {
  const auto bytes = weight.plane(PlaneRole::codes).bytes.as<uint8_t>();
  for_each_code_bit(weight, [&](size_t index, int bit, size_t byte, int at) {
    const auto mask = static_cast<uint8_t>(1u << at);
    const bool one = (codes[index] >> bit & 1) != 0;
    bytes[byte] = static_cast<uint8_t>(one ? bytes[byte] | mask : bytes[byte] & ~mask);
  });
}

bool has_plain_scales(const PackedWeight& weight) { return weight.scheme.scale != formats::ScaleType::nested; }

std::vector<float> scales_of(const PackedWeight& weight) {
  const auto& plane = weight.plane(PlaneRole::scales);
  std::vector<float> scales(static_cast<size_t>(element_count(plane.spec.shape)));
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = formats::load_scale(plane, i);
  return scales;
}

void set_scales(PackedWeight& weight, const std::vector<float>& scales) {
  auto& plane = weight.plane(PlaneRole::scales);
  for (size_t i = 0; i < scales.size(); ++i) {
    formats::put_scale(plane, i, formats::store_scale(scales[i], weight.scheme.scale).bits);
  }
}

}  // namespace w4q::audit
