// Pages that were lost: stretches of one byte, 0 or 255, where a tensor's rows have none, as truncated downloads,
// sparse copies, torn writes and erased blocks leave them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "verify/report.h"

namespace w4q::verify {

/// A page of a file system: what is lost is at least that.
inline constexpr size_t page_bytes = 4096;

/// First and behind the last byte.
struct ByteRun {
  size_t begin = 0, end = 0;
  std::byte byte{0};
};

/// All stretches of zeros, or of bytes of 255, that are as long as a page, in order. Reads one word in every quarter of a page
/// of bytes that have none.
std::vector<ByteRun> byte_runs(std::span<const std::byte> bytes);

/// The stretch that is no part of how the tensor is made, in words; empty: there is none. Zero rows, and zeros in the same
/// columns of many rows, may be meant: what is lost begins or ends within a row. `row_bytes`: of a row.
std::string lost_page(std::span<const ByteRun> runs, size_t bytes, size_t row_bytes);

/// Every matrix as it is stored, whatever holds it; and routers, none of whose rows may be zero where no other router
/// has such rows.
Check check_zero_pages(const checkpoint::Folder& headers);

}  // namespace w4q::verify
