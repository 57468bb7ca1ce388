#include "io/json.h"

#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "io/files.h"
#include "io/strict_sax.h"
#include "io/system.h"

namespace w4q::io {
namespace {

/// Builds the tree from the leaves: the values of open containers wait on one stack and move into their container when
/// it closes. (Inserting into an ordered_json one by one would search all earlier keys each time.)
class TreeBuilder : public StrictSax {
 public:
  using StrictSax::StrictSax;

  Json take() { return std::move(values_.front()); }

  bool null() { return value(nullptr); }
  bool boolean(bool flag) { return value(flag); }
  bool number_integer(int64_t number) { return value(number); }
  bool number_unsigned(uint64_t number) { return value(number); }
  bool number_float(double number, const std::string& /*text*/) { return value(number); }
  bool string(std::string& text) { return value(std::move(text)); }
  bool key(std::string& text) {
    add_key(text);
    return true;
  }
  bool start_object(size_t /*size*/) { return start(); }
  bool start_array(size_t /*size*/) { return start(); }

  bool end_object() {
    std::vector<std::string> keys = close_object();
    Json object = Json::object();
    auto& members = object.get_ref<Json::object_t&>();
    members.reserve(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      members.emplace_back(std::move(keys[i]), std::move(values_[starts_.back() + i]));
    }
    return end(std::move(object));
  }

  bool end_array() {
    close_array();
    Json array = Json::array();
    auto& elements = array.get_ref<Json::array_t&>();
    elements.reserve(values_.size() - starts_.back());
    for (size_t i = starts_.back(); i < values_.size(); ++i) elements.push_back(std::move(values_[i]));
    return end(std::move(array));
  }

 private:
  bool value(Json&& json) {
    values_.push_back(std::move(json));
    return true;
  }
  bool start() {
    open();
    starts_.push_back(values_.size());
    return true;
  }
  bool end(Json&& container) {
    values_.resize(starts_.back());
    starts_.pop_back();
    return value(std::move(container));
  }

  std::vector<Json> values_;
  std::vector<size_t> starts_;  ///< for each open container, where its values begin
};

}  // namespace

Json parse_json(std::string_view text, std::string_view source) {
  if (text.empty()) {
    throw Error(ErrorCode::bad_file, concat(shown(source), ": is empty"))
        .detail("expected JSON")
        .hint("download or copy the file again");
  }
  TreeBuilder builder(text, source);
  parse_strict(text, source, builder);
  return builder.take();
}

Json read_json(const std::filesystem::path& path, int64_t max_bytes) {
  return parse_json(read_model_file(path, max_bytes), path.native());
}

}  // namespace w4q::io
