#include "crafted_statistics.h"

#include <cmath>
#include <span>

#include "core/rng.h"
#include "io/checkpoint.h"
#include "io/output.h"
#include "io/safetensors.h"
#include "program.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;

constexpr int64_t rows = 64;
constexpr int64_t block = 128;
constexpr uint64_t seed = 2026;

/// What the inputs of one group of linears are said to be.
class Inputs {
 public:
  Inputs(Correlation correlation, int64_t width, uint64_t stream)
      : correlation_(correlation), width_(width), stream_(stream) {}

  /// The mean square of a channel is 2^exponent.
  int exponent(int64_t channel) const {
    const int64_t which = correlation_ == Correlation::none ? channel / block : channel;
    return static_cast<int>(draw(2 * which) % 9) - 4;
  }
  /// At most 7/8 of the root of the mean square.
  double mean_abs(int64_t channel) const {
    const auto eighths = static_cast<double>(2 + draw(2 * channel + 1) % 6);
    return std::ldexp(eighths / 8, exponent(channel) >> 1);
  }
  double gram(int64_t i, int64_t j) const {
    if (i == j) return std::ldexp(1.0, exponent(i));
    if (correlation_ == Correlation::none || j - i != width_ / 2) return 0;
    const int most = exponent(i) + exponent(j) - 1;  // of the square: a correlation of at most one over root two
    return (draw(2 * i) & 16) != 0 ? std::ldexp(1.0, most >> 1) : -std::ldexp(1.0, most >> 1);
  }

 private:
  uint64_t draw(int64_t index) const { return random_bits(seed + stream_, static_cast<uint64_t>(index)) >> 32; }

  Correlation correlation_;
  int64_t width_;
  uint64_t stream_;
};

template <class T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// The bytes of a tensor of a group's sums.
std::string sums(const Inputs& inputs, int64_t width, std::string_view what) {
  std::string bytes;
  for (int64_t c = 0; c < width; ++c) {
    if (what == "sum_abs") append(bytes, rows * inputs.mean_abs(c));
    if (what == "sum_squares") append(bytes, rows * inputs.gram(c, c));
    for (int64_t j = c; what == "gram" && j < width; ++j) append(bytes, static_cast<float>(rows * inputs.gram(c, j)));
  }
  return bytes;
}

/// What the program writes of some text: names, widths and whose they are.
io::Checkpoint calibrated(const fs::path& model, const fs::path& file) {
  const auto result =
      run_w4q({"calibrate", model.string(), "--ids", (model / "own/selfgen.ids.u16").string(), "--samples", "1",
               "--length", "2", "--diagonal", "--device", "cpu", "-o", file.string(), "--quiet"});
  if (result.status != 0) throw std::runtime_error(result.err);
  return io::Checkpoint::open(file);
}

}  // namespace

void write_crafted_statistics(const fs::path& model, Correlation correlation, const fs::path& file) {
  const TemporaryFolder folder;
  const auto source = calibrated(model, folder / "source.safetensors");
  std::vector<io::PlannedTensor> plan{{"sensitivity", DType::f64, {4, 7}}};
  std::map<std::string, std::string> contents;
  for (uint64_t i = 0; i < 28; ++i) append(contents["sensitivity"], std::ldexp(1.0, static_cast<int>(i * i % 11) - 5));
  uint64_t stream = 0;
  for (const auto& [name, info] : source.tensors()) {
    if (!name.ends_with(".sum_abs")) continue;
    const std::string group = name.substr(0, name.rfind('.') + 1);
    const int64_t width = info.shape.front();
    const Inputs inputs(correlation, width, stream++);
    plan.push_back({group + "sum_abs", DType::f64, {width}});
    plan.push_back({group + "sum_squares", DType::f64, {width}});
    plan.push_back({group + "gram", DType::f32, {width * (width + 1) / 2}});
    for (const char* what : {"sum_abs", "sum_squares", "gram"}) contents[group + what] = sums(inputs, width, what);
  }
  auto metadata = source.metadata();
  metadata.insert_or_assign("gram", "yes");
  metadata.insert_or_assign("sensitivity", "yes");
  metadata.insert_or_assign("tokens", std::to_string(rows));
  metadata.insert_or_assign("version", "1");
  metadata.erase("products");  // what multiplied made none of these sums
  const auto header = io::layout_safetensors(std::move(plan), std::move(metadata));
  std::string bytes = io::serialize_safetensors_header(header);
  for (const auto& tensor : header.tensors) bytes += contents.at(tensor.name);
  io::write_file(file, bytes, false);
}

}  // namespace w4q::test
