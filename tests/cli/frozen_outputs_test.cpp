// Everything that the program writes, frozen file by file: every scheme in every layout and dialect that takes it, the
// steps of quantizing, GGUF files, of both models and of one layer. What calibration does to them: frozen_calibrated_test.cpp.
#include <algorithm>
#include <set>

#include "core/convert.h"
#include "core/rng.h"
#include "core/text.h"
#include "formats/lut.h"
#include "formats/scheme_registry.h"
#include "frozen_outputs.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "io/output.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;
using formats::PackedWeight;
using formats::PlaneRole;

/// The names in one list of `w4q list`: what the registries hold.
std::vector<std::string> listed(const std::vector<std::string>& arguments, const char* list, const char* key,
                                const std::function<bool(const io::Json&)>& wanted = {}) {
  std::vector<std::string> command{"list", "--json"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  const io::Json json = run_w4q(command).json();
  std::vector<std::string> names;
  for (const auto& row : json[list]) {
    if (!wanted || wanted(row)) names.push_back(row[key]);
  }
  return names;
}

std::vector<std::string> conversions(const char* from) {
  return listed({"--dialects"}, "conversions", "to", [&](const io::Json& row) { return row["from"] == from; });
}

/// Every layout and every format that takes what stands there.
void write_every_form(FrozenOutputs& outputs, const std::string& way, const std::string& packed) {
  static const auto layouts = listed({}, "layouts", "name");
  static const auto formats = conversions("folder");
  // Canonical planes are the first layout's; of the GGUF files that decode a scheme one says what it decodes to.
  static const std::set<std::string> told_already = {"w4q", "gguf-f32", "gguf-bf16"};
  const auto write = [&](const char* option, const std::string& value) {
    const std::string step = concat(option, "=", value);
    if (!outputs.worth_trying(way, step)) return;
    outputs.write_last(concat(way, "/", step), {"repack", packed, concat("--", option), value});
  };
  for (const auto& layout : layouts) write("layout", layout);
  for (const auto& format : formats) {
    if (!told_already.contains(format)) write("to", format);
  }
}

/// The definition's encoding of a matrix; with act order, inputs belong to random groups.
PackedWeight encoded(const io::Checkpoint& model, const std::string& name, const formats::Scheme& scheme,
                     std::span<const float> table) {
  const auto loaded = model.load(name);
  std::vector<float> values(static_cast<size_t>(element_count(loaded->shape)));
  widen(loaded->bytes, loaded->dtype, values);
  const int64_t n = loaded->shape[0], k = loaded->shape[1];
  PackedWeight weight = formats::scheme_row(scheme.family).encode(scheme, values, n, k, table);
  if (scheme.act_order) {
    uint64_t draw = 0;
    const auto groups = static_cast<uint64_t>((k + scheme.block - 1) / scheme.block);
    for (int32_t& group : weight.plane(PlaneRole::group_index).bytes.as<int32_t>()) {
      group = static_cast<int32_t>(random_bits(2026, draw++) % groups);
    }
  }
  return weight;
}

/// A checkpoint of a scheme that no quantizer of this program rounds to.
void write_encoded(const fs::path& from, const formats::Scheme& scheme, std::span<const float> table,
                   const fs::path& folder) {
  fs::copy(from, folder, fs::copy_options::recursive);
  const auto model = io::Checkpoint::open(from);
  io::Json config = io::read_json(from / "config.json");
  config["quantization_config"] = {{"quant_method", "w4q"}, {"format_version", 1}, {"method", "rtn"}};
  std::map<std::string, Buffer> tensors;
  std::vector<io::PlannedTensor> plan;
  for (const auto& [name, info] : model.tensors()) {
    if (!name.ends_with("_proj.weight")) {
      plan.push_back({name, info.dtype, info.shape});
      tensors.emplace(name, Buffer::copy_of(model.load(name)->bytes));
      continue;
    }
    const std::string linear = name.substr(0, name.rfind('.'));
    auto weight = encoded(model, name, scheme, table);
    for (auto& plane : weight.planes) {
      const std::string tensor = concat(linear, ".0.", to_string(plane.spec.role));
      plan.push_back({tensor, plane.spec.dtype, plane.spec.shape});
      tensors.emplace(tensor, std::move(plane.bytes));
    }
    config["quantization_config"]["linears"][linear] = {
        {"n", weight.n},
        {"k", weight.k},
        {"dtype", "BF16"},
        {"passes", {{{"scheme", to_string(scheme)}, {"layout", weight.layout}}}}};
  }
  fs::remove(folder / "model.safetensors");
  io::CheckpointWriter writer(folder, plan, {});
  for (const auto& [name, bytes] : tensors) writer.write(name, bytes.bytes());
  writer.finish();
  io::write_file(folder / "config.json", config.dump(2), true);
}

/// A scheme's codes from the definition, with each table that a dialect of its family has.
void write_forms_of_encoded(FrozenOutputs& outputs, const std::string& name) {
  const formats::Scheme scheme = formats::parse_scheme(name);
  std::map<std::string, std::vector<float>> tables{{"", {}}};
  if (scheme.family == formats::SchemeFamily::lut) {
    tables = {{"-nf4", {formats::nf4_table().begin(), formats::nf4_table().end()}},
              {"-fp4", {formats::fp4_table().begin(), formats::fp4_table().end()}}};
  }
  for (const auto& [suffix, table] : tables) {
    const std::string way = name + suffix;
    const fs::path folder = outputs.output_of(way);
    write_encoded(outputs.model(), scheme, table, folder);
    outputs.add(way, folder);
    write_every_form(outputs, way, folder.string());
    fs::remove_all(folder);
  }
}

void write_forms_of_scheme(FrozenOutputs& outputs, const std::string& scheme) {
  std::vector<std::string> command{"quantize", outputs.model().string(), "--scheme", scheme};
  const bool searches = scheme.starts_with("exl3") || scheme.starts_with("trellis");
  if (searches) command.insert(command.end(), {"--keep", "*.mlp.*"});  // whose three quarters take long
  const std::string packed = outputs.write(scheme, command);
  if (packed.empty()) return write_forms_of_encoded(outputs, scheme);
  write_every_form(outputs, scheme, packed);
  fs::remove_all(packed);
  // Of its tables quantizing writes one.
  if (formats::parse_scheme(scheme).family == formats::SchemeFamily::lut) write_forms_of_encoded(outputs, scheme);
}

TEST(Frozen, EverySchemeInEveryLayoutAndDialect) {
  FrozenOutputs outputs("one-layer/schemes", one_layer_model());
  std::vector<std::function<void()>> jobs;
  for (const auto& scheme : listed({}, "schemes", "name")) {
    jobs.emplace_back([&outputs, scheme] { write_forms_of_scheme(outputs, scheme); });
  }
  run_all(jobs);
  outputs.expect_frozen();
}

/// The other tests look at what is written; this one finds what is never written.
TEST(Frozen, EveryFormatHasLines) {
  const io::Json frozen = io::read_json(testdata() / "golden/w4q_outputs.json");
  std::string lines;
  for (const auto& [line, hash] : frozen.items()) lines += line + "\n";
  for (const char* from : {"folder", "GGUF file"}) {
    for (const auto& format : conversions(from)) {
      EXPECT_NE(lines.find(concat("/to=", format, "/")), std::string::npos)
          << format << ": no way of these tests writes it (docs/adding.md, \"Frozen bytes\")";
    }
  }
}

/// What is read to of other programs' checkpoints.
TEST(Frozen, EveryDialectReadAgain) {
  FrozenOutputs outputs("one-layer/dialects", one_layer_model());
  const std::map<std::string, std::vector<std::string>> sources = {
      {"asym", {"--scheme", "int4-g128-f16-asym"}},
      {"int3", {"--scheme", "int3-g64-f16-asym"}},
      // Marlin's words come in 256 outputs, k_proj and v_proj have 128.
      {"wide", {"--scheme", "int4-g128-f16", "--keep", "*.k_proj", "--keep", "*.v_proj"}}};
  std::vector<std::function<void()>> jobs;
  const auto read_again = [&outputs](const std::string& source, const std::string& packed) {
    for (const auto& format : conversions("folder")) {
      if (format == "w4q" || format.starts_with("gguf") || !outputs.worth_trying(source, "to=" + format)) continue;
      const std::string way = concat(source, "/to=", format);
      const std::string there = outputs.write(way, {"repack", packed, "--to", format});
      if (there.empty()) continue;
      outputs.write_last(way + "/to=w4q", {"repack", there, "--to", "w4q"});
      outputs.write_last(way + "/target=sm89", {"repack", there, "--target", "sm89"});
      fs::remove_all(there);
    }
  };
  for (const auto& [name, options] : sources) {
    jobs.emplace_back([&] {
      std::vector<std::string> arguments{"quantize", outputs.model().string()};
      arguments.insert(arguments.end(), options.begin(), options.end());
      read_again(name, outputs.write(name, arguments));
    });
  }
  for (const auto* table : {&formats::nf4_table(), &formats::fp4_table()}) {
    jobs.emplace_back([&, table] {
      const std::string name = table == &formats::nf4_table() ? "nf4" : "fp4";
      const fs::path folder = outputs.output_of(name);
      write_encoded(outputs.model(), formats::parse_scheme("lut4-b64-nested"), *table, folder);
      read_again(name, folder.string());
    });
  }
  run_all(jobs);
  outputs.expect_frozen();
}

TEST(Frozen, EveryGgufFileThereAndBack) {
  FrozenOutputs outputs("one-layer/gguf", one_layer_model());
  std::vector<std::function<void()>> jobs;
  for (const auto& format : conversions("folder")) {
    if (!format.starts_with("gguf")) continue;
    jobs.emplace_back([&outputs, format] {
      const std::string file = outputs.write("to=" + format, {"repack", outputs.model().string(), "--to", format});
      for (const auto& back : conversions("GGUF file")) {
        outputs.write_last(concat("to=", format, "/to=", back), {"repack", file, "--to", back});
      }
    });
  }
  run_all(jobs);
  outputs.expect_frozen();
}

const std::vector<std::vector<std::string>> every_target = {
    {"--target", "sm80"}, {"--target", "sm89"}, {"--target", "sm90"}};

TEST(Frozen, EveryStepWithoutCalibration) {
  FrozenOutputs outputs("tiny/steps", bundled_model());
  TemporaryFolder folder;
  const std::string recipe = (folder / "recipe.json").string(), table = (folder / "table.txt").string();
  io::write_file(recipe, R"({"rules": [{"match": "*.down_proj", "scheme": "kbit5-b32-e4m4"},
                                       {"match": "*.mlp.*", "scheme": "int4-g128-f16-asym"},
                                       {"match": "*.self_attn.*", "scheme": "rotated3-d64-e4m4"},
                                       {"match": "model.embed_tokens", "scheme": "int8-row-bf16"}]})",
                 false);
  io::write_file(table, "-1 -0.4 0.25 1\n", false);
  write_ways(outputs,
             {{"targets-kbit4", {}, every_target},
              {"targets-int4", {"--scheme", "int4-g128-f16"}, every_target},
              {"targets-rotated4", {"--scheme", "rotated4-d128"}, every_target},
              {"nf-quantile", {"--k", "3", "--codebook", "nf-quantile"}, {}},
              {"normal", {"--k", "3", "--codebook", "normal"}, {}},
              {"lloyd", {"--k", "3", "--codebook", "lloyd"}, {}},
              {"own-table", {"--k", "2", "--codebook", table}, {}},
              {"bnb-compatible", {"--k", "4", "--bnb-compatible"}, {}},
              {"search-kbit3", {"--k", "3", "--scales", "search"}, {}},
              {"search-rotated3", {"--scheme", "rotated3-d128", "--scales", "search"}, {}},
              {"clip-mse", {"--scheme", "int3-g64-f16-asym", "--clip", "mse"}, {}},
              {"fast-kbit3", {"--k", "3", "--quality", "fast"}, {}},
              {"fast-int4", {"--scheme", "int4-g128-f16-asym", "--quality", "fast"}, {}},
              {"rotate128", {"--k", "3", "--rotate", "128", "--rotation-seed", "7"}, {{"--target", "sm89"}}},
              {"rotate64-int4", {"--scheme", "int4-g64-f16-asym", "--rotate", "64"}, {}},
              {"fold-kbit3", {"--k", "3", "--fold-rotations"}, {{"--to", "gguf-f16"}}},
              {"fold-int4",
               {"--scheme", "int4-g128-f16-asym", "--fold-rotations", "--rotation-seed", "3"},
               {{"--to", "awq-gemm"}}},
              {"fold-rotated4", {"--scheme", "rotated4-d128", "--fold-rotations"}, {{"--target", "sm89"}}},
              {"residual-shared",
               {"--method", "rotated", "--residual-bits", "2"},
               {{"--target", "sm89"}, {"--to", "turboquant"}}},
              {"residual-own",
               {"--method", "rotated", "--bits", "3", "--residual-bits", "2", "--residual-bits", "2",
                "--residual-rotation", "own"},
               {{"--target", "sm89"}}},
              {"kbit-passes", {"--scheme", "kbit3-b32-e4m4+kbit2-b32-e4m4"}, {{"--target", "sm89"}}},
              {"head-and-table", {"--k", "5", "--lm-head", "--embeddings"}, {{"--target", "sm89"}}},
              {"table-int8", {"--k", "3", "--embedding-scheme", "int8-row-f16"}, {{"--target", "sm89"}}},
              {"recipe", {"--recipe", recipe}, {{"--target", "sm89"}}},
              {"recipe-line", {"--recipe", "kbit3: rotate128 → lloyd+search"}, {}},
              {"shards", {"--shard-size", "500kB"}, {{"--target", "sm89"}}},
              {"lossy", {"--k", "4"}, {{"--to", "awq-gemm", "--allow-lossy"}, {"--to", "gptq-v2", "--allow-lossy"}}},
              {"direct", {"--scheme", "int4-g128-f16-asym", "--to", "awq-gemm"}, {}}});
  outputs.expect_frozen();
}

TEST(Frozen, StacksOfExperts) {
  W4Q_NEEDS_SHARED_DATA();
  TemporaryFolder folder;
  fs::create_directories(folder / "m");
  for (const char* file : {"config.json", "model.safetensors"}) {
    fs::copy(shared_data() / "families/gpt-oss" / file, folder / "m" / file);
  }
  FrozenOutputs outputs("gpt-oss", folder / "m");
  write_ways(outputs, {{"direct", {"--scheme", "mxfp4", "--to", "gpt-oss"}, {{"--to", "w4q"}, {"--target", "sm89"}}},
                       {"keep", {"--scheme", "mxfp4", "--keep", "*.self_attn.*"}, {{"--to", "gpt-oss"}}}});
  outputs.expect_frozen();
}

TEST(Frozen, TheLargerModel) {
  W4Q_NEEDS_SHARED_DATA();
  FrozenOutputs outputs("30m", shared_data() / "models/w4q-llama-30m");
  write_ways(outputs, {{"kbit3-b32-e4m4", {"--k", "3"}, {{"--target", "sm89"}, {"--layout", "kbit-tile"}}},
                       {"int4-g128-f16-asym",
                        {"--scheme", "int4-g128-f16-asym"},
                        {{"--target", "sm89"},
                         {"--layout", "interleaved"},
                         {"--to", "awq-gemm"},
                         {"--to", "gptq-v2"},
                         {"--to", "compressed-tensors"}}},
                       {"int4-g32-f16", {"--scheme", "int4-g32-f16", "--embeddings"}, {{"--to", "gguf"}}},
                       {"rotated4-d128", {"--scheme", "rotated4-d128"}, {{"--target", "sm89"}, {"--to", "turboquant"}}},
                       {"fold-kbit3", {"--k", "3", "--fold-rotations"}, {}}});
  const std::string file = outputs.write("to=gguf-q4_0", {"repack", outputs.model().string(), "--to", "gguf-q4_0"});
  outputs.write_last("to=gguf-q4_0/to=w4q", {"repack", file, "--to", "w4q"});
  outputs.expect_frozen();
}

}  // namespace
}  // namespace w4q::test
