// Where things stand in the scratch of several rows of a delta net.
#pragma once

#include "kernels/delta_net/delta_net_cuda.h"

namespace w4q::kernels {

struct Rows {
  const DeltaShape& shape;
  float* const mixed;  ///< [rows × channels]
  float* const rates;  ///< [rows × value_heads × 2]: beta, decay
  float* const outs;   ///< [rows × values]
  /// [rows × value_heads × 2 × delta_chunk]: what the rows of a chunk are to each other (chunk_cuda.h).
  __half* const relations;

  __device__ explicit Rows(const DeltaNetArgs& args)
      : shape(args.shape),
        mixed(args.scratch),
        rates(mixed + args.rows * shape.channels()),
        outs(rates + args.rows * 2 * shape.value_heads),
        relations(reinterpret_cast<__half*>(outs + args.rows * shape.values())) {}
};

}  // namespace w4q::kernels
