#include "pipeline/output_rules.h"

#include "core/error.h"
#include "io/files.h"
#include "io/output.h"

namespace w4q::pipeline {

bool is_replaceable_output(const std::filesystem::path& folder) {
  if (std::filesystem::is_empty(folder)) return true;
  try {
    const io::Json config = io::read_json(folder / "config.json");
    if (config.is_object() && config.value(conversion_mark, io::Json()) == "w4q") return true;
    return !model::parse_quantization_config(config, "config.json").linears.empty();
  } catch (const Error&) {
    return false;  // not something that w4q wrote: the caller refuses to touch it
  }
}

void carry_companions(const std::filesystem::path& from, const std::filesystem::path& to, io::Json config,
                      const model::QuantizationConfig& quantization) {
  io::copy_companions(from, to, {"config.json"});
  model::write_quantization_config(quantization, config);
  io::write_file(to / "config.json", config.dump(2) + "\n", false);
}

}  // namespace w4q::pipeline
