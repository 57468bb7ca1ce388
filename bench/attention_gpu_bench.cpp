// Attention of one token over a long context, every type of KV cache: time, bandwidth and ratio to f16, cold caches,
// in one process. JSON on stdout, a line of progress per case on stderr.
#include <CLI/CLI.hpp>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/error.h"
#include "core/float_formats.h"
#include "core/rng.h"
#include "core/text.h"
#include "device/buffer.h"
#include "device/ceilings.h"
#include "device/timing.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/common/random_cuda.h"

namespace {

using namespace w4q;
using kernels::KvType;
using Json = nlohmann::ordered_json;

struct Heads {
  int heads, kv_heads, head_dim;
  int64_t width() const { return int64_t{heads + 2 * kv_heads} * head_dim; }
};
constexpr Heads shapes[] = {{32, 8, 128}, {32, 32, 128}};
constexpr int64_t lengths[] = {512, 4096, 32768};
/// Share of the pages that fp4r attends to.
constexpr double kept_share = 0.25;

/// Caches of random rows, as many as it takes to outgrow the L2 cache, with their pages in random order.
class Caches {
 public:
  Caches(Heads shape, KvType type, int64_t length, const device::Stream& stream)
      : shape_(shape),
        position_(static_cast<int32_t>(length - 1)),
        row_(stream.context(), static_cast<size_t>(length * shape.width()) * 4),
        out_(stream.context(), static_cast<size_t>(shape.heads * shape.head_dim) * 2),
        workspace_(stream.context(),
                   kernels::decode_attention_workspace(stream.context().properties(),
                                                       {shape.heads, shape.kv_heads, shape.head_dim, type, length})),
        kept_(stream.context(), static_cast<size_t>(shape.heads) * sizeof(int32_t)),
        length_(length) {
    kernels::random_floats_cuda(row_.as<float>(), length * shape.width(), 1.7f, 5, stream);
    workspace_.fill(0, stream);
    const int64_t pages = (length + kernels::kv_page_tokens - 1) / kernels::kv_page_tokens;
    std::vector<int32_t> table(static_cast<size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random_bits(3, i) % i]);
    table_ = device::DeviceBuffer::copy_of(bytes_of(table), stream);
    at_ = device::DeviceBuffer::copy_of(std::as_bytes(std::span(&position_, 1)), stream);
    const int dim = kernels::kv_padded_dim(shape.head_dim);
    const int64_t key_bytes = pages * shape.kv_heads * kernels::kv_head_page_bytes(type, dim);
    const int64_t value_bytes = pages * shape.kv_heads * kernels::kv_value_page_bytes(type, dim);
    bytes_ = key_bytes + value_bytes;
    const int copies = std::max(2, device::rotating_copies(stream.context().properties(), bytes_));
    for (int i = 0; i < copies; ++i) {
      keys_.emplace_back(stream.context(), static_cast<size_t>(key_bytes));
      values_.emplace_back(stream.context(), static_cast<size_t>(value_bytes));
      kernels::rotate_and_store_cuda({row_.as<float>(), length, shape.width(), shape.heads}, layer(i, type), {}, 0,
                                     stream);
    }
    type_ = type;
    stream.synchronize();
  }

  /// Finds the delta with which a share of the pages is kept.
  double keep(double share, const device::Stream& stream) {
    float low = 0;
    float high = 64;
    double kept = 1;
    for (int i = 0; i < 20; ++i) {
      delta_ = (low + high) / 2;
      attend(0, stream);
      std::vector<int32_t> counts(static_cast<size_t>(shape_.kv_heads));
      kept_.download(std::as_writable_bytes(std::span(counts)), stream);
      stream.synchronize();
      const int64_t pages = (length_ + kernels::kv_page_tokens - 1) / kernels::kv_page_tokens * shape_.kv_heads;
      kept =
          static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0})) / static_cast<double>(pages);
      (kept > share ? high : low) = delta_;
    }
    return kept;
  }

  int copies() const { return static_cast<int>(keys_.size()); }
  int64_t bytes() const { return bytes_; }

  void attend(int call, const device::Stream& stream) {
    kernels::DecodeAttentionArgs args;
    args.qkv = row_.as<float>();
    args.heads = shape_.heads;
    args.layer = layer(call % copies(), type_);
    args.position = at_.as<int32_t>();
    args.out = out_.as<__half>();
    args.workspace = workspace_.data();
    args.capacity = length_;
    args.delta = delta_;
    args.kept = kept_.as<int32_t>();
    kernels::decode_attention_cuda(args, stream);
  }

 private:
  kernels::PagedLayer layer(int copy, KvType type) {
    const auto i = static_cast<size_t>(copy);
    return {keys_[i].data(),
            values_[i].data(),
            table_.as<int32_t>(),
            type,
            shape_.kv_heads,
            shape_.head_dim,
            static_cast<int>(table_.size() / sizeof(int32_t))};
  }

  Heads shape_;
  int32_t position_;
  KvType type_ = KvType::f16;
  int64_t bytes_ = 0;
  float delta_ = INFINITY;
  device::DeviceBuffer row_, out_, workspace_, kept_, table_, at_;
  int64_t length_;
  std::vector<device::DeviceBuffer> keys_, values_;
};

Json measure(Heads shape, int64_t length, KvType type, double f16_seconds, const device::Stream& stream) {
  Caches caches(shape, type, length, stream);
  const double kept = type == KvType::fp4r ? caches.keep(kept_share, stream) : 1;
  const auto timing =
      device::time_calls(stream.context(), [&](int call, const device::Stream& on) { caches.attend(call, on); },
                         {std::max(20, 2 * caches.copies()), 15});
  const auto bytes = static_cast<double>(caches.bytes());
  return {{"heads", shape.heads},
          {"kv_heads", shape.kv_heads},
          {"head_dim", shape.head_dim},
          {"length", length},
          {"kv", kernels::to_string(type)},
          {"kept_pages", kept},
          {"us_median", timing.median * 1e6},
          {"us_least", timing.least * 1e6},
          {"us_most", timing.most * 1e6},
          {"bytes", caches.bytes()},
          {"GB_per_s", bytes / timing.median * 1e-9},
          {"times_f16", type == KvType::f16 ? 1.0 : f16_seconds / timing.median},
          {"of_read_floor", device::read_floor_seconds(stream.context(), caches.bytes()) / timing.median}};
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("Attention of one token over a paged cache on this GPU");
  int64_t only_length = 0;
  app.add_option("--length", only_length, "Tokens in the cache; 0: 512, 4096 and 32768");
  CLI11_PARSE(app, argc, argv);
  device::Context gpu;
  const device::Stream stream(gpu);
  Json report = {{"gpu", gpu.properties().name}, {"read_GB_per_s", device::measure_ceilings(gpu).read * 1e-9}};
  for (const Heads& shape : shapes) {
    for (const int64_t length : lengths) {
      if (only_length > 0 && length != only_length) continue;
      double f16_seconds = 0;
      for (const KvType type : kernels::kv_types) {
        const Json row = measure(shape, length, type, f16_seconds, stream);
        if (type == KvType::f16) f16_seconds = row["us_median"].get<double>() * 1e-6;
        std::cerr << concat(shape.heads, "/", shape.kv_heads, ", ", length, " tokens, ", kernels::to_string(type), ": ",
                            fixed(row["us_median"].get<double>(), 1), " us, ", fixed(row["GB_per_s"].get<double>(), 0),
                            " GB/s, ", fixed(row["times_f16"].get<double>(), 2), " x f16\n");
        report["results"].push_back(row);
      }
    }
  }
  std::cout << report.dump(2) << "\n";
  return 0;
} catch (const w4q::Error& error) {
  std::cerr << error.what() << "\n";
  return describe(error.code()).exit_status;
}
