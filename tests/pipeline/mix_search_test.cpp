// Mixes of widths, measured: against decoding the packed model, against one another, and against what is at hand.
#include "pipeline/mix_search.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>

#include "core/parallel.h"
#include "core/progress.h"
#include "core/rng.h"
#include "formats/gguf_blocks.h"
#include "formats/gguf_forms.h"
#include "io/checkpoint_writer.h"
#include "kernels/sampling/logits.h"
#include "model/decoder.h"
#include "model/opened.h"
#include "pipeline/quantize_model.h"
#include "quantize/gguf.h"
#include "small_model.h"
#include "support.h"

namespace w4q::pipeline {
namespace {

constexpr int64_t length = 32;

/// Linears of two layers at 2, 3 and 4 bits, with every step that leaves scales or rotations in a weight.
class MixSearch : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    set_progress_enabled(false);
    set_threads(1);  // little work at a time
    state_ = std::make_unique<State>();
    auto& s = *state_;
    s.windows = read_windows(s.model, text());
    Calibration calibration(s.model, s.windows, {});
    for (int64_t layer = 0; layer < 2; ++layer) {
      const auto statistics = calibration.next();
      for (size_t choice = 0; choice < 3; ++choice) {
        const SchemeOf scheme_of = [&](std::string_view) { return scheme(choice); };
        s.store.add(layer, choice, quantize_layer(s.model, layer, statistics, {scheme_of, options()}));
      }
      for (const auto& linear : model::layer_plan(s.model.config, layer).linears()) {
        s.problem.items.push_back({linear.name, layer, 0, 3, true});
        const int64_t weights = linear.n * linear.k;
        s.problem.bytes.push_back({weights * 9 / 32, weights * 13 / 32, weights * 17 / 32, weights * 2});
        s.problem.tables.push_back({16, 32, 64, 0});
      }
    }
  }
  static void TearDownTestSuite() {
    state_.reset();
    set_threads(0);
  }

  static std::filesystem::path folder() { return test::testdata() / "w4q-llama-tiny"; }
  static CalibrationText text() {
    return {.text = {}, .ids = folder() / "own/selfgen.ids.u16", .samples = 2, .length = length};
  }
  static formats::Scheme scheme(size_t choice) {
    return formats::parse_scheme(concat("kbit", choice + 2, "-b32-e4m4"));
  }
  static quantize::QuantizeOptions options() {
    quantize::QuantizeOptions result;
    result.steps = {{quantize::StepKind::awq}, {quantize::StepKind::rotate, 64}};
    return result;
  }
  static const MixProblem& problem() { return state_->problem; }
  static MixMeter meter() { return {state_->model, state_->windows, problem().items, state_->store}; }
  static Mix uniform(size_t choice) { return Mix(problem().items.size(), choice); }

  struct State {
    test::TemporaryFolder folder, stored;
    model::OpenedModel model = model::open_plain_model(MixSearch::folder(), {});
    CalibrationWindows windows;
    WidthStore store{stored.path()};
    MixProblem problem;
  };
  static inline std::unique_ptr<State> state_;
};

TEST_F(MixSearch, MeasuresWhatThePackedModelPredicts) {
  QuantizeRequest request;
  request.model = folder();
  request.output = state_->folder / "packed";
  request.scheme = scheme(1);
  request.options = options();
  request.keep = {"*.layers.[23].*"};
  request.calibrated.emplace();
  request.calibrated->text = text();
  quantize_model(request);
  const auto base = model::Model::open(folder()), packed = model::Model::open(request.output);
  const auto vocabulary = base.config().vocab_size;
  double sum = 0;
  for (int64_t w = 0; w < state_->windows.samples; ++w) {
    std::vector<float> logits[2];
    for (const auto* model : {&base, &packed}) {
      model::Decoder decoder(*model, length);
      auto& found = logits[model == &packed ? 1 : 0];
      found.resize(static_cast<size_t>(length * vocabulary));
      decoder.logits(decoder.forward(state_->windows.window(w)), {found.data(), length, vocabulary});
    }
    const auto width = static_cast<size_t>(vocabulary);
    for (size_t r = 0; r < length; ++r) {
      sum += kernels::compare_logits(std::span(logits[0]).subspan(r * width, width),
                                     std::span(logits[1]).subspan(r * width, width), 0)
                 .kl;
    }
  }
  const double expected = sum / static_cast<double>(state_->windows.samples * length);
  // Scales that are folded into norms are rounded to their type there, and not here.
  EXPECT_NEAR(meter().measure(uniform(1)), expected, 0.01 * expected);
}

TEST_F(MixSearch, GoesOnFromWhatDidNotChange) {
  auto one = meter();
  one.measure(uniform(1));
  one.accept();
  Mix mix = uniform(1);
  mix[9] = 0;
  const double found = one.measure(mix);
  EXPECT_EQ(found, meter().measure(mix));
  EXPECT_EQ(one.measure(uniform(1)), meter().measure(uniform(1)));
  one.measure(mix);
  one.accept();
  mix[2] = 3;
  EXPECT_EQ(one.measure(mix), meter().measure(mix));
  EXPECT_EQ(one.measure(uniform(3)), 0);
}

TEST_F(MixSearch, EffectsAreThoseOfMixes) {
  auto one = meter();
  const double base = one.measure(uniform(2));
  one.accept();
  const auto effects = one.effects();
  ASSERT_EQ(effects.size(), 14u);
  for (const size_t item : {0u, 6u, 8u, 13u}) {
    ASSERT_EQ(effects[item].size(), 4u);
    EXPECT_EQ(effects[item][2], base);
    for (const size_t choice : {0u, 1u, 3u}) {
      Mix mix = uniform(2);
      mix[item] = choice;
      EXPECT_EQ(effects[item][choice], one.measure(mix)) << item << " at " << choice;
    }
  }
}

/// A model whose last layers read the keys and values of earlier ones, and whose layers have embeddings of their own.
class MixOfLayersThatShare : public ::testing::Test {
 protected:
  MixOfLayersThatShare() {
    set_progress_enabled(false);
    test::write_small_model(model::architecture_row("gemma4_text"), folder_ / "m");
    model_.emplace(model::open_plain_model(folder_ / "m", {}));
    windows_.samples = 3, windows_.length = 24;
    for (int i = 0; i < 72; ++i) windows_.ids.push_back((i * 37 + i * i * 11 + 5) % 160);
    for (int64_t layer = 0; layer < model_->config.layers; ++layer) {
      for (const auto& linear : model::layer_plan(model_->config, layer).linears()) {
        items_.push_back({linear.name, layer, 0, 1, true});
        const auto loaded = model_->folder.tensors.load(linear.name + ".weight");
        const auto& form = *formats::find_gguf_form(type);
        std::vector<StoredLinear> stored(1);
        stored[0] = {linear.name, {linear.n, linear.k}, {}};
        stored[0].choices.push_back({type, quantize::gguf_blocks(loaded.view(), form, nullptr)});
        auto& values = decoded_[linear.name + ".weight"];
        values.resize(static_cast<size_t>(linear.n * linear.k));
        formats::gguf_decode(type, stored[0].choices[0].bytes.bytes(), values);
        store_.add(stored);
      }
    }
  }

  MixMeter meter() { return {*model_, windows_, items_, store_}; }

  /// The model with what all its linears stand for as blocks, in F32.
  void write_packed() const {
    const auto& tensors = model_->folder.tensors;
    std::vector<io::PlannedTensor> planned;
    for (const auto& [name, info] : tensors.tensors()) {
      planned.push_back({name, decoded_.contains(name) ? DType::f32 : info.dtype, info.shape});
    }
    std::filesystem::create_directory(folder_ / "packed");
    std::filesystem::copy_file(folder_ / "m" / "config.json", folder_ / "packed" / "config.json");
    io::CheckpointWriter writer(folder_ / "packed", planned, {});
    for (const auto& [name, info] : tensors.tensors()) {
      const auto found = decoded_.find(name);
      if (found == decoded_.end()) {
        writer.copy(tensors, name);
      } else {
        writer.write(name, std::as_bytes(std::span(found->second)));
      }
    }
    writer.finish();
  }

  static constexpr GgmlType type = GgmlType::iq4_nl;
  test::TemporaryFolder folder_, stored_;
  std::map<std::string, std::vector<float>> decoded_;
  std::optional<model::OpenedModel> model_;
  CalibrationWindows windows_;
  std::vector<MixItem> items_;
  WidthStore store_{stored_.path()};
};

TEST_F(MixOfLayersThatShare, MeasuresTheSameFromAnyLayerOn) {
  const auto shares = [](const auto& layer) { return layer.keys_of.has_value(); };
  ASSERT_TRUE(std::ranges::any_of(model_->config.attention, shares));
  ASSERT_GT(model_->config.layer_embedding_size, 0);
  const Mix plain(items_.size(), 1), packed(items_.size(), 0);
  auto one = meter();
  EXPECT_EQ(one.measure(plain), 0);
  EXPECT_GT(one.measure(packed), 0);
  one.accept();
  const auto effects = one.effects();
  for (size_t item = 0; item < items_.size(); item += 3) {
    Mix mix = packed;
    mix[item] = 1;
    const double found = one.measure(mix);
    EXPECT_EQ(found, meter().measure(mix)) << items_[item].module;
    EXPECT_EQ(effects[item][1], found) << items_[item].module;
    if (item % 2 == 0) continue;
    one.accept();
    EXPECT_EQ(one.measure(packed), meter().measure(packed));
    one.accept();
  }
}

/// Against the model decoded as a whole: KL of mixes is that of logits.
TEST_F(MixOfLayersThatShare, MeasuresWhatTheWholeModelPredicts) {
  write_packed();
  const auto plain = model::Model::open(folder_ / "m"), back = model::Model::open(folder_ / "packed");
  double sum = 0;
  for (int64_t w = 0; w < windows_.samples; ++w) {
    std::vector<float> logits[2];
    for (const auto* model : {&plain, &back}) {
      model::Decoder decoder(*model, windows_.length);
      auto& found = logits[model == &back ? 1 : 0];
      found.resize(static_cast<size_t>(windows_.length * plain.config().vocab_size));
      decoder.logits(decoder.forward(windows_.window(w)), {found.data(), windows_.length, plain.config().vocab_size});
    }
    const auto width = static_cast<size_t>(plain.config().vocab_size);
    for (int64_t r = 0; r < windows_.length; ++r) {
      const auto at = static_cast<size_t>(r) * width;
      sum +=
          kernels::compare_logits(std::span(logits[0]).subspan(at, width), std::span(logits[1]).subspan(at, width), 0)
              .kl;
    }
  }
  const double expected = sum / static_cast<double>(windows_.samples * windows_.length);
  EXPECT_NEAR(meter().measure(Mix(items_.size(), 0)), expected, 1e-3 * expected);
}

TEST_F(MixSearch, NeighboursAreFilledFromEitherEnd) {
  const int64_t two = problem().size(uniform(0)), three = problem().size(uniform(1));
  EXPECT_EQ(neighbour_mixes(problem(), three), std::vector<Mix>{uniform(1)});
  EXPECT_TRUE(neighbour_mixes(problem(), two - 1).empty());
  const int64_t limit = (two + three) / 2;
  const auto mixes = neighbour_mixes(problem(), limit);
  ASSERT_EQ(mixes.size(), 2u);
  EXPECT_EQ(mixes[0].front(), 1u);
  EXPECT_EQ(mixes[0].back(), 0u);
  EXPECT_EQ(mixes[1].front(), 0u);
  EXPECT_EQ(mixes[1].back(), 1u);
  for (const Mix& mix : mixes) {
    EXPECT_LE(problem().size(mix), limit);
    for (size_t i = 0; i < mix.size(); ++i) {
      Mix more = mix;
      if (++more[i] == 1) {
        EXPECT_GT(problem().size(more), limit) << i;
      }
    }
  }
}

TEST_F(MixSearch, ExchangesKeepTheSize) {
  MixCosts effects;
  for (size_t i = 0; i < 14; ++i) {
    auto& row = effects.emplace_back();
    for (size_t c = 0; c < 4; ++c) row.push_back((1 + random_uniform(3, i)) * std::exp2(-2.0 * static_cast<double>(c)));
  }
  const int64_t limit = problem().size(uniform(1)) + 100;
  const auto mix = cheapest_mix(problem(), effects, limit);
  ASSERT_LE(problem().size(mix), limit);
  const auto list = promising_exchanges(problem(), effects, mix, limit, 50);
  ASSERT_EQ(list.size(), 50u);
  double before = list.front().promised;
  for (const auto& exchange : list) {
    Mix other = mix;
    double sum = 0;
    for (const auto& [item, choice] : exchange.changes) {
      sum += effects[item][choice] - effects[item][mix[item]];
      other[item] = choice;
    }
    EXPECT_LE(problem().size(other), limit);
    EXPECT_NEAR(exchange.promised, sum, 1e-12);
    EXPECT_GE(exchange.promised, before);
    before = exchange.promised;
  }
  // Nothing adds up to less than the knapsack's choice.
  EXPECT_GE(list.front().promised, -1e-12);
}

TEST_F(MixSearch, IsNeverWorseThanItsNeighbours) {
  for (const double share : {0.3, 1.0}) {
    const int64_t two = problem().size(uniform(0)), three = problem().size(uniform(1));
    const auto limit = two + static_cast<int64_t>(share * static_cast<double>(three - two));
    auto one = meter();
    const auto found = search_mix(one, problem(), limit, {}, 5);
    EXPECT_LE(problem().size(found.mix), limit);
    EXPECT_LE(found.exchanges_tried, 5);
    EXPECT_EQ(found.divergence, meter().measure(found.mix));
    for (const Mix& mix : neighbour_mixes(problem(), limit)) EXPECT_LE(found.divergence, meter().measure(mix));
    EXPECT_EQ(found.neighbour, found.divergence == found.neighbour_divergence);
  }
}

TEST_F(MixSearch, TakesAProposalThatIsBetter) {
  const int64_t limit = problem().size(uniform(1));
  auto one = meter();
  const auto best = search_mix(one, problem(), limit, {}, 3);
  auto other = meter();
  const auto found = search_mix(other, problem(), limit, {best.mix}, 0);
  EXPECT_EQ(found.divergence, best.divergence);
  EXPECT_EQ(found.mix, best.mix);
}

/// Four linears of three widths, the first two of which are one in servers.
MixProblem tied_problem() {
  MixProblem problem;
  for (const char* name : {"a.q_proj", "a.k_proj", "a.o_proj", "b.o_proj"}) {
    problem.items.push_back({name, 0, 0, 3, false});
    problem.bytes.push_back({200, 300, 400});
    problem.tables.push_back({0, 0, 0});
  }
  problem.ties = {{0, 1}, {2}, {3}};
  return problem;
}

TEST(TiedMixes, AreChosenAndExchangedTogether) {
  const MixProblem problem = tied_problem();
  const MixCosts costs{{9, 1, 0}, {1, 1, 0}, {8, 3, 0}, {2, 1, 0}};
  for (int64_t limit = 800; limit <= 1600; limit += 50) {
    const Mix mix = cheapest_mix(problem, costs, limit);
    EXPECT_EQ(mix[0], mix[1]) << limit;
    EXPECT_LE(problem.size(mix), limit);
    for (const Mix& neighbour : neighbour_mixes(problem, limit)) {
      EXPECT_EQ(neighbour[0], neighbour[1]) << limit;
      EXPECT_LE(problem.size(neighbour), limit);
    }
    for (const auto& exchange : promising_exchanges(problem, costs, mix, limit, 100)) {
      Mix other = mix;
      double promised = 0;
      for (const auto& [item, choice] : exchange.changes) {
        promised += costs[item][choice] - costs[item][mix[item]];
        other[item] = choice;
      }
      EXPECT_EQ(other[0], other[1]) << limit;
      EXPECT_LE(problem.size(other), limit);
      EXPECT_DOUBLE_EQ(promised, exchange.promised);
    }
  }
  // 200 bytes more than the least: the pair saves 8 with one step each, o_proj 8 with two of its own.
  EXPECT_EQ(cheapest_mix(problem, {{9, 1, 0}, {1, 0.5, 0}, {8, 3, 0}, {2, 1, 0}}, 1000), (Mix{1, 1, 0, 0}));
}

}  // namespace
}  // namespace w4q::pipeline
