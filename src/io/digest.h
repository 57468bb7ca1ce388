// Digests of tensors and files: XXH3-128, as fast as memory is read. They find rot, mistakes and mix-ups; whoever wants
// to forge a tensor can forge the digest that stands beside it, so a slower cryptographic hash would prove no more.
#pragma once

#include <compare>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/views.h"

namespace w4q::io {

struct Digest {
  uint64_t high = 0, low = 0;

  auto operator<=>(const Digest&) const = default;
  /// 32 hex digits.
  std::string text() const;
};

/// The inverse of text(), lower case only; nothing for what is none.
std::optional<Digest> parse_digest(std::string_view text) noexcept;

/// XXH3-128 of bytes.
Digest digest_of(std::span<const std::byte> bytes) noexcept;
Digest digest_of(std::string_view text) noexcept;
/// Of a whole file. Throws bad_file.
Digest digest_of_file(const std::filesystem::path& path);

/// What a tensor is. The digest is over `type`, `shape` and bytes.
struct TensorDigest {
  std::string type;  ///< "BF16", as in the header of the file
  Shape shape;
  Digest digest;

  auto operator<=>(const TensorDigest&) const = default;
  /// "BF16 [4096, 4096] 0123…"
  std::string text() const;
};
std::optional<TensorDigest> parse_tensor_digest(std::string_view text);

/// By tensor name.
using TensorDigests = std::map<std::string, TensorDigest, std::less<>>;

/// Bytes of a tensor that are hashed by themselves, so that threads can share a large one. The digest of the tensor is
/// that of "TYPE [SHAPE]\n" and the digests of its pieces, 16 bytes each, high byte first.
inline constexpr size_t digest_piece = size_t{1} << 20;

/// On all threads.
TensorDigest hash_tensor(std::string_view type, const Shape& shape, std::span<const std::byte> bytes);
TensorDigest hash_tensor(const TensorView& tensor);

/// The same of bytes that come in parts, from the first to the last.
class TensorHasher {
 public:
  TensorHasher();
  ~TensorHasher();
  TensorHasher(TensorHasher&&) noexcept;
  TensorHasher& operator=(TensorHasher&&) noexcept;

  void add(std::span<const std::byte> part);
  uint64_t added() const noexcept;
  /// Ready for the next tensor then.
  TensorDigest finish(std::string_view type, const Shape& shape);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Throws bad_file naming `file` and tensor where `found` is not what `expected` says of it, if that says anything.
void check_digest(const TensorDigests& expected, std::string_view name, const TensorDigest& found,
                  std::string_view file);

}  // namespace w4q::io
