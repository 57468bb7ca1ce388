#include <algorithm>
#include <utility>

#include "core/error.h"
#include "decoder_cuda/linear.h"
#include "decoder_cuda/rotated.h"
#include "kernels/elementwise/elementwise_cuda.h"

namespace w4q::decoder_cuda {
namespace {

/// What a launch of this product reads first.
kernels::L2Prefetch weights_of(const CudaProduct& product) {
  const kernels::DevicePass& pass = product.linear.passes.front();
  if (!product.packed() || !pass.resident) return {};
  return {pass.codes, pass.n * pass.k * pass.scheme.bits / 8};
}

/// What a product behind a norm takes over from it.
kernels::LinearFusion after(const InputNorm& norm) {
  kernels::LinearFusion fusion;
  fusion.input_norm = norm.state;
  fusion.eps = norm.eps;
  return fusion;
}

}  // namespace

kernels::LinearFusion leaving(const NextNorm& next) {
  kernels::LinearFusion fusion;
  fusion.next_x = next.x;
  fusion.next_weight = next.weight;
  fusion.next_norm = next.state;
  fusion.last_norm = next.last;
  fusion.eps = next.eps;
  return fusion;
}

CudaMultiplier::CudaMultiplier(std::span<const CudaLinear* const> linears, int64_t most_rows,
                               const device::Stream& stream, bool int8_activations)
    : stream_(stream) {
  const device::Properties& gpu = stream.context().properties();
  kernels::WorkspaceSizes sizes{256, 256};
  const CudaProduct* last = nullptr;
  for (const auto* linear : linears) {
    for (const auto& product : linear->products) {
      sizes.include(kernels::workspace_sizes(gpu, product.linear, product.plan, most_rows));
      if (int8_activations && product.int8_plan) {
        sizes.include(kernels::workspace_sizes(gpu, product.linear, *product.int8_plan, most_rows));
      }
      if (last != nullptr) next_[last] = weights_of(product);
      last = &product;
    }
  }
  if (last != nullptr) next_[last] = weights_of(linears.front()->products.front());
  semaphores_ = device::DeviceBuffer(stream.context(), sizes.semaphores);
  semaphores_.fill(0, stream);
  scratch_ = device::DeviceBuffer(stream.context(), sizes.scratch);
  workspace_ = {semaphores_.data(), scratch_.data(), sizes};
  const auto passes = offloaded_passes(linears);
  if (passes.empty()) return;
  offload_.emplace(passes, stream);
  for (size_t i = 0; i < passes.size(); ++i) offload_index_.emplace(passes[i], i);
}

kernels::PassSource CudaMultiplier::passes_of(const CudaProduct& product) {
  if (!offload_) return {};
  return {.acquire =
              [&](size_t pass) {
                const OffloadedPass& moved = *product.offloaded[pass];
                return at_bytes(product.linear.passes[pass], moved, offload_->acquire(offload_index_.at(&moved)));
              },
          .release = [&](size_t pass) { offload_->release(offload_index_.at(product.offloaded[pass].get())); }};
}

void CudaMultiplier::multiply_product(const CudaProduct& product, const __half* x, int64_t rows, const Output& out,
                                      const kernels::LinearFusion& fusion) {
  const kernels::LaunchPlan& plan = product.plan_for(int8_);
  const auto next = next_.find(&product);
  kernels::LinearCall call;
  call.m = rows;
  call.x = x;
  call.ldx = product.linear.k();
  call.y = out.y;
  call.ldy = out.stride;
  call.fp32 = out.fp32;
  if (out.add) call.residual = out.y;
  call.weights_ready = overlap_;
  call.beside_routed = beside_routed_;
  call.int8_activations = plan.int8_activations;
  if (next != next_.end()) call.prefetch = next->second;
  call.fusion = fusion;
  kernels::multiply(product.linear, plan, call, workspace_, stream_, passes_of(product));
}

void CudaMultiplier::multiply_all(const CudaLinear& linear, const __half* x, int64_t rows, const Output& out,
                                  const kernels::LinearFusion& fusion) {
  for (const auto& product : linear.products) {
    Output part = out;
    part.y = static_cast<std::byte*>(out.y) + product.first * (out.fp32 ? 4 : 2);
    multiply_product(product, x, rows, part, fusion);
  }
}

void CudaMultiplier::multiply(const CudaLinear& linear, const __half* x, int64_t rows, float* y, InputNorm norm) {
  multiply_all(linear, x, rows, {y, linear.n, true}, after(norm));
}

void CudaMultiplier::multiply_residual(const CudaLinear& linear, const __half* x, int64_t rows, float* residual,
                                       const NextNorm* next, const kernels::TailProduct& tail) {
  ensure(linear.products.size() == 1, "multiply_residual: one layer at a time");
  kernels::LinearFusion fusion = next != nullptr ? leaving(*next) : kernels::LinearFusion();
  fusion.tail = tail;
  multiply_all(linear, x, rows, {residual, linear.n, true, true}, fusion);
}

bool CudaMultiplier::leaves_tail(const CudaLinear& linear, const CudaLinear& tail) const {
  // What every block adds up of the parts takes longer than a launch where there are more (docs/notes/kernels/decode.md).
  constexpr int64_t worthwhile = 128;
  if (!beside_routed_ || tail.n > worthwhile || linear.products.size() != 1 || tail.products.size() != 1) return false;
  const CudaProduct &from = linear.products.front(), &to = tail.products.front();
  const bool rows = !to.packed() && to.linear.passes.size() == 1 && to.linear.input_scale == nullptr;
  return rows && tail.k == linear.n &&
         kernels::leaves_tail(stream_.context().properties(), from.linear, from.plan_for(int8_).steps(1), tail.n);
}

void CudaMultiplier::multiply_gated(const CudaLinear& linear, const __half* x, int64_t rows, __half* both, __half* out,
                                    InputNorm norm) {
  kernels::LinearFusion fusion = after(norm);
  const CudaProduct& product = linear.products.front();
  if (linear.gates() != kernels::GateOrder::none &&
      kernels::gates(product.linear, product.plan_for(int8_).steps(rows), rows)) {
    fusion.swiglu = true;
    return multiply_product(product, x, rows, {out, linear.n / 2}, fusion);
  }
  multiply_all(linear, x, rows, {both, linear.n}, fusion);
  const bool in_turns = linear.gates() == kernels::GateOrder::turns;
  kernels::silu_multiply_cuda(both, rows, linear.n / 2, in_turns, out, overlap_ && rows == 1, stream_);
}

void CudaMultiplier::multiply_routed(const CudaLinear& linear, const kernels::RoutedCall& call) {
  const CudaProduct& product = linear.products.front();
  kernels::multiply_routed(product.linear, product.plan, call, workspace_, stream_);
}

void CudaMultiplier::multiply_groups(const CudaLinear& linear, const kernels::GroupedCall& call) {
  const CudaProduct& product = linear.products.front();
  kernels::multiply_groups(product.linear, product.plan, call, stream_);
}

void CudaMultiplier::multiply_logits(const CudaLinear& head, const __half* x, int64_t rows, float* out,
                                     InputNorm norm) {
  const bool int8 = std::exchange(int8_, false);
  multiply_all(head, x, rows, {out, head.n, true}, after(norm));
  int8_ = int8;
}

}  // namespace w4q::decoder_cuda
