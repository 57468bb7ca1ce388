// No alarm on sound folders: weights of every kind that sound models have, in every scheme, layout and dialect.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "audit/audit.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"

namespace w4q::audit {
namespace {

/// Of all folders every how many is made: W4Q_AUDIT_CLEAN_STEP, 1 for all.
size_t clean_step() {
  const char* text = std::getenv("W4Q_AUDIT_CLEAN_STEP");
  return text == nullptr ? 101 : std::strtoul(text, nullptr, 10);
}

/// W4Q_AUDIT_ONLY=TEXT: folders whose names contain it, all of them.
std::vector<VariantRow> chosen(const std::vector<VariantRow>& variants) {
  const char* text = std::getenv("W4Q_AUDIT_ONLY");
  std::vector<VariantRow> rows;
  for (size_t v = 0; v < variants.size(); ++v) {
    if (text != nullptr ? variants[v].name.find(text) != std::string::npos : v % clean_step() == 0)
      rows.push_back(variants[v]);
  }
  return rows;
}

class CleanFolders : public ::testing::Test {
 protected:
  void SetUp() override {
    set_progress_enabled(false);
    set_threads(1);
  }

  /// Verifies those that are chosen in all ways.
  static void expect_no_alarm(const std::vector<VariantRow>& variants) {
    Workshop workshop;
    size_t runs = 0;
    for (const VariantRow& variant : chosen(variants)) {
      std::array<Answer, ways.size()> answers;
      try {
        answers = workshop.verify_sound(variant);
      } catch (const std::exception& error) {
        ADD_FAILURE() << variant.name << " cannot be made: " << error.what();
      }
      for (const Way way : ways) {
        const Answer& answer = answers[static_cast<size_t>(way)];
        ++runs;
        EXPECT_FALSE(answer.named) << variant.name << ", " << name_of(way) << ": " << answer.rung << ": "
                                   << answer.detail;
      }
    }
    std::printf("%zu runs on sound folders\n", runs);
  }
};

TEST_F(CleanFolders, OfEverySchemeLayoutAndDialect) { expect_no_alarm(every_variant()); }
TEST_F(CleanFolders, OfEveryKindOfWeights) { expect_no_alarm(every_clean_variant()); }

}  // namespace
}  // namespace w4q::audit
