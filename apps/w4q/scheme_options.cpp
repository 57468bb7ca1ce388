#include "scheme_options.h"

#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"

namespace w4q::app {
namespace {

void refuse_foreign(const std::vector<CLI::Option*>& foreign, std::string_view method) {
  for (const CLI::Option* option : foreign) {
    if (option->count() == 0) continue;
    throw Error(ErrorCode::bad_argument, concat(option->get_name(), " means nothing to --method ", method))
        .hint("w4q quantize --help says which options belong to which schemes");
  }
}

void check_bits(int bits, bool integer) {
  if (integer || bits <= 5) return;
  throw Error(ErrorCode::bad_argument, concat("--bits ", bits, ": no such width")).detail("kbit has 2 to 5 bits");
}

}  // namespace

void add_scheme(CLI::App& command, SchemeOptions& options, CLI::Option& recipe) {
  auto* scheme = command.add_option("--scheme", options.scheme, "Scheme by its whole name (w4q list)");
  auto* bits = command.add_option("--k,--bits", options.bits, "Bits of a code: kbit 2 to 5; integers 2 to 8")
                   ->check(CLI::Range(2, 8))
                   ->capture_default_str();
  auto* absmax = command.add_option("--absmax", options.absmax, "kbit: type of the block scales")
                     ->check(CLI::IsMember({"e4m4", "f16"}))
                     ->capture_default_str();
  auto* group = command.add_option("--group", options.group, "Integers: inputs that share a scale, or row")
                    ->capture_default_str();
  auto* type = command.add_option("--scale-type", options.scale_type, "Integers: type of the scales")
                   ->check(CLI::IsMember({"f16", "bf16", "f32"}))
                   ->capture_default_str();
  auto* asymmetric = command.add_flag("--asymmetric,!--symmetric", options.asymmetric,
                                      "Integers: a zero point for every group, or none (awq: with, others: without)");
  options.asymmetry_flag = asymmetric;
  auto* clip = command.add_option("--clip", options.clip, "Integers: search the range of every group by squared error")
                   ->check(CLI::IsMember({"none", "mse"}))
                   ->capture_default_str();
  for (CLI::Option* part : {bits, absmax, group, type, asymmetric}) {
    scheme->excludes(part);
    recipe.excludes(part);
  }
  recipe.excludes(scheme);
  options.kbit_parts = {absmax};
  options.integer_parts = {group, type, asymmetric, clip};
}

formats::Scheme chosen_scheme(const SchemeOptions& options, std::string_view method) {
  const bool integer = method != "kbit";
  refuse_foreign(integer ? options.kbit_parts : options.integer_parts, method);
  if (!options.scheme.empty()) return formats::parse_scheme(options.scheme);
  check_bits(options.bits, integer);
  if (!integer) return formats::parse_scheme(concat("kbit", options.bits, "-b32-", options.absmax));
  // AWQ's own format has zero points, and its readers want them.
  const bool asymmetric = options.asymmetry_flag->count() > 0 ? options.asymmetric : method == "awq";
  const std::string group = options.group == "row" ? options.group : "g" + options.group;
  return formats::parse_scheme(
      concat("int", options.bits, "-", group, "-", options.scale_type, asymmetric ? "-asym" : ""));
}

quantize::Clip chosen_clip(const SchemeOptions& options) {
  return options.clip == "mse" ? quantize::Clip::mse : quantize::Clip::min_max;
}

}  // namespace w4q::app
