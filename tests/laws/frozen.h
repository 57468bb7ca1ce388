// w4q's own bytes, frozen: the fingerprints in testdata/golden/w4q_*.json were written once and change only with the
// format version. W4Q_PRINT_FROZEN=1 prints what the present code makes, of which scripts/freeze adds what is new.
#pragma once

#include <cstdlib>
#include <iostream>
#include <span>
#include <string>
#include <vector>

#include "core/rng.h"
#include "core/text.h"
#include "formats/packed.h"
#include "io/json.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::test {

/// A matrix: int16(draw >> 48) · 2^-17 of stream 2026, exact in fp32 and the same on every machine.
inline std::vector<float> frozen_input(int64_t n, int64_t k) {
  std::vector<float> values(static_cast<size_t>(n * k));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<int16_t>(random_bits(2026, i) >> 48)) * 0x1p-17f;
  }
  return values;
}

/// Of roles, types, shapes and bytes of all planes.
inline uint64_t fingerprint(const formats::PackedWeight& weight) {
  uint64_t hash = fingerprint(std::span<const std::byte>{});
  for (const auto& [spec, bytes] : weight.planes) {
    const std::string text = concat(to_string(spec.role), " ", dtype_name(spec.dtype), " ", shape_text(spec.shape));
    hash = fingerprint(bytes.bytes(), fingerprint(std::as_bytes(std::span(text)), hash));
  }
  return hash;
}

inline std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

inline constexpr std::string_view how_to_freeze = "scripts/freeze adds what is new (docs/adding.md, \"Frozen bytes\")";

/// The golden file of what a method makes.
inline std::string golden_file(std::string_view quantizer) {
  return quantizer == "rtn" ? "w4q_int.json" : concat("w4q_", quantizer, ".json");
}

/// The fingerprints of a golden file by their paths in it; none where there is no such file yet.
inline io::Json frozen_entries(const std::string& file) {
  const auto path = testdata() / "golden" / file;
  return std::filesystem::exists(path) ? io::read_json(path).flatten() : io::Json::object();
}

/// `present` and the golden file have the same entries with the same fingerprints.
inline void expect_frozen(const io::Json& present, const std::string& file) {
  if (std::getenv("W4Q_PRINT_FROZEN") != nullptr) std::cout << file << "\n" << present.dump(1) << "\n";
  const io::Json now = present.flatten();
  const io::Json frozen = frozen_entries(file);
  for (const auto& [entry, hash] : frozen.items()) {
    EXPECT_TRUE(now.contains(entry)) << file << " " << entry << " has vanished";
  }
  for (const auto& [entry, hash] : now.items()) {
    if (frozen.contains(entry)) {
      EXPECT_EQ(hash, frozen[entry]) << file << " " << entry << ": other bytes than those that are frozen";
    } else {
      ADD_FAILURE() << file << " " << entry << " has no frozen bytes: " << how_to_freeze;
    }
  }
}

}  // namespace w4q::test
