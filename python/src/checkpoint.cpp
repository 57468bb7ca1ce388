#include "checkpoint.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string_view>
#include <vector>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "io/lost_pages.h"
#include "io/system.h"

namespace w4q::python {
namespace {

namespace nb = nanobind;

/// Rows that a task decodes at a time: a multiple of what any family decodes together.
constexpr int64_t decoded_rows = 128;

DType parse_type(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "float16") return DType::f16;
  if (name == "bfloat16") return DType::bf16;
  throw Error(ErrorCode::bad_argument, concat("dtype ", printable(name), ": not a type to decode to"))
      .detail("expected float32, float16 or bfloat16");
}

class Checkpoint {
 public:
  /// A command that replaces the folder meanwhile must not take its files for inputs of its own that changed.
  Checkpoint(const std::filesystem::path& path, bool residual)
      : folder_(std::make_shared<const checkpoint::Folder>(checkpoint::open_folder(path, residual))) {
    std::set<std::string> files;
    for (const auto& [name, info] : folder_->tensors.tensors()) files.insert(folder_->tensors.file_of(name));
    for (const auto& file : files) {
      if (const auto state = io::file_state(file)) io::stop_watching(*state);
    }
  }

  const checkpoint::Folder& folder() const noexcept { return *folder_; }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, info] : folder_->quantization.linears) names.push_back(name);
    return names;
  }

  std::shared_ptr<PackedLinear> linear(const std::string& name) const {
    const auto* info = folder_->quantization.find(name);
    if (info == nullptr) {
      throw Error(ErrorCode::bad_argument, concat(printable(name), ": no packed linear of ", folder_->path.native()))
          .hint("Checkpoint.names lists them");
    }
    return std::make_shared<PackedLinear>(folder_, *info);
  }

  std::vector<std::string> tensors() const {
    std::vector<std::string> names;
    for (const auto& [name, info] : folder_->tensors.tensors()) names.push_back(name);
    return names;
  }

  /// As it is stored; a copy.
  Array tensor(const std::string& name) const {
    const auto& info = folder_->tensors.at(name);
    const auto loaded = folder_->tensors.load(name);
    return {Buffer::copy_of(loaded.view().bytes), info.dtype, info.shape};
  }

 private:
  std::shared_ptr<const checkpoint::Folder> folder_;
};

std::vector<std::string> schemes(const PackedLinear& linear) {
  std::vector<std::string> names;
  for (const auto& pass : linear.info().passes) names.push_back(formats::to_string(pass.scheme));
  return names;
}

std::vector<std::string> layouts(const PackedLinear& linear) {
  std::vector<std::string> names;
  for (const auto& pass : linear.info().passes) names.push_back(pass.layout);
  return names;
}

void multiply_at(const PackedLinear& linear, uintptr_t x, int64_t rows, uintptr_t y) {
  linear.multiply(reinterpret_cast<const float*>(x), rows, reinterpret_cast<float*>(y));
}

}  // namespace

kernels::LinearWeight PackedLinear::load() const {
  const auto is_canonical = [](const auto& pass) { return pass.layout == formats::canonical_layout; };
  const bool as_stored = info_.dialect == nullptr && std::ranges::none_of(info_.passes, is_canonical);
  kernels::LinearWeight weight{.name = info_.name, .n = info_.n, .k = info_.k, .matrix = {}, .bias = {}};
  weight.matrix =
      std::make_shared<const formats::PackedLinear>(as_stored ? checkpoint::load_packed(folder_->tensors, info_)
                                                              : checkpoint::load_canonical(folder_->tensors, info_));
  return weight;
}

const kernels::LinearWeight& PackedLinear::canonical() const {
  const std::lock_guard lock(mutex_);
  if (!canonical_) {
    canonical_.emplace(kernels::LinearWeight{.name = info_.name, .n = info_.n, .k = info_.k, .matrix = {}, .bias = {}});
    canonical_->matrix =
        std::make_shared<const formats::PackedLinear>(checkpoint::load_canonical(folder_->tensors, info_));
  }
  return *canonical_;
}

Array PackedLinear::decode(DType dtype) const {
  const kernels::LinearWeight& weight = canonical();
  const auto width = static_cast<size_t>(dtype_bits(dtype) / 8);
  Array array{Buffer::unfilled(static_cast<size_t>(info_.n * info_.k) * width), dtype, {info_.n, info_.k}};
  parallel_for(info_.n, decoded_rows, [&](int64_t begin, int64_t end) {
    const auto count = static_cast<size_t>((end - begin) * info_.k);
    const auto target = array.bytes.bytes().subspan(static_cast<size_t>(begin * info_.k) * width, count * width);
    if (dtype == DType::f32) {
      kernels::decode_rows(weight, begin, end, {reinterpret_cast<float*>(target.data()), end - begin, info_.k});
      return;
    }
    std::vector<float> values(count);
    kernels::decode_rows(weight, begin, end, {values.data(), end - begin, info_.k});
    narrow(values, dtype, target);
  });
  return array;
}

void PackedLinear::multiply(const float* x, int64_t rows, float* y) const {
  kernels::linear(canonical(), {x, rows, info_.k}, {y, rows, info_.n});
}

void add_checkpoint(nb::module_& module) {
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  nb::class_<PackedLinear>(module, "PackedLinear")
      .def_prop_ro("name", [](const PackedLinear& linear) { return linear.info().name; })
      .def_prop_ro("out_features", [](const PackedLinear& linear) { return linear.info().n; })
      .def_prop_ro("in_features", [](const PackedLinear& linear) { return linear.info().k; })
      .def_prop_ro("schemes", &schemes, "One for each pass")
      .def_prop_ro("layouts", &layouts, "One for each pass")
      .def_prop_ro("nbytes", [](const PackedLinear& linear) { return checkpoint::stored_bytes(linear.info()); })
      .def(
          "decode",
          [](const PackedLinear& linear, const std::string& dtype) { return linear.decode(parse_type(dtype)); },
          nb::arg("dtype") = "float32", unlocked, "The weight as an array [out_features, in_features]")
      .def("_multiply", &multiply_at, unlocked);
  nb::class_<Checkpoint>(module, "Checkpoint")
      .def(nb::init<const std::filesystem::path&, bool>(), nb::arg("path"), nb::arg("residual") = true, unlocked)
      .def_prop_ro("path", [](const Checkpoint& self) { return self.folder().path; })
      .def_prop_ro("names", &Checkpoint::names, "Module paths of the packed linears")
      .def("linear", &Checkpoint::linear, nb::arg("name"), "A packed linear")
      .def_prop_ro("tensors", &Checkpoint::tensors, "Names of all tensors in the files")
      .def("tensor", &Checkpoint::tensor, nb::arg("name"), unlocked, "A tensor as it is stored");
}

}  // namespace w4q::python
