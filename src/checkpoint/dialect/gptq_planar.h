// GPTQModel's planes of bits ("gptq_p"): 32 codes of 3 bits stand in three words of a column as two words of their two
// low bits and one of their high bits. Types and shapes are those of GPTQ's stream, so only a config's word or the
// codes themselves tell the two apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace w4q::checkpoint {

/// The evidence that 3-bit words, I32 [k / 32 · 3, n] at any alignment, hold planes and not streams; empty: they do
/// not. Weights are more often small than large, so codes read rightly keep together; read the other way they are
/// spread like random numbers. Codes that are spread anyway raise no suspicion.
std::string planar_evidence(std::span<const std::byte> words, int64_t n, int64_t k);

}  // namespace w4q::checkpoint
