// The shapes of JSON that commands print. docs/schema/NAME.json describes each; the tests of the command line hold whatever
// they read against it.
#pragma once

#include <string_view>

namespace w4q::app {

/// The version counts up where a reader of the one before would stumble: a key gone, or with another meaning.
struct JsonSchema {
  std::string_view name;
  int version = 1;
};

namespace schema {

inline constexpr JsonSchema quantize{"quantize"}, quantize_to{"quantize-to"}, plan{"plan"}, calibrate{"calibrate"},
    repack{"repack"}, convert{"convert"}, conversion{"conversion"}, verify{"verify"}, compare{"compare"},
    inspect{"inspect"}, inspect_packed{"inspect-packed"}, inspect_tensor{"inspect-tensor"},
    inspect_gguf{"inspect-gguf"}, inspect_gguf_tensor{"inspect-gguf-tensor"}, hash{"hash"}, clean{"clean"},
    list{"list"}, list_layouts{"list-layouts"}, list_dialects{"list-dialects"}, list_servers{"list-servers"},
    tokenize{"tokenize"}, tokenize_render{"tokenize-render"}, generate{"generate"}, bench{"bench"}, doctor{"doctor"},
    report{"report"};

}  // namespace schema
}  // namespace w4q::app
