// Damage that a model may survive: one scale, one row, one block, one bit.
#include <algorithm>
#include <fstream>

#include "audit/faults.h"
#include "io/files.h"

namespace w4q::audit {
namespace {

namespace fs = std::filesystem;
using formats::PackedWeight;

constexpr const char* small_group = "small damage";
constexpr const char* bit_group = "one bit";

bool one_scale(Subject& s, float factor) {
  return s.edit_some([&](PackedWeight& weight) {
    if (!has_plain_scales(weight)) return false;
    auto scales = scales_of(weight);
    scales[s.below(scales.size())] *= factor;
    set_scales(weight, scales);
    return true;
  });
}

/// Changes the codes of one row.
bool one_row(Subject& s, const std::function<void(std::span<uint8_t> row, int bits)>& how) {
  return s.edit_some([&](PackedWeight& weight) {
    auto codes = codes_of(weight);
    const auto k = static_cast<size_t>(weight.k);
    how(std::span(codes).subspan(s.below(static_cast<uint64_t>(weight.n)) * k, k), weight.scheme.bits);
    set_codes(weight, codes);
    return true;
  });
}

/// Turns bit `bit` (from the highest, where negative) of one element of a tensor.
void turn_bit(Subject& s, Tensor& tensor, int bit) {
  const auto bits = static_cast<size_t>(dtype_bits(tensor.dtype));
  const size_t elements = tensor.bytes.size() * 8 / bits, element = s.below(elements);
  const size_t at = element * bits + (bit >= 0 ? static_cast<size_t>(bit) : bits - static_cast<size_t>(-bit));
  tensor.bytes[at / 8] ^= static_cast<std::byte>(1u << (at % 8));
}

bool bit_of_code(Subject& s, bool highest) {
  return s.edit_some([&](PackedWeight& weight) {
    auto codes = codes_of(weight);
    codes[s.below(codes.size())] ^= static_cast<uint8_t>(highest ? 1u << (weight.scheme.bits - 1) : 1u);
    set_codes(weight, codes);
    return true;
  });
}

bool bit_of_plane(Subject& s, std::string_view part) {
  const std::string linear = s.linear();
  if (linear.empty()) return false;
  for (const auto& name : s.planes(linear)) {
    if (name.find(part) == std::string::npos || s.copy.at(name).bytes.empty()) continue;
    turn_bit(s, s.copy.at(name), static_cast<int>(s.below(8)));
    return true;
  }
  return false;
}

bool bit_of_kept(Subject& s, std::string_view part, int bit) {
  const auto names = s.kept(part);
  if (names.empty()) return false;
  turn_bit(s, s.copy.at(s.pick(names)), bit);
  return true;
}

bool bit_of_file(Subject& s, const std::string& file, uint64_t among) {
  const uint64_t draw = s.below(1 << 30), bit = s.below(8);
  s.copy.afterwards.emplace_back([=](const fs::path& folder) {
    std::string text = io::read_file(folder / file);
    const uint64_t at = draw % (among == 0 ? text.size() : std::min<uint64_t>(among, text.size()));
    text[at] = static_cast<char>(text[at] ^ (1 << bit));
    std::ofstream(folder / file, std::ios::binary) << text;
  });
  return true;
}

}  // namespace

Faults small_faults() {
  return {
      {small_group, "one scale is doubled", [](Subject& s) { return one_scale(s, 2); }},
      {small_group, "one scale is zero", [](Subject& s) { return one_scale(s, 0); }},
      {small_group, "one scale is a thousand times as large", [](Subject& s) { return one_scale(s, 1000); }},
      {small_group, "two rows are exchanged",
       [](Subject& s) {
         return s.edit_some([&](PackedWeight& weight) {
           auto codes = codes_of(weight);
           const int64_t k = weight.k, a = static_cast<int64_t>(s.below(static_cast<uint64_t>(weight.n / 2))),
                         b = weight.n - 1 - a;
           std::swap_ranges(codes.begin() + a * k, codes.begin() + (a + 1) * k, codes.begin() + b * k);
           set_codes(weight, codes);
           return true;
         });
       }},
      {small_group, "one row is random",
       [](Subject& s) {
         return one_row(s, [&](std::span<uint8_t> row, int bits) {
           for (uint8_t& code : row) code = static_cast<uint8_t>(s.below(uint64_t{1} << bits));
         });
       }},
      {small_group, "one row is negated",
       [](Subject& s) {
         return one_row(s, [](std::span<uint8_t> row, int bits) {
           for (uint8_t& code : row) code = static_cast<uint8_t>((1 << bits) - 1 - code);
         });
       }},
      {small_group, "one row is all its first code",
       [](Subject& s) { return one_row(s, [](std::span<uint8_t> row, int) { std::ranges::fill(row, row[0]); }); }},
      {small_group, "one row is moved by one input",
       [](Subject& s) {
         return one_row(s, [](std::span<uint8_t> row, int) { std::ranges::rotate(row, row.begin() + 1); });
       }},
      {small_group, "one block's codes are one too high",
       [](Subject& s) {
         return one_row(s, [&](std::span<uint8_t> row, int bits) {
           const size_t begin = s.below(row.size() / 32) * 32;
           for (size_t i = begin; i < begin + 32; ++i) row[i] = static_cast<uint8_t>((row[i] + 1) & ((1 << bits) - 1));
         });
       }},
      {small_group, "one block's codes are zero",
       [](Subject& s) {
         return one_row(s, [&](std::span<uint8_t> row, int) {
           const size_t begin = s.below(row.size() / 32) * 32;
           for (size_t i = begin; i < begin + 32; ++i) row[i] = 0;
         });
       }},
      {small_group, "one input's codes are random",
       [](Subject& s) {
         return s.edit_some([&](PackedWeight& weight) {
           auto codes = codes_of(weight);
           const size_t k = static_cast<size_t>(weight.k), col = s.below(k);
           for (size_t at = col; at < codes.size(); at += k)
             codes[at] = static_cast<uint8_t>(s.below(uint64_t{1} << weight.scheme.bits));
           set_codes(weight, codes);
           return true;
         });
       }},
      {small_group, "a page of the words is zero",
       [](Subject& s) {
         const std::string linear = s.linear();
         if (linear.empty()) return false;
         for (const auto& name : s.planes(linear)) {
           auto& bytes = s.copy.at(name).bytes;
           if (bytes.size() < 2 * 4096) continue;
           std::fill_n(bytes.begin() + static_cast<int64_t>(s.below(bytes.size() / 4096) * 4096), 4096, std::byte{0});
           return true;
         }
         return false;
       }},
      {bit_group, "the lowest of a code", [](Subject& s) { return bit_of_code(s, false); }},
      {bit_group, "the highest of a code", [](Subject& s) { return bit_of_code(s, true); }},
      {bit_group, "one of a scale",
       [](Subject& s) { return bit_of_plane(s, "scale") || bit_of_plane(s, ".s") || bit_of_plane(s, "absmax"); }},
      {bit_group, "one of a table",
       [](Subject& s) { return bit_of_plane(s, "codebook") || bit_of_plane(s, "quant_map"); }},
      {bit_group, "one of a zero point", [](Subject& s) { return bit_of_plane(s, "zero"); }},
      {bit_group, "one of a group index",
       [](Subject& s) { return bit_of_plane(s, "g_idx") || bit_of_plane(s, "group_index"); }},
      {bit_group, "one of an input scale", [](Subject& s) { return bit_of_plane(s, "input_scale"); }},
      {bit_group, "the lowest of a norm", [](Subject& s) { return bit_of_kept(s, "norm", 0); }},
      {bit_group, "the sign of a norm", [](Subject& s) { return bit_of_kept(s, "norm", -1); }},
      {bit_group, "the exponent of a norm", [](Subject& s) { return bit_of_kept(s, "norm", -2); }},
      {bit_group, "the lowest of an embedding", [](Subject& s) { return bit_of_kept(s, "embed_tokens", 0); }},
      {bit_group, "the exponent of an embedding", [](Subject& s) { return bit_of_kept(s, "embed_tokens", -2); }},
      {bit_group, "any of a weight file",
       [](Subject& s) { return bit_of_file(s, s.copy.tensors.begin()->second.file, 0); }},
      {bit_group, "one of a weight file's header",
       [](Subject& s) { return bit_of_file(s, s.copy.tensors.begin()->second.file, 2000); }},
      {bit_group, "one of config.json", [](Subject& s) { return bit_of_file(s, "config.json", 0); }},
  };
}

}  // namespace w4q::audit
