// kill -9 at any moment leaves the old state or the complete new one.
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "core/rng.h"
#include "program.h"

namespace w4q::test {
namespace {

/// Bytes of a file, or of all files below a folder; empty where there is none.
std::string bytes_at(const std::filesystem::path& path) {
  if (std::filesystem::is_directory(path)) return folder_digest(path);
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Starts it, kills it anywhere in the run or a little beyond its end, and says whether it had ended.
bool kill_within(const std::vector<std::string>& arguments, double seconds, uint64_t number) {
  const pid_t child = start_w4q(arguments);
  ::usleep(static_cast<useconds_t>(1e6 * seconds * 1.1 * random_uniform(12, number)));
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status);
}

/// Kills at random moments of runs that replace each other's outputs, or write none: W4Q_KILLS (scripts/test --long), or
/// 96, sixteen of each command.
size_t wanted_kills() {
  const char* text = std::getenv("W4Q_KILLS");
  return text == nullptr ? 96 : std::max<size_t>(1, std::strtoul(text, nullptr, 10));
}

TEST(Atomicity, KilledRunsLeaveTheOldOrTheNewOutput) {
  const TemporaryFolder folder;
  const auto path = [&](const char* name) { return (folder / name).string(); };
  const std::string model = two_layer_model();
  const std::string text = (std::filesystem::path(bundled_model()) / "own" / "selfgen.txt").string();
  const auto quantize = [&](const char* bits) {
    return std::vector<std::string>{"quantize", model, "-o", path("q"), "--k", bits, "--overwrite", "--quiet"};
  };
  const auto repack = [&](const char* layout) {
    return std::vector<std::string>{"repack", path("from"), "-o",  path("r"), "--layout",
                                    layout,   "--device",   "cpu", "--quiet", "--overwrite"};
  };
  const auto decode = [&](const char* to) {
    return std::vector<std::string>{"repack", path("from"), "-o", path("d"), "--to", to, "--quiet", "--overwrite"};
  };
  const auto calibrate = [&](const char* sequences) {
    return std::vector<std::string>{"calibrate", model,        "--text",   text, "-o",       path("stats.safetensors"),
                                    "--samples", sequences,    "--length", "32", "--device", "cpu",
                                    "--quiet",   "--overwrite"};
  };
  ASSERT_EQ(run_w4q({"quantize", model, "-o", path("from"), "--k", "3", "--quiet"}).status, 0);
  std::filesystem::copy(folder / "from", folder / "hashed", std::filesystem::copy_options::recursive);
  struct Way {
    std::string output;
    std::vector<std::string> arguments;
    double seconds = 0;
    std::string bytes = {};
  };
  // Each with the one that replaces its output; of those that write nothing, or the same again, twice the same.
  const Way hash{path("hashed/w4q_digests.json"), {"hash", path("hashed"), "--write", "--overwrite", "--quiet"}};
  const Way verify{path("from"), {"verify", path("from"), "--base", model, "--quiet"}};
  std::vector<std::array<Way, 2>> pairs{
      {Way{path("q"), quantize("2")}, Way{path("q"), quantize("3")}},
      {Way{path("r"), repack("kbit-tile")}, Way{path("r"), repack("kbit-fragment")}},
      {Way{path("d"), decode("hf16")}, Way{path("d"), decode("hf-f32")}},
      {Way{path("stats.safetensors"), calibrate("4")}, Way{path("stats.safetensors"), calibrate("8")}},
      {hash, hash},
      {verify, verify}};
  for (auto& pair : pairs) {
    for (Way& way : pair) {
      const auto whole = run_w4q(way.arguments);
      ASSERT_EQ(whole.status, 0) << whole.err;
      way.seconds = whole.seconds;
      way.bytes = bytes_at(way.output);
      ASSERT_FALSE(way.bytes.empty()) << way.output;
    }
  }

  const size_t kills = wanted_kills();
  size_t survived = 0;
  for (size_t i = 0; i < kills; ++i) {
    const auto& pair = pairs[i % pairs.size()];
    const size_t which = i / pairs.size() % 2;
    const Way &way = pair[which], &other = pair[1 - which];
    survived += kill_within(way.arguments, way.seconds, i) ? 1 : 0;
    const std::string now = bytes_at(way.output);
    ASSERT_TRUE(now == way.bytes || now == other.bytes) << way.arguments.front() << " after kill " << i;
    if (way.output == path("stats.safetensors")) continue;
    const bool hashes = way.arguments.front() == "hash";
    const std::string checked = hashes ? path("hashed") : way.output;
    ASSERT_EQ(run_w4q({"hash", checked, "--check", "--quiet"}).status, 0) << "after kill " << i;
  }
  EXPECT_LT(survived, kills / 2) << "few runs were killed: the test proved little";

  // The next complete run gives the same bytes, and removes what the killed ones left for its output.
  for (const auto& pair : pairs) {
    ASSERT_EQ(run_w4q(pair[0].arguments).status, 0);
    EXPECT_TRUE(bytes_at(pair[0].output) == pair[0].bytes) << pair[0].output;
  }
  const auto left = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  };
  for (const auto& name : left()) EXPECT_NE(name.rfind(".q.", 0), 0u) << "left behind by killed runs";
  ASSERT_EQ(run_w4q({"clean", folder.path().string()}).status, 0);
  EXPECT_EQ(left(), (std::vector<std::string>{"d", "from", "hashed", "q", "r", "stats.safetensors"}));
  ASSERT_EQ(run_w4q({"clean", path("hashed")}).status, 0);
  const auto files = [](const std::string& of) {
    return std::distance(std::filesystem::directory_iterator(of), std::filesystem::directory_iterator());
  };
  EXPECT_EQ(files(path("hashed")), files(path("from"))) << "left behind by killed runs of hash";
}

TEST(Atomicity, InterruptedQuantizeCleansUp) {
  const TemporaryFolder folder;
  const std::string target = (folder / "out").string();
  for (const int delay : {5'000, 20'000, 40'000, 80'000}) {
    const pid_t child = start_w4q({"quantize", bundled_model(), "-o", target, "--quiet", "--threads", "1"});
    ::usleep(static_cast<useconds_t>(delay));
    ::kill(child, SIGTERM);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status)) {
      // Too late: it was done, or had not yet noticed; then the output is complete.
      ASSERT_EQ(WEXITSTATUS(status), 0);
      ASSERT_TRUE(std::filesystem::exists(target));
      std::filesystem::remove_all(target);
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "after " << delay << " µs";
  }
}

/// What nohup relies on.
TEST(Atomicity, AnIgnoredHangupInterruptsNothing) {
  const TemporaryFolder folder;
  const std::string target = (folder / "out").string();
  const auto ignored = ::signal(SIGHUP, SIG_IGN);
  const pid_t child = start_w4q({"quantize", bundled_model(), "-o", target, "--quiet", "--threads", "1"});
  ::signal(SIGHUP, ignored);
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    ::kill(child, SIGHUP);
    ::usleep(2'000);
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(std::filesystem::exists(target));
}

/// A folder as a run leaves it that was killed before anybody could clean up.
void leave_behind(const std::filesystem::path& path) {
  std::filesystem::create_directories(path / "residual");
  std::ofstream(path / "model.safetensors") << std::string(1000, 'x');
  std::ofstream(path / "residual/model.safetensors") << std::string(500, 'x');
}

TEST(Clean, RemovesWhatKilledRunsLeftAndNothingElse) {
  const TemporaryFolder folder;
  const auto path = [&](const std::string& name) { return (folder / name).string(); };
  const std::string dead = path(".q.w4q-partial-0123456789abcdef"), file = path(".m.gguf.w4q-partial-00112233445566aa");
  leave_behind(dead);
  std::ofstream(file) << "x";
  const std::vector<std::string> others = {".q.w4q-partial-0123456789abcde", ".q.w4q-partial-0123456789abcdeX",
                                           "q.w4q-partial-0123456789abcdef", ".w4q-partial-mine", "model"};
  for (const auto& other : others) leave_behind(path(other));
  std::filesystem::create_symlink("model", path(".l.w4q-partial-0123456789abcdef"));
  const std::string living = path(".r.w4q-partial-0123456789abcdef");
  leave_behind(living);
  const int held = ::open(living.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::flock(held, LOCK_EX), 0);

  const auto listed = run_w4q({"clean", folder.path().string(), "--dry-run", "--json"});
  ASSERT_EQ(listed.status, 0) << listed.err;
  const io::Json json = listed.json();
  ASSERT_EQ(json["leftovers"].size(), 3u) << json;
  EXPECT_EQ(json["leftovers"][0], (io::Json{{"path", file}, {"bytes", 1}, {"state", "left"}}));
  EXPECT_EQ(json["leftovers"][1], (io::Json{{"path", dead}, {"bytes", 1500}, {"state", "left"}}));
  EXPECT_EQ(json["leftovers"][2], (io::Json{{"path", living}, {"bytes", 1500}, {"state", "in use"}}));
  EXPECT_TRUE(std::filesystem::exists(dead) && std::filesystem::exists(file));

  // Whoever writes beside them hears of them.
  const auto run = run_w4q({"quantize", bundled_model(), "-o", path("other")});
  EXPECT_EQ(run.status, 0);
  EXPECT_NE(run.err.find("note: " + dead + ": left of a run that was killed, 1.50 kB; w4q clean"), std::string::npos)
      << run.err;
  EXPECT_EQ(run.err.find(living), std::string::npos) << run.err;

  const auto cleaned = run_w4q({"clean", folder.path().string()});
  EXPECT_EQ(cleaned.status, 0) << cleaned.err;
  EXPECT_NE(cleaned.out.find("2 leftovers of killed runs removed, 1.50 kB; 1 belong to runs that are alive"),
            std::string::npos)
      << cleaned.out;
  EXPECT_FALSE(std::filesystem::exists(dead) || std::filesystem::exists(file));
  EXPECT_TRUE(std::filesystem::exists(living));
  for (const auto& other : others) EXPECT_TRUE(std::filesystem::exists(path(other) + "/model.safetensors")) << other;
  EXPECT_TRUE(std::filesystem::is_symlink(path(".l.w4q-partial-0123456789abcdef")));
  ::close(held);
  EXPECT_EQ(run_w4q({"clean", path("nothing")}).status, 3);
}

}  // namespace
}  // namespace w4q::test
