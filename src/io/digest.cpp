#include "io/digest.h"

#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>  // the same digests, by the widest instructions that the machine has
#endif

#include <algorithm>
#include <charconv>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/parallel.h"
#include "core/text.h"
#include "io/mapped_file.h"
#include "io/system.h"

namespace w4q::io {
namespace {

constexpr size_t digits = 32;

Digest from(const XXH128_hash_t& hash) noexcept { return {hash.high64, hash.low64}; }

void append(std::string& text, const Digest& digest) {
  for (const uint64_t word : {digest.high, digest.low}) {
    for (int shift = 56; shift >= 0; shift -= 8) text.push_back(static_cast<char>(word >> shift & 0xff));
  }
}

std::string head(std::string_view type, const Shape& shape) { return concat(type, " ", shape_text(shape)); }

/// `pieces` as append() makes them.
TensorDigest whole(std::string_view type, const Shape& shape, const std::string& pieces) {
  return {std::string(type), shape, digest_of(concat(head(type, shape), "\n", pieces))};
}

/// Every piece by itself, on all threads.
std::string hash_pieces(std::span<const std::byte> bytes) {
  std::vector<Digest> pieces((bytes.size() + digest_piece - 1) / digest_piece);
  const auto count = static_cast<int64_t>(pieces.size());
  // A few pieces take less time than waking the other threads.
  parallel_for(count, count < 8 ? 8 : 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const auto rest = bytes.subspan(i * digest_piece);
      pieces[i] = digest_of(rest.first(std::min(rest.size(), digest_piece)));
    }
  });
  std::string all;
  for (const Digest& piece : pieces) append(all, piece);
  return all;
}

std::optional<uint64_t> parse_word(std::string_view text) noexcept {
  uint64_t word = 0;
  for (const char c : text) {
    const size_t digit = std::string_view("0123456789abcdef").find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    word = word << 4 | digit;
  }
  return word;
}

/// The inverse of shape_text.
std::optional<Shape> parse_shape(std::string_view text) {
  if (text.size() < 2 || text.front() != '[' || text.back() != ']') return std::nullopt;
  Shape shape;
  for (std::string_view rest = text.substr(1, text.size() - 2); !rest.empty();) {
    const auto part = rest.substr(0, rest.find(", "));
    int64_t size = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), size);
    if (error != std::errc() || end != part.data() + part.size() || size < 0) return std::nullopt;
    shape.push_back(size);
    rest.remove_prefix(std::min(rest.size(), part.size() + 2));
  }
  return shape_text(shape) == text ? std::optional(shape) : std::nullopt;
}

}  // namespace

std::string Digest::text() const {
  std::string result;
  for (const uint64_t word : {high, low}) {
    for (int shift = 60; shift >= 0; shift -= 4) result.push_back("0123456789abcdef"[word >> shift & 15]);
  }
  return result;
}

std::optional<Digest> parse_digest(std::string_view text) noexcept {
  if (text.size() != digits) return std::nullopt;
  const auto high = parse_word(text.substr(0, digits / 2)), low = parse_word(text.substr(digits / 2));
  if (!high || !low) return std::nullopt;
  return Digest{*high, *low};
}

Digest digest_of(std::span<const std::byte> bytes) noexcept { return from(XXH3_128bits(bytes.data(), bytes.size())); }

Digest digest_of(std::string_view text) noexcept { return digest_of(std::as_bytes(std::span(text))); }

Digest digest_of_file(const std::filesystem::path& path) { return digest_of(MappedFile(path).bytes()); }

std::string TensorDigest::text() const { return concat(head(type, shape), " ", digest.text()); }

std::optional<TensorDigest> parse_tensor_digest(std::string_view text) {
  const size_t space = text.find(' ');
  if (space == 0 || space == std::string_view::npos || text.size() < space + 2 + digits) return std::nullopt;
  const size_t last = text.size() - digits - 1;
  if (last <= space || text[last] != ' ') return std::nullopt;
  const auto shape = parse_shape(text.substr(space + 1, last - space - 1));
  const auto digest = parse_digest(text.substr(last + 1));
  if (!shape || !digest) return std::nullopt;
  return TensorDigest{std::string(text.substr(0, space)), *shape, *digest};
}

TensorDigest hash_tensor(std::string_view type, const Shape& shape, std::span<const std::byte> bytes) {
  return whole(type, shape, hash_pieces(bytes));
}

TensorDigest hash_tensor(const TensorView& tensor) {
  return hash_tensor(dtype_name(tensor.dtype), tensor.shape, tensor.bytes);
}

struct TensorHasher::Impl {
  struct Free {
    void operator()(XXH3_state_t* state) const noexcept { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state{XXH3_createState()};
  std::string pieces;
  size_t filled = 0;  ///< bytes of the piece at hand
  uint64_t added = 0;

  void close() {
    append(pieces, from(XXH3_128bits_digest(state.get())));
    XXH3_128bits_reset(state.get());
    filled = 0;
  }
};

TensorHasher::TensorHasher() : impl_(std::make_unique<Impl>()) {
  if (impl_->state == nullptr) throw std::bad_alloc();
  XXH3_128bits_reset(impl_->state.get());
}
TensorHasher::~TensorHasher() = default;
TensorHasher::TensorHasher(TensorHasher&&) noexcept = default;
TensorHasher& TensorHasher::operator=(TensorHasher&&) noexcept = default;

void TensorHasher::add(std::span<const std::byte> part) {
  impl_->added += part.size();
  while (!part.empty()) {
    if (impl_->filled == 0 && part.size() >= digest_piece) {
      const auto pieces = part.first(part.size() / digest_piece * digest_piece);
      impl_->pieces += hash_pieces(pieces);
      part = part.subspan(pieces.size());
      continue;
    }
    const auto bytes = part.first(std::min(part.size(), digest_piece - impl_->filled));
    XXH3_128bits_update(impl_->state.get(), bytes.data(), bytes.size());
    impl_->filled += bytes.size();
    if (impl_->filled == digest_piece) impl_->close();
    part = part.subspan(bytes.size());
  }
}

uint64_t TensorHasher::added() const noexcept { return impl_->added; }

TensorDigest TensorHasher::finish(std::string_view type, const Shape& shape) {
  if (impl_->filled > 0) impl_->close();
  impl_->added = 0;
  return whole(type, shape, std::exchange(impl_->pieces, {}));
}

void check_digest(const TensorDigests& expected, std::string_view name, const TensorDigest& found,
                  std::string_view file) {
  const auto written = expected.find(name);
  if (written == expected.end() || written->second == found) return;
  throw Error(ErrorCode::bad_file, concat(file, ": tensor \"", shown(name), "\" is not what was written"))
      .detail(concat("expected ", written->second.text()))
      .detail(concat("got      ", found.text()))
      .hint("w4q hash --check names all that differs; restore the files, or accept them with --write --overwrite");
}

}  // namespace w4q::io
