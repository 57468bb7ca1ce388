// What this machine has of processor, memory and disk, as Linux tells it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace w4q::app {

struct Processor {
  std::string model;  ///< empty: /proc/cpuinfo does not say
  int online = 0;     ///< of the machine
  int allowed = 0;    ///< for this process (taskset, cpusets)
  double quota = 0;   ///< cores' worth of time that its control group gets; 0: no limit
};
Processor find_processor();

struct Memory {
  int64_t total = 0, available = 0;  ///< bytes
  int64_t limit = 0;                 ///< of its control group; 0: none
};
Memory find_memory();

/// A folder that files are written into.
struct Place {
  std::filesystem::path path;
  int64_t free_bytes = 0;
  bool writable = false;
  bool in_memory = false;  ///< a tmpfs: what lies there takes memory
};
Place look_at(const std::filesystem::path& path);

}  // namespace w4q::app
