// What other programs' checkpoints say otherwise than they hold.
#include <algorithm>

#include "audit/faults.h"
#include "checkpoint/dialect/dialect.h"
#include "core/text.h"

namespace w4q::audit {
namespace {

constexpr const char* dialect_group = "other programs' config";

/// Changes the value behind `key` wherever it stands in quantization_config.
bool change_key(io::Json& json, std::string_view key, const std::function<bool(io::Json&)>& how) {
  bool any = false;
  if (json.is_object()) {
    for (auto& [name, value] : json.items()) any = (name == key ? how(value) : change_key(value, key, how)) || any;
  }
  return any;
}

/// In config.json, and in the file that repeats it.
bool change_stated(Subject& s, std::initializer_list<std::string_view> keys,
                   const std::function<bool(io::Json&)>& how) {
  if (!s.foreign()) return false;
  bool any = false;
  for (const auto key : keys) any = change_key(s.stated(), key, how) || any;
  for (const auto file : checkpoint::side_config_files) {
    const auto found = s.copy.files.find(std::string(file));
    if (found == s.copy.files.end()) continue;
    io::Json json = io::parse_json(found->second, file);
    for (const auto key : keys) change_key(json, key, how);
    found->second = json.dump(2);
  }
  return any;
}

bool turn(io::Json& value) {
  if (!value.is_boolean()) return false;
  value = !value.get<bool>();
  return true;
}

bool put(Subject& s, std::string_view key, std::string_view from, std::string_view to) {
  return change_stated(s, {key}, [&](io::Json& value) {
    if (value != from) return false;
    value = to;
    return true;
  });
}

}  // namespace

Faults dialect_faults() {
  return {
      {dialect_group, "another width",
       [](Subject& s) {
         return change_stated(s, {"bits", "num_bits"}, [](io::Json& value) {
           if (!value.is_number()) return false;
           value = value == 4 ? 8 : 4;
           return true;
         });
       }},
      {dialect_group, "another group size",
       [](Subject& s) {
         return change_stated(s, {"group_size"}, [](io::Json& value) {
           if (!value.is_number()) return false;
           value = value == 64 ? 128 : 64;
           return true;
         });
       }},
      {dialect_group, "symmetric and asymmetric are exchanged",
       [](Subject& s) {
         return change_stated(s, {"sym", "symmetric", "zero_point"}, turn);
       }},
      {dialect_group, "act order is said otherwise",
       [](Subject& s) {
         return change_stated(s, {"desc_act", "actorder"}, [](io::Json& value) {
           if (value.is_null()) return value = "group", true;
           if (value.is_string()) return value = nullptr, true;
           return turn(value);
         });
       }},
      {dialect_group, "GPTQ's version 1 is labelled as 2",
       [](Subject& s) { return put(s, "checkpoint_format", "gptq", "gptq_v2"); }},
      {dialect_group, "GPTQ's version 2 is labelled as 1",
       [](Subject& s) { return put(s, "checkpoint_format", "gptq_v2", "gptq"); }},
      {dialect_group, "AWQ's gemm is labelled as gemv", [](Subject& s) { return put(s, "version", "gemm", "gemv"); }},
      {dialect_group, "AWQ's gemv is labelled as gemm", [](Subject& s) { return put(s, "version", "gemv", "gemm"); }},
      {dialect_group, "another program's name",
       [](Subject& s) {
         return change_stated(s, {"quant_method"},
                              [](io::Json& value) { return value = value == "awq" ? "gptq" : "awq", true; });
       }},
      {dialect_group, "NF4 is labelled as FP4 and the other way round",
       [](Subject& s) {
         return change_stated(s, {"bnb_4bit_quant_type"},
                              [](io::Json& value) { return value = value == "nf4" ? "fp4" : "nf4", true; });
       }},
      {dialect_group, "a packed linear is said to be left out",
       [](Subject& s) {
         const std::string linear = s.linear();
         return !linear.empty() &&
                change_stated(s, {"modules_to_not_convert", "ignore", "llm_int8_skip_modules"}, [&](io::Json& value) {
                  if (!value.is_array()) value = io::Json::array();
                  return value.push_back(linear), true;
                });
       }},
      {dialect_group, "what is left out is not mentioned",
       [](Subject& s) {
         return change_stated(s, {"modules_to_not_convert", "ignore", "llm_int8_skip_modules", "dynamic"},
                              [](io::Json& value) {
                                if (value.empty()) return false;
                                value = value.is_array() ? io::Json::array() : io::Json::object();
                                return true;
                              });
       }},
      {dialect_group, "words of another dialect",
       [](Subject& s) {
         return put(s, "format", "pack-quantized", "int-quantized") || put(s, "checkpoint_format", "marlin", "gptq");
       }},
  };
}

}  // namespace w4q::audit
