#include "model/cuda_pack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/float_formats.h"
#include "device/check.h"
#include "formats/e4m4.h"
#include "formats/kbit.h"
#include "repack/layout_registry.h"
#include "repack/map_pass_cuda.h"

namespace w4q::model {
namespace {

using device::DeviceBuffer;
using formats::PackedWeight;
using formats::Plane;
using formats::PlaneRole;
using formats::ScaleType;
using formats::SchemeFamily;
using Weights = std::span<const PackedWeight* const>;

const Plane* find_plane(const PackedWeight& weight, PlaneRole role) {
  const auto found = std::ranges::find_if(weight.planes, [&](const Plane& plane) { return plane.spec.role == role; });
  return found == weight.planes.end() ? nullptr : &*found;
}

/// Planes that have no rows, and so have to be equal where rows are stacked.
constexpr std::array shared_roles = {PlaneRole::codebook, PlaneRole::group_index};

bool is_shared(PlaneRole role) { return std::ranges::find(shared_roles, role) != shared_roles.end(); }

int64_t rows_of(Weights weights) {
  return std::accumulate(weights.begin(), weights.end(), int64_t{0},
                         [](int64_t sum, const PackedWeight* weight) { return sum + weight->n; });
}

float largest_scale(const PackedWeight& weight) {
  const auto& bytes = weight.plane(PlaneRole::scales).bytes;
  float most = 0x1p-14f;
  const auto widest = [&](const auto& values, const auto& decode) {
    for (const auto bits : values) most = std::max(most, std::abs(decode(bits)));
  };
  switch (weight.scheme.scale) {
    case ScaleType::e4m4:
      widest(bytes.as<uint8_t>(), [](uint8_t bits) { return formats::e4m4_decode(bits); });
      break;
    case ScaleType::bf16:
      widest(bytes.as<uint16_t>(), [](uint16_t bits) { return f32_from_bf16(bits); });
      break;
    default:
      widest(bytes.as<uint16_t>(), [](uint16_t bits) { return f32_from_f16(bits); });
  }
  return most;
}

/// How a plane of one weight lies in the plane of the stack: pieces of `piece` bytes, `pitch` apart, from `first` on.
struct Pieces {
  std::span<const std::byte> bytes;
  size_t first, piece, pitch;
};

/// A plane of each weight: one below the other, or so many rows of each in turn.
std::vector<Pieces> lay_out(Weights weights, PlaneRole role, int64_t rows_in_turn) {
  std::vector<Pieces> all;
  size_t first = 0;
  for (const auto* weight : weights) {
    const auto bytes = weight->plane(role).bytes.bytes();
    const auto turns = static_cast<size_t>(rows_in_turn > 0 ? weight->n / rows_in_turn : 1);
    const size_t piece = bytes.size() / turns;
    all.push_back({bytes, first, piece, piece * weights.size()});
    first += piece;
  }
  return all;
}

size_t bytes_of_all(std::span<const Pieces> planes) {
  return std::accumulate(planes.begin(), planes.end(), size_t{0},
                         [](size_t sum, const Pieces& plane) { return sum + plane.bytes.size(); });
}

/// Rows of a plane of all weights in GPU memory.
DeviceBuffer stack_on_gpu(std::span<const Pieces> planes, const device::Stream& stream) {
  DeviceBuffer stacked(bytes_of_all(planes));
  for (const auto& [bytes, first, piece, pitch] : planes) {
    device::check(cudaMemcpy2DAsync(stacked.data() + first, pitch, bytes.data(), piece, piece, bytes.size() / piece,
                                    cudaMemcpyHostToDevice, stream.get()),
                  "copying weights to the GPU");
  }
  return stacked;
}

/// The same on the host, all planes.
PackedWeight stack(Weights weights, int64_t rows_in_turn) {
  PackedWeight all = weights.front()->clone();
  all.n = rows_of(weights);
  for (Plane& plane : all.planes) {
    if (is_shared(plane.spec.role)) continue;
    const auto planes = lay_out(weights, plane.spec.role, rows_in_turn);
    Buffer stacked(bytes_of_all(planes));
    for (const auto& [bytes, first, piece, pitch] : planes) {
      size_t to = first;
      for (size_t from = 0; from < bytes.size(); from += piece, to += pitch) {
        std::ranges::copy(bytes.subspan(from, piece), stacked.bytes().subspan(to).begin());
      }
    }
    plane.spec.shape.front() = all.n;
    plane.bytes = std::move(stacked);
  }
  return all;
}

/// Which input stands at each place of codes that are sorted by group.
std::vector<int32_t> sorted_inputs(const PackedWeight& weight) {
  const auto groups = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  std::vector<int32_t> order(groups.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int32_t input) { return groups[static_cast<size_t>(input)]; });
  return order;
}

class Packer {
 public:
  Packer(Weights weights, int64_t rows_in_turn, std::string_view layout, const device::Stream& stream)
      : weights_(weights), rows_in_turn_(rows_in_turn), stream_(stream) {
    auto& weight = packed_.weight;
    weight.scheme = weights.front()->scheme;
    weight.n = rows_of(weights);
    weight.k = weights.front()->k;
    weight.scale_max = 0;
    for (const auto* each : weights) weight.scale_max = std::max(weight.scale_max, largest_scale(*each));
    weight.layout = layout;
  }

  CudaPacked run() && {
    if (packed_.weight.scheme.family == SchemeFamily::kbit) {
      pack_kbit();
    } else {
      pack_integer();
    }
    return std::move(packed_);
  }

 private:
  void pack_kbit() {
    auto& weight = packed_.weight;
    DeviceBuffer codes = stack_on_gpu(lay_out(weights_, PlaneRole::codes, rows_in_turn_), stream_);
    DeviceBuffer scales = stack_on_gpu(lay_out(weights_, PlaneRole::scales, rows_in_turn_), stream_);
    const auto specs = repack::layout_row(weight.layout).planes(weight.scheme, weight.n, weight.k);
    const auto allocate = [&](PlaneRole role) {
      const auto spec = std::ranges::find(specs, role, &formats::PlaneSpec::role);
      return read(DeviceBuffer(static_cast<size_t>(byte_count(spec->dtype, spec->shape)))).data();
    };
    const repack::DeviceBlocks packed{reinterpret_cast<uint32_t*>(allocate(PlaneRole::codes)),
                                      allocate(PlaneRole::scales)};
    repack::pack_cuda(weight.layout, weight.scheme, weight.n, weight.k, {codes.as<uint32_t>(), scales.data()}, packed,
                      stream_.get());
    weight.codes = packed.codes;
    weight.scales = packed.scales;
    const auto& table = weights_.front()->plane(PlaneRole::codebook).bytes;
    weight.table_max = formats::kbit_table_max(table.as<float>());
    weight.codebook = upload(table.bytes()).as<float>();  // waits: the canonical planes may go
  }

  void pack_integer() {
    auto& weight = packed_.weight;
    const PackedWeight canonical = stack(weights_, rows_in_turn_);
    const auto& row = repack::layout_row(weight.layout);
    const PackedWeight words = row.pack_cuda != nullptr ? row.pack_cuda(canonical) : row.pack(canonical);
    weight.codes = read_plane(words, PlaneRole::codes).as<uint32_t>();
    weight.scales = read_plane(words, PlaneRole::scales).data();
    if (weight.scheme.asymmetric) weight.zeros = read_plane(words, PlaneRole::zeros).as<uint32_t>();
    if (weight.scheme.act_order) weight.input_order = upload(bytes_of(sorted_inputs(canonical))).as<int32_t>();
  }

  /// Counts what a product reads.
  DeviceBuffer& read(DeviceBuffer buffer) {
    packed_.bytes += static_cast<int64_t>(buffer.size());
    packed_.memory.push_back(std::move(buffer));
    return packed_.memory.back();
  }
  DeviceBuffer& read_plane(const PackedWeight& words, PlaneRole role) {
    DeviceBuffer& buffer = read(DeviceBuffer::copy_of(words.plane(role).bytes.bytes(), stream_));
    stream_.synchronize();  // `words` may go
    return buffer;
  }
  DeviceBuffer& upload(std::span<const std::byte> bytes) {
    packed_.memory.push_back(DeviceBuffer::copy_of(bytes, stream_));
    stream_.synchronize();
    return packed_.memory.back();
  }

  Weights weights_;
  int64_t rows_in_turn_;
  const device::Stream& stream_;
  CudaPacked packed_;
};

}  // namespace

std::string_view device_layout(const formats::Scheme& scheme, int64_t n, int64_t k) {
  if (scheme.family != SchemeFamily::kbit && scheme.family != SchemeFamily::integer) return {};
  for (const std::string_view layout : {"kbit-fragment", "marlin"}) {
    if (!repack::layout_row(layout).accepts(scheme, n, k, nullptr)) continue;
    const kernels::LinearDesc desc{scheme, layout, 1, n, k};
    const auto takes = [&](const kernels::KernelRow& row) { return row.accepts(desc, nullptr); };
    if (std::ranges::any_of(kernels::kernel_registry(), takes)) return layout;
  }
  return {};
}

bool can_stack(const PackedWeight& a, const PackedWeight& b) {
  if (a.scheme != b.scheme || a.k != b.k) return false;
  return std::ranges::all_of(shared_roles, [&](PlaneRole role) {
    const Plane* const first = find_plane(a, role);
    const Plane* const second = find_plane(b, role);
    if (first == nullptr || second == nullptr) return first == second;
    return std::ranges::equal(first->bytes.bytes(), second->bytes.bytes());
  });
}

CudaPacked pack_for_device(Weights weights, const device::Stream& stream, int64_t rows_in_turn) {
  ensure(!weights.empty(), "pack_for_device: no weights");
  for (const auto* weight : weights) {
    ensure(rows_in_turn == 0 || (weight->n == weights.front()->n && weight->n % rows_in_turn == 0),
           "pack_for_device: rows do not take turns");
  }
  const PackedWeight& first = *weights.front();
  const std::string_view layout = device_layout(first.scheme, first.n, first.k);
  ensure(!layout.empty(), "pack_for_device: no kernel reads such weights");
  return Packer(weights, rows_in_turn, layout, stream).run();
}

}  // namespace w4q::model
