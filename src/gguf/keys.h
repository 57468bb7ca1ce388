// Typed access to the metadata of a GGUF file, with messages that name file and key.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "io/gguf.h"

namespace w4q::gguf {

/// A size, as metadata has them.
inline uint32_t u32(int64_t value) { return static_cast<uint32_t>(value); }
/// The shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06.
double shortest_decimal(float value);
inline bool has(const io::GgufFile& file, std::string_view tensor) { return file.find(tensor) != nullptr; }

class GgufKeys {
 public:
  /// `metadata` outlives this object; `source` names the file. Keys that begin with "%" get the architecture in front:
  /// "%.block_count" is "llama.block_count".
  GgufKeys(const io::GgufMetadata& metadata, std::string_view source);

  const std::string& source() const noexcept { return source_; }
  /// general.architecture; empty when absent.
  const std::string& architecture() const noexcept { return architecture_; }

  bool has(std::string_view key) const { return find(key) != nullptr; }
  bool is_array(std::string_view key) const;
  /// Each is nothing when the key is absent and throws bad_file when the value has another type. Integers of every
  /// width are integers, and numbers too; an array whose elements are all the same counts as that integer (some files
  /// state sizes layer by layer; unsupported when they differ).
  std::optional<int64_t> integer(std::string_view key) const;
  /// Of an f32 its shortest_decimal().
  std::optional<double> number(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string> text(std::string_view key) const;
  /// Null when the key is absent.
  const std::vector<std::string>* texts(std::string_view key) const;
  const std::vector<float>* numbers(std::string_view key) const;
  const std::vector<int32_t>* integers(std::string_view key) const;
  const std::vector<bool>* booleans(std::string_view key) const;
  /// Integers from 1 to 2^31 − 1, one for each of so many layers: those of an array, or the same for all. Throws bad_file
  /// where the key is absent or the array has another length.
  std::vector<int64_t> layers(std::string_view key, int64_t count) const;

  /// An integer in [1, 2^31). Throws bad_file when it is outside or, without a `fallback`, absent.
  int64_t size(std::string_view key, std::optional<int64_t> fallback = std::nullopt) const;

  /// "<file>: <key>: <what>".
  Error error(ErrorCode code, std::string_view key, std::string_view what) const;

 private:
  const io::GgufValue* find(std::string_view key) const;
  std::string full(std::string_view key) const;
  template <class T>
  const std::vector<T>* array(std::string_view key, std::string_view expected) const;
  Error wrong_type(std::string_view key, std::string_view expected) const;

  const io::GgufMetadata* metadata_;
  std::string source_;
  std::string architecture_;
};

}  // namespace w4q::gguf
