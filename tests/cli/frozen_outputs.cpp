#include "frozen_outputs.h"

#include <algorithm>
#include <atomic>
#include <iostream>
#include <thread>

#include "core/text.h"
#include "io/files.h"
#include "kbit_samples.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;

std::string fingerprint_of(const std::string& bytes) {
  char text[17];
  const uint64_t value = fingerprint(std::as_bytes(std::span(bytes)));
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

/// What stands beside a single file.
constexpr const char* digests = ".w4q_digests.json";

std::vector<fs::path> files_below(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  return files;
}

/// Files that every folder made of a model carries along: all on its top level but config.json and the weights.
ptrdiff_t carried_files(const fs::path& model) {
  return std::ranges::count_if(files_below(model), [&](const fs::path& file) {
    const std::string name = fs::relative(file, model).string();
    return name != "config.json" && !name.starts_with("model") && name.find('/') == std::string::npos;
  });
}

bool holds(const fs::path& file, const std::string& bytes) {
  return fs::exists(file) && fs::file_size(file) == bytes.size() && io::read_file(file) == bytes;
}

/// The frozen lines of a section.
std::map<std::string, std::string> frozen_lines(const std::string& section) {
  std::map<std::string, std::string> lines;
  const io::Json all = io::read_json(testdata() / "golden/w4q_outputs.json");
  for (const auto& [line, hash] : all.items()) {
    if (line.starts_with(section + "/")) lines[line] = hash;
  }
  return lines;
}

bool prints() { return std::getenv("W4Q_PRINT_FROZEN") != nullptr; }

}  // namespace

FrozenOutputs::FrozenOutputs(std::string section, fs::path model)
    : section_(std::move(section)), model_(std::move(model)), frozen_(frozen_lines(section_)) {}

bool FrozenOutputs::worth_trying(const std::string& parent, const std::string& step) const {
  const std::string way = concat("/", parent, "/"), form = concat("/", step, "/");
  bool parent_known = false, step_known = false;
  for (const auto& [line, hash] : frozen_) {
    if (line.find(way + step + "/") != std::string::npos) return true;
    parent_known |= line.find(way) != std::string::npos;
    step_known |= line.find(form) != std::string::npos;
  }
  return prints() || !parent_known || !step_known;
}

fs::path FrozenOutputs::output_of(const std::string& way) const {
  std::string name = way;
  std::ranges::replace(name, '/', '+');
  const bool file = way.substr(way.rfind('/') + 1).starts_with("to=gguf");
  return folder_ / (file ? name + ".gguf" : name);
}

std::string FrozenOutputs::write(const std::string& way, std::vector<std::string> arguments) {
  const fs::path output = output_of(way);
  arguments.insert(arguments.end(), {"-o", output.string(), "--device", "cpu", "--threads", "1", "--quiet"});
  const auto result = run_w4q(arguments);
  if (result.status == 0) {
    add(way, output);
    return output.string();
  }
  const std::scoped_lock lock(mutex_);
  refusals_[way] = result.err;
  EXPECT_TRUE(result.status == 2 || result.status == 3) << section_ << "/" << way << ": " << result.err;
  return {};
}

void FrozenOutputs::write_last(const std::string& way, std::vector<std::string> arguments) {
  const std::string output = write(way, std::move(arguments));
  if (output.empty()) return;
  fs::remove_all(output);
  fs::remove(output + digests);
}

void FrozenOutputs::add(const std::string& way, const fs::path& output) {
  std::map<std::string, std::string> lines;
  const std::string key = concat(section_, "/", way, "/");
  if (fs::is_directory(output)) {
    ptrdiff_t carried = 0;
    for (const fs::path& file : files_below(output)) {
      const std::string name = fs::relative(file, output).string(), bytes = io::read_file(file);
      if (holds(model_ / name, bytes)) {
        carried += name.find('/') == std::string::npos ? 1 : 0;
      } else {
        lines[key + name] = fingerprint_of(bytes);
      }
    }
    // What comes back from a GGUF file is written anew.
    if (key.find("to=gguf") == std::string::npos) {
      EXPECT_EQ(carried, carried_files(model_)) << key;
    }
  } else {
    lines[key + "file"] = fingerprint_of(io::read_file(output));
    lines[key + "file" + digests] = fingerprint_of(io::read_file(output.string() + digests));
  }
  const std::scoped_lock lock(mutex_);
  lines_.merge(lines);
}

void FrozenOutputs::expect_frozen() const {
  if (prints()) std::cout << "w4q_outputs.json\n" << io::Json(lines_).dump(1) << "\n";
  for (const auto& [line, hash] : frozen_) {
    if (lines_.contains(line)) continue;
    const std::string way = line.substr(section_.size() + 1, line.rfind('/') - section_.size() - 1);
    const auto refusal = refusals_.find(way);
    ADD_FAILURE() << line << " is written no longer: " << (refusal == refusals_.end() ? "" : refusal->second);
  }
  for (const auto& [line, hash] : lines_) {
    const auto frozen = frozen_.find(line);
    if (frozen != frozen_.end()) {
      EXPECT_EQ(hash, frozen->second) << line << ": other bytes than those that are frozen";
    } else {
      ADD_FAILURE() << line
                    << " has no frozen bytes in testdata/golden/w4q_outputs.json: scripts/freeze adds what is new";
    }
  }
}

void run_all(const std::vector<std::function<void()>>& jobs) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t job = next++; job < jobs.size(); job = next++) jobs[job]();
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < std::max(2u, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work);
}

void write_ways(FrozenOutputs& outputs, const std::vector<Way>& ways) {
  std::vector<std::function<void()>> jobs;
  for (const Way& way : ways) {
    jobs.emplace_back([&] {
      std::vector<std::string> arguments{"quantize", outputs.model().string()};
      arguments.insert(arguments.end(), way.quantize.begin(), way.quantize.end());
      const std::string packed = outputs.write(way.name, arguments);
      EXPECT_NE(packed, "") << way.name << " is refused";
      for (const auto& options : way.repack) {
        std::vector<std::string> more{"repack", packed};
        more.insert(more.end(), options.begin(), options.end());
        outputs.write_last(concat(way.name, "/", options[0].substr(2), "=", options[1]), more);
      }
      fs::remove_all(packed);
    });
  }
  run_all(jobs);
}

}  // namespace w4q::test
