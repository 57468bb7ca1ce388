#include "device/loaded_library.h"

#include <dlfcn.h>

#include <utility>

namespace w4q::device {

LoadedLibrary::LoadedLibrary(std::string name, const char* built_with)
    : name_(std::move(name)), library_(dlopen(name_.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (library_ != nullptr) return;
  why_ = dlerror();
  library_ = dlopen(built_with, RTLD_NOW | RTLD_LOCAL);
  if (library_ != nullptr) why_.clear();
}

void* LoadedLibrary::symbol(const char* name) {
  if (library_ == nullptr) return nullptr;
  void* const found = dlsym(library_, name);
  if (found == nullptr) why_ = name_ + " lacks a function";
  return found;
}

}  // namespace w4q::device
