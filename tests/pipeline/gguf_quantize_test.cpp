// One step from a 16-bit model to K-quants: mixes, calibration, exact sizes.
#include <fstream>
#include <map>
#include <memory>
#include <set>

#include "core/parallel.h"
#include "core/progress.h"
#include "core/text.h"
#include "formats/gguf_forms.h"
#include "io/files.h"
#include "io/gguf.h"
#include "pipeline/calibrate_model.h"
#include "pipeline/gguf_export.h"
#include "pipeline/gguf_targets.h"
#include "pipeline/quantize_model.h"
#include "small_model.h"
#include "support.h"

namespace w4q::pipeline {
namespace {

using test::expect_error;
using enum GgmlType;
namespace fs = std::filesystem;

class GgufQuantize : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    set_progress_enabled(false);
    set_threads(1);  // little work at a time
    folder_ = std::make_unique<test::TemporaryFolder>();
    CalibrateRequest calibrate;
    calibrate.model = model();
    calibrate.output = statistics();
    calibrate.text = {.text = {}, .ids = model() / "own/selfgen.ids.u16", .samples = 6, .length = 64};
    calibrate.windows = true;
    calibrate_model(calibrate);
  }
  static void TearDownTestSuite() {
    folder_.reset();
    set_threads(0);
  }

  static fs::path model() { return test::testdata() / "w4q-llama-tiny"; }
  static fs::path statistics() { return *folder_ / "s.safetensors"; }
  static fs::path file() { return *folder_ / "m.gguf"; }

  static GgufExportRequest request(const std::string& to, bool feedback = true) {
    GgufCalibrationRequest calibration;
    calibration.source.statistics = statistics();
    calibration.feedback = feedback;
    return {.input = model(), .output = file(), .to = to, .calibration = calibration, .overwrite = true};
  }

  static inline std::unique_ptr<test::TemporaryFolder> folder_;
};

GgmlType type_of(const std::string& target, GgufRole role, int64_t layer, int64_t layers, int64_t shared = 4) {
  return gguf_type(gguf_target(target), {role, layer, layers, shared, true, true});
}

/// Of llama.cpp's files of models with 32 and 80 layers.
TEST(GgufMixes, GiveWhatLlamaCppGives) {
  std::set<int64_t> more;
  for (int64_t layer = 0; layer < 32; ++layer) {
    const auto value = type_of("gguf-q4_k_m", GgufRole::value, layer, 32);
    EXPECT_EQ(value, type_of("gguf-q4_k_m", GgufRole::down, layer, 32));
    EXPECT_EQ(type_of("gguf-q4_k_m", GgufRole::gate, layer, 32), q4_k);
    if (value == q6_k) more.insert(layer);
  }
  EXPECT_EQ(more, (std::set<int64_t>{0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}));
  EXPECT_EQ(type_of("gguf-q4_k_s", GgufRole::value, 3, 32), q5_k);
  EXPECT_EQ(type_of("gguf-q4_k_s", GgufRole::value, 4, 32), q4_k);
  EXPECT_EQ(type_of("gguf-q3_k_m", GgufRole::down, 1, 32), q5_k);
  EXPECT_EQ(type_of("gguf-q3_k_m", GgufRole::down, 2, 32), q4_k);
  EXPECT_EQ(type_of("gguf-q3_k_m", GgufRole::output, 9, 32), q4_k);
  EXPECT_EQ(type_of("gguf-q2_k", GgufRole::value, 9, 32), q4_k);
  EXPECT_EQ(type_of("gguf-q2_k", GgufRole::value, 9, 32, 2), q3_k);
  EXPECT_EQ(type_of("gguf-iq4_xs", GgufRole::value, 9, 32), q5_k);
  EXPECT_EQ(type_of("gguf-q4_k_m", GgufRole::value, 11, 80, 8), q5_k);
  EXPECT_EQ(gguf_type(gguf_target("gguf-q4_k_m"), {GgufRole::embeddings, 0, 32, 4, true, false}), q6_k);
  EXPECT_EQ(gguf_type(gguf_target("gguf-q4_k_m"), {GgufRole::embeddings, 0, 32, 4, false, false}), q4_k);
  EXPECT_EQ(gguf_type_for_rows(q4_k, 1408), q5_0);
  EXPECT_EQ(gguf_type_for_rows(q3_k, 1408), iq4_nl);
  EXPECT_EQ(gguf_type_for_rows(q6_k, 1000), f16);
}

TEST(GgufMixes, HaveRowsThatEncode) {
  for (const auto& target : gguf_targets()) {
    if (!target.quantizes) continue;
    EXPECT_TRUE(formats::find_gguf_form(target.linear) != nullptr) << target.name;
    EXPECT_TRUE(formats::find_gguf_form(target.head) != nullptr) << target.name;
    EXPECT_THROW(gguf_target(std::string(target.name) + "x"), Error);
  }
}

/// The error of a weight is least without calibration; what calibration knows costs some of it, for better outputs.
TEST_F(GgufQuantize, CalibrationChangesLinearsAndNothingElse) {
  const auto plain = export_gguf({.input = model(), .output = file(), .to = "gguf-q4_k_m", .overwrite = true});
  const auto first = io::read_file(file());
  const auto weighed = export_gguf(request("gguf-q4_k_m", false));
  const auto fed = export_gguf(request("gguf-q4_k_m"));
  const auto again = io::read_file(file());
  export_gguf(request("gguf-q4_k_m"));
  EXPECT_EQ(again, io::read_file(file()));
  EXPECT_EQ(first.size(), again.size());
  for (size_t i = 0; i < plain.tensors.size(); ++i) {
    const auto &a = plain.tensors[i], &b = weighed.tensors[i], &c = fed.tensors[i];
    EXPECT_EQ(a.to, c.to) << a.name;
    const bool linear = a.name.starts_with("blk.") && a.shape.size() == 2;
    EXPECT_EQ(a.error.squared_error < b.error.squared_error, linear) << a.name;
    EXPECT_EQ(b.error.squared_error < c.error.squared_error, linear) << a.name;
    // Q4_K plainly rounded: 0.07. So few tokens for so many channels leave much to move: 0.152 (2026-11-23).
    EXPECT_LT(c.error.relative(), 0.17) << a.name;
  }
}

TEST_F(GgufQuantize, FilesAreOfTheSizeThatWasAskedFor) {
  constexpr int64_t bytes = 1'700'000;
  auto wanted = request("gguf");
  wanted.bytes = bytes;
  const auto report = export_gguf(wanted);
  EXPECT_EQ(report.file_bytes, static_cast<int64_t>(fs::file_size(file())));
  EXPECT_LE(report.file_bytes, bytes);
  EXPECT_GT(report.file_bytes, bytes * 199 / 200);
  EXPECT_NE(report.notes.back().find("KL "), std::string::npos) << report.notes.back();
  std::set<std::string> types;
  for (const auto& tensor : report.tensors) types.insert(tensor.to);
  EXPECT_GT(types.size(), 3u);
  auto small = request("gguf");
  small.bytes = 900'000;
  expect_error(ErrorCode::bad_argument, {"less than the smallest types give"}, [&] { export_gguf(small); });
}

/// Experts of a layer are one tensor, and one choice; what is chosen predicts as well as what is exchanged for it.
TEST_F(GgufQuantize, AMixtureHasTheSizeThatWasAskedForToo) {
  const auto mixture = test::testdata() / "w4q-mixture-tiny";
  auto wanted = request("gguf");
  wanted.input = mixture;
  wanted.output = *folder_ / "x.gguf";
  wanted.bytes = 2'900'000;
  auto& source = wanted.calibration->source;
  source.statistics.clear();
  source.text = {.text = {}, .ids = model() / "own/selfgen.ids.u16", .samples = 4, .length = 48};
  const auto report = export_gguf(wanted);
  EXPECT_LE(report.file_bytes, wanted.bytes);
  EXPECT_GT(report.file_bytes, wanted.bytes * 97 / 100);
  EXPECT_NE(report.notes.back().find("KL "), std::string::npos) << report.notes.back();
  const auto file = io::GgufFile::open(wanted.output);
  std::set<GgmlType> types;
  for (int layer = 0; layer < 4; ++layer) {
    for (const char* part : {"gate", "up", "down"}) {
      types.insert(file.find(concat("blk.", layer, ".ffn_", part, "_exps.weight"))->type);
    }
  }
  EXPECT_GT(types.size(), 1u);
}

/// Layers that read others' keys and have embeddings of their own, and rows of 16, which no type has blocks for.
TEST_F(GgufQuantize, AModelWhoseLayersShareHasTheSizeThatWasAskedForToo) {
  auto wanted = request("gguf");
  wanted.input = *folder_ / "gemma";
  wanted.output = *folder_ / "gemma.gguf";
  test::write_small_model(model::architecture_row("gemma4_text"), wanted.input,
                          {{"hidden_size", 256}, {"intermediate_size", 256}, {"hidden_size_per_layer_input", 16}});
  std::vector<uint16_t> ids;
  for (int i = 0; i < 200; ++i) ids.push_back(static_cast<uint16_t>((i * 37 + i * i * 11 + 5) % 160));
  auto& source = wanted.calibration->source;
  source.statistics.clear();
  source.text = {.text = {}, .ids = *folder_ / "gemma.u16", .samples = 4, .length = 48};
  std::ofstream(source.text.ids, std::ios::binary).write(reinterpret_cast<const char*>(ids.data()), 400);
  wanted.tokenizer = false;
  wanted.bytes = 850'000;
  const auto report = export_gguf(wanted);
  EXPECT_LE(report.file_bytes, wanted.bytes);
  EXPECT_GT(report.file_bytes, wanted.bytes * 95 / 100);
  EXPECT_NE(report.notes.back().find("KL "), std::string::npos) << report.notes.back();
  const auto file = io::GgufFile::open(wanted.output);
  EXPECT_EQ(file.find("blk.0.proj.weight")->type, GgmlType::f16);
  std::set<GgmlType> types;
  for (int layer = 0; layer < 4; ++layer) types.insert(file.find(concat("blk.", layer, ".ffn_down.weight"))->type);
  EXPECT_FALSE(types.contains(GgmlType::f16));
}

TEST_F(GgufQuantize, RefusesWhatCannotBeCalibrated) {
  auto both = request("gguf-q4_k");
  both.calibration->source.text.self = true;
  expect_error(ErrorCode::bad_argument, {"one of the two"}, [&] { export_gguf(both); });
  QuantizeRequest packed;
  packed.model = model();
  packed.output = *folder_ / "packed";
  packed.scheme = formats::parse_scheme("int4-g32-f16");
  packed.method = "rtn";
  quantize_model(packed);
  auto twice = request("gguf-q4_k");
  twice.input = packed.output;
  expect_error(ErrorCode::unsupported, {"packed already"}, [&] { export_gguf(twice); });
  auto diagonal = request("gguf-q4_k");
  CalibrateRequest calibrate;
  calibrate.model = model();
  diagonal.calibration->source.statistics = calibrate.output = *folder_ / "d.safetensors";
  calibrate.text = {.text = {}, .ids = model() / "own/selfgen.ids.u16", .samples = 1, .length = 32};
  calibrate.options.gram = false;
  calibrate_model(calibrate);
  expect_error(ErrorCode::bad_argument, {"Gram matrices"}, [&] { export_gguf(diagonal); });
  diagonal.calibration->feedback = false;
  EXPECT_NO_THROW(export_gguf(diagonal));
}

}  // namespace
}  // namespace w4q::pipeline
