#include "verify/weights/factors.h"

#include "core/parallel.h"

namespace w4q::verify {

using kernels::LinearWeight;

Moves moves_of(int bits) noexcept {
  constexpr double least_left = 0.8;
  const double times = bits < 4 ? 12 : 8;
  return {times * std::pow(0.25, bits), bits < 4 ? least_gain / 2 : least_gain * least_left};
}

std::vector<Factor> row_factors_of(const LinearWeight& base, const LinearWeight& stored,
                                   const std::vector<float>& columns) {
  std::vector<Factor> result(static_cast<size_t>(stored.n));
  parallel_for(stored.n, decoded_rows, [&](int64_t begin, int64_t end) {
    std::vector<float> a(static_cast<size_t>((end - begin) * stored.k)), b(a.size());
    kernels::decode_rows(base, begin, end, {a.data(), end - begin, stored.k});
    kernels::decode_rows(stored, begin, end, {b.data(), end - begin, stored.k});
    for (size_t i = 0; i < a.size(); ++i) {
      const size_t col = i % static_cast<size_t>(stored.k);
      result[static_cast<size_t>(begin) + i / static_cast<size_t>(stored.k)].add(double{a[i] * columns[col]},
                                                                                 double{b[i]});
    }
  });
  return result;
}

std::vector<Factor> column_factors(const LinearWeight& base, const LinearWeight& stored,
                                   const std::vector<float>& rows) {
  constexpr int64_t asked_rows = 256;
  const auto k = static_cast<size_t>(stored.k);
  const int64_t blocks = (stored.n + decoded_rows - 1) / decoded_rows;
  const int64_t taken = std::clamp<int64_t>(asked_rows / decoded_rows, 1, blocks);
  std::vector<float> a(static_cast<size_t>(decoded_rows) * k), b(a.size());
  std::vector<Factor> columns(k);
  for (int64_t i = 0; i < taken; ++i) {
    const int64_t begin = i * blocks / taken * decoded_rows, end = std::min(begin + decoded_rows, stored.n);
    kernels::decode_rows(base, begin, end, {a.data(), end - begin, stored.k});
    kernels::decode_rows(stored, begin, end, {b.data(), end - begin, stored.k});
    for (size_t row = 0; row < static_cast<size_t>(end - begin); ++row) {
      const double factor = rows.empty() ? 1.0 : double{rows[static_cast<size_t>(begin) + row]};
      for (size_t c = 0; c < k; ++c) columns[c].add(factor * double{a[row * k + c]}, double{b[row * k + c]});
    }
  }
  return columns;
}

}  // namespace w4q::verify
