#include "pipeline/hidden_states.h"

#include <fcntl.h>

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "io/mapped_file.h"
#include "io/partial.h"
#include "io/system.h"
#include "io/zstd_frames.h"

namespace w4q::pipeline {
namespace {

/// Mantissas do not compress: a faster level loses nothing.
constexpr int spill_level = 1;

}  // namespace

HiddenStates::HiddenStates(int64_t count, int64_t rows, int64_t cols, int64_t max_bytes, std::filesystem::path beside)
    : count_(count), rows_(rows), cols_(cols) {
  const int64_t bytes = rows * cols * int64_t{sizeof(float)};
  in_memory_ = std::clamp<int64_t>(max_bytes / bytes, 0, count);
  const auto values = static_cast<size_t>(rows * cols);
  for (int64_t i = 0; i < in_memory_; ++i) memory_.push_back(std::make_unique_for_overwrite<float[]>(values));
  if (spilled() == 0) return;
  window_ = std::make_unique<float[]>(values);
  io::remove_stale_partials(beside);
  folder_ = std::make_unique<io::Partial>(beside, io::Partial::Kind::folder);
}

HiddenStates::~HiddenStates() = default;

std::filesystem::path HiddenStates::file(int64_t index) const { return folder_->path() / concat(index, ".zst"); }

MatrixView<float> HiddenStates::place(int64_t index) {
  ensure(index >= 0 && index < count_, "hidden states: no such window");
  return {index < in_memory_ ? memory_[static_cast<size_t>(index)].get() : window_.get(), rows_, cols_};
}

MatrixView<float> HiddenStates::get(int64_t index) {
  const MatrixView<float> view = place(index);
  if (index < in_memory_) return view;
  const auto path = file(index);
  if (!std::filesystem::exists(path)) return view;
  const io::MappedFile mapped(path);
  const auto table = io::read_seek_table(mapped.bytes(), path.string());
  const std::span<float> values(view.data, static_cast<size_t>(rows_ * cols_));
  io::read_range(mapped.bytes(), table, 0, std::as_writable_bytes(values), path.string());
  return view;
}

void HiddenStates::drop(int64_t index) {
  if (index < in_memory_) memory_[static_cast<size_t>(index)].reset();
}

void HiddenStates::put(int64_t index) {
  if (index < in_memory_) return;
  const std::span<const float> values(window_.get(), static_cast<size_t>(rows_ * cols_));
  const std::string frame = io::compress_bytes(std::as_bytes(values), spill_level);
  const auto path = file(index);
  const auto descriptor = io::open_file(path, O_WRONLY | O_CREAT | O_TRUNC);
  io::write_all(descriptor, std::as_bytes(std::span(frame)), 0, path);
}

}  // namespace w4q::pipeline
