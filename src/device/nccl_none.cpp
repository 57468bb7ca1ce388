#include "core/error.h"
#include "device/nccl.h"

namespace w4q::device {
namespace {

[[noreturn]] void refuse() { throw Error(ErrorCode::device, "this program was built without NCCL"); }

}  // namespace

bool have_nccl(std::string* why) {
  if (why != nullptr) *why = "this program was built without NCCL";
  return false;
}

std::string nccl_version() { refuse(); }
std::string new_nccl_group() { refuse(); }
std::string gpu_address(const Context&) { refuse(); }

struct NcclGroup::Impl {};
NcclGroup::NcclGroup(Context&, const std::string&, int, int) { refuse(); }
NcclGroup::~NcclGroup() = default;
void NcclGroup::begin() { refuse(); }
void NcclGroup::send(const void*, size_t, int, const Stream&) { refuse(); }
void NcclGroup::receive(void*, size_t, int, const Stream&) { refuse(); }
void NcclGroup::end(const Stream&) { refuse(); }

}  // namespace w4q::device
