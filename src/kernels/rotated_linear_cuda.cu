#include "core/error.h"
#include "core/text.h"
#include "kernels/rotate_input.h"
#include "kernels/rotated_linear.h"

namespace w4q::kernels {
namespace {

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

/// The two parts of the workspace: what the product needs, and the rotated input.
struct Parts {
  size_t product, rotated;
  Parts(int64_t m, int64_t n, int64_t k)
      : product(aligned(kbit_linear_workspace(m, n, k))), rotated(aligned(static_cast<size_t>(m * k) * 2)) {}
};

}  // namespace

size_t rotated_linear_workspace(int64_t m, int64_t n, int64_t k) {
  const Parts parts(m, n, k);
  return parts.product + parts.rotated;
}

void rotated_linear(const RotatedLinearArgs& args, cudaStream_t stream) {
  if (args.passes.empty()) throw Error(ErrorCode::bad_argument, "rotated_linear: no pass");
  const int64_t n = args.passes.front().weight.n, k = args.passes.front().weight.k;
  const Parts parts(args.m, n, k);
  if (args.workspace == nullptr || args.workspace_bytes < parts.product + parts.rotated) {
    throw Error(ErrorCode::bad_argument, "rotated_linear: the workspace is too small");
  }
  auto* rotated = static_cast<std::byte*>(args.workspace) + parts.product;
  const float* at_hand = nullptr;
  for (size_t p = 0; p < args.passes.size(); ++p) {
    const RotatedDevicePass& pass = args.passes[p];
    const bool rotates = pass.block > 1;
    if (rotates && pass.factors != at_hand) {
      rotate_input(
          {args.m, k, pass.block, args.activation, args.x, args.ldx, pass.factors, args.input_scale, rotated, k},
          stream);
      at_hand = pass.factors;
    }
    if (!rotates && args.input_scale != nullptr) {
      throw Error(ErrorCode::bad_argument, "rotated_linear: an input scale belongs to a rotated pass");
    }
    KbitLinearArgs product;
    product.m = args.m;
    product.activation = args.activation;
    product.x = rotates ? rotated : args.x;
    product.ldx = rotates ? k : args.ldx;
    product.weight = pass.weight;
    product.bias = p == 0 ? args.bias : nullptr;
    product.residual = p == 0 ? nullptr : args.y;
    product.y = args.y;
    product.ldy = args.ldy;
    product.workspace = args.workspace;
    product.workspace_bytes = parts.product;
    kbit_linear(product, stream);
  }
}

}  // namespace w4q::kernels
