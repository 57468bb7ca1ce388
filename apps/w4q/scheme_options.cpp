#include "scheme_options.h"

#include "core/error.h"
#include "core/text.h"
#include "formats/integer.h"
#include "help.h"

namespace w4q::app {
namespace {

void refuse_foreign(const std::vector<CLI::Option*>& foreign, std::string_view method) {
  for (const CLI::Option* option : foreign) {
    if (option->count() == 0) continue;
    throw Error(ErrorCode::bad_argument, concat(option->get_name(), " means nothing to --method ", method))
        .hint("w4q quantize --help says which options belong to which schemes");
  }
}

void check_bits(int bits, std::string_view method) {
  if (bits <= 5) return;
  throw Error(ErrorCode::bad_argument, concat("--bits ", bits, ": no such width"))
      .detail(concat(method, " has 2 to 5 bits"));
}

/// What `parse` makes of what stands behind `option`; a name that is none is wrong usage.
template <class Parse>
auto typed(std::string_view option, const Parse& parse) try {
  return parse();
} catch (const Error& error) {
  if (error.code() != ErrorCode::unsupported) throw;
  constexpr std::string_view indent = "\n  ";
  const std::string_view details = error.details();
  Error wrong(ErrorCode::bad_argument, concat(option, ": ", error.summary()));
  if (details.starts_with(indent)) wrong.detail(details.substr(indent.size()));
  throw wrong.hint(error.hint().empty() ? "w4q list names them" : error.hint() + "; w4q list names all");
}

/// "row", or how many inputs share a scale.
void check_group(const std::string& group) {
  constexpr size_t longest = 9;
  const bool number = !group.empty() && group.size() <= longest && group.front() != '0' &&
                      group.find_first_not_of("0123456789") == std::string::npos;
  if (number || group == "row") return;
  throw Error(ErrorCode::bad_argument, concat("--group ", printable(group), ": no such group"))
      .detail("expected a number of inputs that share a scale, or row")
      .hint("--group 128");
}

/// Rotated passes of the same groups, with the widths that were asked for.
std::vector<formats::Scheme> rotated_schemes(const SchemeOptions& options) {
  const std::string group = options.group == "row" ? options.group : "d" + options.group;
  const std::string norm = options.absmax == "e4m4" ? "-e4m4" : "";
  std::vector<formats::Scheme> passes;
  std::vector<int> widths{options.bits};
  widths.insert(widths.end(), options.residual_bits.begin(), options.residual_bits.end());
  for (const int bits : widths) passes.push_back(typed_scheme("--group", concat("rotated", bits, "-", group, norm)));
  return passes;
}

}  // namespace

void add_scheme(CLI::App& command, SchemeOptions& options, CLI::Option& recipe) {
  const InGroup in_group(command, scheme_group);
  auto* scheme = command.add_option("--scheme", options.scheme, "Scheme by its whole name (w4q list)");
  auto* bits = command.add_option("--k,--bits", options.bits, "Bits of a code: kbit 2 to 5; integers 2 to 8")
                   ->check(CLI::Range(2, 8))
                   ->capture_default_str()
                   ->group(aim_group);
  auto* absmax = command
                     .add_option("--absmax", options.absmax,
                                 "Type of the block scales of kbit (e4m4), of the norms of rotated (f16)")
                     ->check(CLI::IsMember({"e4m4", "f16"}));
  auto* group = command.add_option("--group", options.group, "Integers, rotated: inputs that share a scale, or row")
                    ->capture_default_str();
  auto* residual = command
                       .add_option("--residual-bits", options.residual_bits,
                                   "Rotated: bits of a further pass over what is left; may be repeated")
                       ->check(CLI::Range(2, 5))
                       ->allow_extra_args(false);
  command
      .add_option("--residual-rotation", options.residual_rotation,
                  "Rotated: further passes share the first's rotation or have their own")
      ->check(CLI::IsMember({"shared", "own"}))
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
  options.group_option = group;
  for (CLI::Option* part : {bits, absmax, group, type, asymmetric, residual}) {
    scheme->excludes(part);
    recipe.excludes(part);
  }
  recipe.excludes(scheme);
  options.kbit_parts = {absmax};
  options.integer_parts = {type, asymmetric, clip};
  options.rotated_parts = {residual};
}

std::vector<formats::Scheme> typed_schemes(std::string_view option, const std::string& text) {
  return typed(option, [&] { return formats::parse_schemes(text); });
}

formats::Scheme typed_scheme(std::string_view option, const std::string& text) {
  return typed(option, [&] { return formats::parse_scheme(text); });
}

std::vector<formats::Scheme> chosen_schemes(const SchemeOptions& options, std::string_view method) {
  const bool kbit = method == "kbit", rotated = method == "rotated";
  if (!kbit && !rotated) refuse_foreign(options.kbit_parts, method);
  if (kbit || rotated) refuse_foreign(options.integer_parts, method);
  if (kbit) refuse_foreign({options.group_option}, method);
  if (!rotated) refuse_foreign(options.rotated_parts, method);
  if (!options.scheme.empty()) return typed_schemes("--scheme", options.scheme);
  check_group(options.group);
  if (kbit || rotated) check_bits(options.bits, method);
  if (rotated) return rotated_schemes(options);
  if (kbit) {
    const std::string_view scale = options.absmax.empty() ? "e4m4" : std::string_view(options.absmax);
    return {typed_scheme("--absmax", concat("kbit", options.bits, "-b32-", scale))};
  }
  // AWQ's own format has zero points, and its readers want them.
  const bool asymmetric = options.asymmetry_flag->count() > 0 ? options.asymmetric : method == "awq";
  const std::string group = options.group == "row" ? options.group : "g" + options.group;
  return {typed_scheme("--group",
                       concat("int", options.bits, "-", group, "-", options.scale_type, asymmetric ? "-asym" : ""))};
}

quantize::RotationChoice chosen_rotation(const SchemeOptions& options, std::optional<uint64_t> seed) {
  quantize::RotationChoice choice;
  if (seed != 0) choice.seed = seed;
  choice.shared = options.residual_rotation == "shared";
  choice.residual_seed = choice.seed.value_or(0) + 1000;
  return choice;
}

quantize::Steps chosen_clip(const SchemeOptions& options) {
  return options.clip == "mse" ? quantize::Steps{{quantize::StepKind::clip}} : quantize::Steps{};
}

}  // namespace w4q::app
