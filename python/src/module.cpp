// w4q._w4q: commands, checkpoints and products. What Python users see is made of it in python/w4q.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "array.h"
#include "checkpoint.h"
#include "command.h"
#include "core/error.h"
#include "gpu_linear.h"

namespace {

namespace nb = nanobind;
using namespace w4q;

/// Error becomes w4q.Error.
void translate(const std::exception_ptr& failure, void*) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    const ErrorCodeRow& row = describe(error.code());
    const nb::object type = nb::module_::import_("w4q._error").attr("Error");
    const nb::object value =
        type(std::string(row.name), row.exit_status, error.summary(), error.details(), error.hint());
    PyErr_SetObject(type.ptr(), value.ptr());
  }
}

}  // namespace

NB_MODULE(_w4q, module) {
  nb::register_exception_translator(translate);
  module.attr("version") = W4Q_VERSION;
  nb::class_<python::Outcome>(module, "Outcome")
      .def_ro("exit_status", &python::Outcome::exit_status)
      .def_ro("report", &python::Outcome::report);
  module.def("run_command", &python::run_command, nb::arg("words"), nb::arg("on_progress").none());
  python::add_array(module);
  python::add_checkpoint(module);
  python::add_gpu_linear(module);
}
