// Rules by values: scales that are zero, inverted, unequal where they must be shared, or of other codes.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "checkpoint/low_precision.h"
#include "core/convert.h"
#include "core/float_formats.h"
#include "core/parallel.h"
#include "core/text.h"
#include "io/digest.h"
#include "model/parameters.h"
#include "verify/contents/byte_values.h"
#include "verify/contents/contents.h"
#include "verify/conventions/sample.h"
#include "verify/median.h"
#include "verify/statistics/norms.h"

namespace w4q::verify {
namespace {

using Kind = StoredLinear::Kind;

constexpr std::array<float, 16> e2m1 = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/// Of a linear enough blocks that a slope over them is known to 0.05, and few enough that a large file takes seconds.
constexpr int64_t sampled_blocks = 1024, sampled_fp8_blocks = 256;

/// Codes of small floats and how scales lie over them.
class Blocks {
 public:
  Blocks(const io::Checkpoint& tensors, const StoredLinear& linear)
      : linear_(linear), codes_(tensors.load(linear.codes)), stored_(tensors.load(linear.scales)) {
    Shape shape = checkpoint::shape_of_scales(stored_->shape);
    const int64_t count = element_count(shape), rows = linear.n * std::max<int64_t>(1, linear.experts);
    scales_.resize(static_cast<size_t>(count));
    const auto* const bytes = reinterpret_cast<const uint8_t*>(stored_->bytes.data());
    if (stored_->dtype == DType::f8_e4m3) {
      std::transform(bytes, bytes + count, scales_.begin(), f32_from_e4m3);
    } else if (stored_->dtype == DType::u8 || stored_->dtype == DType::f8_e8m0) {
      std::transform(bytes, bytes + count, scales_.begin(), f32_from_e8m0);
      powers_of_two_ = true;
    } else if (is_weight_dtype(stored_->dtype)) {
      widen(stored_->bytes, stored_->dtype, scales_);
    } else {
      scales_.clear();
      return;
    }
    if (count == 0 || rows == 0) return;
    if (linear.kind == Kind::fp8 && linear.experts > 0) {
      if (shape.size() != 3 || shape[1] == 0 || linear.n % shape[1] != 0) return;  // short blocks within the rows
      shape = {shape[0] * shape[1], shape[2]};
    }
    if (linear.kind != Kind::fp8) {
      across_ = linear.k / (linear.kind == Kind::nvfp4 ? 16 : 32);
      sound_ = across_ > 0 && count == rows * across_;
      block_rows_ = 1, block_cols_ = across_ > 0 ? linear.k / across_ : 1;
    } else if (count == 1 || shape == Shape{linear.n} || shape == Shape{linear.n, 1}) {
      across_ = 1, sound_ = true;
      block_rows_ = count == 1 ? linear.n : 1, block_cols_ = linear.k;
    } else if (shape.size() == 2) {
      across_ = shape[1];
      block_rows_ = (rows + shape[0] - 1) / shape[0], block_cols_ = (linear.k + shape[1] - 1) / shape[1];
      // Blocks are powers of two; the last ones may be short.
      block_rows_ = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(block_rows_)));
      block_cols_ = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(block_cols_)));
      const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
      sound_ = shape == Shape{blocks(rows, block_rows_), blocks(linear.k, block_cols_)};
    }
  }

  /// Whether scales lie over the codes in a way that is known.
  bool sound() const noexcept { return sound_; }
  bool powers_of_two() const noexcept { return powers_of_two_; }
  const std::vector<float>& scales() const noexcept { return scales_; }
  int64_t across() const noexcept { return across_; }
  /// Of turned scales: whether the same shape could hold them.
  bool square() const noexcept { return static_cast<int64_t>(scales_.size()) == across_ * across_; }

  /// Mean square of the codes of a block, of a tall one as 16 rows of it tell. Codes of 8 bits that are zero are weights
  /// that were taken out, as many in a row as somebody liked; they say nothing of its scale.
  double energy(int64_t block, bool whole = false) const {
    if (!whole) return measured_energy(block, false);
    if (whole_.empty()) whole_.assign(scales_.size(), NAN);
    double& known = whole_[static_cast<size_t>(block)];
    if (std::isnan(known)) known = measured_energy(block, true);
    return known;
  }

  /// Of FP8 in blocks: of up to 64 of them that have codes, the share in which one reaches the end of E4M3, as the largest
  /// weight of a block does whoever scales by it; nothing: there are no blocks.
  std::pair<int64_t, double> reach() const {
    constexpr int64_t most_blocks = 64;
    constexpr uint8_t end = 0x7E;  // 448
    if (linear_.kind != Kind::fp8 || scales_.size() < 2) return {};
    const auto* const bytes = reinterpret_cast<const uint8_t*>(codes_->bytes.data());
    const int64_t rows = linear_.n * std::max<int64_t>(1, linear_.experts), count = std::ssize(scales_);
    int64_t looked = 0, reached = 0;
    for (int64_t i = 0; i < std::min(most_blocks, count); ++i) {
      const int64_t block = i * count / std::min(most_blocks, count);
      const int64_t row = block / across_ * block_rows_, col = block % across_ * block_cols_;
      uint8_t largest = 0;
      for (int64_t at = row; at < std::min(row + block_rows_, rows) && largest < end; ++at) {
        const uint8_t* const from = bytes + at * linear_.k + col;
        for (int64_t j = 0; j < std::min(block_cols_, linear_.k - col); ++j)
          largest = std::max<uint8_t>(largest, from[j] & 0x7F);
      }
      looked += largest > 0, reached += largest >= end;
    }
    return {looked, static_cast<double>(reached) / static_cast<double>(std::max<int64_t>(1, looked))};
  }

  /// Of FP8: whether each of 14 exponents is nearly as frequent as the others, of 2^16 codes. Of weights each is half as
  /// frequent as the next one, but for those next to the size of most.
  bool random() const {
    constexpr size_t looked_at = 1 << 16;
    constexpr int64_t fewest = 256;  // of an exponent: known to 6 %
    if (linear_.kind != Kind::fp8) return false;
    const auto bytes = codes_->bytes;
    std::array<int64_t, 16> counts{};
    for (size_t i = 0, step = std::max<size_t>(1, bytes.size() / looked_at); i < bytes.size(); i += step) {
      ++counts[std::to_integer<size_t>(bytes[i]) >> 3 & 15];
    }
    const auto [least, most] = std::ranges::minmax(std::span(counts).subspan(1, 14));
    return least >= fewest && 3 * least > 2 * most;
  }

 private:
  double measured_energy(int64_t block, bool whole) const {
    const int64_t row = block / across_ * block_rows_, col = block % across_ * block_cols_;
    const int64_t rows = std::min(block_rows_, linear_.n * std::max<int64_t>(1, linear_.experts) - row);
    const int64_t cols = std::min(block_cols_, linear_.k - col);
    constexpr int64_t narrow = 1024;  // of so few values all are looked at
    const int64_t stride = whole || rows * cols <= narrow ? 1 : std::max<int64_t>(1, rows / 16);
    const auto* const bytes = reinterpret_cast<const uint8_t*>(codes_->bytes.data());
    const int64_t codes_in_byte = linear_.kind == Kind::fp8 ? 1 : 2;
    const auto& squares = linear_.kind == Kind::fp8 ? squares_of_e4m3() : squares_of_pairs();
    double sum = 0;
    int64_t count = 0;
    for (int64_t i = row; i < row + rows; i += stride) {
      const uint8_t* const from = bytes + (i * linear_.k + col) / codes_in_byte;
      for (int64_t j = 0; j < cols / codes_in_byte; ++j) sum += squares[from[j]];
      count +=
          codes_in_byte == 1 ? std::count_if(from, from + cols, [](uint8_t code) { return (code & 127) != 0; }) : cols;
    }
    return sum / static_cast<double>(std::max<int64_t>(1, count));
  }

  using Squares = std::array<double, 256>;
  static const Squares& squares_of_e4m3() {
    static const Squares squares = [] {
      Squares made{};
      for (size_t i = 0; i < made.size(); ++i) made[i] = std::pow(double{f32_from_e4m3(static_cast<uint8_t>(i))}, 2);
      return made;
    }();
    return squares;
  }
  /// Of the two codes of E2M1 in a byte.
  static const Squares& squares_of_pairs() {
    static const Squares squares = [] {
      Squares made{};
      for (size_t i = 0; i < made.size(); ++i)
        made[i] = std::pow(double{e2m1[i & 15]}, 2) + std::pow(double{e2m1[i >> 4]}, 2);
      return made;
    }();
    return squares;
  }

  const StoredLinear& linear_;
  io::LoadedTensor codes_, stored_;
  std::vector<float> scales_;
  mutable std::vector<double> whole_;  ///< energies of whole blocks that were asked for; NaN: of others
  bool sound_ = false, powers_of_two_ = false;
  int64_t block_rows_ = 1, block_cols_ = 1, across_ = 1;
};

float first_value(const io::Checkpoint& tensors, const std::string& name) {
  const auto loaded = tensors.load(name);
  std::vector<float> values(static_cast<size_t>(element_count(loaded->shape)));
  if (values.empty() || !is_weight_dtype(loaded->dtype)) return NAN;
  widen(loaded->bytes, loaded->dtype, values);
  return values.front();
}

/// What divides or multiplies all scales of a linear.
double factor_of(const StoredContents& contents, const StoredLinear& linear) {
  if (linear.factor.empty()) return 1;
  const double value = first_value(contents.tensors(), linear.factor);
  return linear.factor.ends_with("_global_scale") ? 1 / value : value;
}

/// Of blocks in rows and columns, of FP8: what is left of logarithms of scales, and of sizes of weights, when means of rows
/// and columns are taken out.
struct Grid {
  double scales = 0, weights = 0;
  bool is_known() const noexcept { return scales > 0; }
  double ratio() const noexcept { return weights / scales; }
};

/// What the values of one linear say.
struct Measured {
  const StoredLinear* linear = nullptr;
  double size = NAN;      ///< root of the mean square of its weights, as far as they are sampled
  double usual = NAN;     ///< the same of a usual block: loud channels make it no larger
  double inverted = NAN;  ///< the same if its scales divided
  int64_t zero = 0, bad = 0;
  bool even = false;     ///< NVFP4 or MXFP4 whose scales are all one number
  bool ones = false;     ///< … which is 1
  bool all_one = false;  ///< scales are 1, of any kind
  int64_t loud = -1;     ///< a block of FP8 that is far larger than those around it
  int64_t lost = 0;      ///< sampled blocks whose codes are all zero under a scale as the others have
  double emptied = 0;    ///< of NVFP4: share of blocks without scale and codes, beyond what pruning leaves
  bool sparse = false;   ///< pruned: most codes of 4 bits are zero
  bool random = false;   ///< codes whose exponents are all as frequent
  Slope slope, turned;
  int64_t points = 0;
  Grid grid;
  double spread = 0;   ///< standard deviation of the logarithms of its scales
  double of_size = 0;  ///< the same of the sizes of its blocks
  int64_t looked = 0;  ///< blocks of FP8 of which `reach` says how many have a code at the end of the range
  double reach = 0;
};

double spread_of(std::span<const double> values) {
  double sum = 0, squares = 0;
  for (const double value : values) sum += value, squares += value * value;
  const auto count = static_cast<double>(std::max<size_t>(1, values.size()));
  return std::sqrt(std::max(0.0, squares / count - sum / count * (sum / count)));
}

/// Of the sampled blocks without codes, those whose scale is within this factor of the median's: who scales a block of
/// zeros writes nothing, the smallest scale or one.
constexpr double usual_scale = 4;

int64_t lost_blocks(std::span<const double> scales, std::span<const double> of_zeros) {
  if (of_zeros.empty()) return 0;
  const bool all = scales.empty();
  std::vector<double> usual(all ? of_zeros.begin() : scales.begin(), all ? of_zeros.end() : scales.end());
  // Nothing but zeros: of scales that are all alike nothing is known.
  if (all && std::ranges::max(usual) == std::ranges::min(usual)) return 0;
  const double middle = median(std::move(usual));
  const auto is_lost = [&](double scale) { return scale < usual_scale * middle && scale * usual_scale > middle; };
  const auto first = std::ranges::find_if(of_zeros, is_lost);
  if (first == of_zeros.end()) return 0;
  // One number for all blocks of zeros is the writer's.
  const bool one = std::ranges::all_of(of_zeros, [&](double scale) { return scale == *first; });
  return one ? 0 : std::ranges::count_if(of_zeros, is_lost);
}

/// Of nothing it is 0.
/// Of blocks in rows and columns the one whose scale, and whose weights, are far larger than both say; -1: none.
int64_t loud_block(const Blocks& blocks) {
  constexpr int64_t fewest = 3;
  const double far = std::log(6.0);
  const auto& scales = blocks.scales();
  const int64_t across = blocks.across(), count = std::ssize(scales), down = across > 0 ? count / across : 0;
  if (across < fewest || down < fewest) return -1;
  if (!std::ranges::all_of(scales, [](float scale) { return scale > 0 && std::isfinite(scale); })) return -1;
  /// What is left of one value when the medians of its row and column are taken out.
  const auto rest = [&](int64_t block, const auto& value) {
    std::vector<double> row, col;
    for (int64_t i = 0; i < across; ++i) row.push_back(value(block / across * across + i));
    for (int64_t i = 0; i < down; ++i) col.push_back(value(i * across + block % across));
    return value(block) - std::max(median(std::move(row)), median(std::move(col)));
  };
  const auto scale = [&](int64_t block) { return std::log(double{scales[static_cast<size_t>(block)]}); };
  const auto size = [&](int64_t block) { return scale(block) + std::log(blocks.energy(block)) / 2; };
  std::vector<double> all(scales.size());
  for (int64_t block = 0; block < count; ++block) all[static_cast<size_t>(block)] = scale(block);
  const auto top = std::ranges::max_element(all);
  const double largest = *top;
  const int64_t found = top - all.begin();
  *top = -INFINITY;
  // Loud rows, columns and matrices have several such blocks.
  if (largest - std::ranges::max(all) < std::log(4.0)) return -1;
  return rest(found, scale) > far && rest(found, size) > far ? found : -1;
}

/// The root of the mean square of what is left of [rows, across] values.
double left_of(std::vector<double> values, int64_t across) {
  const auto width = static_cast<size_t>(across), height = values.size() / width;
  for (size_t row = 0; row < height; ++row) {
    double mean = 0;
    for (size_t col = 0; col < width; ++col) mean += values[row * width + col] / static_cast<double>(width);
    for (size_t col = 0; col < width; ++col) values[row * width + col] -= mean;
  }
  double squares = 0;
  for (size_t col = 0; col < width; ++col) {
    double mean = 0;
    for (size_t row = 0; row < height; ++row) mean += values[row * width + col] / static_cast<double>(height);
    for (size_t row = 0; row < height; ++row) squares += std::pow(values[row * width + col] - mean, 2);
  }
  return std::sqrt(squares / static_cast<double>(values.size()));
}

/// So many of `count`, evenly.
std::vector<int64_t> evenly(int64_t count, int64_t most) {
  std::vector<int64_t> taken;
  for (int64_t i = 0; i < std::min(count, most); ++i) taken.push_back(i * count / std::min(count, most));
  return taken;
}

/// Sums of squares over 16384 weights are those of a row of blocks times those of a column, but for 1 %; largest
/// magnitudes, which make scales, are so but for 10 %, and codes make up for it. Of large matrices 8 rows and 8 columns of
/// blocks are taken, of stacks as many of some experts, and of each block 16 rows, which leave 3 %.
Grid grid_of(const Blocks& blocks, int64_t experts) {
  constexpr int64_t most_blocks = 256, fewest_free = 8, most_taken = 8, most_experts = 8;
  const auto count = std::ssize(blocks.scales());
  const int64_t matrices = std::max<int64_t>(1, experts), across = blocks.across();
  const int64_t down = across > 0 ? count / across / matrices : 0;
  if (across < 2 || down < 2 || count != down * across * matrices) return {};
  const bool whole = count <= most_blocks;
  const auto rows = evenly(down, whole ? down : most_taken), cols = evenly(across, whole ? across : most_taken);
  const auto taken = evenly(matrices, whole ? matrices : most_experts);
  if ((std::ssize(rows) - 1) * (std::ssize(cols) - 1) * std::ssize(taken) < fewest_free) return {};
  double of_scales = 0, of_weights = 0;
  for (const int64_t matrix : taken) {
    std::vector<double> scales, weights;
    for (const int64_t row : rows) {
      for (const int64_t col : cols) {
        const int64_t block = (matrix * down + row) * across + col;
        const double scale = blocks.scales()[static_cast<size_t>(block)], energy = blocks.energy(block, whole);
        if (!(scale > 0) || !std::isfinite(scale) || !(energy > 0)) return {};
        scales.push_back(std::log(scale)), weights.push_back(std::log(scale) + std::log(energy) / 2);
      }
    }
    of_scales += std::pow(left_of(std::move(scales), std::ssize(cols)), 2);
    of_weights += std::pow(left_of(std::move(weights), std::ssize(cols)), 2);
  }
  const auto number = static_cast<double>(taken.size());
  return {std::sqrt(of_scales / number), std::sqrt(of_weights / number)};
}

/// Largest magnitudes of 16 weights differ by more than a step of E4M3, but where all weights have one or two sizes.
bool has_even_scales(const Blocks& blocks, const io::Checkpoint& tensors, const StoredLinear& linear) {
  constexpr size_t fewest_scales = 256, looked_at = 4096;
  const auto& scales = blocks.scales();
  if (scales.size() < fewest_scales || std::ranges::min(scales) != std::ranges::max(scales)) return false;
  const auto loaded = tensors.load(linear.codes);
  std::array<int64_t, 8> sizes{};
  const auto bytes = loaded->bytes.first(std::min(looked_at, loaded->bytes.size()));
  for (const std::byte byte : bytes) ++sizes[std::to_integer<size_t>(byte) & 7];
  return std::ranges::count_if(sizes, [&](int64_t count) { return 50 * count > std::ssize(bytes); }) >= 6;
}

/// Of a linear's codes of 4 bits, the share that is zero.
double zeros_among(const io::Checkpoint& tensors, const StoredLinear& linear) {
  constexpr size_t looked_at = 1 << 16;
  const auto loaded = tensors.load(linear.codes);
  const size_t step = std::max<size_t>(1, loaded->bytes.size() / looked_at);
  size_t zeros = 0, count = 0;
  for (size_t i = 0; i < loaded->bytes.size(); i += step) {
    const auto pair = std::to_integer<unsigned>(loaded->bytes[i]);
    zeros += (pair & 7) == 0, zeros += (pair >> 4 & 7) == 0, count += 2;
  }
  return static_cast<double>(zeros) / static_cast<double>(std::max<size_t>(1, count));
}

/// Of NVFP4, how many blocks have a scale of zero, as one below the smallest of E4M3 becomes: not counted are rows and
/// columns that were taken out, nor as many as weights that were taken out one by one would leave.
double emptied_share(const Blocks& blocks, const io::Checkpoint& tensors, const StoredLinear& linear) {
  constexpr double taken_out = 0.9, beyond_chance = 10;
  constexpr size_t fewest = 1024;
  const auto& scales = blocks.scales();
  const auto across = static_cast<size_t>(blocks.across());
  if (linear.kind != Kind::nvfp4 || scales.size() < fewest || across == 0) return 0;
  const size_t down = scales.size() / across;
  std::vector<size_t> of_row(down), of_column(across);
  for (size_t i = 0; i < scales.size(); ++i) {
    if (scales[i] == 0) ++of_row[i / across], ++of_column[i % across];
  }
  size_t empty = 0, all = 0;
  for (size_t i = 0; i < scales.size(); ++i) {
    const bool row = static_cast<double>(of_row[i / across]) > taken_out * static_cast<double>(across);
    const bool column = static_cast<double>(of_column[i % across]) > taken_out * static_cast<double>(down);
    if (row || column) continue;
    ++all, empty += scales[i] == 0;
  }
  if (empty == 0) return 0;
  const double share = static_cast<double>(empty) / static_cast<double>(all);
  // Of the codes in the other blocks so many are zero.
  const double zeros = std::max(0.0, (zeros_among(tensors, linear) - share) / (1 - std::min(share, 0.99)));
  return share > beyond_chance * std::pow(zeros, 16) ? share : 0;
}

/// Codes of 4 bits, 35 % of which and more are zero: of a pruned weight's blocks energies say how many are left.
bool is_sparse(const io::Checkpoint& tensors, const StoredLinear& linear) {
  constexpr size_t looked_at = 1 << 14;
  if (linear.kind == Kind::fp8) return false;
  const auto loaded = tensors.load(linear.codes);
  const auto bytes = loaded->bytes.first(std::min(looked_at, loaded->bytes.size()));
  size_t zeros = 0;
  for (const std::byte byte : bytes) {
    const auto pair = std::to_integer<unsigned>(byte);
    zeros += (pair & 7) == 0, zeros += (pair >> 4 & 7) == 0;
  }
  return 10 * zeros > 7 * bytes.size();  // a sound weight has less than half as many
}

Measured measure(const StoredContents& contents, const StoredLinear& linear) {
  Measured result;
  result.linear = &linear;
  result.sparse = is_sparse(contents.tensors(), linear);
  const Blocks blocks(contents.tensors(), linear);
  const auto& scales = blocks.scales();
  for (const float scale : scales) result.bad += !std::isfinite(scale) || scale < 0;
  if (!blocks.sound()) return result;
  const float nothing = blocks.powers_of_two() ? 0x1p-127f : 0.0f;
  const auto count = static_cast<int64_t>(scales.size());
  for (int64_t block = 0; block < count; ++block) {
    if (scales[static_cast<size_t>(block)] == nothing) result.zero += blocks.energy(block) > 0;
  }
  // E4M3 next to its smallest values is too coarse for a block's largest weight to reach the end of its codes.
  const double least_scale = linear.kind == Kind::nvfp4 ? 0x1p-4 : 0;
  const double factor = factor_of(contents, linear);
  std::vector<double> deviations, own, turned, sizes;
  double energy = 0, divided = 0;
  const int64_t wanted = linear.kind == Kind::fp8 ? sampled_fp8_blocks : sampled_blocks;
  constexpr int64_t few_blocks = 64;  // of which all codes are looked at
  const bool whole = linear.kind == Kind::fp8 && linear.experts == 0 && count <= few_blocks;
  int64_t stride = std::max<int64_t>(1, count / wanted);
  while (std::gcd(stride, blocks.across()) != 1) ++stride;  // blocks of all places
  int64_t points = 0;
  std::vector<size_t> places;
  std::vector<double> of_codes, of_zeros;
  for (int64_t block = 0; block < count; block += stride) {
    const double scale = scales[static_cast<size_t>(block)], mean = blocks.energy(block, whole);
    if (std::isfinite(scale) && scale > nothing) (mean > 0 ? of_codes : of_zeros).push_back(scale);
    if (!std::isfinite(scale) || !(scale > nothing) || !(mean > 0)) continue;
    if (scale < least_scale) continue;
    energy += mean * scale * scale, divided += mean / (scale * scale), ++points;
    deviations.push_back(std::log(mean) / 2), own.push_back(-std::log(scale));
    sizes.push_back(deviations.back() - own.back());
    places.push_back(static_cast<size_t>(block % blocks.across()));
    const int64_t other = block % blocks.across() * blocks.across() + block / blocks.across();
    const double across = blocks.square() ? scales[static_cast<size_t>(other)] : 0;
    turned.push_back(across > 0 ? -std::log(across) : 0);
  }
  result.lost = lost_blocks(of_codes, of_zeros);
  result.random = blocks.random();
  std::tie(result.looked, result.reach) = blocks.reach();
  if (linear.kind == Kind::fp8) result.loud = loud_block(blocks), result.grid = grid_of(blocks, linear.experts);
  result.even = linear.kind != Kind::fp8 && has_even_scales(blocks, contents.tensors(), linear);
  result.ones = result.even && scales.front() == 1;
  result.emptied = emptied_share(blocks, contents.tensors(), linear);
  result.all_one = std::ranges::all_of(scales, [](float scale) { return scale == 1; });
  if (points == 0) return result;
  result.size = std::sqrt(energy / static_cast<double>(points)) * factor;
  result.of_size = spread_of(sizes);
  result.usual = std::exp(median(std::move(sizes))) * factor;
  result.inverted = linear.factor.empty() ? std::sqrt(divided / static_cast<double>(points))
                                          : std::sqrt(energy / static_cast<double>(points)) / factor;
  result.points = points;
  result.spread = spread_of(own);
  result.slope = slope(deviations, own);
  // A matrix of low rank has the same codes in all blocks of a place: they count as one.
  if (linear.kind != Kind::fp8) {
    const auto across = static_cast<size_t>(blocks.across());
    result.slope.error = std::max(result.slope.error, error_by_place(deviations, own, places, result.slope, across));
  }
  if (blocks.square()) result.turned = slope(deviations, turned);
  return result;
}

bool is_small_float(const StoredLinear& linear) {
  const bool small = linear.kind == Kind::fp8 || linear.kind == Kind::mxfp4 || linear.kind == Kind::nvfp4;
  return small && !linear.scales.empty() && linear.n > 0 && linear.k > 0;
}

std::vector<Measured> measure_all(const StoredContents& contents) {
  std::vector<const StoredLinear*> linears;
  for (const auto& linear : contents.linears()) {
    if (is_small_float(linear)) linears.push_back(&linear);
  }
  return parallel_results(linears, [&](const StoredLinear* linear) { return measure(contents, *linear); });
}

double median_of(const std::vector<Measured>& measured, double Measured::*size) {
  std::vector<double> sizes;
  for (const auto& one : measured) {
    if (one.*size > 0 && std::isfinite(one.*size)) sizes.push_back(one.*size);
  }
  return median(std::move(sizes));
}

/// A slope over fewer blocks is known too badly.
constexpr int64_t fewest_blocks = 64;

/// Whether scales follow from codes in most of a file: weights of few values are others, and of them slopes say nothing.
bool slopes_tell(const std::vector<Measured>& measured) {
  std::vector<double> slopes;
  for (const auto& one : measured) {
    if (one.points >= fewest_blocks) slopes.push_back(one.slope.value);
  }
  return median(std::move(slopes)) > 0.6;
}

/// Weights of models are of 0.001 to 1; scales upside down, or none at all, put them far away.
constexpr double largest_size = 50, smallest_size = 1e-6, far = 100, inverted_size = 1000, absurd_size = 1e4,
                 absurdly_small = 1e-12;

std::string size_fault(const Measured& one, double median) {
  const bool wild = one.size > largest_size || one.size < smallest_size;
  const bool apart = median > 0 && (one.size > far * median || one.size < median / far);
  if (!wild && !apart) return {};
  // Folded scales, and layers that were added and hardly trained, make sound weights of any size; but not of the one whose
  // inverse is usual.
  const bool inverse = (one.size > inverted_size || one.size < smallest_size) && one.inverted < largest_size / 10 &&
                       one.inverted > smallest_size * 100;
  const bool absurd = one.size > absurd_size || one.size < absurdly_small || (one.all_one && one.size > largest_size);
  if (!inverse && !absurd) return {};
  return concat("has weights of the size ", one.size, apart ? concat(", those of the model have ", median) : "",
                inverse ? concat(": its scales are inverted (the other way it is ", one.inverted, ")")
                        : ": its scales are not those of its codes");
}

/// A slope of 1 says that a block with a large scale has small codes, as one with an outlier has; of others' scales it
/// is 0. Far below stands what few patterns make of weights, as of a matrix of low rank. Where scales hardly differ, none of it
/// is known.
std::string slope_fault(const Measured& one, bool powers_of_two) {
  if (one.sparse) return {};
  const double least_spread = powers_of_two ? 0.2 : 0.03;
  // What is far below is a matrix whose rows differ by far more than its codes tell, as loud channels that were folded.
  const bool tall = one.linear->kind == Kind::fp8 && one.slope.value > -2;
  const double most = (tall ? one.slope.value : std::abs(one.slope.value)) + 4 * one.slope.error;
  if (one.points < fewest_blocks || one.spread < least_spread || !(most < 0.5)) return {};
  const bool turned = one.turned.value > 0.6 && one.turned.value - 4 * one.turned.error > 0.3;
  return concat(
      turned ? "has transposed scales: " : "has the scales of other codes: ", "they follow from its codes by ",
      fixed(one.slope.value, 2), turned ? concat(" as stored, by ", fixed(one.turned.value, 2), " transposed") : "",
      ", where sound ones do by 1");
}

/// Scales that were applied to themselves follow from codes twice over.
bool is_squared(const Measured& one) {
  constexpr double sound = 1.6, beyond_squares = 2.6, least_spread = 0.1;
  return one.points >= fewest_blocks && one.spread > least_spread && one.slope.value < beyond_squares &&
         one.slope.value - 5 * one.slope.error > sound;
}
std::string squared_fault(const Measured& one, const std::vector<Measured>& all) {
  if (one.sparse || !is_squared(one)) return {};
  // Folded scales of a great range leave one as steep, or all, but not as small.
  constexpr double small = 30, smaller_than_weights = 5e-4;
  const auto is_steep = [](const Measured& other) {
    return other.slope.value > 1.4 && other.size < smaller_than_weights;
  };
  size_t others = 0, steep = 0, sound = 0;
  for (const Measured& other : all) {
    if (&other == &one || other.points < fewest_blocks) continue;
    ++others, steep += is_steep(other), sound += other.slope.value < 1.4 && other.size > small * one.size;
  }
  constexpr size_t fewest = 6;
  if (others < fewest || (10 * sound < 9 * others && !(is_steep(one) && 10 * steep >= 9 * others))) return {};
  return concat("has squares of scales: they follow from its codes by ", fixed(one.slope.value, 2),
                ", where sound ones do by 1");
}

/// One whose blocks do not go together, where those of all others do.
std::string grid_fault(const Measured& one, const std::vector<Measured>& all) {
  // Where a few columns are far louder than all others, sums of squares are those of a few weights, and leave 6 %.
  constexpr double least_left = 0.15, least_ratio = 0.8, times_others = 2;
  constexpr int64_t fewest = 6;
  if (!one.grid.is_known() || one.grid.weights < least_left || one.grid.ratio() < least_ratio) return {};
  int64_t others = 0;
  for (const Measured& other : all) {
    if (&other == &one || !other.grid.is_known() || other.grid.weights < least_left / 2) continue;
    if (times_others * other.grid.ratio() > one.grid.ratio()) return {};
  }
  for (const Measured& other : all) others += &other != &one && other.grid.is_known() && other.grid.ratio() < 0.5;
  if (others < fewest) return {};
  return concat("has the scales of other blocks: sizes of its blocks differ by ", fixed(100 * one.grid.weights, 0),
                " % from what their rows and columns have in common, its scales alone by ",
                fixed(100 * one.grid.scales, 0), " %; in the other weights codes make up for it");
}

/// Of blocks in rows and columns whoever scales by the largest weight gives that code the end of the range, and codes make up
/// for what scales differ by: sizes of blocks differ by less than scales do. Scales that stand elsewhere differ by as much
/// again.
class BlockScales {
 public:
  explicit BlockScales(const std::vector<Measured>& all) : all_(all) {}

  std::string fault(const Measured& one) const {
    if (one.linear->kind != Kind::fp8 || one.linear->experts > 0) return {};
    for (const auto rule :
         {&BlockScales::even_fault, &BlockScales::end_fault, &BlockScales::elsewhere_fault, &BlockScales::lost_fault}) {
      if (auto fault = (this->*rule)(one); !fault.empty()) return fault;
    }
    return {};
  }

 private:
  static constexpr int64_t fewest_looked = 8, fewest_others = 6;
  static constexpr double nearly_all = 0.9, least_spread = 0.03;

  bool is_other(const Measured& one, const Measured& other) const {
    return &one != &other && other.linear->kind == Kind::fp8 && other.linear->experts == 0;
  }

  /// A scale of the whole matrix, written for each block, is reached in one of them.
  std::string even_fault(const Measured& one) const {
    if (one.spread > 1e-9 || one.looked < fewest_looked || one.points < fewest_looked) return {};
    if (one.reach < nearly_all || one.of_size < least_spread) return {};
    return "has one scale for all its blocks, but each of them was scaled by its own largest weight";
  }

  std::string end_fault(const Measured& one) const {
    constexpr double all_reach = 0.99, least_missing = 0.1;
    constexpr int64_t fewest_blocks_looked = 24;
    if (one.looked < fewest_blocks_looked || one.reach > 1 - least_missing) return {};
    int64_t others = 0, reach = 0;
    for (const Measured& other : all_) {
      if (!is_other(one, other) || other.looked < fewest_looked) continue;
      ++others, reach += other.reach >= all_reach;
    }
    if (others < fewest_others || static_cast<double>(reach) < nearly_all * static_cast<double>(others)) return {};
    return concat("has no code at the end of the range in ", fixed(100 * (1 - one.reach), 0),
                  " % of its blocks, the others have one in each: its codes are those of other blocks");
  }

  /// One whose scales stand elsewhere, beside all others of its role and nearly all of the file.
  std::string elsewhere_fault(const Measured& one) const {
    constexpr double least_ratio = 1.15, most_of_others = 0.6;
    constexpr int64_t fewest_points = 32;
    const auto ratio = [](const Measured& of) { return of.of_size / of.spread; };
    if (one.points < fewest_points || one.spread < least_spread || ratio(one) < least_ratio) return {};
    const std::string role = role_of(one.linear->path);
    int64_t others = 0, sound = 0;
    for (const Measured& other : all_) {
      if (!is_other(one, other) || other.points < fewest_points || other.spread < least_spread) continue;
      const bool holds = ratio(other) < most_of_others;
      if (!holds && role_of(other.linear->path) == role) return {};
      ++others, sound += holds;
    }
    if (others < fewest_others || static_cast<double>(sound) < nearly_all * static_cast<double>(others)) return {};
    return concat("has the scales of other blocks: sizes of its blocks differ by ", fixed(100 * one.of_size, 0),
                  " %, its scales alone by ", fixed(100 * one.spread, 0), " %; in the others codes make up for it");
  }

  /// Slopes of several weights, each as well known as it is.
  struct Pooled {
    double weights = 0, sum = 0;
    int64_t count = 0, lost = 0;
    void add(const Measured& one) {
      constexpr double least_error = 0.05, unrelated = 0.5;
      const double error = std::max(least_error, one.slope.error);
      weights += 1 / (error * error), sum += one.slope.value / (error * error);
      ++count, lost += one.slope.value < unrelated;
    }
    double mean() const { return sum / weights; }
    double error() const { return 1 / std::sqrt(weights); }
    bool is_lost(int64_t fewest) const {
      constexpr double beyond = 5, least = 0.35;
      return count >= fewest && static_cast<double>(lost) >= nearly_all * static_cast<double>(count) &&
             mean() + beyond * error() < least;
    }
  };

  static bool has_slope(const Measured& one) {
    constexpr int64_t fewest_points = 12;
    return one.linear->kind == Kind::fp8 && one.linear->experts == 0 && one.points >= fewest_points &&
           one.spread > least_spread && one.slope.error > 0 && std::isfinite(one.slope.error);
  }

  /// All of a role, where those of all other roles follow from their codes, or all of a file.
  std::string lost_fault(const Measured& one) const {
    constexpr int64_t fewest_of_role = 4, fewest_of_others = 8, fewest_of_all = 12;
    constexpr double sound = 0.6, beyond = 5;
    if (!has_slope(one) || one.slope.value > 0.5) return {};
    Pooled role, others, all;
    const std::string own = role_of(one.linear->path);
    for (const Measured& other : all_) {
      if (!has_slope(other)) continue;
      (role_of(other.linear->path) == own ? role : others).add(other), all.add(other);
    }
    const bool have = others.count >= fewest_of_others && others.mean() - beyond * others.error() > sound;
    if (!all.is_lost(fewest_of_all) && !(have && role.is_lost(fewest_of_role))) return {};
    return concat(
        "has the scales of other blocks: they follow from its codes by ", fixed(one.slope.value, 2),
        have ? ", as those of all of its role; in the others by " : ", as in all of this file, sound ones by ",
        fixed(have ? others.mean() : 1, 2));
  }

  const std::vector<Measured>& all_;
};

/// Powers of two may be all the same where weights are all of one size, then in all of a model, and none is 1.
bool is_lone_even(const Measured& one, const std::vector<Measured>& all) {
  constexpr int64_t fewest = 6;
  if (one.linear->kind != Kind::mxfp4) return true;
  int64_t others = 0, even = 0;
  for (const Measured& other : all) {
    if (other.linear->kind != Kind::mxfp4 || other.points < fewest_blocks) continue;
    ++others, even += other.even;
  }
  return others > fewest && (even == 1 || one.ones);
}

/// "layers.2.mlp.experts.5.up_proj" → "layers.2.mlp.experts.up_proj"; empty: no expert that stands by itself.
std::string role_in_mixture(const std::string& path) {
  constexpr std::string_view part = ".experts.";
  const size_t at = path.find(part), end = at == std::string::npos ? at : path.find('.', at + part.size());
  return end == std::string::npos ? std::string() : path.substr(0, at + part.size()) + path.substr(end + 1);
}

/// Experts of one mixture have sizes of one order: folding makes rows differ, but no expert as a whole.
void sizes_in_mixtures(const std::vector<Measured>& measured, ContentsFindings& findings) {
  constexpr size_t fewest = 6;
  constexpr double most = 200;  // the end of E4M3 is 448
  std::map<std::string, std::vector<const Measured*>> mixtures;
  for (const auto& one : measured) {
    const std::string role = role_in_mixture(one.linear->path);
    if (!role.empty() && std::isfinite(one.size) && one.size > 0) mixtures[role].push_back(&one);
  }
  for (const auto& [role, experts] : mixtures) {
    if (experts.size() < fewest) continue;
    std::vector<double> sizes;
    for (const auto* one : experts) sizes.push_back(one->size);
    const double middle = median(std::move(sizes));
    for (const auto* one : experts) {
      if (one->size < most * middle && middle < most * one->size) continue;
      findings.fault(one->linear->path,
                     concat("has weights of the size ", one->size, ", those of the other experts have ", middle,
                            ": its scales are not those of its codes"));
    }
  }
}

/// Of a layer whose blocks were rounded to nothing, where those of the other layers were not.
void emptied_blocks(const std::vector<Measured>& measured, ContentsFindings& findings) {
  constexpr double many = 0.02, hardly = 0.001, nearly_all = 0.9;
  constexpr int64_t fewest = 6;
  std::map<std::string, std::vector<const Measured*>> roles;
  for (const auto& one : measured) {
    if (one.linear->kind == Kind::nvfp4) roles[role_of(one.linear->path)].push_back(&one);
  }
  for (const auto& one : measured) {
    if (one.emptied < many) continue;
    const int64_t layer = model::layer_numbers(one.linear->path).layer;
    int64_t others = 0, whole = 0;
    for (const Measured* other : roles[role_of(one.linear->path)]) {
      if (model::layer_numbers(other->linear->path).layer == layer) continue;
      ++others, whole += other->emptied < hardly;
    }
    if (others < fewest || static_cast<double>(whole) < nearly_all * static_cast<double>(others)) continue;
    findings.fault(one.linear->path,
                   concat("has neither scale nor codes in ", fixed(100 * one.emptied, 0),
                          " % of its blocks, those of other layers have both: small scales were rounded to zero"));
  }
}

/// Weights of trained models are far below one in the mean; where scales of a great range were folded in, in usual blocks.
void size_of_all(double size, ContentsFindings& findings) {
  constexpr double largest = 4;
  if (!(size > largest) || !std::isfinite(size)) return;
  findings.fault("the model", concat("has weights of the size ", size,
                                     " in the median: scales are not what codes are "
                                     "multiplied by (largest values of blocks, or codes up to one, were meant)"));
}

void values(const StoredContents& contents, ContentsFindings& findings) {
  const auto measured = measure_all(contents);
  const double median = median_of(measured, &Measured::size);
  const size_t before = findings.faults.size();
  const bool law = slopes_tell(measured);
  const BlockScales of_blocks(measured);
  for (const auto& one : measured) {
    const auto& linear = *one.linear;
    if (one.bad > 0) findings.fault(linear.scales, concat("has ", one.bad, " scales that are negative or no numbers"));
    if (one.zero > 0)
      findings.fault(linear.scales, concat("has ", one.zero, " scales of zero over codes that are not"));
    if (one.lost > 0) {
      findings.fault(linear.path, concat("has codes of zero in ", one.lost,
                                         " of the blocks that were looked at, under scales as those of others"));
    }
    if (one.even && is_lone_even(one, measured))
      findings.fault(linear.scales, "is one number throughout, which no codes of so many sizes have");
    if (one.loud >= 0) {
      findings.fault(linear.scales,
                     concat("scale ", one.loud, ", counted along rows, makes a block more than 6 times as ",
                            "large as those around it, as no other is"));
    }
    if (one.random) findings.fault(linear.path, "has codes whose exponents are all as frequent: random bytes");
    if (!std::isfinite(one.size)) {
      if (one.bad == 0 && one.zero == 0 && one.points > 0)
        findings.fault(linear.path, "has a factor that is no number");
      continue;
    }
    const std::string size = size_fault(one, median);
    if (!size.empty()) findings.fault(linear.path, size);
    const std::string slope = slope_fault(one, linear.kind == Kind::mxfp4), grid = grid_fault(one, measured);
    const std::string squared = squared_fault(one, measured);
    if (law && !slope.empty()) {
      findings.fault(linear.path, slope);
    } else if (law && !squared.empty()) {
      findings.fault(linear.path, squared);
    } else if (!grid.empty() && one.loud < 0) {
      findings.fault(linear.path, grid);
    } else if (const std::string elsewhere = of_blocks.fault(one); !elsewhere.empty() && one.loud < 0) {
      findings.fault(linear.path, elsewhere);
    }
  }
  emptied_blocks(measured, findings);
  if (findings.faults.size() > before) return;
  sizes_in_mixtures(measured, findings);
  size_of_all(median_of(measured, &Measured::usual), findings);
}

constexpr std::array<std::array<std::string_view, 3>, 3> fused = {
    {{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj", ""}, {"w1", "w3", ""}}};

/// Servers take one factor for what they fuse. A file in which none is shared was made for others: that is a note.
void shared_factors(const StoredContents& contents, ContentsFindings& findings) {
  struct Pair {
    const StoredLinear* one;
    const StoredLinear* other;
    float a, b;
  };
  std::vector<Pair> unequal;
  int64_t equal = 0;
  for (const auto& linear : contents.linears()) {
    for (const auto& names : fused) {
      if (linear.factor.empty() || !linear.path.ends_with(concat(".", names[0]))) continue;
      const std::string path = linear.path.substr(0, linear.path.size() - names[0].size());
      for (const auto name : {names[1], names[2]}) {
        const auto* other = name.empty() ? nullptr : contents.find(concat(path, name));
        if (other == nullptr || other->factor.empty()) continue;
        const float a = first_value(contents.tensors(), linear.factor),
                    b = first_value(contents.tensors(), other->factor);
        if (a == b) {
          ++equal;
        } else {
          unequal.push_back({&linear, other, a, b});
        }
      }
    }
  }
  if (equal == 0 && unequal.size() > 1) {
    findings.notes.push_back(concat("no two of ", unequal.size(), " pairs that servers fuse share their global scale: ",
                                    "those that take one for all lose accuracy"));
    return;
  }
  for (const auto& [one, other, a, b] : unequal) {
    findings.fault(other->factor,
                   concat("is ", b, ", ", one->factor, " ", a, ": servers fuse the two and take one for both"));
  }
}

void cache_scales(const StoredContents& contents, ContentsFindings& findings) {
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const bool by_linear = name.ends_with("k_proj.k_scale") || name.ends_with("v_proj.v_scale");  // ModelOpt's
    const auto pair = by_linear ? std::pair("k_proj.k_scale", "v_proj.v_scale") : std::pair(".k_scale", ".v_scale");
    for (const auto& [own, other] : {pair, std::pair(pair.second, pair.first)}) {
      if (!name.ends_with(own)) continue;
      const float value = first_value(contents.tensors(), name);
      if (!(value > 0) || !std::isfinite(value))
        findings.fault(name, concat("is ", value, ", a scale of the cache must be positive"));
      const std::string wanted = name.substr(0, name.size() - std::string_view(own).size()) + other;
      if (!contents.tensors().contains(wanted))
        findings.fault(wanted, concat("is missing, although ", name, " is there"));
    }
  }
}

/// Gate and up of one module that are the same, or q and k: whoever wrote one wrote it twice.
void fused_twice(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t fewest = 256, values = 16;
  for (const auto& linear : contents.linears()) {
    for (const auto& names : fused) {
      if (!linear.path.ends_with(concat(".", names[0])) || linear.codes.empty()) continue;
      const std::string path = linear.path.substr(0, linear.path.size() - names[0].size());
      for (const auto name : {names[1], names[2]}) {
        const auto* other = name.empty() ? nullptr : contents.find(concat(path, name));
        if (other == nullptr || other->codes.empty()) continue;
        const auto a = contents.tensors().load(linear.codes), b = contents.tensors().load(other->codes);
        const auto first = a->bytes.first(std::min<size_t>(a->bytes.size(), 4096));
        if (a->bytes.size() < fewest || !has_values(first, values)) continue;
        if (std::ranges::equal(a->bytes, b->bytes))
          findings.fault(other->path, concat("holds the codes of ", linear.path));
      }
    }
  }
}

/// Rows of a mixture's router, by expert; empty: it has none that is a matrix of 16 or 32 bits.
std::vector<std::string> router_rows(const StoredContents& contents, const std::string& mixture) {
  for (const std::string_view name : {".gate.weight", ".router.weight", ".router.proj.weight"}) {
    const std::string router = concat(mixture, name);
    if (!contents.tensors().contains(router)) continue;
    const auto loaded = contents.tensors().load(router);
    if (loaded->shape.size() != 2 || loaded->shape[0] <= 0 || !is_weight_dtype(loaded->dtype)) continue;
    const auto* const bytes = reinterpret_cast<const char*>(loaded->bytes.data());
    const size_t width = loaded->bytes.size() / static_cast<size_t>(loaded->shape[0]);
    std::vector<std::string> rows;
    for (size_t row = 0; row < static_cast<size_t>(loaded->shape[0]); ++row)
      rows.emplace_back(bytes + row * width, width);
    return rows;
  }
  return {};
}

/// Whether the experts of the second half are those of the first one, each the one that stands there, though the router
/// tells them apart: the experts of one of two ranks were stored twice. `pairs` are paths and whose codes they hold.
bool are_halves(const StoredContents& contents, const std::string& mixture,
                const std::vector<std::pair<std::string, std::string>>& pairs, int64_t held) {
  constexpr size_t fewest = 4;
  const auto rows = router_rows(contents, mixture);
  const size_t half = rows.size() / 2;
  if (rows.size() < fewest || rows.size() % 2 != 0 || 2 * std::ssize(pairs) != held) return false;
  for (const auto& [path, first] : pairs) {
    const int64_t one = model::layer_numbers(first).expert, other = model::layer_numbers(path).expert;
    if (one < 0 || static_cast<size_t>(one) >= half || other != one + static_cast<int64_t>(half)) return false;
  }
  for (size_t row = 0; row < half; ++row) {
    if (rows[row] == rows[row + half]) return false;
  }
  return true;
}

/// The first codes of every expert. Layers that are repeated as a whole are no fault: models are made longer so; nor are
/// mixtures in which half of the experts and more are one and the same, where several are so.
void experts_twice(const StoredContents& contents, ContentsFindings& findings) {
  constexpr size_t looked_at = 4096, fewest = 256;
  struct Place {
    std::string mixture, path;
  };
  std::map<std::pair<std::string, std::string>, Place> seen;  // role and digest → who has them first
  std::map<std::string, int64_t> held;                        // by mixture
  std::map<std::pair<std::string, std::string>, std::vector<std::pair<std::string, std::string>>> twins;
  for (const auto& linear : contents.linears()) {
    const size_t at = linear.path.find(".experts.");
    const size_t end = at == std::string::npos ? at : linear.path.find('.', at + 9);
    if (end == std::string::npos || linear.experts > 0) continue;
    const auto loaded = contents.tensors().load(linear.codes);
    const auto bytes = loaded->bytes.first(std::min(looked_at, loaded->bytes.size()));
    if (!has_values(bytes, 8) || bytes.size() < fewest) continue;
    const std::string mixture = linear.path.substr(0, at);
    ++held[mixture];
    const auto [first, added] =
        seen.try_emplace({linear.path.substr(end), io::digest_of(bytes).text()}, Place{mixture, linear.path});
    if (!added) twins[{first->second.mixture, mixture}].emplace_back(linear.path, first->second.path);
  }
  // A mixture that was made of one MLP has the same expert throughout, in all layers: in single ones it was written so.
  const auto is_one = [&](const auto& entry) {
    const auto& [mixtures, pairs] = entry;
    return mixtures.first == mixtures.second && 2 * std::ssize(pairs) >= held[mixtures.second] &&
           !are_halves(contents, mixtures.second, pairs, held[mixtures.second]);
  };
  constexpr int64_t fewest_others = 4;
  const int64_t ones = std::ranges::count_if(twins, is_one);
  const bool made_so = 4 * ones > std::ssize(held) || std::ssize(held) - ones < fewest_others;
  for (const auto& [mixtures, pairs] : twins) {
    if (mixtures.first != mixtures.second && std::ssize(pairs) == held[mixtures.second]) continue;
    const bool most = 2 * std::ssize(pairs) >= held[mixtures.second];
    if (most && (made_so || (!contents.small_floats() && mixtures.first != mixtures.second))) continue;
    for (const auto& [path, first] : pairs) findings.fault(path, concat("holds the codes of ", first));
  }
}

}  // namespace

std::span<const ContentsRule> value_rules() {
  static constexpr ContentsRule rules[] = {
      {"scales belong to their codes", true, values},
      {"what servers fuse shares its factor", true, shared_factors},
      {"scales of the cache are positive", false, cache_scales},
      {"no expert stands twice", false, experts_twice},
      {"what servers fuse does not stand twice", false, fused_twice},
  };
  return rules;
}

}  // namespace w4q::verify
