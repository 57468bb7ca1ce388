#include "verify/contents/contents.h"

#include <algorithm>

#include "checkpoint/affine_integers.h"
#include "checkpoint/low_precision.h"
#include "core/error.h"
#include "core/text.h"
#include "model/config.h"
#include "model/parameters.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

using Kind = StoredLinear::Kind;

/// Keys under which programs list what stays in 16 bit.
constexpr const char* ignore_keys[] = {
    "ignore", "exclude", "exclude_modules", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules"};

void append_texts(const io::Json& object, const char* key, std::vector<std::string>& texts) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array()) return;
  for (const auto& entry : *found) {
    if (entry.is_string()) texts.push_back(entry.get<std::string>());
  }
}

/// AutoRound gives modules settings of their own, by paths or expressions: 16 bits leave out.
void append_wide(const io::Json& quantization, std::vector<std::string>& texts) {
  const auto own = quantization.find("extra_config");
  if (own == quantization.end() || !own->is_object()) return;
  for (const auto& [module, setting] : own->items()) {
    if (!setting.is_object() || !setting.contains("bits")) continue;
    if (!setting["bits"].is_number_integer() || setting["bits"] < 16) continue;
    const bool pattern = module.find_first_of("\\^$|()[]+*?") != std::string::npos;
    texts.push_back(pattern ? concat("re:", module) : module);
  }
}

/// ModelOpt's mixtures of formats name every linear that has one.
void append_layers(const io::Json& quantization, std::vector<std::string>& texts) {
  const auto layers = quantization.find("quantized_layers");
  if (layers == quantization.end() || !layers->is_object()) return;
  for (const auto& [module, setting] : layers->items()) texts.push_back(module);
}

std::string without(const std::string& name, std::string_view suffix) {
  return name.substr(0, name.size() - suffix.size());
}

/// A pattern of a list as a regular expression; empty: it is a path.
std::string expression(const std::string& entry, bool globs) {
  if (entry.starts_with("re:")) return entry;
  if (!globs || entry.find('*') == std::string::npos) return {};
  std::string text = "re:";
  for (const char c : entry) {
    if (c == '*') {
      text += ".*";
    } else {
      if (c == '.') text += '\\';
      text += c;
    }
  }
  return text;
}

}  // namespace

NameList::NameList(const std::vector<std::string>& entries, bool globs) {
  for (const auto& entry : entries) {
    if (const std::string pattern = expression(entry, globs); !pattern.empty()) {
      patterns_.emplace_back(entry, checkpoint::CtTarget(pattern, "config.json"));
    } else if (!entry.empty()) {
      paths_.insert(entry);
    }
  }
}

std::string NameList::entry_for(std::string_view module) const {
  for (size_t begin = 0; begin < module.size() && !paths_.empty();) {
    const std::string_view rest = module.substr(begin);
    for (size_t end = 0; end != std::string_view::npos;) {
      end = rest.find('.', end + 1);
      if (const auto found = paths_.find(rest.substr(0, end)); found != paths_.end()) return *found;
    }
    const size_t dot = rest.find('.');
    if (dot == std::string_view::npos) break;
    begin += dot + 1;
  }
  for (const auto& [entry, target] : patterns_) {
    if (target.rank(module) > 0) return entry;
  }
  return {};
}

StoredContents::StoredContents(const checkpoint::Folder& folder) : folder_(folder) {
  if (const auto stated = checkpoint::stated_quantization(folder.config, folder.path)) quantization_ = stated->json;
  small_floats_ = checkpoint::is_low_precision(quantization_);
  std::vector<std::string> targets;
  if (quantization_.is_object()) {
    for (const char* key : ignore_keys) append_texts(quantization_, key, ignored_);
    append_wide(quantization_, ignored_);
    append_layers(quantization_, targets);
    if (const auto groups = quantization_.find("config_groups"); groups != quantization_.end() && groups->is_object()) {
      for (const auto& [name, group] : groups->items()) {
        if (group.is_object()) append_texts(group, "targets", targets);
      }
    }
  }
  globs_ = !has_method("compressed-tensors");
  left_out_.emplace(ignored_, globs_);
  if (!targets.empty() && std::ranges::find(targets, "Linear") == targets.end()) targets_.emplace(targets, globs_);
  for (const auto& [name, info] : tensors().tensors()) add(name, info);
  find_carried();
}

void StoredContents::find_carried() {
  try {
    const auto config = model::read_any_config(folder_.config, folder_.path);
    if (config.architecture == nullptr) return;
    known_ = true;
    for (const auto& linear : linears_) {
      if (!model::reason_to_carry(config, linear.path + ".weight").empty()) carried_.insert(linear.path);
    }
  } catch (const Error& error) {  // what cannot be read, other rungs say
    if (error.code() == ErrorCode::internal) throw;
  }
}

int64_t StoredContents::mlx_group(const std::string& module) const {
  if (!checkpoint::states_mlx(quantization_)) return 0;
  const auto own = quantization_.find(module);
  const io::Json& setting = own != quantization_.end() && own->is_object() ? *own : quantization_;
  const io::Json group = setting.value("group_size", io::Json(0));
  constexpr int64_t largest = int64_t{1} << 20;
  const int64_t size = group.is_number_integer() ? group.get<int64_t>() : 0;
  return size <= largest ? size : 0;
}

bool StoredContents::is_left_by_program(const StoredLinear& linear) const {
  if (const int64_t group = mlx_group(linear.path); group > 0) return linear.k % group != 0;
  if (!has_method("bitsandbytes") || linear.path.find(".experts.") == std::string::npos) return false;
  return std::ranges::none_of(linears_, [](const StoredLinear& other) {
    return other.kind != Kind::plain && other.path.find(".experts.") != std::string::npos;
  });
}

std::string StoredContents::scales_beside(const std::string& name) const {
  const auto plain = std::string(model::module_path(name)) + ".scale";  // DeepSeek-V4's
  for (const std::string& scales : {name + "_scale_inv", name + "_scale", plain}) {
    if (tensors().contains(scales)) return scales;
  }
  return {};
}

bool StoredContents::holds_pairs(const std::string& name, const io::TensorInfo& info) const {
  if (info.dtype != DType::i8) return info.dtype == DType::u8;
  const std::string scales = scales_beside(name);
  return !scales.empty() && tensors().at(scales).dtype == DType::f8_e8m0;
}

void StoredContents::add(const std::string& name, const io::TensorInfo& info) {
  const auto has = [&](const std::string& other) { return tensors().contains(other) ? other : std::string(); };
  const Shape& shape = info.shape;
  StoredLinear linear;
  linear.codes = name;
  if (name.ends_with(".weight_packed") && shape.size() == 2) {
    linear.path = without(name, ".weight_packed");
    linear.scales = has(linear.path + ".weight_scale");
    linear.factor = has(linear.path + ".weight_global_scale");
    const bool bytes = info.dtype == DType::u8;
    const bool nvfp4 =
        !linear.factor.empty() || (!linear.scales.empty() && tensors().at(linear.scales).dtype == DType::f8_e4m3);
    linear.kind = !bytes ? Kind::integer : nvfp4 ? Kind::nvfp4 : Kind::mxfp4;
    linear.n = shape[0], linear.k = shape[1] * (bytes ? 2 : 8);
  } else if (info.dtype == DType::u8 && shape.size() == 3 && tensors().contains(name + "_weight_scale_2")) {
    linear.path = name;  // ModelOpt's, whose scales do not lie over it: it was not turned (checkpoint/turned_stacks.h)
    linear.kind = Kind::nvfp4;
    linear.scales = has(name + "_weight_scale");
    linear.factor = name + "_weight_scale_2";
    linear.experts = shape[0], linear.n = shape[2], linear.k = shape[1] * 2;
  } else if (info.dtype == DType::f8_e4m3 && !name.ends_with("_scale") &&
             ((name.ends_with(".weight") && shape.size() == 2) || shape.size() == 3)) {
    linear.path = model::module_path(name);
    linear.kind = Kind::fp8;
    linear.scales = scales_beside(name);
    if (shape.size() == 3) linear.experts = shape[0];
    linear.n = shape[shape.size() - 2], linear.k = shape.back();
  } else if (name.ends_with(".weight") && info.dtype == DType::u32 &&
             tensors().contains(without(name, ".weight") + ".scales")) {  // MLX
    linear.path = without(name, ".weight");
    linear.kind = Kind::integer;
    if (shape.size() == 3) linear.experts = shape[0];
    linear.n = shape.size() < 2 ? 0 : shape[shape.size() - 2];
    const Shape& scales = tensors().at(linear.path + ".scales").shape;
    linear.k = scales.empty() ? 0 : scales.back() * mlx_group(linear.path);
  } else if (checkpoint::states_int4_awq(quantization_) && name.ends_with(".weight") && info.dtype == DType::u8 &&
             shape.size() == 2) {
    linear.path = without(name, ".weight");
    linear.kind = Kind::integer;
    linear.scales = scales_beside(name);
    linear.n = shape[0] * 2, linear.k = shape[1];
  } else if (small_floats_ && name.ends_with(".weight") && shape.size() == 2 && holds_pairs(name, info)) {
    linear.path = without(name, ".weight");
    linear.scales = scales_beside(name);
    linear.factor = has(name + "_scale_2");
    const bool powers = !linear.scales.empty() && tensors().at(linear.scales).dtype != DType::f8_e4m3;
    linear.kind = powers && linear.factor.empty() ? Kind::mxfp4 : Kind::nvfp4;
    linear.n = shape[0], linear.k = shape[1] * 2;
  } else if (info.dtype == DType::u8 && name.ends_with("_blocks") && shape.size() == 4) {
    linear.path = without(name, "_blocks");
    linear.kind = Kind::mxfp4;
    linear.scales = has(linear.path + "_scales");
    linear.experts = shape[0], linear.n = shape[1], linear.k = shape[2] * shape[3] * 2;
  } else if (info.dtype == DType::i8 && shape.size() == 2 && name.ends_with(".weight")) {
    linear.path = without(name, ".weight");
    linear.kind = Kind::integer;
    linear.scales = has(name + "_scale");
    linear.n = shape[0], linear.k = shape[1];
  } else if (name.ends_with(".qweight") || name.ends_with(".trellis")) {
    linear.path = without(name, name.ends_with(".qweight") ? ".qweight" : ".trellis");
    linear.kind = Kind::integer;
  } else if (name.ends_with("_scale") || name.ends_with("_scale_inv") || name.ends_with("_scales") ||
             (mlx_group({}) > 0 && (name.ends_with(".scales") || name.ends_with(".biases")))) {
    return;  // of stacks, whose scales have as many dimensions
  } else if (is_weight_dtype(info.dtype) && (shape.size() == 3 || (shape.size() == 2 && name.ends_with(".weight")))) {
    linear.path = model::module_path(name);
    if (shape.size() == 3) linear.experts = shape[0];
    linear.n = shape[shape.size() - 2], linear.k = shape.back();
  } else {
    return;
  }
  places_.emplace(linear.path, linears_.size());
  linears_.push_back(std::move(linear));
}

const StoredLinear* StoredContents::find(std::string_view path) const {
  const auto found = places_.find(path);
  return found == places_.end() ? nullptr : &linears_[found->second];
}

const io::Json& StoredContents::stated(std::initializer_list<const char*> keys) const {
  static const io::Json nothing;
  const io::Json& config = folder_.config;
  if (!config.is_object()) return nothing;
  const auto text = config.find("text_config");
  const io::Json* const inner = text != config.end() && text->is_object() ? &*text : nullptr;
  for (const io::Json* object : {inner, &config}) {
    for (const char* key : keys) {
      if (object == nullptr) continue;
      if (const auto found = object->find(key); found != object->end() && !found->is_null()) return *found;
    }
  }
  return nothing;
}

int64_t StoredContents::number(std::initializer_list<const char*> keys) const {
  const io::Json& value = stated(keys);
  return value.is_number_integer() ? value.get<int64_t>() : 0;
}

std::string StoredContents::left_out_by(std::string_view module) const {
  if (std::string entry = left_out_->entry_for(module); !entry.empty()) return entry;
  const bool named = !targets_ || !targets_->entry_for(module).empty();
  return named ? std::string() : "config_groups, whose targets do not name it";
}

bool StoredContents::has_method(std::string_view method) const {
  return quantization_.is_object() && quantization_.value("quant_method", io::Json()) == method;
}

void ContentsFindings::fault(std::string_view subject, const std::string& what) {
  faults.push_back(concat(printable(subject), " ", what));
}

std::optional<Check> check_contents(const checkpoint::Folder& headers, std::vector<std::string>* notes) {
  const StoredContents contents(headers);
  if (contents.has_method("w4q")) return std::nullopt;
  ContentsFindings findings;
  for (const auto rules : {name_rules(), value_rules(), peer_rules(), claim_rules(), size_rules(), layer_rules(),
                           module_rules(), config_rules(), setting_rules()}) {
    for (const ContentsRule& rule : rules) {
      if (!rule.small_floats || contents.small_floats()) rule.run(contents, findings);
    }
  }
  if (notes != nullptr) *notes = findings.notes;
  Check check{"contents", findings.faults.empty(), {}, std::move(findings.faults)};
  const auto packed = std::ranges::count_if(contents.linears(), [](const auto& l) { return l.kind != Kind::plain; });
  check.detail =
      concat(packed, " of ", contents.linears().size(), " matrices are packed",
             contents.small_floats() ? ", by their names, shapes and scales" : ", by their names and shapes");
  return check;
}

void excuse_as_in_base(Check& check, const checkpoint::Folder& base, std::vector<std::string>& notes) {
  const StoredContents contents(base);
  ContentsFindings findings;
  for (const auto rules : {name_rules(), layer_rules()}) {
    for (const ContentsRule& rule : rules) {
      if (!rule.small_floats) rule.run(contents, findings);
    }
  }
  const auto of_config = [&](const std::string& fault) {
    const bool promised = fault.starts_with("config.json ") || fault.starts_with("the vision tower ") ||
                          fault.starts_with("layers for further tokens ");
    return promised && std::ranges::count(findings.faults, fault) > 0;
  };
  for (const std::string& fault : check.faults) {
    if (of_config(fault)) notes.push_back(concat(fault, ": nor is it in the base"));
  }
  std::erase_if(check.faults, of_config);
  check.passed = check.faults.empty();
}

CheckRow contents_check() {
  return {.name = "contents",
          .help = "what config.json promises is there, and scales of small floats belong to their codes",
          .run = [](CheckContext& context, Findings& findings) {
            std::vector<std::string> notes;
            const auto stated = checkpoint::stated_quantization(context.headers().config, context.headers().path);
            // What cannot be read at all is no fault of what is stored, and everything below would take it for one.
            if (stated) checkpoint::refuse_transforms_at_run_time(*stated);
            auto check = check_contents(context.headers(), &notes);
            if (!check) return;
            if (!check->passed && context.options().has_base())
              excuse_as_in_base(*check, context.base_headers(), notes);
            for (const auto& note : notes) findings.note(note);
            // Of plain weights it speaks where something is missing only.
            if (check->passed && !stated) return;
            if (!check->passed) check->detail += concat("; ", check->faults.size(), " faults");
            findings.checks.add(std::move(*check));
          }};
}

}  // namespace w4q::verify
