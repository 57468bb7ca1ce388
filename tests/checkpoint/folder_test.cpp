#include "checkpoint/folder.h"

#include "dialect_samples.h"
#include "support.h"

namespace w4q::checkpoint {
namespace {

using test::expect_error;

/// A folder with one tensor of 16 bit.
class FolderOf {
 public:
  explicit FolderOf(const io::Json& config) {
    std::vector<std::pair<std::string, formats::StoredTensor>> tensors;
    tensors.emplace_back("backbone.layers.0.mixer.A", formats::StoredTensor{{"", DType::bf16, {2, 3}}, Buffer(12)});
    test::write_checkpoint(folder_.path(), config, tensors);
  }
  const std::filesystem::path& path() const { return folder_.path(); }

 private:
  test::TemporaryFolder folder_;
};

TEST(Folder, NoArchitectureNeedBeKnown) {
  const FolderOf unknown(io::Json{{"model_type", "something of next year"}});
  const Folder folder = open_folder(unknown.path());
  EXPECT_EQ(folder.path, unknown.path());
  EXPECT_EQ(folder.config["model_type"], "something of next year");
  EXPECT_EQ(folder.tensors.at("backbone.layers.0.mixer.A").shape, (Shape{2, 3}));
  EXPECT_TRUE(folder.quantization.linears.empty());
}

TEST(Folder, Refusals) {
  const FolderOf plain(io::Json::object());
  const std::string name = plain.path().filename().string();
  expect_error(ErrorCode::bad_argument, {name, "holds no packed tensors", "w4q quantize makes"},
               [&] { open_packed_folder(plain.path()); });
  expect_error(ErrorCode::bad_argument, {"w4q quantize --method x makes"},
               [&] { open_packed_folder(plain.path(), "w4q quantize --method x"); });
  expect_error(ErrorCode::bad_file, {"config.json: not a folder"}, [&] { open_folder(plain.path() / "config.json"); });
  expect_error(ErrorCode::bad_file, {"absent: does not exist"}, [&] { open_folder(plain.path() / "absent"); });
}

/// compressed-tensors' config with a transform at each of the locations.
io::Json transformed(std::initializer_list<io::Json> locations) {
  io::Json apply = io::Json::array();
  for (const io::Json& location : locations) apply.push_back({{"targets", {"Linear"}}, {"location", location}});
  return {{"quant_method", "compressed-tensors"},
          {"transform_config", {{"config_groups", {{"v", {{"type", "hadamard"}, {"apply", apply}}}}}}}};
}

TEST(Folder, TransformsOfActivationsAreRefused) {
  const auto check = [](const io::Json& config) {
    refuse_transforms_at_run_time({config, "config.json: quantization_config", true});
  };
  for (const io::Json& location : {io::Json("input"), io::Json("output"), io::Json("k_cache"), io::Json("q_attn"),
                                   io::Json("of next year"), io::Json(3), io::Json()}) {
    expect_error(ErrorCode::unsupported,
                 {"config.json: quantization_config: transform_config.config_groups.v", "at location", location.dump(),
                  "while the model runs", "start from the 16-bit checkpoint"},
                 [&] {
                   check(transformed({"weight_input", location}));
                 });
  }
  // In the weights, or nothing that says where.
  check(transformed({"weight_input", "weight_output"}));
  check(transformed({}));
  for (const char* text :
       {"3", "[]", "{}", R"({"transform_config": null})", R"({"transform_config": []})",
        R"({"transform_config": {"config_groups": [1]}})",
        R"({"transform_config": {"config_groups": {"v": 1, "w": {"apply": 1}, "x": {"apply": [1]}}}})"}) {
    check(io::parse_json(text, "test"));
  }
  const FolderOf turned(io::Json{{"quantization_config", transformed({"input"})}});
  expect_error(ErrorCode::unsupported, {"at location \"input\""}, [&] { open_folder(turned.path()); });
}

TEST(Folder, StatesWhoseQuantizationItIs) {
  const FolderOf plain(io::Json::object());
  const auto stated = [&](const io::Json& config) { return stated_quantization(config, plain.path()); };
  EXPECT_FALSE(stated(io::Json::object()));
  EXPECT_FALSE(stated(io::Json{{"quantization_config", nullptr}}));
  EXPECT_FALSE(stated({{"quantization_config", {{"quant_method", "w4q"}}}})->foreign);
  EXPECT_FALSE(stated({{"quantization_config", 3}})->foreign) << "nobody's: what reads it refuses it";
  const auto gptq = stated({{"quantization_config", {{"quant_method", "gptq"}}}});
  EXPECT_TRUE(gptq->foreign);
  EXPECT_EQ(gptq->json["quant_method"], "gptq");
  EXPECT_EQ(gptq->place, (plain.path() / "config.json: quantization_config").string());
  io::write_file(plain.path() / "quantize_config.json", std::string(R"({"bits": 4})"), false);
  const auto side = stated(io::Json::object());
  EXPECT_TRUE(side->foreign);
  EXPECT_EQ(side->json["bits"], 4);
  EXPECT_NE(side->place.find("quantize_config.json"), std::string::npos);
}

}  // namespace
}  // namespace w4q::checkpoint
