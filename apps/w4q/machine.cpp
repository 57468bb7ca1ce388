#include "machine.h"

#include <sched.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

namespace w4q::app {
namespace {

/// The first line of a small file of /proc or /sys; empty: it cannot be read.
std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// What stands behind "key" and a colon in a file of lines; empty: no such line.
std::string value_of(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return {};
}

/// "16384 kB" in bytes.
int64_t kilobytes(const std::string& text) {
  std::istringstream stream(text);
  int64_t value = 0;
  stream >> value;
  return 1024 * value;
}

/// The time that a control group gets, in cores: "150000 100000" is 1.5; 0: "max".
double quota() {
  std::istringstream stream(first_line("/sys/fs/cgroup/cpu.max"));
  double time = 0, period = 0;
  return stream >> time >> period && period > 0 ? time / period : 0;
}

}  // namespace

Processor find_processor() {
  Processor found;
  found.model = value_of("/proc/cpuinfo", "model name");
  found.online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t allowed;
  found.allowed = sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? CPU_COUNT(&allowed) : found.online;
  found.quota = quota();
  return found;
}

Memory find_memory() {
  Memory found;
  found.total = kilobytes(value_of("/proc/meminfo", "MemTotal"));
  found.available = kilobytes(value_of("/proc/meminfo", "MemAvailable"));
  std::istringstream limit(first_line("/sys/fs/cgroup/memory.max"));
  if (!(limit >> found.limit)) found.limit = 0;
  return found;
}

Place look_at(const std::filesystem::path& path) {
  Place place{.path = path, .free_bytes = 0, .writable = access(path.c_str(), W_OK | X_OK) == 0, .in_memory = false};
  std::error_code none;
  const auto space = std::filesystem::space(path, none);
  if (!none) place.free_bytes = static_cast<int64_t>(space.available);
  constexpr long tmpfs = 0x01021994;
  struct statfs found {};
  place.in_memory = statfs(path.c_str(), &found) == 0 && found.f_type == tmpfs;
  return place;
}

}  // namespace w4q::app
