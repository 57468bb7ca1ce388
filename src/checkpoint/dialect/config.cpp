#include "checkpoint/dialect/config.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"

namespace w4q::checkpoint {
namespace {

struct Entry {
  const char* key = "";
  const io::Json* value = nullptr;  ///< null: none of the keys is there
};

Entry find_entry(const io::Json& config, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const auto found = config.find(key);
    if (found != config.end() && !found->is_null()) return {key, &*found};
  }
  return {};
}

[[noreturn]] void refuse(const DialectSource& source, const Entry& entry, const std::string& expected) {
  throw Error(ErrorCode::bad_file, concat(source.place, ": \"", entry.key, "\" is ", printable(entry.value->dump()),
                                          ", expected ", expected));
}

}  // namespace

int64_t config_integer(const DialectSource& source, std::initializer_list<const char*> keys, int64_t fallback,
                       int64_t least, int64_t most) {
  const Entry entry = find_entry(source.config, keys);
  if (entry.value == nullptr) return fallback;
  const io::Json& value = *entry.value;
  // Of two integers of different kinds, JSON's own comparison takes the larger for negative.
  const bool fits = value.is_number_unsigned()
                        ? most >= 0 && value.get<uint64_t>() <= static_cast<uint64_t>(most) && value >= least
                        : value.is_number_integer() && value >= least && value <= most;
  if (!fits) refuse(source, entry, concat("an integer from ", least, " to ", most));
  return value.get<int64_t>();
}

bool config_flag(const DialectSource& source, std::initializer_list<const char*> keys, bool fallback) {
  const Entry entry = find_entry(source.config, keys);
  if (entry.value == nullptr) return fallback;
  if (!entry.value->is_boolean()) refuse(source, entry, "true or false");
  return entry.value->get<bool>();
}

std::string config_text(const DialectSource& source, std::initializer_list<const char*> keys,
                        std::string_view fallback) {
  const Entry entry = find_entry(source.config, keys);
  if (entry.value == nullptr) return std::string(fallback);
  if (!entry.value->is_string()) refuse(source, entry, "a text");
  return entry.value->get<std::string>();
}

const io::Json* config_overrides(const DialectSource& source, const char* key) {
  constexpr size_t most = 10'000;
  const auto found = source.config.find(key);
  if (found == source.config.end() || found->is_null()) return nullptr;
  if (!found->is_object() || found->size() > most) {
    throw Error(ErrorCode::bad_file,
                concat(source.place, ": \"", key, "\" is no object of at most ", most, " entries"));
  }
  return &*found;
}

std::string auto_round_words(const DialectSource& source) {
  const std::string method = config_text(source, {"quant_method"}, "");
  if (method != "auto-round" && method != "intel/auto-round") return {};
  if (config_text(source, {"data_type"}, "int") != "int") return {};
  const std::string packing = config_text(source, {"packing_format"}, "auto_round:auto_gptq");
  if (packing.find("awq") != std::string::npos) return "awq";
  return packing.find("gptq") != std::string::npos ? "gptq" : "";
}

int config_group(const DialectSource& source, std::initializer_list<const char*> keys) {
  const int64_t size = config_integer(source, keys, -1, -1, formats::max_dimension);
  return size <= 0 ? formats::whole_row : static_cast<int>(size);
}

int group_size_of(const formats::Scheme& scheme) noexcept {
  return scheme.block == formats::whole_row ? -1 : scheme.block;
}

}  // namespace w4q::checkpoint
