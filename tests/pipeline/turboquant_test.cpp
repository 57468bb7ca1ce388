// TurboQuant's checkpoints, there and back byte for byte, and what is refused.
#include "pipeline/turboquant.h"

#include <bit>
#include <cmath>
#include <fstream>

#include "core/progress.h"
#include "formats/rotation.h"
#include "io/files.h"
#include "io/json.h"
#include "model/model.h"
#include "pipeline/quantize_model.h"
#include "pipeline/turboquant_config.h"
#include "support.h"

namespace w4q::pipeline {
namespace {

namespace fs = std::filesystem;
using Packed = std::shared_ptr<const formats::PackedLinear>;

std::string bytes_of_large_file(const fs::path& path) { return io::read_file(path, 1 << 28); }

class TurboQuant : public ::testing::Test {
 protected:
  void SetUp() override { set_progress_enabled(false); }

  /// A checkpoint of w4q's, exported.
  fs::path exported(const std::string& name, std::string_view schemes, bool shared = false, bool lm_head = false) {
    QuantizeRequest wanted;
    wanted.model = test::testdata() / "w4q-llama-tiny";
    wanted.output = folder_ / (name + "-w4q");
    wanted.method = "rotated";
    wanted.residual = formats::parse_schemes(schemes);
    wanted.scheme = wanted.residual.front();
    wanted.residual.erase(wanted.residual.begin());
    wanted.rotation.shared = shared;
    wanted.rotation.seed = seed_;
    wanted.lm_head = lm_head;
    quantize_model(wanted);
    convert(wanted.output, folder_ / name, "turboquant");
    return folder_ / name;
  }

  static ConvertReport convert(const fs::path& from, const fs::path& to, std::string_view target) {
    ConvertRequest request;
    request.input = from;
    request.output = to;
    request.to = target;
    return target == "w4q" ? import_turboquant(request, false) : export_turboquant(request, false);
  }

  void edit_config(const fs::path& folder, const char* key, const io::Json& value) {
    io::Json config = io::read_json(folder / turboquant_config_file);
    config[key] = value;
    std::ofstream(folder / turboquant_config_file) << config.dump(2);
  }

  test::TemporaryFolder folder_;
  int count_ = 0;
  std::optional<uint64_t> seed_ = 42;  // nothing: no signs
};

TEST_F(TurboQuant, ThereAndBackIsByteForByte) {
  for (const auto& [schemes, shared] : {std::pair{"rotated4-d128-f32+rotated2-d128-f32", false},
                                        {"rotated3-d64+rotated3-d64", true},
                                        {"rotated4-d128-f32", false}}) {
    const std::string name =
        shared ? "shared" : std::string(schemes).substr(0, 12) + std::to_string(std::string(schemes).size());
    const fs::path first = exported(name, schemes, shared);
    EXPECT_TRUE(is_turboquant(first));
    convert(first, folder_ / (name + "-own"), "w4q");
    EXPECT_FALSE(is_turboquant(folder_ / (name + "-own")));
    convert(folder_ / (name + "-own"), folder_ / (name + "-again"), "turboquant");
    for (const char* file : {"model.safetensors", "non_quantized.safetensors", "turboquant_config.json"}) {
      EXPECT_EQ(bytes_of_large_file(first / file), bytes_of_large_file(folder_ / (name + "-again") / file))
          << name << " " << file;
    }
    const auto config = io::read_json(first / turboquant_config_file);
    EXPECT_EQ(config["rotation_strategy"], shared ? "shared" : "different");
  }
}

/// The rule of the project, written out: norm/√d · signs ∘ (H c)/√d, with entry (i, j) of H by the parity of i & j.
TEST_F(TurboQuant, TheTensorsMeanWhatTheProjectSays) {
  const fs::path stored = exported("m", "rotated4-d64-f32");
  convert(stored, folder_ / "own", "w4q");
  const auto file = io::Checkpoint::open(stored / "model.safetensors");
  const std::string name = "model_layers_1_mlp_down_proj";
  const auto indices = file.load(name + ".indices");
  const Buffer norms = Buffer::copy_of(file.load(name + ".norms")->bytes);
  const Buffer codebook = Buffer::copy_of(file.load("codebook")->bytes);
  const auto model = model::Model::open(folder_ / "own");
  const int64_t k = 768, row = 5, group = 7;
  std::vector<float> decoded(static_cast<size_t>(k));
  kernels::decode_rows(model.layers()[1].linear(model::Role::down), row, row + 1, {decoded.data(), 1, k});
  const formats::InputRotation signs({64, 42 + 64 * static_cast<uint64_t>(group)}, 64);
  for (int64_t i = 0; i < 64; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < 64; ++j) {
      const int64_t col = group * 64 + j;
      const auto byte = std::to_integer<unsigned>(indices->bytes[static_cast<size_t>(row * k / 2 + col / 2)]);
      const double level = codebook.as<float>()[byte >> (col % 2 * 4) & 15];
      sum += std::popcount(static_cast<uint64_t>(i & j)) % 2 == 1 ? -level : level;
    }
    const double sign = std::copysign(1.0, signs.factors()[static_cast<size_t>(i)]);
    const double norm = norms.as<float>()[static_cast<size_t>(row * (k / 64) + group)];
    EXPECT_NEAR(decoded[static_cast<size_t>(group * 64 + i)], norm / 8 * sign * sum / 8, 1e-6 * norm);
  }
}

TEST_F(TurboQuant, EveryLinearMayHaveSeedsOfItsOwn) {
  const fs::path stored = exported("m", "rotated4-d128-f32+rotated4-d128-f32");
  edit_config(stored, "rotation_strategy", "per_layer");
  convert(stored, folder_ / "own", "w4q");
  const auto model = model::Model::open(folder_ / "own");
  const auto& second = *std::get<Packed>(model.layers()[0].linear(model::Role::key).matrix);  // q, k …
  EXPECT_EQ(second.rotations[0].rotation().seed, 42u + 10007);
  EXPECT_EQ(second.rotations[1].rotation().seed, 1042u + 10007);
  const auto& last = *std::get<Packed>(model.layers()[3].linear(model::Role::down).matrix);
  EXPECT_EQ(last.rotations[0].rotation().seed, 42u + 27 * 10007);
  convert(folder_ / "own", folder_ / "again", "turboquant");
  EXPECT_EQ(io::read_json(folder_ / "again" / turboquant_config_file)["rotation_strategy"], "per_layer");
}

TEST_F(TurboQuant, WhatCannotBeReadIsNamed) {
  const fs::path stored = exported("m", "rotated3-d128-f32");
  const auto refuse = [&](ErrorCode code, std::initializer_list<std::string_view> parts) {
    test::expect_error(code, parts, [&] { convert(stored, folder_ / "x", "w4q"); });
  };
  edit_config(stored, "rotation", "qr");
  refuse(ErrorCode::unsupported, {"rotation \"qr\"", "LAPACK"});
  edit_config(stored, "rotation", "hadamard");
  edit_config(stored, "entropy_coding", true);
  refuse(ErrorCode::unsupported, {"entropy"});
  edit_config(stored, "entropy_coding", false);
  edit_config(stored, "norm_codec", "factored_int8");
  refuse(ErrorCode::unsupported, {"factored_int8"});
  edit_config(stored, "norm_codec", "fp32");
  edit_config(stored, "rotation_strategy", "random");
  refuse(ErrorCode::unsupported, {"random"});
  edit_config(stored, "rotation_strategy", "different");
  edit_config(stored, "bit_width", 2);
  refuse(ErrorCode::bad_file, {"codebook", "[8]"});
  edit_config(stored, "bit_width", 3);
  edit_config(stored, "group_size", 96);
  refuse(ErrorCode::unsupported, {"d96"});
  edit_config(stored, "group_size", 64);
  refuse(ErrorCode::bad_file, {"norms", "[256, 4]"});
}

TEST_F(TurboQuant, WhatHasNoPlaceThereIsNamed) {
  const auto refuse = [&](std::string_view schemes, std::string_view why, bool shared, bool head) {
    test::expect_error(ErrorCode::unsupported, {"turboquant cannot hold", why},
                       [&] { exported(std::to_string(count_++), schemes, shared, head); });
  };
  refuse("rotated5-d128", "nibbles", false, false);
  refuse("rotated4-d512", "ragged", false, false);
  refuse("rotated4-d128+rotated4-d64", "groups", false, false);
  refuse("rotated4-d128+int4-g128-f16", "rotated schemes only", false, false);
  refuse("rotated2-d128+rotated2-d128+rotated2-d128", "two passes", false, false);
  refuse("rotated4-d128", "embedding tables", false, true);  // the model ties its head to them
  seed_.reset();
  refuse("rotated4-d128", "no signs", false, false);
}

}  // namespace
}  // namespace w4q::pipeline
