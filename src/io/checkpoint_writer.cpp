#include "io/checkpoint_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/text.h"
#include "io/checkpoint.h"
#include "io/mapped_file.h"
#include "io/system.h"
#include "io/zstd_frames.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;

/// Parts of this size go to the disk while the next are made; smaller ones would cost more calls than they hide.
constexpr size_t flushed_at_once = size_t{1} << 20;

constexpr std::string_view index_name = "model.safetensors.index.json";
constexpr std::string_view compressed_suffix = ".zst";

/// Which bytes of a tensor have been written: disjoint ranges, begin → end, neighbours merged.
class Coverage {
 public:
  /// Adds [begin, end); false when a part of it was there already.
  bool add(uint64_t begin, uint64_t end) {
    auto next = ranges_.lower_bound(begin);
    if (next != ranges_.end() && next->first < end) return false;
    if (next != ranges_.begin()) {
      const auto previous = std::prev(next);
      if (previous->second > begin) return false;
      if (previous->second == begin) {
        begin = previous->first;
        ranges_.erase(previous);
      }
    }
    if (next != ranges_.end() && next->first == end) {
      end = next->second;
      ranges_.erase(next);
    }
    ranges_[begin] = end;
    return true;
  }

  bool is_complete(uint64_t size) const {
    return size == 0 || (ranges_.size() == 1 && ranges_.begin()->first == 0 && ranges_.begin()->second == size);
  }

 private:
  std::map<uint64_t, uint64_t> ranges_;
};

/// Deals tensors to shards in plan order: one that is larger than the limit gets a shard of its own at once, while the
/// shard being filled stays open for the next ones.
std::vector<std::vector<PlannedTensor>> deal(std::vector<PlannedTensor> plan, int64_t limit) {
  std::vector<std::vector<PlannedTensor>> shards;
  std::vector<PlannedTensor> current;
  int64_t filled = 0;
  const auto close_current = [&] {
    if (!current.empty()) shards.push_back(std::exchange(current, {}));
    filled = 0;
  };
  for (auto& tensor : plan) {
    const int64_t size = tensor.size();
    if (size > limit) {
      shards.emplace_back().push_back(std::move(tensor));
      continue;
    }
    if (filled + size > limit) close_current();
    filled += size;
    current.push_back(std::move(tensor));
  }
  close_current();
  if (shards.empty()) shards.emplace_back();
  return shards;
}

/// Takes the tensors of the sidecar out of `plan`.
std::vector<PlannedTensor> take_sidecar(std::vector<PlannedTensor>& plan) {
  const auto second =
      std::stable_partition(plan.begin(), plan.end(), [](const auto& tensor) { return !tensor.sidecar; });
  std::vector<PlannedTensor> taken(std::make_move_iterator(second), std::make_move_iterator(plan.end()));
  plan.erase(second, plan.end());
  for (auto& tensor : taken) tensor.sidecar = false;
  return taken;
}

fs::path make_sidecar(const fs::path& folder, ShardFiles files) {
  const fs::path path = folder / sidecar_folder;
  std::error_code error;
  const bool made = files != ShardFiles::join && fs::create_directory(path, error);
  const bool is_new = files == ShardFiles::create || files == ShardFiles::part;
  if (error || (is_new && !made)) {
    throw system_error(path, "cannot make the folder", error.value());
  }
  return path;
}

fs::path compressed_path(fs::path shard) { return shard += compressed_suffix; }

/// A shard that an ended run has compressed is plain again, so that its tensors can be added to.
void undo_compression(const fs::path& shard, uint64_t size) {
  const fs::path compressed = compressed_path(shard);
  std::error_code missing;
  if (!fs::exists(compressed, missing)) return;
  try {
    if (fs::file_size(shard, missing) != size || missing) decompress_file(compressed, shard);
  } catch (const Error&) {  // it was cut: what it holds is made anew
  }
  fs::remove(compressed, missing);
}

std::string shard_name(size_t index, size_t count) {
  if (count == 1) return "model.safetensors";
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name.data();
}

}  // namespace

bool is_written_weight_file(std::string_view name) noexcept {
  if (name == index_name) return true;
  if (name.ends_with(compressed_suffix)) name.remove_suffix(compressed_suffix.size());
  constexpr std::string_view pattern = "model-#####-of-#####.safetensors";
  return name == "model.safetensors" ||
         std::equal(name.begin(), name.end(), pattern.begin(), pattern.end(), [](char found, char wanted) {
           return wanted == '#' ? found >= '0' && found <= '9' : found == wanted;
         });
}

struct CheckpointWriter::Impl {
  struct Shard {
    fs::path path;
    SafetensorsHeader header;
    uint64_t size = 0;
  };
  struct Target {
    size_t shard = 0;
    const TensorInfo* tensor = nullptr;
    Coverage written;
    std::optional<TensorDigest> digest;
    std::unique_ptr<TensorHasher> hasher;  ///< of one that comes in parts, while they come in order
  };

  fs::path folder;
  WriteOptions options;
  std::vector<Shard> shards;
  std::map<std::string, Target, std::less<>> targets;
  std::mutex mutex;       ///< guards the coverage
  std::mutex hash_mutex;  ///< guards the hashers
  bool finished = false;
  int64_t file_bytes = 0;
  std::unique_ptr<CheckpointWriter> sidecar;

  void plan_shards(std::vector<PlannedTensor> plan);
  void check_free_space() const;
  void create_files() const;
  void mend_files() const;
  void make_file(const Shard& shard, int flags) const;
  Target& find(std::string_view name);
  /// The writer of the set that a tensor belongs to, when it is not this.
  CheckpointWriter* other_writer(std::string_view name) const;
  void write(std::string_view name, uint64_t offset, std::span<const std::byte> bytes);
  void put(const Target& target, uint64_t offset, std::span<const std::byte> bytes) const;
  void hash_part(Target& target, uint64_t offset, std::span<const std::byte> bytes);
  void check_complete() const;
  /// Those that were not taken while the tensors were written.
  void take_digests();
  TensorDigest hash_stored(const Target& target) const;
  void read_stored(const Target& target, const std::function<void(std::span<const std::byte>)>& see) const;
  void finish_shard(Shard& shard);
  /// Returns its bytes.
  int64_t write_index() const;
};

void CheckpointWriter::Impl::plan_shards(std::vector<PlannedTensor> plan) {
  if (options.max_shard_bytes <= 0) throw Error(ErrorCode::bad_argument, "the shard size must be positive");
  // Laying out everything as one file checks every size, and that no name appears twice in two shards.
  layout_safetensors(plan, options.metadata);
  auto dealt = deal(std::move(plan), options.max_shard_bytes);
  for (auto& tensors : dealt) {
    Shard& shard = shards.emplace_back();
    shard.path = folder / shard_name(shards.size() - 1, dealt.size());
    shard.header = layout_safetensors(std::move(tensors), options.metadata);
    shard.size = shard.header.data_begin + (shard.header.tensors.empty() ? 0 : shard.header.tensors.back().end);
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const auto& tensor : shards[i].header.tensors) {
      Target& target = targets[tensor.name];
      target.shard = i;
      target.tensor = &tensor;
    }
  }
}

void CheckpointWriter::Impl::check_free_space() const {
  uint64_t needed = options.other_bytes;
  uint64_t largest = 0;
  for (const auto& shard : shards) {
    needed += shard.size;
    largest = std::max(largest, shard.size);
  }
  if (options.compress) needed += largest;  // a shard and its compressed copy stand side by side for a while
  io::check_free_space(folder, needed);
}

void CheckpointWriter::Impl::create_files() const {
  for (const auto& shard : shards) make_file(shard, O_EXCL);
}

/// Headers and lengths as planned, whatever is there. A tensor that was lost holds zeros or less, which its digest tells.
void CheckpointWriter::Impl::mend_files() const {
  for (const auto& shard : shards) {
    undo_compression(shard.path, shard.size);
    make_file(shard, 0);
  }
}

void CheckpointWriter::Impl::make_file(const Shard& shard, int flags) const {
  const FileDescriptor file = open_file(shard.path, O_WRONLY | O_CREAT | flags);
  const std::string header = serialize_safetensors_header(shard.header);
  write_all(file, std::as_bytes(std::span(header)), 0, shard.path);
  // The full length at once: a limit on file sizes shows here, before any work is done.
  if (::ftruncate(file.get(), static_cast<off_t>(shard.size)) != 0) {
    throw system_error(shard.path, concat("cannot make a file of ", shard.size, " bytes"));
  }
}

CheckpointWriter::Impl::Target& CheckpointWriter::Impl::find(std::string_view name) {
  const auto found = targets.find(name);
  ensure(found != targets.end(), concat("tensor \"", shown(name), "\": written but not planned"));
  return found->second;
}

CheckpointWriter* CheckpointWriter::Impl::other_writer(std::string_view name) const {
  return sidecar && sidecar->impl_->targets.contains(name) ? sidecar.get() : nullptr;
}

void CheckpointWriter::Impl::write(std::string_view name, uint64_t offset, std::span<const std::byte> bytes) {
  Target& target = find(name);
  const uint64_t size = target.tensor->size();
  ensure(!finished, "a tensor is written after finish()");
  ensure(offset <= size && bytes.size() <= size - offset, concat("tensor \"", shown(name), "\": writing [", offset,
                                                                 ", ", offset + bytes.size(), ") of ", size, " bytes"));
  if (bytes.empty()) return;
  {
    const std::lock_guard lock(mutex);
    ensure(target.written.add(offset, offset + bytes.size()),
           concat("tensor \"", shown(name), "\": a byte is written twice"));
  }
  if (bytes.size() == size) {
    target.digest = hash_tensor(dtype_name(target.tensor->dtype), target.tensor->shape, bytes);
  } else {
    hash_part(target, offset, bytes);
  }
  put(target, offset, bytes);
}

/// Opened anew each time: there may be more shards than a process may have open files.
void CheckpointWriter::Impl::put(const Target& target, uint64_t offset, std::span<const std::byte> bytes) const {
  const Shard& shard = shards[target.shard];
  const FileDescriptor file = open_file(shard.path, O_WRONLY);
  const uint64_t place = shard.header.data_begin + target.tensor->begin + offset;
  write_all(file, bytes, place, shard.path);
  if (!options.compress && bytes.size() >= flushed_at_once) begin_flush(file, place, bytes.size());
}

void CheckpointWriter::Impl::hash_part(Target& target, uint64_t offset, std::span<const std::byte> bytes) {
  const std::lock_guard lock(hash_mutex);
  if (offset == 0) target.hasher = std::make_unique<TensorHasher>();
  if (!target.hasher) return;
  if (target.hasher->added() != offset) return target.hasher.reset();
  target.hasher->add(bytes);
  if (target.hasher->added() != target.tensor->size()) return;
  target.digest = target.hasher->finish(dtype_name(target.tensor->dtype), target.tensor->shape);
  target.hasher.reset();
}

void CheckpointWriter::Impl::take_digests() {
  for (auto& [name, target] : targets) {
    if (!target.digest) target.digest = hash_stored(target);
  }
}

TensorDigest CheckpointWriter::Impl::hash_stored(const Target& target) const {
  const Shard& shard = shards[target.shard];
  const MappedFile file(shard.path);
  const auto bytes = file.bytes().subspan(shard.header.data_begin + target.tensor->begin, target.tensor->size());
  return hash_tensor(dtype_name(target.tensor->dtype), target.tensor->shape, bytes);
}

void CheckpointWriter::Impl::read_stored(const Target& target,
                                         const std::function<void(std::span<const std::byte>)>& see) const {
  constexpr size_t piece = size_t{16} << 20;
  const Shard& shard = shards[target.shard];
  const MappedFile file(shard.path);
  auto left = file.bytes().subspan(shard.header.data_begin + target.tensor->begin, target.tensor->size());
  for (; !left.empty(); left = left.subspan(std::min(piece, left.size())))
    see(left.first(std::min(piece, left.size())));
}

void CheckpointWriter::Impl::check_complete() const {
  for (const auto& [name, target] : targets) {
    ensure(target.written.is_complete(target.tensor->size()),
           concat("tensor \"", shown(name), "\": not all of its bytes were written"));
  }
}

void CheckpointWriter::Impl::finish_shard(Shard& shard) {
  if (options.compress) {
    const fs::path compressed = compressed_path(shard.path);
    compress_file(shard.path, compressed, options.compression_level);
    if (::unlink(shard.path.c_str()) != 0) throw system_error(shard.path, "cannot remove");
    shard.path = compressed;
  } else {
    sync_file(open_file(shard.path, O_WRONLY), shard.path);
  }
  std::error_code error;
  file_bytes += static_cast<int64_t>(fs::file_size(shard.path, error));
  if (error) throw system_error(shard.path, "cannot examine", error.value());
}

int64_t CheckpointWriter::Impl::write_index() const {
  nlohmann::json index;  // sorts its keys
  uint64_t total = 0;
  auto& weight_map = index["weight_map"];
  for (const auto& [name, target] : targets) {
    total += target.tensor->size();
    weight_map[name] = shards[target.shard].path.filename().native();
  }
  index["metadata"]["total_size"] = total;
  const std::string text = index.dump(2) + "\n";
  const fs::path path = folder / index_name;
  const FileDescriptor file = open_file(path, O_WRONLY | O_CREAT | O_TRUNC);
  write_all(file, std::as_bytes(std::span(text)), 0, path);
  sync_file(file, path);
  return static_cast<int64_t>(text.size());
}

CheckpointWriter::CheckpointWriter(fs::path folder, std::vector<PlannedTensor> plan, WriteOptions options,
                                   ShardFiles files)
    : impl_(std::make_unique<Impl>()) {
  impl_->folder = std::move(folder);
  impl_->options = std::move(options);
  auto residual = take_sidecar(plan);
  impl_->plan_shards(std::move(plan));
  if (files == ShardFiles::create) impl_->check_free_space();
  if (files == ShardFiles::create || files == ShardFiles::part) impl_->create_files();
  if (files == ShardFiles::mend) impl_->mend_files();
  if (residual.empty()) return;
  for (const auto& tensor : residual) {
    if (!impl_->targets.contains(tensor.name)) continue;
    throw Error(ErrorCode::bad_argument, concat("tensor \"", shown(tensor.name), "\" is planned twice"));
  }
  const fs::path beside = make_sidecar(impl_->folder, files);
  impl_->sidecar = std::make_unique<CheckpointWriter>(beside, std::move(residual), impl_->options, files);
}

CheckpointWriter::~CheckpointWriter() = default;

void CheckpointWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  if (auto* other = impl_->other_writer(name)) return other->write(name, bytes);
  const uint64_t planned = impl_->find(name).tensor->size();
  ensure(bytes.size() == planned,
         concat("tensor \"", shown(name), "\": ", bytes.size(), " bytes written, ", planned, " planned"));
  impl_->write(name, 0, bytes);
}

void CheckpointWriter::write_part(std::string_view name, int64_t offset, std::span<const std::byte> bytes) {
  if (auto* other = impl_->other_writer(name)) return other->write_part(name, offset, bytes);
  impl_->write(name, static_cast<uint64_t>(offset), bytes);
}

void CheckpointWriter::copy(const Checkpoint& from, std::string_view name,
                            const std::function<void(int64_t offset, std::span<const std::byte> bytes)>& see) {
  from.read_stored(name, [&](int64_t offset, std::span<const std::byte> bytes) {
    write_part(name, offset, bytes);
    if (see) see(offset, bytes);
  });
}

void CheckpointWriter::replace(std::string_view name, std::span<const std::byte> bytes) {
  if (auto* other = impl_->other_writer(name)) return other->replace(name, bytes);
  auto& target = impl_->find(name);
  const uint64_t size = target.tensor->size();
  ensure(bytes.size() == size && target.written.is_complete(size),
         concat("tensor \"", shown(name), "\": replaced before it is written, or by another size"));
  ensure(!impl_->finished, "a tensor is replaced after finish()");
  target.digest = hash_tensor(dtype_name(target.tensor->dtype), target.tensor->shape, bytes);
  impl_->put(target, 0, bytes);
}

TensorDigest CheckpointWriter::digest(std::string_view name) const {
  if (const auto* other = impl_->other_writer(name)) return other->digest(name);
  const auto& target = impl_->find(name);
  ensure(target.written.is_complete(target.tensor->size()),
         concat("tensor \"", shown(name), "\": asked for before it is written"));
  return target.digest ? *target.digest : impl_->hash_stored(target);
}

bool CheckpointWriter::holds(std::string_view name, const TensorDigest& digest) const {
  if (const auto* other = impl_->other_writer(name)) return other->holds(name, digest);
  const auto& target = impl_->find(name);
  const Impl::Shard& shard = impl_->shards[target.shard];
  std::error_code missing;
  return fs::file_size(shard.path, missing) == shard.size && !missing && impl_->hash_stored(target) == digest;
}

void CheckpointWriter::read(std::string_view name,
                            const std::function<void(std::span<const std::byte> piece)>& see) const {
  if (const auto* other = impl_->other_writer(name)) return other->read(name, see);
  impl_->read_stored(impl_->find(name), see);
}

void CheckpointWriter::adopt(std::string_view name, const TensorDigest& digest) {
  if (auto* other = impl_->other_writer(name)) return other->adopt(name, digest);
  auto& target = impl_->find(name);
  const uint64_t size = target.tensor->size();
  if (size > 0 && !target.written.is_complete(size)) target.written.add(0, size);
  target.digest = digest;
}

void CheckpointWriter::sync() {
  for (const auto& shard : impl_->shards) sync_file(open_file(shard.path, O_WRONLY), shard.path);
  if (impl_->sidecar) impl_->sidecar->sync();
}

Checkpoint CheckpointWriter::written() {
  ensure(!impl_->finished, "written() after finish()");
  for (auto* set : {impl_.get(), impl_->sidecar ? impl_->sidecar->impl_.get() : nullptr}) {
    if (set != nullptr && set->shards.size() > 1) set->write_index();
  }
  return Checkpoint::open(impl_->folder);
}

void CheckpointWriter::finish() {
  ensure(!impl_->finished, "finish() is called twice");
  impl_->check_complete();
  impl_->finished = true;
  impl_->take_digests();
  for (auto& shard : impl_->shards) impl_->finish_shard(shard);
  if (impl_->shards.size() > 1) impl_->file_bytes += impl_->write_index();
  if (impl_->sidecar) {
    impl_->sidecar->finish();
    impl_->file_bytes += impl_->sidecar->file_bytes();
  }
  sync_folder(impl_->folder);
}

TensorDigests CheckpointWriter::digests() const {
  TensorDigests result;
  if (impl_->sidecar) result = impl_->sidecar->digests();
  for (const auto& [name, target] : impl_->targets) result.emplace(name, *target.digest);
  return result;
}

int64_t CheckpointWriter::file_bytes() const noexcept { return impl_->file_bytes; }

}  // namespace w4q::io
