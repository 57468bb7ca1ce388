// What the files beside tokenizer.json name and number: tokens that are not there, that have other ids, that lie beyond the
// embeddings, and a chat template that cannot be read.
#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "chat/chat_template.h"
#include "core/error.h"
#include "core/text.h"
#include "io/files.h"
#include "verify/tokenizer/files.h"

namespace w4q::verify {
namespace {

namespace fs = std::filesystem;
using io::Json;

std::vector<int64_t> ids_in(const Json& stated) {
  std::vector<int64_t> ids;
  for (const Json& id : stated.is_array() ? stated : Json::array({stated})) {
    if (id.is_number_integer()) ids.push_back(id.get<int64_t>());
  }
  return ids;
}

/// The ends that config.json and generation_config.json state.
std::vector<int64_t> stated_ends(const fs::path& folder, const Json& config) {
  std::vector<int64_t> ends = ids_in(member(config, "eos_token_id"));
  for (const int64_t id : ids_in(member(member(config, "text_config"), "eos_token_id"))) ends.push_back(id);
  const Json generation = read_object(folder / "generation_config.json");
  for (const int64_t id : ids_in(member(generation, "eos_token_id"))) ends.push_back(id);
  return ends;
}

/// Tokens by name in the files that name them.
void named_tokens(const fs::path& folder, const TokenTable& table, std::vector<std::string>& faults) {
  const Json names = read_object(folder / "tokenizer_config.json");
  if (!member(names, "auto_map").is_null()) return;  // a class of its own may make them
  const Json& own = member(names, "added_tokens_decoder");
  const Json added = read_object(folder / "added_tokens.json");
  const auto is_added = [&](const std::string& text) {
    return !member(added, text.c_str()).is_null() ||
           (own.is_object() && std::ranges::any_of(own, [&](const Json& token) { return token_text(token) == text; }));
  };
  std::set<std::string> said;
  for (const char* file : {"tokenizer_config.json", "special_tokens_map.json"}) {
    const Json read = read_object(folder / file);
    for (const char* key : {"bos_token", "eos_token", "pad_token"}) {
      const auto text = token_text(member(read, key));
      if (!text || text->empty() || table.ids.contains(*text) || is_added(*text) || !said.insert(*text).second)
        continue;
      faults.push_back(concat(file, ": ", key, " is \"", printable(*text), "\", which is no token of tokenizer.json"));
    }
  }
}

/// One text, one id, whichever file says so.
void expect_same(const char* file, const std::string& text, int64_t id, const TokenTable& table,
                 std::vector<std::string>& faults) {
  const auto by_text = table.ids.find(text);
  const auto by_id = table.texts.find(id);
  if (by_text != table.ids.end() && by_text->second != id) {
    faults.push_back(
        concat(file, ": \"", printable(text), "\" is ", id, ", in tokenizer.json it is ", by_text->second));
  } else if (by_text == table.ids.end() && by_id != table.texts.end() && by_id->second != text) {
    faults.push_back(
        concat(file, ": ", id, " is \"", printable(text), "\", in tokenizer.json \"", printable(by_id->second), "\""));
  }
}

void numbered_tokens(const fs::path& folder, const TokenTable& table, std::vector<std::string>& faults) {
  const Json names = read_object(folder / "tokenizer_config.json");
  const size_t before = faults.size();
  if (const Json& decoder = member(names, "added_tokens_decoder"); decoder.is_object()) {
    for (const auto& [key, token] : decoder.items()) {
      int64_t id = 0;
      const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
      const auto text = token_text(token);
      if (error != std::errc() || end != key.data() + key.size() || !text || faults.size() > before) continue;
      expect_same("tokenizer_config.json", *text, id, table, faults);
    }
  }
  const Json added = read_object(folder / "added_tokens.json");
  const size_t then = faults.size();
  for (const auto& [text, id] : added.items()) {
    if (id.is_number_integer() && faults.size() == then)
      expect_same("added_tokens.json", text, id.get<int64_t>(), table, faults);
  }
}

/// What a text ends with is a token, whichever of several it is.
void ends_are_tokens(const fs::path& folder, const Json& config, const TokenTable& table,
                     std::vector<std::string>& faults) {
  const auto ends = stated_ends(folder, config);
  if (ends.empty() || table.texts.empty()) return;
  const bool any = std::ranges::any_of(ends, [&](int64_t id) { return table.texts.contains(id); });
  if (any) return;
  faults.push_back(concat("config.json: eos_token_id is ", ends.front(), ", which is no token of tokenizer.json (",
                          table.texts.size(), " tokens, the last is ", table.texts.rbegin()->first, ")"));
}

// ---- without a table ----

/// Programs that gather embeddings of it stop, or read beyond the table; −1 stands for none.
void ids_have_rows(const char* file, const Json& stated, int64_t rows, std::vector<std::string>& faults) {
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    const auto ids = ids_in(member(stated, key));
    for (const int64_t id : ids) {
      const bool none = id == -1 && key != std::string_view("eos_token_id");
      if (none || (id >= 0 && id < rows)) continue;
      faults.push_back(
          concat(file, ": ", key, " is ", id,
                 id < 0 ? ": no token has such an id" : concat(", and the embeddings have ", rows, " rows")));
      break;
    }
  }
  const Json& ends = member(stated, "eos_token_id");
  if (ends.is_array() && ends.empty()) faults.push_back(concat(file, ": eos_token_id is empty: nothing ends a text"));
}

/// Limits that all programs set to what is drawn from.
struct Sampling {
  const char* key;
  double least, most;
  const char* range;
};
constexpr double no_limit = std::numeric_limits<double>::max();
constexpr std::array samplings = {Sampling{"temperature", 0, no_limit, "0 and more"},
                                  Sampling{"top_p", 0, 1, "from 0 to 1"}, Sampling{"min_p", 0, 1, "from 0 to 1"},
                                  Sampling{"top_k", -1, no_limit, "0 and more, or -1 for all"},
                                  Sampling{"repetition_penalty", 1e-6, no_limit, "above 0"}};

void sampling(const Json& generation, std::vector<std::string>& faults) {
  for (const auto& [key, least, most, range] : samplings) {
    const Json& stated = member(generation, key);
    if (!stated.is_number()) continue;
    const double value = stated.get<double>();
    if (value >= least && value <= most) continue;
    faults.push_back(
        concat("generation_config.json: ", key, " is ", stated.dump(), ", expected ", range, ": programs refuse it"));
  }
  const Json& temperature = member(generation, "temperature");
  if (temperature.is_number() && temperature == 0 && member(generation, "do_sample") == true)
    faults.push_back("generation_config.json: temperature is 0 beside do_sample: programs refuse to draw so");
}

/// Texts do not end with what they begin with where config.json has a token for each.
void ends_with_begin(const Json& config, const Json& generation, std::vector<std::string>& faults) {
  const auto begins = ids_in(member(config, "bos_token_id")), ends = ids_in(member(config, "eos_token_id"));
  const auto stated = ids_in(member(generation, "eos_token_id"));
  if (begins.size() != 1 || ends.empty() || stated != begins) return;
  if (ids_in(member(generation, "bos_token_id")) == ends) return;  // config.json has both the other way round
  if (std::ranges::find(ends, begins.front()) != ends.end()) return;
  faults.push_back(concat("generation_config.json: eos_token_id is ", begins.front(),
                          ", which is config.json's bos_token_id; by config.json texts end with ", ends.front()));
}

bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == std::string_view::npos; }

void chat_template(const fs::path& folder, std::vector<std::string>& faults) {
  const fs::path file = folder / "chat_template.jinja";
  const bool stands = fs::is_regular_file(file);
  if (stands && fs::file_size(file) < 4096 && is_blank(io::read_file(file))) {
    faults.emplace_back("chat_template.jinja is empty: every conversation becomes nothing");
    return;
  }
  const Json names = read_object(folder / "tokenizer_config.json");
  if (!stands && member(names, "chat_template").is_null()) return;
  try {
    static_cast<void>(chat::ChatTemplate::open(folder));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::bad_file) faults.push_back(error.summary());
    if (error.code() == ErrorCode::internal) throw;
  }
}

}  // namespace

void add_contradictions_of_names(const fs::path& folder, const Json& config, const TokenTable& table,
                                 std::vector<std::string>& faults) {
  if (table.ids.empty()) return;
  named_tokens(folder, table, faults);
  numbered_tokens(folder, table, faults);
  ends_are_tokens(folder, config, table, faults);
}

std::vector<std::string> contradictions_of_generation(const fs::path& folder, const Json& config, int64_t rows) {
  std::vector<std::string> faults;
  const Json generation = read_object(folder / "generation_config.json");
  const Json& text = member(config, "text_config");
  ids_have_rows("config.json", text.is_object() ? text : config, rows, faults);
  ids_have_rows("generation_config.json", generation, rows, faults);
  sampling(generation, faults);
  ends_with_begin(config, generation, faults);
  chat_template(folder, faults);
  return faults;
}

}  // namespace w4q::verify
