// NCCL: messages between the GPUs of several processes. It is opened when it is first asked for, so that a program by
// itself neither needs nor starts it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "device/context.h"
#include "device/stream.h"

namespace w4q::device {

/// Whether it can be loaded; if not, `why`.
bool have_nccl(std::string* why = nullptr);
/// "NCCL 2.28.9".
std::string nccl_version();
/// What one process makes and hands to all that are to be one group.
std::string new_nccl_group();

/// Where a GPU is on its machine, whatever number a process knows it by.
std::string gpu_address(const Context& gpu);

/// Of processes that have a GPU each. Nobody waits for ever: whoever waits for the others calls check_interrupt(), and
/// what it throws ends the group on this side, as an error does.
class NcclGroup {
 public:
  /// By all of them together, and so it goes, but where an exception is on its way. The context must outlive it. Throws
  /// device.
  NcclGroup(Context& gpu, const std::string& group, int rank, int size);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  /// What is sent and received between these two goes together, in whatever order; end() waits until it is done and the
  /// stream is empty. Each send has a receive of as many bytes at the other process, and memory is the GPU's.
  void begin();
  void send(const void* data, size_t bytes, int to, const Stream& stream);
  void receive(void* data, size_t bytes, int from, const Stream& stream);
  void end(const Stream& stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::device
