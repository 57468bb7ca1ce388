// What says which text an id is, held against the embeddings and against the base's.
#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/text.h"
#include "model/parameters.h"
#include "verify/rungs.h"
#include "verify/tokenizer/files.h"

namespace w4q::verify {
namespace {

namespace fs = std::filesystem;
using tokenizer::Tokenizer;

constexpr int64_t window = 32;     // tokens whose text is encoded as one
constexpr size_t most_faults = 5;  // of ids: a tokenizer that is another one differs in all

/// Nothing where there is none, or one of a kind that w4q does not have. Throws bad_file.
std::optional<Tokenizer> open_tokenizer(const fs::path& folder) try {
  if (!fs::exists(folder / "tokenizer.json")) return std::nullopt;
  return Tokenizer::open(folder);
} catch (const Error& error) {
  if (error.code() != ErrorCode::unsupported) throw;
  return std::nullopt;
}

std::optional<std::string> text_of(const Tokenizer& tokenizer, int64_t id, bool skip_special = false) try {
  const auto narrow = static_cast<int32_t>(id);
  return tokenizer.decode({&narrow, 1}, skip_special);
} catch (const Error&) {
  return std::nullopt;
}

std::string shown(const std::optional<std::string>& text) {
  return text ? concat("\"", printable(*text), "\"") : "no token";
}

/// The id of a special token by the name that tokenizer_config.json gives it.
std::optional<int32_t> special_id(const Tokenizer& tokenizer, const io::Json& config, const char* key) {
  io::Json token = config.value(key, io::Json());
  if (token.is_object()) token = token.value("content", io::Json());
  return token.is_string() ? tokenizer.token_to_id(token.get<std::string>()) : std::nullopt;
}

/// Merges as pairs, in either way of writing them.
std::vector<std::string> merges_of(const fs::path& folder) {
  const io::Json json = read_object(folder / "tokenizer.json");
  const io::Json model = json.value("model", io::Json::object());
  std::vector<std::string> merges;
  for (const io::Json& merge : model.value("merges", io::Json::array())) {
    const bool pair = merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
    merges.push_back(pair                ? concat(merge[0].get<std::string>(), " ", merge[1].get<std::string>())
                     : merge.is_string() ? merge.get<std::string>()
                                         : merge.dump());
  }
  return merges;
}

/// A token may be reached by several ways, so that texts do not tell all of them.
void compare_merges(const CheckOptions& options, std::vector<std::string>& faults) {
  const auto ours = merges_of(options.model), theirs = merges_of(options.base);
  const auto [found, expected] = std::ranges::mismatch(ours, theirs);
  if (found == ours.end() && expected == theirs.end()) return;
  const auto shown_merge = [](const auto& at, const auto& all) {
    return at == all.end() ? std::string("missing") : concat("\"", printable(*at), "\"");
  };
  faults.push_back(concat("tokenizer.json: merge ", found - ours.begin(), " is ", shown_merge(found, ours),
                          ", in the base ", shown_merge(expected, theirs)));
}

/// Of an architecture that is not known, what its table of embeddings has; no limit where it has none.
int64_t embedding_rows(const model::OpenedModel& model) {
  if (model.config.architecture != nullptr) return model.config.vocab_size;
  const auto parameters = model::parameters(model);
  const auto table = std::ranges::find_if(parameters, [](const model::Parameter& parameter) {
    return parameter.shape.size() == 2 && model::is_embedding(model::module_path(parameter.name));
  });
  return table == parameters.end() ? std::numeric_limits<int64_t>::max() : table->shape[0];
}

class TokenizerCheck {
 public:
  TokenizerCheck(CheckContext& context, const Tokenizer& ours) : context_(context), ours_(ours) {}

  Check run(const std::optional<Tokenizer>& theirs) {
    look_at_ids();
    look_at_special_tokens();
    if (theirs) compare_ids(*theirs), compare_encoding(*theirs);
    Check check{"tokenizer", faults_.empty(), {}, std::move(faults_)};
    check.detail = concat(ours_.vocab_size(), " ids", theirs ? " are those of the base, and so is what encodes" : "");
    if (!check.passed) check.detail = concat(check.faults.size(), " faults");
    return check;
  }

 private:
  /// Special tokens beyond the embeddings, for padding, are never fed to a model.
  void look_at_ids() {
    const int64_t rows = embedding_rows(context_.candidate());
    for (int64_t id = rows; id < ours_.vocab_size(); ++id) {
      const auto text = text_of(ours_, id, true);
      if (!text || text->empty()) continue;
      faults_.push_back(
          concat("tokenizer.json: id ", id, " is ", shown(text), ", the embeddings have ", rows, " rows"));
      return;
    }
  }

  void look_at_special_tokens() {
    const io::Json names = read_object(context_.options().model / "tokenizer_config.json");
    const io::Json& config = context_.headers().config;
    const auto bos = special_id(ours_, names, "bos_token"), eos = special_id(ours_, names, "eos_token");
    if (!bos || !eos || *bos == *eos) return;
    if (config.value("bos_token_id", io::Json()) == *eos && config.value("eos_token_id", io::Json()) == *bos) {
      faults_.push_back(concat("config.json: bos_token_id is ", *eos, " and eos_token_id ", *bos,
                               ", by tokenizer_config.json and tokenizer.json the other way round"));
    }
  }

  void compare_ids(const Tokenizer& theirs) {
    for (int64_t id = 0; id < std::max(ours_.vocab_size(), theirs.vocab_size()); ++id) {
      if (id % 4096 == 0) check_interrupt();
      const auto found = text_of(ours_, id), expected = text_of(theirs, id);
      if (found == expected) continue;
      faults_.push_back(concat("tokenizer.json: id ", id, " is ", shown(found), ", in the base ", shown(expected)));
      if (faults_.size() >= most_faults) return;
    }
  }

  /// Texts of single tokens need all merges that lead to them; texts of several the way in which words are cut.
  void compare_encoding(const Tokenizer& theirs) {
    std::string several;
    for (int64_t id = 0; id < theirs.vocab_size() && faults_.size() < most_faults; ++id) {
      const std::string one = text_of(theirs, id, true).value_or("");
      several += one;
      expect_encoding(theirs, one, false);
      if (id % window == window - 1) {
        check_interrupt();
        expect_encoding(theirs, std::exchange(several, {}), true);
      }
    }
  }

  void expect_encoding(const Tokenizer& theirs, const std::string& text, bool special) {
    const auto found = ours_.encode(text, special), expected = theirs.encode(text, special);
    if (found == expected) return;
    faults_.push_back(concat("tokenizer.json: \"", printable(text), "\" becomes ", found.size(),
                             " ids, with the base's ", expected.size(),
                             found.size() == expected.size() ? " others" : ""));
  }

  CheckContext& context_;
  const Tokenizer& ours_;
  std::vector<std::string> faults_;
};

/// Keys that both files have and that name tokens.
void compare_keys(const CheckOptions& options, const char* file, std::initializer_list<const char*> keys,
                  std::vector<std::string>& faults) {
  const io::Json ours = read_object(options.model / file), theirs = read_object(options.base / file);
  for (const char* key : keys) {
    const auto found = ours.find(key), expected = theirs.find(key);
    if (found == ours.end() || expected == theirs.end() || *found == *expected) continue;
    faults.push_back(
        concat(file, ": ", key, " is ", printable(found->dump()), ", in the base ", printable(expected->dump())));
  }
}

void run_tokenizer(CheckContext& context, Findings& findings) {
  const CheckOptions& options = context.options();
  const auto broken = [&](std::vector<std::string> faults) {
    findings.checks.add({"tokenizer", false, concat(faults.size(), " faults"), std::move(faults)});
  };
  try {
    const auto ours = open_tokenizer(options.model);
    const auto theirs = options.has_base() ? open_tokenizer(options.base) : std::nullopt;
    Check check{"tokenizer", true, {}, {}};
    if (ours) check = TokenizerCheck(context, *ours).run(theirs);
    if (ours && theirs) compare_merges(options, check.faults);
    const bool encodes = ours || !fs::exists(options.model / "tokenizer.json");
    const io::Json& config = context.headers().config;
    for (auto& fault : contradictions_of_tokenizer(options.model, config, encodes)) {
      check.faults.push_back(std::move(fault));
    }
    for (auto& fault : contradictions_of_generation(options.model, config, embedding_rows(context.candidate()))) {
      check.faults.push_back(std::move(fault));
    }
    const bool packed = !context.candidate().folder.quantization.linears.empty();
    if (theirs && packed && !fs::exists(options.model / "tokenizer.json") &&
        !fs::exists(options.model / "tokenizer.model")) {
      check.faults.emplace_back("tokenizer.json is missing, the base has one");
    }
    if (options.has_base()) {
      compare_keys(options, "generation_config.json", {"bos_token_id", "eos_token_id"}, check.faults);
      compare_keys(options, "tokenizer_config.json", {"bos_token", "eos_token"}, check.faults);
    }
    if (!check.faults.empty()) return broken(std::move(check.faults));
    if (ours) findings.checks.add(std::move(check));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::bad_file) throw;
    broken({error.summary()});
  }
}

}  // namespace

CheckRow tokenizer_check() {
  return {.name = "tokenizer",
          .help = "tokenizer.json can be read, its ids have embeddings, and it makes the same of a text as the base's",
          .aside = true,
          .run = run_tokenizer};
}

}  // namespace w4q::verify
