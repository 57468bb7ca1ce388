// The gated delta rule for many rows: chunks of 64, in which what rows are to each other is known before the state is. With
// G_i the sum of the logarithms of a chunk's decays up to row i, β its rates, S the state before the chunk:
//   A_ij = β_i e^(G_i − G_j) k_i·k_j for j < i, P_ij = e^(G_i − G_j) q_i·k_j for j ≤ i
//   U = (I + A)⁻¹ β (V − e^G K S), out = e^G Q S + P U, S ← e^(G_last) S + Σ_j e^(G_last − G_j) k_j ⊗ u_j
// (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length".) (I + A)⁻¹ β and P are made
// for all chunks at once; then a block follows the sequence with 32 columns of a head's state. Keys, queries and these two
// are f16, none of them above one; values, U and the state are rounded to tf32 where they are multiplied, and kept in fp32.
#pragma once

#include "kernels/delta_net/delta_net_cuda.h"

namespace w4q::kernels {

/// Heads of 64 or 128 keys, value channels in 32s, an even number of heads; from 32 rows on.
bool takes_delta_chunks(const DeltaShape& shape, int64_t rows) noexcept;

/// The rule between what is prepared and the norm: reads mixed and rates of the scratch, writes outs and the state.
void delta_chunks_cuda(const DeltaNetArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
