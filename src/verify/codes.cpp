#include <functional>
#include <memory>
#include <vector>

#include "core/buffer.h"
#include "core/error.h"
#include "core/progress.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "repack/layout_registry.h"
#include "repack/map_pass.h"
#include "verify/batches.h"
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

/// What one linear leaves to be said.
struct Seen {
  std::string fault;
  std::function<void()> report;
};

Seen look_at_linear(const io::Checkpoint& tensors, const checkpoint::PackedLinearInfo& info, const SoundLinear& visit) {
  Seen seen;
  std::shared_ptr<const formats::PackedLinear> linear;
  try {
    linear = std::make_shared<const formats::PackedLinear>(sound_linear(tensors, info));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal) throw;
    seen.fault = error.what();
  }
  if (linear && visit) seen.report = visit(info, linear);
  return seen;
}

}  // namespace

Check check_codes(const checkpoint::Folder& candidate, const SoundLinear& visit) {
  constexpr size_t kept_memory = size_t{256} << 20;
  Check check{"codes", true, {}, {}};
  const BufferReuse reuse(kept_memory);
  Progress progress("codes", static_cast<int64_t>(candidate.quantization.linears.size()), "tensors");
  std::vector<const checkpoint::PackedLinearInfo*> linears;
  for (const auto& [name, info] : candidate.quantization.linears) linears.push_back(&info);
  std::vector<Seen> seen(linears.size());
  in_batches(
      linears, [&](size_t i) { seen[i] = look_at_linear(candidate.tensors, *linears[i], visit); },
      [&](size_t i) {
        const Seen told = std::move(seen[i]);
        if (!told.fault.empty()) check.faults.push_back(told.fault);
        if (told.report) told.report();
        progress.advance(1);
      });
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
  const DecodeRows& fast = context.options().decode_rows;
  auto check = check_codes(candidate.folder, [&](const auto& info, const auto& linear) {
    return [&survey = *survey, &info, decoded = look_at_decoding(info, linear, fast),
            measured = survey->statistics.measure(info, linear)]() mutable {
      add_to_decoder_report(info, std::move(decoded), survey.decoder);
      survey.statistics.add(std::move(measured));
    };
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
