#include "core/error.h"
#include "core/progress.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "repack/layout_registry.h"
#include "repack/map_pass.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

/// Unpacks, validates and packs again; the message of what went wrong, or nothing.
std::string code_fault(const io::Checkpoint& checkpoint, const checkpoint::PackedLinearInfo& info) {
  try {
    const auto stored = checkpoint::load_packed(checkpoint, info);
    for (const auto& pass : stored.passes) {
      const auto& layout = repack::layout_row(pass.layout);
      if (pass.layout == formats::canonical_layout) {  // nothing to move, so nothing to copy
        repack::check_layout(pass, pass.layout, layout.planes(pass.scheme, pass.n, pass.k), info.name);
        formats::scheme_row(pass.scheme.family).validate(pass, info.name);
        continue;
      }
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

}  // namespace

Check check_codes(const checkpoint::Folder& candidate) {
  Check check{"codes", true, {}, {}};
  Progress progress("codes", static_cast<int64_t>(candidate.quantization.linears.size()), "tensors");
  for (const auto& [name, info] : candidate.quantization.linears) {
    if (auto fault = code_fault(candidate.tensors, info); !fault.empty()) check.faults.push_back(std::move(fault));
    progress.advance(1);
  }
  check.passed = check.faults.empty();
  check.detail =
      concat(candidate.quantization.linears.size() - check.faults.size(), " of ", candidate.quantization.linears.size(),
             " packed weights unpack and pack again to the stored bytes");
  return check;
}

CheckRow codes_check() {
  return {.name = "codes",
          .help = "packed weights unpack to sound planes, and packing those again gives the stored bytes",
          .needs = {.packed = true},
          .run = [](CheckContext& context, Findings& findings) {
            findings.checks.add(check_codes(context.candidate().folder));
          }};
}

}  // namespace w4q::verify
