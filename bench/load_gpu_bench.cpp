// Loading a packed checkpoint to the GPU beside copying its bytes there: a checkpoint of the shape of a well-known model
// with random but sound planes, in the page cache. In turn, several times:
//
//   ring     every byte of it from the mapping to the GPU through the ring that loading uses (decoder_cuda/ring.h)
//   memcpy   the same by a plain copy of each tensor
//   load     opening and uploading the model, until a decoder could start
//
// Each takes fresh pages of the mapping and allocates what it needs. JSON on stdout.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "decoder_cuda/model.h"
#include "device/copy.h"
#include "formats/codebook.h"
#include "formats/scheme_registry.h"
#include "io/checkpoint_writer.h"
#include "io/output.h"
#include "model/architecture.h"
#include "model/shapes.h"
#include "repack/layout_registry.h"

namespace {

using namespace w4q;
using formats::PlaneRole;
using Json = nlohmann::ordered_json;

struct Options {
  std::string shape = "llama3-8b", scheme = "kbit4-b32-e4m4", target = "sm90";
  std::filesystem::path folder;
  bool packed_head = false;
  bool canonical = false;
  int rounds = 5;
};

/// Random bytes that every plane takes its own from, and values for those that have a meaning.
class Source {
 public:
  Source() : random_(size_t{64} << 20), values_(random_.size()) {
    parallel_for(std::ssize(random_) / 8, 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) random_.as<uint64_t>()[static_cast<size_t>(i)] = random_bits(1, i);
      // 2^-10 to 2^-6 as f16, and tiny as bf16: scales, norms and weights.
      for (int64_t i = 4 * begin; i < 4 * end; ++i) {
        const auto drawn = static_cast<uint16_t>(random_bits(2, i) & 0xFFF);
        values_.as<uint16_t>()[static_cast<size_t>(i)] = static_cast<uint16_t>(0x1400 + drawn);
      }
    });
  }

  void write(io::CheckpointWriter& writer, const io::PlannedTensor& tensor, bool any_bits) const {
    const auto size = byte_count(tensor.dtype, tensor.shape);
    const auto from = any_bits ? random_.bytes() : values_.bytes();
    for (int64_t at = 0; at < size; at += std::ssize(from)) {
      writer.write_part(tensor.name, at, from.first(static_cast<size_t>(std::min(size - at, std::ssize(from)))));
    }
  }

 private:
  Buffer random_, values_;
};

Json config_json(const model::ModelConfig& config) {
  return {{"architectures", {config.architecture->class_name}},
          {"model_type", config.architecture->model_type},
          {"hidden_size", config.hidden_size},
          {"intermediate_size", config.intermediate_size},
          {"num_hidden_layers", config.layers},
          {"num_attention_heads", config.heads},
          {"num_key_value_heads", config.kv_heads},
          {"head_dim", config.head_dim},
          {"vocab_size", config.vocab_size},
          {"max_position_embeddings", config.max_positions},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", config.rope.theta},
          {"hidden_act", "silu"},
          {"tie_word_embeddings", config.tied_embeddings},
          {"torch_dtype", "bfloat16"}};
}

bool is_packed(const model::Parameter& parameter, const Options& options) {
  if (!parameter.linear || parameter.name == "model.embed_tokens.weight") return false;
  return parameter.name != "lm_head.weight" || options.packed_head;
}

checkpoint::PackedLinearInfo packed_info(const model::Parameter& parameter, const Options& options) {
  checkpoint::PackedLinearInfo info;
  info.name = model::module_path(parameter.name);
  info.n = parameter.shape[0];
  info.k = parameter.shape[1];
  checkpoint::PackedPass pass{formats::parse_scheme(options.scheme), {}};
  pass.layout = repack::layout_for_target(options.target, pass.scheme, info.n, info.k).name;
  if (pass.scheme.family == formats::SchemeFamily::rotated) pass.rotation = {128, 42};
  info.passes.push_back(std::move(pass));
  return info;
}

void write_linear(io::CheckpointWriter& writer, const checkpoint::PackedLinearInfo& info, const Source& source) {
  const formats::Scheme& scheme = info.passes.front().scheme;
  for (const auto& tensor : checkpoint::planned_planes(info)) {
    if (tensor.name == checkpoint::plane_name(info.name, 0, PlaneRole::codebook)) {
      const auto normal = formats::normal_codebook(scheme.bits);
      const auto table = scheme.family == formats::SchemeFamily::rotated
                             ? std::vector<float>(normal.begin(), normal.end())
                             : formats::codebook("nf", scheme.bits);
      writer.write(tensor.name, bytes_of(table));
    } else {
      // Codes and E4M4 scales are sound whatever they are.
      source.write(writer, tensor, tensor.dtype == DType::i32 || tensor.dtype == DType::u8);
    }
  }
}

void make_checkpoint(const Options& options) {
  const model::ModelConfig config = model::named_shape(options.shape);
  checkpoint::QuantizationConfig quantization;
  quantization.method = "random";
  std::vector<io::PlannedTensor> plan;
  const auto parameters = model::parameters(config);
  for (const auto& parameter : parameters) {
    if (!is_packed(parameter, options)) {
      plan.push_back({parameter.name, DType::bf16, parameter.shape});
      continue;
    }
    auto info = packed_info(parameter, options);
    for (auto& tensor : checkpoint::planned_planes(info)) plan.push_back(std::move(tensor));
    quantization.linears.emplace(info.name, std::move(info));
  }
  std::filesystem::create_directories(options.folder);
  io::CheckpointWriter writer(options.folder, plan, {});
  const Source source;
  for (const auto& parameter : parameters) {
    if (is_packed(parameter, options)) {
      write_linear(writer, *quantization.find(model::module_path(parameter.name)), source);
    } else {
      source.write(writer, {parameter.name, DType::bf16, parameter.shape}, false);
    }
  }
  writer.finish();
  io::Json json = config_json(config);
  checkpoint::write_quantization_config(quantization, json);
  io::write_file(options.folder / "config.json", json.dump(1), true);
}

/// Touches every page; the bytes of all tensors.
int64_t read_all(const std::filesystem::path& folder) {
  const auto checkpoint = io::Checkpoint::open(folder);
  std::atomic<uint64_t> sum = 0;
  for (const auto& [name, info] : checkpoint.tensors()) {
    const auto loaded = checkpoint.load(name);
    const auto bytes = loaded->bytes;
    parallel_for(std::ssize(bytes), 1 << 20, [&](int64_t begin, int64_t end) {
      uint64_t part = 0;
      for (int64_t i = begin; i < end; i += 4096) part += std::to_integer<uint64_t>(bytes[static_cast<size_t>(i)]);
      sum += part;
    });
  }
  return sum == 0 ? 0 : checkpoint.total_bytes();
}

int64_t largest_tensor(const io::Checkpoint& checkpoint) {
  uint64_t largest = 0;
  for (const auto& [name, info] : checkpoint.tensors()) largest = std::max(largest, info.size());
  return static_cast<int64_t>(largest);
}

class Bench {
 public:
  Bench(const Options& options, device::Context& gpu)
      : options_(options),
        gpu_(gpu),
        checkpoint_(io::Checkpoint::open(options.folder)),
        stream_(gpu),
        target_(gpu, static_cast<size_t>(largest_tensor(checkpoint_))) {}

  double ring() {
    const Stopwatch watch;
    decoder_cuda::UploadRing ring(stream_);
    for (const auto& [name, info] : checkpoint_.tensors()) ring.copy(target_.data(), checkpoint_.load(name)->bytes);
    ring.finish();
    return watch.seconds();
  }

  double memcpy() {
    const Stopwatch watch;
    for (const auto& [name, info] : checkpoint_.tensors()) {
      const auto loaded = checkpoint_.load(name);
      device::copy(device::Way::to_gpu, target_.data(), loaded->bytes.data(), loaded->bytes.size(), stream_, "copying");
      stream_.synchronize();
    }
    return watch.seconds();
  }

  /// Opening, and then uploading.
  std::pair<double, double> load(model::Planes planes) {
    const Stopwatch watch;
    const auto model = model::Model::open(options_.folder, true, planes);
    const double opened = watch.seconds();
    const auto on_gpu = decoder_cuda::CudaModel::upload(gpu_, model);
    return {opened, watch.seconds() - opened};
  }

 private:
  const Options& options_;
  device::Context& gpu_;
  io::Checkpoint checkpoint_;
  device::Stream stream_;
  device::DeviceBuffer target_;
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

Json run(const Options& options, device::Context& gpu) {
  const int64_t bytes = read_all(options.folder);
  Bench bench(options, gpu);
  std::vector<double> ring, plain, open, upload, load;
  for (int round = 0; round <= options.rounds; ++round) {
    const double by_ring = bench.ring(), by_memcpy = bench.memcpy();
    const auto [opened, uploaded] = bench.load(model::Planes::stored);
    if (round == 0) continue;  // loads kernels
    ring.push_back(by_ring), plain.push_back(by_memcpy);
    open.push_back(opened), upload.push_back(uploaded), load.push_back(opened + uploaded);
  }
  Json report = {{"gpu", gpu.properties().name},
                 {"threads", threads()},
                 {"shape", options.shape},
                 {"scheme", options.scheme},
                 {"packed_head", options.packed_head},
                 {"bytes", bytes},
                 {"ring_seconds", ring},
                 {"memcpy_seconds", plain},
                 {"open_seconds", open},
                 {"upload_seconds", upload},
                 {"load_over_ring", median(load) / median(ring)},
                 {"load_over_memcpy", median(load) / median(plain)},
                 {"ring_bytes_per_second", static_cast<double>(bytes) / median(ring)},
                 {"load_bytes_per_second", static_cast<double>(bytes) / median(load)}};
  if (options.canonical) {
    const auto [opened, uploaded] = bench.load(model::Planes::canonical);
    report["canonical_open_seconds"] = opened;
    report["canonical_upload_seconds"] = uploaded;
  }
  return report;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("loading a packed checkpoint to the GPU beside copying its bytes");
  Options options;
  app.add_option("--folder", options.folder, "for the checkpoint; one that is there already is taken as it is")
      ->required();
  app.add_option("--shape", options.shape, "sizes of a well-known model")
      ->check(CLI::IsMember(model::shape_names()))
      ->capture_default_str();
  app.add_option("--scheme", options.scheme, "kbit4-b32-e4m4, kbit3-b32-e4m4, int4-g128-f16, rotated4-d128 …")
      ->capture_default_str();
  app.add_option("--target", options.target, "whose layout it takes")->capture_default_str();
  app.add_flag("--packed-head", options.packed_head, "pack the head too");
  app.add_flag("--canonical", options.canonical, "also load once by way of canonical planes");
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 100))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    if (!std::filesystem::exists(options.folder / "config.json")) make_checkpoint(options);
    device::Context gpu;
    std::cout << run(options, gpu).dump(1) << "\n";
  } catch (const Error& error) {
    std::cerr << error.what() << "\n";
    return describe(error.code()).exit_status;
  }
  return 0;
}
