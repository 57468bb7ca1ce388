// w4q tokenize MODEL text.txt -o ids.u16
#include <iostream>
#include <memory>

#include "chat_options.h"
#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "io/files.h"
#include "io/output.h"
#include "tokenizer/token_file.h"
#include "tokenizer/tokenizer.h"

namespace w4q::app {
namespace {

struct TokenizeOptions {
  CommonOptions common;
  std::string model;
  std::string text;
  chat::ChatFile chat;
  std::string output;
  bool render = false;
  bool bos = false;
  bool overwrite = false;
};

void check_usage(const TokenizeOptions& options) {
  const auto refuse = [](const char* what, const char* hint) { throw Error(ErrorCode::bad_argument, what).hint(hint); };
  if (options.text.empty() && options.chat.empty()) refuse("there is no text", "give text.txt, or --chat chats.jsonl");
  if (options.output.empty() && !options.render) refuse("-o FILE is required", "-o ids.u16, or --chat FILE --render");
}

/// Conversations as the model sees them, to look at.
int show(const TokenizeOptions& options) {
  std::string all;
  io::Json texts = io::Json::array();
  chat::render_chats(options.model, options.chat, [&](const std::string& text) {
    all += text;
    texts.push_back(text);
  });
  print(options.common, schema::tokenize_render, all, {{"texts", texts}});
  return 0;
}

int run(const TokenizeOptions& options) {
  apply(options.common);
  check_usage(options);
  if (options.render) return show(options);
  const auto tokenizer = tokenizer::Tokenizer::open(options.model);
  const std::filesystem::path source = options.chat.empty() ? std::filesystem::path(options.text) : options.chat.path;
  io::check_writable(options.output, options.overwrite, {options.model, source});
  size_t bytes = 0;
  std::vector<int32_t> ids;
  if (options.chat.empty()) {
    const std::string text = io::read_file(source);
    bytes = text.size();
    ids = tokenizer.encode(text, options.bos);
  } else {
    ids = chat::encode_chats(tokenizer, options.model, options.chat, &bytes);
  }
  const auto width = tokenizer::id_width(options.output, tokenizer.vocab_size());
  io::write_file(options.output, tokenizer::encode_ids(ids, width), options.overwrite, {options.model, source});
  const io::Json json = {{"tokens", ids.size()}, {"bytes", bytes}, {"id_bits", 8 * width}};
  print(options.common, schema::tokenize,
        concat(ids.size(), " tokens from ", bytes, " bytes, written as uint", 8 * width, " little endian\n"), json);
  return 0;
}

}  // namespace

void setup_tokenize(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("tokenize", "Turn a text into token ids");
  auto options = std::make_shared<TokenizeOptions>();
  command->add_option("model", options->model, "Folder with tokenizer.json")->required();
  auto* text = command->add_option("text", options->text, "UTF-8 text file, encoded in one piece");
  auto* chat = add_chat(*command, options->chat, {text});
  auto* output = command
                     ->add_option("-o,--output", options->output,
                                  "File of token ids: .u16, .u32, or by the size of the vocabulary")
                     ->type_name("FILE");
  command->add_flag("--render", options->render, "Print the conversations as the model sees them, instead of ids")
      ->needs(chat)
      ->excludes(output);
  command->add_flag("--bos", options->bos, "Add the special tokens of the tokenizer's template (BOS for Llama)")
      ->excludes(chat);
  command->add_flag("--overwrite", options->overwrite, "Replace an existing file, but never an input");
  add_common(*command, options->common);
  set_examples(*command, {{"tokenize MODEL text.txt -o ids.u16", "token ids, for verify --ids"},
                          {"tokenize MODEL --chat chats.jsonl --render", "conversations as the model sees them"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
