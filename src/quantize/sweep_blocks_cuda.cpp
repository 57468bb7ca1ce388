#include "quantize/sweep_blocks_cuda.h"

#include <memory>

#include "core/parallel.h"

namespace w4q::quantize {
namespace {

/// A matrix of its own for each block.
struct Block {
  Block(std::vector<float> gram, int64_t count, float ridge, std::string_view name)
      : products(std::move(gram)), whole({{products.data(), count, count}, ridge}, 0, count, name) {
    for (int64_t c = 0; c < count; ++c) products[static_cast<size_t>(c * count + c)] += ridge;
  }

  std::vector<float> products;
  WholeBlock whole;
};

/// H⁻¹ as columns stand.
std::vector<float> inverse_of(const WholeBlock& block) {
  const int64_t count = block.columns();
  std::vector<float> solved(static_cast<size_t>(count * count)), result(solved.size());
  for (int64_t p = 0; p < count; ++p) solved[static_cast<size_t>(p * count + block.column(p))] = 1;
  block.solve({solved.data(), count, count});
  for (int64_t p = 0; p < count; ++p) {
    const float* row = solved.data() + p * count;
    for (int64_t c = 0; c < count; ++c) result[static_cast<size_t>(c * count + block.column(p))] = row[c];
  }
  return result;
}

}  // namespace

SweepBlocksCuda::SweepBlocksCuda(CudaWork& work, const GramCuda& gram, int64_t block, double damping,
                                 std::string_view name)
    : gram_(gram) {
  const auto diagonal = gram.diagonal();
  ridge_ = static_cast<float>(damping * mean_diagonal(diagonal, name));
  add_codes(work, diagonal);
  if (block <= widest_whole_block) add_blocks(work, diagonal, block, name);
}

std::vector<float> SweepBlocksCuda::square(const CudaWork& work, int64_t first, int64_t count) const {
  std::vector<float> result(static_cast<size_t>(count * count));
  const auto row = static_cast<size_t>(gram_.width()) * sizeof(float),
             part = static_cast<size_t>(count) * sizeof(float);
  device::copy_rows(device::Way::from_gpu, {result.data(), part}, {gram_.data() + first * gram_.width() + first, row},
                    part, static_cast<size_t>(count), work.stream, "copying a block of the Gram matrix");
  return result;
}

void SweepBlocksCuda::add_codes(CudaWork& work, std::span<const float> diagonal) {
  const ColumnOrder order = column_order(diagonal, sweep_code_unit);
  std::vector<int32_t> offsets(order.columns);
  for (auto& column : offsets) column %= static_cast<int32_t>(sweep_code_unit);
  code_orders_ = device::DeviceBuffer::copy_of(bytes_of(offsets), work.stream);
  work.stream.synchronize();
  for (size_t u = 0; u + 1 < order.starts.size(); ++u) {
    const int64_t begin = order.starts[u];
    const int64_t first = order.columns[static_cast<size_t>(begin)] / sweep_code_unit * sweep_code_unit;
    codes_.push_back({.first = first,
                      .count = static_cast<int>(order.starts[u + 1] - begin),
                      .order = code_orders_.as<int32_t>() + begin});
  }
}

void SweepBlocksCuda::add_blocks(CudaWork& work, std::span<const float> diagonal, int64_t block,
                                 std::string_view name) {
  const ColumnOrder order = column_order(diagonal, block);
  const size_t count = order.starts.size() - 1;
  std::vector<std::vector<float>> squares;
  std::vector<int64_t> firsts;
  for (size_t b = 0; b < count; ++b) {
    firsts.push_back(order.columns[static_cast<size_t>(order.starts[b])] / block * block);
    squares.push_back(square(work, firsts[b], order.starts[b + 1] - order.starts[b]));
  }
  work.stream.synchronize();
  const int64_t each = block * block;
  std::vector<float> floats(count * static_cast<size_t>(3 * each + block));
  std::vector<int32_t> offsets(order.columns.size());
  parallel_for(static_cast<int64_t>(count), 1, [&](int64_t b, int64_t) {
    const auto at = static_cast<size_t>(b);
    const int64_t columns = order.starts[at + 1] - order.starts[at];
    const Block own(std::move(squares[at]), columns, ridge_, name);
    float* to = floats.data() + b * (3 * each + block);
    std::ranges::copy(inverse_of(own.whole), to);
    std::ranges::copy(own.products, to + each);
    const auto coupling = own.whole.factor().coupling();
    std::copy_n(coupling.data, columns * columns, to + 2 * each);
    std::ranges::copy(own.whole.factor().pivots(), to + 3 * each);
    for (int64_t p = 0; p < columns; ++p) {
      offsets[static_cast<size_t>(order.starts[at] + p)] = static_cast<int32_t>(own.whole.column(p));
    }
  });
  floats_ = device::DeviceBuffer::copy_of(bytes_of(floats), work.stream);
  block_orders_ = device::DeviceBuffer::copy_of(bytes_of(offsets), work.stream);
  work.stream.synchronize();
  for (size_t b = 0; b < count; ++b) {
    const float* own = floats_.as<float>() + static_cast<int64_t>(b) * (3 * each + block);
    blocks_.push_back({.first = firsts[b],
                       .count = static_cast<int>(order.starts[b + 1] - order.starts[b]),
                       .inverse = own,
                       .products = own + each,
                       .coupling = own + 2 * each,
                       .pivots = own + 3 * each,
                       .order = block_orders_.as<int32_t>() + order.starts[b]});
  }
}

}  // namespace w4q::quantize
