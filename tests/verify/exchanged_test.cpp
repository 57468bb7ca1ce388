// Scales of another expert, in every way that integers are stored: named without a base, with one, and by digests.
#include <gmock/gmock.h>

#include "core/text.h"
#include "formats/scheme_registry.h"
#include "packed_model.h"
#include "pipeline/convert_model.h"
#include "verify/statistics/statistics.h"

namespace w4q::verify {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

namespace fs = std::filesystem;

constexpr const char *one = "model.layers.1.mlp.experts.0.down_proj", *other = "model.layers.1.mlp.experts.5.down_proj";

/// Gives each of two linears the tensors of the other whose names end so.
void exchange(const fs::path& model, const std::vector<std::string>& suffixes) {
  std::map<std::string, std::vector<std::byte>> bytes;
  {
    const auto checkpoint = io::Checkpoint::open(model);
    for (const auto& suffix : suffixes) {
      for (const auto& [to, from] : {std::pair(one, other), std::pair(other, one)}) {
        const auto loaded = checkpoint.load(from + suffix);
        bytes.emplace(to + suffix, std::vector(loaded->bytes.begin(), loaded->bytes.end()));
      }
    }
  }
  test::rewrite(model, [&](const io::PlannedTensor& tensor, std::vector<std::byte>& found) {
    if (const auto at = bytes.find(tensor.name); at != bytes.end()) found = at->second;
    return true;
  });
}

fs::path mixture() { return test::testdata() / "w4q-mixture-tiny"; }

void quantize(const fs::path& out, const char* scheme) {
  set_progress_enabled(false);
  pipeline::QuantizeRequest request;
  request.model = mixture();
  request.output = out;
  request.scheme = formats::parse_scheme(scheme);
  request.method = "rtn";
  pipeline::quantize_model(request);
}

struct Stored {
  const char* scheme;
  const char* dialect;  ///< empty: w4q's own
  std::vector<std::string> scales;
};

TEST(ScalesOfAnotherExpert, AreNamedInEveryDialectWithoutABase) {
  const test::TemporaryFolder folder;
  const std::vector<Stored> ways = {
      {"int4-g32-f16-asym", "", {".0.scales", ".0.zeros"}},
      {"int4-g32-f16-asym", "awq-gemm", {".scales", ".qzeros"}},
      {"int4-g32-f16-asym", "awq-gemm", {".scales"}},
      {"int4-g128-f16", "gptq-v2", {".scales"}},
      {"int8-g128-f16", "gptq-v1", {".scales"}},
      {"int4-g32-bf16", "compressed-tensors", {".weight_scale"}},
      {"int3-g32-bf16-asym", "compressed-tensors", {".weight_scale", ".weight_zero_point"}},
      {"int8-row-bf16", "compressed-tensors", {".weight_scale"}},
  };
  for (size_t i = 0; i < ways.size(); ++i) {
    const auto& [scheme, dialect, scales] = ways[i];
    SCOPED_TRACE(concat(scheme, " ", dialect));
    const fs::path own = folder / concat("own", i), out = folder / concat("out", i);
    quantize(own, scheme);
    if (*dialect == 0) {
      fs::rename(own, out);
    } else {
      pipeline::ConvertRequest request;
      request.input = own, request.output = out, request.to = dialect;
      pipeline::convert_model(request);
    }
    EXPECT_THAT(check_statistics(model::open_model(out)).faults, IsEmpty());
    exchange(out, scales);
    const auto faults = check_statistics(model::open_model(out)).faults;
    EXPECT_THAT(faults, SizeIs(2));
    EXPECT_THAT(faults, Contains(HasSubstr(concat(one, ": holds the scales of ", other))));
    EXPECT_THAT(faults, Contains(HasSubstr(concat(other, ": holds the scales of ", one))));
  }
}

TEST(ScalesOfAnotherExpert, AreNamedByTheBaseAndByDigests) {
  const test::TemporaryFolder folder;
  quantize(folder / "q", "int4-g32-f16-asym");
  exchange(folder / "q", {".0.scales"});
  const auto climbed = [&](const fs::path& base) {
    CheckContext context(test::check_options(folder / "q", base));
    return climb(context);
  };
  const auto by_digests = climbed({});
  EXPECT_THAT(by_digests.text, HasSubstr(concat(one, ".0.scales holds what was written as ", other, ".0.scales")));
  fs::remove(folder / "q" / "w4q_digests.json");
  const auto by_base = climbed(mixture());
  EXPECT_FALSE(by_base.checks.passed());
  for (const auto& check : by_base.checks.checks()) {
    if (check.name != "weights") continue;
    EXPECT_THAT(check.faults, SizeIs(2));
    EXPECT_THAT(check.faults, Contains(HasSubstr(one)));
    EXPECT_THAT(check.faults, Contains(HasSubstr(other)));
  }
}

}  // namespace
}  // namespace w4q::verify
