#include "verify/compare.h"

#include <cmath>

#include "packed_model.h"
#include "tokenizer/token_file.h"

namespace w4q::verify {
namespace {

using test::expect_error;

class Compare : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    set_progress_enabled(false);
    folders_ = std::make_unique<Folders>();
    test::quantized_model(folders_->three, 3);
    test::quantized_model(folders_->four, 4);
  }
  static void TearDownTestSuite() { folders_.reset(); }

  struct Folders {
    test::TemporaryFolder three, four;
  };
  static inline std::unique_ptr<Folders> folders_;
  static std::filesystem::path three() { return folders_->three / "q"; }
  static std::filesystem::path four() { return folders_->four / "q"; }

  const model::OpenedModel base = model::open_model(test::bundled_model());
  const model::OpenedModel a = model::open_model(three()), b = model::open_model(four());
};

TEST_F(Compare, PutsWeightsAndOutputsSideBySide) {
  // Inputs of unit power without correlation: outputs' errors are those of the weights.
  const OutputErrorOf plain = [](const std::string&, MatrixView<const float> difference) -> std::optional<double> {
    double sum = 0;
    for (int64_t r = 0; r < difference.rows; ++r) {
      for (int64_t c = 0; c < difference.cols; ++c) sum += double{difference.row(r)[c]} * double{difference.row(r)[c]};
    }
    return sum;
  };
  const auto result = compare_linears(a, b, base, plain);
  ASSERT_EQ(result.linears.size(), 28u);
  for (const auto& linear : result.linears) {
    EXPECT_EQ(linear.a.scheme, "kbit3-b32-e4m4");
    EXPECT_EQ(linear.b.scheme, "kbit4-b32-e4m4");
    EXPECT_GT(linear.b.error.sqnr(), linear.a.error.sqnr() + 4);
    EXPECT_NEAR(*linear.a.output, linear.a.error.noise, 1e-6 * linear.a.error.noise);
    EXPECT_NEAR(*linear.power, linear.a.error.signal, 1e-6 * linear.a.error.signal);
  }
  EXPECT_NEAR(result.a.bits_per_weight, 3.252, 1e-3);
  EXPECT_NEAR(result.b.bits_per_weight, 4.255, 1e-3);
  EXPECT_LT(result.a.bytes, result.b.bytes);
  EXPECT_NE(to_text(result).find("output dB"), std::string::npos);
}

TEST_F(Compare, ACheckpointEqualsItselfAndMayBeTheBase) {
  const auto same = compare_linears(a, a, base, {});
  for (const auto& linear : same.linears) EXPECT_EQ(linear.a.error.noise, linear.b.error.noise);
  const auto whole = compare_linears(base, a, base, {});
  ASSERT_EQ(whole.linears.size(), 28u);
  for (const auto& linear : whole.linears) {
    EXPECT_EQ(linear.a.scheme, "BF16");
    EXPECT_EQ(linear.a.error.noise, 0);
  }
  EXPECT_NEAR(whole.a.bits_per_weight, 16, 1e-9);
}

TEST_F(Compare, DecodedWeightsCountAsTheyAreStored) {
  test::TemporaryFolder folder;
  std::filesystem::copy(test::bundled_model(), folder / "decoded", std::filesystem::copy_options::recursive);
  // One bit of every byte of a projection, as a decoded weight differs from its original.
  test::rewrite(folder / "decoded", [](const io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
    if (tensor.name.ends_with("up_proj.weight")) {
      for (size_t i = 0; i < bytes.size(); i += 2) bytes[i] ^= std::byte{1};
    }
    return true;
  });
  const auto decoded = model::open_model(folder / "decoded");
  const auto result = compare_linears(decoded, base, base, {});
  ASSERT_EQ(result.linears.size(), 4u);
  EXPECT_NEAR(result.a.bits_per_weight, 16, 1e-9);
  EXPECT_TRUE(std::isfinite(result.a.error.sqnr()));
  const auto none = to_text(compare_linears(base, base, base, {}));
  EXPECT_NE(none.find("every weight is the base's"), std::string::npos) << none;
  EXPECT_EQ(none.find("0.000 bits"), std::string::npos) << none;
}

TEST_F(Compare, PredictionsArePaired) {
  const auto first = model::Model::open(three()), second = model::Model::open(four());
  const auto whole = model::Model::open(test::bundled_model());
  const auto ids = tokenizer::read_ids(test::bundled_model() / "own/selfgen.ids.u16", whole.config().vocab_size);
  const PerplexityOptions options{.context = 128, .max_windows = 6};
  const auto result = compare_predictions(first, second, whole, ids, options);
  EXPECT_EQ(verdict(result), -1);
  EXPECT_NEAR(result.kl_difference.mean, result.b.base->kl.mean - result.a.base->kl.mean, 1e-12);
  // What both models find hard drops out of the difference.
  EXPECT_LT(result.nll_difference.error, result.a.nll.error);
  // All in one pass, which decodes the base once, and each as by itself.
  EXPECT_EQ(result.a.seconds, result.b.seconds);
  EXPECT_EQ(result.a.base->kl.mean, measure_perplexity(first, &whole, ids, options).base->kl.mean);
  EXPECT_EQ(result.b.base->kl.mean, measure_perplexity(second, &whole, ids, options).base->kl.mean);
  const auto same = compare_predictions(first, first, whole, ids, options);
  EXPECT_EQ(verdict(same), 0);
  EXPECT_EQ(same.kl_difference.mean, 0);
  EXPECT_EQ(same.kl_difference.error, 0);
}

TEST_F(Compare, WhoPredictsNothingIsWorse) {
  Comparison::Predictions predictions;
  predictions.a.nll.mean = 3;
  predictions.b.nll.mean = predictions.kl_difference.mean = predictions.kl_difference.error = NAN;
  EXPECT_EQ(verdict(predictions), 1);
  std::swap(predictions.a.nll, predictions.b.nll);
  EXPECT_EQ(verdict(predictions), -1);
}

TEST_F(Compare, AnotherModelIsRefused) {
  model::OpenedModel other = model::open_model(test::bundled_model());
  other.config.layers = 3;
  expect_error(ErrorCode::mismatch, {"expected", "4 layers"}, [&] { compare_linears(other, a, base, {}); });
}

}  // namespace
}  // namespace w4q::verify
