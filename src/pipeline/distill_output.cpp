#include "pipeline/distill_output.h"

#include "core/convert.h"
#include "core/text.h"

namespace w4q::pipeline {

DistilledOutput distill_output(const model::OpenedModel& source, const CalibrationWindows& windows,
                               const DistillOptions& options, const checkpoint::QuantizationConfig& quantization,
                               io::CheckpointWriter& writer) {
  // Nothing is written while it is read.
  const DistilledNorms found = [&] {
    const model::OpenedModel packed{
        {source.folder.path, source.folder.config, writer.written(), quantization}, source.config, {}};
    return distill_norms(source, packed, windows, options);
  }();
  const std::string figures = concat("KL to the 16-bit model on ", found.held_out, " sequences kept out of it ",
                                     fixed(found.before, 5), " → ", fixed(found.after, 5));
  if (!found.helps()) return {{}, concat("norms stay as they are, distillation does not help: ", figures)};
  DistilledOutput result;
  for (const auto& [module, weights] : found.weights) {
    const std::string name = module + ".weight";
    const DType dtype = source.folder.tensors.stored_dtype(name);
    std::vector<std::byte> bytes(weights.size() * static_cast<size_t>(dtype_bits(dtype)) / 8);
    narrow(weights, dtype, bytes);
    writer.replace(name, bytes);
    result.tuned.push_back(name);
  }
  result.note = concat(found.weights.size(), " norms distilled in ", found.steps, " steps: ", figures);
  return result;
}

}  // namespace w4q::pipeline
