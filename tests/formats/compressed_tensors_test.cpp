// compressed-tensors' words against those of the peer's own packers, old and new, and there and back for any shape.
#include "formats/dialect/compressed_tensors.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/rng.h"
#include "formats/bit_stream.h"
#include "formats/integer.h"
#include "io/checkpoint.h"
#include "support.h"

namespace w4q::formats {
namespace {

std::vector<StoredTensor> clone(const std::vector<StoredTensor>& tensors) {
  std::vector<StoredTensor> copy;
  for (const auto& tensor : tensors) copy.push_back({tensor.spec, tensor.bytes.clone()});
  return copy;
}

struct Congruential {
  explicit Congruential(uint64_t seed_) : seed(seed_) {}
  uint64_t bits() noexcept { return random_bits(seed, next++); }

  uint64_t seed;
  uint64_t next = 0;
};

/// The tensors of a golden file that belong to one packing, under the dialect's suffixes.
std::vector<StoredTensor> golden_tensors(const io::Checkpoint& file, const Scheme& scheme, StreamPacking packing) {
  const bool old = packing == StreamPacking::padded;
  const auto shape = file.load("weight_shape");
  int64_t size[2];
  std::ranges::copy(shape->bytes, reinterpret_cast<std::byte*>(size));
  std::vector<StoredTensor> tensors;
  for (StoredSpec& spec : compressed_tensors_specs(scheme, size[0], size[1], packing)) {
    std::string name = spec.suffix.substr(1);
    if (old && (name == "weight_packed" || name == "weight_zero_point")) name += "_legacy";
    StoredTensor tensor = allocate_stored(std::move(spec));
    if (file.contains(name)) {
      const auto loaded = file.load(name);
      EXPECT_EQ(loaded->shape, tensor.spec.shape) << name;
      EXPECT_EQ(loaded->dtype, tensor.spec.dtype) << name;
      tensor.bytes = Buffer::copy_of(loaded->bytes);
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

void expect_same(const std::vector<StoredTensor>& ours, const std::vector<StoredTensor>& theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_EQ(ours[i].spec, theirs[i].spec);
    EXPECT_TRUE(std::ranges::equal(ours[i].bytes.bytes(), theirs[i].bytes.bytes())) << ours[i].spec.suffix;
  }
}

void expect_bytes(std::span<const uint8_t> values, const io::Checkpoint& file, std::string_view tensor) {
  const auto loaded = file.load(tensor);
  EXPECT_TRUE(std::ranges::equal(std::as_bytes(values), loaded->bytes)) << tensor;
}

void expect_golden(const std::string& name, const std::string& scheme_name) {
  const auto file = io::Checkpoint::open(test::testdata() / "golden" / (name + ".safetensors"));
  const Scheme scheme = parse_scheme(scheme_name);
  const Shape& shape = file.at("in.codes").shape;
  for (const StreamPacking packing : {StreamPacking::dense, StreamPacking::padded}) {
    const auto theirs = golden_tensors(file, scheme, packing);
    const PackedWeight weight = decode_compressed_tensors(scheme, shape[0], shape[1], packing, clone(theirs), "w");
    integer_validate(weight, "w");
    std::vector<uint8_t> codes(static_cast<size_t>(shape[0] * shape[1]));
    for (int64_t row = 0; row < shape[0]; ++row) {
      integer_read_codes(weight, row,
                         std::span(codes).subspan(static_cast<size_t>(row * shape[1]), static_cast<size_t>(shape[1])));
    }
    expect_bytes(codes, file, "in.codes");
    if (scheme.asymmetric) {
      expect_bytes(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>(), file, "in.zero_point_plus_offset");
    }
    expect_same(encode_compressed_tensors(weight, packing), theirs);
  }
}

TEST(CompressedTensors, GoldenWordsOfBothPackings) {
  for (const int bits : {2, 3, 4, 5, 8}) {
    const std::string width = std::to_string(bits);
    expect_golden("ct_pack_" + width + "bit", "int" + width + "-g32-bf16-asym");
  }
  expect_golden("ct_pack_3bit_ragged", "int3-row-bf16");
}

/// A weight of random planes.
PackedWeight random_weight(const Scheme& scheme, int64_t n, int64_t k, Congruential& rng) {
  PackedWeight weight = allocate_integer(scheme, n, k);
  std::vector<uint8_t> codes(static_cast<size_t>(k));
  const auto top = (uint64_t{1} << scheme.bits) - 1;
  const auto code = [&] { return static_cast<uint8_t>(rng.bits() & top); };
  for (int64_t row = 0; row < n; ++row) {
    std::ranges::generate(codes, code);
    integer_write_codes(weight, row, codes);
  }
  for (std::byte& byte : weight.plane(PlaneRole::scales).bytes.bytes()) byte = std::byte{0x3C};
  if (scheme.asymmetric) std::ranges::generate(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>(), code);
  return weight;
}

TEST(CompressedTensors, EveryWidthAndShapeReturns) {
  Congruential rng(7);
  for (int round = 0; round < 200; ++round) {
    const int bits = 2 + static_cast<int>(rng.bits() % 7);
    const auto n = static_cast<int64_t>(1 + rng.bits() % 40);
    const auto k = static_cast<int64_t>(1 + rng.bits() % 200);
    const int group = rng.bits() % 3 == 0 ? whole_row : static_cast<int>(1 + rng.bits() % 64);
    const Scheme scheme{SchemeFamily::integer,
                        bits,
                        group,
                        ScaleType::f16,
                        rng.bits() % 2 == 0,
                        group != whole_row && rng.bits() % 2 == 0};
    const PackedWeight weight = random_weight(scheme, n, k, rng);
    for (const StreamPacking packing : {StreamPacking::dense, StreamPacking::padded}) {
      const auto tensors = encode_compressed_tensors(weight, packing);
      EXPECT_TRUE(bytes_equal(decode_compressed_tensors(scheme, n, k, packing, clone(tensors), "w"), weight))
          << to_string(scheme) << " " << n << " " << k;
    }
  }
}

TEST(CompressedTensors, TheWidthTellsThePacking) {
  EXPECT_EQ(packing_of_width(12, 128, 3), StreamPacking::dense);
  EXPECT_EQ(packing_of_width(13, 128, 3), StreamPacking::padded);
  EXPECT_EQ(packing_of_width(16, 128, 4), StreamPacking::dense);
  bool ambiguous = false;
  EXPECT_EQ(packing_of_width(10, 100, 3, &ambiguous), std::nullopt);
  EXPECT_TRUE(ambiguous);
  EXPECT_EQ(packing_of_width(11, 100, 3, &ambiguous), std::nullopt);
  EXPECT_FALSE(ambiguous);
  // Inputs by the block of 32 leave no doubt.
  for (const int bits : {3, 5, 6, 7}) {
    for (int64_t k = 32; k < 4096; k += 32) EXPECT_NE(dense_words(k, bits), padded_words(k, bits)) << bits << " " << k;
  }
}

TEST(CompressedTensors, RefusesPaddingAndAnotherShape) {
  Congruential rng(8);
  const Scheme scheme = parse_scheme("int3-g32-f16-asym");
  const PackedWeight weight = random_weight(scheme, 10, 50, rng);
  const auto read = [&](std::string_view suffix, size_t byte, std::string_view part, std::string_view place) {
    auto tensors = encode_compressed_tensors(weight);
    const auto found = std::ranges::find_if(tensors, [&](const auto& tensor) { return tensor.spec.suffix == suffix; });
    found->bytes.data()[byte] ^= std::byte{0x80};
    test::expect_error(ErrorCode::bad_file, {suffix, part, place},
                       [&] { decode_compressed_tensors(scheme, 10, 50, StreamPacking::dense, clone(tensors), "w"); });
  };
  read(".weight_packed", 5 * 4 * 3 - 1, "padding", "row 2");  // 150 bits of 160
  read(".weight_zero_point", 7, "padding", "group 1");        // 30 bits of 32
  read(".weight_shape", 0, "expected [10, 50], found [138, 50]", "w");
}

}  // namespace
}  // namespace w4q::formats
