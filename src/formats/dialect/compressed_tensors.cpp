#include "formats/dialect/compressed_tensors.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/bit_stream.h"
#include "formats/integer.h"

namespace w4q::formats {
namespace {

constexpr int64_t grain = 64;

bool same_packing(int bits) noexcept { return 32 % bits == 0; }

void unpack(StreamPacking packing, std::span<const uint32_t> words, int bits, std::span<uint8_t> codes) {
  packing == StreamPacking::dense ? dense_unpack(words, bits, codes) : padded_unpack(words, bits, codes);
}

void pack(StreamPacking packing, std::span<const uint8_t> codes, int bits, std::span<uint32_t> words) {
  packing == StreamPacking::dense ? dense_pack(codes, bits, words) : padded_pack(codes, bits, words);
}

/// True when no bit is set that belongs to none of `count` codes.
bool padding_is_zero(StreamPacking packing, std::span<const uint32_t> words, int64_t count, int bits) noexcept {
  if (packing == StreamPacking::dense) return (words.back() & dense_unused_bits(count, bits)) == 0;
  for (size_t word = 0; word < words.size(); ++word) {
    if ((words[word] & padded_unused_bits(static_cast<int64_t>(word), count, bits)) != 0) return false;
  }
  return true;
}

[[noreturn]] void refuse_padding(std::string_view name, std::string_view suffix, std::string_view place,
                                 int64_t index) {
  throw Error(ErrorCode::bad_file, concat(printable(name), suffix, " has padding bits that are not zero"))
      .detail(concat(place, " ", index, ", behind its last code"));
}

void check_shape(std::span<const StoredTensor> tensors, int64_t n, int64_t k, std::string_view name) {
  const StoredTensor& tensor = stored(tensors, ".weight_shape");
  const auto size = [&](size_t i) {
    return tensor.spec.dtype == DType::i32 ? int64_t{tensor.bytes.as<int32_t>()[i]} : tensor.bytes.as<int64_t>()[i];
  };
  const std::array shape{size(0), size(1)};
  if (shape[0] == n && shape[1] == k) return;
  throw Error(ErrorCode::bad_file, concat(printable(name), ".weight_shape is not the layer's"))
      .detail(concat("expected [", n, ", ", k, "], found [", shape[0], ", ", shape[1], "]"));
}

/// Streams that are dense are the canonical codes.
bool is_canonical(StreamPacking packing, int bits) noexcept {
  return packing == StreamPacking::dense || same_packing(bits);
}

void check_codes_padding(StreamPacking packing, const StoredTensor& from, const PackedWeight& to,
                         std::string_view name) {
  const auto words = from.bytes.as<uint32_t>();
  const auto row_words = static_cast<size_t>(stream_words(packing, to.k, to.scheme.bits));
  for (int64_t row = 0; row < to.n; ++row) {
    const auto line = words.subspan(static_cast<size_t>(row) * row_words, row_words);
    if (!padding_is_zero(packing, line, to.k, to.scheme.bits)) refuse_padding(name, from.spec.suffix, "row", row);
  }
}

/// Takes the bytes of `from` where they are the canonical ones.
void decode_codes(StreamPacking packing, StoredTensor& from, PackedWeight& to, std::string_view name) {
  check_codes_padding(packing, from, to, name);
  if (is_canonical(packing, to.scheme.bits)) {
    to.plane(PlaneRole::codes).bytes = std::move(from.bytes);
    return;
  }
  const int bits = to.scheme.bits;
  const auto words = from.bytes.as<uint32_t>();
  const auto row_words = static_cast<size_t>(stream_words(packing, to.k, bits));
  parallel_for(to.n, grain, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(static_cast<size_t>(to.k));
    for (int64_t row = begin; row < end; ++row) {
      unpack(packing, words.subspan(static_cast<size_t>(row) * row_words, row_words), bits, codes);
      integer_write_codes(to, row, codes);
    }
  });
}

StoredTensor encode_codes(StreamPacking packing, const PackedWeight& from, StoredSpec spec) {
  const int bits = from.scheme.bits;
  if (is_canonical(packing, bits)) return {std::move(spec), from.plane(PlaneRole::codes).bytes.clone()};
  StoredTensor to = allocate_stored(std::move(spec));
  const auto words = to.bytes.as<uint32_t>();
  const auto row_words = static_cast<size_t>(to.spec.shape[1]);
  parallel_for(from.n, grain, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(static_cast<size_t>(from.k));
    for (int64_t row = begin; row < end; ++row) {
      integer_read_codes(from, row, codes);
      pack(packing, codes, bits, words.subspan(static_cast<size_t>(row) * row_words, row_words));
    }
  });
  return to;
}

/// Words [words(n), G] of streams down the outputs ↔ zeros U8 [n, G].
void decode_zeros(StreamPacking packing, const StoredTensor& from, PackedWeight& to, std::string_view name) {
  const int bits = to.scheme.bits;
  const auto groups = static_cast<size_t>(integer_groups(to.scheme, to.k));
  const auto words = from.bytes.as<uint32_t>();
  const auto zeros = to.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  std::vector<uint32_t> stream(static_cast<size_t>(stream_words(packing, to.n, bits)));
  std::vector<uint8_t> column(static_cast<size_t>(to.n));
  for (size_t group = 0; group < groups; ++group) {
    for (size_t word = 0; word < stream.size(); ++word) stream[word] = words[word * groups + group];
    if (!padding_is_zero(packing, stream, to.n, bits)) {
      refuse_padding(name, from.spec.suffix, "group", static_cast<int64_t>(group));
    }
    unpack(packing, stream, bits, column);
    for (size_t row = 0; row < column.size(); ++row) zeros[row * groups + group] = column[row];
  }
}

void encode_zeros(StreamPacking packing, const PackedWeight& from, StoredTensor& to) {
  const int bits = from.scheme.bits;
  const auto groups = static_cast<size_t>(integer_groups(from.scheme, from.k));
  const auto zeros = from.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto words = to.bytes.as<uint32_t>();
  std::vector<uint32_t> stream(static_cast<size_t>(stream_words(packing, from.n, bits)));
  std::vector<uint8_t> column(static_cast<size_t>(from.n));
  for (size_t group = 0; group < groups; ++group) {
    for (size_t row = 0; row < column.size(); ++row) column[row] = zeros[row * groups + group];
    pack(packing, column, bits, stream);
    for (size_t word = 0; word < stream.size(); ++word) words[word * groups + group] = stream[word];
  }
}

/// The same bytes; a single scale is given to every row.
void decode_scales(const StoredTensor& from, Plane& to) {
  const auto width = from.bytes.size();
  for (size_t at = 0; at < to.bytes.size(); at += width) std::memcpy(to.bytes.data() + at, from.bytes.data(), width);
}

}  // namespace

int64_t stream_words(StreamPacking packing, int64_t count, int bits) noexcept {
  return packing == StreamPacking::dense ? dense_words(count, bits) : padded_words(count, bits);
}

std::optional<StreamPacking> packing_of_width(int64_t words, int64_t count, int bits, bool* ambiguous) {
  const bool dense = words == dense_words(count, bits);
  const bool padded = words == padded_words(count, bits);
  const bool unclear = dense && padded && !same_packing(bits);
  if (ambiguous != nullptr) *ambiguous = unclear;
  if ((!dense && !padded) || unclear) return std::nullopt;
  return dense ? StreamPacking::dense : StreamPacking::padded;
}

std::vector<StoredSpec> compressed_tensors_specs(const Scheme& scheme, int64_t n, int64_t k, StreamPacking packing) {
  check_dimensions(n, k, "compressed-tensors");
  const int64_t groups = integer_groups(scheme, k);
  std::vector<StoredSpec> specs = {{".weight_packed", DType::i32, {n, stream_words(packing, k, scheme.bits)}},
                                   {".weight_scale", scale_codec(scheme.scale).dtype, {n, groups}},
                                   {".weight_shape", DType::i64, {2}}};
  if (scheme.asymmetric) {
    specs.push_back({".weight_zero_point", DType::i32, {stream_words(packing, n, scheme.bits), groups}});
  }
  if (scheme.act_order) specs.push_back({".weight_g_idx", DType::i32, {k}});
  return specs;
}

PackedWeight decode_compressed_tensors(const Scheme& scheme, int64_t n, int64_t k, StreamPacking packing,
                                       std::vector<StoredTensor> tensors, std::string_view name) {
  check_shape(tensors, n, k, name);
  PackedWeight weight = allocate_integer(scheme, n, k);
  decode_codes(packing, tensors.front(), weight, name);
  decode_scales(stored(tensors, ".weight_scale"), weight.plane(PlaneRole::scales));
  if (scheme.asymmetric) decode_zeros(packing, stored(tensors, ".weight_zero_point"), weight, name);
  if (scheme.act_order) {
    std::ranges::copy(stored(tensors, ".weight_g_idx").bytes.bytes(),
                      weight.plane(PlaneRole::group_index).bytes.data());
  }
  return weight;
}

std::vector<StoredTensor> encode_compressed_tensors(const PackedWeight& canonical, StreamPacking packing) {
  const auto& [scheme, layout, n, k, planes] = canonical;
  std::vector<StoredTensor> tensors;
  for (StoredSpec& spec : compressed_tensors_specs(scheme, n, k, packing)) {
    if (spec.suffix == ".weight_packed") {
      tensors.push_back(encode_codes(packing, canonical, std::move(spec)));
      continue;
    }
    tensors.push_back(allocate_stored(std::move(spec)));
    StoredTensor& tensor = tensors.back();
    if (tensor.spec.suffix == ".weight_scale") {
      std::ranges::copy(canonical.plane(PlaneRole::scales).bytes.bytes(), tensor.bytes.data());
    } else if (tensor.spec.suffix == ".weight_shape") {
      tensor.bytes.as<int64_t>()[0] = n;
      tensor.bytes.as<int64_t>()[1] = k;
    } else if (tensor.spec.suffix == ".weight_zero_point") {
      encode_zeros(packing, canonical, tensor);
    } else {
      std::ranges::copy(canonical.plane(PlaneRole::group_index).bytes.bytes(), tensor.bytes.data());
    }
  }
  return tensors;
}

}  // namespace w4q::formats
