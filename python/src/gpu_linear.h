// Packed linears in GPU memory, multiplied by w4q's kernels on whatever stream the caller works in.
#pragma once

#include <nanobind/nanobind.h>

namespace w4q::python {

/// Adds the class GpuLinear and has_cuda; without CUDA only has_cuda, which is false.
void add_gpu_linear(nanobind::module_& module);

}  // namespace w4q::python
