// Code tables of kbit: ascending fp32 values, scaled so that the largest magnitude is 1.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::formats {

/// Widths of codes that tables are made for.
inline constexpr int table_min_bits = 2;
inline constexpr int table_max_bits = 5;

struct CodebookRow {
  std::string_view name;
  std::string_view description;
  std::vector<float> (*table)(int bits);  ///< bits 2..5
};

/// "nf" (expected values of N(0,1) in 2^bits equiprobable bins) and "nf-quantile" (bitsandbytes' table).
std::span<const CodebookRow> codebook_registry() noexcept;
/// The Lloyd–Max quantizer of N(0, 1) with 2^bits levels, bits 2 … 5: what rotated's codebook is unless
/// told otherwise.
std::span<const float> normal_codebook(int bits) noexcept;
/// The largest magnitude of a table.
float table_max(std::span<const float> codebook) noexcept;
/// A table by name. Throws bad_argument and lists the names.
std::vector<float> codebook(std::string_view name, int bits);
/// Checks a table: 2^bits finite values, strictly ascending by at least 2^-20 of the largest magnitude. Throws bad_file
/// naming `source` and the entry.
void check_codebook(std::span<const float> table, int bits, std::string_view source);
/// A table from text: numbers separated by white space or commas, or a JSON array. Scaled to largest magnitude 1.
std::vector<float> parse_codebook(std::string_view text, int bits, std::string_view source);

}  // namespace w4q::formats
