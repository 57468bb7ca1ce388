// The page of w4q verify and compare as a user gets it, and as a browser shows it where there is one.
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "core/text.h"
#include "io/files.h"
#include "program.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

/// The report that a page carries.
io::Json carried(const std::string& html) {
  const std::string begin = "<script type=\"application/json\" id=\"report\">";
  const size_t from = html.find(begin) + begin.size();
  return io::parse_json(html.substr(from, html.find("</script>", from) - from), "page");
}

class Html : public OnBundledModel {
 protected:
  static std::vector<std::string> words() {
    return {
        "--base",   bundled_model(), "--ids", bundled_model() + "/own/selfgen.ids.u16", "--windows", "2", "--ctx", "64",
        "--device", "cpu",           "--json"};
  }
  /// The page of `arguments`, which must end with `status`.
  std::string page_of(std::vector<std::string> arguments, const std::string& name, int status = 0) const {
    arguments.insert(arguments.end(), {"--html", path(name)});
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, status) << result.err;
    std::string html = io::read_file(path(name));
    EXPECT_LE(html.size(), 1'000'000u);
    EXPECT_EQ(carried(html), result.json());
    return html;
  }
  std::string verify_page(const std::string& name) const {
    auto arguments = words();
    arguments.insert(arguments.begin(), {"verify", path("3")});
    return page_of(arguments, name);
  }
  /// What two widths and a choice of widths printed, and a speed that was measured on an H200: a page of them all.
  std::string several_page(const std::string& name) const {
    std::vector<std::string> arguments{"report"};
    const auto add = [&](const std::string& file, const io::Json& json) {
      std::ofstream(path(file)) << json;
      arguments.push_back(path(file));
    };
    for (const char* model : {"3", "4"}) {
      auto verify = words();
      verify.insert(verify.begin(), {"verify", path(model), "--quiet"});
      add(concat("kbit", model, ".json"), run_w4q(verify).json());
    }
    std::ofstream(path("calibration.txt")) << io::read_file(bundled_model() + "/own/selfgen.txt").substr(0, 4000);
    add("chosen.json",
        run_w4q({"quantize", bundled_model(), "--dry-run", "--scales", "search", "--target-bpw", "3.6", "--calib",
                 path("calibration.txt"), "--samples", "2", "--length", "64", "--device", "cpu", "--json", "--quiet"})
            .json());
    io::Json speed = io::read_json(W4Q_BENCH_RESULTS "/h200-decode-kbit4.json");
    speed["schema"] = "bench";
    speed["version"] = 1;
    add("speed.json", speed);
    arguments.insert(arguments.end(), {"--html", path(name), "--json"});
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.json()["reports"].size(), 4u);
    std::string html = io::read_file(path(name));
    EXPECT_EQ(result.json()["bytes"], html.size());
    return html;
  }
  std::string compare_page(const std::string& name) const {
    auto arguments = words();
    arguments.insert(arguments.begin(), {"compare", path("3"), path("4")});
    return page_of(arguments, name);
  }
};

TEST_F(Html, IsThePageOfWhatIsPrinted) {
  ASSERT_EQ(quantize("3", {"--k", "3"}).status, 0);
  ASSERT_EQ(quantize("4", {"--k", "4"}).status, 0);
  const std::string one = verify_page("verify.html");
  for (const char* part :
       {"✓ verified", "down_proj", "kbit3-b32-e4m4", "Perplexity, window by window", "w4q verify "}) {
    EXPECT_THAT(one, HasSubstr(part));
  }
  const auto report = carried(one);
  EXPECT_EQ(report["perplexity"]["per_window"].size(), 2u);
  EXPECT_EQ(report["provenance"]["models"][0]["fingerprint"], report["fingerprint"]);
  int64_t bytes = 0;
  for (const auto& kind : report["sizes"]["kinds"]) bytes += kind["bytes"].get<int64_t>();
  EXPECT_EQ(bytes, report["sizes"]["bytes"]);
  const std::string two = compare_page("compare.html");
  for (const char* part : {"B is closer to the base", "kbit4-b32-e4m4", "down_proj, A", "down_proj, B"}) {
    EXPECT_THAT(two, HasSubstr(part));
  }
}

TEST_F(Html, ReportsStandSideBySide) {
  ASSERT_EQ(quantize("3", {"--k", "3"}).status, 0);
  ASSERT_EQ(quantize("4", {"--k", "4"}).status, 0);
  const std::string html = several_page("all.html");
  EXPECT_LE(html.size(), 1'000'000u);
  for (const char* part : {"kbit3: verified", "kbit4: verified", "<h3>chosen</h3>", "the best of each size",
                           "NVIDIA H200", "gate, up, silu", "reading alone"}) {
    EXPECT_THAT(html, HasSubstr(part));
  }
  const auto held = carried(html);
  ASSERT_EQ(held.size(), 4u);
  EXPECT_THAT(html, HasSubstr(concat("<data value=\"", held[2]["allocation"]["chosen"]["divergence"].dump(), "\">")));
  const auto refuse = [&](std::vector<std::string> files, const char* said) {
    files.insert(files.begin(), "report");
    const auto refused = run_w4q(files);
    EXPECT_NE(refused.status, 0);
    EXPECT_THAT(refused.err, HasSubstr(said));
  };
  refuse({path("kbit3.json")}, "--html FILE");
  refuse({path("kbit3.json"), "--html", path("all.html")}, "already exists");
  refuse({path("kbit3.json"), "--html", path("kbit3.json"), "--overwrite"}, "input");
  refuse({path("3/config.json"), "--html", path("none.html")}, "have a page");
  EXPECT_FALSE(fs::exists(path("none.html")));
}

TEST_F(Html, SaysWhatFailed) {
  ASSERT_EQ(quantize("3", {"--k", "3"}).status, 0);
  const std::string weights = path("3") + "/model.safetensors";
  std::fstream file(weights, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1000, std::ios::end);
  file.put('\x55');
  file.close();
  const std::string html = page_of({"verify", path("3"), "--json"}, "failed.html", 1);
  EXPECT_THAT(html, HasSubstr("✗ FAILED"));
  EXPECT_THAT(html, HasSubstr("<ul class=\"faults\">"));
}

TEST_F(Html, ReplacesNothingUnasked) {
  ASSERT_EQ(quantize("3", {"--k", "3"}).status, 0);
  std::ofstream(path("r.html")) << "mine";
  const auto refused = run_w4q({"verify", path("3"), "--html", path("r.html"), "--quiet"});
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, HasSubstr("--overwrite"));
  EXPECT_EQ(refused.out, "");  // before any work
  EXPECT_EQ(io::read_file(path("r.html")), "mine");
  EXPECT_EQ(run_w4q({"verify", path("3"), "--html", path("r.html"), "--overwrite", "--quiet"}).status, 0);
  EXPECT_THAT(io::read_file(path("r.html")), HasSubstr("<!DOCTYPE html>"));
  const auto input = run_w4q({"verify", path("3"), "--html", path("3") + "/config.json", "--overwrite", "--quiet"});
  EXPECT_EQ(input.status, 2) << input.err;
  const auto nowhere = run_w4q({"verify", path("3"), "--html", path("no/r.html"), "--quiet"});
  EXPECT_EQ(nowhere.status, 3);
  EXPECT_THAT(nowhere.err, HasSubstr(path("no")));
  EXPECT_EQ(run_w4q({"verify", path("3"), "--overwrite"}).status, 2);
  EXPECT_FALSE(fs::exists(path("no")));
}

std::string output_of(const std::string& command) {
  std::string text;
  FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return text;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) text += static_cast<char>(c);
  ::pclose(pipe);
  return text;
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST_F(Html, OpensInABrowser) {
  std::string browser = output_of("command -v chromium || command -v chromium-browser || command -v google-chrome");
  browser = browser.substr(0, browser.find('\n'));
  if (browser.empty()) GTEST_SKIP() << "no Chromium here";
  ASSERT_EQ(quantize("3", {"--k", "3"}).status, 0);
  ASSERT_EQ(quantize("4", {"--k", "4"}).status, 0);
  for (const auto& [name, html] : {std::pair{"verify.html", verify_page("verify.html")},
                                   {"compare.html", compare_page("compare.html")},
                                   {"several.html", several_page("several.html")}}) {
    const std::string page = path(name);
    const std::string messages = page + ".log";
    const std::string dom = output_of(
        concat("HOME='", path(""), "' '", browser, "' --headless --no-sandbox --disable-gpu --enable-logging=stderr ",
               "--virtual-time-budget=2000 --dump-dom 'file://", page, "' 2>'", messages, "'"));
    EXPECT_THAT(dom, HasSubstr("</html>"));
    EXPECT_EQ(carried(dom), carried(html));
    EXPECT_EQ(count_of(dom, "<data value="), count_of(html, "<data value="));
    EXPECT_EQ(count_of(dom, "<rect "), count_of(html, "<rect "));
    for (const char* part : {"<svg ", "<h2>Provenance</h2>", "<data value=\""}) EXPECT_THAT(dom, HasSubstr(part));
    EXPECT_THAT(io::read_file(messages), Not(HasSubstr("CONSOLE")));
  }
}

}  // namespace
}  // namespace w4q::test
