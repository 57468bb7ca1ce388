// What a fault is done to: a copy of a sound folder, with what is known of its linears.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "audit/checkpoint_copy.h"
#include "audit/variants.h"
#include "model/opened.h"

namespace w4q::audit {

/// A variant made, and the same of another model with equal shapes.
struct Specimen {
  const VariantRow* row = nullptr;
  std::filesystem::path base;  ///< the 16-bit model it was made of
  model::OpenedModel sound, other;
  CheckpointCopy copy, other_copy;
  std::string digests;  ///< the file that stands beside it
};

class Subject {
 public:
  Subject(const Specimen& specimen, std::string_view fault);

  const Specimen& specimen;
  CheckpointCopy copy;

  /// Random, by variant and fault.
  uint64_t below(uint64_t bound);
  template <class T>
  const T& pick(const std::vector<T>& from) {
    return from[below(from.size())];
  }

  const model::ModelConfig& config() const { return specimen.sound.config; }
  const checkpoint::QuantizationConfig& quantization() const { return specimen.sound.folder.quantization; }
  bool foreign() const { return quantization().dialect != nullptr; }
  io::Json& stated() { return copy.config["quantization_config"]; }

  /// Packed linears of the layers, and those of them whose names end in `suffix`.
  std::vector<std::string> linears(std::string_view suffix = {}) const;
  /// One of them; empty: there is none.
  std::string linear(std::string_view suffix = {});
  /// A linear and the same of another layer, of the same shape; empty: there are none.
  std::pair<std::string, std::string> two_layers(std::string_view suffix = {});
  /// Names of what belongs to a packed linear, without a bias.
  std::vector<std::string> planes(const std::string& linear) const;
  /// Kept parameters whose names contain `part`.
  std::vector<std::string> kept(std::string_view part = {}) const;

  /// The planes of `linear` as they were written, canonical.
  formats::PackedLinear load(const std::string& linear, bool of_other = false) const;
  /// The inverse, in layout and dialect of the folder. False where it has no place for them.
  bool store(const std::string& linear, const formats::PackedWeight& canonical, size_t pass = 0);
  /// Changes the first pass of a linear; false where `change` says so or the folder has no place for what comes out.
  bool edit(const std::string& linear, const std::function<bool(formats::PackedWeight&)>& change);
  /// The same of some linear, of those that end in `suffix`.
  bool edit_some(const std::function<bool(formats::PackedWeight&)>& change, std::string_view suffix = {});
  /// Changes the values of a kept tensor.
  void edit_values(const std::string& name, const std::function<void(std::vector<float>&)>& change);
  /// Exchanges the bytes of two tensors of one type and shape; false where they differ.
  bool exchange(const std::string& a, const std::string& b);

 private:
  uint64_t seed_, drawn_ = 0;
};

/// Codes of canonical planes, n × k, wherever they stand.
std::vector<uint8_t> codes_of(const formats::PackedWeight& weight);
void set_codes(formats::PackedWeight& weight, const std::vector<uint8_t>& codes);
/// Scales of whatever type they are stored in: not of those that are nested.
bool has_plain_scales(const formats::PackedWeight& weight);
std::vector<float> scales_of(const formats::PackedWeight& weight);
void set_scales(formats::PackedWeight& weight, const std::vector<float>& scales);

}  // namespace w4q::audit
