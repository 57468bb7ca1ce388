// Any bytes as a safetensors file, and as a file compressed in seekable frames.
//
// Whatever is accepted must be consistent: tensors without gap or overlap that end with the file. And it must come back
// when its header is written and read again.
#include <algorithm>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "io/safetensors.h"
#include "io/zstd_frames.h"

namespace {

using namespace w4q;

void require(bool condition) {
  if (!condition) std::abort();
}

void check(const io::SafetensorsHeader& header, uint64_t file_size) {
  uint64_t run = 0;
  for (const auto& tensor : header.tensors) {
    require(tensor.begin == run && tensor.end >= run);
    require(static_cast<uint64_t>(byte_count(tensor.dtype, tensor.shape)) == tensor.size());
    run = tensor.end;
  }
  require(header.data_begin + run == file_size);

  const std::string again = io::serialize_safetensors_header(header);
  const auto copy = io::parse_safetensors(std::as_bytes(std::span(again)), again.size() + run, "copy");
  require(copy.tensors.size() == header.tensors.size() && copy.metadata == header.metadata);
  for (size_t i = 0; i < copy.tensors.size(); ++i) require(copy.tensors[i].begin == header.tensors[i].begin);
}

void read_header(std::span<const std::byte> file) {
  try {
    check(io::parse_safetensors(file, file.size(), "file"), file.size());
  } catch (const Error& error) {
    require(error.code() == ErrorCode::bad_file);
  }
}

void read_frames(std::span<const std::byte> file) {
  constexpr uint64_t most = 1 << 20;  // keeps each run short: a few bytes may expand to gigabytes
  try {
    const auto table = io::read_seek_table(file, "file.zst");
    std::vector<std::byte> content(std::min(table.content_size(), most));
    if (table.content_size() <= most) io::read_range(file, table, 0, content, "file.zst");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::bad_file);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = std::as_bytes(std::span(data, size));
  read_header(file);
  read_frames(file);
  return 0;
}
