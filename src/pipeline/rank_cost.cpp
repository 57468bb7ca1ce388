#include "pipeline/rank_cost.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/stopwatch.h"
#include "io/checkpoint.h"
#include "io/system.h"
#include "model/model.h"
#include "pipeline/quantize_units.h"

namespace w4q::pipeline {
namespace {

namespace fs = std::filesystem;

/// Bytes per second from the disk into memory, of at most so many bytes of the largest weight file.
double measured_read_rate(const fs::path& folder) {
  constexpr size_t at_once = size_t{1} << 22, most = size_t{1} << 27;
  fs::path largest;
  uint64_t size = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!entry.is_regular_file() || !io::is_weight_file(entry.path().filename().native())) continue;
    if (entry.file_size() > size) largest = entry.path(), size = entry.file_size();
  }
  const io::FileDescriptor file = io::open_file(largest, O_RDONLY);
  ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);  // what lies in memory says nothing of the disk
  std::vector<std::byte> buffer(at_once);
  size_t read = 0;
  const Stopwatch watch;
  while (read < most) {
    const ssize_t count = ::read(file.get(), buffer.data(), buffer.size());
    if (count <= 0) break;
    read += static_cast<size_t>(count);
  }
  return static_cast<double>(read) / std::max(1e-9, watch.seconds());
}

/// The sums of the largest layer.
int64_t statistics_bytes(const model::ModelConfig& config) {
  int64_t largest = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    int64_t sums = 0;
    for (const auto& group : model::input_groups(config, layer)) {
      sums += int64_t{sizeof(double)} * (2 * group.width + quantize::triangle_size(group.width));
    }
    largest = std::max(largest, sums);
  }
  return largest;
}

/// Seconds of the parts of a run by how ranks share them.
struct Shares {
  double once = 0;    ///< by one rank, or by each of them
  double walk = 0;    ///< over the windows
  double packed = 0;  ///< over tensors or layers
};

Shares shares_of(const Plan& plan, bool walks_together) {
  Shares shares;
  for (const auto& part : plan.costs) {
    const bool text = part.name == own_text_part, walk = part.name == calibration_part;
    (text || (walk && !walks_together) ? shares.once : walk ? shares.walk : shares.packed) += part.seconds;
  }
  return shares;
}

}  // namespace

RanksPlan plan_ranks(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan, int ranks) {
  RanksPlan result{.each = {}, .read_rate = measured_read_rate(source.folder.path)};
  const auto& how = request.calibrated;
  const bool walks = how && how->statistics.empty();
  const bool together = walks && request.gpu == nullptr && !request.options.steps.has(quantize::StepKind::asymmetric);
  const auto units = units_of(plan, source.config, how.has_value());
  const auto work = work_of(units, {});
  std::vector<const WorkUnit*> pointers;
  for (const auto& unit : work) pointers.push_back(&unit);
  const auto owners = deal(pointers, ranks);
  result.each.resize(static_cast<size_t>(ranks));
  int64_t packed = 0, layers = 0;
  std::vector<int64_t> packed_of(result.each.size());
  for (size_t i = 0; i < units.size(); ++i) {
    const auto rank = static_cast<size_t>(owners[i]);
    auto& own = result.each[rank];
    ++own.parts;
    for (const TensorPlan* tensor : units[i].tensors) {
      own.reads += tensor->bytes_before;
      own.writes += tensor->bytes_after;
      layers += units[i].layer ? tensor->bytes_before : 0;
      if (!tensor->scheme) continue;
      packed += tensor->weights();
      packed_of[rank] += tensor->weights();
    }
  }
  const Shares shares = shares_of(plan, together);
  const auto depth = static_cast<double>(std::max<int64_t>(1, source.config.layers));
  // Each rank decodes its windows of every layer, the last one so many layers behind the first as there are others.
  const double samples = how ? static_cast<double>(std::max<int64_t>(1, how->text.samples)) : 1;
  const double walkers = std::min<double>(ranks, samples);
  const double windows = std::ceil(samples / walkers) / samples * (depth + walkers - 1) / depth;
  for (size_t rank = 0; rank < result.each.size(); ++rank) {
    auto& own = result.each[rank];
    if (walks) own.reads += layers;
    own.memory = plan.expected_memory + (together && ranks > 1 ? 3 * statistics_bytes(source.config) : 0);
    own.seconds =
        shares.once + shares.walk * windows +
        shares.packed * static_cast<double>(packed_of[rank]) / static_cast<double>(std::max<int64_t>(1, packed)) +
        static_cast<double>(own.reads + own.writes) / result.read_rate;
  }
  return result;
}

}  // namespace w4q::pipeline
