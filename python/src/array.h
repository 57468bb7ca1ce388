// Numbers that leave for Python by DLPack: NumPy and torch take them without a copy.
#pragma once

#include <nanobind/nanobind.h>

#include "core/buffer.h"
#include "core/dtype.h"
#include "core/views.h"

namespace w4q::python {

/// A dense array on the CPU, rows one behind the other, of f32, f16 or bf16, or of integers as they are stored.
struct Array {
  Buffer bytes;
  DType dtype = DType::f32;
  Shape shape;
};

/// Adds the class with shape, dtype, __dlpack__ and __dlpack_device__.
void add_array(nanobind::module_& module);

}  // namespace w4q::python
