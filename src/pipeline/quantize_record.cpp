#include "pipeline/quantize_record.h"

#include <cmath>

namespace w4q::pipeline {
namespace {

using io::Json;

double number(const Json& json) { return json.is_null() ? NAN : json.get<double>(); }

Json to_row(const QuantizedTensor& tensor) {
  const auto& [signal, noise, max_error, row, col] = tensor.error;
  const auto& stats = tensor.stats;
  Json json = {
      {"name", tensor.name},
      {"scheme", tensor.scheme},
      {"seconds", tensor.seconds},
      {"stats",
       {stats.blocks, stats.zero_blocks, stats.saturated_scales, stats.subnormal_scales, stats.range_exponent}},
      {"error", {signal, noise, max_error, row, col}}};
  if (tensor.output) json["output"] = {tensor.output->power, tensor.output->plain, tensor.output->packed};
  return json;
}

QuantizedTensor tensor_of(const Json& json) {
  const Json &stats = json.at("stats"), &error = json.at("error");
  QuantizedTensor tensor{
      .name = json.at("name"),
      .scheme = json.at("scheme"),
      .stats = {stats.at(0), stats.at(1), stats.at(2), stats.at(3), stats.at(4)},
      .error = {number(error.at(0)), number(error.at(1)), number(error.at(2)), error.at(3), error.at(4)},
      .output = {},
      .seconds = number(json.at("seconds"))};
  if (!json.contains("output")) return tensor;
  const Json& output = json.at("output");
  tensor.output = {number(output.at(0)), number(output.at(1)), number(output.at(2))};
  return tensor;
}

Json to_row(const GroupReport& group) {
  return {{"name", group.name},
          {"target", static_cast<int>(group.target)},
          {"point", {group.point.alpha, group.point.by_weights}},
          {"errors", {group.output, group.plain_error, group.scaled_error, group.packed_error}}};
}

GroupReport group_of(const Json& json) {
  const Json &point = json.at("point"), &errors = json.at("errors");
  return {.name = json.at("name"),
          .target = static_cast<ScaleTarget::Kind>(json.at("target").get<int>()),
          .point = {number(point.at(0)), point.at(1)},
          .output = number(errors.at(0)),
          .plain_error = number(errors.at(1)),
          .scaled_error = number(errors.at(2)),
          .packed_error = number(errors.at(3))};
}

}  // namespace

Json to_json(const QuantizeRecord& record) {
  Json json = {{"tensors", Json::array()}};
  for (const auto& tensor : record.tensors) json["tensors"].push_back(to_row(tensor));
  for (const auto& group : record.groups) json["groups"].push_back(to_row(group));
  if (!record.rescaled.empty()) json["rescaled"] = record.rescaled;
  if (!record.notes.empty()) json["notes"] = record.notes;
  if (record.experts.all > 0) json["experts"] = {record.experts.all, record.experts.idle, record.experts.scarce};
  return json;
}

QuantizeRecord quantize_record(const Json& json) {
  QuantizeRecord record;
  for (const auto& row : json.at("tensors")) record.tensors.push_back(tensor_of(row));
  for (const auto& row : json.value("groups", Json::array())) record.groups.push_back(group_of(row));
  for (const auto& name : json.value("rescaled", Json::array())) record.rescaled.insert(name.get<std::string>());
  for (const auto& note : json.value("notes", Json::array())) record.notes.push_back(note);
  if (json.contains("experts")) {
    const Json& counts = json.at("experts");
    record.experts = {counts.at(0), counts.at(1), counts.at(2)};
  }
  return record;
}

}  // namespace w4q::pipeline
