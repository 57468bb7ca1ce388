// Faults that show beside others of their role, and files that lie beside the weights: each is named, and what is sound
// is not.
#include <gtest/gtest.h>

#include <fstream>

#include "core/progress.h"
#include "made_checkpoint.h"
#include "made_contents.h"
#include "support.h"
#include "verify/contents/contents.h"
#include "verify/zero_pages.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using test::Storage;

class ContentsPeers : public MadeContents {
 protected:
  /// What is said of a checkpoint as a whole.
  std::string said(const MadeCheckpoint& made) {
    const checkpoint::Folder headers = headers_of(made);
    return faults_of(headers) + join(check_zero_pages(headers).faults, "\n");
  }
};

std::string first_of(const MadeCheckpoint& made, std::string_view part, std::string_view end) {
  for (const auto& [name, tensor] : made.tensors) {
    if (name.find(part) != std::string::npos && name.ends_with(end)) return name;
  }
  return {};
}

TEST_F(ContentsPeers, CodesWithoutSigns) {
  auto made = test::made_mixture(Storage::fp8_channel);
  EXPECT_EQ(said(made), "");
  for (auto& code : made.values<uint8_t>(first_of(made, "layers.1.self_attn.q_proj", ".weight"))) code &= 0x7f;
  EXPECT_NE(said(made).find("q_proj has codes without signs"), std::string::npos);
}

TEST_F(ContentsPeers, CodesOfAnotherFloat) {
  auto made = test::made_mixture(Storage::fp8_channel);
  const auto name = first_of(made, "layers.1.self_attn.o_proj", ".weight");
  // An exponent more and a bit less of the mantissa, as E5M2 has them.
  for (auto& code : made.values<uint8_t>(name)) {
    code = static_cast<uint8_t>((code & 0x80) | ((code & 0x7f) == 0 ? 0 : ((code & 0x7f) >> 1) + (8 << 2)));
  }
  EXPECT_NE(said(made).find("codes of another type"), std::string::npos) << said(made);
}

TEST_F(ContentsPeers, ANormOfAnotherLayer) {
  auto made = test::made_mixture(Storage::bf16);
  const auto from = first_of(made, "layers.0.", "input_layernorm.weight");
  const auto to = first_of(made, "layers.1.", "input_layernorm.weight");
  made.tensors[to] = made.tensors[from];
  EXPECT_NE(said(made).find(concat(to, " holds the bytes of ", from)), std::string::npos) << said(made);
  // Models are made longer by layers that are others' as a whole.
  for (const auto& [name, tensor] : std::map(made.tensors)) {
    const size_t at = name.find("layers.0.");
    if (at == std::string::npos || name.find("visual") != std::string::npos) continue;
    made.tensors[std::string(name).replace(at, 9, "layers.1.")] = tensor;
  }
  EXPECT_EQ(said(made), "");
}

TEST_F(ContentsPeers, ScalesOfInputs) {
  auto made = test::made_mixture(Storage::fp8_channel);
  for (const auto& name : made.names_with(".weight_scale")) {
    const auto module = name.substr(0, name.rfind('.'));
    made.put(module + ".input_scale", DType::f32, {1}, std::vector<float>{0.02f});
  }
  EXPECT_EQ(said(made), "");
  const auto name = first_of(made, "layers.1.self_attn", "o_proj.input_scale");
  made.values<float>(name)[0] = 0;
  EXPECT_NE(said(made).find(name + " is 0: a scale of inputs must be positive"), std::string::npos);
  made.tensors.erase(name);
  EXPECT_NE(said(made).find(name + " is missing"), std::string::npos);
}

TEST_F(ContentsPeers, AdaptersThatWereNotMerged) {
  auto made = test::made_mixture(Storage::bf16);
  made.put("model.language_model.layers.0.self_attn.q_proj.lora_A.weight", DType::f32, {2, 128},
           std::vector<float>(256, 0.5f));
  EXPECT_NE(said(made).find("lora_A.weight is an adapter's that was not merged"), std::string::npos);
  made.config["vision_lora"] = {{"r", 2}};
  EXPECT_EQ(said(made), "");
}

TEST_F(ContentsPeers, TokensBeyondTheEmbeddings) {
  auto made = test::made_mixture(Storage::bf16);
  (made.config.contains("text_config") ? made.config["text_config"] : made.config)["eos_token_id"] = {1, 999'999};
  EXPECT_NE(said(made).find("says eos_token_id 999999, the embeddings have"), std::string::npos) << said(made);
}

TEST_F(ContentsPeers, TextAndPagesThatStandTwice) {
  auto made = test::made_mixture(Storage::bf16);
  std::vector<uint16_t> values(size_t{128} * 128);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(0x3c00 + i * 2654435761u % 4099);
  made.put("model.language_model.layers.0.mlp.extra.weight", DType::bf16, {128, 128}, values);
  auto twice = made, text = made;
  const auto bytes_of = [](MadeCheckpoint& changed) -> std::vector<std::byte>& {
    return changed.tensors["model.language_model.layers.0.mlp.extra.weight"].bytes;
  };
  EXPECT_EQ(said(made), "");
  std::copy_n(bytes_of(made).begin() + 3072, 3000, bytes_of(twice).begin() + 20480);
  EXPECT_NE(said(twice).find("a page stands twice"), std::string::npos) << said(twice);
  const std::string page = "<html><body>503 Service Unavailable</body></html>\n";
  for (size_t i = 0; i < 2048; ++i) bytes_of(text)[5000 + i] = static_cast<std::byte>(page[i % page.size()]);
  EXPECT_NE(said(text).find("holds text at byte"), std::string::npos) << said(text);
}

/// Programs that read all files take either.
/// A text model that was saved without the layers its config still promises: what is made of it did not lose them.
TEST_F(ContentsPeers, WhatTheBaseLacksIsANote) {
  auto made = test::made_mixture(Storage::bf16);
  std::erase_if(made.tensors, [](const auto& entry) { return entry.first.starts_with("mtp."); });
  made.write(folder_ / "made");
  const checkpoint::Folder headers{folder_ / "made", made.config, io::Checkpoint::open(folder_ / "made")};
  auto check = check_contents(headers);
  ASSERT_TRUE(check && !check->passed);
  std::vector<std::string> notes;
  auto other = headers.config;
  other["text_config"].erase("mtp_num_hidden_layers");
  excuse_as_in_base(*check, {headers.path, other, headers.tensors}, notes);
  EXPECT_FALSE(check->passed);
  EXPECT_TRUE(notes.empty());
  excuse_as_in_base(*check, headers, notes);
  EXPECT_TRUE(check->passed) << join(check->faults, "\n");
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("layers for further tokens (MTP)"), std::string::npos) << notes[0];
}

TEST_F(ContentsPeers, GroupsOfMlxWithoutAShapeAreNoGroups) {
  for (const int64_t group : {int64_t{64}, int64_t{1} << 62}) {
    MadeCheckpoint made;
    made.put("model.layers.0.mlp.up_proj.weight", DType::u32, {4, 8}, std::vector<uint32_t>(32));
    made.put("model.layers.0.mlp.up_proj.scales", DType::f32, {}, std::vector<float>{1});
    made.config = {{"model_type", "unseen"}, {"quantization", {{"group_size", group}, {"bits", 4}}}};
    EXPECT_NO_THROW(said(made)) << group;
  }
}

TEST_F(ContentsPeers, ATensorInTwoFiles) {
  auto made = test::made_mixture(Storage::bf16);
  const auto folder = folder_ / "two";
  made.write(folder);
  MadeCheckpoint second;
  const std::string name = made.tensors.begin()->first;
  second.tensors[name] = made.tensors[name];
  second.put("last", DType::f32, {1}, std::vector<float>{1});
  second.write(folder_ / "second");
  std::filesystem::rename(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors");
  std::filesystem::copy(folder_ / "second" / "model.safetensors", folder / "model-00002-of-00002.safetensors");
  io::Json map = io::Json::object();
  for (const auto& [tensor, bytes] : made.tensors) map[tensor] = "model-00001-of-00002.safetensors";
  map["last"] = "model-00002-of-00002.safetensors";
  std::ofstream(folder / "model.safetensors.index.json") << io::Json{{"weight_map", map}}.dump();
  const auto contents = check_contents({folder, made.config, io::Checkpoint::open(folder)});
  ASSERT_TRUE(contents && !contents->passed);
  EXPECT_NE(contents->faults.front().find("holds 1 tensors that the index has in another file"), std::string::npos)
      << contents->faults.front();
}

}  // namespace
}  // namespace w4q::verify
