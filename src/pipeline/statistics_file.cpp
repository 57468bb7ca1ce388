#include "pipeline/statistics_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "core/convert.h"
#include "core/error.h"
#include "core/rng.h"
#include "core/text.h"
#include "io/system.h"
#include "pipeline/digest.h"

namespace w4q::pipeline {
namespace {

constexpr std::string_view format_name = "w4q-statistics";
/// Sensitivities have names since 2; without them a file is the same in both. Windows make it 3.
constexpr std::string_view first_version = "1", named_version = "2", windows_version = "3";
constexpr std::string_view sensitivity_name = "sensitivity";
constexpr const char* windows_name = "windows";
constexpr int64_t most_tokens = int64_t{1} << 50;
/// Two sums of the same squares, one taken in fp32 products and stored in fp32, differ by less than this share.
constexpr double gram_tolerance = 1e-3;

Error damaged(const std::string& file, const std::string& what) {
  return {ErrorCode::bad_file, concat(io::shown(file), ": ", what)};
}

std::string sum_name(const model::InputGroup& group, std::string_view what) { return concat(group.name(), ".", what); }

std::string sensitivity_of(std::string_view linear) { return concat(linear, ".", sensitivity_name); }

/// Linears of all layers in model order.
std::vector<std::string> linear_names(const model::ModelConfig& config) {
  std::vector<std::string> result;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& linear : model::layer_plan(config, layer).linears()) result.push_back(linear.name);
  }
  return result;
}

std::vector<io::PlannedTensor> planned_tensors(const model::ModelConfig& config, const StatisticsOrigin& origin) {
  std::vector<io::PlannedTensor> result;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& group : model::input_groups(config, layer)) {
      result.push_back({sum_name(group, "sum_abs"), DType::f64, {group.width}});
      result.push_back({sum_name(group, "sum_squares"), DType::f64, {group.width}});
      if (origin.gram) result.push_back({sum_name(group, "gram"), DType::f32, {quantize::triangle_size(group.width)}});
    }
  }
  if (origin.window_samples > 0) {
    result.push_back({windows_name, DType::i32, {origin.window_samples, origin.window_length}});
  }
  if (!origin.sensitivity) return result;
  const auto linears = linear_names(config);
  if (origin.named_sensitivity) {
    for (const auto& name : linears) result.push_back({sensitivity_of(name), DType::f64, {1}});
  } else {
    const auto each = static_cast<int64_t>(linears.size()) / config.layers;
    result.push_back({std::string(sensitivity_name), DType::f64, {config.layers, each}});
  }
  return result;
}

constexpr const char* products_key = "products";

std::map<std::string, std::string> metadata_of(const StatisticsOrigin& origin) {
  std::map<std::string, std::string> result = {{"format", std::string(format_name)},
                                               {"version", std::string(origin.window_samples > 0 ? windows_version
                                                                       : origin.sensitivity      ? named_version
                                                                                                 : first_version)},
                                               {"model", origin.model},
                                               {"tokens", concat(origin.tokens)},
                                               {"texts", join(origin.texts, " ")},
                                               {"gram", origin.gram ? "yes" : "no"}};
  if (!origin.products.empty()) result.emplace(products_key, origin.products);
  if (origin.sensitivity) result.emplace(sensitivity_name, "yes");
  return result;
}

/// The metadata of a file, checked.
StatisticsOrigin parse_origin(const std::map<std::string, std::string>& metadata, const std::string& file) {
  const auto value = [&](const char* key) -> const std::string& {
    const auto found = metadata.find(key);
    if (found == metadata.end()) throw damaged(file, concat("is no statistics file: it has no \"", key, "\""));
    return found->second;
  };
  if (value("format") != format_name) {
    throw damaged(file, "is no statistics file").hint("w4q calibrate MODEL --text FILE -o FILE makes one");
  }
  StatisticsOrigin origin;
  origin.named_sensitivity = value("version") != first_version;
  if (origin.named_sensitivity && value("version") != named_version && value("version") != windows_version) {
    throw Error(ErrorCode::unsupported, concat(io::shown(file), ": version ", printable(value("version"))))
        .detail(concat("this w4q reads versions ", first_version, " to ", windows_version));
  }
  origin.model = value("model");
  const std::string& tokens = value("tokens");
  const auto [end, error] = std::from_chars(tokens.data(), tokens.data() + tokens.size(), origin.tokens);
  if (error != std::errc{} || end != tokens.data() + tokens.size() || origin.tokens < 1 ||
      origin.tokens > most_tokens) {
    throw damaged(file, concat("its number of tokens is \"", printable(tokens), "\""));
  }
  std::istringstream texts(value("texts"));
  for (std::string text; texts >> text;) origin.texts.push_back(text);
  if (const auto found = metadata.find(products_key); found != metadata.end())
    origin.products = printable(found->second);
  origin.gram = value("gram") == "yes";
  origin.sensitivity = metadata.contains(std::string(sensitivity_name));
  return origin;
}

std::vector<double> load_sums(const io::Checkpoint& file, const std::string& name) {
  const auto loaded = file.load(name);
  std::vector<double> result(static_cast<size_t>(element_count(loaded->shape)));
  if (loaded->dtype == DType::f64) {
    std::memcpy(result.data(), loaded->bytes.data(), loaded->bytes.size());
  } else {
    std::vector<float> values(result.size());
    widen(loaded->bytes, loaded->dtype, values);
    std::copy(values.begin(), values.end(), result.begin());
  }
  return result;
}

/// What sums of real activations satisfy, so that a damaged file does not steer a search unnoticed.
class SumCheck {
 public:
  SumCheck(const std::string& file, const model::InputGroup& group, const quantize::InputStatistics& sums)
      : file_(file), group_(group), sums_(sums) {}

  void run() const {
    const auto count = static_cast<double>(sums_.count);
    for (size_t c = 0; c < sums_.sum_abs.size(); ++c) {
      const double sum = sums_.sum_abs[c], squares = sums_.sum_squares[c];
      if (!std::isfinite(sum) || sum < 0) fail("sum_abs", c, "is no sum of magnitudes");
      if (!std::isfinite(squares) || squares < 0) fail("sum_squares", c, "is no sum of squares");
      // Cauchy and Schwarz, with room for rounding.
      if (sum * sum > squares * count * (1 + gram_tolerance)) fail("sum_squares", c, "is too small for sum_abs");
    }
    if (sums_.has_gram()) check_gram();
  }

 private:
  void check_gram() const {
    for (size_t i = 0; i < sums_.gram.size(); ++i) {
      if (!std::isfinite(sums_.gram[i])) fail("gram", i, "is not finite");
    }
    for (int64_t c = 0; c < sums_.width; ++c) {
      const double squares = sums_.sum_squares[static_cast<size_t>(c)];
      const auto at = static_cast<size_t>(quantize::triangle_row(sums_.width, c));
      if (std::abs(sums_.gram[at] - squares) > gram_tolerance * squares) fail("gram", at, "contradicts sum_squares");
    }
  }

  [[noreturn]] void fail(std::string_view tensor, size_t index, std::string_view what) const {
    throw damaged(file_, concat(sum_name(group_, tensor), "[", index, "] ", what)).hint("the file is damaged");
  }

  const std::string& file_;
  const model::InputGroup& group_;
  const quantize::InputStatistics& sums_;
};

}  // namespace

std::string model_identity(const io::Checkpoint& checkpoint) {
  Digest digest;
  if (!checkpoint.derivation().empty()) digest.add(checkpoint.derivation());
  for (const auto& [name, info] : checkpoint.tensors()) {
    digest.add(name);
    digest.add(dtype_name(info.dtype));
    digest.add(shape_text(info.shape));
    if (info.shape.size() == 1) digest.add(checkpoint.load(name)->bytes);
  }
  return digest.text();
}

StatisticsFile::StatisticsFile(std::string name, io::Checkpoint file, const model::ModelConfig& config)
    : name_(std::move(name)), file_(std::move(file)), config_(config) {}

StatisticsFile StatisticsFile::open(const std::filesystem::path& path, const model::ModelConfig& config) {
  if (std::filesystem::is_directory(path)) throw damaged(path.string(), "is a folder, not a statistics file");
  StatisticsFile result(path.string(), io::Checkpoint::open(path), config);
  result.origin_ = parse_origin(result.file_.metadata(), result.name_);
  if (const auto found = result.file_.tensors().find(windows_name); found != result.file_.tensors().end()) {
    const Shape& shape = found->second.shape;
    if (shape.size() != 2 || shape[0] < 1 || shape[1] < 2) {
      throw damaged(result.name_, concat(windows_name, " has shape ", shape_text(shape)));
    }
    result.origin_.window_samples = shape[0];
    result.origin_.window_length = shape[1];
  }
  const auto planned = planned_tensors(config, result.origin_);
  for (const auto& tensor : planned) {
    const io::TensorInfo& found = result.file_.at(tensor.name);
    if (found.dtype == tensor.dtype && found.shape == tensor.shape) continue;
    throw damaged(result.name_, concat(tensor.name, " has another type or shape"))
        .detail(concat("expected ", dtype_name(tensor.dtype), " ", shape_text(tensor.shape), ", found ",
                       dtype_name(found.dtype), " ", shape_text(found.shape)))
        .hint("the statistics belong to another model");
  }
  if (planned.size() != result.file_.tensors().size()) {
    throw damaged(result.name_, "holds tensors that are no statistics of this model");
  }
  return result;
}

void StatisticsFile::check_model(const std::string& identity) const {
  if (origin_.model == identity) return;
  throw Error(ErrorCode::mismatch, concat(io::shown(name_), ": these statistics belong to another model"))
      .detail(concat("made with model ", printable(origin_.model), ", this one is ", identity))
      .hint("w4q calibrate makes statistics of this model");
}

LayerStatistics StatisticsFile::load(int64_t layer) const {
  const auto groups = model::input_groups(config_, layer);
  LayerStatistics result(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    auto& sums = result[i];
    sums.width = groups[i].width;
    sums.count = origin_.tokens;
    sums.sum_abs = load_sums(file_, sum_name(groups[i], "sum_abs"));
    sums.sum_squares = load_sums(file_, sum_name(groups[i], "sum_squares"));
    if (origin_.gram) sums.gram = load_sums(file_, sum_name(groups[i], "gram"));
    SumCheck(name_, groups[i], sums).run();
  }
  return result;
}

Sensitivities StatisticsFile::load_sensitivities() const {
  if (!origin_.sensitivity) return {};
  const auto linears = linear_names(config_);
  std::vector<double> table;
  if (!origin_.named_sensitivity) table = load_sums(file_, std::string(sensitivity_name));
  Sensitivities result;
  for (size_t i = 0; i < linears.size(); ++i) {
    const double value = table.empty() ? load_sums(file_, sensitivity_of(linears[i])).front() : table[i];
    result.emplace(linears[i], value);
    if (std::isfinite(value) && value >= 0) continue;
    const std::string place = table.empty() ? sensitivity_of(linears[i]) : concat(sensitivity_name, "[", i, "]");
    throw damaged(name_, place + " is no sensitivity").hint("the file is damaged");
  }
  return result;
}

CalibrationWindows StatisticsFile::load_windows() const {
  CalibrationWindows result;
  result.samples = origin_.window_samples;
  result.length = origin_.window_length;
  if (result.samples == 0) return result;
  const auto loaded = file_.load(windows_name);
  result.ids.resize(static_cast<size_t>(result.samples * result.length));
  std::memcpy(result.ids.data(), loaded->bytes.data(), loaded->bytes.size());
  for (size_t i = 0; i < result.ids.size(); ++i) {
    if (result.ids[i] >= 0 && result.ids[i] < config_.vocab_size) continue;
    throw damaged(name_, concat(windows_name, "[", i, "] is no token: ", result.ids[i])).hint("the file is damaged");
  }
  return result;
}

StatisticsWriter::StatisticsWriter(const std::filesystem::path& path, const model::ModelConfig& config,
                                   const StatisticsOrigin& origin, bool overwrite,
                                   const std::vector<std::filesystem::path>& inputs)
    : config_(config),
      header_(io::layout_safetensors(planned_tensors(config, origin), metadata_of(origin))),
      output_(path, overwrite, inputs) {
  if (path.extension() != ".safetensors") {
    throw Error(ErrorCode::bad_argument, concat(io::shown(path), ": a statistics file is named *.safetensors"));
  }
  const std::string text = io::serialize_safetensors_header(header_);
  header_.data_begin = text.size();
  io::write_all(output_.descriptor(), std::as_bytes(std::span(text)), 0, path);
}

void StatisticsWriter::write_tensor(const std::string& name, std::span<const std::byte> bytes) {
  const auto found = std::find_if(header_.tensors.begin(), header_.tensors.end(),
                                  [&](const io::TensorInfo& info) { return info.name == name; });
  ensure(found != header_.tensors.end() && found->size() == bytes.size(), "statistics of another shape");
  io::write_all(output_.descriptor(), bytes, header_.data_begin + found->begin, output_.target());
}

void StatisticsWriter::write(int64_t layer, const LayerStatistics& statistics) {
  const auto groups = model::input_groups(config_, layer);
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& sums = statistics[i];
    write_tensor(sum_name(groups[i], "sum_abs"), bytes_of(sums.sum_abs));
    write_tensor(sum_name(groups[i], "sum_squares"), bytes_of(sums.sum_squares));
    if (!sums.has_gram()) continue;
    const std::vector<float> narrow(sums.gram.begin(), sums.gram.end());
    write_tensor(sum_name(groups[i], "gram"), bytes_of(narrow));
  }
}

void StatisticsWriter::write(const Sensitivities& sensitivities) {
  for (const auto& [linear, value] : sensitivities) {
    write_tensor(sensitivity_of(linear), std::as_bytes(std::span(&value, 1)));
  }
}

void StatisticsWriter::write(const CalibrationWindows& windows) { write_tensor(windows_name, bytes_of(windows.ids)); }

int64_t StatisticsWriter::finish() {
  output_.commit();
  const auto& last = header_.tensors.back();
  return static_cast<int64_t>(header_.data_begin + last.end);
}

}  // namespace w4q::pipeline
