#include "pipeline/rank_cost.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <span>

#include "core/stopwatch.h"
#include "io/checkpoint.h"
#include "io/system.h"
#include "model/model.h"
#include "pipeline/quantize_units.h"
#include "pipeline/shared_walk.h"

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

/// How ranks walk through the layers for calibration (shared_walk.h, calibrated_model.h).
enum class WalkKind { none, windows, layers, each };

WalkKind walk_of(const QuantizeRequest& request) {
  const auto& how = request.calibrated;
  const bool pairs = request.options.steps.has(quantize::StepKind::asymmetric);
  if (!how || (!how->statistics.empty() && !pairs)) return WalkKind::none;
  if (pairs) return WalkKind::each;
  return how->gpu == nullptr ? WalkKind::windows : WalkKind::layers;
}

/// Seconds of the parts of a run by how ranks share them.
struct Shares {
  double once = 0;    ///< by one rank, or by each of them
  double walk = 0;    ///< over the windows, or over layers
  double packed = 0;  ///< over tensors or layers
};

Shares shares_of(const Plan& plan, WalkKind walks) {
  Shares shares;
  for (const auto& part : plan.costs) {
    const bool text = part.name == own_text_part, walk = part.name == calibration_part;
    (text || (walk && walks == WalkKind::each) ? shares.once : walk ? shares.walk : shares.packed) += part.seconds;
  }
  return shares;
}

class RankCosts {
 public:
  RankCosts(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan, int ranks)
      : source_(source),
        request_(request),
        plan_(plan),
        walk_(walk_of(request)),
        shares_(shares_of(plan, walk_)),
        layer_bytes_(static_cast<size_t>(source.config.layers)),
        each_(static_cast<size_t>(ranks)) {}

  std::vector<RankCost> each(double read_rate) {
    deal_units();
    for (size_t rank = 0; rank < each_.size(); ++rank) each_[rank].cost.reads += walked_bytes(rank);
    for (size_t rank = 0; rank < each_.size(); ++rank) each_[rank].cost.memory = memory(rank);
    if (request_.planned_conversion) deal_conversion();
    std::vector<RankCost> result;
    for (size_t rank = 0; rank < each_.size(); ++rank) {
      result.push_back(each_[rank].cost);
      result.back().seconds = seconds(rank, read_rate);
    }
    return result;
  }

 private:
  struct Share {
    RankCost cost;
    int64_t packed = 0;          ///< weights
    std::vector<size_t> layers;  ///< in their order
  };

  void deal_units() {
    const auto units = units_of(plan_, source_.config, request_.calibrated.has_value());
    const auto owners = dealt(work_of(units, {}));
    for (size_t i = 0; i < units.size(); ++i) {
      Share& own = each_[owners[i]];
      ++own.cost.parts;
      if (units[i].layer) own.layers.push_back(static_cast<size_t>(*units[i].layer));
      for (const TensorPlan* tensor : units[i].tensors) {
        own.cost.reads += tensor->bytes_before;
        own.cost.writes += tensor->bytes_after;
        if (units[i].layer) layer_bytes_[static_cast<size_t>(*units[i].layer)] += tensor->bytes_before;
        if (!tensor->scheme) continue;
        all_packed_ += tensor->weights();
        own.packed += tensor->weights();
      }
    }
  }

  std::vector<size_t> dealt(const std::vector<WorkUnit>& work) const {
    std::vector<const WorkUnit*> pointers;
    for (const auto& unit : work) pointers.push_back(&unit);
    const auto owners = deal(pointers, static_cast<int>(each_.size()));
    return {owners.begin(), owners.end()};
  }

  /// What was packed is read and written once more, tensor by tensor; a dialect takes about as much.
  void deal_conversion() {
    std::vector<WorkUnit> work;
    for (const auto& tensor : plan_.tensors) work.push_back({.name = {}, .tensors = {}, .cost = tensor.bytes_after});
    const auto owners = dealt(work);
    for (size_t i = 0; i < work.size(); ++i) {
      RankCost& own = each_[owners[i]].cost;
      own.reads += work[i].cost;
      own.writes += work[i].cost;
      own.memory = std::max(own.memory, plan_.tensor_memory);
    }
  }

  /// Ranks that decode windows: no more than there are.
  double walkers() const {
    const int64_t most = walk_ == WalkKind::windows ? samples() : std::max<int64_t>(1, source_.config.layers);
    return static_cast<double>(std::min<int64_t>(static_cast<int64_t>(each_.size()), most));
  }
  int64_t samples() const { return request_.calibrated ? std::max<int64_t>(1, request_.calibrated->text.samples) : 1; }

  bool walks(size_t rank) const {
    if (walk_ == WalkKind::windows) return static_cast<double>(rank) < walkers();
    return walk_ != WalkKind::none && !each_[rank].layers.empty();
  }

  /// Of layers, to run them: all by whoever decodes windows, its own on a GPU, those up to its last where each rank walks.
  int64_t walked_bytes(size_t rank) const {
    if (!walks(rank)) return 0;
    int64_t bytes = 0;
    if (walk_ == WalkKind::layers) {
      for (const size_t layer : each_[rank].layers) bytes += layer_bytes_[layer];
      return bytes;
    }
    const size_t end = walk_ == WalkKind::each ? each_[rank].layers.back() + 1 : layer_bytes_.size();
    for (size_t layer = 0; layer < end; ++layer) bytes += layer_bytes_[layer];
    return bytes;
  }

  int64_t memory(size_t rank) const {
    if (!walks(rank) && each_[rank].layers.empty())
      return each_[rank].cost.parts > 0 ? plan_.tensor_memory : base_memory;
    if (walk_ != WalkKind::windows) return plan_.expected_memory;
    const int64_t all = plan_.expected_memory + travelling_memory(source_.config, {}, static_cast<int>(each_.size()));
    const int64_t limit = request_.calibrated->max_memory;
    return limit > 0 ? std::min(all, std::max(limit, plan_.expected_memory)) : all;
  }

  double seconds(size_t rank, double read_rate) const {
    const Share& own = each_[rank];
    if (!walks(rank) && own.cost.parts == 0 && own.cost.reads == 0) return 0;
    const double packed = static_cast<double>(own.packed) / static_cast<double>(std::max<int64_t>(1, all_packed_));
    return shares_.once + (walks(rank) ? shares_.walk * walked_share() : 0) + shares_.packed * packed +
           static_cast<double>(own.cost.reads + own.cost.writes) / read_rate;
  }

  /// Of the time that one process takes to decode the text. A rank decodes its windows of every layer, the last one so many
  /// layers behind the first as there are others; or, on a GPU, all chunks of its layers, in rounds (docs/scale.md).
  double walked_share() const {
    const double count = walkers(), layers = static_cast<double>(std::max<int64_t>(1, source_.config.layers));
    if (walk_ == WalkKind::windows) {
      const auto windows = static_cast<double>(samples());
      return std::ceil(windows / count) / windows * (layers + count - 1) / layers;
    }
    const int64_t at_once = std::max<int64_t>(1, calibration_chunk_rows / request_.calibrated->text.length);
    const auto chunks = static_cast<double>((samples() + at_once - 1) / at_once);
    return std::ceil(layers / count) / layers * (chunks + count - 1) / chunks;
  }

  const model::OpenedModel& source_;
  const QuantizeRequest& request_;
  const Plan& plan_;
  const WalkKind walk_;
  const Shares shares_;
  std::vector<int64_t> layer_bytes_;
  std::vector<Share> each_;
  int64_t all_packed_ = 0;
};

/// Of disks of their own: what the others wrote is read there again, and written once more by the first rank, once all are
/// done.
void add_gathering(RanksPlan& ranks) {
  const double slowest = ranks.seconds();
  auto& first = ranks.each.front();
  for (auto& own : std::span(ranks.each).subspan(1)) {
    ranks.gathered += own.writes;
    own.reads += own.writes;
    own.seconds += static_cast<double>(own.writes) / ranks.read_rate;
  }
  first.writes += ranks.gathered;
  first.seconds = slowest + static_cast<double>(ranks.gathered) / ranks.read_rate;
}

}  // namespace

RanksPlan plan_ranks(const model::OpenedModel& source, const QuantizeRequest& request, const Plan& plan, int ranks) {
  const double rate = measured_read_rate(source.folder.path);
  RanksPlan result{.each = RankCosts(source, request, plan, ranks).each(rate), .read_rate = rate};
  if (request.sharing.local_disks) add_gathering(result);
  return result;
}

}  // namespace w4q::pipeline
