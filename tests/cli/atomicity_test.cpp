// kill -9 at any moment leaves the old state or the complete new one.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "program.h"

namespace w4q::test {
namespace {

TEST(Atomicity, KilledQuantizeLeavesOldOrNewOutput) {
  const TemporaryFolder folder;
  const std::string target = (folder / "out").string();
  const auto run = [&](const char* bits) {
    return std::vector<std::string>{"quantize", bundled_model(), "-o", target, "--k", bits, "--overwrite", "--quiet"};
  };
  ASSERT_EQ(run_w4q(run("2")).status, 0);
  const std::string two = folder_digest(target);
  const auto whole = run_w4q(run("3"));
  ASSERT_EQ(whole.status, 0);
  const std::string three = folder_digest(target);

  constexpr int kills = 24;
  int survived = 0;
  for (int i = 0; i < kills; ++i) {
    const pid_t child = start_w4q(run(i % 2 == 0 ? "2" : "3"));
    // Spread over the whole run, and a little beyond its end.
    ::usleep(static_cast<useconds_t>(1e6 * whole.seconds * 1.2 * i / kills));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    survived += WIFEXITED(status) ? 1 : 0;
    const std::string now = folder_digest(target);
    ASSERT_TRUE(now == two || now == three) << "after kill " << i;
    ASSERT_EQ(run_w4q({"verify", target, "--quiet"}).status, 0) << "after kill " << i;
  }
  EXPECT_LT(survived, kills) << "no run was killed: the test proved nothing";

  // The next complete run removes what the killed ones left beside the output.
  ASSERT_EQ(run_w4q(run("2")).status, 0);
  int entries = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) entries += entry.exists() ? 1 : 0;
  EXPECT_EQ(entries, 1) << "left behind by killed runs";
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

}  // namespace
}  // namespace w4q::test
