// The rows of the table of dialects, one function each, in the order of dialect_registry.cpp.
#pragma once

#include "model/dialect.h"

namespace w4q::model {

DialectRow awq_gemm_row();
DialectRow gptq_v1_row();
DialectRow gptq_v2_row();

}  // namespace w4q::model
