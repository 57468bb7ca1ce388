#include "verify/products/kernel_share.h"

#include <array>
#include <cstring>
#include <string>
#include <string_view>

#include "core/error.h"

namespace w4q::verify {
namespace {

/// As they travel between ranks, which are all of one kind.
void put_number(std::string& bytes, int64_t value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

int64_t take_number(std::string_view& bytes) {
  int64_t value = 0;
  ensure(bytes.size() >= sizeof value, "the ranks differ in which products they check");
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return value;
}

void put_lines(std::string& bytes, const std::vector<KernelError>& lines) {
  put_number(bytes, static_cast<int64_t>(lines.size()));
  for (const auto& line : lines) {
    for (const auto* text : {&line.name, &line.scheme, &line.kernels}) {
      put_number(bytes, static_cast<int64_t>(text->size()));
      bytes += *text;
    }
    const double values[] = {line.to_cpu, line.to_fp64, line.rounding, line.bound};
    bytes.append(reinterpret_cast<const char*>(values), sizeof values);
  }
}

std::string take_text(std::string_view& bytes) {
  const auto size = static_cast<size_t>(take_number(bytes));
  std::string text(bytes.substr(0, size));
  bytes.remove_prefix(text.size());
  return text;
}

KernelError take_line(std::string_view& bytes) {
  KernelError line{.name = take_text(bytes), .scheme = take_text(bytes), .kernels = take_text(bytes)};
  std::array<double, 4> values{};
  ensure(bytes.size() >= sizeof values, "the ranks differ in which products they check");
  std::memcpy(values.data(), bytes.data(), sizeof values);
  bytes.remove_prefix(sizeof values);
  line.to_cpu = values[0], line.to_fp64 = values[1], line.rounding = values[2], line.bound = values[3];
  return line;
}

/// Of `all`, what each rank has found, the lines of a stage of `items`.
void add_stage(const model::LayerStage& stage, int number, int64_t items, std::vector<std::string_view>& all,
               KernelReport& report) {
  for (int64_t item = 0; item < items; ++item) {
    const auto group = static_cast<int>(item % stage.groups());
    std::string_view& from = all[static_cast<size_t>(group * stage.count() + number)];
    for (int64_t left = take_number(from); left > 0; --left) report.layers.push_back(take_line(from));
  }
}

}  // namespace

model::LayerStage kernel_stage(ranks::Ranks& ranks, const model::OpenedModel& model) {
  int parts = model::can_be_split(model.config) ? ranks.size() : 1;
  while (ranks.size() % parts != 0 || parts > model.config.layers) --parts;
  return {ranks, parts};
}

KernelReport check_together(ranks::Ranks& ranks, const model::LayerStage& stage, int64_t items,
                            const std::function<std::vector<KernelError>(int64_t item)>& check) {
  const auto found = ranks.together([&] {
    std::string own;
    put_number(own, items);
    for (int64_t item = stage.group(); item < items; item += stage.groups()) put_lines(own, check(item));
    return own;
  });
  std::vector<std::string_view> all(found.begin(), found.end());
  std::vector<int64_t> counts;
  for (auto& each : all) counts.push_back(take_number(each));
  KernelReport report;
  for (int number = 0; number < stage.count(); ++number) {
    add_stage(stage, number, counts[static_cast<size_t>(number)], all, report);
  }
  return report;
}

}  // namespace w4q::verify
