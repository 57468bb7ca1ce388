#include "pipeline/width_store.h"

#include <cstring>
#include <memory>

#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/gguf_blocks.h"
#include "io/checkpoint_writer.h"
#include "io/json.h"
#include "io/output.h"

namespace w4q::pipeline {
namespace {

using checkpoint::PackedLinearInfo;

PackedLinearInfo info_of(const CalibratedLinear& packed) {
  const auto& linear = packed.linear;
  const auto& first = linear.passes.front();
  PackedLinearInfo info{linear.name, first.n, first.k, linear.source_dtype, {}, !packed.columns.empty()};
  for (size_t pass = 0; pass < linear.passes.size(); ++pass) {
    info.passes.push_back({linear.passes[pass].scheme, linear.passes[pass].layout});
    if (!linear.rotations.empty()) info.passes.back().rotation = linear.rotations[pass].rotation();
  }
  return info;
}

/// The tensor of what rows were divided by, and the description of all linears beside the tensors.
std::string rows_name(std::string_view module) { return concat(module, ".rows"); }
constexpr std::string_view description = "w4q_width.json";

std::string blocks_name(const std::string& module, size_t choice) { return concat(module, ".", choice); }

void decode_blocks(GgmlType type, std::span<const std::byte> blocks, int64_t n, std::span<float> values) {
  const size_t row_bytes = blocks.size() / static_cast<size_t>(n), k = values.size() / static_cast<size_t>(n);
  parallel_for(n, 16, [&](int64_t begin, int64_t end) {
    const auto first = static_cast<size_t>(begin), count = static_cast<size_t>(end - begin);
    formats::gguf_decode(type, blocks.subspan(first * row_bytes, count * row_bytes),
                         values.subspan(first * k, count * k));
  });
}

}  // namespace

std::filesystem::path WidthStore::folder_of(int64_t layer, size_t choice) const {
  return folder_ / concat(layer, "-", choice);
}

void WidthStore::add(int64_t layer, size_t choice, const CalibratedLayer& packed) {
  if (packed.linears.empty()) return;
  const auto path = folder_of(layer, choice);
  std::filesystem::create_directory(path);
  checkpoint::QuantizationConfig all;
  std::vector<io::PlannedTensor> plan;
  for (const auto& [module, linear] : packed.linears) {
    Place place{info_of(linear), files_.size(), linear.rows};
    for (auto& plane : checkpoint::planned_planes(place.info)) plan.push_back(std::move(plane));
    if (!linear.rows.empty()) {
      plan.push_back({rows_name(module), DType::f32, {static_cast<int64_t>(linear.rows.size())}});
    }
    all.linears.emplace(module, place.info);
    places_.emplace(std::pair(module, choice), std::move(place));
  }
  io::CheckpointWriter writer(path, std::move(plan), {});
  for (const auto& [module, linear] : packed.linears) {
    for (size_t pass = 0; pass < linear.linear.passes.size(); ++pass) {
      for (const auto& plane : linear.linear.passes[pass].planes) {
        writer.write(checkpoint::plane_name(module, pass, plane.spec.role), plane.bytes.bytes());
      }
    }
    if (!linear.columns.empty()) writer.write(checkpoint::input_scale_name(module), bytes_of(linear.columns));
    if (!linear.rows.empty()) writer.write(rows_name(module), bytes_of(linear.rows));
  }
  writer.finish();
  io::Json config = io::Json::object();
  checkpoint::write_quantization_config(all, config);
  io::write_file(path / description, config.dump(), false);
  files_.push_back(io::Checkpoint::open(path));
}

void WidthStore::add_made_by_another(int64_t layer, size_t choice) {
  const auto path = folder_of(layer, choice);
  if (!std::filesystem::exists(path)) return;
  const auto all = checkpoint::parse_quantization_config(io::read_json(path / description), path.native());
  files_.push_back(io::Checkpoint::open(path));
  for (const auto& [module, info] : all.linears) {
    Place place{info, files_.size() - 1, {}};
    if (files_.back().contains(rows_name(module))) {
      const auto rows = files_.back().load(rows_name(module));
      place.rows.resize(rows->bytes.size() / sizeof(float));
      std::memcpy(place.rows.data(), rows->bytes.data(), rows->bytes.size());
    }
    places_.emplace(std::pair(module, choice), std::move(place));
  }
}

void WidthStore::add(const std::vector<StoredLinear>& linears) {
  const auto path = folder_ / concat("blocks-", files_.size());
  std::filesystem::create_directory(path);
  std::vector<io::PlannedTensor> plan;
  for (const auto& [module, shape, choices] : linears) {
    for (size_t choice = 0; choice < choices.size(); ++choice) {
      plan.push_back({blocks_name(module, choice), DType::u8, {static_cast<int64_t>(choices[choice].bytes.size())}});
      Place place{{module, shape[0], shape[1], DType::f32, {}, false}, files_.size(), {}, choices[choice].type};
      places_.emplace(std::pair(module, choice), std::move(place));
    }
  }
  io::CheckpointWriter writer(path, std::move(plan), {});
  for (const auto& [module, shape, choices] : linears) {
    for (size_t choice = 0; choice < choices.size(); ++choice) {
      writer.write(blocks_name(module, choice), choices[choice].bytes.bytes());
    }
  }
  writer.finish();
  files_.push_back(io::Checkpoint::open(path));
}

kernels::LinearWeight WidthStore::load(const kernels::LinearWeight& as, size_t choice) const {
  const auto found = places_.find(std::pair(as.name, choice));
  ensure(found != places_.end(), "WidthStore: a width that was not kept");
  const Place& place = found->second;
  if (place.type) {
    const auto blocks = files_[place.file].load(blocks_name(as.name, choice));
    const auto decoded = std::make_shared<std::vector<float>>(static_cast<size_t>(as.n * as.k));
    decode_blocks(*place.type, blocks->bytes, as.n, *decoded);
    const TensorView dense{as.name, DType::f32, {as.n, as.k}, bytes_of(*decoded)};
    return {as.name, as.n, as.k, kernels::LinearWeight::Dense{dense, decoded}, as.bias};
  }
  const auto packed =
      std::make_shared<const formats::PackedLinear>(checkpoint::load_packed(files_[place.file], place.info));
  const kernels::LinearWeight weight{as.name, as.n, as.k, packed, {}};
  const auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(as.n * as.k));
  const MatrixView<float> matrix(values->data(), as.n, as.k);
  parallel_for(as.n, 16, [&](int64_t begin, int64_t end) {
    kernels::decode_rows(weight, begin, end, {matrix.row(begin), end - begin, as.k});
    if (place.rows.empty()) return;
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < as.k; ++c) matrix.row(r)[c] *= place.rows[static_cast<size_t>(r)];
    }
  });
  const TensorView view{as.name, DType::f32, {as.n, as.k}, bytes_of(*values)};
  return {as.name, as.n, as.k, kernels::LinearWeight::Dense{view, values}, as.bias};
}

}  // namespace w4q::pipeline
