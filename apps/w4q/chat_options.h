// The options with which conversations are given, for the commands that decode text.
#pragma once

#include <CLI/CLI.hpp>
#include <vector>

#include "chat/chat_text.h"

namespace w4q::app {

/// Why --bos is refused beside it.
inline constexpr const char* bos_beside_chat =
    "--bos and --chat exclude each other: the chat template writes BOS itself";

/// Adds --chat, which takes the place of the options `others`, and --chat-date. Gives --chat.
CLI::Option* add_chat(CLI::App& command, chat::ChatFile& file, const std::vector<CLI::Option*>& others);

}  // namespace w4q::app
