// What stands beside the weights and says what ids mean.
#include <iterator>

#include "audit/faults.h"
#include "core/text.h"

namespace w4q::audit {
namespace {

constexpr const char* tokenizer_group = "tokenizer";

bool edit_json(Subject& s, const std::string& file, const std::function<bool(io::Json&)>& how) {
  const auto found = s.copy.files.find(file);
  if (found == s.copy.files.end()) return false;
  io::Json json = io::parse_json(found->second, file);
  if (!how(json)) return false;
  found->second = json.dump();
  return true;
}

bool edit_tokenizer(Subject& s, const std::function<bool(io::Json&)>& how) {
  return edit_json(s, "tokenizer.json", how);
}

}  // namespace

Faults tokenizer_faults() {
  return {
      {tokenizer_group, "a merge is missing",
       [](Subject& s) {
         return edit_tokenizer(s, [&](io::Json& json) {
           auto& merges = json["model"]["merges"];
           merges.erase(s.below(merges.size()));
           return true;
         });
       }},
      {tokenizer_group, "two tokens are exchanged",
       [](Subject& s) {
         return edit_tokenizer(s, [&](io::Json& json) {
           auto& vocabulary = json["model"]["vocab"];
           const auto a = std::next(vocabulary.begin(), static_cast<int64_t>(s.below(400))), b = std::next(a, 300);
           std::swap(a.value(), b.value());
           return true;
         });
       }},
      {tokenizer_group, "ids are moved by one",
       [](Subject& s) {
         return edit_tokenizer(s, [](io::Json& json) {
           for (auto& [token, id] : json["model"]["vocab"].items()) id = id.get<int64_t>() + 1;
           return true;
         });
       }},
      {tokenizer_group, "a special token has another id",
       [](Subject& s) {
         return edit_tokenizer(s, [](io::Json& json) {
           json["added_tokens"][0]["id"] = 1021;
           return true;
         });
       }},
      {tokenizer_group, "the special tokens are exchanged",
       [](Subject& s) {
         return edit_tokenizer(s, [](io::Json& json) {
           std::swap(json["added_tokens"][0]["id"], json["added_tokens"][1]["id"]);
           return true;
         });
       }},
      {tokenizer_group, "the pre-tokenizer is missing",
       [](Subject& s) {
         return edit_tokenizer(s, [](io::Json& json) {
           json["pre_tokenizer"] = nullptr;
           return true;
         });
       }},
      {tokenizer_group, "it has more tokens than the model",
       [](Subject& s) {
         return edit_tokenizer(s, [](io::Json& json) {
           json["model"]["vocab"]["anewtoken"] = 1500;
           return true;
         });
       }},
      {tokenizer_group, "it is cut off",
       [](Subject& s) {
         auto& text = s.copy.files["tokenizer.json"];
         text.resize(text.size() / 2);
         return true;
       }},
      {tokenizer_group, "it is missing", [](Subject& s) { return s.copy.files.erase("tokenizer.json") == 1; }},
      {tokenizer_group, "generation_config.json has another eos",
       [](Subject& s) {
         return edit_json(s, "generation_config.json", [](io::Json& json) {
           json["eos_token_id"] = 5;
           return true;
         });
       }},
      {tokenizer_group, "tokenizer_config.json has another bos",
       [](Subject& s) {
         return edit_json(s, "tokenizer_config.json", [](io::Json& json) {
           json["bos_token"] = json["eos_token"];
           return true;
         });
       }},
  };
}

}  // namespace w4q::audit
