#include "io/files.h"

#include <sys/stat.h>

#include <gmock/gmock.h>

#include "io/system.h"
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

TEST(Files, OfAModelAreRegular) {
  const TemporaryFolder folder;
  put(folder / "x", "text");
  fs::create_symlink("x", folder / "link");
  fs::create_symlink("/dev/zero", folder / "zeros");
  fs::create_symlink("b", folder / "a");
  fs::create_symlink("a", folder / "b");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(read_model_file(folder / "link", 4), "text");
  expect_error(ErrorCode::bad_file, {"x: too large", "at most 3 bytes"}, [&] { read_model_file(folder / "x", 3); });
  expect_error(ErrorCode::bad_file, {"pipe: is a named pipe"}, [&] { read_model_file(folder / "pipe", 4); });
  expect_error(ErrorCode::bad_file, {"zeros: is a device"}, [&] { read_model_file(folder / "zeros", 4); });
  expect_error(ErrorCode::bad_file, {"is a folder"}, [&] { read_model_file(folder.path(), 4); });
  expect_error(ErrorCode::bad_file, {"a: cannot open"}, [&] { read_model_file(folder / "a", 4); });
  expect_error(ErrorCode::bad_file, {"a: cannot examine"}, [&] { path_exists(folder / "a"); });
  EXPECT_TRUE(path_exists(folder / "pipe"));
  EXPECT_FALSE(path_exists(folder / "nothing"));
}

TEST(Files, CompanionsTravelWithoutTheWeights) {
  const TemporaryFolder folder;
  const fs::path from = folder / "from";
  for (const auto* name :
       {"config.json", "tokenizer.json", "modeling.py", "additional_chat_templates/tool.jinja", "notes/a/b.txt",
        "model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.safetensors.zst",
        "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "optimizer.pt", "m.gguf",
        "original/consolidated.00.pth", "original/params.json", ".git/HEAD", ".cache/huggingface/x", ".gitattributes",
        ".out.w4q-partial-0123456789abcdef"}) {
    put(from / name, name);
  }
  fs::resize_file(from / "modeling.py", 1000);
  put(from / "huge.txt", "");
  fs::resize_file(from / "huge.txt", 100'000'001);
  fs::create_directories(folder / "to");
  const auto copied = copy_companions(from, folder / "to", {"config.json"});
  const std::vector<std::string> expected{".gitattributes", "additional_chat_templates/tool.jinja", "modeling.py",
                                          "tokenizer.json"};
  EXPECT_EQ(copied.names, expected);
  EXPECT_EQ(copied.bytes, std::string(".gitattributes"
                                      "additional_chat_templates/tool.jinja"
                                      "tokenizer.json")
                                  .size() +
                              1000);
  EXPECT_THAT(copied.left_out,
              testing::ElementsAre(testing::HasSubstr("huge.txt: not copied, it has 100 MB; --copy-all"),
                                   testing::HasSubstr("m.gguf: not copied, weights of another format"),
                                   testing::HasSubstr("notes: not copied, a sub-folder; --copy-all"),
                                   testing::HasSubstr("optimizer.pt: not copied"),
                                   testing::HasSubstr("original: not copied, a sub-folder"),
                                   testing::HasSubstr("pytorch_model-00001-of-00002.bin: not copied"),
                                   testing::HasSubstr("pytorch_model.bin.index.json: not copied")));
  EXPECT_EQ(get(folder / "to/tokenizer.json"), "tokenizer.json");
  EXPECT_EQ(names_in(folder / "to"),
            (std::vector<std::string>{".gitattributes", "additional_chat_templates", "modeling.py", "tokenizer.json"}));

  const auto all = list_companions(from, {}, true);
  EXPECT_EQ(all.left_out, std::vector<std::string>{});
  EXPECT_THAT(all.names, testing::IsSupersetOf({"m.gguf", "huge.txt", "notes/a/b.txt", "original/params.json",
                                                "original/consolidated.00.pth"}));
  for (const auto& name : all.names) {
    EXPECT_FALSE(name.starts_with(".git/") || name.starts_with(".cache") || name.ends_with(".zst")) << name;
  }
}

TEST(Files, LinksAreFollowedWithinTheModelAndTheCacheOfTheHub) {
  const TemporaryFolder folder;
  const fs::path from = folder / "models--x/snapshots/1";
  put(folder / "models--x/blobs/abc", "tokens");
  put(folder / "models--x/elsewhere", "s");
  put(folder / "outside/secret", "s");
  put(from / "vocab.json", "v");
  fs::create_directories(folder / "to");
  fs::create_symlink("../../blobs/abc", from / "tokenizer.json");
  fs::create_symlink("vocab.json", from / "inside.json");
  fs::create_symlink(folder / "outside/secret", from / "notes.txt");
  fs::create_symlink("../../elsewhere", from / "elsewhere");
  fs::create_symlink(folder / "outside", from / "folder");
  fs::create_symlink("self", from / "self");
  fs::create_symlink("nowhere", from / "dangling");
  // All but the way out is a matter of taste.
  for (const bool all : {false, true}) {
    fs::remove_all(folder / "to");
    const auto copied = copy_companions(from, folder / "to", {}, all);
    EXPECT_EQ(copied.names, (std::vector<std::string>{"inside.json", "tokenizer.json", "vocab.json"}));
    EXPECT_THAT(copied.left_out,
                testing::ElementsAre(testing::HasSubstr("dangling: not copied, a link that leads nowhere"),
                                     testing::HasSubstr("elsewhere: not copied, a link out of the model's folder, to "),
                                     testing::HasSubstr("folder: not copied, a link to a folder"),
                                     testing::HasSubstr("notes.txt: not copied, a link out of the model's folder, to "),
                                     testing::HasSubstr("self: not copied, a link that leads nowhere")));
  }
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
