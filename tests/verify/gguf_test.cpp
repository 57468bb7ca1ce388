// What a GGUF file says of itself: blocks of matrices, sound and damaged, and metadata beside tensors.
#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <vector>

#include "core/float_formats.h"
#include "core/rng.h"
#include "formats/gguf_parts.h"
#include "quantize/gguf.h"
#include "support.h"
#include "verify/gguf/blocks.h"
#include "verify/gguf/metadata.h"

namespace w4q::verify {
namespace {

using formats::GgufForm;
using formats::GgufScales;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t matrix_rows = 96, matrix_width = 1024;
constexpr size_t matrices = 8, damaged = 3;

/// Rounded matrices of one type, whose rows and columns differ in size as those of models do.
class GgufBlocksOf {
 public:
  explicit GgufBlocksOf(GgmlType type, int values = 0) : form_(*formats::find_gguf_form(type)) {
    for (size_t i = 0; i < matrices; ++i) {
      std::vector<float> weight(static_cast<size_t>(matrix_rows * matrix_width));
      for (size_t at = 0; at < weight.size(); ++at) {
        const size_t row = at / matrix_width, col = at % matrix_width;
        const double size = 0.02 * std::exp(0.3 * random_normal(91 + i, row) + 0.2 * random_normal(92 + i, col));
        double value = random_normal(7 + i, at);
        if (values > 0) value = std::clamp(std::round(value), -double(values / 2), double(values / 2));
        weight[at] = static_cast<float>(size * value);
      }
      const TensorView view{"w", DType::f32, {matrix_rows, matrix_width}, bytes_of(weight)};
      const Buffer rounded = quantize::gguf_blocks(view, form_, nullptr);
      bytes_.emplace_back(rounded.bytes().begin(), rounded.bytes().end());
    }
  }

  const GgufForm& form() const { return form_; }
  std::vector<std::byte>& bytes(size_t matrix) { return bytes_[matrix]; }
  size_t block_bytes() const { return static_cast<size_t>(describe(form_.type).block_bytes); }

  /// Changes every block: what it says, and where it stands among all.
  using Change = std::function<void(std::vector<GgufScales>&, std::vector<std::vector<uint8_t>>&)>;
  void change(size_t matrix, const Change& change) {
    std::vector<GgufScales> scales;
    std::vector<std::vector<uint8_t>> levels;
    auto& bytes = bytes_[matrix];
    for (size_t at = 0; at < bytes.size(); at += block_bytes()) {
      levels.emplace_back(static_cast<size_t>(form_.block));
      scales.push_back(formats::read_gguf_block(form_, std::span(bytes).subspan(at, block_bytes()), levels.back()));
    }
    change(scales, levels);
    for (size_t i = 0; i < scales.size(); ++i) {
      formats::store_gguf_block(form_, scales[i], levels[i],
                                std::span(bytes).subspan(i * block_bytes(), block_bytes()));
    }
  }

  std::vector<std::string> faults() const {
    std::vector<GgufSubject> subjects;
    for (size_t i = 0; i < matrices; ++i) {
      subjects.push_back({concat("blk.", i, ".ffn_up.weight"), "ffn_up.weight", &form_,
                          gguf_figures(form_, bytes_[i], matrix_rows, matrix_width)});
    }
    return gguf_block_faults(subjects);
  }

 private:
  const GgufForm& form_;
  std::vector<std::vector<std::byte>> bytes_;
};

template <class Array>
void turn_parts(Array& values, int parts) {
  std::rotate(values.begin(), values.begin() + 1, values.begin() + parts);
}

/// One change of one type that one matrix has, and what is said of it.
struct BlockFault {
  GgmlType type;
  std::string_view what, said;
  GgufBlocksOf::Change change;
};

std::vector<BlockFault> block_faults_of(GgmlType type) {
  const GgufForm& form = *formats::find_gguf_form(type);
  const int parts = form.parts();
  std::vector<BlockFault> faults;
  const auto add = [&](std::string_view what, std::string_view said, GgufBlocksOf::Change change) {
    faults.push_back({type, what, said, std::move(change)});
  };
  const auto each = [](std::function<void(GgufScales&)> change) {
    return [change](auto& scales, auto&) { std::ranges::for_each(scales, change); };
  };
  add("scales of the next block", "do not belong to the",
      [](auto& scales, auto&) { std::ranges::rotate(scales, scales.begin() + 1); });
  if (form.nests()) {
    add("scales of the next part", "scales do not belong", each([parts](auto& s) { turn_parts(s.scales, parts); }));
    add("no scales", "all scales of a block are zero", each([](auto& s) { s.scales.fill(0); }));
    add("units of the next block", form.highest_minimum > 0 ? "minimums do not belong" : "units do not belong",
        [](auto& scales, auto&) {
          const float first = scales.front().d;
          for (size_t i = 0; i + 1 < scales.size(); ++i) scales[i].d = scales[i + 1].d;
          scales.back().d = first;
        });
    add("one unit", "one and the same unit", [](auto& scales, auto&) {
      const float d = scales[scales.size() / 2].d, minimum = scales[scales.size() / 2].d_minimum;
      for (auto& each : scales) each.d = d, each.d_minimum = minimum;
    });
  }
  if (form.highest_minimum > 0) {
    add("minimums of the next part", "minimums do not belong",
        each([parts](auto& s) { turn_parts(s.minimums, parts); }));
    add("no minimums", "to one side of zero", each([](auto& s) { s.minimums.fill(0); }));
    add("scales and minimums exchanged", "minimums do not belong", each([](auto& s) {
          for (size_t j = 0; j < s.scales.size(); ++j) {
            const int16_t scale = s.scales[j];
            s.scales[j] = s.minimums[j], s.minimums[j] = static_cast<uint8_t>(scale);
          }
        }));
    add("a negative unit", "negative units", each([](auto& s) { s.d_minimum = -s.d_minimum; }));
  }
  if (form.unit == formats::GgufUnit::f16) {
    add("units that are no number", "no number", [](auto& scales, auto&) { scales[5].d = NAN; });
  }
  if (form.unit == formats::GgufUnit::f16) {
    // Of parts with scales of their own units may be so small that relations say it first.
    add("units of BF16", form.nests() ? "" : "BF16 in the place of F16", each([](auto& s) {
          for (float* unit : {&s.d, &s.d_minimum}) {
            const auto upper = static_cast<uint16_t>(std::bit_cast<uint32_t>(*unit) >> 16);
            *unit = *unit == 0 ? 0 : f32_from_f16(upper);
          }
        }));
  }
  if (form.unit == formats::GgufUnit::f16) {
    add("units of zero", "over codes that differ", each([](auto& s) { s.d = 0, s.d_minimum = 0; }));
  }
  add("codes that are all one", "were not written", [](auto&, auto& levels) {
    for (auto& block : levels) std::ranges::fill(block, uint8_t{2});
  });
  add("codes of other rows", "do not belong",
      [](auto&, auto& levels) { std::ranges::rotate(levels, levels.begin() + std::ssize(levels) / 3); });
  return faults;
}

constexpr GgmlType asked_types[] = {GgmlType::q4_k, GgmlType::q6_k,   GgmlType::q2_k, GgmlType::q3_k,
                                    GgmlType::q5_k, GgmlType::iq4_xs, GgmlType::q4_0, GgmlType::q5_1,
                                    GgmlType::q8_0, GgmlType::iq4_nl, GgmlType::mxfp4};

TEST(GgufBlockFaults, AreNamedInOneMatrixAndNoneInSoundOnes) {
  for (const GgmlType type : asked_types) {
    const GgufBlocksOf sound(type);
    EXPECT_THAT(sound.faults(), IsEmpty()) << ggml_type_name(type);
    for (const auto& [of, what, said, change] : block_faults_of(type)) {
      SCOPED_TRACE(concat(ggml_type_name(type), ": ", what));
      GgufBlocksOf faulty = sound;
      faulty.change(damaged, change);
      const auto faults = faulty.faults();
      ASSERT_THAT(faults, SizeIs(1));
      EXPECT_THAT(faults[0], HasSubstr("blk.3.ffn_up.weight: "));
      EXPECT_THAT(faults[0], HasSubstr(said));
    }
  }
}

/// Halves of bytes are two parts of Q4_K, and of Q6_K low bits of two parts.
TEST(GgufBlockFaults, HalvesOfBytesExchanged) {
  for (const auto& [type, from, to, said] :
       {std::tuple{GgmlType::q4_k, 16, 144, "scales do not belong"}, {GgmlType::q6_k, 0, 128, "codes are not those"}}) {
    GgufBlocksOf made(type);
    const auto exchange = [&](size_t matrix) {
      auto& bytes = made.bytes(matrix);
      for (size_t at = 0; at < bytes.size(); at += made.block_bytes()) {
        for (size_t i = at + static_cast<size_t>(from); i < at + static_cast<size_t>(to); ++i)
          bytes[i] = bytes[i] << 4 | bytes[i] >> 4;
      }
    };
    exchange(damaged);
    ASSERT_THAT(made.faults(), SizeIs(1));
    EXPECT_THAT(made.faults()[0], HasSubstr(said));
    for (size_t i = 0; i < matrices; ++i) {
      if (i != damaged) exchange(i);
    }
    // Scales that follow from no codes no quantizer leaves; codes that end before the end may be how it rounds.
    EXPECT_THAT(made.faults(), SizeIs(type == GgmlType::q4_k ? matrices : 0));
  }
}

/// Of weights of three values scales follow from codes as they like, in all matrices.
TEST(GgufBlockFaults, WeightsOfFewValuesAreSound) {
  for (const GgmlType type : asked_types) {
    EXPECT_THAT(GgufBlocksOf(type, 2).faults(), IsEmpty()) << ggml_type_name(type);
  }
}

/// A header as a small file of Q4_K_M has it.
class GgufMetadata : public ::testing::Test {
 protected:
  io::GgufHeader header() const {
    io::GgufHeader header;
    header.metadata = {{"general.architecture", std::string("llama")},
                       {"general.file_type", uint32_t{15}},
                       {"general.quantization_version", uint32_t{2}},
                       {"llama.rope.freq_base", 500000.0f},
                       {"llama.rope.dimension_count", uint32_t{64}},
                       {"llama.vocab_size", uint32_t{4}},
                       {"tokenizer.ggml.model", std::string("gpt2")},
                       {"tokenizer.ggml.pre", std::string("llama-bpe")},
                       {"tokenizer.ggml.tokens",
                        io::GgufArray(std::vector<std::string>{"a", "b", "<|begin_of_text|>", "<|end_of_text|>"})},
                       {"tokenizer.ggml.token_type", io::GgufArray(std::vector<int32_t>{1, 1, 3, 3})},
                       {"tokenizer.ggml.merges", io::GgufArray(std::vector<std::string>{"a b"})},
                       {"tokenizer.ggml.bos_token_id", uint32_t{2}},
                       {"tokenizer.ggml.eos_token_id", uint32_t{3}}};
    header.tensors = {{"token_embd.weight", GgmlType::q6_k, {4, 256}},
                      {"blk.0.attn_q.weight", GgmlType::q4_k, {256, 256}},
                      {"blk.0.ffn_down.weight", GgmlType::q6_k, {256, 256}},
                      {"blk.0.ffn_up.weight", GgmlType::q4_k, {512, 256}}};
    return header;
  }

  /// With one key otherwise.
  std::string said(std::string_view key, io::GgufValue value) const {
    auto changed = header();
    std::erase_if(changed.metadata, [&](const auto& entry) { return entry.key == key; });
    changed.metadata.push_back({std::string(key), std::move(value)});
    return join(check_gguf_metadata(changed).faults);
  }
  std::string said_without(std::string_view key) const {
    auto changed = header();
    std::erase_if(changed.metadata, [&](const auto& entry) { return entry.key == key; });
    return join(check_gguf_metadata(changed).faults);
  }
};

TEST_F(GgufMetadata, OfASoundFileHasNoFault) {
  EXPECT_THAT(check_gguf_metadata(header()).faults, IsEmpty());
  EXPECT_EQ(said_without("general.file_type"), "");
  EXPECT_EQ(said_without("llama.vocab_size"), "");
  EXPECT_EQ(said("general.file_type", uint32_t{14}), "");
  EXPECT_EQ(said("general.type", std::string("model")), "");
}

TEST_F(GgufMetadata, FileTypes) {
  EXPECT_THAT(said("general.file_type", uint32_t{1}), HasSubstr("says F16 (1), but no matrix is F16"));
  EXPECT_THAT(said("general.file_type", uint32_t{7}), HasSubstr("no matrix is Q8_0"));
  auto loud = header();
  loud.tensors.push_back({"blk.0.attn_v.weight", GgmlType::q8_0, {16, 256}});
  loud.metadata[1].value = uint32_t{7};
  EXPECT_THAT(join(check_gguf_metadata(loud).faults), HasSubstr("says Q8_0 (7), but weights have 5."));
  // Rows that are no whole blocks of 256.
  auto narrow = header();
  for (auto& tensor : narrow.tensors) tensor.type = GgmlType::q5_0, tensor.shape.back() = 160;
  EXPECT_EQ(join(check_gguf_metadata(narrow).faults), "");
  // A few weights of 16 bits are more than half of the file.
  auto experts = header();
  experts.tensors = {{"blk.0.ffn_up_exps.weight", GgmlType::mxfp4, {8, 32, 256}},
                     {"token_embd.weight", GgmlType::bf16, {128, 256}}};
  experts.metadata[1].value = uint32_t{32};
  EXPECT_EQ(join(check_gguf_metadata(experts).faults), "");
  experts.tensors[1].shape = {32, 256};
  EXPECT_THAT(join(check_gguf_metadata(experts).faults), HasSubstr("says BF16 (32), but weights have"));
  // Routers stay in F32.
  auto routers = header();
  routers.tensors.push_back({"blk.0.ffn_gate_inp.weight", GgmlType::f32, {8, 256}});
  routers.metadata[1].value = uint32_t{0};
  EXPECT_THAT(join(check_gguf_metadata(routers).faults), HasSubstr("no matrix is F32"));
}

TEST_F(GgufMetadata, NumbersAndKinds) {
  EXPECT_THAT(said("llama.rope.freq_base", 2e-6f), HasSubstr("llama.rope.freq_base: is 2"));
  EXPECT_THAT(said("llama.vocab_size", uint32_t{8}), HasSubstr("but token_embd.weight has 4 rows"));
  EXPECT_THAT(said("general.type", std::string("adapter")), HasSubstr("is \"adapter\""));
  EXPECT_THAT(said("general.quantization_version", uint32_t{1}), HasSubstr("of version 2"));
  auto other = header();
  std::erase_if(other.metadata, [](const auto& entry) { return entry.key == "llama.rope.freq_base"; });
  EXPECT_THAT(check_gguf_metadata(other).notes, ::testing::Contains(HasSubstr("readers take 10000")));
}

TEST_F(GgufMetadata, Tokens) {
  EXPECT_THAT(said("tokenizer.ggml.eos_token_id", uint32_t{1}), HasSubstr("is \"b\", a piece of text"));
  EXPECT_THAT(said("tokenizer.ggml.bos_token_id", uint32_t{0}), HasSubstr("is \"a\", a piece of text"));
  EXPECT_THAT(said("tokenizer.ggml.eos_token_id", uint32_t{2}), HasSubstr("which begins a text"));
  EXPECT_THAT(said_without("tokenizer.ggml.eos_token_id"), HasSubstr("readers take token 11"));
  EXPECT_THAT(said_without("tokenizer.ggml.token_type"), HasSubstr("readers take every token for text"));
  EXPECT_THAT(said_without("tokenizer.ggml.pre"), HasSubstr("tokenizer.ggml.pre: is missing"));
  EXPECT_THAT(said_without("tokenizer.ggml.model"), HasSubstr("is missing beside 4 tokens"));
  const auto types = [](std::vector<int32_t> list) { return io::GgufArray(std::move(list)); };
  EXPECT_THAT(said("tokenizer.ggml.token_type", types({1, 1, 1, 1})), HasSubstr("no token is a control token"));
  EXPECT_THAT(said("tokenizer.ggml.token_type", types({3, 1, 1, 3})), HasSubstr("others are control tokens, but not"));
  EXPECT_THAT(said("tokenizer.ggml.token_type", types({3, 3, 3, 3})), HasSubstr("none is text"));
  EXPECT_THAT(said("tokenizer.chat_template", std::string()), HasSubstr("is empty"));
  // Ends of text that programs take for what a user defined.
  EXPECT_EQ(said("tokenizer.ggml.token_type", types({1, 1, 4, 4})), "");
}

}  // namespace
}  // namespace w4q::verify
