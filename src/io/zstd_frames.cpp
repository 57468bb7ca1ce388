#include "io/zstd_frames.h"

#include <fcntl.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>

#include "core/interrupt.h"
#include "core/parallel.h"
#include "core/text.h"
#include "io/mapped_file.h"
#include "io/system.h"

namespace w4q::io {
namespace {

constexpr uint32_t skippable_magic = 0x184D2A5E;
constexpr uint32_t footer_magic = 0x8F92EAB1;
constexpr size_t footer_bytes = 9;  // frame count, descriptor, magic
constexpr size_t skippable_header_bytes = 8;
constexpr uint64_t max_frames = 0x8000000;

/// The smallest zstd block has 4 bytes and stands for at most 128 KiB, so no frame expands more than this.
constexpr uint64_t max_expansion = (128 << 10) / 4;

/// Content bytes below which starting another thread costs more than it saves.
constexpr uint64_t worth_a_thread = 1 << 20;

Error damaged(std::string_view file, std::string_view problem) {
  return {ErrorCode::bad_file, concat(shown(file), ": ", problem)};
}

uint32_t read_u32(std::span<const std::byte> bytes) {
  uint32_t value = 0;
  for (size_t i = 4; i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

void append_u32(std::string& bytes, uint64_t value) {
  for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(value >> shift & 0xFF);
}

void add_frame(SeekTable& table, uint64_t file_size, uint64_t content_size, std::string_view file) {
  if (file_size == 0 || content_size / max_expansion > file_size) {
    throw damaged(file, "impossible frame size")
        .detail(concat("frame ", table.file.size() - 1, " claims ", content_size, " bytes from ", file_size));
  }
  table.file.push_back(table.file.back() + file_size);
  table.content.push_back(table.content.back() + content_size);
}

/// Frame by frame, for a file that has no table.
SeekTable walk_frames(std::span<const std::byte> compressed, std::string_view file) {
  SeekTable table{{0}, {0}};
  for (auto rest = compressed; !rest.empty();) {
    const size_t size = ZSTD_findFrameCompressedSize(rest.data(), rest.size());
    if (ZSTD_isError(size)) throw damaged(file, concat("damaged zstd frame: ", ZSTD_getErrorName(size)));
    const auto content = ZSTD_getFrameContentSize(rest.data(), rest.size());
    if (content == ZSTD_CONTENTSIZE_ERROR) throw damaged(file, "is not a zstd file");
    if (content == ZSTD_CONTENTSIZE_UNKNOWN) {
      throw damaged(file, "its zstd frames do not state their sizes")
          .hint("compress the file itself rather than a stream, so that zstd knows its size");
    }
    add_frame(table, size, content, file);
    rest = rest.subspan(size);
  }
  return table;
}

bool has_seek_table(std::span<const std::byte> compressed) {
  return compressed.size() >= footer_bytes + skippable_header_bytes && read_u32(compressed.last(4)) == footer_magic;
}

struct Free {
  void operator()(ZSTD_CCtx* context) const noexcept { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const noexcept { ZSTD_freeDCtx(context); }
};

/// Decompresses one frame of `content_size` bytes and keeps those in [skip, skip + out.size()). The frame is read to
/// its end, where its checksum stands; what is not wanted passes through a small buffer, so that a huge frame needs no
/// more memory than a small one.
void read_frame(std::span<const std::byte> frame, uint64_t content_size, uint64_t skip, std::span<std::byte> out,
                std::string_view file) {
  const std::unique_ptr<ZSTD_DCtx, Free> context(ZSTD_createDCtx());
  if (!context) throw std::bad_alloc();
  std::vector<std::byte> unwanted;
  ZSTD_inBuffer input{frame.data(), frame.size(), 0};
  uint64_t produced = 0;
  size_t status = 1;
  while (status != 0) {
    const bool wanted = produced >= skip && produced < skip + out.size();
    ZSTD_outBuffer output{};
    if (wanted) {
      output.dst = out.data() + (produced - skip);
      output.size = out.size() - (produced - skip);
    } else {
      unwanted.resize(ZSTD_DStreamOutSize());
      output.dst = unwanted.data();
      output.size = std::min<uint64_t>(unwanted.size(), produced < skip ? skip - produced : unwanted.size());
    }
    const size_t consumed = input.pos;
    status = ZSTD_decompressStream(context.get(), &output, &input);
    if (ZSTD_isError(status)) throw damaged(file, concat("damaged zstd frame: ", ZSTD_getErrorName(status)));
    produced += output.pos;
    const bool stuck = output.pos == 0 && input.pos == consumed && status != 0;
    if (stuck || produced > content_size) break;
  }
  if (status != 0 || produced != content_size || input.pos != input.size) {
    throw damaged(file, "a zstd frame does not hold what its seek table says")
        .detail(concat("expected ", content_size, " bytes, found ", produced > content_size ? "more" : "another size"));
  }
}

std::span<const std::byte> as_bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string seek_table_bytes(const SeekTable& table) {
  const size_t frames = table.file.size() - 1;
  std::string bytes;
  append_u32(bytes, skippable_magic);
  append_u32(bytes, frames * 8 + footer_bytes);
  for (size_t i = 0; i < frames; ++i) {
    append_u32(bytes, table.file[i + 1] - table.file[i]);
    append_u32(bytes, table.content[i + 1] - table.content[i]);
  }
  append_u32(bytes, frames);
  bytes += '\0';  // descriptor: the table has no checksums, the frames have their own
  append_u32(bytes, footer_magic);
  return bytes;
}

/// One frame with a checksum.
std::string compress_bytes(std::span<const std::byte> content, int level) {
  const std::unique_ptr<ZSTD_CCtx, Free> context(ZSTD_createCCtx());
  if (!context) throw std::bad_alloc();
  ZSTD_CCtx_setParameter(context.get(), ZSTD_c_compressionLevel, level);
  ZSTD_CCtx_setParameter(context.get(), ZSTD_c_checksumFlag, 1);
  std::string frame(ZSTD_compressBound(content.size()), '\0');
  const size_t size = ZSTD_compress2(context.get(), frame.data(), frame.size(), content.data(), content.size());
  ensure(!ZSTD_isError(size), "compressing a zstd frame failed");
  frame.resize(size);
  frame.shrink_to_fit();
  return frame;
}

}  // namespace

SeekTable read_seek_table(std::span<const std::byte> compressed, std::string_view file_name) {
  if (!has_seek_table(compressed)) return walk_frames(compressed, file_name);
  const auto footer = compressed.last(footer_bytes);
  const uint64_t frames = read_u32(footer);
  const auto descriptor = static_cast<uint8_t>(footer[4]);
  const uint64_t entry_bytes = descriptor & 0x80 ? 12 : 8;
  const uint64_t payload = frames * entry_bytes + footer_bytes;
  if ((descriptor & 0x7C) != 0) throw damaged(file_name, "its seek table uses reserved bits");
  if (frames > max_frames || payload + skippable_header_bytes > compressed.size()) {
    throw damaged(file_name, concat("its seek table lists ", frames, " frames, more than the file can hold"));
  }
  const uint64_t table_begin = compressed.size() - payload - skippable_header_bytes;
  const auto header = compressed.subspan(table_begin);
  if (read_u32(header) != skippable_magic || read_u32(header.subspan(4)) != payload) {
    throw damaged(file_name, "its seek table has a damaged header");
  }
  SeekTable table{{0}, {0}};
  table.file.reserve(frames + 1);
  table.content.reserve(frames + 1);
  auto entries = header.subspan(skippable_header_bytes);
  for (uint64_t i = 0; i < frames; ++i, entries = entries.subspan(entry_bytes)) {
    add_frame(table, read_u32(entries), read_u32(entries.subspan(4)), file_name);
  }
  if (table.file.back() != table_begin) {
    throw damaged(file_name, "its seek table does not fit the file")
        .detail(concat("the frames of the table have ", table.file.back(), " bytes, the file has ", table_begin));
  }
  return table;
}

void read_range(std::span<const std::byte> compressed, const SeekTable& table, uint64_t begin, std::span<std::byte> out,
                std::string_view file_name) {
  if (out.empty()) return;
  ensure(begin <= table.content_size() && out.size() <= table.content_size() - begin,
         "read_range: outside the content");
  const uint64_t end = begin + out.size();
  // The frames [first, last) hold the range.
  const auto& starts = table.content;
  const auto first = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
  const auto last = std::lower_bound(starts.begin(), starts.end(), end) - starts.begin();
  const auto grain = static_cast<int64_t>(static_cast<uint64_t>(last - first) * worth_a_thread / out.size());
  parallel_for(last - first, grain, [&](int64_t from, int64_t to) {
    for (auto i = static_cast<size_t>(first + from); i < static_cast<size_t>(first + to); ++i) {
      if (starts[i] == starts[i + 1]) continue;  // empty or skippable
      const uint64_t wanted_begin = std::max(begin, starts[i]);
      const uint64_t wanted_end = std::min(end, starts[i + 1]);
      read_frame(compressed.subspan(table.file[i], table.file[i + 1] - table.file[i]), starts[i + 1] - starts[i],
                 wanted_begin - starts[i], out.subspan(wanted_begin - begin, wanted_end - wanted_begin), file_name);
    }
  });
}

void compress_file(const std::filesystem::path& from, const std::filesystem::path& to, int level, size_t frame_bytes) {
  ensure(frame_bytes > 0 && frame_bytes <= (size_t{1} << 30), "compress_file: frame size");
  const MappedFile source(from);
  const auto content = source.bytes();
  const size_t frames = (content.size() + frame_bytes - 1) / frame_bytes;
  if (frames > max_frames) throw damaged(shown(from), "too large for a seek table of such small frames");
  const FileDescriptor target = open_file(to, O_WRONLY | O_CREAT | O_EXCL);
  SeekTable table{{0}, {0}};
  // A few frames at a time: compressed side by side, written in order.
  const size_t batch = static_cast<size_t>(threads()) * 4;
  std::vector<std::string> compressed(batch);
  for (size_t first = 0; first < frames; first += batch) {
    check_interrupt();
    const size_t count = std::min(batch, frames - first);
    const auto frame_at = [&](size_t i) {
      const size_t begin = (first + i) * frame_bytes;
      return content.subspan(begin, std::min(frame_bytes, content.size() - begin));
    };
    parallel_for(static_cast<int64_t>(count), 1, [&](int64_t i, int64_t) {
      compressed[static_cast<size_t>(i)] = compress_bytes(frame_at(static_cast<size_t>(i)), level);
    });
    for (size_t i = 0; i < count; ++i) {
      write_all(target, as_bytes(compressed[i]), table.file.back(), to);
      table.file.push_back(table.file.back() + compressed[i].size());
      table.content.push_back(table.content.back() + frame_at(i).size());
    }
    source.release(first * frame_bytes, count * frame_bytes);
  }
  write_all(target, as_bytes(seek_table_bytes(table)), table.file.back(), to);
  sync_file(target, to);
}

void decompress_file(const std::filesystem::path& from, const std::filesystem::path& to) {
  const MappedFile source(from);
  const SeekTable table = read_seek_table(source.bytes(), shown(from));
  const FileDescriptor target = open_file(to, O_WRONLY | O_CREAT | O_TRUNC);
  std::vector<std::byte> piece(std::min<uint64_t>(table.content_size(), 16 * default_frame_bytes));
  for (uint64_t begin = 0; begin < table.content_size(); begin += piece.size()) {
    check_interrupt();
    const auto part = std::span(piece).first(std::min<uint64_t>(piece.size(), table.content_size() - begin));
    read_range(source.bytes(), table, begin, part, shown(from));
    write_all(target, part, begin, to);
  }
}

}  // namespace w4q::io
