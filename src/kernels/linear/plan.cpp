// How a linear is cut into launches.
#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "device/alignment.h"
#include "kernels/elementwise/elementwise_cuda.h"
#include "kernels/linear/kernel_row.h"
#include "repack/layout_float_fragment.h"

namespace w4q::kernels {
namespace {

/// Where other kernels may take over is looked for between powers of two up to here: no kernel has a range within one
/// such stretch, or begins behind.
constexpr int64_t most_planned_rows = int64_t{1} << 14;
constexpr int64_t any_rows = int64_t{1} << 30;

LinearDesc describe_passes(const device::Properties& gpu, const DeviceLinear& linear, size_t first, size_t count,
                           int64_t rows) {
  return {.gpu = gpu,
          .passes = std::span(linear.passes).subspan(first, count),
          .m = rows,
          .input_scaled = linear.input_scale != nullptr};
}

/// The first row that takes many weights of such a linear, or null.
const KernelRow* grouped_row(const device::Properties& gpu, const DeviceLinear& linear) {
  if (linear.passes.size() != 1 || linear.input_scale != nullptr) return nullptr;
  const LinearDesc desc{.gpu = gpu, .passes = linear.passes, .m = most_group_rows};
  const auto rows = kernel_registry();
  const auto found = std::ranges::find_if(
      rows, [&](const KernelRow& row) { return row.run_grouped != nullptr && row.accepts(desc, nullptr); });
  return found == rows.end() ? nullptr : &*found;
}

LaunchSteps choose(const DeviceLinear& linear, const LinearDesc& call) {
  LaunchSteps steps;
  for (size_t at = 0; at < linear.passes.size(); at += steps.back().count) {
    LinearDesc desc = call;
    const bool two = at + 1 < linear.passes.size();
    desc.passes = std::span(linear.passes).subspan(at, two ? 2 : 1);
    const KernelRow* row = two ? find_kernel(desc) : nullptr;
    if (row == nullptr) {
      desc.passes = desc.passes.first(1);
      row = &pick_kernel(desc);
    }
    steps.push_back({at, desc.passes.size(), row});
  }
  return steps;
}

/// Ends the last range, and begins another, wherever the steps change from `low` to `high` rows.
template <class Steps>
void add_changes(const Steps& steps, int64_t low, int64_t high, std::vector<LaunchRange>& ranges) {
  LaunchSteps after = steps(high);
  if (steps(low) == after) return;
  if (high - low > 1) {
    add_changes(steps, low, (low + high) / 2, ranges);
    add_changes(steps, (low + high) / 2, high, ranges);
  } else {
    ranges.back().most_rows = low;
    ranges.push_back({high, std::move(after)});
  }
}

/// Input that is scaled before the product, at the end of the scratch.
size_t scaled_bytes(const DeviceLinear& linear, const LaunchSteps& steps, int64_t rows) {
  if (linear.input_scale == nullptr || steps.front().row->scales_input) return 0;
  return device::round_up_256(static_cast<size_t>(rows * linear.k()) * 2);
}

WorkspaceSizes sizes_of(const device::Properties& gpu, const DeviceLinear& linear, const LaunchSteps& steps,
                        int64_t rows, bool int8_activations) {
  WorkspaceSizes sizes;
  for (const LaunchStep& step : steps) {
    LinearDesc desc = describe_passes(gpu, linear, step.first, step.count, rows);
    desc.int8_activations = int8_activations;
    sizes.include(step.row->workspace(desc));
  }
  sizes.scratch = device::round_up_256(sizes.scratch) + scaled_bytes(linear, steps, rows);
  return sizes;
}

/// What is common to the launches of a call.
LinearArgs arguments(const DeviceLinear& linear, const LaunchPlan& plan, const LinearCall& call,
                     const Workspace& workspace) {
  LinearArgs args;
  static_cast<LinearCall&>(args) = call;
  args.bias = linear.bias;
  args.input_scale = linear.input_scale;
  args.workspace = workspace;
  args.shape = plan.text;
  return args;
}

/// Divides the input by its scale, where the kernels do not.
void scale_input(const DeviceLinear& linear, const LaunchSteps& steps, LinearArgs& args, const device::Stream& stream) {
  const size_t bytes = scaled_bytes(linear, steps, args.m);
  if (steps.front().row->scales_input) return;
  args.input_scale = nullptr;
  if (bytes == 0) return;
  ensure(args.activation == DType::f16 && args.ldx == linear.k() && args.workspace.sizes.scratch >= bytes,
         "multiply: an input that cannot be scaled");
  args.workspace.sizes.scratch = (args.workspace.sizes.scratch - bytes) / 256 * 256;
  auto* const scaled =
      reinterpret_cast<__half*>(static_cast<std::byte*>(args.workspace.scratch) + args.workspace.sizes.scratch);
  divide_columns_cuda(static_cast<const __half*>(args.x), linear.input_scale, args.m, linear.k(), scaled, stream);
  args.x = scaled;
}

/// Bytes of scales that a tile of float-fragment has on a GPU: of FP8 two floats.
int64_t float_tile_scale_bytes(const formats::Scheme& scheme) {
  const bool in_blocks = scheme.bits == 4 || scheme.block == 32;
  return in_blocks ? repack::FloatFragmentMap::scales_of_tile(scheme.block) : int64_t{2} * sizeof(float);
}

}  // namespace

std::string scheme_text(const DeviceLinear& linear) {
  if (linear.passes.front().layout == f16_rows) return "f16";
  std::vector<formats::Scheme> schemes;
  for (const DevicePass& pass : linear.passes) schemes.push_back(pass.scheme);
  return formats::to_string(schemes);
}

void WorkspaceSizes::include(const WorkspaceSizes& other) noexcept {
  semaphores = std::max(semaphores, other.semaphores);
  scratch = std::max(scratch, other.scratch);
}

const LaunchSteps& LaunchPlan::steps(int64_t rows) const {
  const auto found = std::ranges::lower_bound(ranges, rows, {}, &LaunchRange::most_rows);
  ensure(found != ranges.end(), "LaunchPlan: too many rows");
  return found->steps;
}

LaunchSteps choose_launches(const device::Properties& gpu, const DeviceLinear& linear, int64_t rows, DType activation,
                            bool int8_activations) {
  LinearDesc call = describe_passes(gpu, linear, 0, 1, rows);
  call.activation = activation;
  call.int8_activations = int8_activations;
  return choose(linear, call);
}

LaunchPlan plan_launches(const device::Properties& gpu, const DeviceLinear& linear, bool int8_activations) {
  LaunchPlan plan{.ranges = {},
                  .int8_activations = int8_activations,
                  .text = concat(linear.n(), " × ", linear.k(), ", ", scheme_text(linear))};
  const auto steps = [&](int64_t rows) { return choose_launches(gpu, linear, rows, DType::f16, int8_activations); };
  plan.ranges.push_back({1, steps(1)});
  for (int64_t low = 1; low < most_planned_rows; low *= 2) add_changes(steps, low, 2 * low, plan.ranges);
  plan.ranges.back().most_rows = any_rows;
  return plan;
}

WorkspaceSizes workspace_sizes(const device::Properties& gpu, const DeviceLinear& linear, const LaunchPlan& plan,
                               int64_t most_rows) {
  WorkspaceSizes sizes;
  for (const LaunchRange& range : plan.ranges) {
    const int64_t rows = std::min(range.most_rows, most_rows);
    sizes.include(sizes_of(gpu, linear, range.steps, rows, plan.int8_activations));
    if (rows == most_rows) break;
  }
  return sizes;
}

bool fuses(const LaunchSteps& steps) { return steps.size() == 1 && steps.front().row->fuses; }

bool gates(const DeviceLinear& linear, const LaunchSteps& steps, int64_t rows) {
  if (linear.gates == GateOrder::none || steps.size() != 1) return false;
  const KernelRow& row = *steps.front().row;
  return row.swiglu == linear.gates || (rows == 1 && row.fuses && linear.gates == GateOrder::turns);
}

bool leaves_tail(const device::Properties& gpu, const DeviceLinear& linear, const LaunchSteps& steps, int64_t outputs) {
  if (!fuses(steps) || outputs > most_tail_outputs || linear.n() % 64 != 0) return false;
  const auto leaves = steps.front().row->leaves_tail;
  return leaves != nullptr && leaves({.gpu = gpu, .passes = linear.passes, .m = 1});
}

double error_bound(const LaunchSteps& steps, bool fp32_result) {
  double bound = 0;
  size_t passes = 0;
  for (const LaunchStep& step : steps) {
    const KernelRow& row = *step.row;
    bound = std::max(bound, fp32_result && row.fp32_error > 0 ? row.fp32_error : row.error);
    passes += step.count;
  }
  // The input of a further pass is rounded once more.
  return passes > 1 ? bound + 0.5e-3 : bound;
}

void multiply(const DeviceLinear& linear, const LaunchPlan& plan, const LinearCall& call, const Workspace& workspace,
              const device::Stream& stream, const PassSource& source) {
  if (call.m < 1 || call.m > any_rows) {
    throw Error(ErrorCode::bad_argument, concat("linear: ", call.m, " activation rows")).hint("1 to 2^30");
  }
  const LaunchSteps& steps = plan.steps(call.m);
  LinearArgs args = arguments(linear, plan, call, workspace);
  if (call.fusion.any() && steps.size() > 1) {
    throw Error(ErrorCode::bad_argument, concat("linear: a fused product of ", steps.size(), " launches"))
        .hint("fuses() and gates() say what can be fused");
  }
  scale_input(linear, steps, args, stream);
  const float* rotated_input = nullptr;
  args.rotated_input = &rotated_input;
  for (const LaunchStep& step : steps) {
    args.passes = std::span(linear.passes).subspan(step.first, step.count);
    const size_t last = step.first + step.count - 1;
    const bool moved = !linear.passes[last].resident;
    DevicePass here[2];
    if (moved) {
      std::ranges::copy(args.passes, here);
      here[step.count - 1] = source.acquire(last);
      args.passes = std::span(here).first(step.count);
    }
    args.weights_ready = call.weights_ready && !moved && step.row->begins_early;
    run_kernel(*step.row, args, stream);
    if (moved) source.release(last);
    args.bias = nullptr;
    args.residual = args.y;
  }
}

bool routes(const DeviceLinear& linear, const LaunchPlan& plan, int64_t n) {
  const LaunchSteps& steps = plan.steps(1);
  return linear.passes.size() == 1 && steps.size() == 1 && steps.front().row->run_routed != nullptr && n % 64 == 0 &&
         linear.n() % n == 0 && linear.input_scale == nullptr && linear.gates != GateOrder::halves;
}

bool adds_up(const DeviceLinear& linear) { return linear.k() % 64 == 0; }

bool chooses(const RouteArgs& choice) {
  // Where each expert has a correction, probabilities of a softmax would have to be known before.
  const bool by_logits = choice.correction == nullptr || choice.sigmoid;
  return by_logits && choice.rows == 1 && choice.groups == 1 && choice.experts <= most_experts_chosen_by_product;
}

ExpertPrefetch expert_codes(const DeviceLinear& linear, int64_t n) {
  const DevicePass& pass = linear.passes.front();
  const int64_t bytes = n * ((pass.k + 63) / 64 * 64) * pass.scheme.bits / 8;
  return {reinterpret_cast<const char*>(pass.codes), bytes,
          Divider(static_cast<uint32_t>(bytes / ExpertPrefetch::line))};
}

void multiply_routed(const DeviceLinear& linear, const LaunchPlan& plan, const RoutedCall& call,
                     const Workspace& workspace, const device::Stream& stream) {
  const bool sums = call.shares != nullptr, chosen_here = call.choice.logits != nullptr;
  if (!routes(linear, plan, call.n) || call.places < 1 || call.places > most_routed_places ||
      (sums && !adds_up(linear)) || (chosen_here && (sums || !chooses(call.choice)))) {
    throw Error(ErrorCode::bad_argument, concat("linear: ", call.places, " of many weights of ", plan.text))
        .hint("routes(), adds_up() and chooses() say what can be routed; at most 32 places");
  }
  DevicePass pass = linear.passes.front();
  pass.n = sums ? call.n : call.places * call.n;
  LinearArgs args;
  args.m = 1;
  args.x = call.x;
  args.ldx = linear.k();
  args.y = call.y;
  args.ldy = call.fusion.swiglu ? pass.n / 2 : pass.n;
  args.fp32 = !call.fusion.swiglu;
  args.residual = sums ? call.y : nullptr;
  args.fusion = call.fusion;
  args.weights_ready = call.weights_ready;
  args.passes = {&pass, 1};
  args.workspace = workspace;
  args.shape = plan.text;
  args.bias = linear.bias;
  const Routes routes{.experts = call.experts,
                      .shares = call.shares,
                      .places = call.places,
                      .groups = static_cast<int>(call.n / 64),
                      .sums = sums ? call.places : 1,
                      .x_stride = call.x_stride,
                      .stand = call.places_stand};
  plan.steps(1).front().row->run_routed(args, {routes, call.choice, call.next}, stream);
}

bool multiplies_groups(const device::Properties& gpu, const DeviceLinear& linear, int64_t n) {
  return n % 64 == 0 && linear.n() % n == 0 && grouped_row(gpu, linear) != nullptr;
}

void multiply_groups(const DeviceLinear& linear, const LaunchPlan& plan, const GroupedCall& call,
                     const device::Stream& stream) {
  const device::Properties& gpu = stream.context().properties();
  const bool gated = call.swiglu;
  if (!multiplies_groups(gpu, linear, call.n) || call.count < 1 || call.count > 65535 || call.most_rows < 1 ||
      call.most_rows > most_group_rows || (gated && linear.gates != GateOrder::turns)) {
    throw Error(ErrorCode::bad_argument,
                concat("linear: ", call.count, " groups of rows by many weights of ", plan.text))
        .hint("multiplies_groups() says what can be; at most 65535 groups of 64 rows");
  }
  DevicePass pass = linear.passes.front();
  pass.n = call.n;
  LinearArgs args;
  args.m = call.most_rows;
  args.x = call.x;
  args.ldx = linear.k();
  args.y = call.y;
  args.ldy = gated ? call.n / 2 : call.n;
  args.fp32 = !gated;
  args.fusion.swiglu = gated;
  args.passes = {&pass, 1};
  args.shape = plan.text;
  args.bias = linear.bias;
  grouped_row(gpu, linear)->run_grouped(args, {call.groups, call.count, call.most_rows}, stream);
}

DeviceLinear one_of(const DeviceLinear& linear, int64_t index, int64_t n) {
  ensure(linear.passes.size() == 1 && linear.n() % n == 0, "one_of: not one of many weights");
  DeviceLinear result = linear;
  DevicePass& pass = result.passes.front();
  const bool halves = pass.layout == f16_rows;
  const bool floats = pass.layout == "float-fragment";
  ensure(halves || ((floats || pass.layout == "kbit-fragment") && n % 64 == 0),
         "one_of: weights that cannot be told apart");
  pass.n = n;
  if (halves) {
    pass.codes += index * n * pass.k / 2;
  } else {
    const int64_t tiles = index * (n / 64) * ((pass.k + 63) / 64);
    const int64_t scale_bytes = pass.scheme.scale == formats::ScaleType::e4m4 ? 1 : 2;
    pass.codes += tiles * 64 * 64 * pass.scheme.bits / 32;
    const int64_t tile_bytes = floats ? float_tile_scale_bytes(pass.scheme) : 64 * 2 * scale_bytes;
    pass.scales = static_cast<const std::byte*>(pass.scales) + tiles * tile_bytes;
    if (pass.output_factors != nullptr) pass.output_factors += index * n;
  }
  if (result.bias != nullptr) result.bias += index * n;
  return result;
}

}  // namespace w4q::kernels
