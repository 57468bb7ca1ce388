// Every dialect and every type of GGUF climbs the whole ladder: with the base, and with a text.
#include <map>

#include "checkpoint/dialect/dialect.h"
#include "core/convert.h"
#include "formats/gguf_blocks.h"
#include "formats/lut.h"
#include "io/checkpoint_writer.h"
#include "io/files.h"
#include "io/gguf_writer.h"
#include "io/output.h"
#include "model/opened.h"
#include "program.h"

namespace w4q::test {
namespace {

class WholeLadder : public OnBundledModel {
 protected:
  WholeLadder() : OnBundledModel(two_layer_model()) {}

  static void expect_verified(const std::string& model) {
    const auto result = run_w4q({"verify", model, "--base", two_layer_model(), "--ppl",
                                 bundled_model() + "/own/selfgen.txt", "--ctx", "32", "--windows", "2", "--quiet"});
    EXPECT_EQ(result.status, 0) << result.out << result.err;
    EXPECT_NE(result.out.find("KL to base"), std::string::npos) << result.out;
  }
  void repack(const std::string& from, const std::string& to_name, std::string_view to) const {
    const auto result = run_w4q({"repack", from, "-o", path(to_name), "--to", std::string(to), "--quiet"});
    ASSERT_EQ(result.status, 0) << result.err;
  }
  /// As bitsandbytes itself would write the bundled model.
  void write_bitsandbytes(const std::string& name, const checkpoint::DialectRow& row, std::string_view scheme) const;
};

void WholeLadder::write_bitsandbytes(const std::string& name, const checkpoint::DialectRow& row,
                                     std::string_view scheme) const {
  const auto model = model::open_model(std::filesystem::path(model_));
  const auto& table = row.name.ends_with("fp4") ? formats::fp4_table() : formats::nf4_table();
  const auto lut = formats::parse_scheme(scheme);
  std::vector<checkpoint::DialectLinear> linears;
  std::vector<io::PlannedTensor> plan;
  std::map<std::string, std::vector<std::byte>> data;
  for (const auto& [tensor, info] : model.folder.tensors.tensors()) {
    const auto loaded = model.folder.tensors.load(tensor);
    if (!tensor.ends_with("_proj.weight")) {
      plan.push_back({tensor, info.dtype, info.shape});
      data[tensor].assign(loaded->bytes.begin(), loaded->bytes.end());
      continue;
    }
    std::vector<float> values(static_cast<size_t>(element_count(info.shape)));
    widen(loaded->bytes, info.dtype, values);
    const auto weight = formats::scheme_row(lut.family).encode(lut, values, info.shape[0], info.shape[1], table);
    const std::string module = tensor.substr(0, tensor.rfind('.'));
    linears.push_back({module, lut});
    for (const auto& stored : row.encode(weight)) {
      plan.push_back({module + stored.spec.suffix, stored.spec.dtype, stored.spec.shape});
      const auto bytes = stored.bytes.bytes();
      data[plan.back().name].assign(bytes.begin(), bytes.end());
    }
  }
  const std::filesystem::path folder = path(name);
  std::filesystem::create_directories(folder);
  io::CheckpointWriter writer(folder, plan, {});
  for (const auto& [tensor, bytes] : data) writer.write(tensor, bytes);
  writer.finish();
  io::copy_companions(model_, folder, {"config.json"});
  io::Json config = model.folder.config;
  config["quantization_config"] = row.describe(linears, {"lm_head"});
  io::write_file(folder / "config.json", config.dump(2), false);
}

/// What to quantize to for a dialect of small floats; empty for others.
std::string float_scheme_of(std::string_view dialect) {
  if (dialect == "fp8") return "fp8-block128";
  return dialect == "compressed-tensors-float" || dialect == "modelopt" ? "nvfp4" : "";
}

TEST_F(WholeLadder, EveryDialect) {
  ASSERT_EQ(quantize("all", {"--method", "rtn", "--scheme", "int4-g128-f16"}).status, 0);
  // Marlin's words come in 256 outputs, k_proj and v_proj have 128.
  ASSERT_EQ(
      quantize("wide", {"--method", "rtn", "--scheme", "int4-g128-f16", "--keep", "*.k_proj", "--keep", "*.v_proj"})
          .status,
      0);
  for (const auto& row : checkpoint::dialect_registry()) {
    if (!row.stacks.empty()) continue;  // of mixtures: any_model_test.cpp
    SCOPED_TRACE(row.name);
    const std::string name(row.name);
    std::string from = path(name.ends_with("marlin") ? "wide" : "all");
    if (name.starts_with("bitsandbytes")) {
      for (const char* scheme : {"lut4-b64-f32", "lut4-b64-nested"}) {
        from = path(name + "-theirs-" + scheme);
        write_bitsandbytes(name + "-theirs-" + scheme, row, scheme);
        expect_verified(from);
      }
      repack(from, name + "-planes", "w4q");
      expect_verified(path(name + "-planes"));
      from = path(name + "-planes");
    }
    if (name == "exl3") {  // nothing becomes it; a quarter of a layer is enough, for its search takes long
      ASSERT_EQ(quantize("exl3-planes", {"--scheme", "exl3-5", "--keep", "*.layers.1.*", "--keep", "*.mlp.*"}).status,
                0);
      from = path("exl3-planes");
    }
    if (const std::string scheme = float_scheme_of(name); !scheme.empty()) {
      ASSERT_EQ(quantize(scheme, {"--scheme", scheme, "--overwrite"}).status, 0);
      from = path(scheme);
    }
    repack(from, name, row.name);
    expect_verified(path(name));
  }
}

/// What servers load comes back as it was, whichever of them it went through.
TEST_F(WholeLadder, SmallFloatsThereAndBack) {
  const std::map<std::string, std::vector<std::string>> ways = {
      {"nvfp4", {"compressed-tensors-float", "modelopt"}},
      {"mxfp4", {"compressed-tensors-float"}},
      {"mxfp8", {"compressed-tensors-float", "modelopt"}},
      {"fp8-tensor", {"compressed-tensors-float"}},
      {"fp8-channel", {"compressed-tensors-float", "modelopt"}},
      {"fp8-block128", {"compressed-tensors-float", "modelopt", "fp8"}}};
  for (const auto& [scheme, dialects] : ways) {
    ASSERT_EQ(quantize(scheme, {"--scheme", scheme}).status, 0);
    const auto weights = io::read_file(path(scheme) + "/model.safetensors");
    std::string from = path(scheme);
    for (const auto& dialect : dialects) {
      SCOPED_TRACE(scheme + " " + dialect);
      const std::string there = scheme + "-" + dialect;
      repack(from, there, dialect);
      expect_verified(path(there));
      repack(path(there), there + "-back", "w4q");
      EXPECT_EQ(io::read_file(path(there) + "-back/model.safetensors"), weights);
      from = path(there);  // and from there to the next
    }
  }
}

/// `from` with its matrices in `type`, whatever their values.
void write_blocks(const std::filesystem::path& from, const std::filesystem::path& to, GgmlType type) {
  const auto file = io::GgufFile::open(from);
  std::vector<io::PlannedGgufTensor> plan;
  for (const auto& tensor : file.header().tensors) {
    // Layers may do nothing, a table of tokens may not.
    const bool fits = tensor.name != "token_embd.weight" && tensor.shape.size() == 2 &&
                      tensor.shape.back() % describe(type).block == 0;
    plan.push_back({tensor.name, fits ? type : tensor.type, tensor.shape});
  }
  auto metadata = file.header().metadata;
  std::erase_if(metadata, [](const auto& entry) { return entry.key == "general.file_type"; });
  io::GgufWriter writer(to, plan, std::move(metadata), true, {});
  for (const auto& tensor : writer.header().tensors) {
    const auto& source = *file.find(tensor.name);
    const auto bytes = file.bytes(source);
    // Zeros are blocks of every type.
    if (source.type == tensor.type)
      writer.append(tensor.name, bytes);
    else
      writer.append(tensor.name, std::vector<std::byte>(tensor.size));
  }
  writer.commit();
}

TEST_F(WholeLadder, EveryWrittenTypeOfGguf) {
  for (const char* to : {"gguf", "gguf-f32", "gguf-f16", "gguf-bf16", "gguf-q8_0", "gguf-q4_0", "gguf-q4_1"}) {
    SCOPED_TRACE(to);
    const std::string file = std::string(to) + ".gguf";
    repack(model_, file, to);
    expect_verified(path(file));
  }
  for (const char* to : {"hf-f32", "hf16", "w4q"}) {
    SCOPED_TRACE(to);
    repack(path("gguf-q4_0.gguf"), to, to);
    expect_verified(path(to));
  }
}

TEST_F(WholeLadder, EveryReadTypeOfGguf) {
  repack(model_, "m.gguf", "gguf-f32");
  int types = 0;
  for (uint32_t number = 0; number < 64; ++number) {
    const auto* row = find_ggml_type(number);
    if (row == nullptr || !formats::gguf_decodes(row->type)) continue;
    SCOPED_TRACE(row->name);
    write_blocks(path("m.gguf"), path("blocks.gguf"), row->type);
    const auto alone = run_w4q({"verify", path("blocks.gguf"), "--quiet"});
    EXPECT_EQ(alone.status, 0) << alone.out << alone.err;
    ++types;
  }
  EXPECT_EQ(types, 21);
  // Zeros are not the base's.
  const auto with_base = run_w4q({"verify", path("blocks.gguf"), "--base", model_, "--quiet"});
  EXPECT_EQ(with_base.status, 1) << with_base.err;
  EXPECT_NE(with_base.out.find("is not the base's"), std::string::npos) << with_base.out;
}

}  // namespace
}  // namespace w4q::test
