// Copies and fills on a stream. They are queued: the host's bytes must stay until the stream is synchronised. `doing`
// says in messages what failed.
#pragma once

#include <cstddef>
#include <string_view>

#include "device/stream.h"

namespace w4q::device {

enum class Way { to_gpu, from_gpu, on_gpu };

void copy(Way way, void* to, const void* from, size_t bytes, const Stream& stream, std::string_view doing);

/// Rows that begin `stride` bytes after each other.
struct Rows {
  void* data;
  size_t stride;
};
struct ConstRows {
  const void* data;
  size_t stride;
};
/// Copies the first `bytes` bytes of each of `count` rows.
void copy_rows(Way way, Rows to, ConstRows from, size_t bytes, size_t count, const Stream& stream,
               std::string_view doing);

/// Sets bytes of GPU memory to `value`.
void fill(void* data, int value, size_t bytes, const Stream& stream, std::string_view doing);

}  // namespace w4q::device
