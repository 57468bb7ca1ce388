// What ranks find out about weights and kernels between them is what one process finds, and each looks at its part alone.
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "core/progress.h"
#include "core/text.h"
#include "launch.h"
#include "small_model.h"
#include "support.h"
#include "thread_ranks.h"
#include "verify/compare.h"
#include "verify/products/kernel_share.h"

namespace w4q::test {
namespace {

using verify::KernelError;
using verify::KernelReport;

class RanksCheck : public OnBundledModel {
 protected:
  RanksCheck() { set_progress_enabled(false); }
};

TEST_F(RanksCheck, EachComparesItsLinearsAndAllReportTheSame) {
  ASSERT_EQ(quantize("q3", {"--k", "3", "--device", "cpu"}).status, 0);
  const auto base = model::open_model(bundled_model()), q3 = model::open_model(path("q3"));
  const auto compared = [&](ranks::Ranks& ranks, std::set<std::string>& modules) {
    const auto note = [&](const std::string& module, MatrixView<const float> difference) -> std::optional<double> {
      modules.insert(module);
      return double{difference.row(0)[0]} * double{difference.row(0)[0]};
    };
    return verify::to_json(verify::compare_linears(base, q3, base, note, ranks)).dump();
  };
  ranks::Ranks one;
  std::set<std::string> every;
  const std::string alone = compared(one, every);
  ASSERT_EQ(every.size(), 28u);
  for (const int size : {2, 3, 40}) {  // more than there are linears
    std::vector<std::set<std::string>> modules(static_cast<size_t>(size));
    run_as_ranks(size, [&](ranks::Ranks& ranks) {
      EXPECT_EQ(compared(ranks, modules[static_cast<size_t>(ranks.rank())]), alone) << size << " ranks";
    });
    size_t sum = 0;
    for (const auto& own : modules) {
      sum += own.size();
      EXPECT_LE(own.size(), 28u / static_cast<size_t>(size) + 7);  // they are dealt by their sizes
    }
    EXPECT_EQ(sum, every.size());
  }
}

/// Items of a stage as they would be found: of each two lines, whose values are all different.
std::vector<KernelError> lines_of(int stage, int64_t item) {
  std::vector<KernelError> lines;
  for (const char* part : {"a", "b"}) {
    const double value = 100 * stage + static_cast<double>(item);
    KernelError line{.name = concat("layer ", stage, ".", item, part), .scheme = "kbit3", .kernels = "gemv, gemm"};
    line.to_cpu = value, line.to_fp64 = value / 3, line.rounding = value / 7, line.bound = value + 1;
    lines.push_back(line);
  }
  return lines;
}

TEST_F(RanksCheck, ProductsStandInTheOrderOfLayersWhoeverCheckedThem) {
  const int64_t items[] = {3, 5, 0};
  KernelReport expected;
  for (int stage = 0; stage < 3; ++stage) {
    for (int64_t item = 0; item < items[stage]; ++item) {
      for (auto& line : lines_of(stage, item)) expected.layers.push_back(line);
    }
  }
  for (const int groups : {1, 2, 4}) {
    std::mutex mutex;
    std::multiset<std::pair<int, int64_t>> checked;
    run_as_ranks(3 * groups, [&](ranks::Ranks& ranks) {
      const model::LayerStage stage(ranks, 3);
      const auto report = verify::check_together(ranks, stage, items[stage.index()], [&](int64_t item) {
        const std::lock_guard lock(mutex);
        checked.insert({stage.index(), item});
        return lines_of(stage.index(), item);
      });
      EXPECT_EQ(verify::to_json(report), verify::to_json(expected)) << groups << " groups";
    });
    EXPECT_EQ(checked.size(), 8u);  // each once
  }
}

/// A climb goes on behind what one rank could not do only where all know of it: nobody waits for the one that gave up.
TEST_F(RanksCheck, WhatOneCannotCheckIsAnErrorOfAll) {
  run_as_ranks(3, [&](ranks::Ranks& ranks) {
    const auto check = [&](int64_t item) -> std::vector<KernelError> {
      if (ranks.rank() == 1) throw Error(ErrorCode::device, "no memory");
      return lines_of(0, item);
    };
    try {
      verify::check_together(ranks, {ranks, 1}, 9, check);
      ADD_FAILURE() << "rank " << ranks.rank() << " noticed nothing";
    } catch (const Error& error) {
      EXPECT_EQ(error.summary(), "no memory");
      EXPECT_NE(error.details().find("at rank 1 of 3, on "), std::string::npos) << error.details();
    }
  });
}

TEST_F(RanksCheck, AModelIsCutIntoAsManyPartsAsItCanBe) {
  const auto parts = [](const model::OpenedModel& opened, int size) {
    int found = 0;
    run_as_ranks(size, [&](ranks::Ranks& ranks) {
      const auto stage = verify::kernel_stage(ranks, opened);
      if (ranks.first()) found = stage.count();
      EXPECT_EQ(stage.count() * stage.groups(), size);
    });
    return found;
  };
  const auto four = model::open_model(bundled_model());
  ASSERT_EQ(four.config.layers, 4);
  EXPECT_EQ(parts(four, 2), 2);
  EXPECT_EQ(parts(four, 3), 3);
  EXPECT_EQ(parts(four, 6), 3);
  EXPECT_EQ(parts(four, 7), 1);
  EXPECT_EQ(parts(four, 8), 4);
  write_small_model(model::architecture_row("gemma4_text"), path("gemma"));
  EXPECT_EQ(parts(model::open_model(path("gemma")), 2), 1);
}

}  // namespace
}  // namespace w4q::test
