// The convention detective on checkpoints that our own writers made of the bundled model: clean ones raise no alarm,
// and every seeded fault is named with its tensor.
#include "verify/conventions/detective.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <numbers>

#include "checkpoint/dialect/checkpoint.h"
#include "checkpoint/dialect/dialect.h"
#include "core/progress.h"
#include "core/rng.h"
#include "core/text.h"
#include "formats/integer.h"
#include "formats/integer_recast.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "io/files.h"
#include "io/json.h"
#include "io/output.h"
#include "packed_model.h"
#include "pipeline/convert_model.h"
#include "quantize/rounding.h"
#include "verify/conventions/values.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;

const std::string up = "model.layers.1.mlp.up_proj";
const std::string query = "model.layers.2.self_attn.q_proj";

/// Clean checkpoints, made once.
std::filesystem::path clean(const std::string& scheme, const std::string& dialect) {
  static const test::TemporaryFolder folder;
  set_progress_enabled(false);
  const auto packed = folder / scheme;
  if (!std::filesystem::exists(packed)) {
    pipeline::QuantizeRequest request;
    request.model = test::bundled_model();
    request.output = packed;
    request.scheme = formats::parse_scheme(scheme);
    request.method = request.scheme.family == formats::SchemeFamily::integer ? "rtn" : "lut";
    pipeline::quantize_model(request);
  }
  const auto output = folder / (scheme + "-" + dialect);
  if (!std::filesystem::exists(output)) {
    pipeline::ConvertRequest request;
    request.input = packed;
    request.output = output;
    request.to = dialect;
    request.allow_lossy = true;  // zero points of 0 in GPTQ version 1
    pipeline::convert_model(request);
  }
  return output;
}

bool is_foreign(const std::filesystem::path& folder) { return CheckContext(test::check_options(folder)).foreign(); }

/// A checkpoint in memory, to be damaged and written.
class Checkpoint {
 public:
  Checkpoint(const std::string& scheme, const std::string& dialect) : folder_(clean(scheme, dialect)) {
    const auto file = checkpoint::open_folder(folder_);
    for (const auto& [name, info] : file.tensors.tensors()) {
      tensors[name] = {info.dtype, info.shape, Buffer::copy_of(file.tensors.load(name)->bytes)};
    }
    config = file.config;
    quantization = file.quantization;
  }

  struct Tensor {
    DType dtype;
    Shape shape;
    Buffer bytes;
  };

  /// Decodes a linear, changes it, and puts its tensors back.
  template <class Change>
  void change(const std::string& linear, const Change& change) {
    const auto& info = quantization.linears.at(linear);
    auto loaded = checkpoint::load_stored(io::Checkpoint::open(folder_), info);
    PackedWeight weight = std::move(loaded.passes.front());
    const auto fit = info.dialect->fit(info);
    if (fit.scheme && *fit.scheme != weight.scheme) weight = formats::integer_recast(weight, *fit.scheme, linear);
    change(weight);
    for (auto& tensor : info.dialect->encode(weight))
      tensors.at(linear + tensor.spec.suffix).bytes = std::move(tensor.bytes);
  }

  /// Writes it and audits what was written.
  Check audit(bool with_base = false) const {
    const test::TemporaryFolder folder;
    std::vector<io::PlannedTensor> plan;
    for (const auto& [name, tensor] : tensors) plan.push_back({name, tensor.dtype, tensor.shape});
    io::CheckpointWriter writer(folder.path(), plan, write);
    for (const auto& [name, tensor] : tensors) writer.write(name, tensor.bytes.bytes());
    writer.finish();
    io::write_file(folder / "config.json", config.dump(2), false);
    for (const auto& [name, from] : companions) std::filesystem::copy_file(from, folder / name);
    CheckContext context(test::check_options(folder.path(), with_base ? test::bundled_model() : ""));
    Findings findings;
    conventions_check().run(context, findings);
    return findings.checks.checks().front();
  }

  void expect_fault(const std::string& tensor, const std::string& what, bool with_base = false) const {
    const Check check = audit(with_base);
    EXPECT_FALSE(check.passed);
    const bool named = std::ranges::any_of(check.faults, [&](const std::string& fault) {
      return fault.starts_with(tensor) && fault.find(what) != std::string::npos;
    });
    std::string all;
    for (const auto& fault : check.faults) all += "\n  " + fault;
    EXPECT_TRUE(named) << tensor << " … " << what << " is not among" << all;
  }
  /// The same, and nothing else is reported.
  void expect_only_fault(const std::string& tensor, const std::string& what, bool with_base = false) const {
    expect_fault(tensor, what, with_base);
    const Check check = audit(with_base);
    EXPECT_EQ(check.faults.size(), 1u) << (check.faults.empty() ? "" : check.faults.back());
  }

  io::Json& quant() { return config["quantization_config"]; }

  std::map<std::string, Tensor> tensors;
  io::Json config;
  checkpoint::QuantizationConfig quantization;
  io::WriteOptions write;
  std::map<std::string, std::filesystem::path> companions;

 private:
  std::filesystem::path folder_;
};

constexpr const char* awq_scheme = "int4-g128-f16-asym";

TEST(Convention, CleanCheckpointsRaiseNoAlarm) {
  const std::pair<const char*, const char*> cases[] = {{"int4-g128-f16-asym", "awq-gemm"},
                                                       {"int4-g128-f16", "gptq-v1"},
                                                       {"int4-g32-f16-asym", "gptq-v2"},
                                                       {"int3-g128-f16-asym", "gptq-v2"},
                                                       {"int2-g64-f16-asym", "gptq-v2"},
                                                       {"int8-g128-f16", "gptq-v1"},
                                                       {"int4-g32-bf16-asym", "compressed-tensors"},
                                                       {"int3-g128-bf16", "compressed-tensors-0.17"},
                                                       {"int4-row-bf16", "compressed-tensors"},
                                                       {"int4-g128-f16-asym", "gptq-v1"}};
  for (const auto& [scheme, dialect] : cases) {
    const Checkpoint checkpoint(scheme, dialect);
    EXPECT_TRUE(is_foreign(clean(scheme, dialect)));
    for (const bool with_base : {false, true}) {
      // With the base three of them: every width, words along outputs and along inputs.
      if (with_base && scheme != std::string("int4-g128-f16-asym") && scheme != std::string("int2-g64-f16-asym"))
        continue;
      const Check check = checkpoint.audit(with_base);
      EXPECT_TRUE(check.passed) << scheme << " " << dialect << " " << with_base << ": "
                                << (check.faults.empty() ? "" : check.faults.front());
    }
  }
  EXPECT_FALSE(is_foreign(test::bundled_model()));
}

/// A weight [256, k] of random numbers, the sizes of whose outputs lie far apart, rounded to `scheme`.
PackedWeight weight_of_uneven_outputs(const formats::Scheme& scheme, int64_t k, uint64_t seed) {
  constexpr int64_t n = 256;
  uint64_t drawn = 0;
  const auto normal = [&] {
    const double radius = std::sqrt(-2 * std::log(1 - random_uniform(seed, drawn++)));
    return radius * std::cos(2 * std::numbers::pi * random_uniform(seed, drawn++));
  };
  std::vector<float> values(static_cast<size_t>(n * k));
  for (int64_t row = 0; row < n; ++row) {
    const double size = std::exp(normal());
    for (int64_t col = 0; col < k; ++col)
      values[static_cast<size_t>(row * k + col)] = static_cast<float>(size * normal());
  }
  const TensorView view{"w", DType::f32, {n, k}, bytes_of(values)};
  return quantize::rounding_quantizer(scheme).run(view, scheme, {}).weight;
}

/// Sizes of outputs say nothing of their order. Without errors of the slopes 5 of the 40 rounded by rows raise one.
TEST(Convention, UnevenOutputsRaiseNoAlarm) {
  for (const char* scheme : {"int4-row-f16", "int4-g128-f16-asym"}) {
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      const PackedWeight weight = weight_of_uneven_outputs(formats::parse_scheme(scheme), 256, seed);
      const auto faults = value_faults(weight, WeightSample(weight), {.along_outputs = true, .even_first = true});
      EXPECT_TRUE(faults.empty()) << scheme << " " << seed << ": " << faults.front();
    }
  }
}

/// Inputs of weights that have nothing to do with each other agree by chance, the more the fewer there are.
TEST(Convention, FewInputsRaiseNoAlarm) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    std::vector<double> energy(64), siblings(energy.size());
    for (size_t col = 0; col < energy.size(); ++col) {
      energy[col] = std::exp(random_uniform(seed, 2 * col));
      siblings[col] = std::exp(random_uniform(seed, 2 * col + 1));
    }
    EXPECT_EQ(profile_fault(energy, siblings, 4), "") << seed;
  }
}

/// Layers that were added to a trained model begin with zeros.
TEST(Convention, ZerosAreTheBaseOfZeros) {
  const formats::Scheme scheme = formats::parse_scheme("int4-g128-f16");
  std::vector<float> values(64 * 256);
  const TensorView zeros{"w", DType::f32, {64, 256}, bytes_of(values)};
  const PackedWeight weight = quantize::rounding_quantizer(scheme).run(zeros, scheme, {}).weight;
  EXPECT_TRUE(base_faults(weight, WeightSample(weight), {}, zeros).empty());
  values[5] = 1;
  EXPECT_EQ(base_faults(weight, WeightSample(weight), {}, zeros).size(), 1u);
}

TEST(Convention, ZeroPointsOffByOne) {
  Checkpoint checkpoint("int4-g32-f16-asym", "gptq-v2");
  checkpoint.change(up, [](PackedWeight& weight) {
    for (uint8_t& zero : weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()) zero -= zero > 0 ? 1 : 0;
  });
  checkpoint.expect_only_fault(up + ".qzeros", "zero points are off by one");
  checkpoint.expect_only_fault(up + ".qzeros", "zero points are off by one", true);
}

TEST(Convention, VersionOneLabelledTwo) {
  Checkpoint symmetric("int4-g128-f16", "gptq-v1");
  symmetric.quant()["checkpoint_format"] = "gptq_v2";
  symmetric.expect_fault(up + ".qzeros", "stored as version 1 does");
  Checkpoint asymmetric("int4-g128-f16-asym", "gptq-v1");
  asymmetric.quant()["checkpoint_format"] = "gptq_v2";
  asymmetric.expect_fault(up + ".qzeros", "zero points are off by one");
  asymmetric.expect_fault(query + ".qzeros", "should be one more", true);
}

/// With eight bits a step is a small part of the weights' deviation; all zeros alike tell all the same.
TEST(Convention, VersionOneOfEightBitsLabelledTwo) {
  Checkpoint checkpoint("int8-g128-f16", "gptq-v1");
  checkpoint.quant()["checkpoint_format"] = "gptq_v2";
  checkpoint.expect_fault(up + ".qzeros", "stored as version 1 does");
}

/// Codes and zero points of weights of three values, a scale times −1, 0 and 1: `middle` is the code of 0.
void make_ternary(PackedWeight& weight, int middle) {
  std::vector<uint8_t> codes(static_cast<size_t>(weight.k)), sorted;
  for (int64_t row = 0; row < weight.n; ++row) {
    formats::integer_read_codes(weight, row, codes);
    sorted = codes;
    std::ranges::sort(sorted);
    const int low = sorted[sorted.size() / 3], high = sorted[2 * sorted.size() / 3];
    for (uint8_t& code : codes) code = static_cast<uint8_t>(middle + (code > high ? 1 : code < low ? -1 : 0));
    formats::integer_write_codes(weight, row, codes);
  }
  std::ranges::fill(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>(), static_cast<uint8_t>(middle));
}

/// Their zero point is where the codes say, beside the symmetric one or not.
TEST(Convention, ThreeValuesMayLieAroundAnyZeroPoint) {
  struct Case {
    const char *scheme, *dialect;
    int middle;
  };
  for (const auto& [scheme, dialect, middle] :
       {Case{"int2-g64-f16-asym", "gptq-v2", 1}, Case{"int2-g64-f16-asym", "gptq-v2", 2},
        Case{"int3-g128-f16-asym", "gptq-v2", 3}, Case{"int4-g128-f16-asym", "gptq-v1", 9},
        Case{awq_scheme, "awq-gemm", 7}, Case{"int8-g128-f16-asym", "gptq-v1", 127}}) {
    Checkpoint checkpoint(scheme, dialect);
    for (const auto& [name, info] : checkpoint.quantization.linears) {
      checkpoint.change(name, [&](PackedWeight& weight) { make_ternary(weight, middle); });
    }
    const Check check = checkpoint.audit();
    EXPECT_TRUE(check.passed) << scheme << " " << dialect << ": " << (check.passed ? "" : check.faults.front());
  }
}

TEST(Convention, ThreeValuesWithZeroPointsOffByOne) {
  for (const int declared : {1, 3}) {
    Checkpoint checkpoint("int2-g64-f16-asym", "gptq-v2");
    checkpoint.change(up, [&](PackedWeight& weight) {
      make_ternary(weight, 2);
      std::ranges::fill(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>(), static_cast<uint8_t>(declared));
    });
    checkpoint.expect_only_fault(up + ".qzeros",
                                 declared == 1 ? "stored as version 1 does" : "stored as version 2 does");
  }
}

/// Fields of every word of a tensor in another order: field i of the new word is field order[i] of the old one.
void reorder(Checkpoint::Tensor& tensor, const std::array<int, 8>& order) {
  for (uint32_t& word : tensor.bytes.as<uint32_t>()) {
    uint32_t result = 0;
    for (size_t i = 0; i < 8; ++i) result |= (word >> (4 * order[i]) & 15u) << (4 * i);
    word = result;
  }
}

TEST(Convention, SwappedNibbles) {
  // AWQ's words with plain order inside.
  const std::array<int, 8> plain{0, 4, 1, 5, 2, 6, 3, 7};
  Checkpoint awq(awq_scheme, "awq-gemm");
  reorder(awq.tensors.at(up + ".qweight"), plain);
  awq.expect_only_fault(up + ".qweight", "stand in plain order, not in AWQ's");
  awq.expect_only_fault(up + ".qweight", "stand in plain order, not in AWQ's", true);
  // Zero points with them: only the scales, or the base, can tell.
  reorder(awq.tensors.at(up + ".qzeros"), plain);
  awq.expect_only_fault(up + ".qweight", "stand in plain order, not in AWQ's");
  // GPTQ's words along the inputs, the high nibble first: weights with the same input, or the base, can tell.
  Checkpoint gptq("int4-g128-f16", "gptq-v1");
  reorder(gptq.tensors.at(query + ".qweight"), {7, 6, 5, 4, 3, 2, 1, 0});
  gptq.expect_only_fault(query + ".qweight", "in reverse order", true);
  gptq.expect_fault(query + ".qweight", "in reverse order");
}

TEST(Convention, TransposedScales) {
  Checkpoint shape(awq_scheme, "awq-gemm");
  auto& tensor = shape.tensors.at(up + ".scales");
  std::swap(tensor.shape[0], tensor.shape[1]);
  shape.expect_only_fault(up + ".scales", "its scales are transposed: [768, 2], expected [2, 768]");
  // The right shape, the wrong order inside.
  Checkpoint bytes("int4-g32-f16", "gptq-v1");
  auto& scales = bytes.tensors.at(up + ".scales");
  const Buffer before = scales.bytes.clone();
  const int64_t groups = scales.shape[0], n = scales.shape[1];
  for (int64_t at = 0; at < groups * n; ++at) {
    scales.bytes.as<uint16_t>()[static_cast<size_t>(at % n * groups + at / n)] =
        before.as<uint16_t>()[static_cast<size_t>(at)];
  }
  bytes.expect_only_fault(up + ".scales", "its scales are transposed");
  bytes.expect_only_fault(up + ".scales", "its scales are transposed", true);
}

TEST(Convention, MissingQweight) {
  Checkpoint checkpoint(awq_scheme, "awq-gemm");
  checkpoint.tensors.erase(up + ".qweight");
  checkpoint.expect_only_fault(up + ".qweight", "is missing");
}

TEST(Convention, LeftIn16BitButListed) {
  Checkpoint checkpoint(awq_scheme, "awq-gemm");
  for (const char* suffix : {".qweight", ".qzeros", ".scales"}) checkpoint.tensors.erase(up + suffix);
  const auto base = io::Checkpoint::open(test::bundled_model());
  const auto loaded = base.load(up + ".weight");
  checkpoint.tensors[up + ".weight"] = {loaded->dtype, loaded->shape, Buffer::copy_of(loaded->bytes)};
  checkpoint.expect_only_fault(up + ".weight", "the config lists it as quantized");
  // Said in the config, it is no fault.
  checkpoint.quant()["modules_to_not_convert"] = {up};
  EXPECT_TRUE(checkpoint.audit().passed);
}

/// bitsandbytes packs no stacked experts; of those that stand one by one it packs all.
TEST(Convention, ExpertsThatBitsandbytesLeavesIn16Bit) {
  Checkpoint checkpoint("lut4-b64-f32", "bitsandbytes-nf4");
  checkpoint.config["model_type"] = "unseen";
  checkpoint.config["architectures"] = {"UnseenForCausalLM"};
  const auto base = io::Checkpoint::open(test::bundled_model());
  const auto loaded = base.load(up + ".weight");
  const auto expert = [](int number) { return concat("model.layers.1.mlp.experts.", number, ".up_proj"); };
  for (int number = 0; number < 4; ++number) {
    checkpoint.tensors[expert(number) + ".weight"] = {loaded->dtype, loaded->shape, Buffer::copy_of(loaded->bytes)};
  }
  const Check check = checkpoint.audit();
  EXPECT_TRUE(check.passed) << (check.faults.empty() ? "" : check.faults.front());
  // One of them is packed: the others were forgotten.
  checkpoint.tensors.erase(expert(3) + ".weight");
  for (auto it = checkpoint.tensors.lower_bound(up + "."); it != checkpoint.tensors.end();) {
    if (!it->first.starts_with(up + ".")) break;
    checkpoint.tensors[expert(3) + it->first.substr(up.size())] = std::move(it->second);
    it = checkpoint.tensors.erase(it);
  }
  checkpoint.expect_fault(expert(0), "the config lists it as quantized");
}

TEST(Convention, QuantizedButUnlisted) {
  Checkpoint awq(awq_scheme, "awq-gemm");
  awq.quant()["modules_to_not_convert"] = {"layers.1.mlp.up"};
  awq.expect_only_fault(up, "is quantized, but the config leaves it out");
  Checkpoint compressed("int4-g32-bf16-asym", "compressed-tensors");
  compressed.quant()["ignore"] = {"lm_head", "re:.*layers.1.mlp.up_proj"};
  compressed.expect_fault(up, "is quantized, but the config leaves it out");
}

TEST(Convention, StaleShards) {
  Checkpoint extra(awq_scheme, "awq-gemm");
  extra.companions["model-00002-of-00009.safetensors"] = clean("int4-g32-f16-asym", "gptq-v2") / "model.safetensors";
  extra.expect_only_fault("model-00002-of-00009.safetensors", "a stale shard");
  // A layer of another run: right in shape, and nothing but the base can tell.
  Checkpoint other(awq_scheme, "awq-gemm");
  for (const char* suffix : {".qweight", ".qzeros", ".scales"}) {
    other.tensors.at(up + suffix).bytes =
        other.tensors.at("model.layers.3.mlp.up_proj" + std::string(suffix)).bytes.clone();
  }
  other.expect_only_fault(up + ".qweight", "a stale shard, or another model", true);
}

TEST(Convention, GroupIndexAllZero) {
  Checkpoint checkpoint("int4-g128-f16", "gptq-v1");
  std::ranges::fill(checkpoint.tensors.at(up + ".g_idx").bytes.bytes(), std::byte{0});
  checkpoint.expect_only_fault(up + ".g_idx", "is all zero");
}

TEST(Convention, WrongGroupSize) {
  Checkpoint awq(awq_scheme, "awq-gemm");
  awq.quant()["group_size"] = 64;
  awq.expect_fault(up + ".scales", "wrong group size in the config: group_size 64");
  Checkpoint gptq("int4-g32-f16-asym", "gptq-v2");
  gptq.quant()["group_size"] = 128;
  gptq.expect_fault(query + ".scales", "(groups of 32)");
}

TEST(Convention, SpilledSixteen) {
  Checkpoint checkpoint(awq_scheme, "awq-gemm");
  // The one code that reaches 14 or more in its group becomes the 16 that the usual packer leaves in the next nibble.
  auto& tensor = checkpoint.tensors.at(up + ".qweight");
  const auto loaded = checkpoint::load_stored(io::Checkpoint::open(clean(awq_scheme, "awq-gemm")),
                                              checkpoint.quantization.linears.at(up));
  const PackedWeight& weight = loaded.passes.front();
  std::vector<uint8_t> codes(static_cast<size_t>(weight.k));
  bool done = false;
  for (int64_t row = 0; row < weight.n && !done; row += 8) {  // the field of output 8c is the lowest
    formats::integer_read_codes(weight, row, codes);
    const auto group = std::span(codes).first(128);
    if (std::ranges::count_if(group, [](uint8_t code) { return code >= 14; }) != 1) continue;
    const auto top = std::ranges::max_element(group) - group.begin();
    uint32_t& word = tensor.bytes.as<uint32_t>()[static_cast<size_t>(top * tensor.shape[1] + row / 8)];
    word = (word & ~15u) | 16u;
    done = true;
  }
  ASSERT_TRUE(done);
  // Alone it is a group that misses its top, as searched scales leave some.
  checkpoint.expect_only_fault(up + ".qweight", "a code of 16 spilled", true);
}

/// A symmetric weight may miss its top; AWQ's words have zero points all the same.
TEST(Convention, SymmetricGroupsNeedNotReachTheirTop) {
  const formats::Scheme symmetric = formats::parse_scheme("int4-row-f16");
  std::vector<float> values(256 * 64);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 15) - 7.0f;
  for (size_t col = 1; col < 64; ++col) values[col] = -1;  // output 0 alone has no weight above 0
  const TensorView view{"w", DType::f32, {256, 64}, bytes_of(values)};
  const PackedWeight weight =
      formats::integer_recast(quantize::rounding_quantizer(symmetric).run(view, symmetric, {}).weight,
                              formats::parse_scheme("int4-row-f16-asym"), "w");
  const auto faults = value_faults(weight, WeightSample(weight), {true, true, true});
  EXPECT_TRUE(faults.empty()) << faults.front();
}

/// Errors that were fed back leave codes at any distance from the base's weight; one alone at half the range is a fault.
TEST(Convention, CodesFarAwayAreNoFaultWhereOthersStray) {
  const formats::Scheme scheme = formats::parse_scheme("int4-g128-f16-asym");
  constexpr int64_t rows = 64, cols = 256;
  std::vector<float> base(static_cast<size_t>(rows * cols));
  for (size_t i = 0; i < base.size(); ++i) base[i] = static_cast<float>(random_normal(5, i));
  const TensorView view{"w", DType::f32, {rows, cols}, bytes_of(base)};
  const auto faults = [&](std::initializer_list<int> steps) {
    PackedWeight weight = quantize::rounding_quantizer(scheme).run(view, scheme, {}).weight;
    std::vector<uint8_t> codes(static_cast<size_t>(cols));
    int64_t row = 3;
    for (const int step : steps) {
      formats::integer_read_codes(weight, row, codes);
      const auto low = std::ranges::find_if(codes, [&](uint8_t code) { return code + step < 16 && code > 1; });
      *low = static_cast<uint8_t>(*low + step);
      formats::integer_write_codes(weight, row, codes);
      row += 7;
    }
    return base_faults(weight, WeightSample(weight), {}, view);
  };
  EXPECT_TRUE(faults({}).empty());
  ASSERT_EQ(faults({9}).size(), 1u);
  EXPECT_EQ(faults({9}).front().find("a code is far from the base's weight: output 3"), 0u) << faults({9}).front();
  EXPECT_TRUE(faults({9, 5}).empty());
}

/// The words of GPTQModel's gptq_p: of every 32 codes, two words of low bits and one of high bits.
TEST(Convention, PlanesOfThreeBits) {
  Checkpoint checkpoint("int3-g128-f16-asym", "gptq-v2");
  auto& tensor = checkpoint.tensors.at(up + ".qweight");
  const auto words = tensor.bytes.as<uint32_t>();
  const auto n = static_cast<size_t>(tensor.shape[1]);
  for (size_t at = 0; at < words.size(); at += 3 * n) {
    for (size_t row = 0; row < n; ++row) {
      const std::array<uint32_t, 3> stream{words[at + row], words[at + n + row], words[at + 2 * n + row]};
      std::array<uint32_t, 3> planes{};
      for (int64_t i = 0; i < 32; ++i) {
        const uint32_t code = formats::dense_get(stream, i, 3);
        planes[static_cast<size_t>(i / 16)] |= (code & 3) << (2 * (i % 16));
        planes[2] |= code >> 2 << i;
      }
      for (size_t w = 0; w < 3; ++w) words[at + w * n + row] = planes[w];
    }
  }
  for (const bool with_base : {false, true}) {
    checkpoint.expect_only_fault(up + ".qweight", "stand in planes (GPTQModel's gptq_p)", with_base);
  }
}

TEST(Convention, NanScale) {
  Checkpoint checkpoint(awq_scheme, "awq-gemm");
  checkpoint.tensors.at(up + ".scales").bytes.as<uint16_t>()[770] = 0x7E00;
  checkpoint.expect_only_fault(up + ".scales", "holds NaN at [1, 2]");
}

}  // namespace
}  // namespace w4q::verify
