#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "decoder_cuda/linear.h"
#include "decoder_cuda/pack.h"
#include "decoder_cuda/rotated.h"
#include "decoder_cuda/stack.h"
#include "device/copy.h"

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

/// The one pass of a layer that a kernel reads; null for all others.
const PackedWeight* readable(const device::Properties& gpu, const LinearWeight& weight) {
  const auto* packed = packed_of(weight);
  if (packed == nullptr || packed->passes.size() != 1 || !packed->rotations.empty()) return nullptr;
  const PackedWeight& pass = packed->passes.front();
  return device_layout(gpu, pass.scheme, pass.n, pass.k).empty() ? nullptr : &pass;
}

/// Whether the kernel of one row does what lies between products.
bool fuses(const device::Properties& gpu, const formats::Scheme& scheme, int64_t n, int64_t k) {
  return kernels::pick_kernel({gpu, scheme, device_layout(gpu, scheme, n, k), 1, n, k, DType::f16}).fuses;
}

bool is_rotated(const LinearWeight& weight) {
  const auto* packed = packed_of(weight);
  return packed != nullptr && reads_rotated(*packed);
}

/// Whether a kernel may apply silu to the products of `gate` and the like. Of rotated passes that is only known once
/// they are uploaded: where their rows take turns and no kernel fuses, the launch behind them minds the turns.
bool can_gate(const device::Properties& gpu, const LinearWeight& gate) {
  if (is_rotated(gate)) return true;
  return readable(gpu, gate) != nullptr && fuses(gpu, readable(gpu, gate)->scheme, 2 * gate.n, gate.k);
}

/// Whether all passes are in GPU memory.
bool is_here(const CudaProduct& product) {
  return std::ranges::all_of(product.offloaded, [](const auto& pass) { return pass == nullptr; });
}

/// Whether two layers can share a launch.
bool alike(const device::Properties& gpu, const LinearWeight& a, const LinearWeight& b) {
  if (is_rotated(a) || is_rotated(b)) {
    return is_rotated(a) && is_rotated(b) && can_stack_rotated(*packed_of(a), *packed_of(b));
  }
  const PackedWeight* const first = readable(gpu, a);
  const PackedWeight* const second = readable(gpu, b);
  if (first == nullptr || second == nullptr) return first == second;
  return can_stack(*first, *second) && packed_of(a)->input_scale == packed_of(b)->input_scale;
}

/// Rows of `weight` as f16 at `to`, a stretch at a time.
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
        if (std::abs(value) <= largest_half) continue;
        throw Error(ErrorCode::unsupported, concat(weight.name, ": a weight of ", value, " does not fit f16"))
            .hint("--device cpu computes in fp32");
      }
      narrow(decoded, DType::f16,
             halves.bytes().subspan(static_cast<size_t>(first * weight.k) * 2, decoded.size() * 2));
    });
    device::copy(device::Way::to_gpu, to + begin * weight.k * 2, halves.bytes().data(),
                 static_cast<size_t>(rows * weight.k) * 2, stream, "copying weights to the GPU");
  }
  stream.synchronize();
}

/// Builds a CudaLinear launch by launch.
class Builder {
 public:
  Builder(CudaLinear& linear, bool offload, const device::Stream& stream)
      : linear_(linear), offload_(offload), stream_(stream) {}

  /// Layers of one launch: one below the other, or so many rows of each in turn.
  void add(std::span<const LinearWeight* const> layers, int64_t rows_in_turn = 0) {
    CudaProduct product;
    product.first = linear_.n;
    for (const auto* layer : layers) {
      product.n += layer->n;
      linear_.names.push_back(layer->name);
    }
    linear_.n += product.n;
    if (is_rotated(*layers.front())) {
      add_rotated(layers, rows_in_turn, product);
    } else if (readable(stream_.context().properties(), *layers.front()) != nullptr) {
      add_packed(layers, rows_in_turn, product);
    } else {
      add_dense(layers, product);
    }
    product.bias = bias_of(layers, rows_in_turn);
    stream_.synchronize();
    linear_.products.push_back(product);
  }

 private:
  void add_dense(std::span<const LinearWeight* const> layers, CudaProduct& product) {
    DeviceBuffer& rows = keep(DeviceBuffer(stream_.context(), static_cast<size_t>(product.n * linear_.k) * 2));
    int64_t at = 0;
    for (const auto* layer : layers) {
      if (packed_of(*layer) != nullptr) linear_.widened.push_back(layer->name);
      copy_rows(*layer, rows.data() + at * linear_.k * 2, stream_);
      at += layer->n;
    }
    product.dense = rows.as<__half>();
    linear_.bytes += product.n * linear_.k * 2;
  }

  void add_packed(std::span<const LinearWeight* const> layers, int64_t rows_in_turn, CudaProduct& product) {
    std::vector<const PackedWeight*> passes;
    for (const auto* layer : layers) passes.push_back(readable(stream_.context().properties(), *layer));
    CudaPacked packed = pack_for_device(passes, stream_, rows_in_turn);
    product.scheme = packed.weight.scheme;
    product.packed = packed.weight;
    linear_.bytes += packed.bytes;
    for (auto& buffer : packed.memory) keep(std::move(buffer));
    add_input_scale(*packed_of(*layers.front()), product);
  }

  void add_rotated(std::span<const LinearWeight* const> layers, int64_t rows_in_turn, CudaProduct& product) {
    std::vector<const formats::PackedLinear*> linears;
    for (const auto* layer : layers) linears.push_back(packed_of(*layer));
    CudaRotated rotated = upload_rotated(linears, rows_in_turn, offload_, stream_);
    product.scheme = linears.front()->passes.front().scheme;
    product.rotated = std::move(rotated.passes);
    product.offloaded = std::move(rotated.offloaded);
    linear_.bytes += rotated.bytes;
    for (auto& buffer : rotated.memory) keep(std::move(buffer));
    add_input_scale(*linears.front(), product);
  }

  void add_input_scale(const formats::PackedLinear& linear, CudaProduct& product) {
    const auto& input_scale = linear.input_scale;
    if (input_scale.empty()) return;
    product.input_scale = keep(DeviceBuffer::copy_of(bytes_of(input_scale), stream_)).as<float>();
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
    const float* const device = keep(DeviceBuffer::copy_of(bytes_of(bias), stream_)).as<float>();
    stream_.synchronize();
    return device;
  }

  DeviceBuffer& keep(DeviceBuffer buffer) {
    linear_.memory.push_back(std::move(buffer));
    return linear_.memory.back();
  }

  CudaLinear& linear_;
  const bool offload_;
  const device::Stream& stream_;
};

}  // namespace

CudaLinear upload_linears(std::span<const LinearWeight* const> layers, const device::Stream& stream, bool offload) {
  ensure(!layers.empty(), "upload_linears: no layers");
  CudaLinear linear;
  linear.k = layers.front()->k;
  Builder builder(linear, offload, stream);
  for (size_t begin = 0; begin < layers.size();) {
    size_t end = begin + 1;
    while (end < layers.size() && alike(stream.context().properties(), *layers[begin], *layers[end])) ++end;
    builder.add(layers.subspan(begin, end - begin));
    begin = end;
  }
  return linear;
}

CudaLinear upload_gated(const LinearWeight& gate, const LinearWeight& up, const device::Stream& stream, bool offload) {
  const std::array layers = {&gate, &up};
  const bool takes_turns = alike(stream.context().properties(), gate, up) && gate.n == up.n && gate.n % 32 == 0 &&
                           can_gate(stream.context().properties(), gate);
  if (!takes_turns) return upload_linears(layers, stream, offload);
  CudaLinear linear;
  linear.k = gate.k;
  linear.gate_up_turns = true;
  Builder(linear, offload, stream).add(layers, kernels::gate_up_turn);
  return linear;
}

bool fuses(const CudaLinear& linear, const device::Properties& gpu) {
  return std::ranges::all_of(linear.products, [&](const CudaProduct& product) {
    if (!product.rotated.empty()) return is_here(product) && kernels::rotated_fuses(product.rotated);
    return product.packed && fuses(gpu, product.scheme, product.n, linear.k);
  });
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
        product.rotated[pass] = at_bytes(product.rotated[pass], *host, linear->memory.back().data());
        host.reset();
      }
    }
  }
}

device::DeviceBuffer upload_rows(const LinearWeight& weight, const device::Stream& stream) {
  DeviceBuffer rows(stream.context(), static_cast<size_t>(weight.n * weight.k) * 2);
  copy_rows(weight, rows.data(), stream);
  return rows;
}

}  // namespace w4q::decoder_cuda
