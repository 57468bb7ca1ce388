// A rank that fails, or is gone: one error, the right status, and nothing that looks complete.
#include <signal.h>

#include <fstream>

#include "io/json.h"
#include "launch.h"

namespace w4q::test {
namespace {

size_t count(const std::string& text, std::string_view what) {
  size_t found = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

class RanksFail : public OnRanks {};

TEST_F(RanksFail, WhatAllFindIsToldOnce) {
  const auto usage = run_ranks(3, {"quantize", "--no-such-option"});
  EXPECT_EQ(usage.status, 2);
  EXPECT_EQ(count(usage.err, "error:"), 1u) << usage.err;

  const auto missing = run_ranks(3, {"quantize", path("nothing"), "-o", path("q"), "--quiet"});
  EXPECT_EQ(missing.status, 3);
  EXPECT_EQ(count(missing.err, "error:"), 1u) << missing.err;
  EXPECT_NE(missing.err.find("at rank 0 of 3"), std::string::npos) << missing.err;
  EXPECT_TRUE(names_in(path("")).empty());
}

TEST_F(RanksFail, WorkOfOneProcessIsRefused) {
  const auto run = run_ranks(2, {"inspect", bundled_model()});
  EXPECT_EQ(run.status, 3);
  EXPECT_EQ(count(run.err, "error: inspect is the work of one process, and was started as one of 2"), 1u) << run.err;
  EXPECT_EQ(run.out, "");
}

/// A NaN in one tensor, which one of the ranks meets.
TEST_F(RanksFail, ABadTensorAtOneRankEndsAll) {
  const std::string model = copy_bundled_model(path("model"));
  std::fstream file(model + "/model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  uint64_t header = 0;
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  std::string text(header, ' ');
  file.read(text.data(), static_cast<std::streamsize>(header));
  const auto json = io::parse_json(text, "header");
  const auto begin = json.at("model.layers.1.mlp.down_proj.weight").at("data_offsets").at(0).get<uint64_t>();
  file.seekp(static_cast<std::streamoff>(sizeof header + header + begin + 2 * 7));
  file.write("\xff\x7f", 2);
  file.close();
  const auto run = run_ranks(3, {"quantize", model, "-o", path("q"), "--quiet"});
  EXPECT_EQ(run.status, 3);
  EXPECT_EQ(count(run.err, "error:"), 1u) << run.err;
  EXPECT_NE(run.err.find("error: model.layers.1.mlp.down_proj.weight"), std::string::npos) << run.err;
  EXPECT_EQ(names_in(path("")), std::vector<std::string>{"model"});
  EXPECT_LT(run.seconds, 8);  // ranks that hear of it do not wait for their patience, which is 10 s, to end
}

}  // namespace
}  // namespace w4q::test
