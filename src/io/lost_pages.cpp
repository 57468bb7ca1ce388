#include "io/lost_pages.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace w4q::io {

/// Entries are used again and never freed: a handler may be looking at them.
struct MappedRange::Entry {
  std::atomic<uintptr_t> begin{0}, end{0};  ///< whole pages; both 0: unused
  std::atomic<bool> lost{false};
  Entry* next = nullptr;
  // For everybody but handlers, under the mutex.
  std::filesystem::path path;
  FileState state;
  bool input = false;
  bool used = false;
};

struct MappedRanges {
  using Entry = MappedRange::Entry;

  std::atomic<Entry*> first{nullptr};
  std::mutex mutex;  ///< guards what handlers do not read
  std::optional<Error> noted;

  static MappedRanges& all() noexcept {
    static auto* const ranges = new MappedRanges;  // outlives every mapping
    return *ranges;
  }

  Entry* find(uintptr_t address) const noexcept {
    for (Entry* entry = first; entry != nullptr; entry = entry->next) {
      if (address >= entry->begin && address < entry->end) return entry;
    }
    return nullptr;
  }

  /// An unused entry. Under the mutex.
  Entry* take() {
    for (Entry* entry = first; entry != nullptr; entry = entry->next) {
      if (!entry->used) return entry;
    }
    auto* entry = new Entry;
    entry->next = first;
    first = entry;
    return entry;
  }

  static bool is_spoiled(const Entry& entry) {
    return entry.lost || (entry.input && file_state(entry.path) != entry.state);
  }

  /// Of those that are mapped now. Under the mutex.
  std::optional<Error> spoiled() const {
    for (const Entry* entry = first; entry != nullptr; entry = entry->next) {
      if (entry->used && is_spoiled(*entry)) return changed_error(entry->path, entry->state);
    }
    return std::nullopt;
  }
};

namespace {

struct sigaction handler_before {};
const auto page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));

uintptr_t address_of(const void* pointer) noexcept { return reinterpret_cast<uintptr_t>(pointer); }

void on_bus_error(int signal, siginfo_t* info, void* context) noexcept {
  const int error = errno;
  const bool replaced = info->si_code > 0 && replace_lost_pages(info->si_addr);
  errno = error;
  if (replaced) return;
  if ((handler_before.sa_flags & SA_SIGINFO) != 0) return handler_before.sa_sigaction(signal, info, context);
  if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN) {
    return handler_before.sa_handler(signal);
  }
  // The same access, or the signal that somebody sent, once more, with its usual effect.
  ::sigaction(signal, &handler_before, nullptr);
  if (info->si_code <= 0) ::raise(signal);
}

}  // namespace

MappedRange::MappedRange(std::span<const std::byte> bytes, const std::filesystem::path& path, const FileState& state,
                         bool input) {
  auto& all = MappedRanges::all();
  const std::lock_guard lock(all.mutex);
  entry_ = all.take();
  entry_->path = path;
  entry_->state = state;
  entry_->input = input;
  entry_->used = true;
  entry_->lost = false;
  entry_->begin = address_of(bytes.data());
  entry_->end = (address_of(bytes.data()) + bytes.size() + page_bytes - 1) / page_bytes * page_bytes;
}

MappedRange::~MappedRange() {
  if (entry_ == nullptr) return;
  auto& all = MappedRanges::all();
  const std::lock_guard lock(all.mutex);
  try {
    if (!all.noted && MappedRanges::is_spoiled(*entry_)) all.noted = changed_error(entry_->path, entry_->state);
  } catch (const std::exception&) {
    // No memory for words: the work that needed these bytes has failed by itself, or will.
  }
  entry_->end = 0;
  entry_->begin = 0;
  entry_->used = false;
}

MappedRange::MappedRange(MappedRange&& other) noexcept : entry_(std::exchange(other.entry_, nullptr)) {}

MappedRange& MappedRange::operator=(MappedRange&& other) noexcept {
  std::swap(entry_, other.entry_);
  return *this;
}

void MappedRange::check() const {
  if (entry_ != nullptr && entry_->lost) throw changed_error(entry_->path, entry_->state);
}

bool replace_lost_pages(const void* address) noexcept {
  MappedRange::Entry* entry = MappedRanges::all().find(address_of(address));
  if (entry == nullptr) return false;
  // All behind the first page that is gone, so that a file of gigabytes costs one signal and not one a page.
  const uintptr_t begin = address_of(address) / page_bytes * page_bytes;
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  void* const place = reinterpret_cast<void*>(begin);
  if (::mmap(place, entry->end - begin, PROT_READ, flags, -1, 0) == MAP_FAILED) return false;
  entry->lost = true;
  return true;
}

void survive_lost_pages() noexcept {
  MappedRanges::all();
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  // Mapped bytes are read by compiled C++ alone, on stacks that a handler may use: products work on decoded copies.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, &handler_before);
}

void refuse_lost_pages(std::span<const std::byte> bytes) {
  auto& all = MappedRanges::all();
  const std::lock_guard lock(all.mutex);
  auto* entry = all.find(address_of(bytes.data()));
  if (entry == nullptr) return;
  entry->lost = true;
  throw changed_error(entry->path, entry->state);
}

void refuse_changed_inputs() {
  auto& all = MappedRanges::all();
  const std::lock_guard lock(all.mutex);
  if (const auto error = all.spoiled()) throw *error;
}

void stop_watching(const FileState& state) noexcept {
  auto& all = MappedRanges::all();
  const std::lock_guard lock(all.mutex);
  for (auto* entry = all.first.load(); entry != nullptr; entry = entry->next) {
    if (entry->used && entry->state == state) entry->input = false;
  }
}

void forget_changed_inputs() noexcept {
  auto& all = MappedRanges::all();
  const std::lock_guard lock(all.mutex);
  all.noted.reset();
}

std::optional<Error> changed_input() {
  auto& all = MappedRanges::all();
  const std::lock_guard lock(all.mutex);
  return all.noted ? all.noted : all.spoiled();
}

}  // namespace w4q::io
