// GGUF's blocks of lattice points (IQ2_XXS to IQ3_S) taken apart: for whoever searches points and scales.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/ggml_type.h"

namespace w4q::formats {

inline constexpr int lattice_block = 256;

/// How a type stores 256 weights: `width` magnitudes at a time are a point of a table, times d · (first + step · scale) of
/// `part` weights; signs apart.
struct GgufLattice {
  GgmlType type;
  int width = 8;                     ///< weights of a point
  int bits = 2;                      ///< of a magnitude in a point, the first weight's lowest
  std::span<const uint16_t> points;  ///< by their codes
  std::span<const float> levels;     ///< of magnitudes, ascending
  bool even_signs = false;           ///< of each eight weights an even number is negative
  int part = 32;                     ///< weights that share a scale of 4 bits
  float first = 0.5f, step = 1;

  int groups() const noexcept { return lattice_block / width; }
  int parts() const noexcept { return lattice_block / part; }
  float multiple(int scale) const noexcept { return first + step * static_cast<float>(scale); }
  float level(int code, int weight) const noexcept {
    return levels[points[static_cast<size_t>(code)] >> (bits * weight) & ((1u << bits) - 1)];
  }
};

inline constexpr int lattice_scales = 16;

/// Null for a type that is not made of points.
const GgufLattice* find_gguf_lattice(GgmlType type) noexcept;
std::span<const GgufLattice> gguf_lattices() noexcept;

/// What a block says. `d` is an f16.
struct LatticeBlock {
  float d = 0;
  std::array<uint8_t, 16> scales{};   ///< 0 … 15, of each part
  std::array<uint16_t, 64> points{};  ///< codes
  std::array<uint8_t, 32> signs{};    ///< of eight weights each, the first one lowest
};

/// `bytes` is one block of the type.
void store_lattice_block(const GgufLattice& lattice, const LatticeBlock& block, std::span<std::byte> bytes);

}  // namespace w4q::formats
