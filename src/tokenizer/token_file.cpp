#include "tokenizer/token_file.h"

#include "core/error.h"
#include "core/text.h"
#include "io/files.h"

namespace w4q::tokenizer {
namespace {

constexpr int64_t max_id_file_bytes = int64_t{1} << 34;

}  // namespace

int id_width(const std::filesystem::path& path, int64_t vocab_size) {
  if (path.extension() == ".u16") return 2;
  if (path.extension() == ".u32") return 4;
  return vocab_size <= 65536 ? 2 : 4;
}

std::string encode_ids(std::span<const int32_t> ids, int width) {
  std::string bytes;
  bytes.reserve(ids.size() * static_cast<size_t>(width));
  for (const int32_t id : ids) {
    if (width == 2 && id > 0xFFFF) {
      throw Error(ErrorCode::bad_argument, concat("token id ", id, " does not fit uint16"))
          .hint("name the output *.u32");
    }
    for (int byte = 0; byte < width; ++byte)
      bytes.push_back(static_cast<char>(static_cast<uint32_t>(id) >> (8 * byte)));
  }
  return bytes;
}

std::vector<int32_t> read_ids(const std::filesystem::path& path, int64_t vocab_size) {
  const std::string bytes = io::read_file(path, max_id_file_bytes);
  const auto width = static_cast<size_t>(id_width(path, vocab_size));
  if (bytes.size() % width != 0) {
    throw Error(ErrorCode::bad_file,
                concat(path.string(), ": ", bytes.size(), " bytes are no whole number of uint", 8 * width))
        .hint("the file was cut short, or its ids have another width (name it .u16 or .u32)");
  }
  std::vector<int32_t> ids(bytes.size() / width);
  for (size_t i = 0; i < ids.size(); ++i) {
    uint32_t id = 0;
    for (size_t byte = 0; byte < width; ++byte)
      id |= uint32_t{static_cast<uint8_t>(bytes[i * width + byte])} << (8 * byte);
    if (id >= vocab_size) {
      throw Error(ErrorCode::bad_file,
                  concat(path.string(), ": token ", i, " is ", id, ", outside the vocabulary of ", vocab_size))
          .hint("the ids were made with another tokenizer or another width");
    }
    ids[i] = static_cast<int32_t>(id);
  }
  return ids;
}

}  // namespace w4q::tokenizer
