// The rows of the table of dialects, one function each, in the order of dialect_registry.cpp.
#pragma once

#include "checkpoint/dialect/dialect.h"

namespace w4q::checkpoint {

DialectRow awq_gemm_row();
DialectRow awq_gemv_row();
DialectRow awq_gemv_fast_row();
DialectRow awq_marlin_row();
DialectRow auto_round_row();
DialectRow gptq_v1_row();
DialectRow gptq_v2_row();
DialectRow compressed_tensors_row();
DialectRow compressed_tensors_padded_row();
DialectRow marlin_dialect_row();
DialectRow bitsandbytes_nf4_row();
DialectRow bitsandbytes_fp4_row();
DialectRow exl3_dialect_row();
DialectRow compressed_tensors_float_row();
DialectRow modelopt_row();
DialectRow fp8_row();
DialectRow gpt_oss_row();
DialectRow humming_row();
DialectRow compressed_tensors_bytes_row();

}  // namespace w4q::checkpoint
