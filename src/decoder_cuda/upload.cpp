#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "checkpoint/packed_checkpoint.h"
#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "decoder_cuda/dense.h"
#include "decoder_cuda/linear.h"
#include "decoder_cuda/pack.h"
#include "decoder_cuda/rotated.h"
#include "decoder_cuda/stack.h"
#include "decoder_cuda/stored.h"
#include "decoder_cuda/trellis.h"
#include "device/copy.h"
#include "kernels/linear/int8_rows.h"
#include "kernels/linear/kernel_row.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;
using formats::PackedWeight;
using kernels::LinearWeight;

constexpr int64_t staging_bytes = int64_t{32} << 20;
constexpr float largest_half = 65504.0f;

const formats::PackedLinear* packed_of(const LinearWeight& weight) {
  const auto* packed = std::get_if<std::shared_ptr<const formats::PackedLinear>>(&weight.matrix);
  return packed == nullptr ? nullptr : packed->get();
}

std::vector<const formats::PackedLinear*> packed_of(std::span<const LinearWeight* const> layers) {
  std::vector<const formats::PackedLinear*> linears;
  for (const auto* layer : layers) linears.push_back(packed_of(*layer));
  return linears;
}

/// The one pass of a layer that a kernel reads; null for all others.
const PackedWeight* readable(const device::Properties& gpu, const LinearWeight& weight) {
  const auto* packed = packed_of(weight);
  if (packed == nullptr || packed->passes.size() != 1 || !packed->rotations.empty()) return nullptr;
  const PackedWeight& pass = packed->passes.front();
  return kernel_layout(gpu, pass).empty() ? nullptr : &pass;
}

/// Whether the kernel of one row does what lies between products.
bool fuses(const device::Properties& gpu, const formats::Scheme& scheme, std::string_view layout, int64_t n,
           int64_t k) {
  const kernels::DeviceLinear linear{.passes = {{.scheme = scheme, .layout = layout, .n = n, .k = k}}};
  return kernels::fuses(kernels::choose_launches(gpu, linear, 1));
}

bool is_rotated(const LinearWeight& weight) {
  const auto* packed = packed_of(weight);
  return packed != nullptr && reads_rotated(*packed);
}

bool is_trellis(const LinearWeight& weight) {
  const auto* packed = packed_of(weight);
  return packed != nullptr && reads_trellis(*packed);
}

/// Whether a kernel may apply silu to the products of `gate` and the like. Of rotated passes that is only known once
/// they are uploaded: where their rows take turns and no kernel fuses, the launch behind them minds the turns.
bool can_gate(const device::Properties& gpu, const LinearWeight& gate) {
  if (is_rotated(gate)) return true;
  const PackedWeight* const pass = readable(gpu, gate);
  return pass != nullptr && fuses(gpu, pass->scheme, kernel_layout(gpu, *pass), 2 * gate.n, gate.k);
}

/// A packed layer in the canonical layout.
LinearWeight canonical(const LinearWeight& weight) {
  LinearWeight result = weight;
  result.matrix = std::make_shared<const formats::PackedLinear>(checkpoint::to_canonical(*packed_of(weight)));
  return result;
}

bool is_stored(const LinearWeight& weight) {
  const auto* packed = packed_of(weight);
  return packed != nullptr && packed->passes.front().layout != formats::canonical_layout;
}

/// Layers of one product as they go up: those that are packed as they stand where all can, else in the canonical
/// layout, so that what fits together stays together.
class Layers {
 public:
  Layers(std::span<const LinearWeight* const> layers, const device::Properties& gpu)
      : all_(layers.begin(), layers.end()) {
    const auto stays = [&](const LinearWeight* layer) {
      return packed_of(*layer) == nullptr || goes_as_stored(gpu, *packed_of(*layer));
    };
    if (std::ranges::all_of(all_, stays)) return;
    canonical_.reserve(all_.size());
    for (auto& layer : all_) {
      if (is_stored(*layer)) layer = &canonical_.emplace_back(canonical(*layer));
    }
  }
  Layers(const Layers&) = delete;
  Layers& operator=(const Layers&) = delete;

  std::span<const LinearWeight* const> all() const noexcept { return all_; }

 private:
  std::vector<const LinearWeight*> all_;
  std::vector<LinearWeight> canonical_;
};

/// Rows of a packed layer that no kernel reads as f16 at `to`, a stretch at a time.
void copy_rows(const LinearWeight& weight, std::byte* to, const device::Stream& stream) {
  const int64_t rows_at_a_time = std::clamp<int64_t>(staging_bytes / 4 / weight.k, 1, weight.n);
  std::vector<float> values(static_cast<size_t>(rows_at_a_time * weight.k));
  device::PinnedBuffer halves(stream.context(), values.size() * 2);
  for (int64_t begin = 0; begin < weight.n; begin += rows_at_a_time) {
    const int64_t rows = std::min(rows_at_a_time, weight.n - begin);
    stream.synchronize();  // the copy before is done with `halves`
    parallel_for(rows, 16, [&](int64_t first, int64_t last) {
      const MatrixView<float> block(values.data() + first * weight.k, last - first, weight.k);
      kernels::decode_rows(weight, begin + first, begin + last, block);
      const std::span<const float> decoded(block.data, static_cast<size_t>(block.rows * block.cols));
      for (const float value : decoded) {
        if (!(std::abs(value) <= largest_half)) refuse_weight(weight, value);
      }
      narrow(decoded, DType::f16,
             halves.bytes().subspan(static_cast<size_t>(first * weight.k) * 2, decoded.size() * 2));
    });
    device::copy(device::Way::to_gpu, to + begin * weight.k * 2, halves.bytes().data(),
                 static_cast<size_t>(rows * weight.k) * 2, stream, "copying weights to the GPU");
  }
  stream.synchronize();
}

void place_rows(const LinearWeight& weight, std::byte* to, UploadRing& ring) {
  if (packed_of(weight) == nullptr) return upload_dense(weight, to, ring);
  copy_rows(weight, to, ring.stream());
}

/// Builds a CudaLinear launch by launch.
class Builder {
 public:
  Builder(CudaLinear& linear, bool offload, UploadRing& ring)
      : linear_(linear), offload_(offload), ring_(ring), context_(ring.stream().context()) {}

  /// Layers of one launch: one below the other, or so many rows of each in turn.
  void add(std::span<const LinearWeight* const> layers, int64_t rows_in_turn = 0) {
    CudaProduct product;
    product.first = linear_.n;
    for (const auto* layer : layers) {
      linear_.n += layer->n;
      linear_.names.push_back(layer->name);
    }
    if (is_trellis(*layers.front())) {
      add_trellis(layers, product);
    } else if (is_rotated(*layers.front())) {
      add_rotated(layers, rows_in_turn, product);
    } else if (readable(context_.properties(), *layers.front()) != nullptr) {
      add_packed(layers, rows_in_turn, product);
    } else {
      add_dense(layers, product);
    }
    product.offloaded.resize(product.linear.passes.size());
    product.linear.bias = bias_of(layers, rows_in_turn);
    if (rows_in_turn > 0) product.linear.gates = kernels::GateOrder::turns;
    plan_product(product, context_.properties());
    linear_.products.push_back(std::move(product));
  }

 private:
  void add_dense(std::span<const LinearWeight* const> layers, CudaProduct& product) {
    const int64_t n = linear_.n - product.first;
    DeviceBuffer& rows = keep(DeviceBuffer(context_, static_cast<size_t>(n * linear_.k) * 2));
    int64_t at = 0;
    for (const auto* layer : layers) {
      if (packed_of(*layer) != nullptr) linear_.widened.push_back(layer->name);
      place_rows(*layer, rows.data() + at * linear_.k * 2, ring_);
      at += layer->n;
    }
    product.linear.passes = {dense_pass(rows, n, linear_.k)};
    product.scheme = kernels::scheme_text(product.linear);
    linear_.bytes += n * linear_.k * 2;
  }

  void add_packed(std::span<const LinearWeight* const> layers, int64_t rows_in_turn, CudaProduct& product) {
    const auto linears = packed_of(layers);
    std::vector<const PackedWeight*> passes;
    for (const auto* linear : linears) passes.push_back(&linear->passes.front());
    CudaPacked packed = is_stored(*layers.front()) ? upload_stored(linears, rows_in_turn, ring_)
                                                   : pack_for_device(passes, ring_.stream(), rows_in_turn);
    product.linear.passes = {packed.weight};
    product.scheme = kernels::scheme_text(product.linear);
    linear_.bytes += packed.bytes;
    for (auto& buffer : packed.memory) keep(std::move(buffer));
    add_input_scale(*linears.front(), product);
  }

  void add_rotated(std::span<const LinearWeight* const> layers, int64_t rows_in_turn, CudaProduct& product) {
    const auto linears = packed_of(layers);
    CudaRotated rotated = upload_rotated(linears, rows_in_turn, offload_, ring_);
    product.scheme = formats::to_string(linears.front()->passes.front().scheme);
    product.linear.passes = std::move(rotated.passes);
    product.offloaded = std::move(rotated.offloaded);
    linear_.bytes += rotated.bytes;
    for (auto& buffer : rotated.memory) keep(std::move(buffer));
    add_input_scale(*linears.front(), product);
  }

  void add_trellis(std::span<const LinearWeight* const> layers, CudaProduct& product) {
    const auto linears = packed_of(layers);
    CudaTrellis trellis = upload_trellis(linears, ring_);
    product.scheme = formats::to_string(linears.front()->passes.front().scheme);
    product.linear.passes = std::move(trellis.passes);
    linear_.bytes += trellis.bytes;
    for (auto& buffer : trellis.memory) keep(std::move(buffer));
    add_input_scale(*linears.front(), product);
  }

  void add_input_scale(const formats::PackedLinear& linear, CudaProduct& product) {
    const auto& input_scale = linear.input_scale;
    if (input_scale.empty()) return;
    product.linear.input_scale = keep(ring_.copy_of(bytes_of(input_scale))).as<float>();
  }

  const float* bias_of(std::span<const LinearWeight* const> layers, int64_t rows_in_turn) {
    const auto has_bias = [](const LinearWeight* layer) { return !layer->bias.empty(); };
    if (std::ranges::none_of(layers, has_bias)) return nullptr;
    std::vector<float> bias;
    const int64_t n = layers.front()->n;
    const int64_t turn = rows_in_turn > 0 ? rows_in_turn : n;
    for (int64_t first = 0; first < n; first += turn) {
      for (const auto* layer : layers) {
        const int64_t count = rows_in_turn > 0 ? turn : layer->n;
        const size_t end = bias.size() + static_cast<size_t>(count);
        if (has_bias(layer)) bias.insert(bias.end(), layer->bias.begin() + first, layer->bias.begin() + first + count);
        bias.resize(end, 0.0f);
      }
    }
    return keep(ring_.copy_of(bytes_of(bias))).as<float>();
  }

  DeviceBuffer& keep(DeviceBuffer buffer) {
    linear_.memory.push_back(std::move(buffer));
    return linear_.memory.back();
  }

  CudaLinear& linear_;
  const bool offload_;
  UploadRing& ring_;
  const device::Context& context_;
};

}  // namespace

bool alike(const device::Properties& gpu, const LinearWeight& a, const LinearWeight& b) {
  if (is_trellis(a) || is_trellis(b)) {
    return is_trellis(a) && is_trellis(b) && can_stack_trellis(*packed_of(a), *packed_of(b));
  }
  if (is_rotated(a) || is_rotated(b)) {
    return is_rotated(a) && is_rotated(b) && can_stack_rotated(*packed_of(a), *packed_of(b));
  }
  const PackedWeight* const first = readable(gpu, a);
  const PackedWeight* const second = readable(gpu, b);
  if (first == nullptr || second == nullptr) return first == second;
  return can_stack(*first, *second) && packed_of(a)->input_scale == packed_of(b)->input_scale;
}

CudaLinear upload_linears(std::span<const LinearWeight* const> linears, UploadRing& ring, bool offload) {
  ensure(!linears.empty(), "upload_linears: no layers");
  const device::Properties& gpu = ring.stream().context().properties();
  const Layers as_they_go(linears, gpu);
  const auto layers = as_they_go.all();
  CudaLinear linear;
  linear.k = layers.front()->k;
  Builder builder(linear, offload, ring);
  for (size_t begin = 0; begin < layers.size();) {
    size_t end = begin + 1;
    while (end < layers.size() && alike(gpu, *layers[end - 1], *layers[end])) ++end;
    builder.add(layers.subspan(begin, end - begin));
    begin = end;
  }
  return linear;
}

CudaLinear upload_linears(std::span<const LinearWeight* const> layers, const device::Stream& stream, bool offload) {
  UploadRing ring(stream);
  CudaLinear linear = upload_linears(layers, ring, offload);
  ring.finish();
  return linear;
}

CudaLinear upload_gated(const LinearWeight& gate_layer, const LinearWeight& up_layer, UploadRing& ring, bool offload) {
  const device::Properties& gpu = ring.stream().context().properties();
  const std::array both = {&gate_layer, &up_layer};
  const Layers layers(both, gpu);
  const LinearWeight &gate = *layers.all()[0], &up = *layers.all()[1];
  // Rings keep the rows of a strip together: a trellis has its gates above its ups.
  const bool takes_turns =
      !is_trellis(gate) && alike(gpu, gate, up) && gate.n == up.n && gate.n % 32 == 0 && can_gate(gpu, gate);
  if (!takes_turns) {
    CudaLinear linear = upload_linears(layers.all(), ring, offload);
    if (linear.products.size() == 1) linear.products.front().linear.gates = kernels::GateOrder::halves;
    return linear;
  }
  CudaLinear linear;
  linear.k = gate.k;
  Builder(linear, offload, ring).add(layers.all(), kernels::gate_up_turn);
  return linear;
}

kernels::GateOrder CudaLinear::gates() const noexcept {
  return products.size() == 1 ? products.front().linear.gates : kernels::GateOrder::none;
}

std::byte* CudaLinear::dense_rows(int64_t first, int64_t count) noexcept {
  for (const auto& product : products) {
    if (first < product.first || first + count > product.first + product.n()) continue;
    if (product.packed() || product.linear.gates == kernels::GateOrder::turns) return nullptr;
    const int64_t row_bytes = 2 * k;
    const auto* const rows = reinterpret_cast<const std::byte*>(product.linear.passes.front().codes);
    for (auto& buffer : memory) {
      if (rows >= buffer.data() && rows < buffer.data() + buffer.size()) {
        return buffer.data() + (rows - buffer.data()) + (first - product.first) * row_bytes;
      }
    }
  }
  return nullptr;
}

kernels::DevicePass dense_pass(const DeviceBuffer& rows, int64_t n, int64_t k) {
  return {.layout = kernels::f16_rows, .n = n, .k = k, .codes = rows.as<uint32_t>()};
}

void plan_product(CudaProduct& product, const device::Properties& gpu) {
  product.plan = kernels::plan_launches(gpu, product.linear);
  product.int8_plan.reset();
  const kernels::LinearDesc rounded{
      .gpu = gpu, .passes = product.linear.passes, .m = kernels::least_int8_rows, .int8_activations = true};
  if (kernels::find_kernel(rounded) != nullptr) product.int8_plan = kernels::plan_launches(gpu, product.linear, true);
}

bool fuses(const CudaLinear& linear) {
  return std::ranges::all_of(linear.products,
                             [](const CudaProduct& product) { return kernels::fuses(product.plan.steps(1)); });
}

std::vector<const OffloadedPass*> offloaded_passes(std::span<const CudaLinear* const> linears) {
  std::vector<const OffloadedPass*> passes;
  for (const auto* linear : linears) {
    for (const auto& product : linear->products) {
      for (const auto& pass : product.offloaded) {
        if (pass != nullptr) passes.push_back(pass.get());
      }
    }
  }
  return passes;
}

void keep_resident(std::span<CudaLinear* const> linears, int64_t budget, const device::Stream& stream) {
  std::vector<OffloadCandidate> candidates;
  for (const auto* pass : offloaded_passes({linears.begin(), linears.end()})) {
    candidates.push_back({static_cast<int64_t>(pass->bytes.bytes().size()), pass->error});
  }
  const std::vector<bool> resident = choose_resident(candidates, budget);
  for (size_t index = 0; auto* linear : linears) {
    for (auto& product : linear->products) {
      for (size_t pass = 0; pass < product.offloaded.size(); ++pass) {
        auto& host = product.offloaded[pass];
        if (host == nullptr || !resident[index++]) continue;
        linear->memory.push_back(DeviceBuffer::copy_of(host->bytes.bytes(), stream));
        stream.synchronize();  // the host's copy goes
        linear->bytes += static_cast<int64_t>(linear->memory.back().size());
        auto& planes = product.linear.passes[pass];
        planes = at_bytes(planes, *host, linear->memory.back().data());
        host.reset();
      }
      plan_product(product, stream.context().properties());
    }
  }
}

device::DeviceBuffer upload_rows(const LinearWeight& weight, UploadRing& ring) {
  DeviceBuffer rows(ring.stream().context(), static_cast<size_t>(weight.n * weight.k) * 2);
  if (is_stored(weight)) {
    place_rows(canonical(weight), rows.data(), ring);
  } else {
    place_rows(weight, rows.data(), ring);
  }
  return rows;
}

}  // namespace w4q::decoder_cuda
