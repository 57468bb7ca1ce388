#include "device/nccl.h"

#include <nccl.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/text.h"
#include "device/check.h"
#include "device/loaded_library.h"

namespace w4q::device {
namespace {

/// The functions in use, with the types of the header.
struct NcclLibrary {
  LoadedLibrary loaded{concat("libnccl.so.", NCCL_MAJOR), W4Q_NCCL_LIBRARY};
  decltype(&ncclGetVersion) version = nullptr;
  decltype(&ncclGetUniqueId) unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init = nullptr;
  decltype(&ncclCommGetAsyncError) state = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclGetErrorString) describe = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;

  NcclLibrary() {
    loaded.find("ncclGetVersion", version);
    loaded.find("ncclGetUniqueId", unique_id);
    loaded.find("ncclCommInitRankConfig", init);
    loaded.find("ncclCommGetAsyncError", state);
    loaded.find("ncclCommFinalize", finalize);
    loaded.find("ncclCommDestroy", destroy);
    loaded.find("ncclCommAbort", abort);
    loaded.find("ncclGetErrorString", describe);
    loaded.find("ncclGroupStart", group_start);
    loaded.find("ncclGroupEnd", group_end);
    loaded.find("ncclSend", send);
    loaded.find("ncclRecv", receive);
  }

  void check(ncclResult_t status, std::string_view doing) const {
    if (status == ncclSuccess || status == ncclInProgress) return;
    throw Error(ErrorCode::device, concat(doing, ": NCCL: ", describe(status)))
        .hint("NCCL_DEBUG=WARN says more; W4Q_NCCL=0 goes by host memory instead");
  }
};

const NcclLibrary& nccl_library() {
  static const NcclLibrary instance;
  return instance;
}

/// Whether the environment forbids it.
bool forbidden() {
  const char* const word = std::getenv("W4Q_NCCL");
  return word != nullptr && std::string_view(word) == "0";
}

}  // namespace

bool have_nccl(std::string* why) {
  if (why != nullptr) *why = forbidden() ? "W4Q_NCCL=0" : nccl_library().loaded.why();
  return !forbidden() && nccl_library().loaded.why().empty();
}

std::string nccl_version() {
  int version = 0;
  nccl_library().check(nccl_library().version(&version), "asking for its version");
  return concat("NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::string new_nccl_group() {
  ncclUniqueId id;
  nccl_library().check(nccl_library().unique_id(&id), "beginning a group of GPUs");
  return {id.internal, sizeof id.internal};
}

std::string gpu_address(const Context& gpu) {
  std::array<char, 32> address{};
  check(cudaDeviceGetPCIBusId(address.data(), static_cast<int>(address.size()), gpu.ordinal()),
        "asking where a GPU is");
  return address.data();
}

struct NcclGroup::Impl {
  Impl() = default;
  ~Impl() {
    // Others may wait for this side, and hear only later that it has failed.
    const bool leaves = !broken && std::uncaught_exceptions() == 0 && left();
    if (group != nullptr) leaves ? nccl.destroy(group) : nccl.abort(group);
    if (finished != nullptr) cudaEventDestroy(finished);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  bool left() noexcept try {
    constexpr std::string_view doing = "leaving the GPUs of other ranks";
    nccl.check(nccl.finalize(group), doing);
    settle(doing);
    return true;
  } catch (const std::exception&) {  // the run ends, and says why elsewhere
    return false;
  }

  /// Returns once nothing is under way on the host, or `done()`.
  template <class Done>
  void wait(const Done& done, std::string_view doing) {
    for (int round = 0;; ++round) {
      ncclResult_t state = ncclSuccess;
      nccl.check(nccl.state(group, &state), doing);
      nccl.check(state, doing);
      if (state != ncclInProgress && done()) return;
      check_interrupt();
      constexpr int quick = 256;
      if (round >= quick) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  void settle(std::string_view doing) {
    wait([] { return true; }, doing);
  }

  const NcclLibrary& nccl = nccl_library();
  ncclComm_t group = nullptr;
  cudaEvent_t finished = nullptr;
  bool broken = true;  // not joined yet, or something was begun that has not ended
};

NcclGroup::NcclGroup(Context& gpu, const std::string& group, int rank, int size) : impl_(std::make_unique<Impl>()) {
  const NcclLibrary& nccl = impl_->nccl;
  ncclUniqueId id;
  ensure(group.size() == sizeof id.internal, "NcclGroup: not a group");
  std::memcpy(id.internal, group.data(), sizeof id.internal);
  make_current(gpu.ordinal());
  check(cudaEventCreateWithFlags(&impl_->finished, cudaEventDisableTiming), "making an event");
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  constexpr std::string_view doing = "joining the GPUs of other ranks";
  nccl.check(nccl.init(&impl_->group, size, id, rank, &config), doing);
  impl_->settle(doing);
  impl_->broken = false;
}

NcclGroup::~NcclGroup() = default;

void NcclGroup::begin() {
  impl_->broken = true;
  impl_->nccl.check(impl_->nccl.group_start(), "exchanging between GPUs");
}

void NcclGroup::send(const void* data, size_t bytes, int to, const Stream& stream) {
  impl_->nccl.check(impl_->nccl.send(data, bytes, ncclUint8, to, impl_->group, stream.get()), "sending between GPUs");
}

void NcclGroup::receive(void* data, size_t bytes, int from, const Stream& stream) {
  impl_->nccl.check(impl_->nccl.receive(data, bytes, ncclUint8, from, impl_->group, stream.get()),
                    "receiving between GPUs");
}

void NcclGroup::end(const Stream& stream) {
  constexpr std::string_view doing = "exchanging between GPUs";
  impl_->nccl.check(impl_->nccl.group_end(), doing);
  impl_->settle(doing);
  check(cudaEventRecord(impl_->finished, stream.get()), doing);
  impl_->wait(
      [&] {
        const cudaError_t status = cudaEventQuery(impl_->finished);
        if (status != cudaErrorNotReady) check(status, doing);
        return status == cudaSuccess;
      },
      doing);
  impl_->broken = false;
}

}  // namespace w4q::device
