// Packed linears: planes in the wrong place, read the wrong way, or of another weight.
#include <algorithm>
#include <numeric>

#include "audit/faults.h"
#include "core/text.h"
#include "formats/integer.h"
#include "formats/rotation.h"

namespace w4q::audit {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;

constexpr const char* codes_group = "packed weights";

// ---- whole planes ----

/// Exchanges those planes of two linears whose names end in `suffix` (empty: all), where types and shapes are the same.
bool exchange_planes(Subject& s, const std::string& a, const std::string& b, std::string_view suffix = {}) {
  if (a.empty() || b.empty()) return false;
  bool any = false;
  for (const auto& name : s.planes(a)) {
    const std::string other = b + name.substr(a.size());
    if (!name.ends_with(suffix)) continue;
    if (!s.copy.has(other) || !s.exchange(name, other)) return false;
    any = true;
  }
  return any;
}

bool exchange_siblings(Subject& s, std::string_view one, std::string_view two) {
  const std::string first = s.linear(one);
  if (first.empty()) return false;
  const std::string second = first.substr(0, first.size() - one.size()) + std::string(two);
  return s.quantization().find(second) != nullptr && exchange_planes(s, first, second);
}

/// The codes alone, or all but the codes, by value.
bool exchange_values(Subject& s, bool codes) {
  const auto [a, b] = s.two_layers();
  if (a.empty()) return false;
  auto one = s.load(a).passes.front().clone(), two = s.load(b).passes.front().clone();
  for (auto& plane : one.planes) {
    if ((plane.spec.role == PlaneRole::codes) == codes) std::swap(plane.bytes, two.plane(plane.spec.role).bytes);
  }
  return s.store(a, one) && s.store(b, two);
}

// ---- codes ----

using Codes = std::vector<uint8_t>;

/// Codes (row, col) come from where `from` says; `from` may exchange and repeat.
bool move_codes(Subject& s,
                const std::function<std::pair<int64_t, int64_t>(int64_t, int64_t, int64_t n, int64_t k)>& from) {
  return s.edit_some([&](PackedWeight& weight) {
    const Codes before = codes_of(weight);
    Codes after(before.size());
    for (int64_t row = 0; row < weight.n; ++row) {
      for (int64_t col = 0; col < weight.k; ++col) {
        const auto [r, c] = from(row, col, weight.n, weight.k);
        after[static_cast<size_t>(row * weight.k + col)] = before[static_cast<size_t>(r * weight.k + c)];
      }
    }
    set_codes(weight, after);
    return true;
  });
}

bool map_codes(Subject& s, const std::function<uint32_t(uint32_t code, int bits, uint64_t index)>& how) {
  return s.edit_some([&](PackedWeight& weight) {
    Codes codes = codes_of(weight);
    const uint32_t mask = (1u << weight.scheme.bits) - 1;
    for (size_t i = 0; i < codes.size(); ++i) {
      codes[i] = static_cast<uint8_t>(how(codes[i], weight.scheme.bits, i) & mask);
    }
    set_codes(weight, codes);
    return true;
  });
}

uint32_t reversed_bits(uint32_t code, int bits) {
  uint32_t result = 0;
  for (int bit = 0; bit < bits; ++bit) result |= (code >> bit & 1) << (bits - 1 - bit);
  return result;
}

// ---- scales, zeros, tables ----

bool map_scales(Subject& s, const std::function<void(std::vector<float>& scales, int64_t n)>& how) {
  return s.edit_some([&](PackedWeight& weight) {
    if (!has_plain_scales(weight)) return false;
    auto scales = scales_of(weight);
    how(scales, weight.n);
    set_scales(weight, scales);
    return true;
  });
}

bool times(Subject& s, float factor) {
  return map_scales(s, [factor](std::vector<float>& scales, int64_t) {
    for (float& scale : scales) scale *= factor;
  });
}

bool all_times(Subject& s, float factor) {
  bool any = false;
  for (const auto& linear : s.linears()) {
    any = s.edit(linear, [factor](PackedWeight& weight) {
      if (!has_plain_scales(weight)) return false;
      auto scales = scales_of(weight);
      for (float& scale : scales) scale *= factor;
      set_scales(weight, scales);
      return true;
    }) || any;
  }
  return any;
}

PackedWeight* with_plane(PackedWeight& weight, PlaneRole role) {
  return std::ranges::any_of(weight.planes, [&](const auto& plane) { return plane.spec.role == role; }) ? &weight
                                                                                                        : nullptr;
}

bool map_table(Subject& s, const std::function<void(std::span<float>)>& how) {
  return s.edit_some([&](PackedWeight& weight) {
    if (with_plane(weight, PlaneRole::codebook) == nullptr) return false;
    how(weight.plane(PlaneRole::codebook).bytes.as<float>());
    return true;
  });
}

bool map_zeros(Subject& s, const std::function<int(int zero, int bits)>& how) {
  return s.edit_some([&](PackedWeight& weight) {
    if (with_plane(weight, PlaneRole::zeros) == nullptr) return false;
    const int largest = (1 << weight.scheme.bits) - 1;
    for (uint8_t& zero : weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()) {
      zero = static_cast<uint8_t>(std::clamp(how(zero, weight.scheme.bits), 0, largest));
    }
    return true;
  });
}

bool map_index(Subject& s, const std::function<void(std::span<int32_t>)>& how) {
  return s.edit_some([&](PackedWeight& weight) {
    if (with_plane(weight, PlaneRole::group_index) == nullptr) return false;
    how(weight.plane(PlaneRole::group_index).bytes.as<int32_t>());
    return true;
  });
}

// ---- what stands beside ----

bool map_input_scale(Subject& s, const std::function<void(std::vector<float>&)>& how) {
  std::vector<std::string> with;
  for (const auto& linear : s.linears()) {
    if (s.copy.has(linear + ".input_scale")) with.push_back(linear + ".input_scale");
  }
  if (with.empty()) return false;
  s.edit_values(s.pick(with), how);
  return true;
}

std::string with_passes(Subject& s) {
  const std::string linear = s.linear();
  return linear.empty() || s.quantization().find(linear)->passes.size() < 2 ? std::string{} : linear;
}

bool exchange_passes(Subject& s) {
  const std::string linear = with_passes(s);
  if (linear.empty()) return false;
  bool any = false;
  for (const char* role : {".scales", ".codebook", ".codes"})
    any = s.exchange(linear + ".0" + role, linear + ".1" + role) || any;
  return any;
}

bool take_other_linear(Subject& s, std::string_view suffix) {
  const std::string linear = s.linear();
  if (linear.empty()) return false;
  for (const auto& name : s.planes(linear)) {
    const auto other = s.specimen.other_copy.tensors.find(name);
    if (!name.ends_with(suffix)) continue;
    if (other == s.specimen.other_copy.tensors.end() || other->second.shape != s.copy.at(name).shape) return false;
    s.copy.at(name).bytes = other->second.bytes;
  }
  return true;
}

/// The words that hold a linear's codes, in whatever tensor: the largest of its planes.
Tensor* words_of(Subject& s) {
  const std::string linear = s.linear();
  if (linear.empty()) return nullptr;
  Tensor* largest = nullptr;
  for (const auto& name : s.planes(linear)) {
    Tensor& tensor = s.copy.at(name);
    if (largest == nullptr || tensor.bytes.size() > largest->bytes.size()) largest = &tensor;
  }
  return largest;
}

}  // namespace

Faults packed_faults() {
  return {
      {codes_group, "a linear and the same of another layer are exchanged",
       [](Subject& s) {
         const auto [a, b] = s.two_layers();
         return exchange_planes(s, a, b);
       }},
      {codes_group, "a linear holds what is another layer's",
       [](Subject& s) {
         const auto [a, b] = s.two_layers();
         if (a.empty()) return false;
         for (const auto& name : s.planes(a)) {
           const std::string other = b + name.substr(a.size());
           if (!s.copy.has(other) || s.copy.at(other).shape != s.copy.at(name).shape) return false;
           s.copy.at(name).bytes = s.copy.at(other).bytes;
         }
         return true;
       }},
      {codes_group, "queries and outputs are exchanged",
       [](Subject& s) { return exchange_siblings(s, ".q_proj", ".o_proj"); }},
      {codes_group, "keys and values are exchanged",
       [](Subject& s) { return exchange_siblings(s, ".k_proj", ".v_proj"); }},
      {codes_group, "gate and up are exchanged",
       [](Subject& s) { return exchange_siblings(s, ".gate_proj", ".up_proj"); }},
      {codes_group, "codes of two layers are exchanged", [](Subject& s) { return exchange_values(s, true); }},
      {codes_group, "all but the codes of two layers is exchanged",
       [](Subject& s) { return exchange_values(s, false); }},
      {codes_group, "a linear is another model's", [](Subject& s) { return take_other_linear(s, {}); }},
      {codes_group, "codes are another model's",
       [](Subject& s) {
         const std::string linear = s.linear();
         return s.edit(linear, [&](PackedWeight& weight) {
           const auto other = s.load(linear, true);
           if (other.passes.front().scheme != weight.scheme) return false;
           set_codes(weight, codes_of(other.passes.front()));
           return true;
         });
       }},
      {codes_group, "halves of the outputs are exchanged",
       [](Subject& s) {
         return s.edit_some([](PackedWeight& weight) {
           Codes codes = codes_of(weight);
           std::ranges::rotate(codes, codes.begin() + static_cast<int64_t>(codes.size() / 2));
           set_codes(weight, codes);
           if (!has_plain_scales(weight)) return true;
           auto scales = scales_of(weight);
           std::ranges::rotate(scales, scales.begin() + static_cast<int64_t>(scales.size() / 2));
           set_scales(weight, scales);
           return true;
         });
       }},
      {codes_group, "halves of the inputs are exchanged",
       [](Subject& s) {
         return move_codes(s, [](int64_t r, int64_t c, int64_t, int64_t k) { return std::pair(r, (c + k / 2) % k); });
       }},
      {codes_group, "codes are transposed",
       [](Subject& s) {
         return move_codes(s, [](int64_t r, int64_t c, int64_t n, int64_t k) {
           const int64_t at = c * n + r;
           return std::pair(at / k, at % k);
         });
       }},
      {codes_group, "rows of codes are reversed",
       [](Subject& s) {
         return move_codes(s, [](int64_t r, int64_t c, int64_t n, int64_t) { return std::pair(n - 1 - r, c); });
       }},
      {codes_group, "columns of codes are reversed",
       [](Subject& s) {
         return move_codes(s, [](int64_t r, int64_t c, int64_t, int64_t k) { return std::pair(r, k - 1 - c); });
       }},
      {codes_group, "codes are moved by one input",
       [](Subject& s) {
         return move_codes(s, [](int64_t r, int64_t c, int64_t, int64_t k) { return std::pair(r, (c + 1) % k); });
       }},
      {codes_group, "codes are moved by one output",
       [](Subject& s) {
         return move_codes(s, [](int64_t r, int64_t c, int64_t n, int64_t) { return std::pair((r + 1) % n, c); });
       }},
      {codes_group, "neighbouring inputs are exchanged",
       [](Subject& s) {
         return move_codes(
             s, [](int64_t r, int64_t c, int64_t, int64_t k) { return std::pair(r, std::min(c ^ 1, k - 1)); });
       }},
      {codes_group, "eights of inputs are interleaved as even and odd ones",
       [](Subject& s) {
         return move_codes(s, [](int64_t r, int64_t c, int64_t, int64_t) {
           constexpr int64_t order[] = {0, 2, 4, 6, 1, 3, 5, 7};
           return std::pair(r, c / 8 * 8 + order[c % 8]);
         });
       }},
      {codes_group, "codes are random",
       [](Subject& s) {
         return map_codes(s, [&](uint32_t, int, uint64_t) { return static_cast<uint32_t>(s.below(256)); });
       }},
      {codes_group, "codes are all zero", [](Subject& s) { return map_codes(s, [](auto...) { return 0u; }); }},
      {codes_group, "the weight is negated",
       [](Subject& s) { return map_codes(s, [](uint32_t c, auto...) { return ~c; }); }},
      {codes_group, "codes are one too high",
       [](Subject& s) {
         return map_codes(s, [](uint32_t c, int bits, uint64_t) { return std::min(c + 1, (1u << bits) - 1); });
       }},
      {codes_group, "codes are one too high and wrap",
       [](Subject& s) { return map_codes(s, [](uint32_t c, auto...) { return c + 1; }); }},
      {codes_group, "codes have their highest bit turned",
       [](Subject& s) { return map_codes(s, [](uint32_t c, int bits, uint64_t) { return c ^ (1u << (bits - 1)); }); }},
      {codes_group, "codes have their bits in reverse",
       [](Subject& s) { return map_codes(s, [](uint32_t c, int bits, uint64_t) { return reversed_bits(c, bits); }); }},
      {codes_group, "codes have lost their lowest bit",
       [](Subject& s) { return map_codes(s, [](uint32_t c, auto...) { return c & ~1u; }); }},
      {codes_group, "scales are doubled", [](Subject& s) { return times(s, 2); }},
      {codes_group, "scales are halved", [](Subject& s) { return times(s, 0.5f); }},
      {codes_group, "scales are zero", [](Subject& s) { return times(s, 0); }},
      {codes_group, "scales of all linears are doubled", [](Subject& s) { return all_times(s, 2); }},
      {codes_group, "scales of all linears are zero", [](Subject& s) { return all_times(s, 0); }},
      {codes_group, "scales are all the first one",
       [](Subject& s) {
         return map_scales(s, [](std::vector<float>& scales, int64_t) { std::ranges::fill(scales, scales.front()); });
       }},
      {codes_group, "scales are moved by one",
       [](Subject& s) {
         return map_scales(
             s, [](std::vector<float>& scales, int64_t) { std::ranges::rotate(scales, scales.begin() + 1); });
       }},
      {codes_group, "scales are in reverse",
       [](Subject& s) {
         return map_scales(s, [](std::vector<float>& scales, int64_t) { std::ranges::reverse(scales); });
       }},
      {codes_group, "scales are transposed",
       [](Subject& s) {
         return map_scales(s, [](std::vector<float>& scales, int64_t n) {
           const auto before = scales;
           const size_t rows = static_cast<size_t>(n), groups = scales.size() / rows;
           if (groups * rows != scales.size()) return;
           for (size_t i = 0; i < scales.size(); ++i) scales[i] = before[i % groups * rows + i / groups];
         });
       }},
      {codes_group, "the table is doubled",
       [](Subject& s) {
         return map_table(s, [](std::span<float> table) {
           for (float& level : table) level *= 2;
         });
       }},
      {codes_group, "two levels of the table are exchanged",
       [](Subject& s) {
         return map_table(
             s, [](std::span<float> table) { std::swap(table[table.size() / 2], table[table.size() / 2 - 1]); });
       }},
      {codes_group, "the table is in reverse",
       [](Subject& s) { return map_table(s, [](std::span<float> table) { std::ranges::reverse(table); }); }},
      {codes_group, "the table is moved by a level",
       [](Subject& s) {
         return map_table(s, [](std::span<float> table) {
           const float step = table[1] - table[0];
           std::copy(table.begin() + 1, table.end(), table.begin());
           table.back() += std::abs(step);
         });
       }},
      {codes_group, "the table is even steps",
       [](Subject& s) {
         return map_table(s, [](std::span<float> table) {
           const float first = table.front(), step = (table.back() - first) / static_cast<float>(table.size() - 1);
           for (size_t i = 0; i < table.size(); ++i) table[i] = first + static_cast<float>(i) * step;
         });
       }},
      {codes_group, "the table is zero",
       [](Subject& s) { return map_table(s, [](std::span<float> table) { std::ranges::fill(table, 0.0f); }); }},
      {codes_group, "zero points are one too high",
       [](Subject& s) { return map_zeros(s, [](int zero, int) { return zero + 1; }); }},
      {codes_group, "zero points are one too low",
       [](Subject& s) { return map_zeros(s, [](int zero, int) { return zero - 1; }); }},
      {codes_group, "zero points are the symmetric one",
       [](Subject& s) { return map_zeros(s, [](int, int bits) { return 1 << (bits - 1); }); }},
      {codes_group, "zero points are zero", [](Subject& s) { return map_zeros(s, [](int, int) { return 0; }); }},
      {codes_group, "zero points count from the other end",
       [](Subject& s) { return map_zeros(s, [](int zero, int bits) { return (1 << bits) - 1 - zero; }); }},
      {codes_group, "the group index is shuffled",
       [](Subject& s) {
         return map_index(s, [&](std::span<int32_t> index) {
           for (size_t i = index.size() - 1; i > 0; --i) std::swap(index[i], index[s.below(i + 1)]);
         });
       }},
      {codes_group, "the group index is in order",
       [](Subject& s) { return map_index(s, [](std::span<int32_t> index) { std::ranges::sort(index); }); }},
      {codes_group, "the group index is zero",
       [](Subject& s) { return map_index(s, [](std::span<int32_t> index) { std::ranges::fill(index, 0); }); }},
      {codes_group, "the group index names no group",
       [](Subject& s) { return map_index(s, [](std::span<int32_t> index) { index[3] = 1000; }); }},
      {codes_group, "the input scale is upside down",
       [](Subject& s) {
         return map_input_scale(s, [](std::vector<float>& values) {
           for (float& value : values) value = 1 / value;
         });
       }},
      {codes_group, "the input scale is all ones",
       [](Subject& s) { return map_input_scale(s, [](auto& values) { std::ranges::fill(values, 1.0f); }); }},
      {codes_group, "the input scale's channels are moved by one",
       [](Subject& s) {
         return map_input_scale(s, [](auto& values) { std::ranges::rotate(values, values.begin() + 1); });
       }},
      {codes_group, "the input scale has a zero",
       [](Subject& s) { return map_input_scale(s, [](auto& values) { values[5] = 0; }); }},
      {codes_group, "two passes are exchanged", exchange_passes},
      {codes_group, "the second pass is another layer's",
       [](Subject& s) {
         const auto [a, b] = s.two_layers();
         if (a.empty() || s.quantization().find(a)->passes.size() < 2) return false;
         for (const char* role : {".1.codes", ".1.scales"}) s.copy.at(a + role).bytes = s.copy.at(b + role).bytes;
         return true;
       }},
      {codes_group, "the second pass of a linear is missing",
       [](Subject& s) {
         const std::string linear = with_passes(s);
         return !linear.empty() && std::erase_if(s.copy.tensors, [&](const auto& entry) {
                                     return entry.first.starts_with(linear + ".1.");
                                   }) > 0;
       }},
      {codes_group, "the second pass is negated",
       [](Subject& s) {
         const std::string linear = with_passes(s);
         if (linear.empty()) return false;
         auto loaded = s.load(linear);
         auto codes = codes_of(loaded.passes[1]);
         for (uint8_t& code : codes) code = static_cast<uint8_t>((1u << loaded.passes[1].scheme.bits) - 1 - code);
         PackedWeight pass = loaded.passes[1].clone();
         set_codes(pass, codes);
         return s.store(linear, pass, 1);
       }},
      {codes_group, "words are those of a big-endian machine",
       [](Subject& s) {
         Tensor* words = words_of(s);
         if (words == nullptr) return false;
         for (size_t i = 0; i + 3 < words->bytes.size(); i += 4)
           std::reverse(words->bytes.begin() + static_cast<int64_t>(i),
                        words->bytes.begin() + static_cast<int64_t>(i) + 4);
         return true;
       }},
      {codes_group, "words are moved by one",
       [](Subject& s) {
         Tensor* words = words_of(s);
         if (words == nullptr) return false;
         std::ranges::rotate(words->bytes, words->bytes.begin() + 4);
         return true;
       }},
      {codes_group, "words have their nibbles exchanged",
       [](Subject& s) {
         Tensor* words = words_of(s);
         if (words == nullptr) return false;
         for (std::byte& byte : words->bytes) byte = byte << 4 | byte >> 4;
         return true;
       }},
      {codes_group, "words are written as halves of a page are",
       [](Subject& s) {
         Tensor* words = words_of(s);
         if (words == nullptr || words->bytes.size() < 8192) return false;
         std::swap_ranges(words->bytes.begin(), words->bytes.begin() + 4096, words->bytes.begin() + 4096);
         return true;
       }},
      {codes_group, "the second half of the words is zero",
       [](Subject& s) {
         Tensor* words = words_of(s);
         if (words == nullptr) return false;
         std::fill(words->bytes.begin() + static_cast<int64_t>(words->bytes.size() / 2), words->bytes.end(),
                   std::byte{0});
         return true;
       }},
      {codes_group, "words are bytes of a text",
       [](Subject& s) {
         Tensor* words = words_of(s);
         if (words == nullptr) return false;
         for (size_t i = 0; i < words->bytes.size(); ++i)
           words->bytes[i] = static_cast<std::byte>("lorem ipsum dolor sit amet "[i % 27]);
         return true;
       }},
      {codes_group, "words are unpacked as another linear's shape",
       [](Subject& s) {
         Tensor* words = words_of(s);
         if (words == nullptr) return false;
         const auto before = words->bytes;
         const size_t rows = 32, width = before.size() / rows / 4;
         for (size_t i = 0; i < rows * width; ++i)
           std::copy_n(before.begin() + static_cast<int64_t>((i % rows * width + i / rows) * 4), 4,
                       words->bytes.begin() + static_cast<int64_t>(i * 4));
         return true;
       }},
  };
}

}  // namespace w4q::audit
