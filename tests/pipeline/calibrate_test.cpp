// Calibration through the library: what is collected, spilled, saved, merged and refused.
#include "pipeline/calibrate_model.h"

#include <fstream>
#include <map>

#include "core/parallel.h"
#include "core/progress.h"
#include "io/files.h"
#include "model/decoder.h"
#include "pipeline/hidden_states.h"
#include "pipeline/statistics_file.h"
#include "support.h"
#include "tokenizer/token_file.h"

namespace w4q::pipeline {
namespace {

using test::expect_error;

class Calibrate : public ::testing::Test {
 protected:
  void SetUp() override { set_progress_enabled(false); }

  static std::filesystem::path model() { return test::testdata() / "w4q-llama-tiny"; }
  static std::filesystem::path ids() { return model() / "own/selfgen.ids.u16"; }

  CalibrateRequest request(const std::string& name) const {
    CalibrateRequest result;
    result.model = model();
    result.output = folder_ / name;
    result.text.ids = ids();
    result.text.samples = 4;
    result.text.length = 128;
    return result;
  }
  std::string bytes(const std::string& name) const { return io::read_file(folder_ / name); }

  test::TemporaryFolder folder_;
};

/// The layers run one by one over all windows, or the whole model runs window by window: the same sums in the same
/// order, so the same bits.
TEST_F(Calibrate, LayerByLayerSeesWhatTheWholeModelSees) {
  const auto opened = model::open_model(model());
  const auto& config = opened.config;
  const auto windows = cut_windows(tokenizer::read_ids(ids(), config.vocab_size), 3, 64, "ids");
  const auto whole = model::Model::open(model());
  std::map<std::string, quantize::InputStatistics> expected;
  model::Decoder decoder(whole, 64);
  model::Observer observer;
  observer.linear_input = [&](std::span<const std::string_view> names, MatrixView<const float> input) {
    auto& sums =
        expected.try_emplace(std::string(names.front()), quantize::make_statistics(input.cols, true)).first->second;
    quantize::add_rows(sums, input, names.front());
  };
  for (int64_t window = 0; window < 3; ++window) {
    decoder.reset();
    decoder.forward(windows.window(window), &observer);
  }
  Calibration calibration(opened, windows, {});
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto statistics = calibration.next();
    const auto groups = model::input_groups(config, layer);
    for (size_t i = 0; i < groups.size(); ++i) {
      const auto& sums = expected.at(groups[i].name());
      EXPECT_EQ(statistics[i].count, 3 * 64);
      EXPECT_EQ(statistics[i].sum_abs, sums.sum_abs) << groups[i].name();
      EXPECT_EQ(statistics[i].gram, sums.gram) << groups[i].name();
    }
  }
  EXPECT_EQ(expected.size(), 4u * 4u);
  expect_error(ErrorCode::internal, {"no further layer"}, [&] { calibration.next(); });
}

TEST_F(Calibrate, FileHoldsTheSumsAndTheirOrigin) {
  const auto report = calibrate_model(request("s.safetensors"));
  EXPECT_EQ(report.tokens, 4 * 128);
  const auto config = model::read_config(model());
  const auto file = StatisticsFile::open(folder_ / "s.safetensors", config);
  file.check_model(model_identity(io::Checkpoint::open(model())));
  EXPECT_EQ(file.origin().tokens, 4 * 128);
  EXPECT_EQ(file.origin().texts.size(), 1u);
  EXPECT_TRUE(file.origin().gram);
  const auto statistics = file.load(2);
  EXPECT_EQ(statistics[3].width, 768);
  EXPECT_EQ(statistics[3].count, 4 * 128);
  EXPECT_EQ(static_cast<int64_t>(std::filesystem::file_size(folder_ / "s.safetensors")), report.file_bytes);
}

TEST_F(Calibrate, BytesDependNeitherOnThreadsNorOnMemory) {
  auto one = request("one.safetensors"), three = request("three.safetensors"), spilled = request("spill.safetensors");
  set_threads(1);
  calibrate_model(one);
  set_threads(3);
  calibrate_model(three);
  set_threads(0);
  // Room for one of the four windows beside the layer.
  spilled.options.max_memory = calibration_memory(model::open_model(model()), 128, true) + 128 * 256 * 4;
  EXPECT_EQ(calibrate_model(spilled).spilled, 3);
  EXPECT_EQ(bytes("one.safetensors"), bytes("three.safetensors"));
  EXPECT_EQ(bytes("one.safetensors"), bytes("spill.safetensors"));
  // Nothing of the spill is left.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 3);
}

TEST_F(Calibrate, MergedFilesAreTheWhole) {
  const auto config = model::read_config(model());
  const auto all = tokenizer::read_ids(ids(), config.vocab_size);
  const auto write = [&](const char* name, size_t begin, size_t count) {
    std::ofstream(folder_ / name, std::ios::binary)
        << tokenizer::encode_ids(std::span(all).subspan(begin * 128, count * 128), 2);
    auto part = request(std::string(name) + ".safetensors");
    part.text.ids = folder_ / name;
    calibrate_model(part);
  };
  write("a.u16", 0, 2);
  write("b.u16", 2, 2);
  write("whole.u16", 0, 4);
  CalibrateRequest merge;
  merge.model = model();
  merge.output = folder_ / "merged.safetensors";
  merge.merge = {folder_ / "a.u16.safetensors", folder_ / "b.u16.safetensors"};
  EXPECT_EQ(calibrate_model(merge).tokens, 4 * 128);
  const auto merged = StatisticsFile::open(folder_ / "merged.safetensors", config);
  const auto whole = StatisticsFile::open(folder_ / "whole.u16.safetensors", config);
  EXPECT_EQ(merged.origin().texts.size(), 2u);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto a = merged.load(layer), b = whole.load(layer);
    for (size_t i = 0; i < a.size(); ++i) {
      for (size_t c = 0; c < a[i].sum_abs.size(); ++c) EXPECT_DOUBLE_EQ(a[i].sum_abs[c], b[i].sum_abs[c]);
      // Off the diagonal sums cancel: what rounding to fp32 in the files moves is measured by the diagonal.
      for (int64_t r = 0; r < a[i].width; ++r) {
        for (int64_t c = r; c < a[i].width; ++c) {
          const auto at = static_cast<size_t>(quantize::triangle_row(a[i].width, r) + c - r);
          const double scale =
              std::sqrt(a[i].sum_squares[static_cast<size_t>(r)] * a[i].sum_squares[static_cast<size_t>(c)]);
          ASSERT_NEAR(a[i].gram[at], b[i].gram[at], 0x1p-22 * scale);
        }
      }
    }
  }
}

TEST_F(Calibrate, WindowsAreSpreadOverTheText) {
  std::vector<int32_t> ids(1000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  const auto windows = cut_windows(ids, 3, 100, "ids");  // ten windows are there
  ASSERT_EQ(windows.samples, 3);
  EXPECT_EQ(windows.window(0)[0], 0);
  EXPECT_EQ(windows.window(1)[0], 300);
  EXPECT_EQ(windows.window(2)[99], 699);
  EXPECT_EQ(cut_windows(ids, 30, 100, "ids").samples, 10);
  EXPECT_NE(cut_windows(ids, 10, 100, "ids").hash, cut_windows(ids, 5, 200, "ids").hash);
}

TEST_F(Calibrate, RefusesWhatMakesNoSense) {
  auto none = request("x.safetensors");
  none.text.ids.clear();
  expect_error(ErrorCode::bad_argument, {"nothing to calibrate", "--text"}, [&] { calibrate_model(none); });
  auto tight = request("x.safetensors");
  tight.options.max_memory = 1000;
  expect_error(ErrorCode::bad_argument, {"--max-memory", "needs"}, [&] { calibrate_model(tight); });
  auto long_window = request("x.safetensors");
  long_window.text.length = 1 << 20;
  expect_error(ErrorCode::bad_argument, {"selfgen", "too short"}, [&] { calibrate_model(long_window); });
  auto name = request("x.bin");
  expect_error(ErrorCode::bad_argument, {"x.bin", ".safetensors"}, [&] { calibrate_model(name); });
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(Calibrate, StatisticsOfAnotherModelAreRefused) {
  std::filesystem::copy(model(), folder_ / "m", std::filesystem::copy_options::recursive);
  {
    // One bit of the last norm: another model of the same shape.
    const auto file = folder_ / "m/model.safetensors";
    const auto checkpoint = io::Checkpoint::open(file);
    const auto& norm = checkpoint.at("model.norm.weight");
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header = 0;
    stream.read(reinterpret_cast<char*>(&header), 8);
    stream.seekp(static_cast<std::streamoff>(8 + header + norm.begin));
    stream.put(static_cast<char>(static_cast<uint8_t>(checkpoint.load("model.norm.weight")->bytes[0]) ^ 1));
  }
  auto other = request("other.safetensors");
  other.model = folder_ / "m";
  calibrate_model(other);
  auto merge = request("x.safetensors");
  merge.merge = {folder_ / "other.safetensors"};
  expect_error(ErrorCode::mismatch, {"another model"}, [&] { calibrate_model(merge); });
  const auto config = model::read_config(test::testdata() / "arch/qwen2-window");
  expect_error(ErrorCode::bad_file, {"type or shape"},
               [&] { StatisticsFile::open(folder_ / "other.safetensors", config); });
}

/// A statistics file with one value changed at the start of a tensor.
class DamagedStatistics : public Calibrate {
 protected:
  void damage(const std::string& tensor, const std::string& value) {
    if (!std::filesystem::exists(folder_ / "s.safetensors")) calibrate_model(request("s.safetensors"));
    std::string content = bytes("s.safetensors");
    const auto header = io::parse_safetensors(std::as_bytes(std::span(content)), content.size(), "s");
    for (const auto& info : header.tensors) {
      if (info.name == tensor) content.replace(header.data_begin + info.begin, value.size(), value);
    }
    std::ofstream(folder_ / "d.safetensors", std::ios::binary) << content;
  }
  void expect_refused(std::initializer_list<std::string_view> parts) {
    const auto config = model::read_config(model());
    const auto file = StatisticsFile::open(folder_ / "d.safetensors", config);
    expect_error(ErrorCode::bad_file, parts, [&] { file.load(0); });
  }
  template <class T>
  static std::string raw(T value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
  }
};

TEST_F(DamagedStatistics, AreNamed) {
  damage("model.layers.0.mlp.down_proj.sum_abs", raw(-1.0));
  expect_refused({"d.safetensors", "down_proj.sum_abs[0]"});
  damage("model.layers.0.mlp.down_proj.sum_squares", raw(std::nan("")));
  expect_refused({"down_proj.sum_squares[0]"});
  damage("model.layers.0.mlp.down_proj.sum_squares", raw(1e-9));
  expect_refused({"sum_squares[0]", "too small"});
  damage("model.layers.0.self_attn.o_proj.gram", raw(1e9f));
  expect_refused({"o_proj.gram[0]", "contradicts"});
  damage("model.layers.0.self_attn.o_proj.gram", raw(-std::numeric_limits<float>::infinity()));
  expect_refused({"o_proj.gram[0]", "not finite"});
}

TEST_F(DamagedStatistics, AreNoStatistics) {
  const auto config = model::read_config(model());
  const auto refused = [&](const std::filesystem::path& path, std::initializer_list<std::string_view> parts) {
    expect_error(ErrorCode::bad_file, parts, [&] { StatisticsFile::open(path, config); });
  };
  refused(model() / "model.safetensors", {"no statistics file"});
  refused(model(), {"folder"});
  refused(folder_ / "missing.safetensors", {"missing"});
  calibrate_model(request("s.safetensors"));
  const std::string good = bytes("s.safetensors");
  const auto written = [&](const std::string& from, const std::string& to) {
    std::string content = good;
    content.replace(content.find(from), from.size(), to);
    std::ofstream(folder_ / "d.safetensors", std::ios::binary) << content;
    return folder_ / "d.safetensors";
  };
  refused(written("\"tokens\":\"512\"", "\"tokens\":\"-12\""), {"tokens", "-12"});
  refused(written("\"tokens\":\"512\"", "\"tokens\":\"5e2\""), {"tokens", "5e2"});
  expect_error(ErrorCode::unsupported, {"version 7"},
               [&] { StatisticsFile::open(written("\"version\":\"1\"", "\"version\":\"7\""), config); });
}

TEST(HiddenStates, SpilledOrNotTheyComeBackAsTheyWere) {
  test::TemporaryFolder folder;
  HiddenStates states(5, 3, 7, 2 * 3 * 7 * 4, folder / "out");
  EXPECT_EQ(states.spilled(), 3);
  for (int round = 0; round < 2; ++round) {
    for (int64_t i = 0; i < 5; ++i) {
      const auto view = states.get(i);
      for (int64_t v = 0; v < 21; ++v) {
        if (round > 0) {
          EXPECT_EQ(view.data[v], static_cast<float>(100 * i + v));
        }
        view.data[v] = static_cast<float>(100 * i + v);
      }
      states.put(i);
    }
  }
}

}  // namespace
}  // namespace w4q::pipeline
