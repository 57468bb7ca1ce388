// tokenizer.json from a stranger: it is refused with an Error, or it encodes and decodes a text.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/error.h"
#include "tokenizer/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tokenizer::Tokenizer;
  try {
    const Tokenizer tokenizer = Tokenizer::parse({reinterpret_cast<const char*>(data), size}, "input");
    const auto ids = tokenizer.encode("A small text:  it's 42\xC2\xA0\xF0\x9F\x99\x82\xFF <s>\r\n", true);
    tokenizer.decode(ids, false);
    tokenizer.decode(ids, true);
  } catch (const w4q::Error&) {
  }
  return 0;
}
