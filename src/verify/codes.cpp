#include <memory>

#include "core/buffer.h"
#include "core/error.h"
#include "core/progress.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "repack/layout_registry.h"
#include "repack/map_pass.h"
#include "verify/rungs.h"
#include "verify/structure.h"
#include "verify/survey.h"

namespace w4q::verify {
namespace {

/// Unpacks, validates and packs again: the linear in the canonical layout. Throws with the message of what went wrong.
formats::PackedLinear sound_linear(const io::Checkpoint& checkpoint, const checkpoint::PackedLinearInfo& info) {
  auto linear = checkpoint::load_packed(checkpoint, info);
  for (auto& pass : linear.passes) {
    const auto& layout = repack::layout_row(pass.layout);
    if (pass.layout == formats::canonical_layout) {  // nothing to move, so nothing to copy
      repack::check_layout(pass, pass.layout, layout.planes(pass.scheme, pass.n, pass.k), info.name);
      formats::scheme_row(pass.scheme.family).validate(pass, info.name);
      continue;
    }
    auto canonical = layout.unpack(pass, info.name);
    formats::scheme_row(pass.scheme.family).validate(canonical, info.name);
    if (!formats::bytes_equal(layout.pack(canonical), pass)) {
      throw Error(ErrorCode::bad_file,
                  concat(printable(info.name), ": packing the unpacked planes does not give the stored bytes"));
    }
    pass = std::move(canonical);
  }
  return linear;
}

}  // namespace

Check check_codes(const checkpoint::Folder& candidate, const SoundLinear& visit) {
  constexpr size_t kept_memory = size_t{256} << 20;
  Check check{"codes", true, {}, {}};
  const BufferReuse reuse(kept_memory);
  Progress progress("codes", static_cast<int64_t>(candidate.quantization.linears.size()), "tensors");
  for (const auto& [name, info] : candidate.quantization.linears) {
    std::shared_ptr<const formats::PackedLinear> linear;
    try {
      linear = std::make_shared<const formats::PackedLinear>(sound_linear(candidate.tensors, info));
    } catch (const Error& error) {
      if (error.code() == ErrorCode::internal) throw;
      check.faults.emplace_back(error.what());
    }
    if (linear && visit) visit(info, linear);
    progress.advance(1);
  }
  check.passed = check.faults.empty();
  check.detail =
      concat(candidate.quantization.linears.size() - check.faults.size(), " of ", candidate.quantization.linears.size(),
             " packed weights unpack and pack again to the stored bytes");
  return check;
}

namespace {

/// Checks codes and, on the way, what the rungs behind ask of the same planes.
void check_and_collect(CheckContext& context, Findings& findings) {
  const model::OpenedModel& candidate = context.candidate();
  auto survey = std::make_shared<PackedSurvey>(PackedSurvey{{}, StatisticsCollector(candidate)});
  auto check = check_codes(candidate.folder, [&](const auto& info, const auto& linear) {
    add_to_decoder_report(info, linear, context.options().decode_rows, survey->decoder);
    survey->statistics.add(info, linear);
  });
  if (check.passed) context.keep(std::move(survey));
  findings.checks.add(std::move(check));
}

}  // namespace

CheckRow codes_check() {
  return {.name = "codes",
          .help = "packed weights unpack to sound planes, and packing those again gives the stored bytes",
          .needs = {.packed = true},
          .run = check_and_collect};
}

}  // namespace w4q::verify
