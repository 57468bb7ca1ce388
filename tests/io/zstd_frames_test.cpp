#include "io/zstd_frames.h"

#include <zstd.h>

#include <cstdlib>

#include "core/error.h"
#include "make.h"

namespace w4q::io {
namespace {

using test::expect_error;
using test::TemporaryFolder;

/// Half noise, half repetition, so that frames differ in size.
std::string sample(size_t size) {
  std::string text = noise(size / 2, 7);
  text.resize(size, 'x');
  return text;
}

std::string compressed_sample(const TemporaryFolder& folder, const std::string& text, size_t frame_bytes) {
  put(folder / "plain", text);
  compress_file(folder / "plain", folder / "frames.zst", 3, frame_bytes);
  return get(folder / "frames.zst");
}

std::string read_all(std::string_view file, uint64_t begin, size_t size) {
  const SeekTable table = read_seek_table(bytes_of(file), "file.zst");
  std::string text(size, '\0');
  read_range(bytes_of(file), table, begin, std::as_writable_bytes(std::span(text)), "file.zst");
  return text;
}

TEST(ZstdFrames, AnyRangeComesBack) {
  const TemporaryFolder folder;
  const std::string text = sample(100'000);
  const std::string file = compressed_sample(folder, text, 4096);
  EXPECT_LT(file.size(), text.size() * 3 / 4);
  const SeekTable table = read_seek_table(bytes_of(file), "file");
  EXPECT_EQ(table.content_size(), text.size());
  EXPECT_EQ(table.content.size(), 26u);  // 25 frames of at most 4096 bytes
  for (uint64_t i = 0; i < 200; ++i) {
    const size_t begin = random_bits(1, i) % text.size();
    const size_t size = random_bits(2, i) % (text.size() - begin + 1);
    EXPECT_TRUE(read_all(file, begin, size) == text.substr(begin, size)) << begin << " " << size;
  }
  EXPECT_TRUE(read_all(file, 0, text.size()) == text);
  EXPECT_TRUE(read_all(file, 4096, 4096) == text.substr(4096, 4096));
}

TEST(ZstdFrames, AnEmptyFileComesBack) {
  const TemporaryFolder folder;
  const std::string file = compressed_sample(folder, "", 4096);
  EXPECT_EQ(read_seek_table(bytes_of(file), "file").content_size(), 0u);
}

TEST(ZstdFrames, TheZstdProgramReadsWhatIsWrittenAndTheReverse) {
  if (std::system("zstd --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "needs the zstd program";
  const TemporaryFolder folder;
  const std::string text = sample(300'000);
  compressed_sample(folder, text, 65536);
  const auto run = [&](const std::string& command) {
    return std::system(("cd '" + folder.path().native() + "' && " + command).c_str());
  };
  EXPECT_EQ(run("zstd -q -t frames.zst && zstd -q -d frames.zst -o back"), 0);
  EXPECT_TRUE(get(folder / "back") == text);
  EXPECT_EQ(run("zstd -q plain -o single.zst"), 0);
  EXPECT_TRUE(read_all(get(folder / "single.zst"), 0, text.size()) == text);
  EXPECT_TRUE(read_all(get(folder / "single.zst"), 123'456, 77) == text.substr(123'456, 77));
  EXPECT_EQ(run("cat single.zst single.zst > double.zst"), 0);
  EXPECT_TRUE(read_all(get(folder / "double.zst"), 299'000, 2000) == text.substr(299'000) + text.substr(0, 1000));
  EXPECT_EQ(run("zstd -q < plain > stream.zst"), 0);
  expect_error(ErrorCode::bad_file, {"stream.zst", "do not state their sizes"},
               [&] { read_seek_table(bytes_of(get(folder / "stream.zst")), "stream.zst"); });
}

TEST(ZstdFrames, DamageIsFoundByTheChecksums) {
  const TemporaryFolder folder;
  const std::string text = sample(50'000);
  const std::string file = compressed_sample(folder, text, 8192);
  const SeekTable table = read_seek_table(bytes_of(file), "file");
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::string damaged = file;
    const size_t place = random_bits(seed, 0) % table.file.back();
    damaged[place] = static_cast<char>(damaged[place] ^ static_cast<char>(1 + random_bits(seed, 1) % 255));
    try {
      // A flip may land in a bit that means nothing to the decoder; the content is right or there is an Error.
      EXPECT_TRUE(read_all(damaged, 0, text.size()) == text) << "byte " << place;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::bad_file);
    }
  }
}

TEST(ZstdFrames, DamageInsideAFrameIsFoundForAnyPartOfIt) {
  const TemporaryFolder folder;
  const std::string text = noise(8192, 3);  // stored as it is, so that only the checksum can tell
  std::string damaged = compressed_sample(folder, text, 8192);
  damaged[5000] = static_cast<char>(damaged[5000] ^ 1);
  expect_error(ErrorCode::bad_file, {"file.zst: damaged zstd frame", "checksum"}, [&] { read_all(damaged, 0, 10); });
}

void set_u32(std::string& file, size_t at, uint32_t value) {
  for (size_t i = 0; i < 4; ++i) file[at + i] = static_cast<char>(value >> (8 * i));
}

TEST(ZstdFrames, HostileSeekTablesAreRefusedBeforeAnythingIsAllocated) {
  const TemporaryFolder folder;
  const std::string file = compressed_sample(folder, sample(20'000), 4096);
  const size_t table = file.size() - 9 - 5 * 8 - 8;  // skippable header, 5 entries, footer
  const auto refuses = [&](size_t at, uint32_t value, std::string_view part) {
    std::string hostile = file;
    set_u32(hostile, at, value);
    expect_error(ErrorCode::bad_file, {"file", part}, [&] { read_seek_table(bytes_of(hostile), "file"); });
  };
  refuses(file.size() - 9, 0xFFFFFFFF, "4294967295 frames");
  refuses(file.size() - 9, 4, "damaged header");
  refuses(table, 0x184D2A5D, "damaged header");
  refuses(table + 4, 17, "damaged header");
  refuses(table + 8, 0xFFFFFFFF, "does not fit");
  refuses(table + 8, 0, "impossible");
  refuses(table + 12, 0xFFFFFFFF, "impossible frame size");
  std::string reserved = file;
  reserved[file.size() - 5] = 0x04;
  expect_error(ErrorCode::bad_file, {"reserved bits"}, [&] { read_seek_table(bytes_of(reserved), "file"); });
}

TEST(ZstdFrames, ATableThatLiesAboutTheFramesIsFoundWhenReading) {
  const TemporaryFolder folder;
  std::string file = compressed_sample(folder, sample(20'000), 4096);
  const size_t first_content = file.size() - 9 - 5 * 8 + 4;
  for (const uint32_t claimed : {4095u, 4097u, 5000u}) {
    set_u32(file, first_content, claimed);
    expect_error(ErrorCode::bad_file, {"does not hold what its seek table says"}, [&] { read_all(file, 0, 4000); });
  }
}

TEST(ZstdFrames, ReadsTablesWithChecksums) {
  const TemporaryFolder folder;
  const std::string text = sample(10'000);
  const std::string plain = compressed_sample(folder, text, 4096);
  const size_t entries = plain.size() - 9 - 3 * 8;
  std::string file = plain.substr(0, entries);
  set_u32(file, entries - 4, 3 * 12 + 9);
  for (size_t i = 0; i < 3; ++i) file += plain.substr(entries + 8 * i, 8) + "sum?";
  file += plain.substr(plain.size() - 9);
  file[file.size() - 5] = static_cast<char>(0x80);
  EXPECT_TRUE(read_all(file, 0, text.size()) == text);
}

TEST(ZstdFrames, OtherFilesAreRefused) {
  expect_error(ErrorCode::bad_file, {"x.zst: damaged zstd frame"},
               [] { read_seek_table(bytes_of("this is not compressed at all"), "x.zst"); });
  const TemporaryFolder folder;
  const std::string file = compressed_sample(folder, sample(20'000), 4096);
  for (size_t size = 1; size < file.size(); size += 97) {
    try {
      const auto cut = std::string_view(file).substr(0, size);
      EXPECT_LE(read_seek_table(bytes_of(cut), "file").content_size(), 20'000u);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::bad_file);
    }
  }
}

}  // namespace
}  // namespace w4q::io
