// Any bytes as a GGUF file. Whatever is accepted must lie in the file, and its header must come back when it is written
// and read again. A tokenizer made of its metadata must be one that can be written back.
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "gguf/tokenizer.h"
#include "io/gguf.h"

namespace {

using namespace w4q;

void require(bool condition) {
  if (!condition) std::abort();
}

bool is_about_the_file(const Error& error) {
  return error.code() == ErrorCode::bad_file || error.code() == ErrorCode::unsupported;
}

void check(const io::GgufHeader& header, uint64_t file_size) {
  for (const auto& tensor : header.tensors) {
    require(tensor.offset % header.alignment == 0);
    require(header.data_begin + tensor.offset + tensor.size <= file_size);
  }
  // The place of the data is computed from the header alone, so the header must be exactly as long as it was.
  std::string again = io::serialize_gguf_header(header);
  require(again.size() == header.data_begin);
  if (header.file_size() > (uint64_t{1} << 24)) return;  // a large alignment; keeps each run short
  again.resize(header.file_size());
  const auto copy = io::parse_gguf(std::as_bytes(std::span(again)), "copy");
  require(copy.tensors.size() == header.tensors.size() && copy.metadata.size() == header.metadata.size());
  require(io::serialize_gguf_header(copy) == again.substr(0, header.data_begin));
}

void convert_tokenizer(const io::GgufMetadata& metadata) {
  const auto files = gguf::tokenizer_from_gguf(gguf::GgufKeys(metadata, "file"));
  model::ModelConfig config;
  config.vocab_size = 4096;
  std::vector<std::string> notes;
  try {
    gguf::tokenizer_to_gguf(files, config, notes);
  } catch (const Error& error) {
    require(is_about_the_file(error) || error.code() == ErrorCode::mismatch);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto header = io::parse_gguf(std::as_bytes(std::span(data, size)), "file");
    check(header, size);
    convert_tokenizer(header.metadata);
  } catch (const Error& error) {
    require(is_about_the_file(error));
  }
  return 0;
}
