#include "repack/integer_pass.h"

#include <numeric>

#include "core/error.h"
#include "core/text.h"

namespace w4q::repack {

using formats::PackedWeight;
using formats::PlaneRole;

void check_zeros_fit(const PackedWeight& canonical, std::string_view layout) {
  const int largest = (1 << canonical.scheme.bits) - 1;
  const auto zeros = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto bad = std::ranges::find_if(zeros, [&](uint8_t zero) { return zero > largest; });
  if (bad == zeros.end()) return;
  const int64_t index = bad - zeros.begin();
  const int64_t groups = formats::integer_groups(canonical.scheme, canonical.k);
  throw Error(ErrorCode::unsupported, concat("layout ", layout, " cannot hold the zero point ", +*bad))
      .detail(concat("row ", index / groups, ", group ", index % groups, ": the largest is ", largest));
}

std::vector<int32_t> inputs_by_group(const PackedWeight& weight) {
  if (!weight.scheme.act_order) return {};
  const auto index = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  std::vector<int32_t> order(index.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int32_t input) { return index[static_cast<size_t>(input)]; });
  return order;
}

void refuse_integer_padding(const PackedWeight& packed, std::string_view name, PlaneRole role, int64_t row,
                            int64_t col) {
  throw Error(ErrorCode::bad_file,
              concat(printable(name), ": plane ", to_string(role), " has padding that is not zero"))
      .detail(concat("layout ", packed.layout, ", row ", row, role == PlaneRole::codes ? ", column " : ", group ", col,
                     "; the weight has ", packed.n, " rows of ", packed.k, " columns"));
}

}  // namespace w4q::repack
