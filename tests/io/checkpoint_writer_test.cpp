#include "io/checkpoint_writer.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/parallel.h"
#include "io/checkpoint.h"
#include "io/zstd_frames.h"
#include "make.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryFolder;

std::vector<PlannedTensor> plan_of(const std::vector<std::pair<std::string, int64_t>>& sizes) {
  std::vector<PlannedTensor> plan;
  for (const auto& [name, size] : sizes) plan.push_back({name, DType::u8, {size}});
  return plan;
}

void write_all_of(const fs::path& folder, const std::vector<PlannedTensor>& plan, const WriteOptions& options = {}) {
  CheckpointWriter writer(folder, plan, options);
  for (const auto& tensor : plan) {
    writer.write(tensor.name,
                 bytes_of(noise(static_cast<size_t>(tensor.size()), std::hash<std::string>{}(tensor.name))));
  }
  writer.finish();
  int64_t total = 0;
  for (const auto& entry : fs::directory_iterator(folder)) total += static_cast<int64_t>(entry.file_size());
  EXPECT_EQ(writer.file_bytes(), total);
}

void expect_all_of(const fs::path& folder, const std::vector<PlannedTensor>& plan) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  EXPECT_TRUE(checkpoint.warnings().empty());
  EXPECT_EQ(checkpoint.tensors().size(), plan.size());
  for (const auto& tensor : plan) {
    const auto expected = noise(static_cast<size_t>(tensor.size()), std::hash<std::string>{}(tensor.name));
    EXPECT_TRUE(text_of(checkpoint.load(tensor.name)->bytes) == expected) << tensor.name;
  }
}

TEST(CheckpointWriter, OneFileIsTheReferenceFile) {
  const TemporaryFolder folder;
  CheckpointWriter writer(folder.path(), plan_of({{"b", 2}, {"a", 3}, {"none", 0}}), {});
  writer.write("b", bytes_of("bb"));
  writer.write("a", bytes_of("aaa"));
  writer.finish();
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"model.safetensors"});
  EXPECT_EQ(get(folder / "model.safetensors"), container({{"a", "aaa"}, {"b", "bb"}, {"none", ""}}));
  EXPECT_EQ(writer.file_bytes(), static_cast<int64_t>(fs::file_size(folder / "model.safetensors")));
}

TEST(CheckpointWriter, AnEmptyPlanGivesAnEmptyFile) {
  const TemporaryFolder folder;
  write_all_of(folder.path(), {});
  expect_all_of(folder.path(), {});
}

TEST(CheckpointWriter, DealsTensorsToShardsAsTheHubDoes) {
  // Limit 10: "big" gets its own shard at once, so it becomes shard 1 although "a" came first; a, b fill shard 2 to the
  // brim, c opens the next.
  const TemporaryFolder folder;
  const auto plan = plan_of({{"a", 4}, {"big", 11}, {"b", 6}, {"c", 1}, {"d", 9}, {"e", 1}});
  WriteOptions options;
  options.max_shard_bytes = 10;
  write_all_of(folder.path(), plan, options);
  expect_all_of(folder.path(), plan);
  const std::string expected = R"({
  "metadata": {
    "total_size": 32
  },
  "weight_map": {
    "a": "model-00002-of-00004.safetensors",
    "b": "model-00002-of-00004.safetensors",
    "big": "model-00001-of-00004.safetensors",
    "c": "model-00003-of-00004.safetensors",
    "d": "model-00003-of-00004.safetensors",
    "e": "model-00004-of-00004.safetensors"
  }
}
)";
  EXPECT_EQ(get(folder / "model.safetensors.index.json"), expected);
  EXPECT_EQ(names_in(folder.path()).size(), 5u);
}

TEST(CheckpointWriter, ManyShardsNeedNoManyDescriptors) {
  const TemporaryFolder folder;
  std::vector<std::pair<std::string, int64_t>> sizes;
  for (int i = 0; i < 1500; ++i) sizes.emplace_back("t" + std::to_string(i), 1);  // above the usual limit of 1024
  WriteOptions options;
  options.max_shard_bytes = 1;
  CheckpointWriter writer(folder.path(), plan_of(sizes), options);
  writer.write("t1499", bytes_of("x"));
  EXPECT_TRUE(fs::exists(folder / "model-01500-of-01500.safetensors"));
}

TEST(CheckpointWriter, CompressesAndNamesTheRealFiles) {
  const TemporaryFolder folder;
  const auto plan = plan_of({{"a", 4000}, {"b", 6000}, {"c", 10}});
  WriteOptions options;
  options.max_shard_bytes = 10'000;
  options.compress = true;
  write_all_of(folder.path(), plan, options);
  expect_all_of(folder.path(), plan);
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{"model-00001-of-00002.safetensors.zst", "model-00002-of-00002.safetensors.zst",
                                      "model.safetensors.index.json"}));
  const auto index = nlohmann::json::parse(get(folder / "model.safetensors.index.json"));
  EXPECT_EQ(index.at("weight_map").at("c"), "model-00002-of-00002.safetensors.zst");
}

/// As an ended run leaves files: compressed already, cut while they were, lost, or without what was not flushed.
TEST(CheckpointWriter, FilesOfAnEndedRunAreMended) {
  const TemporaryFolder folder, undisturbed;
  const auto plan = plan_of({{"a", 40}, {"b", 50}, {"c", 60}, {"d", 70}});
  WriteOptions options;
  options.max_shard_bytes = 10;
  options.compress = true;
  write_all_of(folder.path(), plan, options);
  write_all_of(undisturbed.path(), plan, options);
  const auto shard = [&](int number) {
    return folder / ("model-0000" + std::to_string(number) + "-of-00004.safetensors");
  };
  const auto compressed = [&](int number) { return fs::path(shard(number)) += ".zst"; };
  fs::resize_file(compressed(2), 20);        // cut
  fs::remove(compressed(3));                 // lost
  decompress_file(compressed(4), shard(4));  // both there, its header lost
  put(shard(4), std::string(16, '\0') + get(shard(4)).substr(16));

  CheckpointWriter writer(folder.path(), plan, options, ShardFiles::mend);
  for (const auto& tensor : plan) {
    const auto bytes = noise(static_cast<size_t>(tensor.size()), std::hash<std::string>{}(tensor.name));
    const auto digest = hash_tensor("U8", {tensor.size()}, bytes_of(bytes));
    const bool kept = writer.holds(tensor.name, digest);
    EXPECT_EQ(kept, tensor.name == "a" || tensor.name == "d") << tensor.name;
    if (kept) {
      writer.adopt(tensor.name, digest);
    } else {
      writer.write(tensor.name, bytes_of(bytes));
    }
  }
  writer.finish();
  EXPECT_EQ(names_in(folder.path()), names_in(undisturbed.path()));
  for (const auto& name : names_in(folder.path())) EXPECT_TRUE(get(folder / name) == get(undisturbed / name)) << name;
}

/// On a disk that has no room for all of it; what came there goes to whoever finishes.
TEST(CheckpointWriter, APartIsReadByWhoFinishes) {
  const TemporaryFolder folder, whole, alone;
  auto plan = plan_of({{"a", 3}, {"large", (16 << 20) + 5}, {"none", 0}, {"rest", 40}});
  plan[3].sidecar = true;
  const auto bytes = [](const PlannedTensor& tensor) { return noise(static_cast<size_t>(tensor.size()), 7); };
  CheckpointWriter reference(alone.path(), plan, {}), part(folder.path(), plan, {}, ShardFiles::part),
      all(whole.path(), plan, {});
  for (const auto& tensor : plan) {
    reference.write(tensor.name, bytes_of(bytes(tensor)));
    if (tensor.name != "a") part.write(tensor.name, bytes_of(bytes(tensor)));
  }
  all.write("a", bytes_of(bytes(plan[0])));
  for (const auto* name : {"large", "none", "rest"}) {
    int64_t offset = 0;
    part.read(name, [&](std::span<const std::byte> piece) {
      all.write_part(name, offset, piece);
      offset += static_cast<int64_t>(piece.size());
    });
    EXPECT_EQ(all.digest(name).text(), part.digest(name).text());
  }
  all.finish();
  reference.finish();
  for (const char* name : {"model.safetensors", "residual/model.safetensors"})
    EXPECT_TRUE(get(whole / name) == get(alone / name)) << name;
  const TemporaryFolder small;
  const auto sparse = plan_of({{"x", 4'000'000'000'000}});  // more than is free, less than a file may have
  CheckpointWriter(small.path(), sparse, {}, ShardFiles::part);
  EXPECT_EQ(names_in(small.path()), std::vector<std::string>{"model.safetensors"});
}

TEST(CheckpointWriter, PartsMayArriveInAnyOrderFromAnyThread) {
  const TemporaryFolder folder;
  const std::string data = noise(100'000, 9);
  CheckpointWriter writer(folder.path(), plan_of({{"x", 100'000}, {"y", 5}}), {});
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (size_t part = thread; part < 100; part += 4) {
        writer.write_part("x", static_cast<int64_t>(part * 1000), bytes_of(data).subspan(part * 1000, 1000));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  writer.write("y", bytes_of("12345"));
  writer.finish();
  EXPECT_TRUE(text_of(Checkpoint::open(folder.path()).load("x")->bytes) == data);
}

TEST(CheckpointWriter, RandomPartsAreCountedExactly) {
  const TemporaryFolder folder;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    fs::remove(folder / "model.safetensors");
    CheckpointWriter writer(folder.path(), plan_of({{"x", 64}}), {});
    std::vector<bool> written(64);
    for (uint64_t i = 0; i < 200; ++i) {
      const size_t begin = random_bits(seed, 2 * i) % 64;
      const size_t size = 1 + random_bits(seed, 2 * i + 1) % std::min<size_t>(8, 64 - begin);
      const bool free = std::none_of(written.begin() + static_cast<long>(begin),
                                     written.begin() + static_cast<long>(begin + size), [](bool done) { return done; });
      const auto part = bytes_of(std::string_view("12345678").substr(0, size));
      if (free) {
        EXPECT_NO_THROW(writer.write_part("x", static_cast<int64_t>(begin), part));
        std::fill_n(written.begin() + static_cast<long>(begin), size, true);
      } else {
        expect_error(ErrorCode::internal, {"\"x\"", "twice"},
                     [&] { writer.write_part("x", static_cast<int64_t>(begin), part); });
      }
    }
    if (std::find(written.begin(), written.end(), false) == written.end()) {
      EXPECT_NO_THROW(writer.finish());
    } else {
      expect_error(ErrorCode::internal, {"\"x\"", "not all of its bytes"}, [&] { writer.finish(); });
    }
  }
}

TEST(CheckpointWriter, BugsOfTheCallerAreInternalErrors) {
  const TemporaryFolder folder;
  CheckpointWriter writer(folder.path(), plan_of({{"x", 4}}), {});
  expect_error(ErrorCode::internal, {"\"nope\"", "not planned"}, [&] { writer.write("nope", {}); });
  expect_error(ErrorCode::internal, {"3 bytes written, 4 planned"}, [&] { writer.write("x", bytes_of("123")); });
  expect_error(ErrorCode::internal, {"\"x\""}, [&] { writer.write_part("x", 2, bytes_of("123")); });
  expect_error(ErrorCode::internal, {"\"x\""}, [&] { writer.write_part("x", -1, bytes_of("1")); });
}

TEST(CheckpointWriter, BadPlansAreRefused) {
  const TemporaryFolder folder;
  WriteOptions options;
  options.max_shard_bytes = 1;
  const auto twice = plan_of({{"x", 1}, {"x", 1}});  // in two shards, where no single layout would notice
  expect_error(ErrorCode::bad_argument, {"\"x\": is planned twice"},
               [&] { CheckpointWriter(folder.path(), twice, options); });
  options.max_shard_bytes = 0;
  expect_error(ErrorCode::bad_argument, {"shard size"}, [&] { CheckpointWriter(folder.path(), {}, options); });
}

TEST(CheckpointWriter, MissingSpaceIsReportedBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  expect_error(ErrorCode::bad_file, {"not enough space", "needed: 1000 PB", "free:", "hint:"}, [&] {
    CheckpointWriter(folder.path(), plan_of({{"x", 1'000'000'000'000'000'000}}), {});
  });
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(CheckpointWriter, AFileSizeLimitIsOneClearError) {
  const TemporaryFolder folder;
  for (const bool compress : {false, true}) {
    const int status = wait_for(in_child([&] {
      set_threads(1);  // the threads of the parent do not exist in this process
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{10'000, 10'000};
      ::setrlimit(RLIMIT_FSIZE, &limit);
      WriteOptions options;
      options.compress = compress;
      try {
        CheckpointWriter writer(folder.path(), plan_of({{"x", 20'000}}), options);
        return 1;
      } catch (const Error& error) {
        const std::string_view what = error.what();
        const bool clear = what.find("model.safetensors: ") != what.npos && what.find("File too large") != what.npos;
        return error.code() == ErrorCode::bad_file && clear ? 42 : 2;
      }
    }));
    EXPECT_EQ(status, 42);
    fs::remove(folder / "model.safetensors");
  }
}

TEST(CheckpointWriter, AFullDeviceIsOneClearError) {
  // The shard is replaced by a device that is always full, so that the very write() fails with ENOSPC.
  const TemporaryFolder folder;
  CheckpointWriter writer(folder.path(), plan_of({{"x", 20'000}}), {});
  fs::remove(folder / "model.safetensors");
  fs::create_symlink("/dev/full", folder / "model.safetensors");
  const std::string data(20'000, 'x');
  expect_error(ErrorCode::bad_file, {"model.safetensors: cannot write", "No space left"},
               [&] { writer.write("x", bytes_of(data)); });
}

TEST(CheckpointWriter, ModesFollowTheUmask) {
  const TemporaryFolder folder;
  const int status = wait_for(in_child([&] {
    ::umask(0027);
    CheckpointWriter writer(folder.path(), {}, {});
    writer.finish();
    struct stat file {};
    ::stat((folder / "model.safetensors").c_str(), &file);
    return static_cast<int>((file.st_mode & 0777) == 0640 ? 42 : 1);
  }));
  EXPECT_EQ(status, 42);
}

TEST(CheckpointWriter, TheSidecarIsASetOfItsOwn) {
  const TemporaryFolder folder;
  auto plan = plan_of({{"a", 3}, {"b", 40}, {"c", 5}, {"d", 50}});
  plan[1].sidecar = plan[3].sidecar = true;
  CheckpointWriter writer(folder.path(), plan, {.max_shard_bytes = 60});
  for (const auto& tensor : plan)
    writer.write_part(tensor.name, 0, bytes_of(noise(static_cast<size_t>(tensor.size()), 1)));
  writer.finish();
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"model.safetensors", "residual"}));
  EXPECT_EQ(names_in(folder / "residual").size(), 3u);  // two shards and an index
  const auto whole = Checkpoint::open(folder.path()), base = Checkpoint::open(folder.path(), false);
  EXPECT_EQ(whole.tensors().size(), 4u);
  EXPECT_EQ(base.tensors().size(), 2u);
  EXPECT_TRUE(whole.warnings().empty());
  EXPECT_EQ(text_of(whole.load("d")->bytes), noise(50, 1));
  EXPECT_EQ(whole.file_bytes() + static_cast<int64_t>(fs::file_size(folder / "residual/model.safetensors.index.json")),
            writer.file_bytes());
}

TEST(Checkpoint, ATensorInTwoSetsIsRefused) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "residual");
  write_all_of(folder / "residual", plan_of({{"a", 3}}));
  CheckpointWriter writer(folder.path(), plan_of({{"a", 3}}), {});
  writer.write("a", bytes_of("aaa"));
  writer.finish();
  expect_error(ErrorCode::bad_file, {"\"a\"", "another file"}, [&] { Checkpoint::open(folder.path()); });
  EXPECT_NO_THROW(Checkpoint::open(folder.path(), false));
}

/// In pieces of 16 MiB from a plain file, at once from others: the same bytes and digests, on both sides.
TEST(CheckpointWriter, CopiesWhatItIsToKeep) {
  const TemporaryFolder folder;
  const std::string large = noise((size_t{33} << 20) + 7, 1), small = noise(10, 2);
  put(folder / "plain/model.safetensors", container({{"large", large}, {"none", ""}, {"small", small}}));
  fs::create_directories(folder / "packed");
  compress_file(folder / "plain/model.safetensors", folder / "packed/model.safetensors.zst", 1);
  const auto digests = Checkpoint::open(folder / "plain").digests();
  for (const char* from : {"plain", "packed"}) {
    const auto source = Checkpoint::open(folder / from);
    source.take_digests(digests);
    const fs::path to = folder / (std::string("copy of ") + from);
    fs::create_directories(to);
    const auto size = static_cast<int64_t>(large.size());
    CheckpointWriter writer(to, {{"large", DType::u8, {size}}, {"none", DType::u8, {0}}, {"small", DType::u8, {10}}},
                            {});
    for (const char* name : {"large", "none", "small"}) writer.copy(source, name);
    writer.finish();
    EXPECT_EQ(get(to / "model.safetensors"), get(folder / "plain/model.safetensors")) << from;
    EXPECT_EQ(writer.digests(), digests) << from;
    EXPECT_EQ(source.digests(), digests) << from;
  }
  // A byte in the last piece.
  put(folder / "other/model.safetensors",
      container({{"large", large.substr(0, large.size() - 1) + "x"}, {"none", ""}, {"small", small}}));
  const auto other = Checkpoint::open(folder / "other");
  other.take_digests(digests);
  expect_error(ErrorCode::bad_file, {"large"}, [&] { other.read_stored("large", [](int64_t, auto) {}); });
}

}  // namespace
}  // namespace w4q::io
