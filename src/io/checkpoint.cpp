#include "io/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "core/convert.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "core/text.h"
#include "io/mapped_file.h"
#include "io/system.h"
#include "io/weight_files.h"
#include "io/zstd_frames.h"

namespace w4q::io {
namespace {

namespace fs = std::filesystem;

/// A file of the checkpoint, open.
struct Shard {
  std::string path;  ///< for messages
  MappedFile map;
  std::optional<SeekTable> frames;  ///< when compressed
  uint64_t data_begin = 0;
};

/// Compressed frames above this size make reading a single tensor slow.
constexpr uint64_t large_frame_bytes = uint64_t{64} << 20;

/// The first `size` bytes of the container, decompressed.
std::vector<std::byte> read_prefix(const Shard& shard, uint64_t size) {
  std::vector<std::byte> prefix(size);
  read_range(shard.map.bytes(), *shard.frames, 0, prefix, shard.path);
  return prefix;
}

SafetensorsHeader read_compressed_header(const Shard& shard) {
  const uint64_t size = shard.frames->content_size();
  auto prefix = read_prefix(shard, std::min<uint64_t>(size, 8));
  uint64_t header = 0;
  for (size_t i = prefix.size(); i-- > 0;) header = header << 8 | static_cast<uint8_t>(prefix[i]);
  // A length that cannot be right needs no more bytes: the parser refuses it by these eight.
  if (size >= 8 && header <= max_header_bytes && header <= size - 8) prefix = read_prefix(shard, 8 + header);
  return parse_safetensors(prefix, size, shard.path);
}

SafetensorsHeader open_shard(const fs::path& path, Shard& shard) {
  shard.path = path.native();
  shard.map = MappedFile(path, true);
  SafetensorsHeader header;
  if (is_compressed(path)) {
    shard.frames = read_seek_table(shard.map.bytes(), shard.path);
    const auto& starts = shard.frames->content;
    for (size_t i = 1; i < starts.size(); ++i) {
      if (starts[i] - starts[i - 1] <= large_frame_bytes) continue;
      header.warnings.emplace_back("is compressed in large frames, so that reading one tensor decompresses many");
      break;
    }
    auto parsed = read_compressed_header(shard);
    parsed.warnings.insert(parsed.warnings.end(), header.warnings.begin(), header.warnings.end());
    header = std::move(parsed);
  } else {
    header = parse_safetensors(shard.map.bytes(), shard.map.bytes().size(), shard.path);
    shard.map.release(0, header.data_begin);
  }
  shard.data_begin = header.data_begin;
  return header;
}

/// Memory for the decompressed copy of a tensor.
Buffer allocate(const TensorInfo& info) try { return Buffer(info.size()); } catch (const std::bad_alloc&) {
  throw Error(ErrorCode::bad_file, concat("tensor \"", shown(info.name), "\": not enough memory to decompress it"))
      .detail(concat(info.size(), " bytes are needed"))
      .hint("decompress the file first (zstd -d): plain files are mapped, not copied");
}

/// A copy in a narrower weight type, rounded a piece at a time.
LoadedTensor narrowed(const TensorView& tensor, DType dtype) {
  constexpr size_t piece = 1 << 16;
  const size_t from = static_cast<size_t>(dtype_bits(tensor.dtype)) / 8,
               to = static_cast<size_t>(dtype_bits(dtype)) / 8;
  const auto count = static_cast<size_t>(element_count(tensor.shape));
  const auto copy = std::make_shared<Buffer>(count * to);
  std::vector<float> values(std::min(count, piece));
  for (size_t begin = 0; begin < count; begin += piece) {
    const auto part = std::span(values).first(std::min(piece, count - begin));
    const auto bytes = copy->bytes().subspan(begin * to, part.size() * to);
    widen(tensor.bytes.subspan(begin * from, part.size() * from), tensor.dtype, part);
    narrow(part, dtype, bytes);
    widen(bytes, dtype, part);
    const auto bad = std::ranges::find_if(part, [](float value) { return !std::isfinite(value); });
    if (bad == part.end()) continue;
    throw Error(ErrorCode::unsupported,
                concat("tensor \"", shown(tensor.name), "\": element ", begin + static_cast<size_t>(bad - part.begin()),
                       " does not fit ", dtype_name(dtype)));
  }
  return {TensorView{tensor.name, dtype, tensor.shape, copy->bytes()}, copy};
}

/// All rows of a derived tensor, on all threads.
Buffer filled(const DerivedTensor& tensor) {
  const int64_t k = std::max<int64_t>(tensor.shape.back(), 1);
  auto result = Buffer::unfilled(static_cast<size_t>(element_count(tensor.shape)) * sizeof(float));
  const RowReader read = tensor.rows();
  auto* const values = result.as<float>().data();
  parallel_for(element_count(tensor.shape) / k, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) read(row, {values + row * k, static_cast<size_t>(k)});
  });
  return result;
}

}  // namespace

struct Checkpoint::Impl {
  fs::path folder;
  std::vector<Shard> shards;
  std::map<std::string, TensorInfo, std::less<>> tensors;
  std::map<std::string_view, size_t> shard_of;  ///< keys are those of `tensors`
  std::map<std::string, std::string> metadata;
  std::vector<std::string> warnings;
  // A derived checkpoint has no shards of its own.
  std::shared_ptr<const Checkpoint> source;
  std::map<std::string, DerivedTensor, std::less<>> derived;
  std::string derivation;

  // What was read so far.
  mutable std::atomic<bool> takes_digests = false;
  mutable std::mutex mutex;  ///< guards the digests
  mutable TensorDigests expected_digests, taken_digests;

  Impl(const fs::path& path, bool sidecar);
  Impl(std::shared_ptr<const Checkpoint> from, std::map<std::string, DerivedTensor, std::less<>> computed,
       std::string what, const std::set<std::string, std::less<>>& hidden);
  void add_files(WeightFiles files);
  /// `shard` counts among those of `files`, which stand behind `first` others.
  void add_tensors(size_t first, size_t shard, SafetensorsHeader header, const WeightFiles& files);
  void check_complete(const WeightFiles& files);
  const Shard& shard_at(std::string_view name) const { return shards[shard_of.find(name)->second]; }
  /// The tensor with its digest taken, if it is to be and was not.
  void take_digest(const TensorView& tensor) const;
  bool wants_digest(std::string_view name) const;
  void note_digest(std::string_view name, TensorDigest taken) const;
  const DerivedTensor* find_derived(std::string_view name) const {
    const auto found = derived.find(name);
    return found == derived.end() ? nullptr : &found->second;
  }
};

Checkpoint::Impl::Impl(const fs::path& path, bool sidecar) {
  WeightFiles files = find_weight_files(path);
  folder = files.folder;
  add_files(std::move(files));
  std::error_code unreadable;  // then it is as if it were not there, which whoever needs its tensors will say
  if (sidecar && fs::is_directory(path, unreadable) && fs::is_directory(path / sidecar_folder, unreadable)) {
    add_files(find_weight_files(path / sidecar_folder));
  }
}

Checkpoint::Impl::Impl(std::shared_ptr<const Checkpoint> from,
                       std::map<std::string, DerivedTensor, std::less<>> computed, std::string what,
                       const std::set<std::string, std::less<>>& hidden)
    : folder(from->folder()),
      tensors(from->tensors()),
      metadata(from->metadata()),
      warnings(from->warnings()),
      source(std::move(from)),
      derived(std::move(computed)),
      derivation(std::move(what)) {
  for (const auto& name : hidden) tensors.erase(name);
  for (const auto& [name, tensor] : derived) {
    const auto bytes = static_cast<uint64_t>(byte_count(tensor.dtype, tensor.shape));
    tensors.insert_or_assign(name, TensorInfo{name, tensor.dtype, tensor.shape, 0, bytes});
  }
}

void Checkpoint::Impl::add_files(WeightFiles files) {
  warnings.insert(warnings.end(), files.warnings.begin(), files.warnings.end());
  const size_t first = shards.size();
  shards.resize(first + files.shards.size());
  for (size_t i = 0; i < files.shards.size(); ++i) {
    SafetensorsHeader header = open_shard(files.shards[i], shards[first + i]);
    const std::string name = shown(files.shards[i].filename());
    for (const auto& warning : header.warnings) warnings.push_back(concat(name, ": ", warning));
    if (first + i == 0) metadata = std::move(header.metadata);
    add_tensors(first, i, std::move(header), files);
  }
  check_complete(files);
}

void Checkpoint::Impl::add_tensors(size_t first, size_t shard, SafetensorsHeader header, const WeightFiles& files) {
  size_t unlisted = 0, elsewhere = 0;
  std::string first_unlisted, first_elsewhere;
  for (auto& tensor : header.tensors) {
    if (files.weight_map) {
      const auto listed = files.weight_map->find(tensor.name);
      if (listed == files.weight_map->end() && unlisted++ == 0) first_unlisted = tensor.name;
      if (listed != files.weight_map->end() && listed->second != shard && elsewhere++ == 0) {
        first_elsewhere = tensor.name;
      }
      if (listed == files.weight_map->end() || listed->second != shard) continue;
    }
    std::string name = tensor.name;
    const auto [place, added] = tensors.emplace(std::move(name), std::move(tensor));
    if (first != 0 && !added) {
      throw Error(ErrorCode::bad_file, concat(shards[first + shard].path, ": tensor \"", shown(place->first),
                                              "\" lies in another file of the checkpoint too"));
    }
    shard_of.emplace(place->first, first + shard);
  }
  if (elsewhere > 0) {
    warnings.push_back(concat(shown(files.shards[shard].filename()), " holds ", elsewhere,
                              " tensors that the index has in another file, the first is \"", shown(first_elsewhere),
                              "\": programs that read all files take either"));
  }
  if (unlisted == 0) return;
  warnings.push_back(concat(shown(files.shards[shard].filename()), " holds ", unlisted,
                            " tensors that the index does not list, the first is \"", shown(first_unlisted), "\""));
}

void Checkpoint::Impl::check_complete(const WeightFiles& files) {
  if (!files.weight_map) return;
  for (const auto& [name, shard] : *files.weight_map) {
    if (tensors.contains(name)) continue;
    throw Error(ErrorCode::bad_file, concat(shown(files.shards[shard]), ": tensor \"", shown(name), "\" is missing"))
        .detail(concat(shown(files.index_name), " says that it lies in this file"))
        .hint("the index and the shards are from different checkpoints, or a download is incomplete");
  }
  double total = 0;
  for (const auto& [name, shard] : *files.weight_map) total += static_cast<double>(tensors.find(name)->second.size());
  if (files.total_size && *files.total_size != total) {
    warnings.push_back(concat(shown(files.index_name), ": total_size is ", fixed(*files.total_size, 0),
                              ", the tensors have ", fixed(total, 0), " bytes"));
  }
}

bool Checkpoint::Impl::wants_digest(std::string_view name) const {
  if (!takes_digests) return false;
  const std::lock_guard lock(mutex);
  return !taken_digests.contains(name);
}

void Checkpoint::Impl::note_digest(std::string_view name, TensorDigest taken) const {
  const std::lock_guard lock(mutex);
  check_digest(expected_digests, name, taken, shard_at(name).path);
  taken_digests.emplace(name, std::move(taken));
}

void Checkpoint::Impl::take_digest(const TensorView& tensor) const {
  if (wants_digest(tensor.name)) note_digest(tensor.name, hash_tensor(tensor));
}

Checkpoint Checkpoint::open(const fs::path& path, bool sidecar) {
  return Checkpoint(std::make_shared<const Impl>(path, sidecar));
}

Checkpoint Checkpoint::derive(std::shared_ptr<const Checkpoint> source,
                              std::map<std::string, DerivedTensor, std::less<>> tensors, std::string derivation,
                              const std::set<std::string, std::less<>>& hidden) {
  return Checkpoint(std::make_shared<const Impl>(std::move(source), std::move(tensors), std::move(derivation), hidden));
}

Checkpoint::Checkpoint(std::shared_ptr<const Impl> impl) noexcept : impl_(std::move(impl)) {}

const fs::path& Checkpoint::folder() const noexcept { return impl_->folder; }

const std::map<std::string, TensorInfo, std::less<>>& Checkpoint::tensors() const noexcept { return impl_->tensors; }

bool Checkpoint::contains(std::string_view name) const noexcept { return impl_->tensors.contains(name); }

const TensorInfo& Checkpoint::at(std::string_view name) const {
  const auto found = impl_->tensors.find(name);
  if (found != impl_->tensors.end()) return found->second;
  Error error(ErrorCode::bad_file, concat(shown(folder()), ": there is no tensor \"", shown(name), "\""));
  std::vector<std::pair<size_t, std::string_view>> ranked;
  for (const auto& [other, tensor] : impl_->tensors) ranked.emplace_back(likeness(name, other), other);
  const auto best = ranked.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(ranked.size(), 3));
  std::partial_sort(ranked.begin(), best, ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> close;
  for (auto each = ranked.begin(); each != best; ++each) {
    if (2 * each->first >= name.size()) close.push_back(shown(each->second));
  }
  if (!close.empty()) error.detail("similar names: " + join(close));
  throw error;
}

LoadedTensor Checkpoint::load(std::string_view name) const {
  const TensorInfo& info = at(name);
  if (const DerivedTensor* derived = impl_->find_derived(name)) {
    const auto made = std::make_shared<const Buffer>(derived->rows ? filled(*derived) : derived->make());
    ensure(made->size() == info.size(), "Checkpoint: a derived tensor is not of its size");
    return {TensorView{info.name, info.dtype, info.shape, made->bytes()}, made};
  }
  if (impl_->source) return impl_->source->load(name);
  const Shard& shard = impl_->shard_at(name);
  const uint64_t begin = shard.data_begin + info.begin;
  TensorView view{info.name, info.dtype, info.shape, {}};
  std::shared_ptr<const void> keep_alive;
  if (shard.frames) {
    const auto copy = std::make_shared<Buffer>(allocate(info));
    read_range(shard.map.bytes(), *shard.frames, begin, copy->bytes(), shard.path);
    view.bytes = copy->bytes();
    keep_alive = copy;
  } else {
    view.bytes = shard.map.bytes().subspan(begin, info.size());
    const auto release = [&map = shard.map, begin, size = info.size()](const void*) { map.release(begin, size); };
    keep_alive = std::shared_ptr<const void>(view.bytes.data(), release);
  }
  shard.map.check();
  impl_->take_digest(view);
  return {std::move(view), std::move(keep_alive)};
}

RowReader Checkpoint::rows(std::string_view name) const {
  at(name);
  const DerivedTensor* const derived = impl_->find_derived(name);
  if (derived != nullptr && derived->rows) return derived->rows();
  if (derived == nullptr && impl_->source) return impl_->source->rows(name);
  const auto loaded = std::make_shared<const LoadedTensor>(load(name));
  return [loaded](int64_t row, std::span<float> values) {
    const size_t width = static_cast<size_t>(dtype_bits((*loaded)->dtype)) / 8;
    widen((*loaded)->bytes.subspan(static_cast<size_t>(row) * values.size() * width), (*loaded)->dtype, values);
  };
}

DType Checkpoint::stored_dtype(std::string_view name) const {
  if (const DerivedTensor* derived = impl_->find_derived(name)) return derived->stored_dtype;
  const DType dtype = at(name).dtype;
  return impl_->source ? impl_->source->stored_dtype(name) : dtype;
}

LoadedTensor Checkpoint::load_stored(std::string_view name) const {
  LoadedTensor loaded = load(name);
  const DType dtype = stored_dtype(name);
  return dtype == loaded->dtype ? loaded : narrowed(loaded.view(), dtype);
}

void Checkpoint::read_stored(std::string_view name,
                             const std::function<void(int64_t, std::span<const std::byte>)>& sink) const {
  if (impl_->source && impl_->find_derived(name) == nullptr) return impl_->source->read_stored(name, sink);
  const TensorInfo& info = at(name);
  if (impl_->source || impl_->shard_at(name).frames) return sink(0, load_stored(name)->bytes);
  constexpr uint64_t piece = uint64_t{16} << 20;
  const Shard& shard = impl_->shard_at(name);
  std::optional<TensorHasher> hasher;
  if (impl_->wants_digest(name)) hasher.emplace();
  for (uint64_t done = 0; done < info.size(); done += piece) {
    const uint64_t begin = shard.data_begin + info.begin + done, size = std::min(piece, info.size() - done);
    const auto bytes = shard.map.bytes().subspan(begin, size);
    if (hasher) hasher->add(bytes);
    sink(static_cast<int64_t>(done), bytes);
    shard.map.check();
    shard.map.release(begin, size);
  }
  if (hasher) impl_->note_digest(name, hasher->finish(dtype_name(info.dtype), info.shape));
}

void Checkpoint::take_digests(TensorDigests expected) const {
  if (impl_->source) return impl_->source->take_digests(std::move(expected));
  const std::lock_guard lock(impl_->mutex);
  impl_->expected_digests = std::move(expected);
  impl_->takes_digests = true;
}

TensorDigests Checkpoint::digests() const {
  if (impl_->source) return impl_->source->digests();
  impl_->takes_digests = true;
  constexpr uint64_t shared = uint64_t{16} << 20;  // tensors of this size keep all threads busy by themselves
  std::vector<std::string_view> small;
  for (const auto& [name, info] : impl_->tensors) {
    check_interrupt();
    if (info.size() < shared) {
      small.push_back(name);
    } else {
      load(name);
    }
  }
  parallel_for(static_cast<int64_t>(small.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) load(small[static_cast<size_t>(i)]);
  });
  const std::lock_guard lock(impl_->mutex);
  return impl_->taken_digests;
}

const std::string& Checkpoint::derivation() const noexcept { return impl_->derivation; }

std::string Checkpoint::file_of(std::string_view name) const {
  at(name);
  if (impl_->source) return impl_->source->contains(name) ? impl_->source->file_of(name) : shown(folder());
  return impl_->shard_at(name).path;
}

int64_t Checkpoint::total_bytes() const noexcept {
  int64_t total = 0;
  for (const auto& [name, tensor] : impl_->tensors) total += static_cast<int64_t>(tensor.size());
  return total;
}

int64_t Checkpoint::file_bytes() const noexcept {
  if (impl_->source) return impl_->source->file_bytes();
  int64_t total = 0;
  for (const auto& shard : impl_->shards) total += static_cast<int64_t>(shard.map.bytes().size());
  return total;
}

const std::map<std::string, std::string>& Checkpoint::metadata() const noexcept { return impl_->metadata; }

const std::vector<std::string>& Checkpoint::warnings() const noexcept { return impl_->warnings; }

}  // namespace w4q::io
