// Small files and folders for the tests of this folder.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/rng.h"
#include "io/safetensors.h"
#include "support.h"

namespace w4q::io {

inline std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline void put(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string get(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

/// `size` random bytes that depend on `seed` only.
inline std::string noise(size_t size, uint64_t seed) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(random_bits(seed, i));
  return text;
}

/// The content of a safetensors file with these U8 tensors.
inline std::string container(const std::vector<std::pair<std::string, std::string>>& tensors) {
  std::vector<PlannedTensor> plan;
  for (const auto& [name, data] : tensors) plan.push_back({name, DType::u8, {static_cast<int64_t>(data.size())}});
  const auto header = layout_safetensors(plan, {{"format", "pt"}});
  std::string file = serialize_safetensors_header(header);
  for (const auto& tensor : header.tensors) {
    const auto found =
        std::find_if(tensors.begin(), tensors.end(), [&](const auto& each) { return each.first == tensor.name; });
    file += found->second;
  }
  return file;
}

/// Runs `body` in a child process. Returns its process id.
inline pid_t in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  int status = 99;
  try {
    status = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  ::_exit(status);
}

/// Waits for a child; its exit status, or minus the signal that ended it.
inline int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace w4q::io
