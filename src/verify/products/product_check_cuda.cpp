#include "verify/products/product_check_cuda.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "core/convert.h"
#include "core/rng.h"
#include "core/text.h"
#include "device/buffer.h"
#include "kernels/elementwise/elementwise.h"
#include "verify/products/product_kernels_cuda.h"

namespace w4q::verify {
namespace {

using decoder_cuda::CudaLinear;
using decoder_cuda::CudaMultiplier;
using decoder_cuda::CudaProduct;
using device::DeviceBuffer;

/// Rows that are looked at: the first ones, and the last ones of every count.
std::vector<int64_t> looked_at(const std::vector<int64_t>& counts) {
  std::set<int64_t> rows;
  for (const int64_t count : counts) {
    for (int64_t r = 0; r < std::min<int64_t>(count, 32); ++r) rows.insert({r, count - 1 - r % 16});
  }
  return {rows.begin(), rows.end()};
}

/// Rows of random f16 numbers: the same 2^20 numbers over and over, so that no two rows begin alike.
std::vector<float> random_rows(int64_t rows, int64_t k) {
  static const std::vector<float> numbers = [] {
    std::vector<float> values((1 << 20) - 3);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(random_normal(23, i));
    std::vector<std::byte> halves(values.size() * 2);
    narrow(values, DType::f16, halves);
    widen(halves, DType::f16, values);
    return values;
  }();
  std::vector<float> x(static_cast<size_t>(rows * k));
  for (size_t i = 0; i < x.size(); ++i) x[i] = numbers[i % numbers.size()];
  return x;
}

DeviceBuffer upload(std::span<const std::byte> bytes, const device::Stream& stream) {
  auto buffer = DeviceBuffer::copy_of(bytes, stream);
  stream.synchronize();
  return buffer;
}

DeviceBuffer upload_halves(std::span<const float> values, const device::Stream& stream) {
  std::vector<std::byte> halves(values.size() * 2);
  narrow(values, DType::f16, halves);
  return upload(halves, stream);
}

std::vector<float> download(const DeviceBuffer& buffer, DType type, int64_t count, const device::Stream& stream) {
  std::vector<float> values(static_cast<size_t>(count));
  std::vector<std::byte> bytes(values.size() * (type == DType::f16 ? 2 : 4));
  buffer.download(bytes, stream);
  stream.synchronize();
  widen(bytes, type, values);
  return values;
}

/// Outputs of a row.
int64_t width(const CheckedProduct& product) { return product.linear.n / (product.use == Use::gated ? 2 : 1); }

std::vector<float> multiply(const CheckedProduct& product, CudaMultiplier& multiplier, const DeviceBuffer& x,
                            int64_t rows, const device::Stream& stream, decoder_cuda::InputNorm norm = {}) {
  const auto values = static_cast<size_t>(rows * product.linear.n);
  DeviceBuffer y(stream.context(), values * 4);
  y.fill(0xFF, stream);
  if (product.use == Use::gated) {
    DeviceBuffer both(stream.context(), values * 2);
    multiplier.multiply_gated(product.linear, x.as<__half>(), rows, both.as<__half>(), y.as<__half>(), norm);
    return download(y, DType::f16, rows * width(product), stream);
  }
  if (product.use == Use::plain) {
    multiplier.multiply(product.linear, x.as<__half>(), rows, y.as<float>(), norm);
    return download(y, DType::f32, rows * product.linear.n, stream);
  }
  const std::vector<float> ones(values, 1.0f);
  y.upload(bytes_of(ones), stream);
  stream.synchronize();
  multiplier.multiply_residual(product.linear, x.as<__half>(), rows, y.as<float>());
  auto sums = download(y, DType::f32, rows * product.linear.n, stream);
  for (float& sum : sums) sum -= 1.0f;
  return sums;
}

/// Lines without errors.
std::vector<KernelError> lines_of(const CheckedProduct& product, bool int8) {
  std::vector<KernelError> lines;
  int64_t column = 0;
  for (const auto* weight : product.weights) {
    const auto& part = *std::ranges::find_if(product.linear.products, [&](const CudaProduct& one) {
      return column >= one.first && column < one.first + one.n();
    });
    KernelError line{.name = weight->name, .scheme = part.scheme};
    line.bound = error_bound(part, product.use, int8);
    column += weight->n;
    lines.push_back(line);
  }
  if (product.use != Use::gated) return lines;
  const std::string& other = lines.back().name;
  lines.front().name += " and " + other.substr(other.rfind('.') + 1);
  lines.front().bound = std::max(lines.front().bound, lines.back().bound);
  lines.pop_back();
  return lines;
}

double worse(double a, double b) { return std::isnan(a) || a > b ? a : b; }

void add_errors(const ProductReference& reference, const Distances& found, KernelError& line) {
  line.to_cpu = worse(line.to_cpu, found.to_cpu);
  line.to_fp64 = worse(line.to_fp64, found.to_exact);
  if (!reference.unrounded.empty()) line.rounding = worse(line.rounding, found.to_unrounded);
}

void name_kernels(const CheckedProduct& product, int64_t rows, bool int8, std::string_view suffix,
                  std::vector<std::string>& names) {
  for (const auto& part : product.linear.products) {
    for (const auto& name : kernel_names(part, rows, int8)) {
      const std::string whole = concat(name, suffix);
      if (std::ranges::find(names, whole) == names.end()) names.push_back(whole);
    }
  }
}

/// Lines of a step.
std::vector<KernelError> lines_of_one(const CheckedProduct& product, MatrixView<const float> x,
                                      const std::vector<float>& found) {
  constexpr int64_t row[] = {0};
  const auto references = make_references(product.weights, product.use, x, false);
  std::vector<std::string> names;
  name_kernels(product, 1, false, ", fused", names);
  auto lines = lines_of(product, false);
  for (size_t i = 0; i < lines.size(); ++i) {
    add_errors(references[i], distances(references[i], row, found.data(), width(product)), lines[i]);
    lines[i].kernels = join(names);
  }
  return lines;
}

}  // namespace

std::vector<KernelError> check_product(device::Context& gpu, const CheckedProduct& product, bool int8_activations) {
  const device::Stream stream(gpu);
  const auto counts = row_counts(product.linear, int8_activations);
  const auto rows = looked_at(counts);
  const int64_t k = product.linear.k;
  const auto x = random_rows(counts.back(), k);
  const auto on_gpu = upload_halves(x, stream);
  std::vector<float> some;
  for (const int64_t row : rows) some.insert(some.end(), x.begin() + row * k, x.begin() + (row + 1) * k);
  const auto references = make_references(product.weights, product.use,
                                          {some.data(), static_cast<int64_t>(rows.size()), k}, int8_activations);
  CudaMultiplier multiplier(std::array{&product.linear}, counts.back(), stream, int8_activations);
  multiplier.set_int8_activations(int8_activations);
  auto lines = lines_of(product, int8_activations);
  std::vector<std::string> names;
  for (const int64_t count : counts) {
    const auto found = multiply(product, multiplier, on_gpu, count, stream);
    const auto end = std::ranges::lower_bound(rows, count);
    for (size_t i = 0; i < lines.size(); ++i) {
      add_errors(references[i], distances(references[i], {rows.begin(), end}, found.data(), width(product)), lines[i]);
    }
    name_kernels(product, count, int8_activations, "", names);
  }
  for (auto& line : lines) line.kernels = join(names);
  return lines;
}

std::vector<KernelError> check_step(device::Context& gpu, const CheckedProduct& from, const CheckedProduct& to,
                                    std::span<const float> norm, float eps) {
  if (!fuses(from.linear) || !fuses(to.linear)) return {};
  const device::Stream stream(gpu);
  const int64_t hidden = from.linear.n;
  const auto x = random_rows(1, from.linear.k);
  auto residual = random_rows(1, hidden);
  for (float& value : residual) value *= 8;  // larger than what is added, as in models
  std::vector<float> last(static_cast<size_t>(kernels::norm_state_floats(hidden)), NAN);
  last[1] = 0x1p-3f;  // all of the state before that is read: what makes a stream of eights ones
  const auto on_gpu = upload_halves(x, stream), weight = upload(std::as_bytes(norm), stream);
  const auto before = upload(bytes_of(last), stream);
  auto sums = upload(bytes_of(residual), stream);
  DeviceBuffer state(gpu, before.size()), normed(gpu, static_cast<size_t>(hidden) * 2);
  const decoder_cuda::NextNorm next{weight.as<float>(), before.as<float>(), state.as<float>(), normed.as<__half>(),
                                    eps};
  CudaMultiplier multiplier(std::array{&from.linear, &to.linear}, 1, stream);
  multiplier.multiply_residual(from.linear, on_gpu.as<__half>(), 1, sums.as<float>(), &next);
  const auto found = multiply(to, multiplier, normed, 1, stream, {state.as<float>(), eps});

  const auto after = download(sums, DType::f32, hidden, stream);
  std::vector<float> added(after), input(after);
  for (size_t i = 0; i < added.size(); ++i) added[i] -= residual[i];
  kernels::rms_norm({after.data(), 1, hidden}, norm, eps, {input.data(), 1, hidden});
  auto lines = lines_of_one(from, {x.data(), 1, from.linear.k}, added);
  for (auto& line : lines_of_one(to, {input.data(), 1, hidden}, found)) lines.push_back(std::move(line));
  return lines;
}

}  // namespace w4q::verify
