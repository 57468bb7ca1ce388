#include "decoder_cuda/mixture.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "decoder_cuda/layer_runner.h"
#include "device/copy.h"
#include "repack/turn_rows_cuda.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;
using kernels::GateColumns;

/// Rows that are sorted, multiplied and summed up together: what is between takes some 150 KB of memory for each.
int64_t rows_at_once(const model::MixtureConfig& config) { return std::min<int64_t>(4096, 65535 / config.chosen); }

/// What a mixture's config says of its router's choice.
kernels::RouteArgs choice_of(const model::MixtureConfig& config) {
  return {.rows = 1,
          .experts = static_cast<int>(config.experts),
          .chosen = static_cast<int>(config.chosen),
          .sigmoid = config.scoring == model::Scoring::sigmoid,
          .renormalizes = config.renormalizes,
          .scale = static_cast<float>(config.scale),
          .groups = static_cast<int>(config.groups),
          .chosen_groups = static_cast<int>(config.chosen_groups)};
}

/// Rows an expert has in the mean, at most, where one launch takes those of all; beyond, each one's are enough for a GPU.
constexpr size_t most_mean_rows = 256;

GateColumns columns_of(const model::Block& plan) {
  return plan.storage == model::ExpertStorage::stacked_in_turn ? GateColumns::in_turn : GateColumns::halves;
}

/// Whether weights of n outputs each can be told apart in a stack.
bool is_stack(const CudaLinear& all, int64_t n) {
  if (all.products.size() != 1) return false;
  const kernels::DeviceLinear& linear = all.products.front().linear;
  if (linear.passes.size() != 1 || linear.input_scale != nullptr) return false;
  const kernels::DevicePass& pass = linear.passes.front();
  const bool in_tiles = pass.layout == "kbit-fragment" || pass.layout == "float-fragment";
  return pass.layout == kernels::f16_rows || (in_tiles && n % 64 == 0);
}

/// Each of many weights as a linear by itself, in the same memory.
std::vector<CudaLinear> views_of(const CudaLinear& all, int64_t n, const device::Properties& gpu) {
  std::vector<CudaLinear> views;
  const int64_t count = all.n / n, names = std::ssize(all.names) / count;
  for (int64_t index = 0; index < count; ++index) {
    CudaLinear& view = views.emplace_back();
    const auto first = all.names.begin() + index * names;  // what is joined may have several where experts have one
    view.names.assign(first, index + 1 == count ? all.names.end() : first + names);
    view.n = n, view.k = all.k;
    CudaProduct product;
    product.linear = kernels::one_of(all.products.front().linear, index, n);
    product.scheme = all.products.front().scheme;
    product.offloaded.resize(1);
    if (index == 0) {
      plan_product(product, gpu);
    } else {
      product.plan = views.front().products.front().plan;
      product.int8_plan = views.front().products.front().int8_plan;
    }
    view.products.push_back(std::move(product));
  }
  return views;
}

/// What a token reads of `weights` that stand below one another, to the last of which every row may go.
void count_bytes(CudaLinear& all, const model::MixtureConfig& mixture, int64_t weights) {
  all.bytes = all.bytes * (mixture.chosen + weights - mixture.experts) / weights;
}

std::vector<const kernels::LinearWeight*> weights_of(const model::LayerWeights& weights,
                                                     const model::InputGroup& group) {
  std::vector<const kernels::LinearWeight*> linears;
  for (const auto& linear : group.linears) linears.push_back(&weights.linears[linear.position]);
  return linears;
}

struct Uploaded {
  std::optional<CudaLinear> all;
  std::vector<CudaLinear> each;
};

/// Whether the shared part can stand behind the experts.
bool joins_experts(const model::Block& plan, const model::LayerWeights& weights, const device::Properties& gpu) {
  if (!shared_is_an_expert(plan) || is_dense(*weights_of(weights, plan.groups[1]).front())) return false;
  const auto shared = 1 + 2 * static_cast<size_t>(plan.mixture.experts);
  for (size_t side = 0; side < 2; ++side) {
    const auto ours = weights_of(weights, plan.groups[shared + side]);
    const auto theirs = weights_of(weights, plan.groups[shared + side - 2]);
    if (!std::ranges::all_of(ours, [&](const auto* weight) { return alike(gpu, *weight, *theirs.back()); }))
      return false;
  }
  return true;
}

/// Groups first, first + 2, … of so many weights.
Uploaded upload_side(const model::Block& plan, const model::LayerWeights& weights, size_t first, size_t experts,
                     UploadRing& ring) {
  std::vector<const kernels::LinearWeight*> all;
  for (size_t expert = 0; expert < experts; ++expert) {
    for (const auto* weight : weights_of(weights, plan.groups[first + 2 * expert])) all.push_back(weight);
  }
  const size_t each = plan.groups[first].linears.size();
  int64_t n = 0;
  for (size_t i = 0; i < each; ++i) n += all[i]->n;
  const auto& gpu = ring.stream().context().properties();
  Uploaded result;
  const bool whole = std::ranges::all_of(all, [](const auto* weight) { return weight->n % 64 == 0; });
  if (whole) {
    CudaLinear stack = upload_linears(all, ring);
    if (is_stack(stack, n)) {
      result.each = views_of(stack, n, gpu);
      count_bytes(stack, plan.mixture, static_cast<int64_t>(experts));
      result.all = std::move(stack);
      return result;
    }
  }
  for (size_t expert = 0; expert < experts; ++expert) {
    const size_t count = expert + 1 == experts ? all.size() - expert * each : each;
    result.each.push_back(upload_linears(std::span(all).subspan(expert * each, count), ring));
    count_bytes(result.each.back(), plan.mixture, plan.mixture.experts);
  }
  return result;
}

/// Gates and ups of each expert take turns from here on, eight rows each, so that the product makes silu(gate) · up.
void turn_experts(CudaLinear& all, int64_t experts, UploadRing& ring) {
  kernels::DeviceLinear& linear = all.products.front().linear;
  const int64_t n = linear.n() / experts, k = linear.k();
  const auto turn = [&](formats::PlaneRole role, const void* begin, const void* end) {
    const auto bytes = static_cast<size_t>(static_cast<const std::byte*>(end) - static_cast<const std::byte*>(begin));
    DeviceBuffer before(ring.stream().context(), bytes);
    auto* const at = const_cast<std::byte*>(static_cast<const std::byte*>(begin));
    device::copy(device::Way::on_gpu, before.data(), at, bytes, ring.stream(), "turning experts");
    repack::turn_rows_cuda(linear.passes.front().layout, linear.passes.front().scheme, role, n / 2, k,
                           {before.data(), before.data() + bytes / 2, at}, ring.stream());
    ring.stream().synchronize();  // `before` goes
  };
  for (int64_t expert = 0; expert < experts; ++expert) {
    const auto one = kernels::one_of(linear, expert, n).passes.front();
    const auto next = kernels::one_of(linear, expert + 1, n).passes.front();
    turn(formats::PlaneRole::codes, one.codes, next.codes);
    turn(formats::PlaneRole::scales, one.scales, next.scales);
  }
}

/// Whether a kernel could make silu(gate) · up of them if they took turns.
bool can_turn(const model::Block& plan, const CudaLinear& all, int64_t experts) {
  const kernels::DeviceLinear& linear = all.products.front().linear;
  return plan.gating.activation == model::Activation::silu && columns_of(plan) == GateColumns::halves &&
         linear.passes.front().layout == "kbit-fragment" && linear.bias == nullptr && linear.n() / experts % 128 == 0;
}

void take_turns(CudaMixture& mixture) {
  mixture.columns = GateColumns::turns;
  mixture.all_inputs->products.front().linear.gates = kernels::GateOrder::turns;
  for (auto& expert : mixture.inputs) expert.products.front().linear.gates = kernels::GateOrder::turns;
}

/// The last of the experts is the shared part; it is forgotten where rows do not go to it as they do to experts.
void part_shared(CudaMixture& mixture) {
  mixture.joined = mixture.adds_up();
  for (auto* side : {&mixture.inputs, &mixture.outputs}) {
    if (mixture.joined) mixture.shared.push_back(std::move(side->back()));
    side->pop_back();
  }
  if (!mixture.joined) return;
  auto& gates = mixture.shared.front().products.front().linear.gates;
  if (gates == kernels::GateOrder::none) gates = kernels::GateOrder::halves;
}

bool side_routes(const std::optional<CudaLinear>& all, int64_t n) {
  return all && kernels::routes(all->products.front().linear, all->products.front().plan, n);
}

}  // namespace

bool chooses_by_product(const model::Block& plan) {
  kernels::RouteArgs choice = choice_of(plan.mixture);
  // Whether there are any is all that is looked at.
  static constexpr float corrected = 0;
  if (plan.vector(model::VectorRole::correction) != nullptr) choice.correction = &corrected;
  return kernels::chooses(choice);
}

bool shared_is_an_expert(const model::Block& plan) {
  const model::MixtureConfig& mixture = plan.mixture;
  const auto shared = 1 + 2 * static_cast<size_t>(mixture.experts);
  if (plan.groups.size() != shared + 2 || mixture.shared_intermediate != mixture.intermediate) return false;
  if (mixture.chosen + 1 > kernels::most_routed_places || mixture.intermediate % 64 != 0) return false;
  return !adds_apart(plan) && !reads_several_norms(plan) && plan.storage != model::ExpertStorage::stacked_in_turn;
}

bool reads_several_norms(const model::Block& plan) {
  return plan.norm(model::NormRole::expert_input) != nullptr || plan.vector(model::VectorRole::router_scale) != nullptr;
}

bool CudaMixture::routes() const noexcept {
  return side_routes(all_inputs, inputs.front().n) && side_routes(all_outputs, outputs.front().n);
}

bool CudaMixture::adds_up() const noexcept {
  return routes() && kernels::adds_up(all_outputs->products.front().linear);
}

bool CudaMixture::multiplies_groups(const device::Properties& gpu) const {
  return all_inputs && all_outputs &&
         kernels::multiplies_groups(gpu, all_inputs->products.front().linear, inputs.front().n) &&
         kernels::multiplies_groups(gpu, all_outputs->products.front().linear, outputs.front().n);
}

CudaMixture upload_mixture(const model::Block& plan, const model::LayerWeights& weights, UploadRing& ring) {
  CudaMixture mixture;
  const bool joined = joins_experts(plan, weights, ring.stream().context().properties());
  const int64_t experts = plan.mixture.experts + (joined ? 1 : 0);
  const auto count = static_cast<size_t>(experts);
  auto inputs = upload_side(plan, weights, 1, count, ring), outputs = upload_side(plan, weights, 2, count, ring);
  mixture.inputs = std::move(inputs.each), mixture.all_inputs = std::move(inputs.all);
  mixture.outputs = std::move(outputs.each), mixture.all_outputs = std::move(outputs.all);
  mixture.columns = columns_of(plan);
  if (mixture.all_inputs && can_turn(plan, *mixture.all_inputs, experts)) {
    turn_experts(*mixture.all_inputs, experts, ring);
    take_turns(mixture);
  }
  if (joined) part_shared(mixture);
  const auto vector = [&](model::VectorRole role) -> const float* {
    const auto* planned = plan.vector(role);
    if (planned == nullptr) return nullptr;
    mixture.memory.push_back(ring.copy_of(bytes_of(weights.vectors[planned->position])));
    return mixture.memory.back().as<float>();
  };
  mixture.correction = vector(model::VectorRole::correction);
  mixture.expert_scale = vector(model::VectorRole::expert_scale);
  return mixture;
}

CudaMixture mixture_of(const model::Block& plan, CudaLinear all_inputs, CudaLinear all_outputs, bool joined,
                       const device::Properties& gpu) {
  const int64_t experts = plan.mixture.experts + (joined ? 1 : 0);
  const int64_t n_in = all_inputs.n / experts, n_out = all_outputs.n / experts;
  ensure(is_stack(all_inputs, n_in) && is_stack(all_outputs, n_out), "mixture_of: experts that cannot be told apart");
  CudaMixture mixture;
  mixture.columns = columns_of(plan);
  mixture.inputs = views_of(all_inputs, n_in, gpu), mixture.outputs = views_of(all_outputs, n_out, gpu);
  count_bytes(all_inputs, plan.mixture, experts), count_bytes(all_outputs, plan.mixture, experts);
  mixture.all_inputs = std::move(all_inputs), mixture.all_outputs = std::move(all_outputs);
  if (can_turn(plan, *mixture.all_inputs, experts)) take_turns(mixture);
  if (joined) part_shared(mixture);
  return mixture;
}

MixtureScratch::MixtureScratch(const model::ModelConfig& config, std::span<const CudaMixture* const> mixtures,
                               int64_t rows, CudaMultiplier& multiplier, const device::Stream& stream)
    : stream_(stream), multiplier_(multiplier), hidden_(config.hidden_size), places_(config.mixture.chosen) {
  const device::Context& gpu = stream.context();
  int64_t inner = 0;
  for (const auto* mixture : mixtures) inner = std::max(inner, mixture->inner());
  const auto floats = [&](int64_t count) { return DeviceBuffer(gpu, static_cast<size_t>(count) * sizeof(float)); };
  const auto halves = [&](int64_t count) { return DeviceBuffer(gpu, static_cast<size_t>(count) * sizeof(__half)); };
  const int64_t at_once = std::min(rows, rows_at_once(config.mixture)) * places_ + 1;
  places_on_gpu_ = floats(rows * places_ + 1), shares_ = floats(rows * places_ + 1);  // and what is joined to one row
  taken_rows_ = floats(at_once), slots_ = floats(at_once);
  gathered_ = halves(at_once * hidden_);
  both_ = floats(at_once * 2 * inner);
  gated_ = halves(at_once * inner);
  products_ = floats(at_once * hidden_);
  const int64_t groups = at_once / 32 + config.mixture.experts + 1;
  staged_groups_ = device::PinnedBuffer(gpu, static_cast<size_t>(groups) * sizeof(kernels::RowGroup));
  groups_ = DeviceBuffer(gpu, static_cast<size_t>(groups) * sizeof(kernels::RowGroup));
  for (auto* staged : {&staged_places_, &staged_rows_, &staged_slots_}) {
    *staged = device::PinnedBuffer(gpu, static_cast<size_t>(at_once) * sizeof(int32_t));
  }
}

void MixtureScratch::run(const model::Block& plan, const CudaMixture& mixture, float* logits, int64_t stride,
                         const __half* x, int64_t rows, float* residual, const Observe& observe, const Step& step) {
  const model::MixtureConfig& config = plan.mixture;
  kernels::RouteArgs choice = choice_of(config);
  choice.logits = logits;
  choice.parts = step.parts;
  choice.part_count = static_cast<int>((hidden_ + 63) / 64);
  choice.rows = rows;
  choice.stride = stride;
  choice.correction = mixture.correction;
  choice.expert_scale = mixture.expert_scale;
  choice.input_norm = step.norm.state;
  choice.bias = mixture.router_bias;
  choice.cols = hidden_;
  choice.eps = step.norm.eps;
  choice.places = places_on_gpu_.as<int32_t>();
  choice.shares = shares_.as<float>();
  choice.overlap = multiplier_.overlap() && rows == 1;
  if (rows == 1 && !observe && mixture.routes()) {
    choice.joined = mixture.joined;
    return run_one(plan.gating, mixture, x, residual, choice, step);
  }
  ensure(step.norm.state == nullptr && step.next == nullptr && step.parts == nullptr,
         "a mixture by the host stands by itself");
  kernels::route_cuda(choice, stream_);
  const int64_t most = rows_at_once(config);
  for (int64_t first = 0; first < rows; first += most) {
    run_by_host(plan, mixture, x, first, std::min(most, rows - first), residual, observe);
  }
}

void MixtureScratch::run_one(const kernels::Gating& gating, const CudaMixture& mixture, const __half* x,
                             float* residual, const kernels::RouteArgs& choice, const Step& step) {
  const int64_t inner = mixture.inner(), n = mixture.outputs.front().n;
  const int places = static_cast<int>(places_) + (mixture.joined ? 1 : 0);
  const bool overlap = multiplier_.overlap(), chooses = kernels::chooses(choice);
  ensure(chooses || choice.parts == nullptr, "a router in parts, and experts that no product chooses");
  if (!chooses) kernels::route_cuda(choice, stream_);
  const kernels::RoutedCall both{.x = x, .experts = choice.places, .places = places, .weights_ready = overlap};
  kernels::RoutedCall first = both;
  first.n = mixture.inputs.front().n;
  first.fusion.swiglu = mixture.columns == GateColumns::turns && gating.activation == kernels::Activation::silu;
  first.y = first.fusion.swiglu ? gated_.data() : both_.data();
  first.fusion.input_norm = step.norm.state;
  first.fusion.eps = step.norm.eps;
  if (chooses) first.choice = choice;
  first.next = kernels::expert_codes(mixture.all_outputs->products.front().linear, n);
  multiplier_.multiply_routed(*mixture.all_inputs, first);
  if (!first.fusion.swiglu) {
    kernels::gate_multiply_cuda(gating, both_.as<float>(), places, inner, mixture.columns, gated_.as<__half>(), overlap,
                                stream_);
  }
  kernels::RoutedCall second = both;
  second.places_stand = chooses;
  second.x = gated_.as<__half>();
  second.x_stride = inner;
  second.n = n;
  if (mixture.adds_up()) {
    second.y = residual;
    second.shares = choice.shares;
    if (step.next != nullptr) second.fusion = leaving(*step.next);
    return multiplier_.multiply_routed(*mixture.all_outputs, second);
  }
  ensure(step.next == nullptr, "a mixture that does not add up leaves no norm");
  second.y = products_.data();
  multiplier_.multiply_routed(*mixture.all_outputs, second);
  if (step.later != nullptr) {
    *step.later = {.parts = products_.as<float>(), .shares = choice.shares, .places = places};
    return;
  }
  kernels::combine_cuda({.x = products_.as<float>(),
                         .shares = choice.shares,
                         .places = places,
                         .rows = 1,
                         .cols = hidden_,
                         .y = residual,
                         .overlap = overlap},
                        stream_);
}

std::vector<size_t> MixtureScratch::sort_by_expert(int64_t experts, int64_t first, int64_t rows) {
  const auto count = static_cast<size_t>(rows * places_), bytes = count * sizeof(int32_t);
  device::copy(device::Way::from_gpu, staged_places_.bytes().data(), places_on_gpu_.as<int32_t>() + first * places_,
               bytes, stream_, "reading which experts rows are sent to");
  stream_.synchronize();
  const auto* const places = reinterpret_cast<const int32_t*>(staged_places_.bytes().data());
  auto* const taken = reinterpret_cast<int32_t*>(staged_rows_.bytes().data());
  auto* const slots = reinterpret_cast<int32_t*>(staged_slots_.bytes().data());
  std::vector<size_t> begins(static_cast<size_t>(experts) + 1);
  for (size_t i = 0; i < count; ++i) ++begins[static_cast<size_t>(places[i]) + 1];
  for (size_t expert = 1; expert < begins.size(); ++expert) begins[expert] += begins[expert - 1];
  auto next = begins;
  for (size_t i = 0; i < count; ++i) {
    const size_t slot = next[static_cast<size_t>(places[i])]++;
    taken[slot] = static_cast<int32_t>(first + static_cast<int64_t>(i) / places_);
    slots[i] = static_cast<int32_t>(slot);
  }
  taken_rows_.upload(staged_rows_.bytes().first(bytes), stream_);
  slots_.upload(staged_slots_.bytes().first(bytes), stream_);
  return begins;
}

MixtureScratch::Groups MixtureScratch::make_groups(std::span<const size_t> begins) {
  const size_t rows = begins.back(), experts = begins.size() - 1;
  Groups result;
  if (rows == 0 || rows > experts * most_mean_rows) return result;
  // Rows that most experts have fit the smaller kernel where that is not for few of them.
  const size_t most = rows <= experts * 24 ? 32 : kernels::most_group_rows;
  auto* const to = reinterpret_cast<kernels::RowGroup*>(staged_groups_.bytes().data());
  for (size_t expert = 0; expert < experts; ++expert) {
    const size_t mine = begins[expert + 1] - begins[expert], parts = (mine + most - 1) / most;
    for (size_t part = 0; part < parts; ++part) {
      const size_t from = mine * part / parts, past = mine * (part + 1) / parts;
      to[result.count++] = {static_cast<int32_t>(expert), static_cast<int32_t>(begins[expert] + from),
                            static_cast<int32_t>(past - from)};
    }
  }
  result.most_rows = static_cast<int>(most);
  groups_.upload(staged_groups_.bytes().first(static_cast<size_t>(result.count) * sizeof(kernels::RowGroup)), stream_);
  return result;
}

void MixtureScratch::multiply_sorted(const Side& side, std::span<const size_t> begins, const Groups& groups,
                                     const Observe& observe) {
  for (size_t expert = 0; expert < side.each.size(); ++expert) {
    const auto at = static_cast<int64_t>(begins[expert]), mine = static_cast<int64_t>(begins[expert + 1]) - at;
    const CudaLinear& linear = side.each[expert];
    if (mine == 0) continue;
    if (observe) observe(linear, side.input + at * linear.k, mine);
    if (groups.count == 0) {
      multiplier_.multiply(linear, side.input + at * linear.k, mine, static_cast<float*>(side.output) + at * linear.n);
    }
  }
  if (groups.count == 0) return;
  multiplier_.multiply_groups(*side.all, {.x = side.input,
                                          .groups = groups_.as<kernels::RowGroup>(),
                                          .count = groups.count,
                                          .most_rows = groups.most_rows,
                                          .n = side.each.front().n,
                                          .y = side.output,
                                          .swiglu = side.swiglu});
}

void MixtureScratch::run_by_host(const model::Block& plan, const CudaMixture& mixture, const __half* x, int64_t first,
                                 int64_t rows, float* residual, const Observe& observe) {
  const auto begins = sort_by_expert(plan.mixture.experts, first, rows);
  const int64_t all = rows * places_;
  const Groups groups = mixture.multiplies_groups(stream_.context().properties()) ? make_groups(begins) : Groups{};
  const bool swiglu = groups.count > 0 && mixture.columns == GateColumns::turns;
  auto* const gated = gated_.as<__half>();
  kernels::gather_rows_cuda(x, taken_rows_.as<int32_t>(), all, hidden_, gathered_.as<__half>(), stream_);
  void* const first_output = swiglu ? gated_.data() : both_.data();
  multiply_sorted({mixture.all_inputs, mixture.inputs, gathered_.as<__half>(), first_output, swiglu}, begins, groups,
                  observe);
  if (!swiglu) {
    kernels::gate_multiply_cuda(plan.gating, both_.as<float>(), all, mixture.inner(), mixture.columns, gated, false,
                                stream_);
  }
  multiply_sorted({mixture.all_outputs, mixture.outputs, gated, products_.data()}, begins, groups, observe);
  kernels::combine_cuda({.x = products_.as<float>(),
                         .slots = slots_.as<int32_t>(),
                         .shares = shares_.as<float>() + first * places_,
                         .places = static_cast<int>(places_),
                         .rows = rows,
                         .cols = hidden_,
                         .y = residual + first * hidden_},
                        stream_);
  stream_.synchronize();  // the staged lists are the next rows'
}

}  // namespace w4q::decoder_cuda
