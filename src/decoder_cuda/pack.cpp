#include "decoder_cuda/pack.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "decoder_cuda/stack.h"
#include "formats/kbit.h"
#include "formats/scale_range.h"
#include "kernels/common/table_stretch.h"
#include "kernels/linear/kernel_row.h"
#include "kernels/small_float/tile_scales.h"
#include "repack/layout_registry.h"
#include "repack/map_pass_cuda.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;
using formats::PackedWeight;
using formats::PlaneRole;
using formats::SchemeFamily;

/// Whether a kernel takes one row of activations and such a weight.
bool has_kernel(const device::Properties& gpu, const formats::Scheme& scheme, std::string_view layout, int64_t n,
                int64_t k) {
  if (!repack::layout_row(layout).accepts(scheme, n, k, nullptr)) return false;
  const kernels::DevicePass pass{.scheme = scheme, .layout = layout, .n = n, .k = k};
  return kernels::find_kernel({.gpu = gpu, .passes = {&pass, 1}, .m = 1}) != nullptr;
}

class Packer {
 public:
  Packer(Weights weights, int64_t rows_in_turn, std::string_view layout, const device::Stream& stream)
      : weights_(weights), rows_in_turn_(rows_in_turn), stream_(stream) {
    auto& weight = packed_.weight;
    weight.scheme = weights.front()->scheme;
    weight.n = rows_of(weights);
    weight.k = weights.front()->k;
    weight.scale_max = least_scale_max;
    weight.layout = layout;
    if (weight.scheme.family == SchemeFamily::small_float) return;
    for (const auto* each : weights) {
      const float largest = formats::scale_range(each->plane(PlaneRole::scales), each->scheme.scale).largest;
      weight.scale_max = std::max(weight.scale_max, largest);
    }
  }

  CudaPacked run() && {
    if (packed_.weight.scheme.family == SchemeFamily::kbit) {
      pack_kbit();
    } else if (packed_.weight.scheme.family == SchemeFamily::small_float) {
      pack_floats();
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
      return read(DeviceBuffer(stream_.context(), static_cast<size_t>(byte_count(spec->dtype, spec->shape)))).data();
    };
    const repack::DeviceBlocks packed{reinterpret_cast<uint32_t*>(allocate(PlaneRole::codes)),
                                      allocate(PlaneRole::scales)};
    repack::pack_cuda(weight.layout, weight.scheme, weight.n, weight.k, {codes.as<uint32_t>(), scales.data()}, packed,
                      stream_);
    weight.codes = packed.codes;
    weight.scales = packed.scales;
    const auto& table = weights_.front()->plane(PlaneRole::codebook).bytes;
    describe_table(table.as<float>(), weight);
    weight.codebook = upload(table.bytes()).as<float>();  // waits: the canonical planes may go
  }

  void pack_integer() {
    auto& weight = packed_.weight;
    const PackedWeight canonical = stack(weights_, rows_in_turn_);
    const auto& row = repack::layout_row(weight.layout);
    const PackedWeight words =
        row.pack_cuda != nullptr ? row.pack_cuda(canonical, stream_.context()) : row.pack(canonical);
    weight.codes = read_plane(words, PlaneRole::codes).as<uint32_t>();
    weight.scales = read_plane(words, PlaneRole::scales).data();
    if (weight.scheme.asymmetric) weight.zeros = read_plane(words, PlaneRole::zeros).as<uint32_t>();
    if (weight.scheme.act_order) weight.input_order = upload(bytes_of(sorted_inputs(canonical))).as<int32_t>();
  }

  /// Factors of tensors and rows become those of outputs, which stand in whatever order.
  void pack_floats() {
    auto& weight = packed_.weight;
    const kernels::FloatScales scales = kernels::float_scales(weights_, rows_in_turn_);
    const PackedWeight words = repack::layout_row(weight.layout).pack(stack_floats(weights_, rows_in_turn_));
    weight.codes = read_plane(words, PlaneRole::codes).as<uint32_t>();
    if (scales.tile_pairs.empty()) {
      weight.scales = read_plane(words, PlaneRole::scales).data();
    } else {
      weight.scales = read(DeviceBuffer::copy_of(bytes_of(scales.tile_pairs), stream_)).data();
    }
    if (!scales.outputs.empty()) {
      weight.output_factors = read(DeviceBuffer::copy_of(bytes_of(scales.outputs), stream_)).as<float>();
    }
    weight.scale_max = std::max(least_scale_max, scales.largest);
    const auto& table = weights_.front()->plane(PlaneRole::codebook).bytes;
    weight.table_max = formats::table_max(table.as<float>());
    weight.codebook = upload(table.bytes()).as<float>();  // waits: what was copied may go
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

std::string_view device_layout(const device::Properties& gpu, const formats::Scheme& scheme, int64_t n, int64_t k) {
  for (const std::string_view layout : {"kbit-fragment", "marlin", "float-fragment"}) {
    if (has_kernel(gpu, scheme, layout, n, k)) return layout;
  }
  return {};
}

std::string_view kernel_layout(const device::Properties& gpu, const PackedWeight& weight) {
  if (weight.layout == formats::canonical_layout) return device_layout(gpu, weight.scheme, weight.n, weight.k);
  const std::string_view own = repack::layout_row(weight.layout).name;
  return has_kernel(gpu, weight.scheme, own, weight.n, weight.k) ? own : std::string_view();
}

void describe_table(std::span<const float> table, kernels::DevicePass& pass) {
  pass.table_max = formats::table_max(table);
  pass.table_stretch = kernels::table_stretch(table);
  pass.product_stretch = kernels::product_stretch(table);
}

std::vector<int32_t> sorted_inputs(const PackedWeight& weight) {
  const auto groups = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  std::vector<int32_t> order(groups.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int32_t input) { return groups[static_cast<size_t>(input)]; });
  return order;
}

CudaPacked pack_for_device(Weights weights, const device::Stream& stream, int64_t rows_in_turn) {
  ensure(!weights.empty(), "pack_for_device: no weights");
  const PackedWeight& first = *weights.front();
  const std::string_view layout = device_layout(stream.context().properties(), first.scheme, first.n, first.k);
  ensure(!layout.empty(), "pack_for_device: no kernel reads such weights");
  return Packer(weights, rows_in_turn, layout, stream).run();
}

}  // namespace w4q::decoder_cuda
