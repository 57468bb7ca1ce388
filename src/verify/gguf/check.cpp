// The rung of a GGUF file itself: its metadata and blocks. What it was decoded to is for the rungs behind.
#include <algorithm>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "core/text.h"
#include "io/gguf.h"
#include "model/kinds.h"
#include "verify/gguf/blocks.h"
#include "verify/gguf/metadata.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace of_gguf {
namespace {

/// One matrix, or one of a stack of experts.
struct Place {
  const io::GgufTensor* tensor = nullptr;
  int64_t expert = 0, experts = 1;
};

std::vector<Place> places_of(const io::GgufFile& file) {
  std::vector<Place> places;
  for (const io::GgufTensor& tensor : file.header().tensors) {
    const formats::GgufForm* form = formats::find_gguf_form(tensor.type);
    if (form == nullptr || form->lattice || tensor.shape.size() < 2 || tensor.size == 0) continue;
    const int64_t experts = tensor.shape.size() == 3 ? tensor.shape.front() : 1;
    for (int64_t expert = 0; expert < experts; ++expert) places.push_back({&tensor, expert, experts});
  }
  return places;
}

GgufSubject subject_of(const io::GgufFile& file, const Place& place) {
  const io::GgufTensor& tensor = *place.tensor;
  const int64_t k = tensor.shape.back(), rows = element_count(tensor.shape) / k / place.experts;
  const auto bytes = file.bytes(tensor);
  const size_t size = bytes.size() / static_cast<size_t>(place.experts);
  std::string name = tensor.name;
  if (place.experts > 1) name += concat(", expert ", place.expert);
  const formats::GgufForm* form = formats::find_gguf_form(tensor.type);
  return {name, model::kind_of(tensor.name), form,
          gguf_figures(*form, bytes.subspan(static_cast<size_t>(place.expert) * size, size), rows, k)};
}

void add_check(Findings& findings, std::string name, std::string detail, std::vector<std::string> faults) {
  const bool passed = faults.empty();
  findings.checks.add({std::move(name), passed, std::move(detail), std::move(faults)});
}

void run(CheckContext& context, Findings& findings) {
  const auto& given = context.options().given;
  if (given.empty()) return;
  const auto file = io::GgufFile::open(given);
  auto [faults, notes] = check_gguf_metadata(file.header());
  for (const std::string& note : notes) findings.note(note);
  add_check(findings, "metadata", concat(file.header().metadata.size(), " keys"), std::move(faults));
  const auto places = places_of(file);
  const auto subjects = parallel_results(places, [&](const auto& place) { return subject_of(file, place); });
  if (places.empty()) return;
  add_check(findings, "blocks", concat("of ", places.size(), " matrices"), gguf_block_faults(subjects));
}

}  // namespace
}  // namespace of_gguf

CheckRow gguf_check() {
  return {.name = "gguf",
          .help = "A GGUF file's metadata says what its tensors are, and its blocks agree with themselves",
          .run = of_gguf::run};
}

}  // namespace w4q::verify
