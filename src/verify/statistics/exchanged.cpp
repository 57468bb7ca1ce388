#include "verify/statistics/exchanged.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/text.h"
#include "formats/scheme_registry.h"

namespace w4q::verify {
namespace {

/// Slopes of sound weights are about 1, of others' scales about 0: what is above this as stored is not looked into.
constexpr double unsure_match = 0.4, sound_match = 0.6, most_match = 1.6, least_exchange_gain = 0.4;
/// The best of as many as a mixture has experts must not be so by chance.
constexpr double beyond_chance = 5;
constexpr double least_scale_spread = 0.05;
/// Of a model in which many weights are unsure and none has another's scales, scales do not follow from codes at all.
constexpr int most_in_vain = 16;
/// One in so many weights.
constexpr int most_unsure = 4;
/// Others that are tried, those of the same layer first.
constexpr size_t most_tried = 1024;

bool is_unsure(const BlockFigures& figures) {
  return figures.match.error > 0 && std::abs(figures.match.value) < unsure_match &&
         figures.scale_spread > least_scale_spread;
}

std::string layer_of(const std::string& name) {
  const size_t at = name.find("layers.");
  return at == std::string::npos ? std::string() : name.substr(0, name.find('.', at + 7) + 1);
}

class Search {
 public:
  Search(const checkpoint::Folder& folder, std::span<const BlockSubject> passes) : folder_(folder), passes_(passes) {}

  /// What says that the scales of `subject` are another's; empty: nothing.
  std::string run(const BlockSubject& subject) const {
    const auto own = load(subject);
    const BlockSample sample(own.passes.front());
    const BlockSubject* donor = nullptr;
    Slope best;
    for (const BlockSubject* other : others(subject)) {
      const auto packed = load(*other);
      const Slope match = sample.scale_match(packed.passes.front());
      if (match.value > best.value) donor = other, best = match;
    }
    const auto [stored, error] = subject.figures.match;
    const double least = stored + std::max(least_exchange_gain, beyond_chance * std::hypot(error, best.error));
    // Whose scales were exchanged has lost his own.
    if (donor == nullptr || std::abs(donor->figures.match.value) > unsure_match) return {};
    if (best.value < sound_match || best.value > most_match || best.value < least) return {};
    return concat("holds the scales of ", printable(donor->name), ": from its codes those follow by ",
                  fixed(best.value, 2), ", its own by ", fixed(stored, 2), " (1: wholly)");
  }

 private:
  formats::PackedLinear load(const BlockSubject& subject) const {
    return checkpoint::load_canonical(folder_.tensors, info(subject));
  }

  /// Its layer first, and there its role.
  std::vector<const BlockSubject*> others(const BlockSubject& subject) const {
    std::vector<const BlockSubject*> ranks[3];
    for (const BlockSubject& other : passes_) {
      if (&other == &subject || other.scheme != subject.scheme || !same_size(other, subject)) continue;
      const bool near = layer_of(other.name) == layer_of(subject.name), alike = other.role == subject.role;
      if (near || alike) ranks[near && alike ? 0 : near ? 1 : 2].push_back(&other);
    }
    std::vector<const BlockSubject*> all;
    for (const auto& rank : ranks) all.insert(all.end(), rank.begin(), rank.end());
    if (all.size() > most_tried) all.resize(most_tried);
    return all;
  }

  bool same_size(const BlockSubject& a, const BlockSubject& b) const {
    const auto &one = info(a), &other = info(b);
    return one.n == other.n && one.k == other.k;
  }

  const checkpoint::PackedLinearInfo& info(const BlockSubject& subject) const {
    return folder_.quantization.linears.at(subject.name);
  }

  const checkpoint::Folder& folder_;
  std::span<const BlockSubject> passes_;
};

}  // namespace

std::map<std::string, std::string> exchanged_scales(const checkpoint::Folder& folder,
                                                    std::span<const BlockSubject> passes) {
  std::map<std::string, std::string> faults;
  const Search search(folder, passes);
  // Of weights nearly all of which were pruned scales do not follow from codes.
  const auto unsure = std::ranges::count_if(passes, [](const BlockSubject& one) { return is_unsure(one.figures); });
  if (most_unsure * unsure > std::ssize(passes)) return faults;
  int in_vain = 0;
  for (const BlockSubject& subject : passes) {
    if (!subject.scheme.starts_with("int") || !subject.scheme.ends_with(" 0") || !is_unsure(subject.figures)) continue;
    if (auto fault = search.run(subject); !fault.empty()) {
      faults.emplace(subject.name, std::move(fault));
    } else if (++in_vain == most_in_vain) {
      break;
    }
  }
  return faults;
}

}  // namespace w4q::verify
