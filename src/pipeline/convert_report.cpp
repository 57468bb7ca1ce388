// The report of a conversion, for people and for programs.
#include <set>

#include "core/text.h"
#include "pipeline/convert_model.h"

namespace w4q::pipeline {
namespace {

std::string equal_text(std::string_view what, int64_t equal, int64_t all) {
  if (all == 0) return {};
  if (equal == all) return concat(what, " equal");
  return concat(what, " equal ", fixed(100.0 * static_cast<double>(equal) / static_cast<double>(all), 4), " %");
}

std::string proof_text(const formats::RecastProof& proof) {
  std::string text =
      proof.codes == proof.codes_equal ? "codes equal 100 %" : equal_text("codes", proof.codes_equal, proof.codes);
  if (proof.zeros > 0) text += ", " + equal_text("zeros", proof.zeros_equal, proof.zeros);
  if (proof.scales > 0) text += ", " + equal_text("scales", proof.scales_equal, proof.scales);
  if (!proof.groups_equal) text += ", inputs belong to other groups";
  return text;
}

std::string outcome(const ConvertReport& report, const ConvertedLinear& linear) {
  if (!report.done) return linear.loses.empty() ? "" : "rounded anew: " + linear.loses;
  std::string text = proof_text(linear.proof);
  if (!linear.loses.empty()) text += concat("; relative error ", linear.error.relative(), ": ", linear.loses);
  return text;
}

std::string linears_text(const ConvertReport& report, model::Detail detail) {
  TextTable table({"linear", "shape", "from", "to", "before", "after", report.done ? "proof" : ""});
  for (const ConvertedLinear* linear :
       model::named_rows(report.linears, detail, [](const ConvertedLinear& row) { return -row.error.relative(); })) {
    table.row({printable(linear->name), shape_text(linear->shape), formats::to_string(linear->from),
               formats::to_string(linear->to), human_bytes(linear->bytes_before), human_bytes(linear->bytes_after),
               outcome(report, *linear)});
  }
  return table.str();
}

std::string kinds_text(const ConvertReport& report) {
  TextTable table({"linear", "count", "from", "to", "before", "after", "rounded anew", report.done ? "proof" : ""});
  for (const auto& kind : model::by_kind(report.linears)) {
    std::set<std::string> from, to;
    int64_t before = 0, after = 0, lossy = 0;
    formats::RecastProof proof;
    for (const ConvertedLinear* linear : kind.rows) {
      from.insert(formats::to_string(linear->from));
      to.insert(formats::to_string(linear->to));
      before += linear->bytes_before;
      after += linear->bytes_after;
      lossy += linear->loses.empty() ? 0 : 1;
      proof += linear->proof;
    }
    table.row({printable(kind.name), concat(kind.rows.size()), model::words_text(from), model::words_text(to),
               human_bytes(before), human_bytes(after), concat(lossy), report.done ? proof_text(proof) : ""});
  }
  return table.str();
}

io::Json to_json(const formats::RecastProof& proof) {
  return {{"codes", proof.codes},
          {"codes_equal", proof.codes_equal},
          {"zeros", proof.zeros},
          {"zeros_equal", proof.zeros_equal},
          {"scales", proof.scales},
          {"scales_equal", proof.scales_equal},
          {"groups_equal", proof.groups_equal},
          {"complete", proof.complete()}};
}

}  // namespace

formats::RecastProof ConvertReport::proof() const {
  formats::RecastProof sum;
  for (const auto& linear : linears) sum += linear.proof;
  return sum;
}

std::string to_text(const ConvertReport& report, model::Detail detail) {
  int64_t before = 0, after = 0, lossy = 0;
  for (const auto& linear : report.linears) {
    before += linear.bytes_before, after += linear.bytes_after;
    lossy += linear.loses.empty() ? 0 : 1;
  }
  const bool all = model::names_all(detail, report.linears.size());
  std::string text = all ? "" : kinds_text(report);
  if (!all && lossy > 0) text += "\nthe worst of them (--verbose: all)\n";
  if (all || lossy > 0) text += linears_text(report, detail);
  text += concat("\n", report.from, " → ", report.to, ": ", report.linears.size(), " packed linears, ",
                 human_bytes(before), " → ", human_bytes(after), "; ", report.carried, " other tensors of ",
                 human_bytes(report.carried_bytes), " carried along\n");
  if (report.done) {
    text += concat(proof_text(report.proof()), " over all linears; ", human_bytes(report.file_bytes), " written in ",
                   human_seconds(report.seconds), "\n");
  }
  if (lossy > 0) text += concat("NOT LOSSLESS: ", lossy, " linears were changed (--allow-lossy)\n");
  for (const auto& note : report.notes) text += "note: " + note + "\n";
  return text;
}

io::Json to_json(const ConvertReport& report) {
  io::Json linears = io::Json::array();
  for (const auto& linear : report.linears) {
    io::Json row = {{"name", linear.name},
                    {"shape", linear.shape},
                    {"from", formats::to_string(linear.from)},
                    {"to", formats::to_string(linear.to)},
                    {"bytes_before", linear.bytes_before},
                    {"bytes_after", linear.bytes_after},
                    {"lossless", linear.loses.empty()}};
    if (report.done) row["proof"] = to_json(linear.proof);
    if (!linear.loses.empty()) row["loses"] = linear.loses;
    if (report.done && !linear.loses.empty()) row["relative_error"] = linear.error.relative();
    linears.push_back(std::move(row));
  }
  io::Json json = {{"from", report.from},
                   {"to", report.to},
                   {"linears", std::move(linears)},
                   {"carried_tensors", report.carried},
                   {"carried_bytes", report.carried_bytes},
                   {"notes", report.notes}};
  if (!report.done) return json;
  json["proof"] = to_json(report.proof());
  json["file_bytes"] = report.file_bytes;
  json["seconds"] = report.seconds;
  return json;
}

}  // namespace w4q::pipeline
