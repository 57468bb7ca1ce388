#include "json_schema.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "core/text.h"

namespace w4q::test {
namespace {

using io::Json;

const Json& file_of(const std::string& name) {
  static std::map<std::string, Json> files;
  const auto found = files.find(name);
  return found != files.end() ? found->second : files.emplace(name, read_schema(name)).first->second;
}

/// The walk over one value.
class Walk {
 public:
  explicit Walk(std::string file) : file_(std::move(file)) {}

  std::vector<std::string> faults;

  void check(const Json& value, const Json& schema, const std::string& at) {
    for (const auto& [keyword, said] : schema.items()) {
      if (keyword == "type") {
        check_type(value, said, at);
      } else if (keyword == "const") {
        if (value != said) fault(at, concat("is ", value.dump(), ", not ", said.dump()));
      } else if (keyword == "enum") {
        if (std::ranges::find(said, value) == said.end())
          fault(at, concat("is ", value.dump(), ", not of ", said.dump()));
      } else if (keyword == "required") {
        for (const auto& name : said) {
          if (value.is_object() && !value.contains(name)) fault(at, concat("lacks ", name.dump()));
        }
      } else if (keyword == "items") {
        for (size_t i = 0; value.is_array() && i < value.size(); ++i) check(value[i], said, concat(at, "[", i, "]"));
      } else if (keyword == "additionalProperties") {
        check_others(value, schema, at);
      } else if (keyword == "properties") {
        check_properties(value, said, at);
      } else if (keyword == "$ref") {
        follow(value, said, at);
      } else if (keyword != "description" && keyword != "title" && keyword != "$schema") {
        fault(at, concat("the schema says \"", keyword, "\", which this check does not know"));
      }
    }
  }

 private:
  void fault(const std::string& at, const std::string& what) { faults.push_back(concat(file_, at, ": ", what)); }

  static bool is_of(const Json& value, const std::string& type) {
    if (type == "number") return value.is_number();
    if (type == "integer") return value.is_number_integer();
    return type == value.type_name();
  }

  void check_type(const Json& value, const Json& said, const std::string& at) {
    const Json types = said.is_array() ? said : Json::array({said});
    if (std::ranges::none_of(types, [&](const Json& type) { return is_of(value, type); })) {
      fault(at, concat("is ", value.dump().substr(0, 60), ", not of type ", said.dump()));
    }
  }

  void check_properties(const Json& value, const Json& said, const std::string& at) {
    for (const auto& [name, schema] : said.items()) {
      if (value.is_object() && value.contains(name)) check(value[name], schema, concat(at, "/", name));
    }
  }

  void check_others(const Json& value, const Json& schema, const std::string& at) {
    if (!value.is_object()) return;
    const Json& said = schema["additionalProperties"];
    for (const auto& [name, item] : value.items()) {
      if (schema.contains("properties") && schema["properties"].contains(name)) continue;
      if (said.is_object()) {
        check(item, said, concat(at, "/", name));
      } else if (said == false) {
        fault(at, concat("has \"", name, "\", which the schema lacks"));
      }
    }
  }

  /// "plan.json#/properties/tensors", "bench.json", "#/properties/perplexity".
  void follow(const Json& value, const std::string& reference, const std::string& at) {
    const size_t hash = std::min(reference.find('#'), reference.size());
    const std::string before = file_;
    if (hash > 0) file_ = std::filesystem::path(reference.substr(0, hash)).stem();
    const std::string path = hash < reference.size() ? reference.substr(hash + 1) : "";
    check(value, file_of(file_).at(Json::json_pointer(path)), at);
    file_ = before;
  }

  std::string file_;
};

}  // namespace

std::vector<std::string> schema_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(W4Q_SCHEMAS)) names.push_back(entry.path().stem());
  std::ranges::sort(names);
  return names;
}

Json read_schema(const std::string& name) {
  return io::read_json(std::filesystem::path(W4Q_SCHEMAS) / (name + ".json"));
}

std::vector<std::string> schema_faults(const Json& json) {
  if (!json.is_object() || !json.contains("schema")) return {"does not name its schema"};
  const std::string name = json["schema"];
  if (!std::ranges::count(schema_names(), name)) return {concat("there is no docs/schema/", name, ".json")};
  Walk walk(name);
  walk.check(json, file_of(name), "");
  return walk.faults;
}

}  // namespace w4q::test
