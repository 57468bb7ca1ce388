// No alarm on what sound programs do to trained models: scales folded into all layers or into some, as AWQ, SmoothQuant and
// equalization fold them, layers that were added, norms folded away. scripts/sound-folders asks of more, and of what is made
// of them.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "core/progress.h"
#include "core/rng.h"
#include "made_checkpoint.h"
#include "model/layer_plan.h"
#include "packed_model.h"
#include "pipeline/convert_model.h"
#include "support.h"
#include "verify/contents/contents.h"
#include "verify/statistics/statistics.h"
#include "verify/weights/kept.h"
#include "verify/weights/weights.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using ::testing::IsEmpty;

/// A matrix, or a norm as one row of it, in fp32.
struct FoldedMatrix {
  MadeCheckpoint& made;
  std::string name;
  int64_t n = 1, k = 1;
  std::vector<float> values = {};

  FoldedMatrix(MadeCheckpoint& of, std::string tensor) : made(of), name(std::move(tensor)) {
    const auto& stored = made.tensors.at(name);
    n = stored.shape.size() > 1 ? stored.shape[0] : 1, k = stored.shape.back();
    for (const uint16_t value : made.values<uint16_t>(name)) values.push_back(f32_from_bf16(value));
  }
  ~FoldedMatrix() {
    auto stored = made.values<uint16_t>(name);
    for (size_t i = 0; i < values.size(); ++i) stored[i] = bf16_from_f32(values[i]);
  }
  FoldedMatrix(const FoldedMatrix&) = delete;
  FoldedMatrix& operator=(const FoldedMatrix&) = delete;

  /// Columns by `scales` to the power of `power`.
  void scale_columns(const std::vector<double>& scales, int power,
                     const std::function<int64_t(int64_t)>& channel = {}) {
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t col = 0; col < k; ++col) {
        const double scale = scales[static_cast<size_t>(channel ? channel(col) : col)];
        values[static_cast<size_t>(row * k + col)] *= static_cast<float>(power > 0 ? scale : 1 / scale);
      }
    }
  }
  void scale_rows(const std::vector<double>& scales, int power) {
    for (int64_t row = 0; row < n; ++row) {
      const double scale = scales[static_cast<size_t>(row)];
      for (int64_t col = 0; col < k; ++col)
        values[static_cast<size_t>(row * k + col)] *= static_cast<float>(power > 0 ? scale : 1 / scale);
    }
  }
  std::vector<double> row_sizes() const {
    std::vector<double> sizes;
    for (int64_t row = 0; row < n; ++row) {
      double sum = 1e-12;
      for (int64_t col = 0; col < k; ++col) sum += std::pow(double{values[static_cast<size_t>(row * k + col)]}, 2);
      sizes.push_back(std::sqrt(sum / static_cast<double>(k)));
    }
    return sizes;
  }
};

/// Scales of so many channels, whose sizes may follow from rows.
using Scales = std::function<std::vector<double>(const std::string& site, const std::vector<double>& rows)>;

/// exp(spread · N(0, 1)), a hundredth of them 100 times as large where `loud`.
Scales random_scales(double spread, bool loud) {
  return [=](const std::string& site, const std::vector<double>& rows) {
    uint64_t seed = 0;
    for (const char letter : site) seed = (31 * seed + static_cast<uint64_t>(letter)) & 0xFFFF;
    std::vector<double> scales(rows.size());
    for (size_t i = 0; i < scales.size(); ++i) {
      scales[i] = std::exp(spread * random_normal(seed, i));
      if (loud && random_bits(seed + 1, i) % 100 == 0) scales[i] *= 100;
    }
    return scales;
  };
}
/// What makes all rows nearly as large.
std::vector<double> flat_scales(const std::string& site, const std::vector<double>& rows) {
  auto scales = random_scales(0.05, false)(site, rows);
  for (size_t i = 0; i < rows.size(); ++i) scales[i] *= rows[i];
  return scales;
}

/// Into norms and what reads them, rows of v and columns of o, rows of up and columns of down.
void fold_layer(MadeCheckpoint& made, int64_t layer, const Scales& scales) {
  const std::string path = concat("model.layers.", layer, ".");
  const auto matrix = [&](const std::string& name) { return FoldedMatrix(made, concat(path, name, ".weight")); };
  const auto fold_norm = [&](const std::string& norm, const std::vector<std::string>& readers) {
    auto factors = matrix(norm);
    std::vector<double> sizes;
    for (const float factor : factors.values) sizes.push_back(std::abs(double{factor}) + 1e-6);
    const auto folded = scales(path + norm, sizes);
    factors.scale_columns(folded, -1);
    for (const auto& reader : readers) matrix(reader).scale_columns(folded, 1);
  };
  const auto fold_pair = [&](const std::string& producer, const std::string& consumer) {
    auto rows = matrix(producer), columns = matrix(consumer);
    const auto folded = scales(path + producer, rows.row_sizes());
    constexpr int64_t head = 64;
    const int64_t shared = columns.k / rows.n;
    rows.scale_rows(folded, -1);
    columns.scale_columns(folded, 1,
                          [&](int64_t col) { return shared == 1 ? col : col / (head * shared) * head + col % head; });
  };
  fold_norm("input_layernorm", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"});
  fold_norm("post_attention_layernorm", {"mlp.gate_proj", "mlp.up_proj"});
  fold_pair("self_attn.v_proj", "self_attn.o_proj");
  fold_pair("mlp.up_proj", "mlp.down_proj");
}

std::vector<std::string> folded_faults(const MadeCheckpoint& made, const test::TemporaryFolder& folder) {
  set_progress_enabled(false);
  made.write(folder / "made");
  const auto model = model::open_model(folder / "made");
  auto faults = StatisticsCollector(model).report().faults;
  if (const auto check = check_contents({folder / "made", made.config, io::Checkpoint::open(folder / "made")}))
    faults.insert(faults.end(), check->faults.begin(), check->faults.end());
  return faults;
}

struct FoldedCase {
  const char* name;
  Scales scales;
  std::function<bool(int64_t layer)> where;
};
const FoldedCase folded_cases[] = {
    {"a little in one layer", random_scales(0.3, false), [](int64_t layer) { return layer == 2; }},
    {"in all layers but one", random_scales(0.7, false), [](int64_t layer) { return layer != 2; }},
    {"loud in one layer", random_scales(0.3, true), [](int64_t layer) { return layer == 2; }},
    {"flat in every other layer", flat_scales, [](int64_t layer) { return layer % 2 == 0; }},
    {"flat in one layer", flat_scales, [](int64_t layer) { return layer == 2; }}};

MadeCheckpoint with_folded(MadeCheckpoint made, const FoldedCase& folded) {
  for (int64_t layer = 0; layer < made.config["num_hidden_layers"].get<int64_t>(); ++layer) {
    if (folded.where(layer)) fold_layer(made, layer, folded.scales);
  }
  return made;
}

TEST(Folded, ScalesOfSomeLayers) {
  const test::TemporaryFolder folder;
  const auto tiny = MadeCheckpoint::of(test::bundled_model());
  for (const FoldedCase& folded : folded_cases)
    EXPECT_THAT(folded_faults(with_folded(tiny, folded), folder), IsEmpty()) << folded.name;
}

/// Every one of these was called wrong until 2026-11-27.
TEST(Folded, ScalesOfSomeLayersOfALargerModel) {
  W4Q_NEEDS_SHARED_DATA();
  const test::TemporaryFolder folder;
  const auto path = test::shared_data() / "models" / "w4q-llama-30m";
  MadeCheckpoint model{io::read_json(path / "config.json"), {}};
  const auto stored = io::Checkpoint::open(path);
  for (const auto& [name, info] : stored.tensors()) {
    const auto loaded = stored.load(name);
    model.tensors[name] = {info.dtype, info.shape, {loaded->bytes.begin(), loaded->bytes.end()}};
  }
  for (const FoldedCase& folded : folded_cases)
    EXPECT_THAT(folded_faults(with_folded(model, folded), folder), IsEmpty()) << folded.name;
}

/// folder/made, rounded to nearest, as folder/q.
void round_made(const test::TemporaryFolder& folder, const char* scheme) {
  pipeline::QuantizeRequest request;
  request.model = folder / "made";
  request.output = folder / "q";
  request.scheme = formats::parse_scheme(scheme);
  request.method = quantize::rounding_quantizer(request.scheme).name;
  pipeline::quantize_model(request);
}

/// Packed, in the two schemes whose best presets once failed, in NVFP4 and in what AWQ writes.
TEST(Folded, PackedWeights) {
  const auto tiny = MadeCheckpoint::of(test::bundled_model());
  for (const size_t number : {size_t{1}, size_t{2}}) {
    for (const char* scheme : {"mxfp8", "int3-g128-f16-asym", "nvfp4", "int4-g128-f16-asym", "kbit3-b32-e4m4"}) {
      const test::TemporaryFolder folder;
      with_folded(tiny, folded_cases[number]).write(folder / "made");
      round_made(folder, scheme);
      EXPECT_THAT(check_statistics(model::open_model(folder / "q")).faults, IsEmpty())
          << scheme << ", " << folded_cases[number].name;
    }
  }
}

/// Norms that are folded into what reads them, the last one into a head.
TEST(Folded, NormsOfOnes) {
  const test::TemporaryFolder folder;
  auto made = MadeCheckpoint::of(test::bundled_model());
  for (int64_t layer = 0; layer < 4; ++layer) {
    for (const auto& [norm, readers] :
         {std::pair("input_layernorm",
                    std::vector<std::string>{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}),
          std::pair("post_attention_layernorm", std::vector<std::string>{"mlp.gate_proj", "mlp.up_proj"})}) {
      const std::string path = concat("model.layers.", layer, ".");
      FoldedMatrix factors(made, concat(path, norm, ".weight"));
      const std::vector<double> folded(factors.values.begin(), factors.values.end());
      factors.scale_columns(folded, -1);
      for (const auto& reader : readers) FoldedMatrix(made, concat(path, reader, ".weight")).scale_columns(folded, 1);
    }
  }
  EXPECT_THAT(folded_faults(made, folder), IsEmpty());
  made = MadeCheckpoint::of(test::bundled_model());
  made.tensors["lm_head.weight"] = made.tensors.at("model.embed_tokens.weight");
  made.config["tie_word_embeddings"] = false;
  {
    FoldedMatrix factors(made, "model.norm.weight");
    const std::vector<double> folded(factors.values.begin(), factors.values.end());
    factors.scale_columns(folded, -1);
    FoldedMatrix(made, "lm_head.weight").scale_columns(folded, 1);
  }
  EXPECT_THAT(folded_faults(made, folder), IsEmpty());
}

/// Of one layer alone: what reads it says whether its factors went there, or were lost.
TEST(Folded, NormsOfOnesInOneLayer) {
  const test::TemporaryFolder folder;
  for (const bool lost : {false, true}) {
    auto made = MadeCheckpoint::of(test::bundled_model());
    FoldedMatrix factors(made, "model.layers.2.post_attention_layernorm.weight");
    const std::vector<double> folded(factors.values.begin(), factors.values.end());
    for (const char* reader : {"mlp.gate_proj", "mlp.up_proj"}) {
      if (!lost) FoldedMatrix(made, concat("model.layers.2.", reader, ".weight")).scale_columns(folded, 1);
    }
    std::ranges::fill(made.values<uint16_t>(factors.name), bf16_from_f32(1));
    std::ranges::fill(factors.values, 1.0f);
    const auto faults = folded_faults(made, folder);
    if (lost) {
      EXPECT_THAT(faults, ::testing::ElementsAre(::testing::HasSubstr("it was never loaded")));
    } else {
      EXPECT_THAT(faults, IsEmpty());
    }
  }
}

/// Held against the model before folding, as servers' folders are whose config.json names nothing that was folded: factors
/// of rows and of the columns that carry them are found, those of norms are the ratio of the two.
TEST(Folded, WithTheBaseBeforeFolding) {
  const auto tiny = MadeCheckpoint::of(test::bundled_model());
  const auto base = model::open_model(test::bundled_model());
  for (const FoldedCase& folded : folded_cases) {
    for (const auto& [scheme, dialect] :
         {std::pair("int4-g128-f16-asym", "awq-gemm"), std::pair("int8-row-bf16", "compressed-tensors-int8")}) {
      const test::TemporaryFolder folder;
      with_folded(tiny, folded).write(folder / "made");
      round_made(folder, scheme);
      pipeline::ConvertRequest convert;
      convert.input = folder / "q", convert.output = folder / "other", convert.to = dialect;
      pipeline::convert_model(convert);
      const auto candidate = model::open_model(folder / "other");
      EXPECT_THAT(faults_of(compare_with_base(candidate, base)), IsEmpty()) << folded.name << ", " << dialect;
      EXPECT_THAT(check_kept(candidate, base).faults, IsEmpty()) << folded.name << ", " << dialect;
    }
  }
}

/// Into every norm of the layers and all that reads it, by exp(spread · N(0, 1)).
void fold_norms(MadeCheckpoint& made, const model::ModelConfig& config, double spread) {
  std::map<std::string, std::vector<double>> folded;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& group : model::input_groups(config, layer)) {
      if (!group.norm) continue;
      auto& scales = folded[group.norm->name];
      if (scales.empty()) {
        FoldedMatrix norm(made, group.norm->name + ".weight");
        scales = random_scales(spread, false)(norm.name, std::vector<double>(norm.values.size(), 1.0));
        for (size_t i = 0; i < scales.size(); ++i)
          norm.values[i] = (norm.values[i] + group.norm->offset) / static_cast<float>(scales[i]) - group.norm->offset;
      }
      for (const auto& reader : group.names()) FoldedMatrix(made, reader + ".weight").scale_columns(scales, 1);
    }
  }
}

/// Norms 1 + w next to nothing, whose 16 bits do not say the factor, and mixtures whose router or experts stay in 16 bit.
TEST(Folded, HybridsAndMixturesWithTheBaseBeforeFolding) {
  set_progress_enabled(false);
  for (const auto& [name, kept] : {std::pair("w4q-hybrid-tiny", ""), std::pair("w4q-mixture-tiny", "*.mlp.*")}) {
    const test::TemporaryFolder folder;
    const auto path = test::testdata() / name;
    const auto base = model::open_model(path);
    auto made = MadeCheckpoint::of(path);
    fold_norms(made, base.config, 1.0);
    made.write(folder / "made");
    pipeline::QuantizeRequest request;
    request.model = folder / "made", request.output = folder / "q";
    if (*kept != '\0') request.keep = {kept};
    request.scheme = formats::parse_scheme("int4-g128-f16-asym"), request.method = "rtn";
    pipeline::quantize_model(request);
    pipeline::convert_model({.input = folder / "q", .output = folder / "other", .to = "gptq-v2"});
    const auto candidate = model::open_model(folder / "other");
    EXPECT_THAT(faults_of(compare_with_base(candidate, base)), IsEmpty()) << name;
    EXPECT_THAT(check_kept(candidate, base).faults, IsEmpty()) << name;
  }
}

/// A layer that was added to a model, with what stood in the one before, and writes nothing as yet.
TEST(Folded, AddedLayers) {
  const test::TemporaryFolder folder;
  auto made = MadeCheckpoint::of(test::bundled_model());
  std::map<std::string, test::MadeTensor> added;
  for (const auto& [name, tensor] : made.tensors) {
    const std::string last = "model.layers.3.";
    if (name.starts_with(last)) added[concat("model.layers.4.", name.substr(last.size()))] = tensor;
  }
  made.tensors.merge(added);
  made.config["num_hidden_layers"] = 5;
  EXPECT_THAT(folded_faults(made, folder), IsEmpty());
  for (const char* writer : {"self_attn.o_proj", "mlp.down_proj"})
    std::ranges::fill(made.values<uint16_t>(concat("model.layers.4.", writer, ".weight")), uint16_t{0});
  EXPECT_THAT(folded_faults(made, folder), IsEmpty());
  for (const char* writer : {"self_attn.o_proj", "mlp.down_proj"}) {
    const std::string name = concat("model.layers.4.", writer, ".weight");
    auto values = made.values<uint16_t>(name);
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = bf16_from_f32(1e-5f * static_cast<float>(random_normal(9, i)));
  }
  EXPECT_THAT(folded_faults(made, folder), IsEmpty());
}

}  // namespace
}  // namespace w4q::verify
