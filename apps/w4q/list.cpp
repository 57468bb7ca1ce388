// w4q list: everything that the registries hold.
#include <memory>

#include "checkpoint/dialect/dialect.h"
#include "common_options.h"
#include "conversion_commands.h"
#include "core/error.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/gguf_blocks.h"
#include "formats/gguf_forms.h"
#include "formats/scheme_registry.h"
#include "model/architecture.h"
#include "quantize/quantizer_registry.h"
#include "quantize/rounding.h"
#include "repack/layout_registry.h"
#include "serving/rules.h"

namespace w4q::app {
namespace {

std::string sm_names(const std::vector<int>& sms) {
  std::vector<std::string> names;
  for (const int sm : sms) names.push_back(concat("sm", sm));
  return names.empty() ? "–" : join(names, " ");
}

/// The quantizer that rounds to a scheme; such a one as nothing rounds to is only read.
std::string made_by(const formats::Scheme& scheme) {
  constexpr const char* none = "read only";
  try {
    const auto& row = quantize::rounding_quantizer(scheme);
    return row.accepts(scheme) ? std::string(row.name) : none;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    return none;
  }
}

io::Json registries() {
  io::Json json = {{"schemes", io::Json::array()},   {"scheme_forms", io::Json::array()},
                   {"methods", io::Json::array()},   {"layouts", io::Json::array()},
                   {"codebooks", io::Json::array()}, {"architectures", io::Json::array()}};
  constexpr int64_t typical = 4096;
  for (const auto& row : formats::scheme_registry()) {
    if (!row.form.empty()) json["scheme_forms"].push_back(row.form);
    for (const auto& scheme : row.schemes()) {
      json["schemes"].push_back({{"name", formats::to_string(scheme)},
                                 {"bits_per_weight", row.bits_per_weight(scheme, typical, typical)},
                                 {"method", made_by(scheme)},
                                 {"description", row.description}});
    }
  }
  for (const auto& row : quantize::quantizer_registry()) {
    json["methods"].push_back({{"name", row.name}, {"needs_calibration", false}, {"description", row.description}});
  }
  // No quantizers of single tensors: they choose what the quantizer of the scheme rounds.
  for (const auto& row : quantize::step_registry()) {
    if (row.method.empty()) continue;
    json["methods"].push_back(
        {{"name", row.name}, {"needs_calibration", row.needs_statistics}, {"description", row.method}});
  }
  for (const auto& row : repack::layout_registry()) {
    json["layouts"].push_back(
        {{"name", row.name}, {"targets", sm_names(row.sms)}, {"description", row.description}, {"reason", row.reason}});
  }
  for (const auto& row : formats::codebook_registry()) {
    json["codebooks"].push_back({{"name", row.name}, {"description", row.description}});
  }
  for (const auto* row : model::architectures()) {
    std::vector<std::string> wrappers;
    for (const auto wrapper : row->wrappers) {
      if (!wrapper.empty()) wrappers.emplace_back(wrapper);
    }
    json["architectures"].push_back({{"name", row->class_name},
                                     {"model_type", row->model_type},
                                     {"wrapped_by", wrappers.empty() ? "–" : join(wrappers, " ")},
                                     {"gguf", row->gguf.empty() ? "–" : row->gguf}});
  }
  return json;
}

std::string section(const io::Json& json, const std::string& name, std::vector<std::string> keys) {
  TextTable table({keys.begin(), keys.end()});
  for (const auto& row : json[name]) {
    std::vector<std::string> cells;
    for (const auto& key : keys) {
      const auto& value = row[key];
      cells.push_back(value.is_string()   ? value.get<std::string>()
                      : value.is_number() ? fixed(value, 3)
                                          : value.dump());
    }
    table.row(std::move(cells));
  }
  return name + "\n" + table.str();
}

/// The layouts by themselves, with what speaks for each.
std::string layouts(const io::Json& json) {
  return section(json, "layouts", {"name", "targets", "description", "reason"}) +
         "\nrepack --target takes the first layout made for the target that accepts the weight\n";
}

/// Types of tensors in GGUF files that are understood.
io::Json gguf_types() {
  io::Json rows = io::Json::array();
  for (uint32_t number = 0; number <= static_cast<uint32_t>(GgmlType::nvfp4); ++number) {
    const auto* row = find_ggml_type(number);
    if (row == nullptr || !formats::gguf_decodes(row->type)) continue;
    const bool writes = formats::gguf_encodes(row->type) || formats::find_gguf_form(row->type) != nullptr;
    rows.push_back({{"name", row->name},
                    {"bits_per_weight", 8.0 * static_cast<double>(row->block_bytes) / static_cast<double>(row->block)},
                    {"use", writes ? "read and written" : "read only"}});
  }
  return rows;
}

/// Other people's checkpoints, and what else --to knows.
io::Json dialects() {
  io::Json json = {{"dialects", {{{"name", "w4q"}, {"description", "w4q's own planes"}, {"holds", "everything"}}}},
                   {"conversions", io::Json::array()}};
  for (const auto& row : checkpoint::dialect_registry()) {
    json["dialects"].push_back({{"name", row.name}, {"description", row.description}, {"holds", row.holds}});
  }
  for (const auto& row : conversion_table()) {
    json["conversions"].push_back({{"to", row.to},
                                   {"from", row.kind == ConversionRow::Kind::from_gguf ? "GGUF file" : "folder"},
                                   {"description", row.description}});
  }
  json["gguf_types"] = gguf_types();
  return json;
}

/// What programs load, and by which rules.
io::Json servers() {
  io::Json json = {{"programs", io::Json::array()}, {"formats", io::Json::array()}, {"rules", io::Json::array()}};
  const auto named = [](const serving::Programs& list) {
    std::vector<std::string> names;
    for (const auto& row : serving::programs()) {
      if (list.has(row.program)) names.emplace_back(row.name);
    }
    return names.empty() ? "–" : join(names, " ");
  };
  for (const auto& row : serving::programs()) {
    json["programs"].push_back({{"name", row.name}, {"package", row.package}, {"note", row.note}});
  }
  for (const auto& row : serving::format_rows()) {
    json["formats"].push_back({{"name", row.name}, {"loads", named(row.loads)}});
  }
  for (const auto& rule : serving::rules()) {
    json["rules"].push_back(
        {{"name", rule.id}, {"programs", named(rule.programs)}, {"asks", rule.asks}, {"source", rule.source}});
  }
  return json;
}

int run(const CommonOptions& common, bool only_layouts, bool only_dialects, bool only_servers) {
  apply(common);
  if (only_servers) {
    const io::Json json = servers();
    print(common, schema::list_servers,
          concat(section(json, "programs", {"name", "package", "note"}), "\n",
                 section(json, "formats", {"name", "loads"}), "\n",
                 section(json, "rules", {"name", "programs", "asks", "source"})),
          json);
    return 0;
  }
  if (only_dialects) {
    const io::Json json = dialects();
    print(common, schema::list_dialects,
          section(json, "dialects", {"name", "description", "holds"}) + "\n" +
              section(json, "conversions", {"to", "from", "description"}) + "\n" +
              section(json, "gguf_types", {"name", "bits_per_weight", "use"}),
          json);
    return 0;
  }
  const io::Json json = registries();
  if (only_layouts) {
    print(common, schema::list_layouts, layouts(json), {{"layouts", json["layouts"]}});
    return 0;
  }
  std::string forms;
  for (const auto& form : json["scheme_forms"]) forms += concat("and any ", form.get<std::string>(), "\n");
  const std::vector<std::string> wrappers(model::wrappers_of_any().begin(), model::wrappers_of_any().end());
  const std::string text = section(json, "schemes", {"name", "bits_per_weight", "method", "description"}) + forms +
                           "\n" + section(json, "methods", {"name", "description"}) + "\n" +
                           section(json, "layouts", {"name", "targets", "description"}) + "\n" +
                           section(json, "codebooks", {"name", "description"}) + "\n" +
                           section(json, "architectures", {"name", "model_type", "wrapped_by", "gguf"}) +
                           "\nany of these, within: " + join(wrappers) + "\n";
  print(common, schema::list, text, json);
  return 0;
}

}  // namespace

void setup_list(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("list", "List schemes, methods, layouts, codebooks and architectures");
  auto common = std::make_shared<CommonOptions>();
  auto only_layouts = std::make_shared<bool>(false);
  add_common(*command, *common);
  command->add_flag("--layouts", *only_layouts, "Only the layouts, and why each is as it is");
  auto only_dialects = std::make_shared<bool>(false);
  command->add_flag("--dialects", *only_dialects,
                    "Only the checkpoints of others, read and written, and what --to knows");
  auto only_servers = std::make_shared<bool>(false);
  command->add_flag("--servers", *only_servers,
                    "Only the programs of verify --for, which formats they load, and the rules");
  set_examples(*command, {{"list", "schemes, methods, layouts, codebooks, architectures"},
                          {"list --dialects", "checkpoints of other programs, and all that repack --to makes"}});
  command->callback([&action, common, only_layouts, only_dialects, only_servers] {
    action = [common, only_layouts, only_dialects, only_servers] {
      return run(*common, *only_layouts, *only_dialects, *only_servers);
    };
  });
}

}  // namespace w4q::app
