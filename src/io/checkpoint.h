// A checkpoint on disk: one .safetensors file, or a folder with model.safetensors or an index and its shards, each of
// them plain (memory-mapped) or compressed in seekable zstd frames (".safetensors.zst").
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/buffer.h"
#include "core/views.h"
#include "io/digest.h"
#include "io/safetensors.h"

namespace w4q::io {

/// The bytes of one tensor for as long as this object lives: a view into the map, whose pages are released when it
/// goes, or a decompressed copy. The Checkpoint must outlive it.
class LoadedTensor {
 public:
  LoadedTensor(TensorView view, std::shared_ptr<const void> keep_alive)
      : view_(std::move(view)), keep_alive_(std::move(keep_alive)) {}

  const TensorView& view() const noexcept { return view_; }
  const TensorView* operator->() const noexcept { return &view_; }
  /// The same bytes as a buffer that stands for this object.
  Buffer buffer() const { return Buffer::view_of(view_.bytes, keep_alive_); }

 private:
  TensorView view_;
  std::shared_ptr<const void> keep_alive_;
};

/// Writes one row into `values`, as many as it has. Called from any thread; what it reads lives as long as it does.
using RowReader = std::function<void(int64_t row, std::span<float> values)>;

/// A tensor that is computed when it is loaded, out of others.
struct DerivedTensor {
  DType dtype = DType::f32;         ///< as load() gives it
  DType stored_dtype = DType::f32;  ///< as it is stored where it is kept; the same, or a narrower weight type
  Shape shape;
  std::function<Buffer()> make;          ///< its bytes; called for every load, from any thread
  std::function<RowReader()> rows = {};  ///< of F32 whose rows can be made one by one: in the place of `make`
};

/// The folder inside a checkpoint's that may hold more tensors of it, in files of the same kinds.
inline constexpr std::string_view sidecar_folder = "residual";

/// A handle: copies share the open files.
class Checkpoint {
 public:
  /// Opens and validates everything but the tensor data: headers, index, offsets against file sizes. `path` is a folder
  /// or a single file; a folder's sidecar belongs to it if `sidecar`. Throws bad_file naming file, tensor, expected and
  /// found.
  static Checkpoint open(const std::filesystem::path& path, bool sidecar = true);

  /// `source` with `tensors` in the place of those of the same names, or beside them, and without those of `hidden` that
  /// are not among them. Nothing is computed yet.
  /// `derivation` says what was done, for whoever must tell two such checkpoints apart.
  static Checkpoint derive(std::shared_ptr<const Checkpoint> source,
                           std::map<std::string, DerivedTensor, std::less<>> tensors, std::string derivation,
                           const std::set<std::string, std::less<>>& hidden = {});

  /// The folder that holds the files (the parent for a single file).
  const std::filesystem::path& folder() const noexcept;
  /// All tensors of all shards, by name. `begin`/`end` are relative to their own shard.
  const std::map<std::string, TensorInfo, std::less<>>& tensors() const noexcept;
  bool contains(std::string_view name) const noexcept;
  /// Throws bad_file when there is no such tensor, and names close ones.
  const TensorInfo& at(std::string_view name) const;
  /// The data. Thread-safe.
  LoadedTensor load(std::string_view name) const;
  /// The rows along the last dimension of a tensor of a weight type, widened to fp32: each is made when it is asked for,
  /// so that the whole need not be in memory as load() would give it. The Checkpoint must outlive the reader.
  RowReader rows(std::string_view name) const;
  /// The type in which a tensor is stored where it is kept, and the tensor in it. They differ from at() and load() for
  /// derived tensors only. Throws unsupported when a value is beyond that type.
  DType stored_dtype(std::string_view name) const;
  LoadedTensor load_stored(std::string_view name) const;
  /// The bytes of load_stored() from the first to the last, in pieces that leave the memory one after the other where a
  /// file is mapped: for tensors that go elsewhere as they are, however large. Digests are taken as by load().
  void read_stored(std::string_view name,
                   const std::function<void(int64_t offset, std::span<const std::byte> bytes)>& sink) const;
  /// From now on load() takes the digest of every tensor on disk when it is loaded first, through whatever copy of this
  /// handle and whatever is derived of it, and throws bad_file naming a tensor that is not what `expected` says of it.
  void take_digests(TensorDigests expected = {}) const;
  /// The digests of all tensors on disk. Those that were not taken yet are read now, on all threads.
  TensorDigests digests() const;
  /// Of derive(); empty for what lies on disk.
  const std::string& derivation() const noexcept;
  /// The shard file that holds a tensor, for messages.
  std::string file_of(std::string_view name) const;
  /// Sum of tensor bytes.
  int64_t total_bytes() const noexcept;
  /// Bytes of the weight files on disk (headers included, compressed size where compressed).
  int64_t file_bytes() const noexcept;
  /// "__metadata__" of the first shard.
  const std::map<std::string, std::string>& metadata() const noexcept;
  /// Accepted oddities, to be shown to the user once.
  const std::vector<std::string>& warnings() const noexcept;

 private:
  struct Impl;
  explicit Checkpoint(std::shared_ptr<const Impl> impl) noexcept;
  std::shared_ptr<const Impl> impl_;
};

/// True for names of weight files and their index, which a writer replaces and does not carry along:
/// *.safetensors, *.safetensors.zst, *.safetensors.index.json.
bool is_weight_file(std::string_view file_name) noexcept;

}  // namespace w4q::io
