#include "pipeline/hidden_states.h"

#include <fcntl.h>

#include <algorithm>

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "io/partial.h"

namespace w4q::pipeline {
namespace {

/// A system copies a file's pages with one thread for each caller, some 2 GB/s, and lets one at a time write to a file.
constexpr int64_t stripes = 8;
/// Shares begin at pages of the disk.
constexpr int64_t page = 4096;

}  // namespace

HiddenStates::HiddenStates(int64_t count, int64_t rows, int64_t cols, int64_t max_bytes, std::filesystem::path beside)
    : count_(count), rows_(rows), cols_(cols) {
  const int64_t bytes = rows * cols * int64_t{sizeof(float)};
  in_memory_ = std::clamp<int64_t>(max_bytes / bytes, 0, count);
  share_ = (bytes + stripes * page - 1) / (stripes * page) * page;
  const auto values = static_cast<size_t>(rows * cols);
  for (int64_t i = 0; i < in_memory_; ++i) memory_.push_back(std::make_unique_for_overwrite<float[]>(values));
  if (spilled() == 0) return;
  window_ = std::make_unique<float[]>(values);
  written_.assign(static_cast<size_t>(spilled()), false);
  io::remove_stale_partials(beside);
  folder_ = std::make_unique<io::Partial>(beside, io::Partial::Kind::folder);
  for (int64_t i = 0; i < stripes && !share(i).empty(); ++i) {
    const auto path = folder_->path() / concat("states-", i);
    stripes_.push_back({path, io::open_file(path, O_RDWR | O_CREAT | O_EXCL)});
  }
}

HiddenStates::~HiddenStates() = default;

std::span<std::byte> HiddenStates::share(int64_t stripe) const {
  const auto all = std::as_writable_bytes(std::span(window_.get(), static_cast<size_t>(rows_ * cols_)));
  const size_t begin = std::min(all.size(), static_cast<size_t>(stripe * share_));
  return all.subspan(begin, std::min(all.size() - begin, static_cast<size_t>(share_)));
}

MatrixView<float> HiddenStates::place(int64_t index) {
  ensure(index >= 0 && index < count_, "hidden states: no such window");
  return {on_disk(index) ? window_.get() : memory_[static_cast<size_t>(index)].get(), rows_, cols_};
}

MatrixView<float> HiddenStates::get(int64_t index) {
  const MatrixView<float> view = place(index);
  if (!on_disk(index) || !written_[static_cast<size_t>(index - in_memory_)]) return view;
  parallel_for(std::ssize(stripes_), 1, [&](int64_t i, int64_t) {
    const Stripe& stripe = stripes_[static_cast<size_t>(i)];
    io::read_all(stripe.file, share(i), offset(index), stripe.path);
  });
  return view;
}

void HiddenStates::drop(int64_t index) {
  if (!on_disk(index)) return memory_[static_cast<size_t>(index)].reset();
  for (const Stripe& stripe : stripes_) io::forget_range(stripe.file, offset(index), static_cast<uint64_t>(share_));
}

void HiddenStates::put(int64_t index) {
  if (!on_disk(index)) return;
  parallel_for(std::ssize(stripes_), 1, [&](int64_t i, int64_t) {
    const Stripe& stripe = stripes_[static_cast<size_t>(i)];
    io::write_all(stripe.file, share(i), offset(index), stripe.path);
  });
  written_[static_cast<size_t>(index - in_memory_)] = true;
}

}  // namespace w4q::pipeline
