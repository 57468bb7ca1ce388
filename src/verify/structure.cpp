#include "verify/structure.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <set>

#include "core/convert.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "model/fold_rotations.h"
#include "model/model.h"
#include "repack/layout_registry.h"

namespace w4q::verify {
namespace {

/// Collects faults of the structure check; `expected` ends as the set of all names that may stand in the checkpoint.
class StructureCheck {
 public:
  StructureCheck(const OpenCheckpoint& candidate, const OpenCheckpoint* base) : candidate_(candidate), base_(base) {}

  Check run() {
    for (const auto& parameter : model::parameters(candidate_.model)) check_parameter(parameter);
    for (const auto& name : candidate_.quantization.rescaled) {
      if (!is_parameter(name)) fault(name, "is said to be rescaled, but no parameter of the architecture");
    }
    for (const auto& [name, info] : candidate_.quantization.linears) {
      if (!packed_.contains(name)) fault(name, "is packed, but no parameter of the architecture");
    }
    if (base_ != nullptr) check_against_base();
    for (const auto& [name, info] : candidate_.checkpoint.tensors()) {
      if (!expected_.contains(name)) fault(name, "is extra: neither a parameter nor a plane of a packed one");
    }
    Check check{"structure", faults_.empty(), {}, std::move(faults_)};
    check.detail = concat(packed_.size(), " packed and ", kept_, " kept parameters",
                          base_ == nullptr ? "" : concat("; ", identical_, " kept tensors are byte-equal to the base"));
    if (!check.passed) check.detail += concat("; ", check.faults.size(), " faults");
    return check;
  }

 private:
  void fault(std::string_view subject, const std::string& what) {
    faults_.push_back(concat(printable(subject), " ", what));
  }

  void check_parameter(const model::Parameter& parameter) {
    const auto module = model::module_path(parameter.name);
    const auto* info = candidate_.quantization.find(module);
    if (info == nullptr) {
      ++kept_;
      expected_.insert(parameter.name);
      return check_tensor(parameter.name, std::nullopt, parameter.shape);
    }
    packed_.insert(std::string(module));
    if (!parameter.linear) return fault(module, "is packed, but is no linear layer");
    if (Shape{info->n, info->k} != parameter.shape) {
      fault(module, concat("is packed as [", info->n, ", ", info->k, "], the architecture needs ",
                           shape_text(parameter.shape)));
    }
    for (const auto& plane : checkpoint::planned_planes(*info)) {
      expected_.insert(plane.name);
      check_tensor(plane.name, plane.dtype, plane.shape);
    }
    if (candidate_.checkpoint.contains(parameter.name)) fault(parameter.name, "stands beside its packed planes");
  }

  void check_tensor(const std::string& name, std::optional<DType> dtype, const Shape& shape) {
    if (!candidate_.checkpoint.contains(name)) return fault(name, "is missing");
    const auto& found = candidate_.checkpoint.at(name);
    if (found.shape != shape)
      fault(name, concat("has shape ", shape_text(found.shape), ", expected ", shape_text(shape)));
    if (dtype ? found.dtype != *dtype : !is_weight_dtype(found.dtype)) {
      fault(name, concat("has type ", dtype_name(found.dtype), ", expected ",
                         dtype ? dtype_name(*dtype) : "BF16, F16 or F32"));
    }
  }

  void check_against_base() {
    io::Json ours = candidate_.config;
    io::Json theirs = base_->config;
    for (auto* config : {&ours, &theirs}) {
      for (const char* key : {"quantization_config", "converted_by"}) config->erase(key);
    }
    if (nlohmann::json(ours) != nlohmann::json(theirs))
      fault("config.json", "differs from the base's beyond the quantization");
    for (const auto& [name, info] : base_->checkpoint.tensors()) {
      if (candidate_.quantization.find(model::module_path(name)) != nullptr) continue;
      check_interrupt();
      expected_.insert(name);
      check_kept(name, info);
    }
  }

  void check_kept(const std::string& name, const io::TensorInfo& info) {
    if (!candidate_.checkpoint.contains(name)) {
      // A missing parameter has been reported already.
      return base_->quantization.linears.empty() && !is_parameter(name) ? fault(name, "of the base is missing")
                                                                        : void();
    }
    const auto& found = candidate_.checkpoint.at(name);
    const DType wanted = base_->checkpoint.stored_dtype(name);
    if (found.dtype != wanted || found.shape != info.shape) {
      return fault(name, concat("is ", dtype_name(found.dtype), " ", shape_text(found.shape), ", in the base ",
                                dtype_name(wanted), " ", shape_text(info.shape)));
    }
    const auto a = candidate_.checkpoint.load(name);
    const auto b = base_->checkpoint.load_stored(name);
    if (candidate_.quantization.rescaled.contains(name)) return;
    if (!std::ranges::equal(a->bytes, b->bytes)) return fault(name, "was kept, but its bytes differ from the base's");
    ++identical_;
  }

  bool is_parameter(std::string_view name) const {
    const auto all = model::parameters(candidate_.model);
    return std::any_of(all.begin(), all.end(), [&](const auto& parameter) { return parameter.name == name; });
  }

  const OpenCheckpoint& candidate_;
  const OpenCheckpoint* base_;
  std::set<std::string, std::less<>> expected_;
  std::set<std::string, std::less<>> packed_;
  int64_t kept_ = 0;
  int64_t identical_ = 0;
  std::vector<std::string> faults_;
};

/// Unpacks, validates and packs again; the message of what went wrong, or nothing.
std::string code_fault(const io::Checkpoint& checkpoint, const checkpoint::PackedLinearInfo& info) {
  try {
    const auto stored = checkpoint::load_packed(checkpoint, info);
    for (const auto& pass : stored.passes) {
      const auto& layout = repack::layout_row(pass.layout);
      const auto canonical = layout.unpack(pass, info.name);
      formats::scheme_row(pass.scheme.family).validate(canonical, info.name);
      if (!formats::bytes_equal(layout.pack(canonical), pass)) {
        return concat(printable(info.name), ": packing the unpacked planes does not give the stored bytes");
      }
    }
    return {};
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal) throw;
    return error.what();
  }
}

/// Index of the first value that is not finite, or -1.
int64_t first_non_finite(const TensorView& tensor) {
  const int64_t count = element_count(tensor.shape);
  const int64_t width = dtype_bits(tensor.dtype) / 8;
  std::atomic<int64_t> first{count};
  parallel_for(count, 1 << 16, [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>(end - begin));
    widen(tensor.bytes.subspan(static_cast<size_t>(begin * width)), tensor.dtype, values);
    const auto found = std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
    if (found == values.end()) return;
    const int64_t index = begin + (found - values.begin());
    for (int64_t seen = first; index < seen && !first.compare_exchange_weak(seen, index);) {
    }
  });
  return first == count ? -1 : first.load();
}

}  // namespace

OpenCheckpoint open_checkpoint(const std::filesystem::path& folder, bool residual) {
  model::require_folder(folder);
  const auto config_path = folder / "config.json";
  io::Json config = io::read_json(config_path);
  io::Checkpoint checkpoint = io::Checkpoint::open(folder, residual);
  auto quantization = checkpoint::read_quantization(config, checkpoint, config_path.string());
  return {folder, std::move(config), model::read_config(folder), std::move(quantization), std::move(checkpoint)};
}

OpenCheckpoint open_base(const std::filesystem::path& folder, const OpenCheckpoint& candidate) {
  OpenCheckpoint base = open_checkpoint(folder);
  if (!base.quantization.linears.empty() || !model::read_folded_rotations(candidate.config, candidate.folder.string()))
    return base;
  auto folded = model::open_plain_model(folder, candidate.config, candidate.folder.string());
  base.config = std::move(folded.json);
  base.model = std::move(folded.config);
  base.checkpoint = std::move(folded.checkpoint);
  return base;
}

Check check_structure(const OpenCheckpoint& candidate, const OpenCheckpoint* base) {
  return StructureCheck(candidate, base).run();
}

Check check_codes(const OpenCheckpoint& candidate) {
  Check check{"codes", true, {}, {}};
  Progress progress("codes", static_cast<int64_t>(candidate.quantization.linears.size()), "tensors");
  for (const auto& [name, info] : candidate.quantization.linears) {
    if (auto fault = code_fault(candidate.checkpoint, info); !fault.empty()) check.faults.push_back(std::move(fault));
    progress.advance(1);
  }
  check.passed = check.faults.empty();
  check.detail =
      concat(candidate.quantization.linears.size() - check.faults.size(), " of ", candidate.quantization.linears.size(),
             " packed weights unpack and pack again to the stored bytes");
  return check;
}

Check check_finite(const OpenCheckpoint& candidate) {
  Check check{"finite", true, {}, {}};
  int64_t checked = 0;
  for (const auto& parameter : model::parameters(candidate.model)) {
    check_interrupt();
    if (!candidate.checkpoint.contains(parameter.name)) continue;
    const auto tensor = candidate.checkpoint.load(parameter.name);
    if (!is_weight_dtype(tensor->dtype)) continue;
    ++checked;
    const int64_t index = first_non_finite(tensor.view());
    if (index >= 0) check.faults.push_back(concat(printable(parameter.name), ": NaN or infinity at element ", index));
  }
  check.passed = check.faults.empty();
  check.detail =
      concat(checked - static_cast<int64_t>(check.faults.size()), " of ", checked, " 16-bit tensors are finite");
  return check;
}

}  // namespace w4q::verify
