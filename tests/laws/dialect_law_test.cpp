// The laws of dialects: what a row writes it reads again, and every way from one row to another and back gives the same
// tensors, byte by byte. All rows of the registry that hold integers take part.
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "checkpoint/dialect/dialect.h"
#include "dialect_samples.h"
#include "formats/integer_recast.h"

namespace w4q::test {
namespace {

using formats::PackedWeight;
using formats::Scheme;
using formats::StoredTensor;

/// A weight as one dialect holds it.
struct Held {
  const checkpoint::DialectRow* row;
  checkpoint::PackedLinearInfo info;
  std::vector<StoredTensor> tensors;
};

/// Tensors of `weight` in a dialect; nothing where it cannot be held without loss.
std::optional<Held> hold(const checkpoint::DialectRow& row, const PackedWeight& weight) {
  const checkpoint::PackedLinearInfo info{
      "w", weight.n, weight.k, DType::f16, {{weight.scheme, std::string(formats::canonical_layout)}}};
  const checkpoint::DialectFit fit = row.fit(info);
  if (!fit.scheme || !fit.loses.empty() || fit.scheme->family != formats::SchemeFamily::integer) return std::nullopt;
  if (!formats::integer_recast_loss(weight, *fit.scheme).empty()) return std::nullopt;
  const PackedWeight recast = formats::integer_recast(weight, *fit.scheme, "w");
  if (row.refuses != nullptr && !row.refuses(recast).empty()) return std::nullopt;
  return Held{&row, dialect_info(row, *fit.scheme, weight.n, weight.k), row.encode(recast)};
}

PackedWeight read(const Held& held) { return held.row->decode(held.info, clone(held.tensors)); }

bool equal(const std::vector<StoredTensor>& a, const std::vector<StoredTensor>& b) {
  return std::ranges::equal(a, b, [](const StoredTensor& x, const StoredTensor& y) {
    return x.spec == y.spec && std::ranges::equal(x.bytes.bytes(), y.bytes.bytes());
  });
}

/// The same weight as readers say it: without zero points that are all symmetric and a group_index that is in order.
PackedWeight settle(PackedWeight weight) {
  for (bool Scheme::*flag : {&Scheme::asymmetric, &Scheme::act_order}) {
    Scheme plain = weight.scheme;
    plain.*flag = false;
    if (formats::integer_recast_loss(weight, plain).empty()) weight = formats::integer_recast(weight, plain, "w");
  }
  return weight;
}

/// From a dialect to another and back. Where both store scales of one type the file is the same; a narrower type holds
/// the same values.
void expect_round_trip(const Held& from, const checkpoint::DialectRow& row) {
  SCOPED_TRACE(std::string(from.row->name) + " → " + std::string(row.name));
  const auto there = hold(row, settle(read(from)));
  ASSERT_TRUE(there.has_value());
  const auto back = hold(*from.row, settle(read(*there)));
  ASSERT_TRUE(back.has_value());
  if (there->info.passes[0].scheme.scale == from.info.passes[0].scheme.scale) {
    EXPECT_TRUE(equal(back->tensors, from.tensors));
  } else {
    EXPECT_TRUE(formats::integer_compare(read(from), read(*back)).complete());
  }
}

/// All edges between the dialects that hold `weight`; the number of weights that went over them, there and back.
int64_t walk_edges(const PackedWeight& sample) {
  const PackedWeight weight = settle(sample.clone());
  std::vector<Held> all;
  for (const auto& row : checkpoint::dialect_registry()) {
    if (auto held = hold(row, weight)) all.push_back(std::move(*held));
  }
  int64_t weights = 0;
  for (const Held& from : all) {
    EXPECT_TRUE(formats::integer_compare(weight, read(from)).complete()) << from.row->name;
    for (const Held& to : all) {
      expect_round_trip(from, *to.row);
      weights += weight.n * weight.k;
    }
  }
  return weights;
}

template <size_t count>
int64_t pick(const int64_t (&values)[count], uint64_t seed, uint64_t draw) {
  return values[random_bits(seed, draw) % count];
}

/// A scheme of any width, group, scale and flag, and a size: often one that whole tiles have, else any.
struct Sample {
  Scheme scheme;
  int64_t n, k;
};

Sample random_sample(uint64_t seed) {
  const auto draw = [&](uint64_t index, uint64_t bound) {
    return static_cast<int64_t>(random_bits(seed, index) % bound);
  };
  constexpr int64_t widths[] = {2, 3, 4, 4, 4, 4, 8}, groups[] = {formats::whole_row, 32, 64, 128, 128, 48};
  constexpr formats::ScaleType scales[] = {formats::ScaleType::f16, formats::ScaleType::f16, formats::ScaleType::bf16,
                                           formats::ScaleType::f32};
  Sample sample{{formats::SchemeFamily::integer, static_cast<int>(pick(widths, seed, 0)),
                 static_cast<int>(pick(groups, seed, 1)), scales[draw(2, 4)], draw(3, 2) == 0, draw(4, 4) == 0},
                1 + draw(5, 300),
                1 + draw(6, 513)};
  if (sample.scheme.block == formats::whole_row) sample.scheme.act_order = false;
  if (draw(7, 4) != 0) {
    constexpr int64_t outputs[] = {8, 32, 64, 96, 128, 256}, inputs[] = {32, 64, 96, 128, 256, 384, 512};
    sample.n = pick(outputs, seed, 8);
    sample.k = pick(inputs, seed, 9);
  }
  return sample;
}

/// Weights that go over the edges: 10⁸, or as many as the environment variable W4Q_LAW_WEIGHTS says (scripts/test
/// --long: 10⁹).
int64_t wanted_weights() {
  const char* text = std::getenv("W4Q_LAW_WEIGHTS");
  return text == nullptr ? 100'000'000 : std::max<int64_t>(1, std::atoll(text));
}

TEST(DialectLaw, EveryEdgeGivesTheSameTensors) {
  const int64_t wanted = wanted_weights();
  int64_t weights = 0;
  uint64_t seed = 1;
  for (; weights < wanted && !::testing::Test::HasFailure(); ++seed) {
    const auto [scheme, n, k] = random_sample(seed);
    SCOPED_TRACE(formats::to_string(scheme) + " " + std::to_string(n) + " × " + std::to_string(k));
    weights += walk_edges(sample_integer(scheme, n, k, seed));
  }
  EXPECT_GE(weights, wanted);
  RecordProperty("weights", std::to_string(weights));
  RecordProperty("samples", std::to_string(seed));
}

/// Zero points at both ends, and a weight whose zero points are the symmetric one although they are stored.
TEST(DialectLaw, ZeroPointsAtTheEnds) {
  for (const int bits : {2, 3, 4, 8}) {
    for (const int zero : {0, 1, 1 << (bits - 1), (1 << bits) - 1}) {
      const Scheme scheme{formats::SchemeFamily::integer, bits, 32, formats::ScaleType::f16, true, false};
      PackedWeight weight = sample_integer(scheme, 64, 128, 7);
      std::ranges::fill(weight.plane(formats::PlaneRole::zeros).bytes.as<uint8_t>(), static_cast<uint8_t>(zero));
      SCOPED_TRACE(formats::to_string(scheme) + " zero " + std::to_string(zero));
      EXPECT_GT(walk_edges(weight), 0);
    }
  }
}

/// fit() and tensors() agree with what encode() gives.
TEST(DialectLaw, TensorsAreAsPlanned) {
  for (uint64_t seed = 1000; seed < 1200; ++seed) {
    const auto [scheme, n, k] = random_sample(seed);
    const PackedWeight weight = sample_integer(scheme, n, k, seed);
    for (const auto& row : checkpoint::dialect_registry()) {
      const auto held = hold(row, weight);
      if (!held) continue;
      ASSERT_EQ(held->tensors.size(), held->info.stored.size()) << row.name;
      for (size_t i = 0; i < held->tensors.size(); ++i) {
        const auto& [spec, bytes] = held->tensors[i];
        EXPECT_EQ("w" + spec.suffix, held->info.stored[i].name);
        EXPECT_EQ(spec.dtype, held->info.stored[i].dtype);
        EXPECT_EQ(spec.shape, held->info.stored[i].shape);
        EXPECT_EQ(static_cast<int64_t>(bytes.size()), held->info.stored[i].size());
      }
    }
  }
}

}  // namespace
}  // namespace w4q::test
