#include "pipeline/gguf_calibration.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "pipeline/calibrate_model.h"
#include "pipeline/calibration_cuda.h"

namespace w4q::pipeline {
namespace {

void check_sources(const CalibratedRequest& source) {
  if (source.text.empty() != source.statistics.empty()) return;
  throw Error(ErrorCode::bad_argument, "calibration takes a text or a statistics file, one of the two")
      .hint("--calib FILE, --calib-ids FILE, --chat FILE or --stats FILE");
}

/// A vector, or a square matrix of so many rows, with what belongs to channels in this order.
std::vector<float> ordered(std::vector<float> values, int64_t rows, const gguf::Order& order) {
  const int64_t width = std::ssize(values) / rows;
  if (order.is_plain(width)) return values;
  std::vector<float> result(values.size());
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t from = rows == 1 ? 0 : order(row);
    for (int64_t col = 0; col < width; ++col) {
      result[static_cast<size_t>(row * width + col)] = values[static_cast<size_t>(from * width + order(col))];
    }
  }
  return result;
}

}  // namespace

GgufCalibration::GgufCalibration(const GgufCalibrationRequest& request, const model::OpenedModel& model,
                                 const std::filesystem::path& output)
    : model_(model), feedback_(request.feedback), damping_(request.damping) {
  const CalibratedRequest& source = request.source;
  check_sources(source);
  std::filesystem::path path = source.statistics;
  if (path.empty()) {
    folder_ = std::make_unique<io::Partial>(output, io::Partial::Kind::folder);
    CalibrateRequest wanted;
    wanted.model = model.folder.path;
    wanted.output = path = folder_->path() / "statistics.safetensors";
    wanted.text = source.text;
    wanted.options.max_memory = source.max_memory;
    wanted.options.gram = request.feedback;
    if (source.gpu != nullptr) wanted.options.gpu = make_cuda_work(*source.gpu);
    wanted.windows = request.windows;
    for (auto& note : calibrate_model(wanted, model).notes) notes_.push_back(std::move(note));
  }
  file_.emplace(StatisticsFile::open(path, model.config));
  file_->check_model(model_identity(model.folder.tensors));
  if (feedback_ && !file_->origin().gram) {
    throw Error(ErrorCode::bad_argument, "error feedback needs Gram matrices, and the statistics have none")
        .hint("calibrate without --diagonal, or --quality fast");
  }
}

void GgufCalibration::load(const model::LinearPlace& place, const gguf::Order& columns) {
  if (place.layer != layer_) {
    statistics_ = file_->load(place.layer);
    layer_ = place.layer;
    group_.clear();
  }
  const bool reorders = !columns.is_plain(place.group.width);
  if (place.group.name() == group_ && reorders == reordered_) return;
  const auto groups = model::input_groups(model_.config, layer_);
  const auto found = std::ranges::find(groups, place.group.name(), &model::InputGroup::name);
  const auto& statistics = statistics_[static_cast<size_t>(found - groups.begin())];
  group_ = place.group.name();
  reordered_ = reorders;
  mean_squares_ = ordered(statistics.mean_squares(), 1, columns);
  factors_.clear();
  gram_.clear();
  if (!feedback_) return;
  // Of a symmetric matrix rows take the order as columns do.
  gram_ = ordered(quantize::supported_gram(statistics), place.group.width, columns);
}

std::optional<quantize::CalibratedInput> GgufCalibration::input(std::string_view module, int64_t block,
                                                                const gguf::Order& columns) {
  const auto place = model::find_linear(model_.config, module);
  if (!place) return std::nullopt;
  load(*place, columns);
  quantize::CalibratedInput result{.mean_squares = mean_squares_};
  if (!feedback_) return result;
  const int64_t k = place->group.width;
  const MatrixView<const float> gram(gram_.data(), k, k);
  const auto known = factors_.find(block);
  const bool made = known != factors_.end();
  const auto& factor = made ? known->second : factors_.try_emplace(block, gram, block, damping_, group_).first->second;
  if (!made && factor.damping() > damping_) {
    notes_.push_back(
        concat(printable(group_), ": its inputs are nearly dependent; the damping was raised to ", factor.damping()));
  }
  result.feedback = &factor;
  result.gram = gram;
  return result;
}

}  // namespace w4q::pipeline
