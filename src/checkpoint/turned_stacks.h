// ModelOpt's stacks of experts, which it stores inputs first, as the matrices that its other linears are.
#pragma once

#include "io/checkpoint.h"

namespace w4q::checkpoint {

/// Of "X" [experts, k, n] of F8_E4M3 with "X_weight_scale" (F32, one or one of each expert; U8 [experts, k, n/32]), and of U8
/// [experts, k/2, n], two inputs a byte, with "X_weight_scale" F8_E4M3 [experts, k/16, n] and "X_weight_scale_2":
/// "X.3.weight" [n, k] or [n, k/2], "X.3.weight_scale" and so on for each of them, made as they are loaded. All other tensors
/// are as they were.
io::Checkpoint turn_stacks(io::Checkpoint tensors);

}  // namespace w4q::checkpoint
