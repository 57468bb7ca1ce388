// Before an output is put in its place all ranks must have found their inputs as they were.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "core/stopwatch.h"
#include "io/files.h"
#include "io/output.h"
#include "launch.h"
#include "pipeline/shared_output.h"
#include "support.h"
#include "thread_ranks.h"

namespace w4q::test {
namespace {

struct SmallReport {
  std::vector<std::string> notes = {};
  int64_t file_bytes = 0;
  double seconds = 0;
};

/// A checkpoint of one tensor by three ranks, the last of which reads another file than the others, as on another machine.
/// `meanwhile` happens before the end.
void write_together(const std::filesystem::path& folder, const std::function<void()>& meanwhile) {
  const auto input_of = [&](bool last) { return folder / (last ? "theirs.json" : "ours.json"); };
  for (const bool last : {false, true}) io::write_file(input_of(last), "{}", true);
  run_as_ranks(3, [&](ranks::Ranks& ranks) {
    const bool last = ranks.rank() == 2;
    pipeline::SharedFolder output({.ranks = &ranks}, folder / "q", false, {input_of(last)},
                                  [](const auto&) { return false; });
    io::CheckpointWriter writer(output.staging(), {{"a", DType::u8, {3}}}, {}, output.shard_files());
    ranks.barrier();
    if (ranks.first()) writer.write("a", std::as_bytes(std::span("abc", 3)));
    if (last) meanwhile();
    pipeline::finished(SmallReport{}, writer, output, Stopwatch(), {}, [&](const auto& to) {
      io::write_file(to / "config.json", "{}", false);
      return std::vector<std::string>();
    });
  });
}

TEST(RanksAgree, WhatAllFindAsItWasIsPutInItsPlace) {
  const TemporaryFolder folder;
  write_together(folder.path(), [] {});
  EXPECT_TRUE(std::filesystem::exists(folder / "q" / "model.safetensors"));
}

TEST(RanksAgree, AnInputThatOneOfThemFindsChangedLeavesNothing) {
  const TemporaryFolder folder;
  EXPECT_ANY_THROW(
      write_together(folder.path(), [&] { io::write_file(folder / "theirs.json", "{\"changed\": 1}", true); }));
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"ours.json", "theirs.json"}));
}

}  // namespace
}  // namespace w4q::test
