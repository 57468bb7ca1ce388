#include "verify/zero_pages.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "core/parallel.h"
#include "core/text.h"
#include "model/parameters.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

/// Rows of fewer bytes say nothing of where a row begins: dimensions are put together until they have as many.
constexpr size_t least_row = 64;
/// A row's own zeros may stand beside a stretch: so many bytes into a row are none of it.
constexpr size_t slack = 32;
/// Of the bytes of a tensor: more are how it is made, but for one stretch alone.
constexpr double most_lost = 0.25;
constexpr size_t few_runs = 3;

/// What is zero over long stretches by its nature: zero points, orders of groups, masks.
constexpr std::string_view of_nature[] = {"zero", "g_idx", "group_index", "mask", "perm", ".bias", "inv_freq"};

uint64_t word_at(const std::byte* at) {
  uint64_t word = 0;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

size_t row_bytes_of(const io::TensorInfo& info) {
  auto bytes = static_cast<size_t>(std::max(1, dtype_bits(info.dtype) / 8));
  for (size_t i = info.shape.size(); i-- > 1;) {
    bytes *= static_cast<size_t>(info.shape[i]);
    if (bytes >= least_row) return bytes;
  }
  return 0;
}

bool is_router(const io::TensorInfo& info) {
  const std::string_view module = model::module_path(info.name);
  const std::string_view last = module.substr(module.rfind('.') + 1);
  const bool named = last == "gate" || last == "router" || module.ends_with("router.layer");
  return named && info.shape.size() == 2 && info.shape[0] > 1 && is_weight_dtype(info.dtype);
}

bool is_looked_at(const io::TensorInfo& info) {
  const bool integer = info.dtype == DType::i64 || info.dtype == DType::u64 || info.dtype == DType::boolean;
  if (info.shape.size() < 2 || info.size() < 2 * page_bytes || integer || row_bytes_of(info) == 0)
    return is_router(info);
  return std::ranges::none_of(of_nature,
                              [&](std::string_view part) { return info.name.find(part) != std::string::npos; });
}

int64_t zero_rows(std::span<const std::byte> bytes, int64_t rows) {
  const size_t row = bytes.size() / static_cast<size_t>(rows);
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const auto line = bytes.subspan(static_cast<size_t>(i) * row, row);
    count += std::ranges::all_of(line, [](std::byte byte) { return byte == std::byte{0}; });
  }
  return count;
}

/// Values that positive numbers of a byte have: they are letters, too.
constexpr std::string_view of_positive_bytes[] = {"scale", "absmax", "exponent"};

bool is_text(std::byte byte) {
  const int value = std::to_integer<int>(byte);
  return (value >= 0x20 && value < 0x7f) || value == '\n' || value == '\r' || value == '\t';
}

bool is_space(std::byte byte) { return byte == std::byte{' '} || byte == std::byte{'\n'}; }

/// Half of all codes and of all values of 16 bits have a sign or other bytes that no letter has. Where none has a sign, as
/// of positive weights of FP8, no value is as common as spaces are in a text.
std::string text_within(std::span<const std::byte> bytes) {
  constexpr size_t step = page_bytes / 4, least = 512, spaces = 16;
  for (size_t at = 0; at < bytes.size(); at += step) {
    if (!is_text(bytes[at])) continue;
    size_t begin = at, end = at;
    while (end < bytes.size() && end - at < least && is_text(bytes[end])) ++end;
    while (begin > 0 && end - begin < least && is_text(bytes[begin - 1])) --begin;
    if (end - begin < least) continue;
    if (std::ranges::count_if(bytes.subspan(begin, end - begin), is_space) < std::ptrdiff_t{spaces}) continue;
    constexpr size_t shown = 24;
    const auto* const text = reinterpret_cast<const char*>(bytes.data() + begin);
    return concat("holds text at byte ", begin, ": \"", printable(std::string_view(text, shown)), "…\"");
  }
  return {};
}

/// A part of a page that stands twice in a matrix, and not as whole rows: a block that was written in another's place.
/// `line_bytes`: of one line of words of several inputs. Where one input of a group is far louder than all others, those
/// have the zero points of their outputs as codes, and lines are alike.
std::string page_twice(std::span<const std::byte> bytes, size_t row_bytes, size_t line_bytes) {
  constexpr size_t few = 4, step = page_bytes / 4, least = page_bytes / 2, words = 4;
  constexpr double least_different = 0.8;
  std::unordered_map<uint64_t, size_t> seen;
  seen.reserve(bytes.size() / step);
  std::string found;
  size_t count = 0;
  for (size_t at = 0, past = 0; at + words * sizeof(uint64_t) <= bytes.size(); at += step) {
    uint64_t key = 0;
    for (size_t word = 0; word < words; ++word) {
      key = (std::rotl(key, 13) ^ word_at(bytes.data() + at + word * sizeof(uint64_t))) * 0x9E3779B97F4A7C15u;
    }
    const auto [place, added] = seen.try_emplace(key, at);
    if (added || at < past) continue;
    const size_t apart = at - place->second;
    size_t begin = at, end = at;
    while (begin > apart && begin > past && bytes[begin - 1] == bytes[begin - 1 - apart]) --begin;
    while (end < bytes.size() && bytes[end] == bytes[end - apart]) ++end;
    if (end - begin < least) continue;
    past = end;
    // Where nearly all codes are one and the same, as in groups of a few loud channels, stretches are alike by chance.
    std::unordered_set<uint64_t> kinds;
    size_t looked_at = 0;
    for (size_t i = begin; i + sizeof(uint64_t) <= end; i += sizeof(uint64_t), ++looked_at)
      kinds.insert(word_at(bytes.data() + i));
    if (line_bytes < row_bytes && apart % line_bytes == 0) continue;
    if (static_cast<double>(kinds.size()) < least_different * static_cast<double>(looked_at)) continue;
    if (++count > few) return {};
    const auto within = [&](size_t byte) {
      const size_t in_row = byte % row_bytes, own = std::min(slack, row_bytes / 8);
      return in_row > own && in_row + own < row_bytes;
    };
    if (found.empty() && (apart % row_bytes != 0 || within(begin) || within(end))) {
      found = concat("holds the bytes from ", begin - apart, " to ", end - apart, " again from ", begin,
                     " on, which are no whole rows: a page stands twice");
    }
  }
  return found;
}

// ---- random bytes among codes ----

/// Shares of the 16 values of half bytes against equal ones, of `bytes`: 15 for random bytes, give or take 5.5. Of codes of
/// 4 bits each is one, whatever their order; of those of 8 bits the upper half is the sign and most of the size.
double unevenness(std::span<const std::byte> bytes, bool upper_alone) {
  std::array<int64_t, 16> counts{};
  for (const std::byte byte : bytes) {
    const auto value = std::to_integer<size_t>(byte);
    ++counts[value >> 4];
    if (!upper_alone) ++counts[value & 15];
  }
  const double expected = static_cast<double>(bytes.size()) * (upper_alone ? 1 : 2) / 16;
  double sum = 0;
  for (const int64_t count : counts)
    sum += (static_cast<double>(count) - expected) * (static_cast<double>(count) - expected);
  return sum / expected;
}

/// Of codes that are nowhere near to equally frequent, a stretch of a page in which they are as random bytes have them.
std::string random_stretch(std::span<const std::byte> bytes, bool upper_alone) {
  constexpr size_t window = page_bytes / 4, looked_at = window / 2, fewest = 16, in_a_row = 3;
  constexpr double like_random = 48, nowhere_near = 150, most_random = 0.75;
  const size_t windows = bytes.size() / window;
  if (windows < fewest) return {};
  size_t uneven = 0, count = 0, run = 0, found = windows;
  for (size_t at = 0; at < windows; ++at) {
    const auto whole = bytes.subspan(at * window, window);
    const double here = unevenness(whole.first(looked_at), upper_alone);
    uneven += here > nowhere_near;
    const bool random = here < like_random && unevenness(whole, upper_alone) < like_random;
    run = random ? run + 1 : 0, count += random;
    if (run == in_a_row && found == windows) found = at + 1 - in_a_row;
  }
  // Windows that are nearly even everywhere would make some that are wholly so.
  const auto all = static_cast<double>(windows);
  const bool told = static_cast<double>(uneven) >= (1 - most_random) * all &&
                    static_cast<double>(count) <= most_random * all &&
                    static_cast<double>(uneven + count) >= most_random * all;
  if (!told || found == windows) return {};
  return concat("holds random bytes from byte ", found * window, " or before on: half bytes are all as frequent there");
}

/// Codes of 4 bits in words or bytes, and of 8 bits.
bool holds_codes(const io::TensorInfo& info, bool& upper_alone) {
  upper_alone = info.dtype == DType::f8_e4m3 || info.dtype == DType::i8;
  const bool named = info.name.ends_with(".qweight") || info.name.ends_with(".weight_packed") ||
                     info.name.ends_with("_blocks") || info.name.ends_with(".weight");
  return named && (upper_alone || info.dtype == DType::u8 || info.dtype == DType::i32 || info.dtype == DType::u32);
}

struct Looked {
  std::string fault;
  int64_t rows_of_nothing = 0;  ///< of a router
};

/// Integers of GPTQ and AWQ: inputs come first, and a code of 0 is the end of a range, no weight of 0. Groups of inputs
/// may be without weights as a whole, a few inputs not.
size_t rows_together(const io::Checkpoint& tensors, const io::TensorInfo& info) {
  constexpr std::string_view codes = ".qweight";
  if (!info.name.ends_with(codes) || info.dtype != DType::i32 || info.shape.size() != 2) return 1;
  const std::string scales = concat(std::string_view(info.name).substr(0, info.name.size() - codes.size()), ".scales");
  if (!tensors.contains(scales) || tensors.at(scales).shape.size() != 2) return 1;
  constexpr size_t least_group = 32, least_words = 2;  // of 2 bits
  if (tensors.at(scales).shape[1] != info.shape[1]) return least_group;
  // Inputs in order of their groups tell how many there are, and so how many words 32 of them fill: one for each bit.
  const std::string order = concat(std::string_view(info.name).substr(0, info.name.size() - codes.size()), ".g_idx");
  const int64_t inputs = tensors.contains(order) ? element_count(tensors.at(order).shape) : 0;
  return inputs > 0 ? std::max<size_t>(least_words, static_cast<size_t>(info.shape[0] * 32 / inputs)) : least_words;
}

Looked look_at(const io::Checkpoint& tensors, const io::TensorInfo& info) {
  Looked result;
  const auto loaded = tensors.load(info.name);
  if (const size_t row = row_bytes_of(info) * rows_together(tensors, info); row > 0) {
    result.fault = lost_page(byte_runs(loaded->bytes), loaded->bytes.size(), row);
    const auto is_part = [&](std::string_view part) { return info.name.find(part) != std::string::npos; };
    const bool values = std::ranges::none_of(of_positive_bytes, is_part);
    if (result.fault.empty() && values) result.fault = text_within(loaded->bytes);
    if (result.fault.empty() && values && info.shape.size() == 2)
      result.fault = page_twice(loaded->bytes, row, row_bytes_of(info));
    bool upper_alone = false;
    if (result.fault.empty() && holds_codes(info, upper_alone))
      result.fault = random_stretch(loaded->bytes, upper_alone);
  }
  if (is_router(info)) result.rows_of_nothing = zero_rows(loaded->bytes, info.shape[0]);
  return result;
}

}  // namespace

std::vector<ByteRun> byte_runs(std::span<const std::byte> bytes) {
  constexpr size_t step = page_bytes / 4;
  std::vector<ByteRun> runs;
  for (size_t at = 0; at + sizeof(uint64_t) <= bytes.size(); at += step) {
    const uint64_t word = word_at(bytes.data() + at);
    // What was never written is zero or, of erased flash, has all bits; other bytes that repeat are codes of next to nothing.
    if (word != 0 && word != ~uint64_t{0}) continue;
    const std::byte byte = bytes[at];
    size_t begin = at, end = at + sizeof(word);
    while (begin > 0 && bytes[begin - 1] == byte) --begin;
    while (end + sizeof(word) <= bytes.size() && word_at(bytes.data() + end) == word) end += sizeof(word);
    while (end < bytes.size() && bytes[end] == byte) ++end;
    if (end - begin >= page_bytes) runs.push_back({begin, end, byte});
    at = std::max(at, end / step * step);
  }
  return runs;
}

std::string lost_page(std::span<const ByteRun> runs, size_t bytes, size_t row_bytes) {
  size_t lost = 0;
  for (const ByteRun& run : runs) lost += run.end - run.begin;
  if (runs.empty() || lost == bytes) return {};
  if (runs.size() > 1 && static_cast<double>(lost) > most_lost * static_cast<double>(bytes)) return {};
  const auto within = [&](size_t at) {
    const size_t in_row = at % row_bytes;
    const size_t own = std::min(slack, row_bytes / 8);
    return in_row > own && in_row + own < row_bytes;
  };
  const auto partial = [&](const ByteRun& run) { return within(run.begin) || within(run.end); };
  const auto found = std::ranges::find_if(runs, partial);
  if (found == runs.end()) return {};
  // Columns that are zero are so in many rows.
  const auto alike = std::ranges::count_if(runs, [&](const ByteRun& run) {
    const auto near = [&](size_t a, size_t b) { return std::max(a, b) - std::min(a, b) <= slack; };
    return near(run.begin % row_bytes, found->begin % row_bytes) && near(run.end % row_bytes, found->end % row_bytes);
  });
  if (runs.size() > few_runs && 2 * static_cast<size_t>(alike) > runs.size()) return {};
  const int byte = std::to_integer<int>(found->byte);
  return concat("holds ", byte == 0 ? "zeros" : concat("nothing but bytes of ", byte), " from byte ", found->begin,
                " to ", found->end, ", which are no whole rows of ", row_bytes,
                runs.size() > 1 ? concat(", and ", runs.size() - 1, " further stretches of them") : std::string(),
                ": pages were lost");
}

Check check_zero_pages(const checkpoint::Folder& headers) {
  std::vector<const io::TensorInfo*> infos;
  for (const auto& [name, info] : headers.tensors.tensors()) {
    if (is_looked_at(info)) infos.push_back(&info);
  }
  const auto looked =
      parallel_results(infos, [&](const io::TensorInfo* info) { return look_at(headers.tensors, *info); });
  Check check{"pages", true, {}, {}};
  int64_t routers = 0, hollow = 0;
  for (size_t i = 0; i < infos.size(); ++i) {
    routers += is_router(*infos[i]), hollow += looked[i].rows_of_nothing > 0;
  }
  for (size_t i = 0; i < infos.size(); ++i) {
    const auto& [fault, rows] = looked[i];
    if (!fault.empty()) check.faults.push_back(concat(printable(infos[i]->name), ": ", fault));
    if (fault.empty() && rows > 0 && rows < infos[i]->shape[0] && hollow == 1 && routers > 1) {
      check.faults.push_back(concat(printable(infos[i]->name), ": is zero in ", rows, " rows, and no other router is: ",
                                    "those experts are never chosen for what they read"));
    }
  }
  check.passed = check.faults.empty();
  check.detail = concat(infos.size() - std::min(infos.size(), check.faults.size()), " of ", infos.size(),
                        " matrices have no page of zeros within their rows");
  return check;
}

CheckRow zero_pages_check() {
  return {.name = "pages",
          .help = "no page of zeros stands within the rows of a matrix",
          .run = [](CheckContext& context, Findings& findings) {
            auto check = check_zero_pages(context.headers());
            // Said where it fails: what is sound says so by all other rungs.
            if (!check.passed) findings.checks.add(std::move(check));
          }};
}

}  // namespace w4q::verify
