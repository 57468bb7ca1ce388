#include "pipeline/output_rules.h"

#include "core/error.h"
#include "io/files.h"
#include "io/output.h"
#include "model/dialect.h"

namespace w4q::pipeline {
namespace {

bool is_marked(const io::Json& json) { return json.is_object() && json.value(conversion_mark, io::Json()) == "w4q"; }

}  // namespace

bool is_replaceable_output(const std::filesystem::path& folder) {
  if (std::filesystem::is_empty(folder)) return true;
  try {
    const io::Json config = io::read_json(folder / "config.json");
    if (is_marked(config)) return true;
    if (config.is_object() && config.contains("quantization_config") && is_marked(config["quantization_config"])) {
      return true;
    }
    return !model::parse_quantization_config(config, "config.json").linears.empty();
  } catch (const Error&) {
    return false;  // not something that w4q wrote: the caller refuses to touch it
  }
}

void carry_companions(const std::filesystem::path& from, const std::filesystem::path& to, const io::Json& config) {
  std::vector<std::string> left_out{"config.json"};
  left_out.insert(left_out.end(), std::begin(model::side_config_files), std::end(model::side_config_files));
  io::copy_companions(from, to, left_out);
  io::write_file(to / "config.json", config.dump(2) + "\n", false);
}

void carry_companions(const std::filesystem::path& from, const std::filesystem::path& to, io::Json config,
                      const model::QuantizationConfig& quantization) {
  model::write_quantization_config(quantization, config);
  carry_companions(from, to, config);
}

}  // namespace w4q::pipeline
