#include "io/safetensors.h"

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>

#include "io/files.h"
#include "io/json.h"
#include "make.h"

namespace w4q::io {
namespace {

using test::expect_error;
using test::testdata;

SafetensorsHeader parse(std::string_view file) { return parse_safetensors(bytes_of(file), file.size(), "file"); }

std::string with_header(std::string_view json, std::string_view data = "") {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(json.size() >> (8 * i) & 0xFF);
  return file + std::string(json) + std::string(data);
}

TEST(Safetensors, GivesTheListedVerdictOnEveryFileOfTheMalformedCorpus) {
  const auto manifest = read_json(testdata() / "malformed/manifest.json");
  EXPECT_EQ(manifest.size(), 46u);
  for (const auto& [name, entry] : manifest.items()) {
    SCOPED_TRACE(name);
    const std::string file = read_file(testdata() / "malformed" / (name + ".safetensors"));
    const std::string verdict = entry.at("w4q");
    std::string found;
    try {
      found = parse(file).warnings.empty() ? "accept" : "accept+warn";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::bad_file);
      EXPECT_TRUE(std::string_view(error.what()).starts_with("file: ")) << error.what();
      found = "reject";
    }
    EXPECT_EQ(found, verdict);
  }
}

TEST(Safetensors, WritesEveryGoldenFileAgainByteByByte) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(testdata() / "golden")) {
    if (entry.path().extension() != ".safetensors") continue;
    SCOPED_TRACE(entry.path().filename());
    const std::string file = read_file(entry.path());
    const auto header = parse(file);
    EXPECT_TRUE(header.warnings.empty());
    std::vector<PlannedTensor> plan;
    std::map<std::string, std::string_view> data;
    for (const auto& tensor : header.tensors) {
      plan.insert(plan.begin(), {tensor.name, tensor.dtype, tensor.shape});
      data[tensor.name] = std::string_view(file).substr(header.data_begin + tensor.begin, tensor.size());
    }
    const auto laid_out = layout_safetensors(plan, header.metadata);
    std::string again = serialize_safetensors_header(laid_out);
    EXPECT_EQ(laid_out.data_begin, again.size());
    for (const auto& tensor : laid_out.tensors) again += data.at(tensor.name);
    EXPECT_TRUE(again == file) << "the bytes differ";
    ++files;
  }
  EXPECT_EQ(files, 33);
}

TEST(Safetensors, MessagesNamePlaceExpectedAndFound) {
  const auto rejects = [](std::string_view json, std::string_view data, std::initializer_list<std::string_view> parts) {
    expect_error(ErrorCode::bad_file, parts, [&] { parse(with_header(json, data)); });
  };
  rejects(R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,4]}})", "1234",
          {"tensor \"a\"", "F32 [2, 2] needs 16 bytes", "give 4"});
  rejects(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "12", {"cut short", "expected 65", "found 63"});
  rejects(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "12", {"behind the last tensor"});
  rejects(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", "12", {"\"a\"", "unused bytes before it"});
  rejects(
      R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
      "123", {"tensor \"b\"", "overlaps tensor \"a\"", "expected to begin at 2"});
  rejects(R"({"a":{"dtype":"Q8","shape":[1],"data_offsets":[0,1]}})", "1", {"\"a\"", "unknown dtype \"Q8\""});
  rejects(R"({"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", "1", {"shape", "found 1.5"});
  rejects(R"({"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}})", "1", {"99999999999999999999"});
  rejects(R"({"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}})", "", {"shape"});
  rejects(R"({"a":{"dtype":"U8","shape":"x","data_offsets":[0,1]}})", "1", {"shape: expected an array", "\"x\""});
  rejects(R"({"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}})", "1", {"dtype: expected a string"});
  rejects(R"({"a":{"shape":[[1]],"dtype":"U8","data_offsets":[0,1]}})", "1", {"shape", "found an array"});
  rejects(R"({"a":5})", "", {"tensor \"a\"", "expected an object, found 5"});
  rejects(R"({"a":{}})", "", {"tensor \"a\"", "no dtype"});
  rejects(R"({"__metadata__":[]})", "", {"__metadata__", "found an array"});
  rejects("7", "", {"expected an object of tensors", "found 7"});
  rejects(R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", "1", {"\"shape\" appears twice"});
  rejects(R"({"__metadata__":{"x":"1","x":"1"}})", "", {"\"x\" appears twice"});
  rejects(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"u":{"k":1,"k":1}}})", "1", {"\"k\" appears twice"});
  rejects(R"({"\u001b[31mred":5})", "", {"\\x1B[31mred"});
}

TEST(Safetensors, PointsOutWhatIsNoSafetensorsFile) {
  expect_error(ErrorCode::bad_file, {"Git LFS pointer", "git lfs pull"},
               [] { parse("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"); });
  expect_error(ErrorCode::bad_file, {"too short", "found 3"}, [] { parse("abc"); });
  const std::string deep = "{\"a\":{\"x\":" + std::string(1000, '[') + std::string(1000, ']') + "}}";
  expect_error(ErrorCode::bad_file, {"nested deeper than 100"}, [&] { parse(with_header(deep)); });
}

TEST(Safetensors, KeepsOffsetsAboveTwoToThe53) {
  // 2^53 + 1 is the first integer that a double cannot hold; the hole before it proves that it arrived exactly.
  const auto json = R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[9007199254740993,9007199254740993]}})";
  expect_error(ErrorCode::bad_file, {"[9007199254740993, 9007199254740993]"}, [&] { parse(with_header(json)); });
}

TEST(Safetensors, AcceptsZeroElementsBehindAnyDimension) {
  const auto header =
      parse(with_header(R"({"a":{"dtype":"I32","shape":[4611686018427387904,2,0],"data_offsets":[0,0]}})"));
  EXPECT_EQ(element_count(header.tensors[0].shape), 0);
  EXPECT_EQ(byte_count(header.tensors[0].dtype, header.tensors[0].shape), 0);
}

TEST(Safetensors, WarnsOfHeadersThatOtherToolsRefuse) {
  const std::string json = "{}" + std::string(25'000'000, ' ');
  const auto header = parse(with_header(json));
  ASSERT_EQ(header.warnings.size(), 1u);
  EXPECT_NE(header.warnings[0].find("25.0 MB"), std::string::npos) << header.warnings[0];
}

TEST(Safetensors, LaysOutByDescendingTypeThenName) {
  const auto header = layout_safetensors({{"b", DType::u8, {3}},
                                          {"a", DType::f32, {2}},
                                          {"z", DType::u64, {1}},
                                          {"B", DType::u8, {}},
                                          {"e", DType::bf16, {0, 5}}},
                                         {{"format", "pt"}});
  const std::string json =
      R"({"__metadata__":{"format":"pt"},"z":{"dtype":"U64","shape":[1],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},"e":{"dtype":"BF16","shape":[0,5],"data_offsets":[16,16]},)"
      R"("B":{"dtype":"U8","shape":[],"data_offsets":[16,17]},"b":{"dtype":"U8","shape":[3],"data_offsets":[17,20]}})";
  const std::string bytes = serialize_safetensors_header(header);
  EXPECT_EQ(bytes.size() % 8, 0u);
  EXPECT_EQ(bytes.substr(8, json.size()), json);
  EXPECT_EQ(bytes.substr(8 + json.size()), std::string(bytes.size() - 8 - json.size(), ' '));
}

TEST(Safetensors, EscapesNamesAsTheReferenceDoes) {
  const auto header = layout_safetensors({{"q\"\\/\n\x01\x7fü", DType::u8, {}}}, {});
  EXPECT_EQ(serialize_safetensors_header(header).substr(8, 22), "{\"q\\\"\\\\/\\n\\u0001\x7fü\":{");
}

TEST(Safetensors, RefusesBadPlans) {
  const auto refuses = [](std::vector<PlannedTensor> plan, std::string_view part) {
    expect_error(ErrorCode::bad_argument, {part}, [&] { layout_safetensors(plan, {}); });
  };
  refuses({{"a", DType::u8, {1}}, {"a", DType::f32, {1}}}, "planned twice");
  refuses({{"__metadata__", DType::u8, {1}}}, "reserved");
  refuses({{"a", DType::f4, {3}}}, "does not fill whole bytes");
  refuses({{"a", DType::u8, {-1}}}, "negative");
  refuses({{"a", DType::u8, {int64_t{1} << 40, int64_t{1} << 40}}}, "too many elements");
  refuses({{"a\xff", DType::u8, {1}}}, "UTF-8");
}

std::vector<PlannedTensor> random_plan(uint64_t seed) {
  uint64_t draw = 0;
  const auto below = [&](uint64_t limit) { return random_bits(seed, draw++) % limit; };
  std::vector<PlannedTensor> plan(below(20));
  for (size_t i = 0; i < plan.size(); ++i) {
    plan[i].name = "t" + std::to_string(i);
    for (uint64_t length = below(8); length-- > 0;) plan[i].name += static_cast<char>(1 + below(127));
    plan[i].dtype = static_cast<DType>(below(dtype_count));
    for (uint64_t rank = below(4); rank-- > 0;) plan[i].shape.push_back(static_cast<int64_t>(below(5)));
    plan[i].shape.push_back(4);  // whole bytes for 4- and 6-bit types too
  }
  return plan;
}

TEST(Safetensors, RandomPlansComeBack) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const auto plan = random_plan(seed);
    const auto written = layout_safetensors(plan, {{"seed", std::to_string(seed)}});
    std::string file = serialize_safetensors_header(written);
    if (!written.tensors.empty()) file.resize(file.size() + written.tensors.back().end);
    const auto read = parse(file);
    EXPECT_TRUE(read.warnings.empty());
    EXPECT_EQ(read.metadata, written.metadata);
    EXPECT_EQ(read.data_begin, written.data_begin);
    ASSERT_EQ(read.tensors.size(), plan.size());
    std::map<std::string, PlannedTensor> planned;
    for (const auto& tensor : plan) planned[tensor.name] = tensor;
    for (const auto& tensor : read.tensors) {
      EXPECT_EQ(tensor.dtype, planned.at(tensor.name).dtype);
      EXPECT_EQ(tensor.shape, planned.at(tensor.name).shape);
      // Every tensor stands aligned to its own elements, because wider types come first.
      if (dtype_bits(tensor.dtype) >= 8) {
        EXPECT_EQ((read.data_begin + tensor.begin) * 8 % dtype_bits(tensor.dtype), 0u);
      }
    }
  }
}

/// Whatever the bytes: an accepted header covers the file exactly, anything else is an Error.
void accept_or_error(std::string_view file) {
  try {
    const auto header = parse(file);
    uint64_t run = 0;
    for (const auto& tensor : header.tensors) {
      EXPECT_EQ(tensor.begin, run);
      EXPECT_EQ(static_cast<int64_t>(tensor.size()), byte_count(tensor.dtype, tensor.shape));
      run = tensor.end;
    }
    EXPECT_EQ(header.data_begin + run, file.size());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_file) << error.what();
  }
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string file = read_file(testdata() / "golden/ct_pack_3bit_ragged.safetensors");
  for (size_t size = 0; size < file.size(); ++size) {
    expect_error(ErrorCode::bad_file, {"file: "}, [&] { parse(std::string_view(file).substr(0, size)); });
  }
}

TEST(Safetensors, RandomDamageIsAcceptedOrRefusedButNeverWorse) {
  const std::string file = read_file(testdata() / "golden/ct_nvfp4.safetensors");
  const uint64_t header_end = parse(file).data_begin;
  for (uint64_t seed = 0; seed < 5000; ++seed) {
    std::string damaged = file;
    for (uint64_t i = 0; i <= seed % 4; ++i) {
      damaged[random_bits(seed, 2 * i) % header_end] = static_cast<char>(random_bits(seed, 2 * i + 1));
    }
    accept_or_error(damaged);
  }
}

TEST(Safetensors, ManyKeysAreReadInLinearTime) {
  // 200,000 members: anything quadratic takes minutes here; linear work takes a tenth of a second (seven with
  // sanitizers on a busy machine is no news).
  std::string json = "{\"__metadata__\":{";
  for (int i = 0; i < 200'000; ++i) json += (i ? ",\"k" : "\"k") + std::to_string(i) + "\":\"\"";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(parse(with_header(json + "}}")).metadata.size(), 200'000u);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace w4q::io
