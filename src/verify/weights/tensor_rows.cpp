// What a part of one tensor says of its rows and values.
#include "verify/weights/tensor_rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "core/convert.h"
#include "verify/statistics/norms.h"

namespace w4q::verify {
namespace {

/// Of a line so many words are looked at, of a tensor so many values.
constexpr size_t words_of_line = 8, looked_at = size_t{1} << 14;

uint64_t word_of(const std::byte* at) {
  uint64_t word = 0;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

/// Of words that lie evenly over the line, the last one at its end.
uint64_t key_of(std::span<const std::byte> line, uint64_t mask) {
  const size_t last = line.size() / sizeof(uint64_t) - 1;
  uint64_t key = 0;
  bool any = false;
  for (size_t i = 0; i < words_of_line; ++i) {
    const uint64_t word = word_of(line.data() + last * i / (words_of_line - 1) * sizeof(uint64_t));
    any = any || (word & mask) != 0;
    key = (std::rotl(key, 13) ^ word) * 0x9E3779B97F4A7C15u;
  }
  return any ? std::max<uint64_t>(key, 1) : 0;
}

/// All bits of a word of values but their signs: rounding leaves zeros of either sign.
uint64_t magnitudes(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0x7FFFFFFF'7FFFFFFF;
    case DType::f16:
    case DType::bf16:
      return 0x7FFF'7FFF'7FFF'7FFF;
    case DType::f8_e4m3:
      return 0x7F7F7F7F'7F7F7F7F;
    default:
      return ~uint64_t{0};
  }
}

/// Whether two lines could not be the same because there is nothing in them.
bool says_much(std::span<const std::byte> line) {
  constexpr size_t kinds = 12;
  std::array<bool, 256> seen{};
  size_t different = 0;
  for (const std::byte byte : line) {
    bool& known = seen[std::to_integer<size_t>(byte)];
    different += !known, known = true;
    if (different == kinds) return true;
  }
  return false;
}

class Lines {
 public:
  Lines(std::span<const std::byte> bytes, TensorLines& result)
      : bytes_(bytes), result_(result), mask_(magnitudes(result.info->dtype)) {}

  void look() {
    for (int64_t i = 0; i < result_.lines; ++i) result_.keys.push_back(key_of(line(i), mask_));
    look_for_zeros();
    look_for_repeated();
    look_for_halves();
    look_for_zero_columns();
    look_for_lost_sector();
    look_for_addresses();
  }

 private:
  std::span<const std::byte> line(int64_t at) const {
    return bytes_.subspan(static_cast<size_t>(at) * result_.line_bytes, result_.line_bytes);
  }
  uint64_t key(int64_t at) const { return result_.keys[static_cast<size_t>(at)]; }

  /// Of a value's bytes from `at` on.
  bool zero_byte(size_t at) const {
    const auto mask = static_cast<std::byte>(mask_ >> 8 * (at % sizeof(uint64_t)));
    return (bytes_[at] & mask) == std::byte{0};
  }

  void look_for_zeros() {
    const auto zero = [&](int64_t at) {
      if (key(at) != 0) return false;
      const size_t begin = static_cast<size_t>(at) * result_.line_bytes;
      for (size_t i = begin; i < begin + result_.line_bytes; ++i) {
        if (!zero_byte(i)) return false;
      }
      return true;
    };
    int64_t head = 0, tail = 0;
    while (head < result_.lines && zero(head)) ++head;
    while (tail < result_.lines - head && zero(result_.lines - 1 - tail)) ++tail;
    for (int64_t at = head; at < result_.lines - tail; ++at) {
      if (key(at) == 0 && zero(at)) return;
    }
    result_.head = head, result_.tail = tail;
  }

  void look_for_repeated() {
    std::unordered_map<uint64_t, int64_t> seen;
    seen.reserve(result_.keys.size());
    std::unordered_map<int64_t, int64_t> distances;
    for (int64_t at = 0; at < result_.lines; ++at) {
      if (key(at) == 0) continue;
      const auto [found, added] = seen.try_emplace(key(at), at);
      if (added || !std::ranges::equal(line(found->second), line(at)) || !says_much(line(at))) continue;
      if (result_.repeated++ == 0) result_.first_again = at, result_.again_of = found->second;
      result_.at_one_distance = std::max(result_.at_one_distance, ++distances[at - found->second]);
    }
    const int64_t half = result_.lines / 2;
    if (result_.lines % 2 != 0 || result_.repeated < half * 9 / 10) return;
    int64_t same = 0;
    std::unordered_set<uint64_t> kinds;
    for (int64_t at = 0; at < half; ++at) same += key(at) == key(at + half), kinds.insert(key(at));
    result_.second_half_is_first = same == half && std::ssize(kinds) * 10 >= half * 9;
  }

  void look_for_halves() {
    constexpr int64_t most = 32, fewest = 8;
    const size_t half = result_.line_bytes / 2;
    int64_t same = 0;
    for (int64_t i = 0; i < std::min(most, result_.lines); ++i) {
      const auto bytes = line(i * result_.lines / std::min(most, result_.lines));
      if (result_.line_bytes % 2 != 0 || !std::ranges::equal(bytes.first(half), bytes.last(half))) return;
      same += says_much(bytes);
    }
    result_.halves_repeat = same >= std::max(fewest, std::min(most, result_.lines) / 2);
  }

  /// At the end of the lines, where no other column is zero: channels that were taken out lie anywhere.
  void look_for_zero_columns() {
    constexpr int64_t most = 64, fewest = 16;
    const size_t width = result_.line_bytes;
    std::vector<bool> used(width);
    int64_t looked = 0;
    for (int64_t i = 0; i < std::min(most, result_.lines); ++i) {
      const auto begin = static_cast<size_t>(i * result_.lines / std::min(most, result_.lines)) * width;
      bool any = false;
      for (size_t at = 0; at < width; ++at) {
        if (!zero_byte(begin + at)) used[at] = true, any = true;
      }
      looked += any;
    }
    size_t zeros = 0;
    while (zeros < width && !used[width - 1 - zeros]) ++zeros;
    const auto value = static_cast<size_t>(std::max(1, dtype_bits(result_.info->dtype) / 8));
    for (size_t at = 0; at + value <= width - zeros; at += value) {
      const auto first = used.begin() + static_cast<std::ptrdiff_t>(at);
      if (std::none_of(first, first + static_cast<std::ptrdiff_t>(value), [](bool byte) { return byte; })) return;
    }
    result_.zero_columns = looked >= fewest ? zeros : 0;
  }

  /// A sector of a disk, or several, where nothing else is zero for as many as 16 bytes.
  void look_for_lost_sector() {
    constexpr size_t sector = 512, step = 248;  // a word of every stretch of 512 − 8 bytes, wherever it begins
    constexpr size_t usual = 16;
    size_t begin = 0, end = 0;
    for (size_t at = 0; at + sizeof(uint64_t) <= bytes_.size(); at += step) {
      if (at < end || (word_of(bytes_.data() + at) & mask_) != 0) continue;
      size_t first = at, last = at + sizeof(uint64_t);
      while (first > 0 && zero_byte(first - 1)) --first;
      while (last < bytes_.size() && zero_byte(last)) ++last;
      if (last - first < usual) continue;
      if (end != 0 || last - first + 8 < sector) return;
      begin = first, end = last;
    }
    result_.lost_begin = begin, result_.lost_end = end;
  }

  /// Memory that nobody wrote to holds addresses of a program: words of 8 bytes whose upper ones are all the same.
  void look_for_addresses() {
    constexpr size_t step = 256, fewest = 32;
    const auto is_address = [&](size_t at) {
      const uint64_t upper = word_of(bytes_.data() + at) >> 40;
      return upper == 0x7f || upper == 0x55 || upper == 0x56;
    };
    for (size_t at = 0; at + sizeof(uint64_t) <= bytes_.size(); at += step) {
      if (!is_address(at)) continue;
      size_t begin = at, end = at;
      while (begin >= sizeof(uint64_t) && is_address(begin - sizeof(uint64_t))) begin -= sizeof(uint64_t);
      while (end + sizeof(uint64_t) <= bytes_.size() && is_address(end)) end += sizeof(uint64_t);
      if (end - begin < fewest * sizeof(uint64_t) || !says_much(bytes_.subspan(begin, end - begin))) continue;
      result_.addresses_begin = begin, result_.addresses_end = end;
      return;
    }
  }

  std::span<const std::byte> bytes_;
  TensorLines& result_;
  uint64_t mask_;
};

/// Half the distance between those that a sixth of all lie below and above.
double spread_of_logs(std::span<const float> values) {
  std::vector<double> logs;
  for (const float value : values) {
    if (value != 0 && std::isfinite(value)) logs.push_back(std::log2(std::abs(double{value})));
  }
  constexpr size_t fewest = 32;
  if (logs.size() < fewest) return 0;
  std::ranges::sort(logs);
  const size_t sixth = logs.size() / 6;
  return (logs[logs.size() - 1 - sixth] - logs[sixth]) / 2;
}

/// So many bytes of values that lie in stretches of 64, evenly over the tensor.
std::vector<std::byte> sample_of(std::span<const std::byte> bytes, size_t width) {
  constexpr size_t together = 64;
  const size_t stretch = together * width, count = bytes.size() / stretch;
  if (bytes.size() <= looked_at * width) return {bytes.begin(), bytes.end()};
  std::vector<std::byte> sample;
  sample.reserve(looked_at * width);
  for (size_t i = 0; i < looked_at / together; ++i) {
    const auto from = bytes.subspan(i * count / (looked_at / together) * stretch, stretch);
    sample.insert(sample.end(), from.begin(), from.end());
  }
  return sample;
}

void widen_all(std::span<const std::byte> bytes, DType dtype, std::vector<float>& values) {
  values.resize(bytes.size() * 8 / static_cast<size_t>(dtype_bits(dtype)));
  widen(bytes, dtype, values);
}

void look_at_values(std::span<const std::byte> sample, DType dtype, TensorLines& result) {
  std::vector<float> values;
  widen_all(sample, dtype, values);
  std::unordered_set<float> kinds;
  size_t negative = 0, counted = 0, ends = 0;
  float largest = 0;
  for (const float value : values) {
    if (value == 0 || !std::isfinite(value)) continue;
    ++counted, negative += value < 0;
    if (std::abs(value) > largest) largest = std::abs(value), ends = 0;
    ends += std::abs(value) == largest;
    if (kinds.size() < many_kinds) kinds.insert(value);
  }
  result.kinds = kinds.size();
  if (counted > 0) {
    result.negative = static_cast<double>(negative) / static_cast<double>(counted);
    result.at_end = static_cast<double>(ends) / static_cast<double>(counted);
  }
  result.spread = spread_of_logs(values);
  const auto width = static_cast<size_t>(dtype_bits(dtype) / 8);
  std::vector<std::byte> swapped(sample.begin(), sample.end());
  for (size_t at = 0; at + width <= swapped.size(); at += width)
    std::ranges::reverse(std::span(swapped).subspan(at, width));
  widen_all(swapped, dtype, values);
  result.swapped = spread_of_logs(values);
}

/// Of 64 lanes of values of 16 bits, a bit of the fraction or a low one of the exponent that one lane always or never has,
/// though its other bits vary, and all other lanes have it now and then.
void look_for_stuck_bit(std::span<const std::byte> sample, TensorLines& result) {
  constexpr size_t lanes = 64, fewest = 128;
  constexpr int bits = 10, others_vary = 4;
  const size_t rows = sample.size() / (2 * lanes);
  if (rows < fewest) return;
  std::array<std::array<size_t, bits>, lanes> ones{};
  for (size_t i = 0; i < rows * lanes; ++i) {
    const auto value = std::to_integer<unsigned>(sample[2 * i]) | std::to_integer<unsigned>(sample[2 * i + 1]) << 8;
    for (int bit = 0; bit < bits; ++bit) ones[i % lanes][static_cast<size_t>(bit)] += value >> bit & 1;
  }
  const auto varies = [&](size_t count) { return 20 * count > rows && 20 * count < 19 * rows; };
  for (size_t bit = 0; bit < bits; ++bit) {
    std::vector<size_t> stuck;
    size_t varying = 0;
    for (size_t lane = 0; lane < lanes; ++lane) {
      const size_t count = ones[lane][bit];
      varying += varies(count);
      if (count == 0 || count == rows) stuck.push_back(lane);
    }
    if (stuck.size() != 1 || varying + 1 != lanes) continue;
    if (std::ranges::count_if(ones[stuck.front()], varies) < others_vary) continue;
    result.stuck_lane = static_cast<int>(stuck.front()), result.stuck_bit = static_cast<int>(bit);
    return;
  }
}

}  // namespace

TensorLines tensor_lines(const io::Checkpoint& tensors, const io::TensorInfo& info) {
  constexpr size_t least_line = 32;
  TensorLines result;
  result.info = &info, result.role = role_of(info.name);
  const auto loaded = tensors.load(info.name);
  const auto bytes = loaded->bytes;
  if (info.shape.size() >= 2 && info.shape.back() > 0 && !bytes.empty()) {
    const auto line = static_cast<size_t>(info.shape.back() * dtype_bits(info.dtype) / 8);
    if (line >= least_line && bytes.size() / line >= 8) {
      result.lines = static_cast<int64_t>(bytes.size() / line), result.line_bytes = line;
      Lines(bytes, result).look();
    }
  }
  if (!is_weight_dtype(info.dtype) || bytes.empty()) return result;
  const auto sample = sample_of(bytes, static_cast<size_t>(dtype_bits(info.dtype) / 8));
  look_at_values(sample, info.dtype, result);
  if (result.lines > 0 && dtype_bits(info.dtype) == 16) look_for_stuck_bit(sample, result);
  return result;
}

}  // namespace w4q::verify
