// Any bytes as a config.json. Whatever is accepted must hold the few facts that all later arithmetic leans on.
#include <cstdlib>
#include <string_view>

#include "checkpoint/packed_checkpoint.h"
#include "core/error.h"
#include "io/json.h"
#include "model/config.h"

namespace {

using namespace w4q;

void require(bool condition) {
  if (!condition) std::abort();
}

/// Runs `reader`; a refusal must be one that blames the file.
template <class Reader>
void read(Reader&& reader) {
  try {
    reader();
  } catch (const Error& error) {
    require(error.code() == ErrorCode::bad_file || error.code() == ErrorCode::unsupported);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read([&] {
    const io::Json json = io::parse_json(text, "config.json");
    read([&] {
      const auto config = model::parse_config(json, "config.json");
      require(config.layers > 0 && config.heads > 0 && config.kv_heads > 0 && config.head_dim > 0);
      require(config.heads % config.kv_heads == 0 && config.vocab_size > 0 && config.hidden_size > 0);
      require(config.sliding_window.size() == static_cast<size_t>(config.layers));
    });
    read([&] {
      const auto quantization = checkpoint::parse_quantization_config(json, "config.json");
      io::Json again = json;
      if (!quantization.linears.empty()) checkpoint::write_quantization_config(quantization, again);
    });
  });
  return 0;
}
