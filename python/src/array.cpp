#include "array.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "core/text.h"

namespace w4q::python {
namespace {

namespace nb = nanobind;

/// As NumPy and torch call it.
std::string name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::u8:
      return "uint8";
    case DType::i8:
      return "int8";
    case DType::i16:
      return "int16";
    case DType::i32:
      return "int32";
    case DType::u32:
      return "uint32";
    case DType::i64:
      return "int64";
    default:
      break;
  }
  throw Error(ErrorCode::unsupported, concat("tensors of ", dtype_name(dtype), " have no type in Python"))
      .hint("w4q.repack(…, to=\"hf-f32\") decodes them");
}

nb::dlpack::dtype type_of(DType dtype) {
  const std::string name = name_of(dtype);
  nb::dlpack::dtype type{};
  type.bits = static_cast<uint8_t>(dtype_bits(dtype));
  type.lanes = 1;
  if (name.starts_with("bfloat")) {
    type.code = static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat);
  } else if (name.starts_with("float")) {
    type.code = static_cast<uint8_t>(nb::dlpack::dtype_code::Float);
  } else if (name.starts_with("uint")) {
    type.code = static_cast<uint8_t>(nb::dlpack::dtype_code::UInt);
  } else {
    type.code = static_cast<uint8_t>(nb::dlpack::dtype_code::Int);
  }
  return type;
}

/// The capsule, or what nanobind makes of it; the array lives as long as that does.
nb::ndarray<> dlpack(nb::handle self) {
  auto& array = nb::cast<Array&>(self);
  std::vector<size_t> shape(array.shape.begin(), array.shape.end());
  return {array.bytes.data(), shape.size(), shape.data(), self, nullptr, type_of(array.dtype), nb::device::cpu::value};
}

}  // namespace

void add_array(nb::module_& module) {
  nb::class_<Array>(module, "Array")
      .def_prop_ro("shape", [](const Array& array) { return nb::tuple(nb::cast(array.shape)); })
      .def_prop_ro("dtype", [](const Array& array) { return name_of(array.dtype); })
      .def_prop_ro("nbytes", [](const Array& array) { return array.bytes.size(); })
      .def("_dlpack", &dlpack)
      .def("__dlpack_device__", [](const Array&) { return nb::make_tuple(nb::device::cpu::value, 0); });
}

}  // namespace w4q::python
