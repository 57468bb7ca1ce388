// Linears as every width leaves them, packed, in a hidden folder: what mixes of widths are put together from while they
// are measured. No more of it is in memory than is being looked at.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/buffer.h"
#include "core/ggml_type.h"
#include "io/checkpoint.h"
#include "kernels/linear/linear.h"
#include "pipeline/calibrated_layer.h"

namespace w4q::pipeline {

/// The rows of a linear as blocks of a type.
struct StoredBlocks {
  GgmlType type = GgmlType::f32;
  Buffer bytes = {};
};
/// A linear of this shape as blocks of each choice.
struct StoredLinear {
  std::string module;
  Shape shape;
  std::vector<StoredBlocks> choices;
};

class WidthStore {
 public:
  /// `folder` exists, is empty and goes with whoever made it.
  explicit WidthStore(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// Keeps what was packed of a layer, as `choice` of each linear. Throws bad_file when the disk is full.
  void add(int64_t layer, size_t choice, const CalibratedLayer& packed);

  /// What another rank has kept of a layer, in the same folder.
  void add_made_by_another(int64_t layer, size_t choice);

  /// Keeps blocks of GGUF, of linears in one file.
  void add(const std::vector<StoredLinear>& linears);

  /// `as` with the weight that `choice` of it stands for, in fp32: scales and rotations undone, so that it does among
  /// the parameters of the 16-bit model what the packed one does among its own.
  kernels::LinearWeight load(const kernels::LinearWeight& as, size_t choice) const;

 private:
  struct Place {
    checkpoint::PackedLinearInfo info;
    size_t file = 0;
    std::vector<float> rows;            ///< what its rows were divided by; empty: ones
    std::optional<GgmlType> type = {};  ///< of blocks of GGUF, and no planes
  };

  std::filesystem::path folder_of(int64_t layer, size_t choice) const;

  std::filesystem::path folder_;
  std::vector<io::Checkpoint> files_;
  std::map<std::pair<std::string, size_t>, Place> places_;
};

}  // namespace w4q::pipeline
