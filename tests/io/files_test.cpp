#include "io/files.h"

#include <sys/stat.h>

#include "make.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryFolder;

TEST(Files, ReadsWholeFilesUpToALimit) {
  const TemporaryFolder folder;
  const std::string text = noise(100'000, 1);
  put(folder / "x", text);
  put(folder / "empty", "");
  EXPECT_TRUE(read_file(folder / "x") == text);
  EXPECT_TRUE(read_file(folder / "x", 100'000) == text);
  EXPECT_EQ(read_file(folder / "empty", 0), "");
  expect_error(ErrorCode::bad_file, {"x: too large", "99999"}, [&] { read_file(folder / "x", 99'999); });
  expect_error(ErrorCode::bad_file, {"gone: cannot open: No such file"}, [&] { read_file(folder / "gone"); });
  expect_error(ErrorCode::bad_file, {"Is a directory"}, [&] { read_file(folder.path()); });
  EXPECT_FALSE(read_file("/proc/self/status").empty());  // a file that states no size
  expect_error(ErrorCode::bad_file, {"too large"}, [&] { read_file("/dev/zero", 10'000); });
}

TEST(Files, CompanionsTravelWithoutTheWeights) {
  const TemporaryFolder folder;
  const fs::path from = folder / "from";
  const fs::path to = folder / "to";
  fs::create_directories(to);
  for (const auto* name :
       {"config.json", "tokenizer.json", "notes/a/b.txt", "notes/model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "model.safetensors.zst", "pytorch_model-00001-of-00002.bin", "m.gguf",
        "original/consolidated.00.pth", "original/params.json", ".git/HEAD", ".cache/huggingface/x", ".gitattributes",
        ".out.w4q-partial-0123456789abcdef"}) {
    put(from / name, name);
  }
  const auto copied = copy_companions(from, to, {"config.json"});
  const std::vector<std::string> expected{".gitattributes", "notes/a/b.txt", "notes/model.safetensors",
                                          "original/params.json", "tokenizer.json"};
  EXPECT_EQ(copied, expected);
  for (const auto& name : expected) EXPECT_EQ(get(to / name), name);
  EXPECT_EQ(names_in(to), (std::vector<std::string>{".gitattributes", "notes", "original", "tokenizer.json"}));
}

TEST(Files, LinksToFilesAreFollowedAndLinksToFoldersAreNot) {
  const TemporaryFolder folder;
  const fs::path from = folder / "models--x/snapshots/1";
  put(folder / "models--x/blobs/abc", "tokens");
  put(folder / "outside/secret", "s");
  fs::create_directories(from / "sub");
  fs::create_directories(folder / "to");
  fs::create_symlink("../../blobs/abc", from / "tokenizer.json");
  fs::create_symlink(folder / "outside", from / "folder");
  fs::create_symlink("..", from / "sub/loop");
  fs::create_symlink("self", from / "self");
  fs::create_symlink("nowhere", from / "dangling");
  EXPECT_EQ(copy_companions(from, folder / "to", {}), std::vector<std::string>{"tokenizer.json"});
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(folder / "to/tokenizer.json")));
  EXPECT_EQ(get(folder / "to/tokenizer.json"), "tokens");
}

TEST(Files, ACopyObeysTheUmaskAndNotTheSource) {
  const TemporaryFolder folder;
  put(folder / "from/x", "x");
  fs::permissions(folder / "from/x", fs::perms::owner_read);
  fs::create_directories(folder / "to");
  copy_companions(folder / "from", folder / "to", {});
  const auto mask = ::umask(0);
  ::umask(mask);
  EXPECT_EQ(static_cast<unsigned>(fs::status(folder / "to/x").permissions()), 0666u & ~mask);
}

TEST(Files, MissingFoldersAreNamed) {
  const TemporaryFolder folder;
  expect_error(ErrorCode::bad_file, {"gone", "cannot list"},
               [&] { copy_companions(folder / "gone", folder.path(), {}); });
}

}  // namespace
}  // namespace w4q::io
