// Every row of every registry has frozen bytes. The other Frozen tests demand them of what they make; this one, of what
// there is: a row that no test makes anything of is found too.
#include <algorithm>
#include <regex>
#include <set>
#include <sstream>

#include "checkpoint/dialect/dialect.h"
#include "formats/gguf_blocks.h"
#include "formats/gguf_forms.h"
#include "laws/frozen.h"
#include "laws/registries.h"
#include "quantize/quantizer_registry.h"

namespace w4q {
namespace {

/// The lines of a golden file as sets of words: between them is white space, or one of `separators`.
class FrozenLines {
 public:
  explicit FrozenLines(std::string file, std::string_view separators = "/") : file_(std::move(file)) {
    const io::Json entries = test::frozen_entries(file_);
    for (const auto& [path, hash] : entries.items()) {
      std::string text = std::regex_replace(path, std::regex("~1"), "/");  // as JSON pointers write it
      for (char& c : text) {
        if (separators.find(c) != std::string_view::npos) c = ' ';
      }
      std::istringstream stream(text);
      for (std::string word; stream >> word;) words_[path].insert(word);
    }
  }

  /// Some line has all of the words.
  void expect(std::string_view registry, const std::vector<std::string>& words) const {
    const bool found = std::ranges::any_of(words_, [&](const auto& line) {
      return std::ranges::all_of(words, [&](const std::string& word) { return line.second.contains(word); });
    });
    EXPECT_TRUE(found) << registry << " " << join(words, " in ") << ": testdata/golden/" << file_
                       << " has no bytes of it. " << test::how_to_freeze
                       << "; if it does not, no Frozen test makes any of it, and one has to";
  }

 private:
  std::string file_;
  std::map<std::string, std::set<std::string>> words_;
};

TEST(FrozenRegistry, SchemesInTheirLayouts) {
  const FrozenLines encodings("w4q_encodings.json"), outputs("w4q_outputs.json");
  for (const auto& [scheme, layout] : test::every_scheme_and_layout()) {
    encodings.expect("scheme", {to_string(scheme), layout});
  }
  for (const auto& layout : repack::layout_registry()) {
    encodings.expect("layout", {std::string(layout.name)});
    outputs.expect("layout", {concat("layout=", layout.name)});
  }
}

TEST(FrozenRegistry, Tables) {
  const FrozenLines encodings("w4q_encodings.json");
  for (const auto& table : formats::codebook_registry()) encodings.expect("table", {std::string(table.name)});
}

TEST(FrozenRegistry, QuantizersInTheirSchemes) {
  for (const auto& row : quantize::quantizer_registry()) {
    const FrozenLines quantized(test::golden_file(row.name));
    for (const auto& scheme : test::every_scheme()) {
      if (row.accepts(scheme)) quantized.expect(row.name, {to_string(scheme)});
    }
  }
}

TEST(FrozenRegistry, Dialects) {
  const FrozenLines tensors("w4q_dialects.json"), outputs("w4q_outputs.json");
  for (const auto& row : checkpoint::dialect_registry()) {
    tensors.expect("dialect", {std::string(row.name)});
    outputs.expect("dialect", {concat("to=", row.name)});
  }
}

TEST(FrozenRegistry, GgufTypes) {
  const FrozenLines blocks("w4q_gguf.json");
  for (const auto* row : test::every_gguf_type()) {
    if (formats::gguf_encodes(row->type)) blocks.expect("GGUF type", {std::string(row->name)});
    if (formats::gguf_decodes(row->type)) blocks.expect("GGUF type", {concat("decoded-", row->name)});
    if (formats::find_gguf_form(row->type) != nullptr) {
      blocks.expect("GGUF type", {concat("searched-", row->name)});
    }
  }
}

/// The ways of w4q_outputs.json have the names of their steps in their own: "awq-clips-int4", "rotate128".
TEST(FrozenRegistry, StepsOfQuantizing) {
  const FrozenLines outputs("w4q_outputs.json", "/-0123456789");
  for (const auto& row : quantize::step_registry()) {
    // Decoding text is left out of what is frozen (frozen_calibrated_test.cpp).
    if (!row.needs_text) outputs.expect("step", {std::string(row.name)});
  }
}

}  // namespace
}  // namespace w4q
