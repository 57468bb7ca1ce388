// How a process learns that it is one of several, and the library through which it speaks to the others.
#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <initializer_list>

#include "core/text.h"
#include "ranks/connect.h"
#include "ranks/local.h"
#include "ranks/ranks.h"

namespace w4q::ranks {
namespace {

namespace fs = std::filesystem;

std::optional<int> number(const char* variable) {
  const char* text = std::getenv(variable);
  int value = 0;
  if (text == nullptr || std::from_chars(text, text + std::strlen(text), value).ec != std::errc()) return std::nullopt;
  return value;
}

/// The first of the variables that holds a number: of tasks on each node Slurm says "4(x2),3".
std::optional<int> first_number(std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    const char* text = std::getenv(variable);
    int value = 0;
    if (text != nullptr && std::from_chars(text, text + std::strlen(text), value).ec == std::errc()) return value;
  }
  return std::nullopt;
}

/// Its place among those on this machine, as the launcher has it.
Launched with_place(Launched found) {
  const auto rank = first_number({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"});
  const auto size = first_number({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"});
  const bool known = rank && size && *rank >= 0 && *rank < found.size && *size >= 1;
  found.local_rank = known ? *rank : found.rank;
  found.local_size = known ? std::max(*size, *rank + 1) : found.size;
  return found;
}

/// Where launchers write down rank and size: Open MPI's mpirun; those that speak PMI; srun --mpi=pmix. Slurm's own
/// variables alone say nothing: a program that a batch script starts by itself has them too.
struct Row {
  const char *size, *rank, *needs;
};
constexpr Row launchers[] = {{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", nullptr},
                             {"PMI_SIZE", "PMI_RANK", nullptr},
                             {"SLURM_STEP_NUM_TASKS", "PMIX_RANK", "PMIX_NAMESPACE"}};

#ifdef W4Q_MPI_LIBRARY
/// Beside the program, as it is built, or where it is installed.
void* open_library(std::string& why) {
  std::error_code unknown;
  const fs::path folder = fs::read_symlink("/proc/self/exe", unknown).parent_path();
  for (const fs::path& path :
       {folder / W4Q_MPI_LIBRARY, folder.parent_path() / W4Q_MPI_FOLDER / W4Q_MPI_LIBRARY, fs::path(W4Q_MPI_LIBRARY)}) {
    // Open MPI's own components look for its symbols among those of the program.
    if (void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) return library;
    const bool there = fs::exists(path, unknown);
    if (why.empty() || there) why = ::dlerror();
    if (there) break;
  }
  return nullptr;
}
#endif

Error unable(const Launched& found, std::string_view problem) {
  return {ErrorCode::unsupported,
          concat("started as one of ", found.size, " processes (", found.variable, "), ", problem)};
}

}  // namespace

std::optional<Launched> launched() {
  if (auto found = forked_here()) return found;
  for (const Row& row : launchers) {
    const auto size = number(row.size), rank = number(row.rank);
    if (!size || !rank || (row.needs != nullptr && std::getenv(row.needs) == nullptr)) continue;
    if (*size > 1) return with_place({*rank, *size, row.size});
  }
  return std::nullopt;
}

Transport& connect(const Launched& found) {
  if (forked_here()) return forked_transport();
#ifdef W4Q_MPI_LIBRARY
  std::string why;
  void* const library = open_library(why);
  if (library == nullptr) throw unable(found, "and MPI cannot be loaded").detail(why);
  const auto open = reinterpret_cast<OpenTransport>(::dlsym(library, "w4q_open_transport"));
  Transport* const transport = open != nullptr ? open() : nullptr;
  if (transport == nullptr) throw unable(found, "and MPI cannot be started (MPI_THREAD_SERIALIZED)");
  if (transport->size() == found.size) return *transport;
  throw unable(found, concat("and MPI knows of ", transport->size()))
      .hint("use the mpirun of the MPI that w4q was built with, or srun --mpi=pmix");
#else
  throw unable(found, "but this w4q was built without MPI")
      .hint("start it by itself, or build it where MPI is installed (docs/scale.md)");
#endif
}

}  // namespace w4q::ranks
