// A chat template from a stranger: it is refused with an Error, or it renders a conversation or refuses that.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "chat/jinja/template.h"
#include "core/error.h"
#include "io/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using w4q::jinja::Template;
  static const w4q::io::Json variables = w4q::io::Json::parse(R"({
    "messages": [{"role": "system", "content": " Be kind.\n"}, {"role": "user", "content": "1 < 2 & \"3\"? \u00e9\ud83d\ude42"},
                 {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5, true]}}}]}],
    "tools": [{"name": "f", "parameters": {"type": "object"}}], "bos_token": "<s>", "n": 3, "add_generation_prompt": false})");
  try {
    const Template chat = Template::parse({reinterpret_cast<const char*>(data), size}, "input");
    chat.render(variables, "2025-01-31", {.steps = 200'000, .bytes = 50'000'000});
  } catch (const w4q::Error&) {
  }
  return 0;
}
