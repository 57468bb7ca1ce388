#include "pipeline/round_anew.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "core/parallel.h"
#include "formats/integer.h"
#include "formats/scheme_registry.h"

namespace w4q::pipeline {
namespace {

using formats::PackedWeight;

int64_t rows_of_chunk(int64_t k) { return std::max<int64_t>(1, (1 << 18) / k); }

/// Puts the rows of `part` into `whole`, whose planes are rows too.
void copy_rows(const PackedWeight& part, PackedWeight& whole, int64_t first) {
  for (const auto& plane : part.planes) {
    const size_t row_bytes = plane.bytes.size() / static_cast<size_t>(part.n);
    std::memcpy(whole.plane(plane.spec.role).bytes.data() + static_cast<size_t>(first) * row_bytes, plane.bytes.data(),
                plane.bytes.size());
  }
}

}  // namespace

PackedWeight round_anew(const formats::PackedLinear& source, const formats::Scheme& scheme,
                        const formats::Rotation& rotation) {
  const int64_t n = source.passes.front().n, k = source.passes.front().k;
  PackedWeight result = formats::allocate_integer(scheme, n, k);
  const auto& row_of_table = formats::scheme_row(scheme.family);
  const formats::InputRotation turn(rotation, k);
  parallel_for(n, rows_of_chunk(k), [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>((end - begin) * k));
    for (int64_t row = begin; row < end; ++row) {
      const auto decoded = std::span(values).subspan(static_cast<size_t>((row - begin) * k), static_cast<size_t>(k));
      formats::decode_linear_row(source, row, decoded);
      if (!rotation.identity()) turn.rotate(decoded);
    }
    copy_rows(row_of_table.encode(scheme, values, end - begin, k, {}), result, begin);
  });
  return result;
}

ConversionError rounding_error(const formats::PackedLinear& source, const PackedWeight& rounded,
                               const formats::Rotation& rotation) {
  ConversionError total;
  std::mutex mutex;
  const auto width = static_cast<size_t>(rounded.k);
  const formats::InputRotation turn(rotation, rounded.k);
  parallel_for(rounded.n, rows_of_chunk(rounded.k), [&](int64_t begin, int64_t end) {
    std::vector<float> before(width), after(width);
    ConversionError error;
    for (int64_t row = begin; row < end; ++row) {
      formats::decode_linear_row(source, row, before);
      formats::scheme_row(rounded.scheme.family).decode_row(rounded, row, after);
      if (!rotation.identity()) turn.restore(after);
      for (size_t col = 0; col < width; ++col) {
        const double difference = static_cast<double>(after[col]) - static_cast<double>(before[col]);
        error.squared_error += difference * difference;
        error.squared += static_cast<double>(before[col]) * static_cast<double>(before[col]);
        error.changed += before[col] != after[col];
      }
    }
    const std::lock_guard lock(mutex);
    total.squared_error += error.squared_error;
    total.squared += error.squared;
    total.changed += error.changed;
  });
  return total;
}

}  // namespace w4q::pipeline
