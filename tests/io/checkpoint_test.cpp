#include "io/checkpoint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <fstream>

#include "io/checkpoint_writer.h"
#include "io/zstd_frames.h"
#include "make.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryFolder;

std::string load(const Checkpoint& checkpoint, std::string_view name) { return text_of(checkpoint.load(name)->bytes); }

void compress_in_place(const fs::path& path) {
  fs::path compressed = path;
  compressed += ".zst";
  compress_file(path, compressed, 3, 4096);
  fs::remove(path);
}

/// Two shards with three tensors, and their index.
struct Sharded {
  TemporaryFolder folder;

  explicit Sharded(std::string_view index = R"({"metadata":{"total_size":9},"weight_map":
      {"a":"model-00001-of-00002.safetensors","b":"model-00001-of-00002.safetensors","c":"model-00002-of-00002.safetensors"}})") {
    put(folder / "model-00001-of-00002.safetensors", container({{"a", "aaa"}, {"b", "bb"}}));
    put(folder / "model-00002-of-00002.safetensors", container({{"c", "cccc"}}));
    put(folder / "model.safetensors.index.json", index);
  }
  fs::path first() const { return folder / "model-00001-of-00002.safetensors"; }
  fs::path second() const { return folder / "model-00002-of-00002.safetensors"; }
};

void refuses_index(std::string_view index, std::initializer_list<std::string_view> parts) {
  const Sharded sharded(index);
  expect_error(ErrorCode::bad_file, parts, [&] { Checkpoint::open(sharded.folder.path()); });
}

TEST(Checkpoint, OpensASingleFileByFolderAndByName) {
  const TemporaryFolder folder;
  const std::string file = container({{"x", "12345"}, {"y", ""}});
  put(folder / "model.safetensors", file);
  for (const auto& path : {folder.path(), folder / "model.safetensors"}) {
    const Checkpoint checkpoint = Checkpoint::open(path);
    EXPECT_EQ(checkpoint.folder(), folder.path());
    EXPECT_EQ(load(checkpoint, "x"), "12345");
    EXPECT_EQ(load(checkpoint, "y"), "");
    EXPECT_EQ(checkpoint.total_bytes(), 5);
    EXPECT_EQ(checkpoint.file_bytes(), static_cast<int64_t>(file.size()));
    EXPECT_EQ(checkpoint.metadata().at("format"), "pt");
    EXPECT_TRUE(checkpoint.warnings().empty());
    EXPECT_EQ(checkpoint.file_of("x"), (folder / "model.safetensors").native());
  }
}

TEST(Checkpoint, OpensShardsByTheirIndex) {
  const Sharded sharded;
  for (const auto& path : {sharded.folder.path(), sharded.folder / "model.safetensors.index.json"}) {
    const Checkpoint checkpoint = Checkpoint::open(path);
    EXPECT_EQ(checkpoint.tensors().size(), 3u);
    EXPECT_EQ(load(checkpoint, "b"), "bb");
    EXPECT_EQ(load(checkpoint, "c"), "cccc");
    EXPECT_EQ(checkpoint.file_of("c"), sharded.second().native());
    EXPECT_TRUE(checkpoint.warnings().empty());
  }
}

TEST(Checkpoint, OpensAnIndexOfAnotherName) {
  const Sharded sharded;
  fs::rename(sharded.folder / "model.safetensors.index.json", sharded.folder / "diffusion.safetensors.index.json");
  EXPECT_EQ(load(Checkpoint::open(sharded.folder.path()), "a"), "aaa");
  fs::copy(sharded.folder / "diffusion.safetensors.index.json", sharded.folder / "other.safetensors.index.json");
  expect_error(ErrorCode::bad_file, {"several index files", "diffusion"},
               [&] { Checkpoint::open(sharded.folder.path()); });
}

/// "model.safetensors" with a, a file of MTP with b, and an index.
struct WithFurtherFile {
  TemporaryFolder folder;

  explicit WithFurtherFile(std::string_view index) {
    put(folder / "model.safetensors", container({{"a", "aaa"}}));
    put(folder / "model_mtp.safetensors", container({{"b", "bb"}}));
    put(folder / "model.safetensors.index.json", index);
  }
};
constexpr std::string_view further_index = R"({"weight_map":{"a":"model.safetensors","b":"model_mtp.safetensors"}})";

TEST(Checkpoint, AnIndexThatNamesTheUsualFileAndOthersIsRead) {
  const WithFurtherFile files(further_index);
  for (const bool compressed : {false, true}) {
    if (compressed) compress_in_place(files.folder / "model.safetensors");
    const Checkpoint checkpoint = Checkpoint::open(files.folder.path());
    EXPECT_EQ(load(checkpoint, "a"), "aaa");
    EXPECT_EQ(load(checkpoint, "b"), "bb");
    EXPECT_TRUE(checkpoint.warnings().empty());
  }
  EXPECT_EQ(Checkpoint::open(files.folder / "model.safetensors").tensors().size(), 1U) << "the file that was asked for";
  fs::remove(files.folder / "model_mtp.safetensors");
  expect_error(ErrorCode::bad_file, {"model_mtp.safetensors: this shard is missing", "1 of 2 shards"},
               [&] { Checkpoint::open(files.folder.path()); });
  const WithFurtherFile less(R"({"weight_map":{"a":"model.safetensors","b":"model_mtp.safetensors",
      "c":"model.safetensors"}})");
  expect_error(ErrorCode::bad_file, {"tensor \"c\" is missing"}, [&] { Checkpoint::open(less.folder.path()); });
  const WithFurtherFile outside(R"({"weight_map":{"a":"model.safetensors","b":"../model_mtp.safetensors"}})");
  expect_error(ErrorCode::bad_file, {"is not a plain file name"}, [&] { Checkpoint::open(outside.folder.path()); });
}

TEST(Checkpoint, AnIndexBesideTheUsualFileThatTellsOfOthersOrNothingElseIsIgnored) {
  for (const std::string_view index :
       {R"({"weight_map":{"b":"model_mtp.safetensors"}})", R"({"weight_map":{"a":"model.safetensors"}})",
        R"({"weight_map":{"z":"model.safetensors"}})", R"({"weight_map":{"a":1}})", R"({"weight_map":[]})", "[]", "{",
        R"({"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}})"}) {
    const WithFurtherFile files(index);
    const Checkpoint checkpoint = Checkpoint::open(files.folder.path());
    EXPECT_EQ(checkpoint.tensors().size(), 1U) << index;
    EXPECT_EQ(load(checkpoint, "a"), "aaa") << index;
    EXPECT_THAT(checkpoint.warnings(),
                testing::ElementsAre("model.safetensors.index.json is ignored: model.safetensors is there"))
        << index;
  }
}

TEST(Checkpoint, OpensCompressedFiles) {
  const Sharded sharded;
  compress_in_place(sharded.first());
  EXPECT_EQ(load(Checkpoint::open(sharded.folder.path()), "a"), "aaa") << "the index names the plain file";
  compress_in_place(sharded.second());
  const Checkpoint checkpoint = Checkpoint::open(sharded.folder.path());
  EXPECT_EQ(load(checkpoint, "b"), "bb");
  EXPECT_EQ(load(checkpoint, "c"), "cccc");
  EXPECT_TRUE(checkpoint.warnings().empty());

  const TemporaryFolder folder;
  const std::string data = noise(20'000, 5);
  put(folder / "model.safetensors", container({{"x", data}, {"y", "yy"}}));
  compress_in_place(folder / "model.safetensors");
  for (const auto& path : {folder.path(), folder / "model.safetensors.zst", folder / "model.safetensors"}) {
    const Checkpoint single = Checkpoint::open(path);
    EXPECT_TRUE(load(single, "x") == data);
    EXPECT_EQ(load(single, "y"), "yy");
  }
}

TEST(Checkpoint, CompressedFilesAreCheckedLikePlainOnes) {
  const TemporaryFolder folder;
  for (const std::string& bad : {std::string("abc"), container({{"x", "12345"}}).substr(0, 60), std::string(16, '\xff'),
                                 container({{"x", "12345"}}) + "1", std::string("")}) {
    fs::remove(folder / "model.safetensors.zst");
    put(folder / "model.safetensors", bad);
    compress_in_place(folder / "model.safetensors");
    expect_error(ErrorCode::bad_file, {"model.safetensors.zst: "}, [&] { Checkpoint::open(folder.path()); });
  }
}

TEST(Checkpoint, FollowsTheLinksOfASnapshot) {
  const TemporaryFolder folder;
  put(folder / "blobs/abc", container({{"x", "12345"}}));
  fs::create_directories(folder / "snapshots/1");
  fs::create_symlink("../../blobs/abc", folder / "snapshots/1/model.safetensors");
  const Checkpoint checkpoint = Checkpoint::open(folder / "snapshots/1");
  EXPECT_EQ(load(checkpoint, "x"), "12345");
  EXPECT_EQ(checkpoint.folder(), folder / "snapshots/1");
}

TEST(Checkpoint, SaysWhatIsMissing) {
  const TemporaryFolder folder;
  const auto open = [&] { Checkpoint::open(folder.path()); };
  expect_error(ErrorCode::bad_file, {"gone: does not exist"}, [&] { Checkpoint::open(folder / "gone"); });
  expect_error(ErrorCode::bad_file, {"holds no model weights"}, open);
  put(folder / "pytorch_model.bin", "x");
  put(folder / "pytorch_model.bin.index.json", "{}");
  expect_error(ErrorCode::bad_file, {"pytorch_model.bin", "hint: convert"}, open);
  put(folder / "model.gguf", "x");
  expect_error(ErrorCode::bad_file, {"model.gguf"}, [&] { Checkpoint::open(folder / "model.gguf"); });
  put(folder / "one.safetensors", container({{"x", "1"}}));
  EXPECT_EQ(load(Checkpoint::open(folder.path()), "x"), "1");
  put(folder / "two.safetensors", container({{"x", "1"}}));
  expect_error(ErrorCode::bad_file, {"no index", "one.safetensors, two.safetensors", "hint:"}, open);
  fs::create_directories(folder / "sub/model.safetensors");
  expect_error(ErrorCode::bad_file, {"is a folder"}, [&] { Checkpoint::open(folder / "sub"); });
}

TEST(Checkpoint, NamesMissingShards) {
  const Sharded sharded;
  fs::remove(sharded.second());
  expect_error(ErrorCode::bad_file, {"model-00002-of-00002.safetensors: this shard is missing", "1 of 2 shards"},
               [&] { Checkpoint::open(sharded.folder.path()); });
}

TEST(Checkpoint, NamesAShardCutShort) {
  const Sharded sharded;
  const auto size = fs::file_size(sharded.first());
  fs::resize_file(sharded.first(), size - 1);
  const std::string expected = "expected " + std::to_string(size);
  const std::string found = "found " + std::to_string(size - 1);
  expect_error(ErrorCode::bad_file, {"model-00001-of-00002.safetensors: is cut short", expected, found},
               [&] { Checkpoint::open(sharded.folder.path()); });
}

TEST(Checkpoint, RefusesHostileIndices) {
  refuses_index("[]", {"model.safetensors.index.json: is not a safetensors index"});
  refuses_index("{}", {"is not a safetensors index"});
  refuses_index(R"({"weight_map":[]})", {"is not a safetensors index"});
  refuses_index(R"({"weight_map":{}})", {"lists no tensors"});
  refuses_index(R"({"weight_map":{"a":1}})", {"no file name for tensor \"a\""});
  for (const auto* name : {"../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "sub\\\\x.safetensors", "",
                           "..safetensors", "x\\u0000.safetensors"}) {
    refuses_index(std::string(R"({"weight_map":{"a":")") + name + "\"}}", {"is not a plain file name"});
  }
  refuses_index(R"({"weight_map":{"a":"pytorch_model-00001-of-00002.bin"}})", {"not a .safetensors file"});
  refuses_index(R"({"weight_map":{"a":"x.safetensors","a":"x.safetensors"}})", {"\"a\" appears twice"});
  refuses_index(R"({"weight_map":{"nope":"model-00001-of-00002.safetensors"}})",
                {"model-00001-of-00002.safetensors: tensor \"nope\" is missing", "model.safetensors.index.json says"});
  refuses_index(R"({"weight_map":{"c":"model-00001-of-00002.safetensors"}})", {"tensor \"c\" is missing"});
}

TEST(Checkpoint, WarnsOfOddIndices) {
  const auto warning = [](std::string_view index) {
    const Sharded sharded(index);
    const auto warnings = Checkpoint::open(sharded.folder.path()).warnings();
    return warnings.size() == 1 ? warnings[0] : std::to_string(warnings.size()) + " warnings";
  };
  EXPECT_EQ(warning(R"({"metadata":{"total_size":8},"weight_map":
      {"a":"model-00001-of-00002.safetensors","b":"model-00001-of-00002.safetensors","c":"model-00002-of-00002.safetensors"}})"),
            "model.safetensors.index.json: total_size is 8, the tensors have 9 bytes");
  EXPECT_EQ(warning(R"({"weight_map":
      {"a":"model-00001-of-00002.safetensors","c":"model-00002-of-00002.safetensors"}})"),
            "model-00001-of-00002.safetensors holds 1 tensors that the index does not list, the first is \"b\"");
}

TEST(Checkpoint, TheMapDecidesBetweenTwoShardsWithOneName) {
  const Sharded sharded(R"({"weight_map":{"a":"model-00002-of-00002.safetensors","c":"model-00002-of-00002.safetensors",
      "b":"model-00001-of-00002.safetensors"}})");
  put(sharded.second(), container({{"a", "other"}, {"c", "cccc"}}));
  const Checkpoint checkpoint = Checkpoint::open(sharded.folder.path());
  EXPECT_EQ(load(checkpoint, "a"), "other");
  EXPECT_THAT(
      checkpoint.warnings(),
      testing::ElementsAre("model-00001-of-00002.safetensors holds 1 tensors that the index has in another file, "
                           "the first is \"a\": programs that read all files take either"));
}

TEST(Checkpoint, UnknownTensorsAreAnsweredWithSimilarOnes) {
  const TemporaryFolder folder;
  put(folder / "model.safetensors", container({{"model.layers.0.mlp.up_proj.weight", "1"}, {"lm_head.weight", "2"}}));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_FALSE(checkpoint.contains("model.layers.1.mlp.up_proj.weight"));
  expect_error(ErrorCode::bad_file,
               {"no tensor \"model.layers.1.mlp.up_proj.weight\"", "similar names: model.layers.0"},
               [&] { checkpoint.load("model.layers.1.mlp.up_proj.weight"); });
}

TEST(Checkpoint, LoadedTensorsSurviveAMove) {
  const TemporaryFolder folder;
  put(folder / "model.safetensors", container({{"x", "12345"}}));
  Checkpoint checkpoint = Checkpoint::open(folder.path());
  const LoadedTensor tensor = checkpoint.load("x");
  Checkpoint other = std::move(checkpoint);
  EXPECT_EQ(text_of(tensor->bytes), "12345");
  EXPECT_EQ(tensor->name, "x");
  EXPECT_EQ(load(other, "x"), "12345");
  checkpoint = std::move(other);  // lives longer than the tensor, as it must
  EXPECT_EQ(load(checkpoint, "x"), "12345");
}

/// Resident memory of this process that belongs to files, in bytes.
int64_t resident_file_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kilobytes = 0;
    if (word == "RssFile:" && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

TEST(Checkpoint, StreamingThroughALargeFileKeepsTheResidentSetSmall) {
  // A sparse file of 64 tensors of 8 MiB: half a gigabyte passes through, never more than one tensor may stay.
  const TemporaryFolder folder;
  constexpr int64_t size = 8 << 20;
  std::vector<PlannedTensor> plan;
  for (int i = 0; i < 64; ++i) plan.push_back({"t" + std::to_string(i), DType::u8, {size}});
  const auto header = layout_safetensors(plan, {});
  put(folder / "model.safetensors", serialize_safetensors_header(header));
  fs::resize_file(folder / "model.safetensors", header.data_begin + header.tensors.back().end);

  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  const int64_t before = resident_file_bytes();
  int64_t peak = 0;
  unsigned sum = 0;
  for (const auto& [name, info] : checkpoint.tensors()) {
    const LoadedTensor tensor = checkpoint.load(name);
    for (size_t i = 0; i < tensor->bytes.size(); i += 4096) sum += static_cast<unsigned>(tensor->bytes[i]);
    peak = std::max(peak, resident_file_bytes() - before);
  }
  EXPECT_EQ(sum, 0u);
  EXPECT_GE(peak, size / 2) << "the pages were never resident: the test measures nothing";
  EXPECT_LE(peak, 2 * size) << "one tensor, and as much again for rounding and read-ahead";
}

TEST(Checkpoint, KnowsWeightFilesByName) {
  for (const auto* name : {"model.safetensors", "x.safetensors.zst", "model.safetensors.index.json"}) {
    EXPECT_TRUE(is_weight_file(name)) << name;
  }
  for (const auto* name : {"config.json", "safetensors", "model.safetensors.txt", "x.zst"}) {
    EXPECT_FALSE(is_weight_file(name)) << name;
  }
}

TEST(Checkpoint, DerivedTensorsStandInForStoredOnes) {
  const Sharded sharded;
  const auto source = std::make_shared<const Checkpoint>(Checkpoint::open(sharded.folder.path()));
  const auto numbers = [](std::vector<float> values) {
    return [values = std::move(values)] { return Buffer::copy_of(std::as_bytes(std::span(values))); };
  };
  int made = 0;
  const auto counted = [&made, make = numbers({1.0f, 0.5f})] { return ++made, make(); };
  const Checkpoint derived = Checkpoint::derive(
      source,
      {{"b", {DType::f32, DType::bf16, {2}, counted}}, {"new", {DType::f32, DType::f16, {2}, numbers({1.0f, 7e4f})}}},
      "how");
  EXPECT_EQ(derived.derivation(), "how");
  EXPECT_EQ(source->derivation(), "");
  EXPECT_EQ(derived.tensors().size(), 4u);
  EXPECT_EQ(load(derived, "c"), "cccc");
  EXPECT_EQ(derived.file_of("c"), sharded.second());
  EXPECT_EQ(derived.file_of("b"), sharded.first());
  EXPECT_EQ(derived.file_bytes(), source->file_bytes());
  EXPECT_EQ(made, 0);
  EXPECT_EQ(derived.at("b").dtype, DType::f32);
  EXPECT_EQ(derived.load("b")->bytes.size(), 8u);
  EXPECT_EQ(derived.stored_dtype("b"), DType::bf16);
  EXPECT_EQ(text_of(derived.load_stored("b")->bytes), std::string("\x80\x3f\x00\x3f", 4));
  EXPECT_EQ(made, 2);
  EXPECT_EQ(derived.stored_dtype("c"), source->at("c").dtype);
  EXPECT_EQ(text_of(derived.load_stored("c")->bytes), "cccc");
  expect_error(ErrorCode::unsupported, {"\"new\"", "element 1", "F16"}, [&] { derived.load_stored("new"); });
  expect_error(ErrorCode::bad_file, {"no tensor \"z\""}, [&] { derived.stored_dtype("z"); });
}

TEST(Checkpoint, RowsAreMadeOneByOne) {
  const TemporaryFolder folder;
  {
    CheckpointWriter writer(folder.path(), {{"halves", DType::bf16, {2, 3}}, {"one", DType::f32, {1}}}, {});
    const std::vector<uint16_t> halves{0x3F80, 0, 0x4000, 0xBF80, 0x3F00, 0x7FC0};
    writer.write("halves", std::as_bytes(std::span(halves)));
    const std::vector<float> one{0.25f};
    writer.write("one", std::as_bytes(std::span(one)));
    writer.finish();
  }
  const auto source = std::make_shared<const Checkpoint>(Checkpoint::open(folder.path()));
  int opened = 0;
  const auto rows = [&opened]() -> RowReader {
    ++opened;
    return [](int64_t row, std::span<float> values) {
      for (size_t col = 0; col < values.size(); ++col)
        values[col] = static_cast<float>(10 * row) + static_cast<float>(col);
    };
  };
  const Checkpoint derived = Checkpoint::derive(source, {{"made", {DType::f32, DType::bf16, {100, 3}, {}, rows}}}, "");
  const auto row_of = [&](const char* name, int64_t row, size_t k) {
    std::vector<float> values(k);
    derived.rows(name)(row, values);
    return values;
  };
  EXPECT_EQ(row_of("halves", 0, 3), (std::vector<float>{1, 0, 2}));
  EXPECT_EQ(row_of("one", 0, 1), std::vector<float>{0.25f});
  EXPECT_EQ(row_of("made", 99, 3), (std::vector<float>{990, 991, 992}));
  EXPECT_EQ(opened, 1);
  const LoadedTensor whole = derived.load("made");
  for (int64_t row = 0; row < 100; ++row) {
    std::vector<float> values(3);
    std::memcpy(values.data(), whole->bytes.data() + 12 * row, 12);
    ASSERT_EQ(values, row_of("made", row, 3)) << row;
  }
  expect_error(ErrorCode::bad_file, {"no tensor \"z\""}, [&] { derived.rows("z"); });
}

}  // namespace
}  // namespace w4q::io
