// verify's own audit: faults of every kind in every scheme, layout and dialect, and what names them.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "audit/audit.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"

namespace w4q::audit {
namespace {

/// Of all pairs of a fault and a variant every how many is seeded: W4Q_AUDIT_STEP, 1 for all.
size_t step() {
  const char* text = std::getenv("W4Q_AUDIT_STEP");
  return text == nullptr ? 101 : std::strtoul(text, nullptr, 10);
}

class Audit : public ::testing::Test {
 protected:
  void SetUp() override {
    set_progress_enabled(false);
    set_threads(1);  // matrices are small, and tests share the cores
  }
};

TEST_F(Audit, SeededFaultsAreNamed) {
  const auto variants = every_variant();
  const Faults faults = every_fault();
  Workshop workshop;
  Tally tally;
  for (size_t v = 0; v < variants.size(); ++v) {
    SCOPED_TRACE(variants[v].name);
    const auto start = std::chrono::steady_clock::now();
    std::optional<Specimen> made_one;
    try {
      made_one = workshop.make(variants[v]);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
      continue;
    }
    const Specimen& specimen = *made_one;
    const auto made = std::chrono::steady_clock::now();
    size_t count = 0;
    for (size_t f = v * 31 % step(); f < faults.size(); f += step()) {
      SCOPED_TRACE(concat(faults[f].group, ": ", faults[f].kind));
      ++count;
      try {
        const auto outcome = workshop.seed(specimen, faults[f], {.text = false});
        if (outcome) tally.add(faults[f], variants[v], *outcome);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
    if (const char* path = std::getenv("W4Q_AUDIT_MISSES")) {
      std::ofstream(path) << tally.table() << "\nNOT NAMED with digests\n"
                          << tally.misses(Way::digests) << "\nNOT NAMED with base\n"
                          << tally.misses(Way::base) << "\nNOT NAMED alone\n"
                          << tally.misses(Way::alone);
    }
    const auto end = std::chrono::steady_clock::now();
    std::fprintf(stderr, "%s: made %.3f, %zu faults %.3f\n", variants[v].name.c_str(),
                 std::chrono::duration<double>(made - start).count(), count,
                 std::chrono::duration<double>(end - made).count());
  }
  if (step() < 10) std::printf("%s", tally.table().c_str());
  if (const char* path = std::getenv("W4Q_AUDIT_MISSES")) {
    std::ofstream(path) << "digests\n"
                        << tally.misses(Way::digests) << "\nbase\n"
                        << tally.misses(Way::base) << "\nalone\n"
                        << tally.misses(Way::alone);
  }
  EXPECT_EQ(tally.named(Way::digests), tally.faults(true)) << tally.misses(Way::digests);
}

}  // namespace
}  // namespace w4q::audit
