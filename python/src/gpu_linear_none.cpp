#include "gpu_linear.h"

namespace w4q::python {

void add_gpu_linear(nanobind::module_& module) { module.attr("has_cuda") = false; }

}  // namespace w4q::python
