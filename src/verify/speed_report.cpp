#include "core/text.h"
#include "verify/rungs.h"
#include "verify/speed.h"

namespace w4q::verify {
namespace {

std::string micro(double seconds) { return fixed(seconds * 1e6, 1); }
std::string giga(double bytes, double seconds) { return fixed(bytes / seconds * 1e-9, 0); }

std::string percent_of_roofline(const SpeedReport& report, double bytes, double seconds) {
  return fixed(100 * bytes / seconds / report.read_bandwidth, 1);
}

std::string parts_text(const SpeedReport& report) {
  TextTable table({"part of a step, by itself", "launches", "us", "GB/s", "% of read"});
  for (const auto& part : report.parts) {
    const auto bytes = static_cast<double>(part.bytes);
    table.row({part.name, concat(part.launches), micro(part.seconds), part.bytes > 0 ? giga(bytes, part.seconds) : "",
               part.bytes > 0 ? percent_of_roofline(report, bytes, part.seconds) : ""});
  }
  return table.str();
}

std::string offload_text(const OffloadSpeed& offload) {
  if (offload.moved_bytes == 0) return "residual passes: none come from host memory\n";
  const auto ms = [](double seconds) { return fixed(seconds * 1e3, 2); };
  TextTable table({"residual passes from host memory", "value"});
  table.row({"moved for a step, and a chunk of a prompt", human_bytes(offload.moved_bytes)});
  table.row({"link, GB/s", fixed(offload.link_bandwidth * 1e-9, 1)});
  table.row({"a token, ms, and predicted", concat(ms(offload.step_seconds), ", ", ms(offload.predicted_step_seconds))});
  table.row({"time to first token, ms, and predicted",
             concat(ms(offload.prompt_seconds), ", ", ms(offload.predicted_prompt_seconds))});
  const auto percent = [](double share) { return fixed(100 * share, 1); };
  table.row({"copying hidden in steps, %, and predicted",
             concat(percent(offload.step_overlap), ", ", percent(offload.predicted_step_overlap))});
  table.row({"copying hidden in prompts, %, and predicted",
             concat(percent(offload.prompt_overlap), ", ", percent(offload.predicted_prompt_overlap))});
  table.row({"GPU memory, and predicted",
             concat(human_bytes(offload.memory_bytes), ", ", human_bytes(offload.predicted_memory_bytes))});
  return table.str();
}

io::Json offload_json(const OffloadSpeed& offload) {
  return {{"budget", offload.budget},
          {"moved_bytes", offload.moved_bytes},
          {"link_bandwidth", offload.link_bandwidth},
          {"step_seconds", offload.step_seconds},
          {"prompt_seconds", offload.prompt_seconds},
          {"step_overlap", offload.step_overlap},
          {"prompt_overlap", offload.prompt_overlap},
          {"predicted_step_seconds", offload.predicted_step_seconds},
          {"predicted_prompt_seconds", offload.predicted_prompt_seconds},
          {"predicted_step_overlap", offload.predicted_step_overlap},
          {"predicted_prompt_overlap", offload.predicted_prompt_overlap},
          {"memory_bytes", offload.memory_bytes},
          {"predicted_memory_bytes", offload.predicted_memory_bytes}};
}

std::string projection_text(const SpeedReport& report) {
  const Projection& p = *report.sm89;
  return concat("RTX 4090, projected: ", fixed(1 / p.seconds, 1), " tokens/s = 1 / (", human_bytes(report.step_bytes),
                " / ", fixed(p.bandwidth * 1e-9, 0), " GB/s + ", fixed(p.overhead * 1e3, 2),
                " ms of overhead measured here without overlapping launches)\n");
}

}  // namespace

std::string to_text(const SpeedReport& report) {
  const auto bytes = static_cast<double>(report.step_bytes);
  TextTable table({"measure", "value"});
  table.row({"model", report.model});
  table.row({"GPU", report.gpu});
  table.row({"read bandwidth, GB/s", fixed(report.read_bandwidth * 1e-9, 0)});
  table.row(
      {concat("time to first token, ", report.options.prompt, " tokens, ms"), fixed(report.prompt_seconds * 1e3, 2)});
  table.row({"prompt, tokens/s", fixed(static_cast<double>(report.options.prompt) / report.prompt_seconds, 0)});
  if (report.int8_prompt_seconds > 0) {
    table.row({"time to first token, int8 activations, ms", fixed(report.int8_prompt_seconds * 1e3, 2)});
    table.row({"prompt, int8 activations, tokens/s",
               fixed(static_cast<double>(report.options.prompt) / report.int8_prompt_seconds, 0)});
  }
  for (const auto& step : report.steps) {
    table.row({concat("generation, ", step.name, ", tokens/s"), fixed(step.tokens_per_second(), 1)});
  }
  const StepSpeed& first = report.steps.front();
  table.row({"a token, us", micro(first.seconds)});
  table.row({"… of the calling thread, us", micro(first.host_seconds)});
  table.row({"bytes read for a token", human_bytes(report.step_bytes)});
  table.row({"GB/s", giga(bytes, first.seconds)});
  table.row({"% of the read roofline", percent_of_roofline(report, bytes, first.seconds)});
  table.row({"launches for a token", concat(report.launches)});
  table.row({concat("KV cache ", kernels::to_string(report.options.kv.type), ", bytes a token"),
             concat(report.cache_bytes_per_token)});
  if (report.options.kv.prunes()) table.row({"pages attended to, %", fixed(100 * report.kept_pages, 1)});
  std::string text = table.str() + parts_text(report);
  if (report.sm89) text += projection_text(report);
  if (report.offload) text += offload_text(*report.offload);
  if (!report.widened.empty()) {
    text += concat("note: ", report.widened.size(), " packed layers have no kernel and run as f16\n");
  }
  return text;
}

io::Json to_json(const SpeedReport& report) {
  const StepSpeed& first = report.steps.front();
  const auto bytes = static_cast<double>(report.step_bytes);
  io::Json json = {{"model", report.model},
                   {"gpu", report.gpu},
                   {"read_bandwidth", report.read_bandwidth},
                   {"prompt_tokens", report.options.prompt},
                   {"generated_tokens", report.options.generate},
                   {"kv", kernels::to_string(report.options.kv.type)},
                   {"cache_bytes_per_token", report.cache_bytes_per_token},
                   {"time_to_first_token", report.prompt_seconds},
                   {"prompt_tokens_per_second", static_cast<double>(report.options.prompt) / report.prompt_seconds},
                   {"weight_bytes", report.weight_bytes},
                   {"step_bytes", report.step_bytes},
                   {"tokens_per_second", first.tokens_per_second()},
                   {"bandwidth", bytes / first.seconds},
                   {"share_of_roofline", bytes / first.seconds / report.read_bandwidth},
                   {"launches", report.launches},
                   {"widened", report.widened}};
  for (const auto& step : report.steps) {
    json["steps"].push_back({{"name", step.name},
                             {"seconds", step.seconds},
                             {"host_seconds", step.host_seconds},
                             {"tokens_per_second", step.tokens_per_second()}});
  }
  for (const auto& part : report.parts) {
    json["parts"].push_back(
        {{"name", part.name}, {"launches", part.launches}, {"bytes", part.bytes}, {"seconds", part.seconds}});
  }
  if (report.int8_prompt_seconds > 0) {
    json["int8_activations"] = {
        {"time_to_first_token", report.int8_prompt_seconds},
        {"prompt_tokens_per_second", static_cast<double>(report.options.prompt) / report.int8_prompt_seconds}};
  }
  if (report.options.kv.prunes()) {
    json["kv_delta"] = report.options.kv.delta;
    json["kept_pages"] = report.kept_pages;
  }
  if (report.sm89) {
    json["rtx4090_projected"] = {{"bandwidth", report.sm89->bandwidth},
                                 {"overhead", report.sm89->overhead},
                                 {"tokens_per_second", 1 / report.sm89->seconds}};
  }
  if (report.offload) json["offload"] = offload_json(*report.offload);
  return json;
}

CheckRow speed_check() {
  return {.name = "speed",
          .option = "--speed",
          .help = "Measure prompt and generation on this GPU",
          .needs = {.gpu = true},
          .run = [](CheckContext& context, Findings& findings) {
            const CheckOptions& options = context.options();
            const auto& model = context.model(model::planes_for(options.gpu.get(), options.speed.int8_activations));
            const auto report = measure_speed(*options.gpu, model, options.speed);
            findings.add("speed", to_text(report), to_json(report));
          }};
}

}  // namespace w4q::verify
