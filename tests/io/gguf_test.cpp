#include "io/gguf.h"

#include "io/gguf_writer.h"
#include "make.h"

namespace w4q::io {
namespace {

using test::expect_error;

GgufHeader parse_file(std::string_view file) { return parse_gguf(bytes_of(file), "file"); }

/// One value of every type, and an array of every type.
GgufMetadata every_type() {
  return {{"u8", uint8_t{200}},
          {"i8", int8_t{-3}},
          {"u16", uint16_t{60000}},
          {"i16", int16_t{-30000}},
          {"u32", uint32_t{4000000000}},
          {"i32", int32_t{-5}},
          {"f32", 1.5f},
          {"bool", true},
          {"string", std::string("a\0b", 3)},
          {"u64", uint64_t{1} << 63},
          {"i64", int64_t{-1} << 62},
          {"f64", -0.1},
          {"array.u8", GgufArray(std::vector<uint8_t>{1, 2, 255})},
          {"array.i8", GgufArray(std::vector<int8_t>{-1})},
          {"array.u16", GgufArray(std::vector<uint16_t>{})},
          {"array.i16", GgufArray(std::vector<int16_t>{-2, 2})},
          {"array.u32", GgufArray(std::vector<uint32_t>{7})},
          {"array.i32", GgufArray(std::vector<int32_t>{1, 3, 6})},
          {"array.f32", GgufArray(std::vector<float>{0.25f, -1e30f})},
          {"array.bool", GgufArray(std::vector<bool>{true, false, true})},
          {"array.string", GgufArray(std::vector<std::string>{"", "Ġthe", "x"})},
          {"array.u64", GgufArray(std::vector<uint64_t>{~uint64_t{0}})},
          {"array.i64", GgufArray(std::vector<int64_t>{-9})},
          {"array.f64", GgufArray(std::vector<double>{3.5, 4.5})}};
}

/// A whole file; tensor i is filled with the byte i + 1.
std::string file_of(const GgufHeader& header) {
  std::string file = serialize_gguf_header(header);
  for (size_t i = 0; i < header.tensors.size(); ++i) {
    file.resize(header.data_begin + header.tensors[i].offset);
    file.append(header.tensors[i].size, static_cast<char>(i + 1));
  }
  file.resize(header.file_size());
  return file;
}

GgufHeader small_header() {
  return layout_gguf({{"a", GgmlType::f32, {3}}, {"b", GgmlType::q8_0, {2, 64}}, {"c", GgmlType::f16, {1, 2, 5}}},
                     every_type());
}

template <class T>
void append(std::string& text, T value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

void append_text(std::string& text, std::string_view value) {
  append(text, static_cast<uint64_t>(value.size()));
  text += value;
}

/// Magic, version and counts.
std::string head(uint32_t version, uint64_t tensors, uint64_t entries) {
  std::string file = "GGUF";
  append(file, version);
  append(file, tensors);
  append(file, entries);
  return file;
}

TEST(Gguf, WritesTheBytesOfTheFormat) {
  std::string expected = head(3, 2, 2);
  append_text(expected, "general.architecture");
  append(expected, uint32_t{8});
  append_text(expected, "llama");
  append_text(expected, "k");
  append(expected, uint32_t{9});
  append(expected, uint32_t{5});
  append(expected, uint64_t{2});
  append(expected, int32_t{-1});
  append(expected, int32_t{70000});
  append_text(expected, "w");
  append(expected, uint32_t{2});
  append(expected, uint64_t{32});  // the fastest dimension comes first
  append(expected, uint64_t{3});
  append(expected, uint32_t{2});  // Q4_0
  append(expected, uint64_t{0});
  append_text(expected, "v");
  append(expected, uint32_t{1});
  append(expected, uint64_t{1});
  append(expected, uint32_t{0});   // F32
  append(expected, uint64_t{64});  // behind 3 · 18 bytes, padded to 32
  expected.resize((expected.size() + 31) / 32 * 32);

  const auto header =
      layout_gguf({{"w", GgmlType::q4_0, {3, 32}}, {"v", GgmlType::f32, {1}}},
                  {{"general.architecture", std::string("llama")}, {"k", GgufArray(std::vector<int32_t>{-1, 70000})}});
  EXPECT_EQ(serialize_gguf_header(header), expected);
  EXPECT_EQ(header.data_begin, expected.size());
  EXPECT_EQ(header.file_size(), expected.size() + 96);
}

TEST(Gguf, EveryValueTypeComesBack) {
  const auto header = small_header();
  const std::string file = file_of(header);
  const auto read = parse_file(file);
  EXPECT_TRUE(read.warnings.empty());
  ASSERT_EQ(read.metadata.size(), header.metadata.size());
  for (size_t i = 0; i < header.metadata.size(); ++i) {
    EXPECT_EQ(read.metadata[i].key, header.metadata[i].key);
    EXPECT_EQ(read.metadata[i].value, header.metadata[i].value) << header.metadata[i].key;
    EXPECT_EQ(type_text(read.metadata[i].value),
              i < 12 ? read.metadata[i].key : "array of " + read.metadata[i].key.substr(6));
  }
  ASSERT_EQ(read.tensors.size(), 3u);
  EXPECT_EQ(read.tensors[1].shape, (Shape{2, 64}));
  EXPECT_EQ(read.tensors[1].size, 4u * 34);
  EXPECT_EQ(read.tensors[1].row_bytes(), 2u * 34);
  EXPECT_EQ(read.tensors[2].shape, (Shape{1, 2, 5}));
  EXPECT_EQ(serialize_gguf_header(read), serialize_gguf_header(header));
}

TEST(Gguf, EveryTruncationIsRefused) {
  const auto header = small_header();
  const std::string file = file_of(header);
  const uint64_t last_byte = header.data_begin + header.tensors.back().offset + header.tensors.back().size;
  for (size_t size = 0; size < last_byte; ++size) {
    const std::string cut = file.substr(0, size);  // a copy of its own, so that a sanitizer sees reads behind it
    expect_error(ErrorCode::bad_file, {"file: "}, [&] { parse_file(cut); });
  }
  for (size_t size = last_byte; size < file.size(); ++size)
    EXPECT_EQ(parse_file(file.substr(0, size)).warnings.size(), 1u);
  EXPECT_EQ(parse_file(file + "x").warnings.size(), 1u);
}

TEST(Gguf, EveryChangedByteIsRefusedOrConsistent) {
  const auto header = small_header();
  const std::string file = file_of(header);
  int accepted = 0;
  for (size_t place = 0; place < header.data_begin; ++place) {
    for (const int change : {1, 0x80, 0xFF}) {
      std::string changed = file;
      changed[place] = static_cast<char>(changed[place] ^ change);
      try {
        const auto read = parse_file(changed);
        ++accepted;
        for (const auto& tensor : read.tensors) {
          EXPECT_LE(read.data_begin + tensor.offset + tensor.size, changed.size());
        }
      } catch (const Error& error) {
        EXPECT_TRUE(error.code() == ErrorCode::bad_file || error.code() == ErrorCode::unsupported) << error.what();
      }
    }
  }
  EXPECT_GT(accepted, 0);  // letters of names and values of numbers
}

TEST(Gguf, NamesWhatIsWrong) {
  const auto refuse = [](ErrorCode code, std::initializer_list<std::string_view> parts, const std::string& file) {
    expect_error(code, parts, [&] { parse_file(file); });
  };
  refuse(ErrorCode::bad_file, {"is not a GGUF file"}, "GGUX....");
  refuse(ErrorCode::bad_file, {"version 0"}, head(0, 0, 0));
  refuse(ErrorCode::unsupported, {"version 1"}, head(1, 0, 0));
  refuse(ErrorCode::unsupported, {"version 4"}, head(4, 0, 0));
  refuse(ErrorCode::unsupported, {"high byte first"}, head(0x03000000, 0, 0));
  refuse(ErrorCode::bad_file, {"18446744073709551615 keys"}, head(3, 0, ~uint64_t{0}));
  refuse(ErrorCode::bad_file, {"1000 tensors"}, head(3, 1000, 0) + std::string(100, '\0'));

  const auto with_key = [](std::string_view key, std::string_view rest) {
    std::string file = head(3, 0, 1);
    append_text(file, key);
    return file + std::string(rest) + std::string(64, '\0');
  };
  refuse(ErrorCode::bad_file, {"key 0 is empty"}, with_key("", "abcdefgh"));
  refuse(ErrorCode::bad_file, {"\"k\"", "unknown type 13"}, with_key("k", std::string("\x0D\0\0\0", 4)));
  refuse(ErrorCode::bad_file, {"a boolean is 2"}, with_key("k", std::string("\7\0\0\0\2", 5)));
  refuse(ErrorCode::unsupported, {"array of arrays"}, with_key("k", std::string("\t\0\0\0\t\0\0\0", 8)));
  refuse(ErrorCode::bad_file, {"unknown element type 99"}, with_key("k", std::string("\t\0\0\0c\0\0\0", 8)));
  refuse(ErrorCode::bad_file, {"an array claims 1099511627776 elements"},
         with_key("k", std::string("\t\0\0\0\0\0\0\0\0\0\0\0\0\1\0\0", 16)));
  refuse(ErrorCode::bad_file, {"the file ends too early"},
         with_key("k", std::string("\x08\0\0\0\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 12)));
}

TEST(Gguf, RefusesContradictoryHeaders) {
  const auto refuse = [](std::initializer_list<std::string_view> parts, GgufHeader header) {
    const std::string file = file_of(header);
    expect_error(ErrorCode::bad_file, parts, [&] { parse_file(file); });
  };
  const auto changed = [](auto change) {
    auto header = small_header();
    change(header);
    return header;
  };
  refuse({"\"u8\" appears twice"}, changed([](auto& h) { h.metadata[1].key = "u8"; }));
  refuse({"\"a\"", "appears twice"}, changed([](auto& h) { h.tensors[1].name = "a"; }));
  refuse({"a name of 64 bytes"}, changed([](auto& h) { h.tensors[1].name = std::string(64, 'n'); }));
  refuse({"a name of 0 bytes"}, changed([](auto& h) { h.tensors[1].name = ""; }));
  refuse({"wrong place", "expected offset 32, got 64"}, changed([](auto& h) { h.tensors[1].offset += 32; }));
  refuse({"wrong place", "expected offset 32, got 0"}, changed([](auto& h) { h.tensors[1].offset = 0; }));
  refuse({"\"b\"", "no whole number of blocks"}, changed([](auto& h) { h.tensors[1].shape = {2, 63}; }));
  refuse({"5 dimensions"}, changed([](auto& h) { h.tensors[1].shape = {2, 1, 1, 1, 64}; }));
  refuse({"a dimension of -64"}, changed([](auto& h) { h.tensors[1].shape = {2, -64}; }));
  refuse({"too many elements"}, changed([](auto& h) { h.tensors[1].shape = {int64_t{1} << 40, int64_t{1} << 40}; }));
  refuse({"too many bytes"}, changed([](auto& h) { h.tensors[0].shape = {int64_t{1} << 62}; }));
  refuse({"behind the end of the file"}, changed([](auto& h) { h.tensors[2].shape = {1 << 20, 1 << 10}; }));
  refuse({"general.alignment is no power of two", "got 24"}, changed([](auto& h) {
           h.metadata.push_back({"general.alignment", uint32_t{24}});
         }));
  refuse({"general.alignment is no power of two", "expected u32, got u64"}, changed([](auto& h) {
           h.metadata.push_back({"general.alignment", uint64_t{32}});
         }));
  auto unknown = changed([](auto& h) { h.tensors[1].type = static_cast<GgmlType>(4); });
  std::string file = serialize_gguf_header(unknown);
  expect_error(ErrorCode::unsupported, {"\"b\"", "unknown type 4"}, [&] { parse_file(file); });
}

TEST(Gguf, RefusesPlansThatNoReaderWouldTake) {
  const auto refuse = [](std::string_view part, std::vector<PlannedGgufTensor> tensors, GgufMetadata metadata = {}) {
    expect_error(ErrorCode::bad_argument, {part}, [&] { layout_gguf(tensors, metadata); });
  };
  refuse("planned twice", {{"a", GgmlType::f32, {1}}, {"a", GgmlType::f32, {1}}});
  refuse("1 to 63 bytes", {{std::string(64, 'a'), GgmlType::f32, {1}}});
  refuse("no whole blocks of Q4_K", {{"a", GgmlType::q4_k, {2, 128}}});
  refuse("at most 4 dimensions", {{"a", GgmlType::f32, {1, 1, 1, 1, 1}}});
  refuse("appears twice", {}, {{"k", true}, {"k", false}});
  refuse("power of two", {}, {{"general.alignment", uint32_t{0}}});
}

TEST(Gguf, WriterAndFileAgree) {
  const test::TemporaryFolder folder;
  const auto path = folder / "m.gguf";
  const auto write = [&](bool overwrite) {
    GgufWriter writer(path, {{"a", GgmlType::f32, {2}}, {"none", GgmlType::f32, {0, 4}}, {"b", GgmlType::bf16, {3, 2}}},
                      {{"general.alignment", uint32_t{64}}}, overwrite, {});
    writer.append("a", bytes_of("abcd"));
    writer.append("a", bytes_of("efgh"));
    writer.append("b", bytes_of("0123456789AB"));
    writer.commit();
  };
  write(false);
  const auto file = GgufFile::open(path);
  EXPECT_TRUE(file.header().warnings.empty());
  EXPECT_EQ(file.header().file_size(), std::filesystem::file_size(path));
  EXPECT_EQ(file.header().data_begin % 64, 0u);
  EXPECT_EQ(text_of(file.bytes(*file.find("a"))), "abcdefgh");
  EXPECT_EQ(text_of(file.bytes(*file.find("b"))), "0123456789AB");
  EXPECT_EQ(file.find("b")->offset, 64u);
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_TRUE(is_gguf(path));

  const std::string first = get(path);
  expect_error(ErrorCode::bad_argument, {"already exists", "--overwrite"}, [&] { write(false); });
  write(true);
  EXPECT_EQ(get(path), first);
}

TEST(Gguf, AnUnfinishedFileLeavesNothingBehind) {
  const test::TemporaryFolder folder;
  const auto path = folder / "m.gguf";
  {
    GgufWriter writer(path, {{"a", GgmlType::f32, {2}}}, {}, false, {});
    writer.append("a", bytes_of("abcd"));
    expect_error(ErrorCode::internal, {"before its last tensor"}, [&] { writer.commit(); });
    expect_error(ErrorCode::internal, {"more bytes than planned"}, [&] { writer.append("a", bytes_of("efghi")); });
    expect_error(ErrorCode::internal, {"is next"}, [&] { writer.append("b", bytes_of("efgh")); });
  }
  EXPECT_TRUE(names_in(folder.path()).empty());
  put(path, "not");
  EXPECT_FALSE(is_gguf(path));
  EXPECT_FALSE(is_gguf(folder / "missing"));
  expect_error(ErrorCode::bad_argument, {"the output is the input"},
               [&] { GgufWriter(path, {}, {}, true, {folder / "m.gguf"}); });
}

}  // namespace
}  // namespace w4q::io
