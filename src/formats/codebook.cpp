#include "formats/codebook.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>

#include "core/error.h"
#include "core/text.h"

namespace w4q::formats {
namespace {

/// Neighbours closer than this part of the largest magnitude would not stay apart once a factor of 2^-119 is applied.
constexpr float least_gap = 0x1p-20f;

// Positive halves, in ascending order; the negative halves mirror them.
//
// "nf": E[X | X in bin] of N(0,1) cut into 2^bits equally likely bins, i.e. 2^bits · (φ(a) − φ(b)) for the bin (a, b),
// divided by the largest. Computed with 60 digits and rounded once.
constexpr float nf2[] = {0x1.058c2cp-2f, 1.0f};
constexpr float nf3[] = {0x1.88eb64p-4f, 0x1.31858ep-2f, 0x1.166026p-1f, 1.0f};
constexpr float nf4[] = {0x1.46c764p-5f, 0x1.ee49fp-4f, 0x1.a3294p-3f,  0x1.2dcf2p-2f,
                         0x1.94cddap-2f, 0x1.078ccp-1f, 0x1.58ff84p-1f, 1.0f};
constexpr float nf5[] = {0x1.1d1084p-6f, 0x1.ac7a2ap-5f, 0x1.668d1p-4f,  0x1.f929dp-4f,
                         0x1.479264p-3f, 0x1.94dd84p-3f, 0x1.e535bp-3f,  0x1.1cc5dp-2f,
                         0x1.498dacp-2f, 0x1.79cbe4p-2f, 0x1.aebcfep-2f, 0x1.ea4f2ap-2f,
                         0x1.17e9a6p-1f, 0x1.42eecep-1f, 0x1.7ea9a2p-1f, 1.0f};

// "nf-quantile": Φ⁻¹ at 2^bits equally spaced points from 0.5/2^bits to 1 − 0.5/2^bits, divided by the largest, every
// step rounded to fp32 as bitsandbytes does (docs/kbit.md). The bits matter, so they are stored and not computed.
constexpr float quantile2[] = {0x1.1ba434p-2f, 1.0f};
constexpr float quantile3[] = {0x1.a40252p-4f, 0x1.46400ap-2f, 0x1.2813eap-1f, 1.0f};
constexpr float quantile4[] = {0x1.58d86cp-5f, 0x1.04cb5ap-3f, 0x1.ba420ep-3f, 0x1.3e5dd0p-2f,
                               0x1.aad292p-2f, 0x1.159c70p-1f, 0x1.6a4676p-1f, 1.0f};
constexpr float quantile5[] = {0x1.2a00c0p-6f, 0x1.bfec62p-5f, 0x1.76d23ap-4f, 0x1.080a5ap-3f,
                               0x1.566d74p-3f, 0x1.a737b6p-3f, 0x1.fb3092p-3f, 0x1.29a952p-2f,
                               0x1.587346p-2f, 0x1.8ad7e6p-2f, 0x1.c21f04p-2f, 0x1.002330p-1f,
                               0x1.2459e4p-1f, 0x1.5106b2p-1f, 0x1.8e63b8p-1f, 1.0f};

// "normal": Lloyd–Max for N(0, 1), 200 rounds of centroids and midpoints from equal bins on [−3.5, 3.5] on, in double,
// rounded once. TurboQuant's files hold the same numbers.
constexpr float normal2[] = {0x1.cfa592p-2f, 0x1.82aabap+0f};
constexpr float normal3[] = {0x1.f5f3fp-3f, 0x1.83132p-1f, 0x1.580a7p+0f, 0x1.1372f4p+1f};
constexpr float normal4[] = {0x1.071bf8p-3f, 0x1.8d971p-2f, 0x1.507122p-1f, 0x1.e2b69cp-1f,
                             0x1.41bb24p+0f, 0x1.9e5d3p+0f, 0x1.08e7a4p+1f, 0x1.5dd58p+1f};
constexpr float normal5[] = {0x1.28fc76p-4f, 0x1.be0754p-3f, 0x1.749fa8p-2f, 0x1.05d914p-1f,
                             0x1.52798ap-1f, 0x1.a0a06p-1f,  0x1.f0d932p-1f, 0x1.21ec92p+0f,
                             0x1.4d496ep+0f, 0x1.7b2b62p+0f, 0x1.ac855p+0f,  0x1.e2c9p+0f,
                             0x1.1029e6p+1f, 0x1.34ba24p+1f, 0x1.63bebap+1f, 0x1.ab5b3ap+1f};

constexpr std::span<const float> nf_halves[] = {nf2, nf3, nf4, nf5};
constexpr std::span<const float> quantile_halves[] = {quantile2, quantile3, quantile4, quantile5};

std::vector<float> mirrored(std::span<const float> half) {
  std::vector<float> table;
  table.reserve(2 * half.size());
  std::for_each(half.rbegin(), half.rend(), [&](float value) { table.push_back(-value); });
  table.insert(table.end(), half.begin(), half.end());
  return table;
}

/// Scaled as all are.
std::vector<float> normal(int bits) {
  const std::span<const float> levels = normal_codebook(bits);
  std::vector<float> table(levels.begin(), levels.end());
  for (float& level : table) level /= levels.back();
  return table;
}

constexpr CodebookRow rows[] = {
    {"nf", "expected values of N(0,1) in 2^bits equally likely bins",
     [](int bits) { return mirrored(nf_halves[bits - table_min_bits]); }},
    {"nf-quantile", "quantiles of N(0,1) at bin centres, bitsandbytes' constants",
     [](int bits) { return mirrored(quantile_halves[bits - table_min_bits]); }},
    {"normal", "Lloyd-Max levels of N(0,1): least squared error once a weight's scale is its group's norm", normal},
};

void check_bits(int bits) {
  if (bits >= table_min_bits && bits <= table_max_bits) return;
  throw Error(ErrorCode::bad_argument, concat("there are no tables for codes of ", bits, " bits"))
      .detail(concat("expected ", table_min_bits, " … ", table_max_bits));
}

bool is_separator(char c) noexcept {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == ',' || c == '[' || c == ']';
}

/// The number that `text` starts with; moves `text` behind it.
double parse_number(std::string_view& text, size_t index, std::string_view source) {
  const auto end = std::find_if(text.begin(), text.end(), is_separator);
  const std::string_view token = text.substr(0, static_cast<size_t>(end - text.begin()));
  double value = 0;
  const auto [stop, error] = std::from_chars(token.data(), token.data() + token.size(), value);
  if (error != std::errc{} || stop != token.data() + token.size() || !std::isfinite(value)) {
    throw Error(ErrorCode::bad_file, concat(printable(source), ": entry ", index, " is not a finite number"))
        .detail(concat("found \"", printable(token.substr(0, 32)), "\""));
  }
  text.remove_prefix(token.size());
  return value;
}

}  // namespace

std::span<const CodebookRow> codebook_registry() noexcept { return rows; }

std::span<const float> normal_codebook(int bits) noexcept {
  static const std::vector<float> tables[] = {mirrored(normal2), mirrored(normal3), mirrored(normal4),
                                              mirrored(normal5)};
  return tables[bits - table_min_bits];
}

float table_max(std::span<const float> codebook) noexcept {
  float largest = 0;
  for (const float entry : codebook) largest = std::max(largest, std::abs(entry));
  return largest;
}

std::vector<float> codebook(std::string_view name, int bits) {
  check_bits(bits);
  std::vector<std::string> names;
  for (const CodebookRow& row : rows) {
    if (row.name == name) return row.table(bits);
    names.emplace_back(row.name);
  }
  throw Error(ErrorCode::bad_argument, concat("unknown codebook \"", printable(name), "\""))
      .detail("known: " + join(names));
}

void check_codebook(std::span<const float> table, int bits, std::string_view source) {
  check_bits(bits);
  const size_t expected = size_t{1} << bits;
  if (table.size() != expected) {
    throw Error(ErrorCode::bad_file, concat(printable(source), ": wrong number of table entries"))
        .detail(concat("expected ", expected, " for ", bits, " bits, got ", table.size()));
  }
  for (size_t i = 0; i < table.size(); ++i) {
    if (std::isfinite(table[i])) continue;
    throw Error(ErrorCode::bad_file, concat(printable(source), ": table entry ", i, " is not finite"));
  }
  const float largest = table_max(table);
  for (size_t i = 1; i < table.size(); ++i) {
    // In double: the difference of two floats near the ends of the range is exact enough and cannot overflow.
    const double gap = static_cast<double>(table[i]) - static_cast<double>(table[i - 1]);
    if (gap > 0 && gap >= static_cast<double>(least_gap) * largest) continue;
    throw Error(ErrorCode::bad_file, concat(printable(source), ": table entries ", i - 1, " and ", i,
                                            gap > 0 ? " are too close" : " do not ascend"))
        .detail(concat(table[i - 1], " is followed by ", table[i]));
  }
}

std::vector<float> parse_codebook(std::string_view text, int bits, std::string_view source) {
  check_bits(bits);
  const size_t expected = size_t{1} << bits;
  std::vector<double> values;
  while (true) {
    text.remove_prefix(static_cast<size_t>(std::find_if_not(text.begin(), text.end(), is_separator) - text.begin()));
    if (text.empty()) break;
    if (values.size() == expected) {
      throw Error(ErrorCode::bad_file, concat(printable(source), ": more than ", expected, " table entries"))
          .hint(concat("a table for ", bits, " bits has exactly ", expected));
    }
    values.push_back(parse_number(text, values.size(), source));
  }
  double largest = 0;
  for (double value : values) largest = std::max(largest, std::abs(value));
  if (largest == 0) largest = 1;  // refused below
  std::vector<float> table(values.size());
  std::ranges::transform(values, table.begin(), [&](double value) { return static_cast<float>(value / largest); });
  check_codebook(table, bits, source);
  return table;
}

}  // namespace w4q::formats
