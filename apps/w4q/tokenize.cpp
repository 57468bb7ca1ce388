// w4q tokenize MODEL text.txt -o ids.u16
#include <iostream>
#include <memory>

#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "io/files.h"
#include "io/output.h"
#include "tokenizer/token_file.h"
#include "tokenizer/tokenizer.h"

namespace w4q::app {
namespace {

struct Options {
  CommonOptions common;
  std::string model;
  std::string text;
  std::string output;
  bool bos = false;
  bool overwrite = false;
};

int run(const Options& options) {
  apply(options.common);
  const auto tokenizer = tokenizer::Tokenizer::open(options.model);
  io::check_writable(options.output, options.overwrite, {options.model, options.text});
  const std::string text = io::read_file(options.text);
  const auto ids = tokenizer.encode(text, options.bos);
  const auto width = tokenizer::id_width(options.output, tokenizer.vocab_size());
  io::write_file(options.output, tokenizer::encode_ids(ids, width), options.overwrite, {options.model, options.text});
  const io::Json json = {{"tokens", ids.size()}, {"bytes", text.size()}, {"id_bits", 8 * width}};
  print(options.common,
        concat(ids.size(), " tokens from ", text.size(), " bytes, written as uint", 8 * width, " little endian\n"),
        json);
  return 0;
}

}  // namespace

void setup_tokenize(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("tokenize", "Turn a text into token ids");
  auto options = std::make_shared<Options>();
  command->add_option("model", options->model, "Folder with tokenizer.json")->required();
  command->add_option("text", options->text, "UTF-8 text file, encoded in one piece")->required();
  command->add_option("-o,--output", options->output, "File of token ids: .u16, .u32, or by the size of the vocabulary")
      ->required();
  command->add_flag("--bos", options->bos, "Add the special tokens of the tokenizer's template (BOS for Llama)");
  command->add_flag("--overwrite", options->overwrite, "Replace an existing file, but never an input");
  add_common(*command, options->common);
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
