#include "model/architecture.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "model/architecture/rows.h"

namespace w4q::model {

std::span<const ArchitectureRow* const> architectures() noexcept {
  static constexpr std::array rows = {&llama_architecture, &mistral_architecture, &qwen2_architecture,
                                      &qwen3_architecture};
  return rows;
}

const ArchitectureRow& architecture_row(std::string_view model_type) {
  const auto found = std::ranges::find(architectures(), model_type, &ArchitectureRow::model_type);
  ensure(found != architectures().end(), "architecture_row: no such model_type");
  return **found;
}

}  // namespace w4q::model
