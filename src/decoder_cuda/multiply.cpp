#include <algorithm>
#include <utility>

#include "core/error.h"
#include "decoder_cuda/linear.h"
#include "decoder_cuda/rotated.h"
#include "device/cublas.h"
#include "kernels/elementwise/elementwise_cuda.h"
#include "kernels/linear/dense_gemv_cuda.h"
#include "kernels/linear/int8_rows.h"

namespace w4q::decoder_cuda {
namespace {

/// What a launch of this product reads first.
kernels::L2Prefetch weights_of(const CudaProduct& product, int64_t k) {
  if (product.packed) return {product.packed->codes, product.n * k * product.scheme.bits / 8};
  if (product.rotated.empty() || product.offloaded.front() != nullptr) return {};
  return {product.rotated.front().codes, product.n * k * product.scheme.bits / 8};
}

/// What a product behind a norm takes over from it.
kernels::LinearFusion after(const InputNorm& norm) {
  kernels::LinearFusion fusion;
  fusion.input_norm = norm.state;
  fusion.eps = norm.eps;
  return fusion;
}

}  // namespace

bool takes_int8(const CudaProduct& product) noexcept {
  return product.packed && product.packed->layout == "marlin" && kernels::takes_int8_activations(product.scheme);
}

CudaMultiplier::CudaMultiplier(std::span<const CudaLinear* const> linears, int64_t most_rows,
                               const device::Stream& stream, bool int8_activations)
    : stream_(stream), words_(stream.context(), 256), cublas_(stream.context(), device::cublas_workspace_bytes) {
  const device::Properties& gpu = stream.context().properties();
  size_t words = 256, wide = 0, scaled = 0;
  for (const auto* linear : linears) {
    for (const auto& product : linear->products) {
      if (!product.rotated.empty()) {
        const auto sizes = kernels::rotated_linear_workspace(gpu, most_rows, product.n, linear->k);
        words = std::max(words, sizes.semaphores);
        wide = std::max(wide, sizes.scratch);
        continue;
      }
      if (product.input_scale != nullptr) {
        scaled = std::max(scaled, static_cast<size_t>(most_rows * linear->k) * 2);
      }
      if (!product.packed) continue;
      kernels::LinearDesc desc{gpu, product.scheme, product.packed->layout, most_rows, product.n, linear->k};
      const auto sizes = kernels::divided_workspace(desc);
      words = std::max(words, sizes.semaphores);
      wide = std::max(wide, sizes.scratch);
      desc.int8_activations = true;
      if (int8_activations && takes_int8(product)) wide = std::max(wide, kernels::linear_workspace(desc));
    }
  }
  const CudaProduct* last = nullptr;
  for (const auto* linear : linears) {
    for (const auto& product : linear->products) {
      if (last != nullptr) next_[last] = weights_of(product, linear->k);
      last = &product;
    }
  }
  if (last != nullptr) next_[last] = weights_of(linears.front()->products.front(), linears.front()->k);
  words_ = device::DeviceBuffer(stream.context(), words);
  words_.fill(0, stream);
  wide_ = device::DeviceBuffer(stream.context(), wide);
  scaled_ = device::DeviceBuffer(stream.context(), scaled);
  const auto passes = offloaded_passes(linears);
  if (passes.empty()) return;
  offload_.emplace(passes, stream);
  for (size_t i = 0; i < passes.size(); ++i) offload_index_.emplace(passes[i], i);
}

bool CudaMultiplier::gates(const CudaProduct& product, int64_t k, int64_t rows) const {
  if (!product.packed) return false;
  kernels::LinearDesc desc{stream_.context().properties(), product.scheme, product.packed->layout, rows, product.n, k};
  desc.int8_activations = int8_ && takes_int8(product);
  return kernels::pick_kernel(desc).swiglu;
}

CudaMultiplier::Output CudaMultiplier::Output::of(const CudaProduct& product) const {
  Output part = *this;
  part.y = static_cast<std::byte*>(y) + product.first * (fp32 ? 4 : 2);
  return part;
}

kernels::L2Prefetch CudaMultiplier::behind(const CudaProduct& product) const {
  const auto found = next_.find(&product);
  return found == next_.end() ? kernels::L2Prefetch{} : found->second;
}

void CudaMultiplier::multiply_rotated(const CudaProduct& product, const __half* x, int64_t rows, const Output& out,
                                      const kernels::LinearFusion& fusion) {
  kernels::RotatedLinearArgs args;
  args.fusion = fusion;
  args.prefetch = behind(product);
  args.m = rows;
  args.x = x;
  args.ldx = product.rotated.front().k;
  args.input_scale = product.input_scale;
  args.bias = product.bias;
  args.y = out.y;
  args.ldy = out.stride;
  args.fp32 = out.fp32;
  args.add = out.add;
  args.semaphores = words_.data(), args.semaphore_bytes = words_.size();
  args.scratch = wide_.data(), args.scratch_bytes = wide_.size();
  const std::span<const kernels::RotatedDevicePass> passes(product.rotated);
  const auto here = [&](size_t pass) { return product.offloaded[pass] == nullptr; };
  for (size_t at = 0; at < passes.size();) {
    size_t end = at + 1;
    while (here(at) && end < passes.size() && here(end)) ++end;
    // A pass from host memory goes by itself, so that the one before it does not wait too, unless the two are one
    // product.
    if (here(at) && end < passes.size() &&
        kernels::decoded_together(stream_.context().properties(), rows, passes[end - 1], passes[end]))
      ++end;
    std::vector<kernels::RotatedDevicePass> some(passes.begin() + at, passes.begin() + end);
    const OffloadedPass* const moved = product.offloaded[end - 1].get();
    if (moved != nullptr) some.back() = at_bytes(some.back(), *moved, offload_->acquire(offload_index_.at(moved)));
    args.passes = some;
    args.weights_ready = overlap_ && moved == nullptr;
    kernels::rotated_linear(args, stream_);
    if (moved != nullptr) offload_->release(offload_index_.at(moved));
    args.bias = nullptr;
    args.add = true;
    at = end;
  }
}

const __half* CudaMultiplier::scaled(const CudaProduct& product, int64_t k, const __half* x, int64_t rows) {
  if (product.input_scale == nullptr) return x;
  kernels::divide_columns_cuda(x, product.input_scale, rows, k, scaled_.as<__half>(), stream_);
  return scaled_.as<__half>();
}

void CudaMultiplier::multiply_packed(const CudaProduct& product, int64_t k, const __half* x, int64_t rows,
                                     const Output& out, const kernels::LinearFusion& fusion) {
  kernels::LinearArgs args;
  args.m = rows;
  args.x = scaled(product, k, x, rows);
  args.ldx = k;
  args.weight = *product.packed;
  args.bias = product.bias;
  args.y = out.y;
  args.ldy = out.stride;
  args.fp32 = out.fp32;
  if (out.add) args.residual = out.y;
  args.int8_activations = int8_ && takes_int8(product);
  device::DeviceBuffer& workspace =
      kernels::pick_kernel(kernels::describe(args, stream_.context().properties())).keeps_semaphores ? words_ : wide_;
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.size();
  args.fusion = fusion;
  args.prefetch = behind(product);
  // Two blocks of an integer GEMV fit a multiprocessor: begun beside other launches, some would stand two by two. Those
  // that fuse keep theirs apart.
  args.weights_ready =
      overlap_ && (product.scheme.family == formats::SchemeFamily::kbit || kernels::takes_fused_kernel(args));
  kernels::packed_linear(args, stream_);
}

void CudaMultiplier::multiply_wide(const CudaProduct& product, int64_t k, const __half* x, int64_t rows,
                                   const Output& out) {
  device::cublas_multiply(
      {rows, product.n, k, DType::f16, x, k, product.dense, k, out.y, out.stride, cublas_.data(), out.fp32, out.add},
      stream_);
  if (product.bias == nullptr) return;
  const auto add_bias = [&](auto* y) { kernels::add_bias_cuda(product.bias, rows, product.n, y, out.stride, stream_); };
  if (out.fp32) return add_bias(static_cast<float*>(out.y));
  add_bias(static_cast<__half*>(out.y));
}

void CudaMultiplier::multiply_dense(const CudaProduct& product, int64_t k, const __half* x, int64_t rows,
                                    const Output& out) {
  if (rows > 1 || !kernels::dense_gemv_accepts(product.n, k)) return multiply_wide(product, k, x, rows, out);
  kernels::DenseGemvArgs args{product.dense, x, product.bias, product.n, k};
  if (out.add) {
    args.residual = static_cast<float*>(out.y);
  } else if (out.fp32) {
    args.out_fp32 = static_cast<float*>(out.y);
  } else {
    args.out = static_cast<__half*>(out.y);
  }
  args.overlap = overlap_;
  kernels::dense_gemv_cuda(args, stream_);
}

void CudaMultiplier::multiply_into(const CudaLinear& linear, const __half* x, int64_t rows, const Output& out,
                                   const kernels::LinearFusion& fusion) {
  for (const auto& product : linear.products) {
    if (!product.rotated.empty()) {
      multiply_rotated(product, x, rows, out.of(product), fusion);
    } else if (product.packed) {
      multiply_packed(product, linear.k, x, rows, out.of(product), fusion);
    } else {
      multiply_dense(product, linear.k, x, rows, out.of(product));
    }
  }
}

void CudaMultiplier::multiply(const CudaLinear& linear, const __half* x, int64_t rows, float* y, InputNorm norm) {
  multiply_into(linear, x, rows, {y, linear.n, true}, after(norm));
}

void CudaMultiplier::multiply_residual(const CudaLinear& linear, const __half* x, int64_t rows, float* residual,
                                       const NextNorm* next) {
  ensure(linear.products.size() == 1, "multiply_residual: one layer at a time");
  kernels::LinearFusion fusion;
  if (next != nullptr) {
    fusion.next_x = next->x;
    fusion.next_weight = next->weight;
    fusion.next_norm = next->state;
    fusion.last_norm = next->last;
    fusion.eps = next->eps;
  }
  multiply_into(linear, x, rows, {residual, linear.n, true, true}, fusion);
}

void CudaMultiplier::multiply_gated(const CudaLinear& linear, const __half* x, int64_t rows, __half* both, __half* out,
                                    InputNorm norm) {
  const CudaProduct& product = linear.products.front();
  kernels::LinearFusion fusion = after(norm);
  if (rows == 1 && linear.gate_up_turns && fuses(linear, stream_.context().properties())) {
    fusion.swiglu = true;
    return multiply_into(linear, x, rows, {out, linear.n}, fusion);
  }
  if (linear.gate_up_turns && gates(product, linear.k, rows)) {
    fusion.swiglu = true;
    return multiply_packed(product, linear.k, x, rows, {out, linear.n / 2}, fusion);
  }
  const bool dense = rows == 1 && linear.products.size() == 1 && product.dense != nullptr &&
                     kernels::dense_gemv_accepts(product.n, linear.k);
  if (dense) {
    kernels::DenseGemvArgs args{product.dense, x, product.bias, product.n, linear.k};
    args.gated = out;
    args.overlap = overlap_;
    return kernels::dense_gemv_cuda(args, stream_);
  }
  multiply_into(linear, x, rows, {both, linear.n}, fusion);
  kernels::silu_multiply_cuda(both, rows, linear.n / 2, linear.gate_up_turns, out, overlap_ && rows == 1, stream_);
}

void CudaMultiplier::multiply_logits(const CudaLinear& head, const __half* x, int64_t rows, float* out,
                                     InputNorm norm) {
  const bool int8 = std::exchange(int8_, false);
  multiply_into(head, x, rows, {out, head.n, true}, after(norm));
  int8_ = int8;
}

}  // namespace w4q::decoder_cuda
